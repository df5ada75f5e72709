"""A model as safetensors with Hugging Face's names, of which a part is never taken for the whole.

    write     every file under a name that no reader looks for (*.incomplete), and fsync
    retract   the index, or the one file, of an older save: from here on there is no checkpoint.
              One file that another one replaces stays, if the config does too
    rename    the files to their names
    publish   the index, or the one file, by a rename: from here on there is the new one

A process that is killed leaves the old checkpoint, none, or the new one. A tied tensor is saved
once. One tensor at a time has a copy: where ranks share it, it is not on the host, or not
contiguous.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import shutil
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from megacompile import compat
from megacompile.errors import CheckpointError, OptionError
from megacompile.option_values import parse_bytes
from megacompile.runtime.checkpoint import hugging_face
from megacompile.runtime.checkpoint.files import INCOMPLETE, SHARD, WEIGHTS, library
from megacompile.runtime.checkpoint.hugging_face import Saved
from megacompile.runtime.device.ranks import ranks_of
from megacompile.text import format_bytes

_INDEX = f"{WEIGHTS}.index.json"
_CONFIGS = f"configs{INCOMPLETE}"  # a folder
_HEADER_BYTES = 2**20  # of all files together, about


@dataclass(frozen=True, slots=True)
class _Shard:
    """One file."""

    name: str
    tensors: tuple[str, ...]


def save(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
) -> None:
    """Save a model's parameters and persistent buffers as safetensors, tensor by tensor.

    `from_pretrained(folder)` of transformers and `megacompile(model, checkpoint=folder)` read it.
    Names are those of `model.state_dict()`; of a model of transformers, those of its checkpoints,
    and its config is saved too. A save that is cut off is never taken for a whole one.

    With several processes, call it in one of them. Where ranks share the model (`mesh=`), call it
    in all of them: they gather one tensor at a time, and the first one writes, its buffers too.
    When it returns, the checkpoint is whole; where the first one fails, all raise.

    Args:
        model: megacompiled or not; a submodule of a megacompiled one too.
        folder: made where it is not there. Other files in it stay.
        max_shard_size: of one file: bytes, "5GB". A larger tensor has a file of its own.

    Raises:
        CheckpointError: the disk is full, or the folder cannot be written. An older checkpoint in
            the folder is whole, unless the error came while files were renamed: then none is.
        MissingExtraError: `safetensors` is not installed.
        OptionError: `max_shard_size` is no size.
        RankError: another rank that shares the model does something else, or has stopped.

    Example::

        megacompile.save(model, "checkpoint")
        model = megacompile(model_on_meta, checkpoint="checkpoint")
    """
    savers = Savers(model)
    path = Path(folder)
    with savers.together():
        library()
        limit = parse_bytes("max_shard_size", max_shard_size, 0)
        if limit < 1:
            raise OptionError(
                f"save(): got max_shard_size={max_shard_size!r}; needed at least 1 byte"
            )
        tensors = _tensors(model, savers)
        shards = _shards(tensors.looks, limit)
        if savers.writes:
            with _told(path):
                path.mkdir(parents=True, exist_ok=True)
                _clear(path)
                _check_room(path, sum(map(_size, tensors.looks.values())) + _HEADER_BYTES)
    try:
        for shard in shards:
            _write(path, shard, tensors, savers)
        with savers.together(), _told(path):
            if savers.writes:
                _write_index(path, shards, tensors)
                _write_configs(model, path / _CONFIGS)
                _publish(path, shards)
    except Exception:
        if savers.writes:
            _clear(path)
        raise


def _clear(path: Path) -> None:
    """Remove what a save that was cut off has left."""
    shutil.rmtree(path / _CONFIGS, ignore_errors=True)
    for left in path.glob("*" + INCOMPLETE):
        left.unlink()


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """Turns what goes wrong in the folder into an error of ours."""
    try:
        yield
    except Exception as error:
        raise CheckpointError(
            f"save(): folder {path} cannot be written ({error}); no new checkpoint is there; free "
            "the disk, or save elsewhere"
        ) from error


def _tensors(model: nn.Module, savers: Savers) -> Saved:
    """The tensors that are saved, by name; each once."""
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise CheckpointError(
            f"save(): {type(model).__name__} has tensors on the meta device, which have no values; "
            "needed a model in memory; save it after megacompile()"
        )
    kept: dict[int, str] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor):
            raise CheckpointError(
                f"save(): {type(model).__name__}.{name} is {type(value).__name__}; safetensors "
                "holds tensors alone; use torch.save(model.state_dict(), file)"
            )
        kept.setdefault(id(value), name)
    found = {name: value.detach() for name, value in _named(model, set(kept.values())).items()}
    for name in hugging_face.left_out(model, found, "_keys_to_ignore_on_save"):
        del found[name]
    return Saved(model, found, savers.whole)


def _named(model: nn.Module, names: set[str]) -> dict[str, torch.Tensor]:
    """The values of a state dict; a reader waits for updates that are under way.

    Parameters themselves, which no hook on state dicts makes whole (`model.whole_states`): ranks
    gather them one by one.
    """
    found = model.state_dict(keep_vars=True)
    return {name: value for name, value in found.items() if name in names}


def _shards(tensors: Mapping[str, torch.Tensor], limit_bytes: int) -> list[_Shard]:
    groups: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        size += _size(tensor)
        if size > limit_bytes and groups[-1]:
            groups.append([])
            size = _size(tensor)
        groups[-1].append(name)
    stem = Path(WEIGHTS).stem
    several = len(groups) > 1
    return [
        _Shard(
            f"{stem}-{k:05}-of-{len(groups):05}.safetensors" if several else WEIGHTS, tuple(group)
        )
        for k, group in enumerate(groups, 1)
    ]


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.itemsize


def _check_room(path: Path, needed: int) -> None:
    free = shutil.disk_usage(path).free
    if free < needed:
        raise OSError(
            f"the disk has {format_bytes(free)} free, and {format_bytes(needed)} are needed beside "
            "what is there"
        )


def _write(path: Path, shard: _Shard, tensors: Saved, savers: Savers) -> None:
    """One file, whole and on the disk, under a name that is not read."""
    file: SafetensorsFile | None = None
    target = path / (shard.name + INCOMPLETE)
    with ExitStack() as stack:
        with savers.together(), _told(path):
            if savers.writes:
                made = SafetensorsFile(target, {n: tensors.looks[n] for n in shard.tensors})
                file = stack.enter_context(made)
        for name in shard.tensors:
            _write_one(file, name, tensors, path, savers)
    with savers.together(), _told(path):
        if file is not None:
            _sync(target)


def _write_one(
    file: SafetensorsFile | None, name: str, tensors: Saved, path: Path, savers: Savers
) -> None:
    """Its memory is free when this returns."""
    tensor = tensors.get(name)
    with savers.together(), _told(path):
        if file is not None:
            file.write(name, tensor)


def _write_index(path: Path, shards: Sequence[_Shard], tensors: Saved) -> None:
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(map(_size, tensors.looks.values()))},
            "weight_map": {name: shard.name for shard in shards for name in shard.tensors},
        }
        file = path / (_INDEX + INCOMPLETE)
        file.write_text(json.dumps(index, indent=2) + "\n")
        _sync(file)
    _sync(path)


def _publish(path: Path, shards: Sequence[_Shard]) -> None:
    """Take the old checkpoint away, and let the new one be there, in this order."""
    last = _INDEX if len(shards) > 1 else WEIGHTS
    configs = sorted((path / _CONFIGS).iterdir())
    stays = len(shards) == 1 and all(_is_same(new, path / new.name) for new in configs)
    for old in (_INDEX, WEIGHTS):
        if old != last or not stays:
            (path / old).unlink(missing_ok=True)
    _sync(path)  # before any of its files is replaced
    for new in configs:
        os.replace(new, path / new.name)
    (path / _CONFIGS).rmdir()
    for shard in shards:
        if shard.name != last:
            os.replace(path / (shard.name + INCOMPLETE), path / shard.name)
    _sync(path)  # every file before the index
    os.replace(path / (last + INCOMPLETE), path / last)
    _sync(path)
    names = {shard.name for shard in shards}
    for stale in path.glob(f"{Path(WEIGHTS).stem}-*.safetensors"):  # of an older save
        if SHARD.fullmatch(stale.name) and stale.name not in names:
            stale.unlink(missing_ok=True)


def _is_same(new: Path, old: Path) -> bool:
    return old.is_file() and old.read_bytes() == new.read_bytes()


def _sync(path: Path) -> None:
    """Brings what was written to a file, or renamed in a folder, to the disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _write_configs(model: Any, folder: Path) -> None:
    """The config of a model of transformers, so that `from_pretrained` finds all that it needs."""
    folder.mkdir()
    if hugging_face.is_pretrained(model) and hasattr(model.config, "save_pretrained"):
        config = copy.deepcopy(model.config)
        config.architectures = [type(model).__name__]
        config.save_pretrained(folder)
        generation = getattr(model, "generation_config", None)
        if generation is not None and getattr(model, "can_generate", bool)():
            generation.save_pretrained(folder)
    for file in folder.iterdir():
        _sync(file)
    _sync(folder)


