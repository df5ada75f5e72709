"""The names that other tests still take from here; see tests/planning.py."""

from tests.planning import GIB as GIB
from tests.planning import Uneven as Tower  # noqa: F401
from tests.planning import uneven as program  # noqa: F401
from tests.planning import uneven_problem as problem  # noqa: F401
