"""The initial contents of a model's buckets: a checkpoint, the model's initialization, or both.

    match     compare names, shapes and dtypes with the files' headers; errors come before any
              allocation, and one error lists all mismatches
    move in   give parameters and buffers the uninitialized memory of their buckets
    set       initialize the tensors that the checkpoint lacks
    read      read the others directly into place, on several threads
    filled    page-lock each bucket while the next ones are read

After an error the model is on meta again, or has its previous memory.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import KW_ONLY, dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megacompile import compat
from megacompile.errors import CheckpointError
from megacompile.progress import bar
from megacompile.runtime.checkpoint.files import Entry, Reader, entries_of, wait
from megacompile.runtime.checkpoint.initialize import (
    Group,
    conversion,
    give_memory,
    initialize,
    left_in,
    pretrained,
    refuse_stray,
)
from megacompile.runtime.device.ranks import Ranks

_SHOWN = 5  # names of each kind


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint in safetensors, for `megacompile(model, checkpoint=...)`.

    Args:
        path: a folder written by `save_pretrained` or `megacompile.save`, or a file.
        names: maps the model's name of a tensor to the checkpoint's. Default: the same name; or, if
            more names match, without the path of the module that has all parameters (a model inside
            a wrapper that returns only the loss).
        cast: convert dtypes even if that loses precision. Default: only lossless conversions.
        ignore: patterns (`fnmatch`) of the checkpoint's names that the model may lack.
        initialize: patterns of the model's names that the checkpoint may lack; these tensors are
            initialized at random, as without a checkpoint.
    """

    path: str | os.PathLike[str]
    _: KW_ONLY
    names: Callable[[str], str] | None = None
    cast: bool = False
    ignore: str | Sequence[str] = ()
    initialize: str | Sequence[str] = ()


@dataclass(slots=True)
class Stored:
    """The part of a checkpoint that some tensors of a model are read from."""

    tensors: dict[str, torch.Tensor]  # the model's, by name
    entries: dict[str, Entry]  # the checkpoint's, by name
    group: Group | None = None
    """Computes the tensors from the entries. None: one tensor, and each entry has its value."""


def match(model: nn.Module, checkpoint: Checkpoint) -> list[Stored]:
    """Match the tensors of a model with those of a checkpoint, in the model's order. Raises
    CheckpointError: there is no complete checkpoint, or it does not fit the model;
    MissingExtraError: `safetensors` is not installed."""
    entries = entries_of(Path(checkpoint.path))
    tensors = _named(model)
    rename = checkpoint.names or _unwrapped(tensors, entries)
    theirs = {name: rename(name) for names, _ in tensors for name in names}
    groups: dict[str, Group] = {}
    if checkpoint.names is None and not entries.keys() <= set(theirs.values()):
        renamed, converted = conversion(model, entries)  # transformers may know the other names
        if converted or not theirs.keys().isdisjoint(renamed):
            theirs = renamed
            groups = {target: group for group in converted for target in group.targets}
    sources: dict[int, Stored] = {}
    missing = []
    for names, tensor in tensors:
        present = {n: entries[n] for n in map(theirs.get, names) if n is not None and n in entries}
        group = next((groups[name] for name in names if name in groups), None)
        if present:
            sources[id(tensor)] = Stored({names[0]: tensor}, present)
        elif group is not None:
            of_group = {name: entries[name] for name in group.sources}
            source = sources.setdefault(id(group), Stored({}, of_group, group))
            source.tensors.update({name: tensor for name in names if name in group.targets})
        elif not _any_matches(names, checkpoint.initialize):
            missing.append(theirs.get(names[0], names[0]))
    found = list(sources.values())
    used = {name for source in found for name in source.entries}
    unexpected = [n for n in entries if n not in used and not _any_matches([n], checkpoint.ignore)]
    _compare(model, checkpoint, found, missing, unexpected)
    return found


def _named(model: nn.Module) -> list[tuple[list[str], torch.Tensor]]:
    """The tensors of the model's state dict, each with all of its names."""
    tensors: dict[int, tuple[list[str], torch.Tensor]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor):
            tensors.setdefault(id(value), ([], value))[0].append(name)
    return list(tensors.values())


