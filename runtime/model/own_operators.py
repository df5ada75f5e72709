"""Functions that Dynamo captures in a call's thread instead of torch's.

Functions that read a size as an int are captured once even if sizes change from call to call:

    before: torch.nn.functional.affine_grid(theta, x.shape)    captured again for each shape
    after:  megacompile.affine_grid(theta, (2, 3, h, w), False)

torch's operators take ints, or are decomposed with ints. Ours replace them if Dynamo has made a
size a symbol, and call torch's operators at run time.

Dropout with a rate that changes from call to call is captured once:

    before: torch.nn.functional.dropout(x, 0.1)       captured again for each rate
    after:  megacompile.draw_dropout(x, rate)[0]      the rate is an input of the graph

torch's operator needs the rate as a Python number, so Dynamo would specialize on its value. Ours
replaces it if Dynamo has made the rate a symbol, which it does after two different rates. It draws
the same numbers as torch's and rounds the same way.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megacompile import compat
from megacompile.runtime.model import four_bit
from megacompile.runtime.params.undo import Undos, replace

_LIBRARY = torch.library.Library("megacompile", "FRAGMENT")
_HERE = threading.local()  # `on`: True while this thread calls a model


def swap_in(undos: Undos) -> None:
    """Make Dynamo capture our operators, where a number or a size is a symbol and in bitsandbytes,
    until the undos run."""
    if four_bit.PACKAGE in sys.modules:
        four_bit.swap_in(undos)
    _tell_dynamo()
    if not _is_on():
        replace([vars(_HERE)], ["on"], [None], [True], undos)


@functools.cache
def _tell_dynamo() -> None:
    compat.capture_dropout_as(dropout, _is_on)
    for stock, own in _SIZED.items():
        compat.capture_sized_as(stock, own, _is_on)


def _is_on() -> bool:
    return bool(getattr(_HERE, "on", None))


# Functions that read a size as an int.


def affine_grid(theta: Tensor, size: Sequence[int], align_corners: bool | None = None) -> Tensor:
    """The function that Dynamo captures for `F.affine_grid`."""
    result: Tensor = torch.ops.megacompile.affine_grid(theta, size, bool(align_corners))
    return result


def linspace(start: Any, end: Any, steps: int, *, dtype: Any = None, device: Any = None) -> Tensor:
    """The function that Dynamo captures for `torch.linspace`."""
    make = torch.ops.megacompile.linspace
    result: Tensor = make(start, end, steps, dtype=dtype, device=device)
    return result


def max_pool1d(
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """The function that Dynamo captures for `F.max_pool1d`: its implementation with gradients."""
    found = torch.max_pool1d_with_indices(
        input, kernel_size, stride or [], padding, dilation, ceil_mode
    )
    return found if return_indices else found[0]


def _grid(theta: Tensor, size: Sequence[int], align_corners: bool) -> Tensor:
    return torch.affine_grid_generator(theta, size, align_corners)


def _grid_backward(gradient: Tensor, size: Sequence[int], align_corners: bool) -> Tensor:
    found: Tensor = torch.ops.aten.affine_grid_generator_backward(gradient, size, align_corners)
    return found


def _shape(theta: Tensor, size: Sequence[Any], align_corners: bool) -> Tensor:
    rows, _, *sizes = size
    dims = len(sizes)
    compat.check(theta.dim() == 3 and tuple(theta.shape[1:]) == (dims, dims + 1))
    return theta.new_empty((rows, *sizes, dims))


def _shape_backward(gradient: Tensor, size: Sequence[Any], align_corners: bool) -> Tensor:
    dims = len(size) - 2
    # a product of matrices, transposed
    return gradient.new_empty((size[0], dims + 1, dims)).transpose(1, 2)


def _setup_grid(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.size, ctx.align_corners = inputs


def _backward_grid(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    backward = torch.ops.megacompile.affine_grid_backward
    return backward(gradient, context.size, context.align_corners), None, None


def _define_sized() -> None:
    grid, back = "affine_grid", "affine_grid_backward"
    for name, first, run, shape in (
        (grid, "theta", _grid, _shape),
        (back, "gradient", _grid_backward, _shape_backward),
    ):
        _LIBRARY.define(f"{name}(Tensor {first}, SymInt[] size, bool align_corners) -> Tensor")
        _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"megacompile::{name}", shape, lib=_LIBRARY)
    torch.library.register_autograd(
        f"megacompile::{grid}", _backward_grid, setup_context=_setup_grid, lib=_LIBRARY
    )
    _LIBRARY.define(
        "linspace(Scalar start, Scalar end, SymInt steps, *, ScalarType? dtype=None, "
        "Device? device=None) -> Tensor"
    )
    _LIBRARY.impl("linspace", torch.linspace, "CompositeExplicitAutograd")
    torch.library.register_fake(
        "megacompile::linspace",
        lambda start, end, steps, **named: torch.empty(steps, **named),
        lib=_LIBRARY,
    )


# Dropout.


def dropout(x: Tensor, rate: float) -> Tensor:
    """The function that Dynamo captures for `F.dropout(x, rate)` in training."""
    result: Tensor = torch.ops.megacompile.draw_dropout(x, rate)[0]
    return result


def _draw(x: Tensor, rate: float) -> tuple[Tensor, Tensor]:
    """The result, and the saved tensor of its backward: a mask on CUDA, the factors elsewhere."""
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


def _drawn_like(x: Tensor, rate: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool if x.is_cuda else x.dtype)


def _setup_dropout(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1])
    ctx.rate = inputs[1]


def _backward_dropout(context: Any, gradient: Tensor, of_drawn: Any) -> tuple[Tensor, None]:
    (drawn,) = context.saved_tensors
    return torch.ops.megacompile.draw_dropout_backward(gradient, drawn, context.rate), None


def _define_dropout() -> None:
    draw, back = "draw_dropout", "draw_dropout_backward"
    seeded = (torch.Tag.nondeterministic_seeded,)
    _LIBRARY.define(f"{draw}(Tensor x, Scalar rate) -> (Tensor, Tensor)", tags=seeded)
    _LIBRARY.impl(draw, _draw, "CompositeExplicitAutograd")
    _LIBRARY.define(f"{back}(Tensor gradient, Tensor drawn, Scalar rate) -> Tensor")
    _LIBRARY.impl(back, _draw_backward, "CompositeExplicitAutograd")
    torch.library.register_fake(f"megacompile::{draw}", _drawn_like, lib=_LIBRARY)
    torch.library.register_fake(
        f"megacompile::{back}",
        lambda gradient, drawn, rate: torch.empty_like(gradient),
        lib=_LIBRARY,
    )
    torch.library.register_autograd(
        f"megacompile::{draw}", _backward_dropout, setup_context=_setup_dropout, lib=_LIBRARY
    )


_SIZED: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.nn.functional.affine_grid: affine_grid,
    torch.linspace: linspace,
    torch.nn.functional.max_pool1d: max_pool1d,
}

_define_sized()
_define_dropout()
