"""The names that tests/test_saving.py still takes from here."""

from tests.equality.test_initialize import configs as configs
from tests.equality.test_initialize import from_config as from_config
