"""Matches a checkpoint's tensors with a model's; one error lists all mismatches."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import nn

from megacompile.errors import CheckpointError
from megacompile.runtime.checkpoint.files import Entry, entries_of
from megacompile.runtime.checkpoint.hugging_face import Group, conversion, left_in

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
            initialised at random, as without a checkpoint.
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
    """Match the tensors of a model with those of a checkpoint, in the model's order.

    Raises:
        CheckpointError: there is no complete checkpoint, or it does not fit the model.
        MissingExtraError: `safetensors` is not installed.
    """
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
         "initialize=(pattern, ...) of megacompile.Checkpoint initialises them at random; "
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
