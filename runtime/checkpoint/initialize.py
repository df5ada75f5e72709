"""Random initialisation of a model that was on meta, by what its own modules have for that.

    transformers        `initialize_weights()`: each module's `_init_weights`, as `init_weights()`
    torch, and users'   `reset_parameters()` or `_reset_parameters()`, children first
    the outermost with  `init_weights()`, without arguments: torchtitan's and others' convention

Numbers come from the CPU's generator, in that order, whatever device the model computes on. So they
are those of `model.to_empty(device="cpu")` and the same calls, in every bit. They are those of a
model that is built on the CPU where its constructors draw nothing else: modules of torch do.
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

_BYTE = 0xFF  # floating-point numbers of such bytes are NaN, with a payload that no code computes
_CHUNK = 2**24  # elements that are looked at once
_RESETS = ("reset_parameters", "_reset_parameters", "reset_running_stats")
_FIX = (
    "give the module that has it a reset_parameters() that writes all of it; or build it in memory "
    "(with torch.device('cpu'):) before megacompile()"
)


def check_initializers(model: nn.Module, unset: Mapping[int, str]) -> None:
    """Raise where a tensor cannot be initialised, before anything is made.

    Args:
        model: on meta.
        unset: name by id, of parameters and buffers.

    Raises:
        ModelError: with the names.
    """
    covered: set[int] = set()
    for module in model.modules():
        if hugging_face.is_pretrained(module) or _root(module) or _resets(module):
            covered.update(id(tensor) for tensor in (*module.parameters(), *module.buffers()))
    lost = [name for key, name in unset.items() if key not in covered]
    if lost:
        raise ModelError(_no_value(model, lost))


def initialize(model: nn.Module, unset: Mapping[str, torch.Tensor]) -> None:
    """Give tensors their first values.

    Args:
        model: all of it in memory.
        unset: parameters and buffers by their names. Others may change.

    Raises:
        ModelError: one of them was not written to, or not to all of it.
    """
    if not unset:
        return
    for tensor in unset.values():
        mark_unset(tensor)
    with torch.no_grad():
        _visit(model, {id(tensor) for tensor in unset.values()}, rooted=False)
        now = {name: _take_back(model, name, tensor) for name, tensor in unset.items()}
    lost = [name for name, tensor in now.items() if tensor.is_meta or is_unset(tensor)]
    if lost:
        raise ModelError(_no_value(model, lost))


def _take_back(model: nn.Module, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that a name stands for now: a parameter is the one that it was, whatever code has
    set."""
    path, _, own = name.rpartition(".")
    module = model.get_submodule(path)
    if not isinstance(tensor, nn.Parameter):
        now: torch.Tensor = getattr(module, own)
        return now
    made = compat.parameters_of(module)[own]
    if made is not tensor and made is not None:
        tensor.copy_(made)
        compat.parameters_of(module)[own] = tensor
    return tensor


def _visit(module: nn.Module, unset: set[int], *, rooted: bool) -> None:
    """Children first, as constructors do."""
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
    """The functions that initialise a module of torch, or one like it."""
    found = [getattr(module, name, None) for name in _RESETS[:2]]
    resets = [reset for reset in found if callable(reset) and _takes_nothing(reset)][:1]
    running = getattr(module, _RESETS[2], None)
    if not resets and callable(running):
        resets.append(running)
    return resets


def _root(module: nn.Module) -> Callable[[], object] | None:
    """`init_weights()`, of the outermost module that has one."""
    found = getattr(module, "init_weights", None)
    return found if callable(found) and _takes_nothing(found) else None


def _takes_nothing(function: Callable[..., object]) -> bool:
    try:
        inspect.signature(function).bind()
    except (TypeError, ValueError):
        return False
    return True


def refuse_stray(model: nn.Module) -> None:
    """Raise for tensors on meta that are neither parameters nor buffers: they cannot be filled.

    Raises:
        ModelError: with the place.
    """
    for name, module in model.named_modules():
        kept = {id(t) for t in (*module.parameters(False), *module.buffers(False))}
        for attribute, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.is_meta and id(value) not in kept:
                where = f"{name}.{attribute}" if name else attribute
                raise ModelError(
                    f"megacompile(): {type(model).__name__}.{where} is a tensor on meta, and "
                    "neither a parameter nor a buffer, so that nobody can give it values; needed "
                    "one in memory: make it with device='cpu'"
                )


def _no_value(model: nn.Module, names: list[str]) -> str:
    return (
        f"megacompile(): {len(names)} tensors of {type(model).__name__} were on meta and get no "
        f"values: {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}; needed a checkpoint "
        f"that has them (checkpoint=), or code that initialises them; {_FIX}"
    )


def buffers_in(model: nn.Module) -> list[tuple[str, dict[str, torch.Tensor | None], str]]:
    """Every place of a buffer: its full name, the dict that holds it, its name there."""
    return [
        (f"{path}.{name}" if path else name, compat.buffers_of(module), name)
        for path, module in model.named_modules(remove_duplicate=False)
        for name, buffer in compat.buffers_of(module).items()
        if buffer is not None
    ]


# Memory for what is on meta, and the pattern that says that it was not written to yet.
#
# Parameters stay the objects that they are: an optimizer that has them keeps them.


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
