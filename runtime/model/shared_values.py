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


class Readings(NamedTuple):
    """The tensors that a forward is about to read whose versions are those from before it."""

    inputs: dict[str, torch.Tensor]  # that the forward changes in place
    constants: Mapping[str, torch.Tensor]
    versions: list[int]  # of the inputs, then of the constants

    @classmethod
    def of(
        cls, inputs: Mapping[str, Any], constants: Mapping[str, torch.Tensor], names: Iterable[str]
    ) -> Readings:
        """Note versions ahead of a forward.

        Args:
            names: of the inputs that the forward changes in place.
        """
        found = {k: v for k in names if isinstance(v := inputs.get(k), torch.Tensor)}
        return cls(found, constants, _versions([*found.values(), *constants.values()]))


def shared(
    saved_values: dict[str, Any],
    before: Readings,
    inputs: Mapping[str, Any],
    outputs: Iterable[Any],
    borrowed: Collection[str] = (),
    written: Collection[str] = (),
) -> list[Source]:
    """The sources that a backward needs as they are, after its forward.

    Saved values in the memory of others become tensors of their own: autograd writes its node into
    an output, and the node holds what is saved.

    Args:
        before: from ahead of the forward.
        inputs: of the forward, by name.
        borrowed: saved values that the plain model's backward would not keep, and so does not miss.
        written: the saved values that backwards change in place; they are memory as it is then.
    """
    saved = {
        name: value
        for name, value in saved_values.items()
        if isinstance(value, torch.Tensor) and name not in written
    }
    lie_in = dict(zip(saved, _memories(saved.values()), strict=True))
    given = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    left = [value for value in outputs if isinstance(value, torch.Tensor)]
    every = [*_memories(given.values()), *_memories(before.constants.values()), *_memories(left)]
    met = {*lie_in.values()}.intersection(every)
    met.discard(0)  # of tensors without elements
    if not met and not before.constants:
        return []
    by_memory = _sources_in(met, before, given, left)
    touched = met.intersection(_memories(before.inputs.values()))
    found: dict[int, set[str]] = {}
    themselves: set[str] = set()  # inputs that are saved, as they are
    for name, memory in lie_in.items():
        if memory not in met:
            continue
        value = saved[name]
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
        for source in group:
            names = here | {source.input} if source.input in themselves else here
            if names := names | source.names:
                kept.append(source._replace(names=frozenset(names)))
    return kept


def _sources_in(
    met: Collection[int],
    before: Readings,
    given: Mapping[str, torch.Tensor],
    outputs: Sequence[torch.Tensor],
) -> dict[int, list[Source]]:
    """The sources by their memory: those in memory that saved values have too, and constants."""
    found: dict[int, list[Source]] = {}

    def note(what: str, tensors: Mapping[str, torch.Tensor], versions: Sequence[int]) -> None:
        each = zip(tensors.items(), versions, _memories(tensors.values()), strict=True)
        for (name, tensor), version, memory in each:
            if memory in met:
                source = Source(f"{what} {name}", tensor, version, frozenset(), name)
                found.setdefault(memory, []).append(source)

    unchanged = {name: value for name, value in given.items() if name not in before.inputs}
    note("input", unchanged, _versions(unchanged.values()))
    count = len(before.inputs)
    note("input", before.inputs, before.versions[:count])
    for (name, value), version in zip(
        before.constants.items(), before.versions[count:], strict=True
    ):
        source = Source("a constant", value, version, frozenset({name}))
        found.setdefault(_memory(value), []).append(source)
    for tensor in outputs:
        if _memory(tensor) in met:
            version = compat.version(tensor)
            source = Source("an output", tensor.detach(), version, frozenset())
            found.setdefault(_memory(tensor), []).append(source)
    return found


def changed(among: Iterable[Source], needed: Callable[[], Iterable[str]]) -> Source | None:
    """The first source that was changed in place, of those that have something that is needed."""
    found = [source for source in among if compat.version(source.tensor) != source.version]
    names = frozenset(needed()) if found else frozenset()
    return next((source for source in found if not names.isdisjoint(source.names)), None)


def _versions(tensors: Collection[torch.Tensor]) -> list[int]:
    """The version of each; -1 in inference mode, which a backward refuses anyway."""
    if any(map(torch.Tensor.is_inference, tensors)):
        return [-1 if t.is_inference() else compat.version(t) for t in tensors]
    return compat.versions(tensors)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _memories(tensors: Iterable[torch.Tensor]) -> list[int]:
    """That of each: of hundreds, in every step."""
    return list(map(_ADDRESS, map(_STORAGE, tensors)))


_ADDRESS, _STORAGE = torch.UntypedStorage.data_ptr, torch.Tensor.untyped_storage
