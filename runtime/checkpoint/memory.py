"""Memory for what is on meta, and the pattern that says that it was not written to yet.

Parameters stay the objects that they are: an optimizer that has them keeps them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import nn

from megacompile import compat

_BYTE = 0xFF  # floating-point numbers of such bytes are NaN, with a payload that no code computes
_CHUNK = 2**24  # elements that are looked at once


def give_memory(param: nn.Parameter, value: torch.Tensor) -> Callable[[], None]:
    """Gives a parameter the memory of `value`; returns what undoes it."""
    if param.is_meta:  # `param.data = value` cannot change the device from meta
        twin = nn.Parameter(value.data, requires_grad=param.requires_grad)  # a version of its own
        compat.exchange_memory(param, twin)
        return functools.partial(compat.exchange_memory, param, twin)
    if compat.is_sharded(param):
        part = compat.local(param)
        compat.set_local(param, value)
        return functools.partial(compat.set_local, param, part)
    before = param.data

    def undo() -> None:
        param.data = before

    param.data = value
    return undo


def mark_unset(tensor: torch.Tensor) -> None:
    """Fill a tensor with what `is_unset` finds."""
    if tensor.numel():
        _flat(tensor).view(torch.uint8).fill_(_BYTE)


def is_unset(tensor: torch.Tensor) -> bool:
    """True if a tensor has a place that was not written to since `mark_unset`.

    Of integers all must be untouched: -1 is a number like others.
    """
    flat = _flat(tensor)
    if not flat.numel():
        return False
    if flat.dtype.is_complex:
        flat = torch.view_as_real(flat).flatten()
    real = flat.dtype.is_floating_point
    if real and flat.dtype.itemsize > 1 and not bool(flat.sum().isnan()):  # the usual case: fast
        return False
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.dtype.itemsize]
    marked = (chunk == -1 for chunk in flat.view(whole).split(_CHUNK))
    if real or flat.dtype == torch.bool:
        return any(bool(chunk.any()) for chunk in marked)
    return all(bool(chunk.all()) for chunk in marked)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a dense tensor as they are in memory: (numel,)."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))
