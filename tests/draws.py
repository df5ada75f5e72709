"""Random tests: the draws that every run takes, and those that `make thorough` takes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st


def drawn(always: Iterable[Any], others: Iterable[Any]) -> list[Any]:
    """Values of a parametrization, `others` for `make thorough` alone."""
    return [*always, *(pytest.param(value, marks=pytest.mark.thorough) for value in others)]


def settings(count: int, *, shrink: bool = False, **more: Any) -> hypothesis.settings:
    """So many draws, which are the same each time; `shrink` what raises."""
    return hypothesis.settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[hypothesis.Phase.generate, *([hypothesis.Phase.shrink] if shrink else [])],
        suppress_health_check=list(hypothesis.HealthCheck),
        **more,
    )


def examples(
    use: Callable[..., None], *drawn: st.SearchStrategy[Any], count: int, seed: int, shrink: bool
) -> None:
    """Call a function with at most so many draws, by the seed."""
    made = settings(count, shrink=shrink)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hypothesis.seed(seed)(made(hypothesis.given(*drawn)(use)))()
