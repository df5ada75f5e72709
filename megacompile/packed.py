"""Packed parameters, which consist of several plain tensors, such as quantized weights.

    w    a wrapper subclass (torchao): `__tensor_flatten__` names its tensors
         -> w.qdata, w.scale
    w    an nn.Parameter of a class of its own (bitsandbytes): its data, and the tensors of the
         state objects of that package on it and on its module
         -> w, w.quant_state.absmax, w.quant_state.state2.absmax, ...

A *leaf* is one of these plain tensors, or an ordinary parameter. Buckets hold leaves. A *member* is
a place of a plain tensor in a packed parameter; members that share memory are one leaf.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from megacompile import compat
from megacompile.ir.capture import Wrapping


class Leaf(NamedTuple):
    """A plain tensor in a bucket."""

    name: str  # fully qualified: the parameter's name, and the leaf's path in it
    tensor: torch.Tensor  # an nn.Parameter, or a plain tensor of a packed one
    packed: bool


@dataclass(frozen=True, slots=True)
class Member:
    """A plain tensor of a packed parameter, and its place there."""

    path: str  # after the parameter's name; "" for the parameter itself
    tensor: torch.Tensor
    leaf: torch.Tensor  # the first member in the same memory, usually this one
    holder: Any  # the object that has it as an attribute
    key: str


def is_wrapper(tensor: object) -> bool:
    """True for a tensor that only wraps others, which hold its data."""
    if not isinstance(tensor, torch.Tensor) or not _is_packed(type(tensor)):
        return False
    return compat.is_wrapper_class(type(tensor))


def any_packed(params: Iterable[object]) -> bool:
    """True if any of these may be a packed parameter."""
    return any(map(_is_packed, set(map(type, params))))


def members(module: nn.Module, param: torch.Tensor) -> Sequence[Member]:
    """The plain tensors of a parameter of `module`; empty for an ordinary parameter."""
    if is_wrapper(param):
        return _distinct(_inner(param, ""))
    found = list(_states(module, param)) if _is_packed(type(param)) else []
    return _distinct([("", param, module, ""), *found]) if found else ()


def own_leaves(module: nn.Module, prefix: str = "") -> Iterator[Leaf]:
    """Yield the leaves of a module's own parameters, with `prefix` before their names."""
    for name, param in compat.parameters_of(module).items():
        if param is None:
            continue
        parts = members(module, param)
        if not parts:
            yield Leaf(prefix + name, param, packed=False)
        for part in parts:
            if part.tensor is part.leaf:
                yield Leaf(f"{prefix}{name}{part.path}", part.tensor, packed=True)


def leaves(model: nn.Module, prefix: str = "") -> Iterator[Leaf]:
    """Yield all leaves of a model, in the order of `named_parameters(remove_duplicate=False)`."""
    for name, module in model.named_modules(prefix=prefix, remove_duplicate=False):
        yield from own_leaves(module, f"{name}." if name else "")


