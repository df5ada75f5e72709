"""The names that other tests still take from here; see tests/planning.py."""

from tests.planning import DISK as DISK
from tests.planning import GIB as GIB
from tests.planning import wide_problem as problem  # noqa: F401
