"""Operators that C++ takes apart with sizes as ints, taken apart here with sizes as symbols.

    aten.upsample_nearest2d.vec(x, None, [2.0, 2.0])
    -> aten.upsample_nearest2d.default(x, [2*h, 2*w], 2.0, 2.0)

A composite operator's C++ is older than symbols in places: it asks for the ints, and what is traced
is right for these sizes alone. Each of those here calls what its C++ calls, in the same order. So a
graph that is traced with symbols is the one that C++ gives for numbers.

torch's Python dispatcher has other decompositions for some of them, and for many more operators,
which round otherwise. These here are kernels of a dispatch key that is on within `SymbolicFakes`
alone (`torch.export` uses it too, without our mode: there the C++ runs).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_impls import register_op_impl

_KEY = DispatchKey.PreDispatch
_KEYS = DispatchKeySet(_KEY)
_LIBRARY = torch.library.Library("aten", "IMPL")
_aten = torch.ops.aten


def _symbolic_composites() -> Any:  # torch 2.11 to 2.15
    """A context in which sizes stay symbols in the operators that this file takes apart."""
    guard: Any = torch._C._IncludeDispatchKeyGuard
    return guard(_KEY)


def _define(wanted: Callable[[], bool]) -> None:  # torch 2.11 to 2.15
    """Register the kernels. `wanted` is asked at each call, on its thread."""
    for name in dir(_aten):
        packet = getattr(_aten, name)
        if "upsample" in name and "vec" in getattr(packet, "overloads", list)():
            _put(packet.vec, _upsample(packet.default), wanted)


def _put(operator: Any, kernel: Callable[..., Any], wanted: Callable[[], bool]) -> None:
    def run(*args: Any, **kwargs: Any) -> Any:
        exclude: Any = torch._C._ExcludeDispatchKeyGuard
        with exclude(_KEYS):
            return (kernel if wanted() else operator)(*args, **kwargs)

    _LIBRARY.impl(operator.name().removeprefix("aten::"), run, _KEY.name)


def _upsample(operator: Any) -> Callable[..., Any]:
    """UpSample.h: `compute_output_size`, and a scale for each dimension."""

    def run(x: Any, output_size: Any, *others: Any) -> Any:
        *align_corners, scales = others
        sizes = x.shape[2:]
        if (output_size is None) == (scales is None):  # the C++ refuses it
            return operator.overloadpacket.vec(x, output_size, *others)
        if output_size is None:
            output_size = [_scaled(n, s) for n, s in zip(sizes, scales, strict=True)]
        return operator(x, output_size, *align_corners, *(scales or [None] * len(sizes)))

    return run


def _scaled(size: Any, scale: float) -> Any:
    """The product, rounded to a double, without what is behind the point."""
    up, down = scale.as_integer_ratio()
    if up < 1 << 32:  # exact for any size: so can be computed with ints
        return size * up // down
    return torch.sym_int(size * scale)


def _gradient_of_upsample(
    grad: Any, output_size: Any, input_size: Sequence[Any], *_: Any, **__: Any
) -> Any:
    return grad.new_empty(input_size).contiguous(memory_format=suggest_memory_format(grad))


def _gradient_of_shrink(grad: Any, x: Any, *_: Any) -> Any:
    return torch.empty_like(torch.broadcast_tensors(x, grad)[0])


def _define_fakes(wanted: Callable[[Any], bool]) -> None:  # torch 2.11 to 2.15
    """Say what some operators give for fake tensors with symbols, for which torch says nothing.

    Args:
        wanted: is it said in this FakeTensorMode?
    """
    names = [name for name in dir(_aten) if "upsample" in name and name.endswith("_backward")]
    kernels: dict[Any, Callable[..., Any]] = {
        getattr(_aten, name).default: _gradient_of_upsample for name in names
    }
    for name in ("hardshrink_backward", "softshrink_backward"):
        kernels[getattr(_aten, name).default] = _gradient_of_shrink

    def run(mode: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
        if not wanted(mode):
            return NotImplemented
        with mode:
            return kernels[operator](*args, **kwargs)

    register_op_impl(kernels.__contains__)(run)