def _unwrapped(
    tensors: Sequence[tuple[list[str], torch.Tensor]], entries: Mapping[str, Entry]
) -> Callable[[str], str]:
    """Maps names to names without the path of a module that has all tensors: the path with which
    most names match."""

    def fitting(path: str) -> int:
        return sum(any(n.removeprefix(path) in entries for n in names) for names, _ in tensors)

    modules = os.path.commonprefix([n.split(".")[:-1] for names, _ in tensors for n in names])
    paths = ["".join(f"{name}." for name in modules[:k]) for k in range(len(modules) + 1)]
    path = max(paths, key=fitting)  # of equals the outermost
    return lambda name: name.removeprefix(path)


def _any_matches(names: Iterable[str], patterns: str | Sequence[str]) -> bool:
    patterns = [patterns] if isinstance(patterns, str) else patterns
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def _compare(
    model: nn.Module,
    checkpoint: Checkpoint,
    found: Iterable[Stored],
    missing: Sequence[str],
    unexpected: Sequence[str],
) -> None:
    """Raise if names are missing or unexpected, a shape differs, or a conversion would round."""
    shapes: dict[str, None] = {}
    dtypes: dict[str, None] = {}
    for source in found:
        for name, tensor in source.tensors.items():
            for entry in source.entries.values():
                needed = tuple(tensor.shape)
                if source.group is None and entry.shape != needed:
                    shapes[f"{name} got {entry.shape}, needed {needed}"] = None
                if not checkpoint.cast and not _keeps(entry.dtype, tensor.dtype):
                    dtypes[f"{name} got {entry.dtype}, needed {tensor.dtype}"] = None
    kinds = (
        ("missing", left_in(model, missing, "_keys_to_ignore_on_load_missing"),
         "initialize=(pattern, ...) of megacompile.Checkpoint initializes them at random; "
         "names=... translates names"),
        ("unexpected", left_in(model, unexpected, "_keys_to_ignore_on_load_unexpected"),
         "ignore=(pattern, ...) of megacompile.Checkpoint leaves them out; or build the model that "
         "has them"),
        ("shapes", list(shapes), "build the model with the checkpoint's config"),
        ("dtypes", list(dtypes), "model.to(dtype) before megacompile() costs nothing on meta; "
         "cast=True of megacompile.Checkpoint rounds"),
    )  # fmt: skip
    lines = [
        f"  {what} ({len(names)}): {'; '.join(names[:_SHOWN])}"
        f"{'; ...' if len(names) > _SHOWN else ''}\n    {fix}"
        for what, names, fix in kinds
        if names
    ]
    if lines:
        raise CheckpointError(
            f"megacompile(): checkpoint {checkpoint.path} does not fit {type(model).__name__}\n"
            + "\n".join(lines)
        )


def _keeps(source: torch.dtype, target: torch.dtype) -> bool:
    """True if a conversion is lossless."""
    if source == target:
        return True
    both = source.is_floating_point and target.is_floating_point
    return both and source.itemsize > 1 and torch.promote_types(source, target) == target


