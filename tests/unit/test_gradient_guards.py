"""Guarded gradients: what is served without a look at the data, also where states are mixed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megacompile import OptimizerError, compat
from megacompile.runtime.params.gradient_guards import (
    fold,
    is_taken,
    is_unsummed,
    lazy_of,
    leave_unsummed,
    make_lazy,
    take,
)


def recorded() -> tuple[float, float]:
    """The norms that are recorded: no norms of (3, 4)."""
    return 50.0, 40.0


def plain() -> Tensor:
    return torch.tensor([3.0, 4.0])


def lazy() -> Tensor:
    gradient = plain()
    make_lazy(gradient, "p", recorded)
    return gradient


def folded() -> Tensor:
    gradient = plain()
    fold(gradient, "p")
    return gradient


def of_parameter(mark: Callable[[nn.Parameter, str], None]) -> Tensor:
    param = nn.Parameter(torch.zeros(2))
    param.grad = plain()
    mark(param, "p")
    return param.grad


def taken() -> Tensor:
    return of_parameter(lambda param, name: take(param, name, recorded))


def unsummed() -> Tensor:
    return of_parameter(leave_unsummed)


def is_plain(gradient: Tensor) -> bool:
    return type(gradient) is Tensor


def norms(tensors: list[Tensor], order: float = 2) -> list[float]:
    return [norm.item() for norm in compat.FOREACH_NORM(tensors, order)]


def test_a_lazy_gradient_answers_with_recorded_norms_until_it_is_used() -> None:
    gradient = lazy()
    assert torch.linalg.vector_norm(gradient).item() == 50
    assert norms([gradient, lazy()], math.inf) == [40, 40]
    compat.FOREACH_MUL([gradient], torch.tensor(-0.5))
    assert norms([gradient]) == [25] and not is_plain(gradient)
    assert gradient.tolist() == [-1.5, -2] and is_plain(gradient)
    assert torch.linalg.vector_norm(gradient).item() == 2.5


@pytest.mark.parametrize(
    "ask",
    [
        lambda gradient: torch.linalg.vector_norm(gradient, 1),
        lambda gradient: torch.linalg.vector_norm(x=gradient),
        lambda gradient: compat.FOREACH_NORM([gradient, plain()]),
        lambda gradient: compat.FOREACH_MUL([gradient, plain()], 1.0),
    ],
)
def test_what_is_not_known_of_a_lazy_gradient_makes_it_plain(ask: Callable[[Tensor], Any]) -> None:
    gradient = lazy().mul_(0.5)
    ask(gradient)
    assert is_plain(gradient) and gradient.tolist() == [1.5, 2]


@pytest.mark.parametrize("by_name", [False, True])
def test_a_folded_gradient_notes_one_factor_and_has_norms_of_its_own(by_name: bool) -> None:
    gradient, other = folded(), plain()
    assert norms([gradient, other]) == [5, 5]
    compat.FOREACH_MUL([gradient, other], torch.tensor(2.0))
    who = lazy_of(gradient)
    assert who is not None and who.factor is not None and other.tolist() == [6, 8]
    norm = torch.linalg.vector_norm
    assert (norm(x=gradient) if by_name else norm(gradient)).item() == 10 and is_plain(gradient)


def test_a_taken_gradient_is_served_among_others() -> None:
    gradient, other, late = taken(), plain(), lazy()
    assert norms([other, gradient, late]) == [5, 50, 50]
    compat.FOREACH_MUL([other, gradient], 1.0)
    with pytest.raises(OptimizerError, match="be multiplied"):
        compat.FOREACH_MUL([other, gradient], 0.5)
    for use in (gradient.tolist, lambda: norms([gradient], math.inf)):
        with pytest.raises(OptimizerError, match="not exist"):
            use()
    compat.FOREACH_ZERO([other, gradient, late])
    assert other.tolist() == late.tolist() == [0, 0] and is_taken(gradient)


def test_an_unsummed_gradient_may_only_be_zeroed() -> None:
    gradient = unsummed()
    with pytest.raises(OptimizerError, match="not summed"):
        norms([gradient])
    assert gradient.detach_() is gradient and is_unsummed(gradient)
    compat.FOREACH_ZERO([gradient])
    assert is_plain(gradient) and gradient.tolist() == [0, 0]
