"""The values that a backward needs in memory that others have too, and may change in place until it
runs.

A saved value may be in the memory of a tensor that lives outside of the program: an input (a batch,
a buffer, whatever tensor the model reads), an output, or a constant of a stage's code. The version
of that tensor is noted, as autograd notes that of what it saves. It is not the saved value that is
asked: a view that compiled code makes counts versions of its own.

Versions of inputs that the forward changes are those from before it: a change that it makes itself
counts too. Another input may count its versions together with such a one, as a view of the same
tensor, and has no element of it (those that do are views of one base): it has the version of the
forward's end.
What is copied (to the host, to a disk, or ahead of such a change) is the backward's own, and right
whatever becomes of the original. So is what the plain model's backward would not keep: of a mask,
of which only a copy is used, or of what a recompute begins with. It is copied where it is small.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from megacompile import compat

SMALL_BYTES = 2**20  # too little to be noticed in a plan of the memory


class Source(NamedTuple):
    """A tensor that lives outside of a program, and its version at a forward."""

    what: str  # as an error names it
    tensor: torch.Tensor
    version: int
    names: frozenset[str]  # of what a backward needs in its memory
    input: str = ""  # its name in the schedule, of an input


def sources(
    inputs: Mapping[str, Any], constants: Mapping[str, torch.Tensor], changed: Collection[str]
) -> list[Source]:
    """The tensors that a forward is about to read whose versions are those from before it.

    Args:
        changed: the inputs that the forward changes in place.
    """
    read = [name for name in changed if isinstance(inputs.get(name), torch.Tensor)]
    found = [_of_input(name, inputs[name]) for name in read]
    for name, value in constants.items():
        found.append(Source("a constant", value, _version(value), frozenset({name})))
    return found


def shared(
    saved_values: dict[str, Any],
    before: Sequence[Source],
    inputs: Mapping[str, Any],
    outputs: Iterable[Any],
    changed: Collection[str] = (),
    borrowed: Collection[str] = (),
    written: Collection[str] = (),
) -> list[Source]:
    """The sources that a backward needs as they are, after its forward.

    Saved values in the memory of others become tensors of their own: autograd writes its node into
    an output, and the node holds what is saved.

    Args:
        before: from ahead of the forward.
        inputs: of the forward, by name.
        changed: those that the forward changes in place, which `before` has.
        borrowed: saved values that the plain model's backward would not keep, and so does not miss.
        written: the saved values that backwards change in place; they are memory as it is then.
    """
    given = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    unchanged = {name: value for name, value in given.items() if name not in changed}
    after = [
        Source("an output", tensor.detach(), compat.version(tensor), frozenset())
        for tensor in outputs
        if isinstance(tensor, torch.Tensor)
    ]
    by_memory: dict[int, list[Source | str]] = {}  # a string: the name of an unchanged input
    for name, memory in zip(unchanged, _memories(unchanged.values()), strict=True):
        by_memory.setdefault(memory, []).append(name)
    for source in (*before, *after):
        by_memory.setdefault(_memory(source.tensor), []).append(source)
    by_memory.pop(0, None)  # of tensors without elements
    touched = {_memory(source.tensor) for source in before if source.input}
    found: dict[int, set[str]] = {}
    themselves: set[str] = set()  # inputs that are saved, as they are
    saved = {
        name: value
        for name, value in saved_values.items()
        if isinstance(value, torch.Tensor) and name not in written
    }
    for (name, value), memory in zip(saved.items(), _memories(saved.values()), strict=True):
        if memory not in by_memory:
            continue
        if name in borrowed and memory not in touched and value.nbytes <= SMALL_BYTES:
            saved_values[name] = value.detach().clone()
            continue
        saved_values[name] = value.detach()
        if name in given:
            themselves.add(name)
        else:
            found.setdefault(memory, set()).add(name)
    kept: list[Source] = []
    for memory, group in by_memory.items():
        here = found.get(memory, set())
        for each in group:
            own = each if isinstance(each, str) else each.input
            names = here | {own} if own in themselves else here
            if isinstance(each, Source):
                names = names | each.names
            if names:
                source = _of_input(each, given[each]) if isinstance(each, str) else each
                kept.append(source._replace(names=frozenset(names)))
    return kept


def changed(among: Iterable[Source], needed: Callable[[], Iterable[str]]) -> Source | None:
    """The first source that was changed in place, of those that have something that is needed."""
    found = [source for source in among if compat.version(source.tensor) != source.version]
    names = frozenset(needed()) if found else frozenset()
    return next((source for source in found if not names.isdisjoint(source.names)), None)


def _of_input(name: str, value: torch.Tensor) -> Source:
    return Source(f"input {name}", value, _version(value), frozenset(), name)


def _version(tensor: torch.Tensor) -> int:
    """Its version; torch refuses one of inference mode, where a backward needs the tensor."""
    return -1 if tensor.is_inference() else compat.version(tensor)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _memories(tensors: Iterable[torch.Tensor]) -> list[int]:
    """That of each: of hundreds, in every step."""
    return list(map(_ADDRESS, map(_STORAGE, tensors)))


_ADDRESS, _STORAGE = torch.UntypedStorage.data_ptr, torch.Tensor.untyped_storage
