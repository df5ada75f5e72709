"""Saves a model as safetensors with Hugging Face's names. A partial save never looks complete.

    write     write every file under a name that readers ignore (*.incomplete), and fsync
    retract   remove the index, or the single file, of an older save: now there is no checkpoint. If
              a single file replaces a single file and the config is the same, the old one stays
    rename    rename the files
    publish   rename the index, or the single file: now there is the new checkpoint

If the process is killed, the folder has the old checkpoint, none, or the new one. A tied tensor is
saved once. At most one tensor at a time is copied, if it is sharded, not on the host, or not
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
_HEADER_BYTES = 2**20  # of all files together, estimated


@dataclass(frozen=True, slots=True)
class _Shard:
    """One file of a checkpoint."""

    name: str
    tensors: tuple[str, ...]  # names


def save(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
) -> None:
    """Save a model's parameters and persistent buffers as safetensors, tensor by tensor.

    `from_pretrained(folder)` in transformers and `megacompile(model, checkpoint=folder)` read it.
    Names are those of `model.state_dict()`; a transformers model is saved with the names of its
    checkpoints and with its config. An interrupted save never looks complete.

    With several processes, call it in one of them. If ranks share the model (`mesh=`), call it in
    all of them: they gather one tensor at a time, and the first rank writes the files. When it
    returns, the checkpoint is complete; if the first rank fails, all raise.

    Args:
        model: a megacompiled model, a submodule of one, or a plain model.
        folder: created if it does not exist. Other files in it stay.
        max_shard_size: of one file: bytes, or a text such as "5GB". A larger tensor has its own
            file.

    Raises:
        CheckpointError: the disk is full, or the folder cannot be written. An older checkpoint in
            the folder stays complete, unless files were being renamed: then there is none.
        MissingExtraError: `safetensors` is not installed.
        OptionError: `max_shard_size` is not a size.
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
    """Remove the files of an interrupted save."""
    shutil.rmtree(path / _CONFIGS, ignore_errors=True)
    for left in path.glob("*" + INCOMPLETE):
        left.unlink()


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """Convert errors in the folder to `CheckpointError`."""
    try:
        yield
    except Exception as error:
        raise CheckpointError(
            f"save(): folder {path} cannot be written ({error}); no new checkpoint was saved; free "
            "space on the disk, or save elsewhere"
        ) from error


def _tensors(model: nn.Module, savers: Savers) -> Saved:
    """The tensors to save, by name; each once."""
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise CheckpointError(
            f"save(): {type(model).__name__} has tensors on the meta device, which have no values; "
            "needed a model in memory; save it after megacompile()"
        )
    tensors: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    # with keep_vars, no hook on state dicts gathers sharded parameters (`model.whole_states`):
    # ranks gather them one by one
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor):
            raise CheckpointError(
                f"save(): {type(model).__name__}.{name} is {type(value).__name__}; safetensors "
                "stores only tensors; use torch.save(model.state_dict(), file)"
            )
        if id(value) not in seen:
            seen.add(id(value))
            tensors[name] = value.detach()  # waits for updates in flight
    for name in hugging_face.left_out(model, tensors, "_keys_to_ignore_on_save"):
        del tensors[name]
    return Saved(model, tensors, savers.whole)


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
            f"the disk has {format_bytes(free)} free, and {format_bytes(needed)} are needed"
        )


def _write(path: Path, shard: _Shard, tensors: Saved, savers: Savers) -> None:
    """Write one file under a name that readers ignore, and sync it to the disk."""
    file: SafetensorsFile | None = None
    target = path / (shard.name + INCOMPLETE)
    with ExitStack() as stack:
        with savers.together(), _told(path):
            if savers.writes:
                writer = SafetensorsFile(target, {n: tensors.looks[n] for n in shard.tensors})
                file = stack.enter_context(writer)
        for name in shard.tensors:
            _write_one(file, name, tensors, path, savers)
    with savers.together(), _told(path):
        if file is not None:
            _sync(target)


def _write_one(
    file: SafetensorsFile | None, name: str, tensors: Saved, path: Path, savers: Savers
) -> None:
    """Write one tensor. This is a function so that it frees the tensor's memory at its end."""
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
    """Remove the old checkpoint, then publish the new one."""
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
    """Sync a file's content, or a folder's renames, to the disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _write_configs(model: Any, folder: Path) -> None:
    """Write the configs that `from_pretrained` needs, if it is a transformers model."""
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


# Writes a safetensors file tensor by tensor.
#
# The library needs all tensors of a file at once, but ranks that share a model gather only one at a
# time. Format: https://huggingface.co/docs/safetensors

_ALIGNED = 8  # bytes; alignment of the first tensor


class SafetensorsFile:
    """A context manager that writes one file: `with SafetensorsFile(path, looks) as file`.

    Args:
        path: of the file.
        looks: tensors with the names, shapes and dtypes of the file's; values are not read.
    """

    def __init__(self, path: Path, looks: Mapping[str, torch.Tensor]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._starts: dict[str, int] = {}
        end = 0
        # larger dtypes first, so all tensors are aligned
        for name in sorted(looks, key=lambda n: (-looks[n].itemsize, n)):
            look = looks[name]
            start, end = end, end + look.numel() * look.itemsize
            header[name] = {**_said(look), "data_offsets": [start, end]}
            self._starts[name] = start
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNED)
        self._begin = 8 + len(text)
        self._file = path.open("wb", buffering=0)  # unbuffered: closing writes nothing
        try:
            self._put(struct.pack("<Q", len(text)) + text)
        except BaseException:
            self._file.close()
            raise

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write one tensor."""
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
    """A tensor's dtype and shape in the header."""
    dtype, numbers = _library_dtype(look.dtype)
    shape = list(look.shape)
    if shape:
        shape[-1] *= numbers
    return {"dtype": dtype, "shape": shape}


@functools.cache
def _library_dtype(dtype: torch.dtype) -> tuple[str, int]:
    """The library's name of a dtype, and the numbers per element: a byte may hold several."""
    from safetensors.torch import save

    one = save({"x": torch.empty(1, dtype=dtype)})
    header = json.loads(one[8 : 8 + struct.unpack("<Q", one[:8])[0]])["x"]
    return header["dtype"], header["shape"][0]


# The processes that save a model: one, or the ranks that share it.
#
# All ranks gather the tensors one by one. The first rank writes them and reports its errors to all,
# so that no rank waits for it.


class Savers:
    """The ranks that save a model; each rank creates one."""

    def __init__(self, model: nn.Module) -> None:
        sharded = next(filter(compat.is_sharded, model.parameters()), None)
        self._ranks = None if sharded is None else ranks_of(sharded)
        self._what = f"save() of {type(model).__name__}"

    @property
    def writes(self) -> bool:
        """True if this process writes."""
        return self._ranks is None or self._ranks.is_first

    def together(self) -> AbstractContextManager[None]:
        """A context; an error in one rank raises in all of them."""
        return nullcontext() if self._ranks is None else self._ranks.together(self._what)

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """Gather a sharded tensor, which is a collective; returns any other tensor unchanged."""
        if not compat.is_sharded(tensor):
            return tensor
        assert self._ranks is not None, "a sharded tensor in a model without ranks"
        return self._ranks.all_of(tensor)
