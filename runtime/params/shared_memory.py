"""Memory that several tensors share: inputs of a captured graph, and aliases of a parameter, which
do not follow it into its bucket. A tensor's memory extends from its first to its last element here.
"""

from __future__ import annotations

import functools
import gc
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from megacompile import compat, notices
from megacompile.packed import is_wrapper
from megacompile.runtime.params.proxies import StreamedParameter


def moved(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    move: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Apply `move` once to each tensor of a call. A list or dict without moved tensors stays the
    same object, because the forward may change it."""
    found = {id(t): t for t in compat.leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
    made = {key: move(tensor) for key, tensor in found.items()}
    others = {key: there for key, there in made.items() if there is not found[key]}
    if not others:
        return args, kwargs
    there = [_with(others, each) for each in args]
    return tuple(there), {name: _with(others, each) for name, each in kwargs.items()}


def _with(others: Mapping[int, torch.Tensor], value: Any) -> Any:
    """A value with its tensors replaced, by id; the same object if it has none of them."""
    if id(value) in others:
        return others[id(value)]
    if not any(id(leaf) in others for leaf in compat.leaves(value)):
        return value
    return compat.tree_map_once(functools.partial(_with, others), value)


def overlaps(
    args: Sequence[Any], changed: frozenset[int], homes: Collection[int]
) -> tuple[tuple[int, ...], ...]:
    """Groups of a captured graph's inputs, by position, that share memory with one another or a
    streamed parameter, if an input of the group is in `changed`. `homes` are the addresses of
    parameters, each with its own storage."""
    tensors = [
        (i, arg)
        for i, arg in enumerate(args)
        if isinstance(arg, torch.Tensor) and not isinstance(arg, StreamedParameter) and _dense(arg)
    ]
    found = []
    for group in _groups(tensors):
        streamed = any(args[i].untyped_storage().data_ptr() in homes for i in group)
        if (len(group) > 1 or streamed) and not changed.isdisjoint(group):
            found.append(tuple(group))
    return tuple(found)


def _dense(tensor: torch.Tensor) -> bool:
    """True if the tensor has storage that `as_strided` can describe."""
    plain = type(tensor) in compat.PLAIN_TENSORS
    dense = plain and tensor.layout is torch.strided and tensor.device.type != "meta"
    return dense and not compat.is_of_transform(tensor)


def _groups(tensors: Iterable[tuple[int, torch.Tensor]]) -> list[list[int]]:
    """The numbers of tensors, grouped by shared memory, each group sorted by address."""
    groups: list[list[int]] = []
    end = -1
    for start, stop, i in sorted((*memory_of(tensor), i) for i, tensor in tensors):
        if groups and start < end:
            groups[-1].append(i)
        else:
            groups.append([i])
        end = max(end, stop)
    return groups


def memory_of(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of a dense tensor's first byte and of the byte after its last."""
    start = tensor.data_ptr()
    if not tensor.numel():
        return start, start
    if tensor.is_contiguous():
        return start, start + tensor.nbytes
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.itemsize


# Aliases of a parameter's memory, which do not follow it into its bucket.

_PLAIN = frozenset({torch.Tensor, nn.Parameter, nn.Buffer})


def warn_of_aliases(model: nn.Module, params: Iterable[nn.Parameter], of: object) -> None:
    """Warn, once per `of`, that aliases of these parameters do not follow them into buckets."""
    ids = {id(param) for param in params}
    name = next((name for name, param in model.named_parameters() if id(param) in ids), None)
    if name is not None:
        notices.warn_once(
            "aliases",
            f"megacompile: parameter {type(model).__name__}.{name} shares its memory with another "
            "tensor (a view or an attribute; an earlier state_dict(); a flat buffer; the argument "
            "of load_state_dict(assign=True)). megacompile() moves the parameter and not the other "
            "tensor, so changes of one no longer reach the other. Write to the parameter itself, "
            f"with torch.no_grad(): model.get_parameter({name!r}).copy_(other); call "
            f"model.state_dict(), or make the view, again ({len(ids)} parameters; shown once)",
            of=of,
        )


def with_aliases(params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    params = [param for param in params if param.numel() and _has_memory(param)]
    known = Counter(compat.storage_key(param) for param in params)
    return [p for p in params if compat.storage_users(p) > known[compat.storage_key(p)]]


def known_aliases(model: nn.Module) -> list[nn.Parameter]:
    """The parameters with aliases in Python, of a model that is not megacompiled yet. Other users
    of their memory are autograd graphs, which need no warning."""
    shared = with_aliases(model.parameters())
    keys = {compat.storage_key(param) for param in shared}
    skipped = set(map(id, model.parameters()))
    for module in model.modules():  # torch.nn.utils.spectral_norm computes these in each forward
        for name, _ in module.named_parameters(recurse=False):
            skipped.add(id(vars(module).get(name.removesuffix("_orig"))))
    found = {
        compat.storage_key(value)
        for value in (gc.get_objects() if keys else ())
        if type(value) in _PLAIN and id(value) not in skipped
        if value.layout is torch.strided and not value.is_meta and not compat.is_of_transform(value)
    }
    return [param for param in shared if compat.storage_key(param) in found]


def are_parts(params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """The parameters that are parts of a larger tensor in use, such as a flat buffer. A replacement
    of a parameter's own size (`p.data = backup`) does not count: loops that set it in each step
    (SAM, LocalSGD) no longer use the larger tensor."""
    found = [param for param in params if _has_memory(param)]
    return with_aliases(p for p in found if p.untyped_storage().nbytes() > p.nbytes)


def _has_memory(param: nn.Parameter) -> bool:
    return not param.is_meta and not is_wrapper(param) and not compat.is_sharded(param)
