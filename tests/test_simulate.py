"""The name that other tests still take from here."""

from tests.unit.test_simulate import streamed as streamed
