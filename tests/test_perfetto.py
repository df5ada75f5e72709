"""The name that tests/test_cli.py still takes from here."""

from tests.trace_events import faults as faults
