"""Dropout at a rate that changes from call to call, captured once.

    before: torch.nn.functional.dropout(x, 0.1)       captured again for each rate
    after:  megacompile.draw_dropout(x, rate)[0]      the rate is a number that the graph is given

torch's operator wants the rate as a Python number, so Dynamo would be asked for its value. During a
call another operator is in its place where Dynamo has made the rate a symbol, which it does once it
has seen two. It draws what torch's draws, and rounds as it does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("megacompile", "FRAGMENT")


def dropout(x: Tensor, rate: float) -> Tensor:
    """The function that Dynamo captures for `F.dropout(x, rate)` in training."""
    result: Tensor = torch.ops.megacompile.draw_dropout(x, rate)[0]
    return result


def _draw(x: Tensor, rate: float) -> tuple[Tensor, Tensor]:
    """The result, and what its backward takes: a mask, or, off CUDA, the factors."""
    if not 0 <= rate <= 1:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {rate}")
    if x.is_cuda and 0 < rate < 1 and x.numel():
        return torch.native_dropout(x, rate, True)
    drawn = torch.empty_like(x, dtype=torch.bool if x.is_cuda else x.dtype)
    if rate == 0 or not x.numel():  # draws nothing
        return x.clone(), drawn.fill_(1)
    if rate == 1:
        return x * torch.zeros((), dtype=x.dtype, device=x.device), drawn.fill_(0)
    drawn.bernoulli_(1 - rate).div_(1 - rate)
    return x * drawn, drawn


def _draw_backward(gradient: Tensor, drawn: Tensor, rate: float) -> Tensor:
    if drawn.dtype != torch.bool:
        return gradient * drawn
    scale = 0.0 if rate == 1 else 1 / (1 - rate)
    found: Tensor = torch.ops.aten.native_dropout_backward(gradient, drawn, scale)
    return found


def _shapes(x: Tensor, rate: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool if x.is_cuda else x.dtype)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1])
    ctx.rate = inputs[1]


def _backward(context: Any, gradient: Tensor, of_drawn: Any) -> tuple[Tensor, None]:
    (drawn,) = context.saved_tensors
    return torch.ops.megacompile.draw_dropout_backward(gradient, drawn, context.rate), None


def _define() -> None:
    draw, back = "draw_dropout", "draw_dropout_backward"
    seeded = (torch.Tag.nondeterministic_seeded,)
    _LIBRARY.define(f"{draw}(Tensor x, Scalar rate) -> (Tensor, Tensor)", tags=seeded)
    _LIBRARY.impl(draw, _draw, "CompositeExplicitAutograd")
    _LIBRARY.define(f"{back}(Tensor gradient, Tensor drawn, Scalar rate) -> Tensor")
    _LIBRARY.impl(back, _draw_backward, "CompositeExplicitAutograd")
    torch.library.register_fake(f"megacompile::{draw}", _shapes, lib=_LIBRARY)
    torch.library.register_fake(
        f"megacompile::{back}",
        lambda gradient, drawn, rate: torch.empty_like(gradient),
        lib=_LIBRARY,
    )
    torch.library.register_autograd(
        f"megacompile::{draw}", _backward, setup_context=_setup, lib=_LIBRARY
    )


_define()
