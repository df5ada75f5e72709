"""Functions that ask what a size is, captured once where sizes change from call to call.

    before: torch.nn.functional.affine_grid(theta, x.shape)    captured again for each shape
    after:  megacompile.affine_grid(theta, (2, 3, h, w), False)

torch's operators for them take ints, or are taken apart with ints to see what comes out. During a
call others are in their places where Dynamo has made a size a symbol. These call torch's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megacompile import compat

_LIBRARY = torch.library.Library("megacompile", "FRAGMENT")


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
    """The function that Dynamo captures for `F.max_pool1d`: what that does where gradients are
    made."""
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


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.size, ctx.align_corners = inputs


def _backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    backward = torch.ops.megacompile.affine_grid_backward
    return backward(gradient, context.size, context.align_corners), None, None


def _define() -> None:
    grid, back = "affine_grid", "affine_grid_backward"
    for name, first, run, shape in (
        (grid, "theta", _grid, _shape),
        (back, "gradient", _grid_backward, _shape_backward),
    ):
        _LIBRARY.define(f"{name}(Tensor {first}, SymInt[] size, bool align_corners) -> Tensor")
        _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"megacompile::{name}", shape, lib=_LIBRARY)
    torch.library.register_autograd(
        f"megacompile::{grid}", _backward, setup_context=_setup, lib=_LIBRARY
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


_define()
