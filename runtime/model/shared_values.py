"""What a backward needs in memory that others have too, and may change in place until it runs.

A saved value may be in the memory of a tensor that lives outside of the program: an input (a batch,
a buffer, whatever tensor the model reads), an output, or a constant of a stage's code. The version
of that tensor is noted, as autograd notes that of what it saves. It is not the saved value that is
asked: a view that compiled code makes counts versions of its own.

Versions of inputs are those from before the forward: a change that it makes itself counts too.
What is copied (to the host, to a disk, or ahead of such a change) is the backward's own, and right
whatever becomes of the original.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from megacompile import compat


class Source(NamedTuple):
    """A tensor that lives outside of a program, and its version at a forward."""

    what: str  # as an error names it
    tensor: torch.Tensor
    version: int
    names: frozenset[str]  # of what a backward needs in its memory


def sources(inputs: Mapping[str, Any], constants: Mapping[str, torch.Tensor]) -> list[Source]:
    """The tensors that a forward is about to read."""
    found = [
        Source(f"input {name}", value, _version(value), frozenset())
        for name, value in inputs.items()
        if isinstance(value, torch.Tensor)
    ]
    for name, value in constants.items():
        found.append(Source("a constant", value, _version(value), frozenset({name})))
    return found


def shared(
    saved_values: dict[str, Any],
    before: Iterable[Source],
    outputs: Iterable[Any],
    written: Sequence[str] = (),
) -> list[Source]:
    """The sources that a backward needs as they are, after its forward.

    Saved values in the memory of others become tensors of their own: autograd writes its node into
    an output, and the node holds what is saved.

    Args:
        before: from ahead of the forward.
        written: the saved values that backwards change in place; they are memory as it is then.
    """
    after = [
        Source("an output", tensor.detach(), compat.version(tensor), frozenset())
        for tensor in outputs
        if isinstance(tensor, torch.Tensor)
    ]
    by_memory: dict[int, list[Source]] = {}
    for source in (*before, *after):
        by_memory.setdefault(_memory(source.tensor), []).append(source)
    by_memory.pop(0, None)  # of tensors without elements
    found: dict[int, set[str]] = {}
    for name, value in saved_values.items():
        if not isinstance(value, torch.Tensor) or name in written:
            continue
        if (memory := _memory(value)) in by_memory:
            saved_values[name] = value.detach()
            found.setdefault(memory, set()).add(name)
    return [
        source._replace(names=source.names | found.get(memory, set()))
        for memory, group in by_memory.items()
        for source in group
        if memory in found or source.names
    ]


def changed(among: Iterable[Source], needed: Callable[[], Iterable[str]]) -> Source | None:
    """The first source that was changed in place, of those that have something that is needed."""
    found = [source for source in among if compat.version(source.tensor) != source.version]
    names = frozenset(needed()) if found else frozenset()
    return next((source for source in found if not names.isdisjoint(source.names)), None)


def _version(tensor: torch.Tensor) -> int:
    """Its version; torch refuses one of inference mode, where a backward needs the tensor."""
    return -1 if tensor.is_inference() else compat.version(tensor)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
