"""The product of experts that transformers captures where it knows of no kernel, and torch's.

    transformers::grouped_mm_fallback(x, weight, offs)    a loop over experts, in Python
    torch.nn.functional.grouped_mm(x, weight, offs=offs)  what an eager call of the model runs

Dynamo is given the first for all dtypes but bfloat16, because torch's traces refuse the second for
them. Of transformers up to 5.17 the backward asks for the offsets, so nothing can be traced of it.
The operator here is torch's, which traces take as it is: an eager model's kernels, and bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_LIBRARY = torch.library.Library("megacompile", "FRAGMENT")
_FALLBACK = "transformers::grouped_mm_fallback"


def eager_grouped_mm(target: Any, device: torch.device) -> Any:  # torch 2.11 to 2.15
    """The operator to take in the place of a captured one; None where that stays."""
    names = (getattr(target, "_qualified_op_name", None), getattr(target, "_name", ""))
    if _FALLBACK not in (names[0], names[1].partition(".")[0]):
        return None
    if not hasattr(functional, "grouped_mm"):
        return None
    there = device.type == "cuda" and torch.cuda.is_available()
    if there and torch.cuda.get_device_capability(device) < (8, 0):
        return None
    return torch.ops.megacompile.grouped_mm.default


def _product(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    return functional.grouped_mm(x, weight, offs=offs).contiguous()


def _gradients(gradient: Tensor, x: Tensor, weight: Tensor, offs: Tensor) -> tuple[Tensor, Tensor]:
    """As torch's own formulas: a transposed weight gets a transposed gradient."""
    of_x = functional.grouped_mm(gradient, weight.transpose(-2, -1), offs=offs).contiguous()
    if _is_transposed(weight):
        swapped = functional.grouped_mm(gradient.transpose(-2, -1), x, offs=offs)
        return of_x, swapped.contiguous().transpose(-2, -1)
    return of_x, functional.grouped_mm(x.transpose(-2, -1), gradient, offs=offs).contiguous()


def _is_transposed(weight: Tensor) -> bool:
    return weight.stride(-2) == 1 and weight.stride(-1) == weight.shape[-2]


def _shape(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[-1]))


def _shapes(gradient: Tensor, x: Tensor, weight: Tensor, offs: Tensor) -> tuple[Tensor, Tensor]:
    experts, rows, columns = weight.shape
    of_x = x.new_empty(x.shape)
    if _is_transposed(weight):
        return of_x, weight.new_empty((experts, columns, rows)).transpose(-2, -1)
    return of_x, weight.new_empty(weight.shape)


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    del output
    ctx.save_for_backward(*inputs)


def _backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
    back = torch.ops.megacompile.grouped_mm_backward
    return (*back(gradient, *context.saved_tensors), None)


def _define() -> None:
    product, back = "grouped_mm", "grouped_mm_backward"
    _LIBRARY.define(f"{product}(Tensor x, Tensor weight, Tensor offs) -> Tensor")
    _LIBRARY.impl(product, _product, "CompositeExplicitAutograd")
    torch.library.register_fake(f"megacompile::{product}", _shape, lib=_LIBRARY)
    _LIBRARY.define(
        f"{back}(Tensor gradient, Tensor x, Tensor weight, Tensor offs) -> (Tensor, Tensor)"
    )
    _LIBRARY.impl(back, _gradients, "CompositeExplicitAutograd")
    torch.library.register_fake(f"megacompile::{back}", _shapes, lib=_LIBRARY)
    torch.library.register_autograd(
        f"megacompile::{product}", _backward, setup_context=_setup, lib=_LIBRARY
    )


_define()
