"""The initial contents of a model's buckets: a checkpoint, the model's initialisation, or both.

    match     compare names, shapes and dtypes with the files' headers; errors come before any
              allocation
    move in   give parameters and buffers the uninitialised memory of their buckets
    set       initialise the tensors that the checkpoint lacks
    read      read the others directly into place, on several threads
    filled    page-lock each bucket while the next ones are read

After an error the model is on meta again, or has its previous memory.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Protocol

import torch
from torch import nn

from megacompile.errors import CheckpointError
from megacompile.progress import bar
from megacompile.runtime.checkpoint import hugging_face
from megacompile.runtime.checkpoint.files import Entry
from megacompile.runtime.checkpoint.initialize import (
    buffers_in,
    check_initializers,
    give_memory,
    initialize,
    refuse_stray,
)
from megacompile.runtime.checkpoint.match import Checkpoint, Computed, Matched, Stored, match
from megacompile.runtime.checkpoint.read import Reader
from megacompile.runtime.device.ranks import Ranks

Undo = Callable[[], object]
# (the dict that holds the buffer, its name there, the old buffer, the new one)
_Place = tuple[dict[str, torch.Tensor | None], str, torch.Tensor, torch.Tensor]


class Empty(Protocol):
    """A bucket with uninitialised memory."""

    params: tuple[nn.Parameter, ...]
    values: list[torch.Tensor]

    def filled(self) -> None:
        """Called once all values are set."""


class Contents:
    """The initial values of one model.

    Args:
        model: the user's model. Before `fill` it changes only by tying the weights that its config
            ties.
        checkpoint: None: initialise tensors on meta.

    Raises:
        CheckpointError: the checkpoint is incomplete or does not fit the model.
        ModelError: some tensors cannot be initialised.
    """

    def __init__(self, model: nn.Module, checkpoint: Checkpoint | None) -> None:
        self.model = model
        self.ranks: Ranks | None = None  # the ranks that share the parameters
        self.shared: set[int] = set()  # ids of the sharded parameters
        if on_meta(model):
            hugging_face.tie(model)
            refuse_stray(model)
        found = match(model, checkpoint) if checkpoint is not None else Matched()
        self.stored = {id(each.tensor): each for each in found.stored}
        self.computed = {
            id(tensor): each for each in found.computed for tensor in each.tensors.values()
        }
        self.read = self.stored.keys() | self.computed.keys()
        tensors = [*model.named_parameters(), *model.named_buffers()]
        self.unset = {
            id(tensor): name
            for name, tensor in tensors
            if tensor.is_meta and id(tensor) not in self.read
        }
        check_initializers(model, self.unset)
        params = {id(param) for param in model.parameters()}
        # without parameters to draw, initialisation must not advance the user's generator
        self.draws = any(key in params for key in self.unset)

    def share(self, sharded: Mapping[int, nn.Parameter], ranks: Ranks) -> None:
        """Shard the model: each rank reads only its rows.

        Args:
            sharded: the new parameters, by the ids of the old ones.
            ranks: the ranks that share them.

        Raises:
            CheckpointError: parameters need random initialisation, which would differ between
                ranks.
        """
        drawn = [name for key, name in self.unset.items() if key in sharded]
        if drawn:
            raise CheckpointError(
                f"megacompile(): {len(drawn)} parameters are not in the checkpoint "
                f"({', '.join(drawn[:5])}), and cannot be drawn at random with mesh=...: every "
                "rank would draw different values; needed a checkpoint that has them"
            )

        def new(key: int) -> int:
            return id(sharded[key]) if key in sharded else key

        self.ranks = ranks
        self.shared = {id(param) for param in sharded.values()}
        self.stored = {
            new(key): replace(each, tensor=sharded.get(key, each.tensor))
            for key, each in self.stored.items()
        }
        self.computed = {new(key): each for key, each in self.computed.items()}
        for each in {id(each): each for each in self.computed.values()}.values():
            each.tensors.update({n: sharded.get(id(t), t) for n, t in each.tensors.items()})
        self.read = self.stored.keys() | self.computed.keys()

    def _rows(self, key: int, entry: Entry) -> Entry:
        """The part of a checkpoint's tensor that this rank reads: consecutive rows."""
        if self.ranks is None or key not in self.shared:
            return entry
        first, shape = self.ranks.rows(entry.shape)
        row_bytes = entry.size_bytes // max(1, entry.shape[0])
        return replace(
            entry,
            shape=shape,
            offset_bytes=entry.offset_bytes + first * row_bytes,
            size_bytes=shape[0] * row_bytes,
        )

    def fill(self, buckets: Sequence[Empty], progress: bool | None) -> None:
        """Move the model into the buckets' memory and set all values.

        Raises:
            CheckpointError: a file cannot be read. The model is unchanged.
            ModelError: a tensor was not initialised. The model is unchanged.
        """
        undos: list[Undo] = []
        try:
            self._fill(buckets, progress, undos)
        except BaseException:
            for undo in reversed(undos):
                undo()
            raise

    def _fill(self, buckets: Sequence[Empty], progress: bool | None, undos: list[Undo]) -> None:
        params = {id(param): param for bucket in buckets for param in bucket.params}
        values = {
            id(param): value
            for bucket in buckets
            for param, value in zip(bucket.params, bucket.values, strict=True)
        }
        for key, param in params.items():
            if param.is_meta or key in self.read:
                undos.append(give_memory(param, values[key]))
            else:  # keep its current values
                undos.append(_copied(param, values[key]))
        places = self._buffers(undos)
        buffers = {id(old): new for _, _, old, new in places}
        with contextlib.nullcontext() if self.draws else torch.random.fork_rng(devices=[]):
            tensors = {**params, **buffers}
            initialize(self.model, {name: tensors[key] for key, name in self.unset.items()})
        for holder, name, old, new in places:  # initialisation may have replaced the buffer
            if id(old) in self.read:
                holder[name] = new
        total = sum(each.entry.size_bytes for each in self.stored.values())
        total += sum(
            entry.size_bytes
            for each in {id(each): each for each in self.computed.values()}.values()
            for entry in each.entries.values()
        )
        with bar("reading the checkpoint", total, progress, unit="B") as step:
            self._read(buckets, values, buffers, step)

    def _read(
        self,
        buckets: Sequence[Empty],
        values: dict[int, torch.Tensor],
        buffers: dict[int, torch.Tensor],
        step: Callable[[int], object],
    ) -> None:
        targets = {**values, **buffers}
        begun: dict[int, list[Future[None]]] = {}
        with Reader(step) as reader:

            def begin(key: int) -> list[Future[None]]:
                if key in self.stored:
                    return reader.read(self._rows(key, self.stored[key].entry), targets[key])
                if key not in self.computed:
                    return []
                each = self.computed[key]
                if id(each) not in begun:
                    into = functools.partial(_put, each, targets, self._part)
                    begun[id(each)] = reader.compute(each.entries, into)
                return begun[id(each)]

            reading = [[begin(id(param)) for param in bucket.params] for bucket in buckets]
            more = [begin(key) for key in buffers]
            for bucket, pieces in zip(buckets, reading, strict=True):
                _wait(pieces)
                bucket.filled()
            _wait(more)
            for stored in self.stored.values():
                again = [self._rows(id(stored.tensor), entry) for entry in stored.again]
                _compare(reader, stored, again, targets[id(stored.tensor)])

    def _part(self, tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """This rank's part of a tensor's value."""
        if self.ranks is None or id(tensor) not in self.shared:
            return value
        first, shape = self.ranks.rows(tuple(value.shape))
        return value.narrow(0, first, shape[0])

    def _buffers(self, undos: list[Undo]) -> list[_Place]:
        """Replace buffers that are on meta or in the checkpoint by new ones on the host."""
        copies: dict[int, torch.Tensor] = {}
        places: list[_Place] = []
        for _, holder, name in buffers_in(self.model):
            old = holder[name]
            if old is not None and (old.is_meta or id(old) in self.read):
                new = copies.setdefault(id(old), torch.empty_like(old, device="cpu"))
                places.append((holder, name, old, new))
        for holder, name, old, new in places:
            undos.append(functools.partial(holder.__setitem__, name, old))
            holder[name] = new
        return places


def on_meta(model: nn.Module) -> bool:
    """True if any parameter or buffer of a model is on meta."""
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def _copied(param: nn.Parameter, value: torch.Tensor) -> Undo:
    value.copy_(param.detach())
    return give_memory(param, value)


def _wait(pieces: Sequence[Sequence[Future[None]]]) -> None:
    for each in pieces:
        for piece in each:
            piece.result()


def _put(
    each: Computed,
    targets: Mapping[int, torch.Tensor],
    part: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    sources: Mapping[str, torch.Tensor],
) -> None:
    """Compute tensors from the checkpoint's and copy them to their places."""
    converted = each.group.convert(sources)
    for name, tensor in each.tensors.items():
        value, into = converted.get(name), targets[id(tensor)]
        if value is None or value.shape != tensor.shape:
            got = "nothing" if value is None else tuple(value.shape)
            raise CheckpointError(
                f"megacompile(): transformers converts {len(sources)} tensors of the checkpoint "
                f"({next(iter(sources))}, ...) to {got}; needed {tuple(tensor.shape)} for "
                f"{name}; build the model with the checkpoint's config"
            )
        into.copy_(part(tensor, value))


def _compare(reader: Reader, stored: Stored, again: Sequence[Entry], value: torch.Tensor) -> None:
    """Raise if the checkpoint has different values for a tied tensor's names."""
    for entry in again:
        other = torch.empty_like(value, device="cpu")
        _wait([reader.read(entry, other)])
        if not torch.equal(other, value.cpu()):
            raise CheckpointError(
                f"megacompile(): {stored.entry.name} and {entry.name} are one tensor in the model, "
                f"but two different ones in checkpoint {entry.path.parent}; build the model "
                "without tied weights (tie_word_embeddings=False)"
            )