def packed_parameters(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Yield (module, name, parameter) for every packed parameter, once for each place."""
    for module in model.modules():
        for name, param in compat.parameters_of(module).items():
            if param is not None and members(module, param):
                yield module, name, param


def settle(model: nn.Module) -> None:
    """Normalize packed parameters between two calls, so that they share no state tensors.
    bitsandbytes moves the statistics of 8-bit weights from parameter to module in the first call,
    replaces 4-bit weights by another format in the first call for inference on a CPU, and shares
    the code of the statistics of 4-bit weights."""
    for module in model.modules():
        for param in compat.parameters_of(module).values():
            initialize = getattr(module, "init_8bit_state", None)
            if callable(initialize) and getattr(param, "CB", None) is not None:
                initialize()
        if getattr(module, _FOR_CPU, False):
            module.state_dict()  # converts back
            setattr(module, _FOR_CPU, False)
    owner: dict[int, int] = {}  # tensor -> parameter
    for module, _, param in packed_parameters(model):
        for member in members(module, param):
            if owner.setdefault(id(member.tensor), id(param)) != id(param):
                with torch.no_grad():
                    setattr(member.holder, member.key, member.tensor.clone())


def twins(model: nn.Module) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of a member that is not a leaf, and the leaf that shares its memory."""
    found = [
        member for module, _, param in packed_parameters(model) for member in members(module, param)
    ]
    return [(m.tensor, m.leaf) for m in found if m.tensor is not m.leaf]


def taken_apart(tensor: torch.Tensor) -> tuple[Wrapping, list[torch.Tensor]]:
    """Flatten a wrapper into its structure and its plain tensors."""
    names, context = compat.flatten_wrapper(tensor)
    inner: list[Wrapping | None] = []
    found: list[torch.Tensor] = []
    for part in (getattr(tensor, name) for name in names):
        nested, parts = taken_apart(part) if is_wrapper(part) else (None, [part])
        inner.append(nested)
        found += parts
    layout = tuple(tensor.shape), tuple(tensor.stride())
    wrapping = Wrapping(type(tensor), tuple(names), tuple(inner), context, *layout)
    return wrapping, found


def on_device(wrapping: Wrapping, device: torch.device) -> Wrapping:
    """The same structure on another device, with the devices in its context replaced."""
    return dataclasses.replace(
        wrapping,
        inner=tuple(nested and on_device(nested, device) for nested in wrapping.inner),
        context=compat.tree_map(
            lambda value: device if isinstance(value, torch.device) else value, wrapping.context
        ),
    )


@functools.cache
def _is_packed(cls: type) -> bool:
    """True for a wrapper, and for a subclass of nn.Parameter, which may have a state; not for
    guarded parameters, proxies and torch's own wrappers."""
    package = cls.__module__.partition(".")[0]
    if hasattr(cls, "stands_for") or package in (__name__.partition(".")[0], "torch"):
        return False
    return compat.is_wrapper_class(cls) or issubclass(cls, nn.Parameter)


_FOR_CPU = "support_avx512bf16_for_cpu"  # of bitsandbytes' 4-bit layers

_Found = tuple[str, torch.Tensor, Any, str]  # path, tensor, holder, key


def _inner(wrapper: torch.Tensor, path: str) -> Iterator[_Found]:
    names, _ = compat.flatten_wrapper(wrapper)
    for name in names:
        part = getattr(wrapper, name)
        if is_wrapper(part):
            yield from _inner(part, f"{path}.{name}")
        else:
            yield f"{path}.{name}", part, wrapper, name


def _states(module: nn.Module, param: torch.Tensor) -> Iterator[_Found]:
    """Yield tensors in state objects of the parameter's package, on the parameter and its
    module."""
    package = type(param).__module__.partition(".")[0]
    seen: set[int] = set()

    def walk(holder: Any, path: str, *, tensors: bool) -> Iterator[_Found]:
        for key, value in list(vars(holder).items()):
            if isinstance(value, torch.Tensor):
                # int64 tensors are left there by a call and are no part of the weight
                if tensors and not isinstance(value, nn.Parameter) and value.dtype != torch.int64:
                    yield f"{path}.{key}", value, holder, key
            elif (
                type(value).__module__.partition(".")[0] == package
                and hasattr(value, "__dict__")
                and not isinstance(value, (nn.Module, type))
                and id(value) not in seen
            ):
                seen.add(id(value))
                yield from walk(value, f"{path}.{key}", tensors=True)

    yield from walk(param, "", tensors=True)
    yield from walk(module, "", tensors=False)


def _distinct(found: Iterable[_Found]) -> list[Member]:
    """Make members, with one leaf for each memory."""
    first: dict[Any, torch.Tensor] = {}
    made = []
    for path, tensor, holder, key in found:
        memory: Any = id(tensor)
        if type(tensor) is torch.Tensor or isinstance(tensor, nn.Parameter):
            if tensor.numel() and tensor.device.type != "meta":
                memory = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        made.append(Member(path, tensor, first.setdefault(memory, tensor), holder, key))
    return made
