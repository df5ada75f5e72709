"""Random initialization of a model on meta, by its modules' own methods.

    transformers        `initialize_weights()`: calls each module's `_init_weights`
    torch, user code    `reset_parameters()` or `_reset_parameters()`, children first
    torchtitan, others  `init_weights()` without arguments, of the outermost module that has it

Numbers are drawn from the CPU's generator in this order, on every device. So they are bitwise those
of `model.to_empty(device="cpu")` followed by the same calls. A model built on the CPU has the same
numbers if its constructors draw no others; the constructors of torch's modules do not.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping

import torch
from torch import nn

from megacompile import compat
from megacompile.errors import ModelError
from megacompile.runtime.checkpoint import hugging_face

_BYTE = 0xFF  # floating-point numbers of these bytes are NaN with a payload that no code computes
_CHUNK = 2**24  # elements checked at a time
_RESETS = ("reset_parameters", "_reset_parameters", "reset_running_stats")


def check_initializers(model: nn.Module, unset: Mapping[int, str]) -> None:
    """Check that these parameters and buffers (id -> name) can be initialized, before anything is
    allocated. Raises ModelError: lists the tensors."""
    covered: set[int] = set()
    for module in model.modules():
        if hugging_face.is_pretrained(module) or _root(module) or _resets(module):
            covered.update(id(tensor) for tensor in (*module.parameters(), *module.buffers()))
    missing = [name for key, name in unset.items() if key not in covered]
    if missing:
        raise ModelError(_no_value(model, missing))


def initialize(model: nn.Module, unset: Mapping[str, torch.Tensor]) -> None:
    """Initialize parameters and buffers, by name, none of which is on meta. Others may change, too.
    Raises ModelError: a tensor was not written completely."""
    if not unset:
        return
    for tensor in unset.values():
        _flat(tensor).view(torch.uint8).fill_(_BYTE)
    with torch.no_grad():
        _visit(model, {id(tensor) for tensor in unset.values()}, rooted=False)
        now = {name: _take_back(model, name, tensor) for name, tensor in unset.items()}
    missing = [name for name, tensor in now.items() if tensor.is_meta or _is_unset(tensor)]
    if missing:
        raise ModelError(_no_value(model, missing))


def _take_back(model: nn.Module, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that now has this name. A parameter that initialization replaced is restored, with
    the new values."""
    path, _, own = name.rpartition(".")
    module = model.get_submodule(path)
    if not isinstance(tensor, nn.Parameter):
        now: torch.Tensor = getattr(module, own)
        return now
    replacement = compat.parameters_of(module)[own]
    if replacement is not tensor and replacement is not None:
        tensor.copy_(replacement)
        compat.parameters_of(module)[own] = tensor
    return tensor


def _visit(module: nn.Module, unset: set[int], *, rooted: bool) -> None:
    """Initialize a module, children first, like constructors."""
    inside = [*module.parameters(), *module.buffers()]
    if not any(id(tensor) in unset for tensor in inside):
        return
    if hugging_face.is_pretrained(module):
        hugging_face.initialize(module, unset)
        return
    root = None if rooted else _root(module)
    for child in module.children():
        _visit(child, unset, rooted=rooted or root is not None)
    for reset in _resets(module):
        reset()
    if root is not None:
        root()


def _resets(module: nn.Module) -> list[Callable[[], object]]:
    """The functions that initialize a module, by torch's naming convention."""
    methods = [getattr(module, name, None) for name in _RESETS[:2]]
    resets = [reset for reset in methods if callable(reset) and _takes_nothing(reset)][:1]
    running = getattr(module, _RESETS[2], None)
    if not resets and callable(running):
        resets.append(running)
    return resets


def _root(module: nn.Module) -> Callable[[], object] | None:
    """The module's `init_weights`, if it needs no arguments."""
    method = getattr(module, "init_weights", None)
    return method if callable(method) and _takes_nothing(method) else None


def _takes_nothing(function: Callable[..., object]) -> bool:
    try:
        inspect.signature(function).bind()
    except (TypeError, ValueError):
        return False
    return True


def refuse_stray(model: nn.Module) -> None:
    """Raise for tensors on meta that are neither parameters nor buffers: nothing initializes them.
    Raises ModelError: names the tensor."""
    for name, module in model.named_modules():
        kept = {id(t) for t in (*module.parameters(False), *module.buffers(False))}
        for attribute, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.is_meta and id(value) not in kept:
                where = f"{name}.{attribute}" if name else attribute
                raise ModelError(
                    f"megacompile(): {type(model).__name__}.{where} is a tensor on meta, and "
                    "neither a parameter nor a buffer, so it cannot be initialized; needed one in "
                    "memory: create it with device='cpu'"
                )


def _no_value(model: nn.Module, names: list[str]) -> str:
    return (
        f"megacompile(): {len(names)} tensors of {type(model).__name__} were on meta and get no "
        f"values: {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}; needed a checkpoint "
        "that has them (checkpoint=), or code that initializes them; give its module a "
        "reset_parameters() that writes all of it; or build it in memory (with "
        "torch.device('cpu'):) before megacompile()"
    )


# Memory for tensors on meta.
#
# Parameter objects stay the same, because an optimizer may have them already.


def give_memory(param: nn.Parameter, value: torch.Tensor) -> Callable[[], None]:
    """Set a parameter's memory to that of `value`; returns a function that undoes this."""
    if param.is_meta:  # `param.data = value` cannot change the device from meta
        # `value.data` has a separate version counter
        twin = nn.Parameter(value.data, requires_grad=param.requires_grad)
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


def _is_unset(tensor: torch.Tensor) -> bool:
    """True if some element still has bytes of `_BYTE`; for integers, for which -1 is a valid value,
    only if all have."""
    flat = _flat(tensor)
    if flat.dtype.is_complex:
        flat = torch.view_as_real(flat).flatten()
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.dtype.itemsize]
    marked = (chunk == -1 for chunk in flat.view(whole).split(_CHUNK))
    if flat.dtype.is_floating_point or flat.dtype == torch.bool:
        return any(bool(chunk.any()) for chunk in marked)
    return flat.numel() > 0 and all(bool(chunk.all()) for chunk in marked)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a dense tensor in memory order: (numel,)."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))
