"""Matches a checkpoint's tensors with a model's; one error lists all mismatches."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import nn

from megacompile.errors import CheckpointError
from megacompile.runtime.checkpoint import hugging_face
from megacompile.runtime.checkpoint.files import Entry, entries_of
from megacompile.runtime.checkpoint.hugging_face import Group, conversion

_SHOWN = 5  # names of each kind


@dataclass(frozen=True, slots=True, init=False)
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

    path: Path
    names: Callable[[str], str] | None
    cast: bool
    ignore: tuple[str, ...]
    initialize: tuple[str, ...]

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        names: Callable[[str], str] | None = None,
        cast: bool = False,
        ignore: str | Iterable[str] = (),
        initialize: str | Iterable[str] = (),
    ) -> None:
        for field, value in (
            ("path", Path(path)),
            ("names", names),
            ("cast", cast),
            ("ignore", (ignore,) if isinstance(ignore, str) else tuple(ignore)),
            ("initialize", (initialize,) if isinstance(initialize, str) else tuple(initialize)),
        ):
            object.__setattr__(self, field, value)

    @staticmethod
    def of(given: str | os.PathLike[str] | Checkpoint) -> Checkpoint:
        """Convert the user's `checkpoint=`."""
        return given if isinstance(given, Checkpoint) else Checkpoint(given)


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of a model that a checkpoint has."""

    tensor: torch.Tensor  # the model's parameter or buffer
    entry: Entry
    again: tuple[Entry, ...]  # its entries under other names, whose values must be equal


@dataclass(frozen=True, slots=True)
class Computed:
    """Tensors of a model that transformers computes from a checkpoint's tensors."""

    group: Group
    tensors: dict[str, torch.Tensor]  # the model's, by name
    entries: dict[str, Entry]  # the checkpoint's, by name


@dataclass(frozen=True, slots=True)
class Matched:
    """The tensors of a model that a checkpoint has, in the model's order."""

    stored: tuple[Stored, ...] = ()
    computed: tuple[Computed, ...] = ()


def match(model: nn.Module, checkpoint: Checkpoint) -> Matched:
    """Match the tensors of a model with those of a checkpoint.

    Raises:
        CheckpointError: there is no complete checkpoint, or it does not fit the model.
        MissingExtraError: `safetensors` is not installed.
    """
    entries = entries_of(checkpoint.path)
    tensors = _named(model)
    rename = checkpoint.names or _unwrapped(model, tensors, entries)
    names = {rename(name): name for names, _ in tensors for name in names}
    if checkpoint.names is None and any(name not in names for name in entries):
        loading = conversion(model, entries)  # transformers may know the other names
        if loading is not None and (loading.groups or set(loading.renamed) & set(names.values())):
            renamed = {name: entries[source] for name, source in loading.renamed.items()}
            sources = {
                source: entries[source] for each in loading.groups for source in each.sources
            }
            return _match(model, checkpoint, tensors, renamed, str, loading.groups, sources)
    return _match(model, checkpoint, tensors, entries, rename, (), {})


def _match(
    model: nn.Module,
    checkpoint: Checkpoint,
    tensors: Sequence[tuple[list[str], torch.Tensor]],
    entries: Mapping[str, Entry],
    rename: Callable[[str], str],
    groups: Sequence[Group],
    sources: Mapping[str, Entry],
) -> Matched:
    """Match tensors by name.

    Args:
        model: for its ignore patterns and its name in errors.
        checkpoint: the user's options.
        tensors: the model's tensors, each with all of its names.
        entries: the checkpoint's tensors, by `rename(the model's name)`.
        rename: maps a name of the model to a key of `entries`.
        groups: tensors that transformers computes.
        sources: the checkpoint's tensors that the groups need, by name.
    """
    faults = _Faults(checkpoint, type(model).__name__)
    stored: list[Stored] = []
    used: set[str] = set()
    absent = []
    of_group = {target: group for group in groups for target in group.targets}
    computed: dict[int, Computed] = {}
    for names, tensor in tensors:
        present = [rename(name) for name in names if rename(name) in entries]
        used.update(present)
        by = next((of_group[name] for name in names if name in of_group), None)
        if present:
            faults.compare(names[0], tensor, [entries[name] for name in present])
            first, *again = (entries[name] for name in present)
            stored.append(Stored(tensor, first, tuple(again)))
        elif by is not None:
            of_it = {name: sources[name] for name in by.sources}
            faults.compare_dtypes(names[0], tensor, of_it.values())
            merged = computed.setdefault(id(by), Computed(by, {}, of_it))
            merged.tensors.update({name: tensor for name in names if name in by.targets})
        elif not _any_matches(names, checkpoint.initialize):
            absent.append(rename(names[0]))
    ignored = hugging_face.left_out(model, absent, "_keys_to_ignore_on_load_missing")
    faults.missing = [name for name in absent if name not in ignored]
    unexpected = [entry.name for name, entry in entries.items() if name not in used]
    unexpected += [n for g in groups if id(g) not in computed for n in g.sources]
    ignored = hugging_face.left_out(model, unexpected, "_keys_to_ignore_on_load_unexpected")
    faults.unexpected = [
        n for n in unexpected if n not in ignored and not _any_matches([n], checkpoint.ignore)
    ]
    faults.check()
    return Matched(tuple(stored), tuple(computed.values()))


