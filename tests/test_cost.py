"""The names that other tests still take from here."""

from tests.unit.test_cost import found as found
from tests.unit.test_cost import traced as traced
