"""Sizes as users write them, and as they are printed."""

from __future__ import annotations

from typing import Any

import pytest

from megacompile.errors import OptionError, OptionTypeError
from megacompile.sizes import parse_bytes
from megacompile.text import format_bytes

WRITTEN: dict[Any, int] = {
    0: 0,
    17: 17,
    0.25: 250,
    1.0: 1000,
    "20GiB": 20 * 2**30,
    "1.5 MiB": 3 * 2**19,
    "2GB": 2 * 10**9,
    "512 kib": 2**19,
    "7": 7,
    "7B": 7,
}
PRINTED = {  # with three digits
    0: "0 B",
    1: "1 B",
    999: "999 B",
    1000: "0.977 KiB",
    1024: "1 KiB",
    1536: "1.5 KiB",
    999 * 1024: "999 KiB",
    1000 * 1024: "0.977 MiB",
    445 * 2**20: "445 MiB",
    1.09 * 2**30: "1.09 GiB",
    22.04 * 2**30: "22 GiB",
    125 * 2**30: "125 GiB",
    1.5 * 2**40: "1.5 TiB",
    -2048: "-2 KiB",
}


def test_sizes_are_read_and_printed() -> None:
    total = 1000  # that shares are of
    for value, size in WRITTEN.items():
        assert parse_bytes("gpu_memory", value, total) == size, value
    assert parse_bytes("gpu_memory", 1, total) == 1
    for size_bytes, text in PRINTED.items():
        assert format_bytes(size_bytes) == text
    for exponent in (10, 20, 30):  # three digits of 999.7 KiB are those of 1000 KiB: of a MiB
        assert "e+" not in format_bytes(999.7 * 2**exponent)


@pytest.mark.parametrize("value", [-1, -0.5, 1.5, float("nan"), "20 bananas", "", "GiB", "-3GiB"])
def test_values_that_are_no_sizes(value: Any) -> None:
    with pytest.raises(OptionError, match="gpu_memory"):
        parse_bytes("gpu_memory", value, 1000)


@pytest.mark.parametrize("value", [True, None, [1], 1j])
def test_types_that_are_no_sizes(value: Any) -> None:
    with pytest.raises(OptionTypeError, match="gpu_memory"):
        parse_bytes("gpu_memory", value, 1000)
