"""The list of `python -m tests.faults` follows the product."""

from __future__ import annotations

from pathlib import Path

from tests.faults.fault import check
from tests.faults.listed import FAULTS


def test_every_fault_applies_and_compiles() -> None:
    check(FAULTS, Path(__file__).parents[2])
    assert len(FAULTS) >= 160
