"""Operators that torch cannot trace, or not with symbols."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("megacompile_tests::real_only", mutates_args=())
def real_only(x: Tensor) -> Tensor:
    """Has no fake kernel."""
    return x.clone()


@real_only.register_fake
def _(x: Tensor) -> Tensor:
    raise RuntimeError("no fake tensors here")


@torch.library.custom_op("megacompile_tests::sized_gradient", mutates_args=())
def sized_gradient(x: Tensor) -> Tensor:
    return x * 2


@sized_gradient.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty((int(x.shape[0]), *x.shape[1:]))  # it asks for the size


@torch.library.custom_op("megacompile_tests::asks_in_backward", mutates_args=())
def asks_in_backward(x: Tensor) -> Tensor:
    """Its backward asks for a size."""
    return x * 2


asks_in_backward.register_fake(torch.empty_like)
asks_in_backward.register_autograd(lambda _, gradient: sized_gradient(gradient))
