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
import json
import os
import shutil
import struct
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import nn

from megacompile import compat
from megacompile.errors import CheckpointError, OptionError
from megacompile.option_values import parse_bytes
from megacompile.runtime.checkpoint.files import DTYPES, INCOMPLETE, SHARD, WEIGHTS, library
from megacompile.runtime.checkpoint.initialize import is_pretrained, left_in, reverted
from megacompile.runtime.device.ranks import ranks_of, whole_of
from megacompile.text import format_bytes

_INDEX = f"{WEIGHTS}.index.json"
_CONFIGS = f"configs{INCOMPLETE}"  # a folder
_HEADER_BYTES = 2**20  # of all files together, estimated
_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Shards = Mapping[str, list[str]]  # the name of each file, and its tensors


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
    path = Path(folder)
    saving = _Saving(model, path)
    with saving.together():
        library()
        limit = parse_bytes("max_shard_size", max_shard_size, 0)
        if limit < 1:
            raise OptionError(
                f"save(): got max_shard_size={max_shard_size!r}; needed at least 1 byte"
            )
        saving.look()
        shards = _shards(saving.looks, limit)
        total_bytes = sum(look.nbytes for look in saving.looks.values())
    with saving.writing():
        if saving.writes:
            path.mkdir(parents=True, exist_ok=True)
            _clear(path)
            free, needed = shutil.disk_usage(path).free, total_bytes + _HEADER_BYTES
            if free < needed:
                raise OSError(f"{format_bytes(needed)} needed, {format_bytes(free)} free")
    try:
        for file, names in shards.items():
            _write(path / (file + INCOMPLETE), names, saving)
        with saving.writing():
            if saving.writes:
                _write_index(path, shards, total_bytes)
                _write_configs(model, path / _CONFIGS)
                _publish(path, shards)
    except Exception:
        if saving.writes:
            _clear(path)
        raise


class _Saving:
    """One save: the processes that make it, and the tensors of the checkpoint.

    Ranks that share the model gather the tensors one by one. The first rank writes them and reports
    its errors to all, so that no rank waits for it. Converted tensors (such as experts that the
    model merges) are computed from one tensor of the model at a time if possible, otherwise from
    all of them at once.
    """

    def __init__(self, model: nn.Module, path: Path) -> None:
        sharded = next(filter(compat.is_sharded, model.parameters()), None)
        self._ranks = None if sharded is None else ranks_of(sharded)
        self._model, self._path = model, path
        self.writes = self._ranks is None or self._ranks.is_first  # True if this process writes
        self._tensors: dict[str, torch.Tensor] = {}
        self._source: dict[str, str] = {}  # a converted tensor's name -> the model's
        self._last: tuple[str, dict[str, torch.Tensor]] = ("", {})
        # the checkpoint's tensors; on meta if they are computed one by one
        self.looks: dict[str, torch.Tensor] = {}

    def together(self) -> AbstractContextManager[None]:
        """A context; an error in one rank raises in all of them."""
        what = f"save() of {type(self._model).__name__}"
        return nullcontext() if self._ranks is None else self._ranks.together(what)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """`together`, for work in the folder, whose errors become `CheckpointError`."""
        with self.together():
            try:
                yield
            except Exception as error:
                raise CheckpointError(
                    f"save(): folder {self._path} cannot be written ({error}); no new checkpoint "
                    "was saved; free space on the disk, or save elsewhere"
                ) from error

    def look(self) -> None:
        """Find the tensors to save, each once.

        Raises:
            CheckpointError: some are on meta or no tensors; or parameters are sharded, and all
                would have to be gathered at once.
        """
        model, tensors = self._model, self._tensors
        if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
            raise CheckpointError(
                f"save(): {type(model).__name__} has tensors on the meta device, which have no "
                "values; needed a model in memory; save it after megacompile()"
            )
        found: dict[int, tuple[str, torch.Tensor]] = {}
        # with keep_vars, no hook on state dicts gathers sharded parameters (`model.loops`):
        # ranks gather them one by one
        for name, value in model.state_dict(keep_vars=True).items():
            if not isinstance(value, torch.Tensor):
                raise CheckpointError(
                    f"save(): {type(model).__name__}.{name} is {type(value).__name__}; safetensors "
                    "stores only tensors; use torch.save(model.state_dict(), file)"
                )
            found.setdefault(id(value), (name, value.detach()))  # waits for updates in flight
        every = dict(found.values())
        names = left_in(model, every, "_keys_to_ignore_on_save")
        tensors.update({name: every[name] for name in names})
        self.looks = dict(tensors)
        if not is_pretrained(model):
            return
        metas = {
            name: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
            for name, t in tensors.items()
        }
        at_once = reverted(model, metas)
        self.looks = {}
        for name, meta in metas.items():
            if at_once.get(name) is meta:
                self.looks[name] = tensors[name]
            else:
                made = reverted(model, {name: meta})
                self.looks |= made
                self._source |= dict.fromkeys(made, name)
        if _described(self.looks) != _described(at_once):  # some are computed from several
            if self._ranks is not None:
                raise CheckpointError(
                    f"save(): checkpoints of {type(model).__name__} have tensors that are computed "
                    "from several parameters, and ranks that share it (mesh=) gather one at a "
                    "time; save with torch.distributed.checkpoint"
                )
            self._source, self.looks = {}, reverted(model, dict(tensors))

    def get(self, name: str) -> torch.Tensor:
        """One tensor of the checkpoint. `looks` lists those from one tensor of the model
        consecutively, so they are computed once."""
        source = self._source.get(name)
        if self._last[0] != source:
            self._last = ("", {})  # free its memory before the next conversion
        if source is None:
            return whole_of(self.looks[name])  # type: ignore[no-any-return]
        if not self._last[0]:
            gathered = {source: whole_of(self._tensors[source])}
            self._last = (source, reverted(self._model, gathered))
        return self._last[1][name]


