"""Memory that several tensors share.

Overlapping inputs of a call move to the device together, and captured graphs know about them. In
this module, a tensor's memory extends from its first to its last element, and tensors overlap if
these ranges do. Other tensors in a parameter's memory do not follow it into its bucket, and the
user is warned.
"""

from __future__ import annotations

import functools
import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from megacompile import compat, notices
from megacompile.ir.capture import Overlap
from megacompile.packed import is_wrapper
from megacompile.runtime.params.proxies import StreamedParameter


class _Span(NamedTuple):
    """The byte range of a tensor, and its position in a list."""

    start: int
    stop: int
    position: int


def moved(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    is_there: Callable[[torch.Tensor], bool],
    move: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Apply `move` to the tensors of a call; overlapping tensors still overlap afterwards.

    A list or dict without moved tensors is passed on as the same object: the forward may change it.

    Args:
        is_there: returns True if `move` would return the tensor itself.
    """
    tensors = [leaf for leaf in compat.leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if all(map(is_there, tensors)):
        return args, kwargs
    found = {id(tensor): tensor for tensor in tensors}
    made = zip(found.values(), moved_together(list(found.values()), move), strict=True)
    others = {id(tensor): there for tensor, there in made if there is not tensor}
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


def moved_together(
    tensors: Sequence[torch.Tensor], move: Callable[[torch.Tensor], torch.Tensor]
) -> list[torch.Tensor]:
    """Move each tensor; overlapping tensors become views of the moved common memory.

    If a gradient flows through them, `move` is applied to their common base.
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

    `parameters` are tensors in the memory of streamed parameters, one per bucket.
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
    """The common memory of each overlap, flat, in the order of `found`."""
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
    """The reason why these tensors cannot be views of one flat base; "" if they can."""
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
    """A tensor to move so that the whole group moves, or None."""
    overlap = _overlap(group, members)
    if not overlap.hindrance:
        return _flat(members[0], 0, overlap.numel)
    bases = [(member, compat.base_of(member)) for member in members]
    common = {id(root): root for root in (m if base is None else base for m, base in bases)}
    root = next(iter(common.values()))
    through_root = len(common) == 1 and root.requires_grad and root.is_contiguous()
    return root if through_root else None


def _dense(tensor: torch.Tensor) -> bool:
    """True if the tensor has storage that `as_strided` can describe."""
    plain = type(tensor) in compat.PLAIN_TENSORS
    dense = plain and tensor.layout is torch.strided and tensor.device.type != "meta"
    return dense and not compat.is_of_transform(tensor)


def _groups(tensors: Sequence[tuple[int, torch.Tensor]]) -> list[list[_Span]]:
    """Tensors grouped by shared memory, each group sorted by address."""
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
    """Adjacent spans, split where their tensors do not overlap."""
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
    """True if the two are provably disjoint columns of one table: `t[:, :4]` and `t[:, 4:]`."""
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
    """(stride, size) of a tensor's dimensions that have more than one element."""
    dims = zip(tensor.stride(), tensor.shape, strict=True)
    return [(step, n) for step, n in dims if n > 1 and step > 0]


def _span(position: int, tensor: torch.Tensor) -> _Span:
    return _Span(*memory_of(tensor), position)


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


class AliasNotice:
    """Warns once, before parameters move to buckets, that aliases stay behind."""

    def __init__(self) -> None:
        self.said = False

    def of_model(self, model: nn.Module) -> None:
        """Warn of aliases of the parameters of a model before it is megacompiled.

        An autograd graph may reference a parameter's storage too, which needs no warning. So if a
        storage has users other than parameters, the live Python tensors are searched.
        """
        shared = _shared(model.parameters())
        if shared:
            others = _others(shared, {*map(id, model.parameters()), *_computed(model)})
            self._say(model, [p for p in shared if compat.storage_key(p) in others], others)

    def of_parts(self, model: nn.Module, params: Iterable[nn.Parameter]) -> None:
        """Warn of parameters that are parts of a larger tensor, such as a flat buffer. A parameter
        with a replacement of its own size (`p.data = backup`) is excluded: loops that do this in
        each step (SAM, LocalSGD) no longer use that tensor.
        """
        self(model, [param for param in params if _is_part(param)])

    def of_moving(self, model: nn.Module, params: Iterable[nn.Parameter]) -> None:
        """Warn of parameters with aliases whose bucket is about to move."""
        self._say(model, list(params), {})

    def __call__(self, model: nn.Module, params: Iterable[nn.Parameter]) -> None:
        """Warn of those of these parameters that share their memory."""
        given = list(params)
        if given and not self.said:
            self._say(model, _shared(given), {})

    def _say(
        self, model: nn.Module, shared: list[nn.Parameter], others: Mapping[int, list[torch.Tensor]]
    ) -> None:
        if not shared or self.said:
            return
        self.said = True
        ids = {id(param) for param in shared}
        name, first = next((n, param) for n, param in model.named_parameters() if id(param) in ids)
        where = _where(model, others.get(compat.storage_key(first), []))
        notices.warn(
            f"megacompile: parameter {type(model).__name__}.{name} shares its memory with another "
            f"tensor ({where}). megacompile() moves the parameter and not the other tensor, so "
            "changes of one no longer reach the other. Write to the parameter itself, with "
            f"torch.no_grad(): model.get_parameter({name!r}).copy_(other); call "
            f"model.state_dict(), or make the view, again ({len(shared)} parameters; shown once)"
        )


def _shared(params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """The parameters whose memory other tensors use too."""
    params = [param for param in params if param.numel() and _has_memory(param)]
    known = Counter(compat.storage_key(param) for param in params)
    return [p for p in params if compat.storage_users(p) > known[compat.storage_key(p)]]


def _has_memory(param: nn.Parameter) -> bool:
    return not param.is_meta and not is_wrapper(param) and not compat.is_sharded(param)


def _is_part(param: nn.Parameter) -> bool:
    needed_bytes = param.numel() * param.dtype.itemsize
    return _has_memory(param) and param.untyped_storage().nbytes() > needed_bytes


def _computed(model: nn.Module) -> Iterator[int]:
    """Ids of the attributes that `torch.nn.utils.spectral_norm` computes in each forward."""
    for module in model.modules():
        for name, _ in module.named_parameters(recurse=False):
            yield id(vars(module).get(name.removesuffix("_orig")))


def _others(params: Iterable[nn.Parameter], known: set[int]) -> dict[int, list[torch.Tensor]]:
    """Live Python tensors in the memory of parameters, by storage key.

    Args:
        known: ids of tensors to skip.
    """
    keys = {compat.storage_key(param) for param in params}
    found: dict[int, list[torch.Tensor]] = {}
    for value in gc.get_objects():
        if type(value) in _PLAIN and id(value) not in known and _has_storage(value):
            key = compat.storage_key(value)
            if key in keys:
                found.setdefault(key, []).append(value)
    return found


def _has_storage(tensor: torch.Tensor) -> bool:
    strided = tensor.layout is torch.strided and not tensor.is_meta
    return strided and not compat.is_of_transform(tensor)


def _where(model: nn.Module, tensors: Iterable[torch.Tensor]) -> str:
    """The locations of the aliases, as far as known."""
    ids = set(map(id, tensors))
    for path, module in model.named_modules():
        for name, value in (*vars(module).items(), *module.named_buffers(recurse=False)):
            if id(value) in ids:
                return ".".join(filter(None, (type(model).__name__, path, name)))
    return (
        "an earlier state_dict() or view; a flat buffer; the argument of "
        "load_state_dict(assign=True)"
    )