# One file of safetensors, of which one tensor after the other is written.
#
# `safetensors` itself takes all tensors of a file at once. Where ranks share a model, no more than
# one of them is whole at a time. Format: https://huggingface.co/docs/safetensors

_ALIGNED = 8  # the tensors begin at a multiple


class SafetensorsFile:
    """A file that is being written: `with SafetensorsFile(path, looks) as file`.

    Args:
        path: of the file.
        looks: a tensor of the shape and dtype of each, by name; their values are not read.
    """

    def __init__(self, path: Path, looks: Mapping[str, torch.Tensor]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._starts: dict[str, int] = {}
        end = 0
        for name in sorted(looks, key=lambda n: (-looks[n].itemsize, n)):  # each is aligned so
            look = looks[name]
            start, end = end, end + look.numel() * look.itemsize
            header[name] = {**_said(look), "data_offsets": [start, end]}
            self._starts[name] = start
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNED)
        self._begin = 8 + len(text)
        self._file = path.open("wb", buffering=0)  # nothing is left to be written when it closes
        try:
            self._put(struct.pack("<Q", len(text)) + text)
        except BaseException:
            self._file.close()
            raise

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write one tensor, once."""
        self._file.seek(self._begin + self._starts.pop(name))
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        if flat.numel():
            self._put(flat.view(torch.uint8).numpy())

    def _put(self, data: Any) -> None:
        left = memoryview(data)
        while left:
            left = left[self._file.write(left) :]

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
        assert kind is not None or not self._starts, f"{len(self._starts)} tensors are missing"


def _said(look: torch.Tensor) -> dict[str, Any]:
    """Dtype and shape of a tensor, in the words of the library."""
    dtype, numbers = _in_its_words(look.dtype)
    shape = list(look.shape)
    if shape:
        shape[-1] *= numbers
    return {"dtype": dtype, "shape": shape}


@functools.cache
def _in_its_words(dtype: torch.dtype) -> tuple[str, int]:
    """The library's name of a dtype, and the number of its numbers in an element: it knows dtypes
    of several numbers in a byte."""
    from safetensors.torch import save

    one = save({"x": torch.empty(1, dtype=dtype)})
    header = json.loads(one[8 : 8 + struct.unpack("<Q", one[:8])[0]])["x"]
    return header["dtype"], header["shape"][0]


# The processes that save a model: one, or the ranks that share it, of which the first one writes.
#
# every rank    gathers one tensor after the other, whole
# the first     writes it; what goes wrong there is told to all, so that no rank waits for it


class Savers:
    """The ranks that save a model; all of them make one."""

    def __init__(self, model: nn.Module) -> None:
        sharded = next(filter(compat.is_sharded, model.parameters()), None)
        self._ranks = None if sharded is None else ranks_of(sharded)
        self._what = f"save() of {type(model).__name__}"

    @property
    def writes(self) -> bool:
        """True if this process writes."""
        return self._ranks is None or self._ranks.is_first

    def together(self) -> AbstractContextManager[None]:
        """Raises in all of them what raises in one."""
        return nullcontext() if self._ranks is None else self._ranks.together(self._what)

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """All of a tensor; of one that ranks share, a collective."""
        if not compat.is_sharded(tensor):
            return tensor
        assert self._ranks is not None, "who has such a tensor is one of several ranks"
        return self._ranks.all_of(tensor)
