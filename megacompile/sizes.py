"""Memory sizes as users write them."""

from __future__ import annotations

import re
from typing import Any

from megacompile.errors import OptionError, OptionTypeError

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_NEEDED = 'bytes (an int), a text such as "20GiB", or a fraction of what there is (0 < f <= 1)'


def parse_bytes(name: str, value: Any, total_bytes: int, *, words: str = "") -> int:
    """The bytes that an option's value stands for.

    Args:
        name: of the option, for errors.
        value: an int; a text: a number with B, KiB, MiB, GiB or TiB (GB and the like are powers of
            ten); or a float up to 1, a fraction of `total_bytes`.
        words: other values that the option takes, for errors: "'all', ".

    Raises:
        OptionError: a negative size, a unit that there is none of, a fraction above 1.
        OptionTypeError: neither a number nor a text.
    """
    needed = words + _NEEDED
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        kind = type(value).__name__
        raise OptionTypeError(
            f"megacompile(): option {name!r} got {value!r} ({kind}); needed {needed}"
        )
    if isinstance(value, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([KMGT]?)(i?)B?\s*", value, re.IGNORECASE)
        if found is None:
            raise OptionError(f"megacompile(): got {name}={value!r}; needed {needed}")
        number, unit, binary = found.groups()
        scale = _UNITS[unit.upper()]
        if unit and not binary:
            scale = 1000 ** list(_UNITS).index(unit.upper())
        return int(float(number) * scale)
    if isinstance(value, float):
        if not 0 <= value <= 1:  # nor nan
            raise OptionError(f"megacompile(): got {name}={value}; needed {needed}")
        return int(value * total_bytes)
    if value < 0:
        raise OptionError(f"megacompile(): got {name}={value}; needed {needed}")
    return value
