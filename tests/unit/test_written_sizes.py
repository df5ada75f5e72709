"""Sizes as users write them."""

from __future__ import annotations

from typing import Any

import pytest

from megacompile import Options
from megacompile.errors import OptionError, OptionTypeError

WRITTEN: dict[Any, int] = {
    17: 17,
    1: 1,
    "20GiB": 20 * 2**30,
    "1.5 MiB": 3 * 2**19,
    "2GB": 2 * 10**9,
    "512 kib": 2**19,
    "7": 7,
    "7B": 7,
}


def taken(value: Any) -> int:
    found = Options.resolve(device="cpu", host_memory=value).host_memory
    assert isinstance(found, int)
    return found


def test_sizes() -> None:
    for value, size in WRITTEN.items():
        assert taken(value) == size, value
    assert taken(0.25) == taken(1.0) // 4 > 2**20, "of what there is"
    for wrong in (-1, -0.5, 1.5, float("nan"), "20 bananas", "", "GiB", "-3GiB"):
        with pytest.raises(OptionError, match="host_memory"):
            taken(wrong)
    for other in (True, [1], 1j):
        with pytest.raises(OptionTypeError, match="host_memory"):
            taken(other)
