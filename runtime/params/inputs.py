"""Memory that the inputs of a call share: moved together to the device, and known to captured
graphs.

A tensor's memory is here from its first to its last element; two tensors overlap where these do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from megacompile import compat
from megacompile.ir.capture import Overlap
from megacompile.runtime.params.proxies import StreamedParameter


class _Span(NamedTuple):
    """The memory of a tensor, in bytes, and its position among others."""

    start: int
    stop: int
    position: int


def moved(
    args: tuple[Any, ...], kwargs: dict[str, Any], move: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Apply `move` to the tensors of a call; those that overlap still do afterwards.

    A list or dict in which no tensor moves is handed on itself: the forward may change it.
    """
    tensors = (leaf for leaf in compat.leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
    found = {id(tensor): tensor for tensor in tensors}
    made = zip(found.values(), moved_together(list(found.values()), move), strict=True)
    others = {id(tensor): there for tensor, there in made if there is not tensor}
    if not others:
        return args, kwargs
    there = [_with(others, each) for each in args]
    return tuple(there), {name: _with(others, each) for name, each in kwargs.items()}


def _with(others: Mapping[int, torch.Tensor], value: Any) -> Any:
    """A value, with others in the place of tensors, by their ids; itself where none is in it."""
    if id(value) in others:
        return others[id(value)]
    if not any(id(leaf) in others for leaf in compat.leaves(value)):
        return value
    return compat.tree_map_once(functools.partial(_with, others), value)


def moved_together(
    tensors: Sequence[torch.Tensor], move: Callable[[torch.Tensor], torch.Tensor]
) -> list[torch.Tensor]:
    """`move` of each tensor; those that overlap become views of the moved memory that they share.

    Where a gradient flows through them, `move` is applied to what all of them are views of.
    """
    made = [tensor if _dense(tensor) else move(tensor) for tensor in tensors]
    for group in _groups([(i, t) for i, t in enumerate(tensors) if _dense(t)]):
        members = [tensors[span.position] for span in group]
        base = _base(group, members) if len(group) > 1 else None
        if base is None:
            for span, member in zip(group, members, strict=True):
                made[span.position] = move(member)
            continue
        there = move(base)
        for span, member in zip(group, members, strict=True):
            if there is base:
                made[span.position] = member
                continue
            offset = (member.data_ptr() - base.data_ptr()) // base.itemsize
            made[span.position] = there.as_strided(member.shape, member.stride(), offset)
    return made


def overlaps(
    args: Sequence[Any], changed: frozenset[int], parameters: Iterable[torch.Tensor]
) -> tuple[Overlap, ...]:
    """The groups of a captured graph's inputs that overlap, if one of each is in `changed`.

    `parameters` are in the memory of streamed parameters, one of each bucket.
    """
    tensors = [
        (i, arg)
        for i, arg in enumerate(args)
        if isinstance(arg, torch.Tensor) and not isinstance(arg, StreamedParameter) and _dense(arg)
    ]
    ours = {tensor.untyped_storage().data_ptr() for tensor in parameters if tensor.numel()}
    found = []
    for group in _groups(tensors):
        members = [args[span.position] for span in group]
        streamed = any(member.untyped_storage().data_ptr() in ours for member in members)
        if (len(group) > 1 or streamed) and not changed.isdisjoint(s.position for s in group):
            found.append(_overlap(group, members, streamed=streamed))
    return tuple(found)


def bases(args: Sequence[Any], found: Iterable[Overlap]) -> list[torch.Tensor]:
    """The memory that the members of each overlap share, flat, in the order of `found`."""
    made = []
    for overlap in found:
        position, offset = overlap.members[0]
        made.append(_flat(args[position], offset, overlap.numel))
    return made


def _flat(member: torch.Tensor, offset: int, numel: int) -> torch.Tensor:
    """`numel` elements of a tensor's memory, from `offset` elements before its first one."""
    with torch.no_grad():
        return member.as_strided((numel,), (1,), member.storage_offset() - offset)


def _overlap(
    group: Sequence[_Span], members: Sequence[torch.Tensor], *, streamed: bool = False
) -> Overlap:
    start, stop = group[0].start, max(span.stop for span in group)
    itemsize = members[0].itemsize
    offsets = tuple((span.position, (span.start - start) // itemsize) for span in group)
    hindrance = "a parameter is in that memory too" if streamed else _hindrance(group, members)
    return Overlap(offsets, (stop - start) // itemsize, hindrance)


def _hindrance(group: Sequence[_Span], members: Sequence[torch.Tensor]) -> str:
    """The reason why tensors cannot be views of one flat base; "" if they can."""
    if len({member.dtype for member in members}) > 1:
        return "they are of several dtypes"
    if any((span.start - group[0].start) % members[0].itemsize for span in group):
        return "they begin within each other's elements"
    if len({member.untyped_storage().data_ptr() for member in members}) > 1:
        return "the memory is known under several names (numpy?)"
    if any(member.requires_grad for member in members):
        return "they require grad"
    return ""


def _base(group: Sequence[_Span], members: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """A tensor whose move moves all of a group; None where there is none."""
    overlap = _overlap(group, members)
    if not overlap.hindrance:
        return _flat(members[0], 0, overlap.numel)
    bases = [(member, compat.base_of(member)) for member in members]
    common = {id(root): root for root in (m if base is None else base for m, base in bases)}
    root = next(iter(common.values()))
    through_root = len(common) == 1 and root.requires_grad and root.is_contiguous()
    return root if through_root else None


def _dense(tensor: torch.Tensor) -> bool:
    """True if the tensor has memory of its own kind, that `as_strided` can describe."""
    plain = type(tensor) in compat.PLAIN_TENSORS
    dense = plain and tensor.layout is torch.strided and tensor.device.type != "meta"
    return dense and not compat.is_of_transform(tensor)


def _groups(tensors: Sequence[tuple[int, torch.Tensor]]) -> list[list[_Span]]:
    """Tensors by the memory that they share, each group from its first address on."""
    near: list[list[_Span]] = []
    stop = -1
    for span in sorted(_span(i, tensor) for i, tensor in tensors):
        if near and span.start < stop:
            near[-1].append(span)
        else:
            near.append([span])
        stop = max(stop, span.stop)
    if len(near) == len(tensors):
        return near
    by_position = dict(tensors)
    return [group for spans in near for group in _connected(spans, by_position)]


def _connected(
    spans: Sequence[_Span], by_position: Mapping[int, torch.Tensor]
) -> list[list[_Span]]:
    """Spans that are near each other, parted where their tensors do not meet."""
    groups: list[list[_Span]] = []
    for span in spans:
        tensor = by_position[span.position]
        joined, others = [span], []
        for group in groups:
            meets = any(
                span.start < s.stop and not _apart(by_position[s.position], tensor) for s in group
            )
            if meets:
                joined = [*group, *joined]
            else:
                others.append(group)
        groups = [*others, sorted(joined)]
    return groups


def _apart(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if the two are surely other columns of a common table: `t[:, :4]` and `t[:, 4:]`."""
    if a.itemsize != b.itemsize or (a.data_ptr() - b.data_ptr()) % a.itemsize:
        return False
    steps = (_steps(a), _steps(b))
    beside = (b.data_ptr() - a.data_ptr()) // a.itemsize
    for pitch in {step for step, _ in steps[0]} & {step for step, _ in steps[1]}:
        if any(step % pitch for dims in steps for step, _ in dims if step >= pitch):
            continue
        run, other = (1 + sum((n - 1) * step for step, n in dims if step < pitch) for dims in steps)
        if run <= beside % pitch <= pitch - other:
            return True
    return False


def _steps(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """(stride, size) of the dimensions that a tensor goes along."""
    dims = zip(tensor.stride(), tensor.shape, strict=True)
    return [(step, n) for step, n in dims if n > 1 and step > 0]


def _span(position: int, tensor: torch.Tensor) -> _Span:
    return _Span(*memory_of(tensor), position)


def memory_of(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of a dense tensor's first byte, and of what comes after its last one."""
    start = tensor.data_ptr()
    if not tensor.numel():
        return start, start
    if tensor.is_contiguous():
        return start, start + tensor.nbytes
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.itemsize
