"""Functions and hooks that Dynamo captures in a call's thread instead of others.

    torch.linspace(0, 1, size)      captured again for each size: ours takes symbols
    F.max_pool1d(x, 2)              the same
    bitsandbytes.matmul_4bit(...)   an `autograd.Function`, whose forward and backward are captured
                                    at each use: half of the capture time of a layer with adapters
    output.requires_grad_(True)     a hook that is not captured: the graph breaks at each caller

Ours replace torch's where Dynamo has made a size a symbol, after two different values, and have
torch's bits. Our product runs bitsandbytes' function itself, so tracing a stage sees its
operations, once for each template.

transformers and PEFT register the hook on the embedding of a model with frozen weights. An addition
of -0.0 replaces it, which changes no bit and whose sum requires grad too. Of consecutive hooks a
call keeps one: transformers adds another one each time checkpoints are enabled again, as TRL does
in every step, and Dynamo would recapture the model whenever their number changes.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from megacompile import compat
from megacompile.runtime.params.swap import Undos, replace

_HERE = threading.local()  # `on`: True while this thread calls a model


def swap_in(modules: Iterable[nn.Module], device: torch.device, undos: Undos) -> None:
    """Make Dynamo capture our functions and hooks until the undos run."""
    if _BITSANDBYTES in sys.modules:
        _replace_product(undos)
    for hooks in compat.holders(modules, "forward_hooks"):
        if any(map(_is_ours, hooks.values())):
            _replace_hooks(hooks, device, undos)
    _tell_dynamo()
    if not getattr(_HERE, "on", None):
        replace([vars(_HERE)], ["on"], [None], [True], undos)


@functools.cache
def _tell_dynamo() -> None:
    is_on = functools.partial(getattr, _HERE, "on", None)
    compat.capture_symbolic_as(torch.nn.functional.max_pool1d, max_pool1d, is_on)
    compat.capture_symbolic_as(torch.linspace, linspace, is_on)


# Functions that read a size as an int.


def linspace(start: Any, end: Any, steps: int, *, dtype: Any = None, device: Any = None) -> Any:
    """The function that Dynamo captures for `torch.linspace`."""
    return torch.ops.megacompile.linspace(start, end, steps, dtype=dtype, device=device)


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


compat.define_operator(
    "linspace(Scalar start, Scalar end, SymInt steps, *, ScalarType? dtype=None, "
    "Device? device=None) -> Tensor",
    torch.linspace,
    lambda start, end, steps, **named: torch.empty(steps, **named),
)


# Products with 4-bit weights.

_BITSANDBYTES = "bitsandbytes"
_PRODUCT = "matmul_4bit"  # the function's name in the package's namespace too
_OF_STATE = ("shape", "dtype", "quant_type", "blocksize", "absmax", "code", "offset")
_OF_NESTED = ("blocksize", "dtype", "absmax", "code")
_SCHEMA = (
    "(Tensor x, Tensor weight, Tensor? bias, int[] shape, ScalarType dtype, str quant_type, "
    "int blocksize, Tensor absmax, Tensor code, Tensor? offset, "
    "int? nested_blocksize, ScalarType? nested_dtype, Tensor? nested_absmax, Tensor? nested_code)"
    " -> Tensor"
)


def _replace_product(undos: Undos) -> None:
    package = sys.modules.get(_BITSANDBYTES)
    theirs = getattr(package, _PRODUCT, None)
    state = getattr(getattr(package, "functional", None), "QuantState", None)
    if theirs is None or state is None or theirs in _OURS:
        return
    replace([vars(package)], [_PRODUCT], [theirs], [_product(theirs, state)], undos)


_OURS: set[Callable[..., Any]] = set()


@functools.cache
def _product(theirs: Callable[..., Tensor], state_class: type) -> Callable[..., Tensor]:
    """The replacement for `theirs`: an operator that runs it, and that tracing decomposes."""

    def run(x: Tensor, weight: Tensor, bias: Tensor | None, *values: Any) -> Tensor:
        of_state = dict(zip(_OF_STATE, values, strict=False))
        of_nested = dict(zip(_OF_NESTED, values[len(_OF_STATE) :], strict=True))
        nested = None if of_nested["absmax"] is None else state_class(**of_nested)
        of_state["shape"] = torch.Size(of_state["shape"])
        return theirs(x, weight, state_class(**of_state, state2=nested), bias=bias)

    name = _PRODUCT + (f"_{len(_OURS)}" if _OURS else "")  # bitsandbytes, imported again
    operator = compat.define_operator(name + _SCHEMA, run, None, "CompositeImplicitAutograd")

    def matmul_4bit(
        A: Tensor,  # the parameter names of `theirs`
        B: Tensor,
        quant_state: Any,
        out: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Any:
        by_cpu = getattr(quant_state, "packing_format_for_cpu", False)  # another packing
        if not torch.compiler.is_compiling() or out is not None or quant_state is None or by_cpu:
            return theirs(A, B, quant_state, out=out, bias=bias)
        nested = quant_state.state2
        values = [getattr(quant_state, name) for name in _OF_STATE]
        values += [None if nested is None else getattr(nested, name) for name in _OF_NESTED]
        return operator(A, B, bias, *values)

    _OURS.add(matmul_4bit)
    return matmul_4bit


# Hooks that make inputs require grad.

_NAMES = ("make_inputs_require_grads", "make_inputs_require_grad")  # transformers, PEFT


def _is_ours(hook: Any) -> bool:
    return getattr(hook, "__name__", "") in _NAMES


@functools.cache
def _require_grad(device: torch.device) -> Callable[..., torch.Tensor]:
    with torch.inference_mode(False):
        zero = torch.full((), -0.0, device=device, requires_grad=True)
    return lambda module, args, output: output + zero


def _replace_hooks(hooks: dict[Any, Any], device: torch.device, undos: Undos) -> None:
    """Replace such hooks of a module, without repeated consecutive ones, until the undos run."""
    keys = list(hooks)
    pairs = zip(keys, keys[1:], strict=False)
    again = {b: hooks[b] for a, b in pairs if _is_ours(hooks[a]) and _is_ours(hooks[b])}

    def put_back() -> None:
        hooks.update(again)
        for key in dict.fromkeys([*keys, *hooks]):  # the original order
            if key in hooks:
                hooks[key] = hooks.pop(key)

    if again:
        undos.append(put_back)
        deque(map(hooks.pop, again), maxlen=0)
    found = {key: hook for key, hook in hooks.items() if _is_ours(hook)}
    holders, ours = [hooks] * len(found), [_require_grad(device)] * len(found)
    replace(holders, list(found), list(found.values()), ours, undos)