def _clear(path: Path) -> None:
    shutil.rmtree(path / _CONFIGS, ignore_errors=True)
    for left in path.glob("*" + INCOMPLETE):
        left.unlink()


def _shards(tensors: Mapping[str, torch.Tensor], limit_bytes: int) -> Shards:
    groups: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        size += tensor.nbytes
        if size > limit_bytes and groups[-1]:
            groups.append([])
            size = tensor.nbytes
        groups[-1].append(name)
    if len(groups) == 1:
        return {WEIGHTS: groups[0]}
    stem = Path(WEIGHTS).stem
    return {
        f"{stem}-{k:05}-of-{len(groups):05}.safetensors": group for k, group in enumerate(groups, 1)
    }


def _write(path: Path, names: list[str], saving: _Saving) -> None:
    """Write one file under a name that readers ignore, and sync it to the disk. The library needs
    all tensors of a file at once, but ranks that share a model gather only one at a time. Format:
    https://huggingface.co/docs/safetensors"""
    writer: BinaryIO | None = None
    starts: dict[str, int] = {}
    with ExitStack() as stack:
        with saving.writing():
            if saving.writes:
                header, starts = _header({name: saving.looks[name] for name in names})
                writer = stack.enter_context(path.open("wb", buffering=0))
                _put(writer, 0, header)
        for name in names:
            tensor = saving.get(name)
            with saving.writing():
                if writer is not None and tensor.numel():
                    flat = tensor.detach().cpu().contiguous().reshape(-1)
                    _put(writer, starts[name], flat.view(torch.uint8).numpy())
                    del flat
            del tensor  # before the next one is gathered
        with saving.writing():
            if writer is not None:
                os.fsync(writer.fileno())


def _header(looks: Mapping[str, torch.Tensor]) -> tuple[bytes, dict[str, int]]:
    """The header of a file with these tensors, and the offset of each in the file."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts: dict[str, int] = {}
    end = 0
    # larger dtypes first, so all tensors are aligned
    for name in sorted(looks, key=lambda n: (-looks[n].itemsize, n)):
        look = looks[name]
        starts[name], end = end, end + look.nbytes
        header[name] = {
            "dtype": _NAMES[look.dtype],
            "shape": list(look.shape),
            "data_offsets": [starts[name], end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    begin = 8 + len(text)
    return struct.pack("<Q", len(text)) + text, {n: begin + at for n, at in starts.items()}


def _put(file: BinaryIO, at: int, data: Any) -> None:
    left = memoryview(data)
    while left:
        written = os.pwrite(file.fileno(), left, at)
        at += written
        left = left[written:]


def _write_index(path: Path, shards: Shards, total_bytes: int) -> None:
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": total_bytes},
            "weight_map": {name: file for file, names in shards.items() for name in names},
        }
        draft = path / (_INDEX + INCOMPLETE)
        draft.write_text(json.dumps(index, indent=2) + "\n")
        _sync(draft)
    _sync(path)


def _publish(path: Path, shards: Shards) -> None:
    """Remove the old checkpoint, then publish the new one."""
    last = _INDEX if len(shards) > 1 else WEIGHTS
    configs = sorted((path / _CONFIGS).iterdir())
    stays = len(shards) == 1 and all(
        (path / new.name).is_file() and (path / new.name).read_bytes() == new.read_bytes()
        for new in configs
    )
    for old in (_INDEX, WEIGHTS):
        if old != last or not stays:
            (path / old).unlink(missing_ok=True)
    _sync(path)  # before any of its files is replaced
    for new in configs:
        os.replace(new, path / new.name)
    (path / _CONFIGS).rmdir()
    for file in shards:
        if file != last:
            os.replace(path / (file + INCOMPLETE), path / file)
    _sync(path)  # every file before the index
    os.replace(path / (last + INCOMPLETE), path / last)
    _sync(path)
    for stale in path.glob(f"{Path(WEIGHTS).stem}-*.safetensors"):  # of an older save
        if SHARD.fullmatch(stale.name) and stale.name not in shards:
            stale.unlink(missing_ok=True)


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
    if is_pretrained(model) and hasattr(model.config, "save_pretrained"):
        config = copy.deepcopy(model.config)
        config.architectures = [type(model).__name__]
        config.save_pretrained(folder)
        generation = getattr(model, "generation_config", None)
        if generation is not None and getattr(model, "can_generate", bool)():
            generation.save_pretrained(folder)
    for file in folder.iterdir():
        _sync(file)
    _sync(folder)


def _described(tensors: Mapping[str, torch.Tensor]) -> object:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