class Contents:
    """The initial values of one model: a checkpoint's, or else those of its initialization. Before
    `fill` the model changes only by tying the weights that its config ties. Raises CheckpointError:
    the checkpoint is incomplete or does not fit the model; ModelError: a tensor on meta is not a
    parameter or buffer."""

    def __init__(self, model: nn.Module, checkpoint: Checkpoint | None) -> None:
        self.model = model
        self.ranks: Ranks | None = None  # the ranks that share the parameters
        self.shared: set[int] = set()  # ids of the sharded parameters
        if on_meta(model):
            for _, module in pretrained(model):
                module.tie_weights()  # moving a model to meta unties them
            refuse_stray(model)
        self.found = [] if checkpoint is None else match(model, checkpoint)
        self._find_sources()
        tensors = [*model.named_parameters(), *model.named_buffers()]
        self.unset = {
            id(tensor): name
            for name, tensor in tensors
            if tensor.is_meta and id(tensor) not in self.sources
        }
        params = {id(param) for param in model.parameters()}
        # without parameters to draw, initialization must not advance the user's generator
        self.draws = any(key in params for key in self.unset)

    def share(self, sharded: Mapping[int, nn.Parameter], ranks: Ranks) -> None:
        """Shard the model: each rank reads only its rows of the new parameters, by the ids of the
        old ones. Raises CheckpointError: parameters need random initialization, which would differ
        between ranks."""
        drawn = [name for key, name in self.unset.items() if key in sharded]
        if drawn:
            raise CheckpointError(
                f"megacompile(): {len(drawn)} parameters are not in the checkpoint "
                f"({', '.join(drawn[:5])}), and cannot be drawn at random with mesh=...: every "
                "rank would draw different values; needed a checkpoint that has them"
            )
        self.ranks = ranks
        self.shared = {id(param) for param in sharded.values()}
        for source in self.found:
            source.tensors = {n: sharded.get(id(t), t) for n, t in source.tensors.items()}
        self._find_sources()

    def _find_sources(self) -> None:
        """Note the part of the checkpoint that each tensor is read from, by id."""
        self.sources = {id(t): each for each in self.found for t in each.tensors.values()}

    def _rows(self, key: int, entry: Entry) -> Entry:
        """The consecutive rows of a checkpoint's tensor that this rank reads."""
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

    def fill(self, buckets: Sequence[Any], progress: bool | None) -> None:
        """Move the model into the uninitialized memory of these `HostBucket`s, and set all values.
        Raises CheckpointError: a file cannot be read; ModelError: a tensor was not initialized. The
        model is unchanged."""
        with contextlib.ExitStack() as undos:
            params = {id(param): param for bucket in buckets for param in bucket.params}
            places_of = (zip(each.params, each.values, strict=True) for each in buckets)
            values = {id(param): value for pairs in places_of for param, value in pairs}
            for key, param in params.items():
                if not param.is_meta and key not in self.sources:
                    values[key].copy_(param.detach())  # it keeps its values
                undos.callback(give_memory(param, values[key]))
            # buffers on meta or in the checkpoint: the dict with each, its name there, itself
            places = [
                (holder, name, buffer)
                for holder in compat.holders(self.model.modules(), "buffers")
                for name, buffer in holder.items()
                if buffer is not None and (buffer.is_meta or id(buffer) in self.sources)
            ]
            buffers = {id(old): torch.empty_like(old, device="cpu") for _, _, old in places}
            for holder, name, old in places:
                undos.callback(holder.__setitem__, name, old)
                holder[name] = buffers[id(old)]
            with contextlib.nullcontext() if self.draws else torch.random.fork_rng(devices=[]):
                tensors = {**params, **buffers}
                initialize(self.model, {name: tensors[key] for key, name in self.unset.items()})
            for holder, name, old in places:  # initialization may have replaced the buffer
                if id(old) in self.sources:
                    holder[name] = buffers[id(old)]
            entries = [entry for each in self.found for entry in each.entries.values()]
            total = sum(entry.size_bytes for entry in entries)
            with bar("reading the checkpoint", total, progress, unit="B") as step:
                self._read(buckets, {**values, **buffers}, step)
            undos.pop_all()

    def _read(
        self,
        buckets: Sequence[Any],
        targets: Mapping[int, torch.Tensor],
        step: Callable[[int], object],
    ) -> None:
        begun: dict[int, list[Future[None]]] = {}  # by id of the source
        with Reader(step) as reader:
            for key, target in targets.items():  # in the buckets' order
                source = self.sources.get(key)
                if source is None or id(source) in begun:
                    continue
                if source.group is None:
                    (entry, *_) = source.entries.values()
                    begun[id(source)] = reader.read(self._rows(key, entry), target)
                else:
                    into = functools.partial(self._compute, source, targets)
                    begun[id(source)] = [reader.compute(source.entries, into)]
            for bucket in buckets:
                for param in bucket.params:
                    wait(begun.get(id(self.sources.get(id(param))), ()))
                bucket.filled()
            for pieces in begun.values():
                wait(pieces)
            for key, source in self.sources.items():
                if source.group is None:
                    self._compare(reader, key, source, targets[key])

    def _compute(
        self,
        source: Stored,
        targets: Mapping[int, torch.Tensor],
        tensors: Mapping[str, torch.Tensor],
    ) -> None:
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


def on_meta(model: nn.Module) -> bool:
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
