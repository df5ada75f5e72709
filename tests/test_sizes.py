"""Sizes as users write them."""

from __future__ import annotations

from typing import Any

import pytest

from megacompile.errors import OptionError, OptionTypeError
from megacompile.sizes import parse_bytes

TOTAL = 1000


@pytest.mark.parametrize(
    ("value", "want"),
    [
        (0, 0),
        (17, 17),
        (0.25, 250),
        (1.0, 1000),
        ("20GiB", 20 * 2**30),
        ("1.5 MiB", 3 * 2**19),
        ("2GB", 2 * 10**9),
        ("512 kib", 2**19),
        ("7", 7),
        ("7B", 7),
    ],
)
def test_sizes(value: Any, want: int) -> None:
    assert parse_bytes("gpu_memory", value, TOTAL) == want


@pytest.mark.parametrize("value", [-1, -0.5, 1.5, float("nan"), "20 bananas", "", "GiB", "-3GiB"])
def test_values_that_are_no_sizes(value: Any) -> None:
    with pytest.raises(OptionError, match="gpu_memory=.*needed bytes"):
        parse_bytes("gpu_memory", value, TOTAL)


@pytest.mark.parametrize("value", [True, None, [1], 1j])
def test_types_that_are_no_sizes(value: Any) -> None:
    with pytest.raises(OptionTypeError, match="'gpu_memory' got"):
        parse_bytes("gpu_memory", value, TOTAL)
