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

from megacompile import compat
from megacompile.errors import CheckpointError
from megacompile.progress import bar
from megacompile.runtime.checkpoint import hugging_face
from megacompile.runtime.checkpoint.files import Entry, Reader, wait
from megacompile.runtime.checkpoint.initialize import (
    check_initializers,
    give_memory,
    initialize,
    refuse_stray,
)
from megacompile.runtime.checkpoint.match import Checkpoint, Stored, match
from megacompile.runtime.device.ranks import Ranks


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
        found = [] if checkpoint is None else match(model, checkpoint)
        self.sources = {id(t): source for source in found for t in source.tensors.values()}
        tensors = [*model.named_parameters(), *model.named_buffers()]
        self.unset = {
            id(tensor): name
            for name, tensor in tensors
            if tensor.is_meta and id(tensor) not in self.sources
        }
        check_initializers(model, self.unset)
        params = {id(param) for param in model.parameters()}
        # without parameters to draw, initialisation must not advance the user's generator
        self.draws = any(key in params for key in self.unset)

    def share(self, sharded: Mapping[int, nn.Parameter], ranks: Ranks) -> None:
        """Shard the model: each rank reads only its rows of the new parameters, by the ids of the
        old ones.

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
        self.ranks = ranks
        self.shared = {id(param) for param in sharded.values()}
        for source in self._each_source():
            source.tensors = {n: sharded.get(id(t), t) for n, t in source.tensors.items()}
        self.sources = {
            id(sharded[key]) if key in sharded else key: source
            for key, source in self.sources.items()
        }

    def _each_source(self) -> list[Stored]:
        return list({id(source): source for source in self.sources.values()}.values())

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
        with contextlib.ExitStack() as undos:
            params = {id(param): param for bucket in buckets for param in bucket.params}
            values = {
                id(param): value
                for bucket in buckets
                for param, value in zip(bucket.params, bucket.values, strict=True)
            }
            for key, param in params.items():
                if not param.is_meta and key not in self.sources:
                    values[key].copy_(param.detach())  # it keeps its values
                undos.callback(give_memory(param, values[key]))
            places = self._buffers()
            buffers = {id(old): torch.empty_like(old, device="cpu") for _, _, old in places}
            for holder, name, old in places:
                undos.callback(holder.__setitem__, name, old)
                holder[name] = buffers[id(old)]
            with contextlib.nullcontext() if self.draws else torch.random.fork_rng(devices=[]):
                tensors = {**params, **buffers}
                initialize(self.model, {name: tensors[key] for key, name in self.unset.items()})
            for holder, name, old in places:  # initialisation may have replaced the buffer
                if id(old) in self.sources:
                    holder[name] = buffers[id(old)]
            entries = [entry for each in self._each_source() for entry in each.entries.values()]
            total = sum(entry.size_bytes for entry in entries)
            with bar("reading the checkpoint", total, progress, unit="B") as step:
                self._read(buckets, {**values, **buffers}, step)
            undos.pop_all()

    def _read(
        self,
        buckets: Sequence[Empty],
        targets: Mapping[int, torch.Tensor],
        step: Callable[[int], object],
    ) -> None:
        begun: dict[int, list[Future[None]]] = {}  # by id of the source
        with Reader(step) as reader:

            def begin(key: int) -> list[Future[None]]:
                source = self.sources.get(key)
                if source is None:
                    return []
                if id(source) not in begun:
                    if source.group is None:
                        (entry, *_) = source.entries.values()
                        begun[id(source)] = reader.read(self._rows(key, entry), targets[key])
                    else:
                        into = functools.partial(self._compute, source, targets)
                        begun[id(source)] = [reader.compute(source.entries, into)]
                return begun[id(source)]

            for key in targets:  # in the buckets' order
                begin(key)
            for bucket in buckets:
                for param in bucket.params:
                    wait(begin(id(param)))
                bucket.filled()
            for key in targets:
                wait(begin(key))
            for key, source in self.sources.items():
                if source.group is None:
                    self._compare(reader, key, source, targets[key])

    def _compute(
        self,
        source: Stored,
        targets: Mapping[int, torch.Tensor],
        tensors: Mapping[str, torch.Tensor],
    ) -> None:
        """Compute tensors from the checkpoint's and copy them to their places."""
        assert source.group is not None
        converted = source.group.convert(tensors)
        for name, tensor in source.tensors.items():
            value = converted.get(name)
            if value is None or value.shape != tensor.shape:
                got = "nothing" if value is None else tuple(value.shape)
                raise CheckpointError(
                    f"megacompile(): transformers converts {len(tensors)} tensors of the "
                    f"checkpoint ({next(iter(tensors))}, ...) to {got}; needed "
                    f"{tuple(tensor.shape)} for {name}; build the model with the checkpoint's "
                    "config"
                )
            if self.ranks is not None and id(tensor) in self.shared:
                first, shape = self.ranks.rows(tuple(value.shape))
                value = value.narrow(0, first, shape[0])
            targets[id(tensor)].copy_(value)

    def _compare(self, reader: Reader, key: int, source: Stored, value: torch.Tensor) -> None:
        """Raise if the checkpoint has different values for a tied tensor's names."""
        first, *again = source.entries.values()
        for entry in again:
            other = torch.empty_like(value, device="cpu")
            wait(reader.read(self._rows(key, entry), other))
            if not torch.equal(other, value.cpu()):
                raise CheckpointError(
                    f"megacompile(): {first.name} and {entry.name} are one tensor in the model, "
                    f"but two different ones in checkpoint {entry.path.parent}; build the model "
                    "without tied weights (tie_word_embeddings=False)"
                )

    def _buffers(self) -> list[tuple[dict[str, torch.Tensor | None], str, torch.Tensor]]:
        """The buffers that are on meta or in the checkpoint: the dict that holds each, its name
        there, and the buffer."""
        return [
            (holder, name, buffer)
            for holder in map(compat.buffers_of, self.model.modules())
            for name, buffer in holder.items()
            if buffer is not None and (buffer.is_meta or id(buffer) in self.sources)
        ]


def on_meta(model: nn.Module) -> bool:
    """True if any parameter or buffer of a model is on meta."""
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
