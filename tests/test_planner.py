"""The names that other tests still take from here; see tests/planning.py."""

from tests.planning import Tower as Tower
from tests.planning import problem as problem
