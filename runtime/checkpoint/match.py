"""Which tensor of a checkpoint is which of a model; all that does not fit, in one error."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn

from megacompile.errors import CheckpointError
from megacompile.runtime.checkpoint import hugging_face
from megacompile.runtime.checkpoint.checkpoint import Checkpoint
from megacompile.runtime.checkpoint.files import Entry, entries_of

_SHOWN = 5  # names of each kind


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of a model that a checkpoint has."""

    tensor: torch.Tensor  # the model's: a parameter or a buffer
    entry: Entry
    again: tuple[Entry, ...]  # under its other names, which must be equal


def match(model: nn.Module, checkpoint: Checkpoint) -> list[Stored]:
    """Every tensor of the model that the checkpoint has, in the order of the model.

    Raises:
        CheckpointError: there is no whole checkpoint, or it does not fit the model.
        MissingExtraError: `safetensors` is not installed.
    """
    entries = entries_of(checkpoint.path)
    tensors = _named(model)
    rename = checkpoint.names or _unwrapped(model, tensors, entries)
    faults = _Faults(checkpoint, type(model).__name__)
    found: dict[int, Stored] = {}
    used: set[str] = set()
    absent = []
    for names, tensor in tensors:
        theirs = [entries[rename(n)] for n in names if rename(n) in entries]
        used.update(entry.name for entry in theirs)
        if theirs:
            faults.compare(names[0], tensor, theirs)
            found[id(tensor)] = Stored(tensor, theirs[0], tuple(theirs[1:]))
        elif not _any_matches(names, checkpoint.initialize):
            absent.append(rename(names[0]))
    ignored = hugging_face.left_out(model, absent, "_keys_to_ignore_on_load_missing")
    faults.missing = [name for name in absent if name not in ignored]
    unexpected = [name for name in entries if name not in used]
    ignored = hugging_face.left_out(model, unexpected, "_keys_to_ignore_on_load_unexpected")
    faults.unexpected = [
        n for n in unexpected if n not in ignored and not _any_matches([n], checkpoint.ignore)
    ]
    faults.check()
    return list(found.values())


def _named(model: nn.Module) -> list[tuple[list[str], torch.Tensor]]:
    """The tensors that a state dict has, each with all of its names there."""
    found: dict[int, tuple[list[str], torch.Tensor]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor):
            found.setdefault(id(value), ([], value))[0].append(name)
    return list(found.values())


def _unwrapped(
    model: nn.Module,
    tensors: Sequence[tuple[list[str], torch.Tensor]],
    entries: Mapping[str, Entry],
) -> Callable[[str], str]:
    """Names without the path of a module that has all of them, where more of them fit so."""

    def fitting(path: str) -> int:
        return sum(any(n.removeprefix(path) in entries for n in names) for names, _ in tensors)

    path = max(_wrappers(model), key=fitting)  # the first of equals: the outermost
    return lambda name: name.removeprefix(path)


def _wrappers(model: nn.Module) -> Iterator[str]:
    """The paths of the modules that have all that the model has, the model itself first."""
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
    """What does not fit."""

    def __init__(self, checkpoint: Checkpoint, model: str) -> None:
        self.checkpoint = checkpoint
        self.model = model
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self._shapes: list[str] = []
        self._dtypes: list[str] = []

    def compare(self, name: str, tensor: torch.Tensor, entries: Sequence[Entry]) -> None:
        """Note shapes and dtypes that differ."""
        for entry in entries:
            if entry.shape != tuple(tensor.shape):
                self._shapes.append(f"{name} got {entry.shape}, needed {tuple(tensor.shape)}")
            if not self.checkpoint.cast and not _keeps(entry.dtype, tensor.dtype):
                self._dtypes.append(f"{name} got {entry.dtype}, needed {tensor.dtype}")

    def check(self) -> None:
        """Raise if there is anything."""
        kinds = (
            ("missing", self.missing, "initialize=(pattern, ...) of megacompile.Checkpoint gives "
             "them values at random; names=... translates names"),
            ("unexpected", self.unexpected, "ignore=(pattern, ...) of megacompile.Checkpoint "
             "leaves them out; or build the model that they are of"),
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
    """Does a conversion lose nothing?"""
    if source == target:
        return True
    both = source.is_floating_point and target.is_floating_point
    return both and source.itemsize > 1 and torch.promote_types(source, target) == target
