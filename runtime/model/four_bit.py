"""Products with 4-bit weights of bitsandbytes, in a form that Dynamo captures quickly.

    before: autograd_function_apply(forward body, backward body, x, w, absmax, ...)
    after:  matmul_4bit(x, w, absmax, ...)

Dynamo captures the forward and the backward of an `autograd.Function` at each use. This takes half
of the capture time of a layer with adapters, and a model has hundreds of such products. During a
call, one operator replaces `bitsandbytes.matmul_4bit`. It runs that function itself, so tracing a
stage sees the operations of bitsandbytes: once for each template.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megacompile.runtime.params.undo import Undos, replace

PACKAGE = "bitsandbytes"
OPERATOR = "matmul_4bit"
_NAME = "matmul_4bit"  # of the function, in the package's namespace
_SCHEMA = (
    "(Tensor x, Tensor weight, Tensor? bias, int[] shape, ScalarType dtype, str quant_type, "
    "int blocksize, Tensor absmax, Tensor code, Tensor? offset, "
    "int nested_blocksize, ScalarType? nested_dtype, Tensor? nested_absmax, Tensor? nested_code)"
    " -> Tensor"
)


def swap_in(undos: Undos) -> None:
    """Until the undos run, Dynamo captures the operator where bitsandbytes is used."""
    package = sys.modules.get(PACKAGE)
    theirs = getattr(package, _NAME, None)
    state = getattr(getattr(package, "functional", None), "QuantState", None)
    if theirs is None or state is None or theirs in _OURS:
        return
    ours = _made(theirs, state)
    replace([vars(package)], [_NAME], [theirs], [ours], undos)


_OURS: set[Callable[..., Any]] = set()
_LIBRARY: list[torch.library.Library] = []  # the library owns its definitions


@functools.cache
def _made(theirs: Callable[..., Tensor], state_class: type) -> Callable[..., Tensor]:
    """The replacement for `theirs`; it runs `theirs`."""
    operator = _defined(theirs, state_class)

    def matmul_4bit(
        A: Tensor,  # the parameter names of `theirs`
        B: Tensor,
        quant_state: Any,
        out: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        if not torch.compiler.is_compiling() or out is not None or not _plain(quant_state):
            return theirs(A, B, quant_state, out=out, bias=bias)
        state, nested = quant_state, quant_state.state2
        result: Tensor = operator(
            *(A, B, bias, state.shape, state.dtype, state.quant_type),
            *(state.blocksize, state.absmax, state.code, state.offset),
            *(0 if nested is None else nested.blocksize, None if nested is None else nested.dtype),
            *(None if nested is None else nested.absmax, None if nested is None else nested.code),
        )
        return result

    _OURS.add(matmul_4bit)
    return matmul_4bit


def _plain(state: Any) -> bool:
    """True if the operator accepts a quantization state: None, or any packing but the one for
    CPUs."""
    return state is not None and not getattr(state, "packing_format_for_cpu", False)


def _defined(theirs: Callable[..., Tensor], state_class: type) -> Callable[..., Tensor]:
    """Define the operator. It has no kernel: tracing decomposes it."""

    def run(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        shape: list[int],
        dtype: torch.dtype,
        quant_type: str,
        blocksize: int,
        absmax: Tensor,
        code: Tensor,
        offset: Tensor | None,
        nested_blocksize: int,
        nested_dtype: torch.dtype | None,
        nested_absmax: Tensor | None,
        nested_code: Tensor | None,
    ) -> Tensor:
        nested = None
        if nested_absmax is not None:
            nested = state_class(
                absmax=nested_absmax,
                code=nested_code,
                blocksize=nested_blocksize,
                dtype=nested_dtype,
            )
        state = state_class(
            absmax=absmax,
            shape=torch.Size(shape),
            code=code,
            blocksize=blocksize,
            quant_type=quant_type,
            dtype=dtype,
            offset=offset,
            state2=nested,
        )
        return theirs(x, weight, state, bias=bias)

    name = OPERATOR + (f"_{len(_LIBRARY)}" if _LIBRARY else "")  # bitsandbytes, imported again
    library = torch.library.Library("megacompile", "FRAGMENT")
    library.define(name + _SCHEMA)
    library.impl(name, run, "CompositeImplicitAutograd")
    _LIBRARY.append(library)
    packet = getattr(torch.ops.megacompile, name)
    result: Callable[..., Tensor] = packet.default
    return result