def _named(model: nn.Module) -> list[tuple[list[str], torch.Tensor]]:
    """The tensors of the model's state dict, each with all of its names."""
    tensors: dict[int, tuple[list[str], torch.Tensor]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor):
            tensors.setdefault(id(value), ([], value))[0].append(name)
    return list(tensors.values())


def _unwrapped(
    model: nn.Module,
    tensors: Sequence[tuple[list[str], torch.Tensor]],
    entries: Mapping[str, Entry],
) -> Callable[[str], str]:
    """Maps names to names without a wrapper's path: the one with which most names match."""

    def fitting(path: str) -> int:
        return sum(any(n.removeprefix(path) in entries for n in names) for names, _ in tensors)

    path = max(_wrappers(model), key=fitting)  # of equals the outermost
    return lambda name: name.removeprefix(path)


def _wrappers(model: nn.Module) -> Iterator[str]:
    """The paths of the modules that have all tensors of the model, starting with the model."""
    path, module = "", model
    while True:
        yield path
        names = module.state_dict(keep_vars=True)
        for name, child in module.named_children():
            if names and all(n.startswith(f"{name}.") for n in names):
                path, module = f"{path}{name}.", child
                break
        else:
            return


def _any_matches(names: Iterable[str], patterns: Iterable[str]) -> bool:
    patterns = list(patterns)
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


class _Faults:
    """Collects mismatches, and raises one error for all of them."""

    def __init__(self, checkpoint: Checkpoint, model: str) -> None:
        self.checkpoint = checkpoint
        self.model = model
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self._shapes: list[str] = []
        self._dtypes: list[str] = []

    def compare(self, name: str, tensor: torch.Tensor, entries: Sequence[Entry]) -> None:
        """Record mismatched shapes and dtypes."""
        for entry in entries:
            if entry.shape != tuple(tensor.shape):
                self._shapes.append(f"{name} got {entry.shape}, needed {tuple(tensor.shape)}")
        self.compare_dtypes(name, tensor, entries)

    def compare_dtypes(self, name: str, tensor: torch.Tensor, entries: Iterable[Entry]) -> None:
        """Record dtypes whose conversion loses precision."""
        dtypes = dict.fromkeys(entry.dtype for entry in entries)
        for dtype in dtypes if not self.checkpoint.cast else ():
            if not _keeps(dtype, tensor.dtype):
                self._dtypes.append(f"{name} got {dtype}, needed {tensor.dtype}")

    def check(self) -> None:
        """Raise if there are mismatches."""
        kinds = (
            ("missing", self.missing, "initialize=(pattern, ...) of megacompile.Checkpoint "
             "initialises them at random; names=... translates names"),
            ("unexpected", self.unexpected, "ignore=(pattern, ...) of megacompile.Checkpoint "
             "leaves them out; or build the model that has them"),
            ("shapes", self._shapes, "build the model with the checkpoint's config"),
            ("dtypes", self._dtypes, "model.to(dtype) before megacompile() costs nothing on meta; "
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
                f"megacompile(): checkpoint {self.checkpoint.path} does not fit {self.model}\n"
                + "\n".join(lines)
            )


def _keeps(source: torch.dtype, target: torch.dtype) -> bool:
    """True if a conversion is lossless."""
    if source == target:
        return True
    both = source.is_floating_point and target.is_floating_point
    return both and source.itemsize > 1 and torch.promote_types(source, target) == target
