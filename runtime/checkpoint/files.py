"""Finds the tensors of a folder of safetensors, and reads them.

    folder/model.safetensors                      one file
    folder/model.safetensors.index.json           names -> files, as Hugging Face writes it
    folder/anything.safetensors                   if it is the only file

`entries_of` reads only headers. Files may be damaged or malicious: the library `safetensors` checks
each header (types, numbers, byte ranges that cover the file) before it is parsed here. Format:
https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megacompile.errors import CheckpointError, MissingExtraError

WEIGHTS = "model.safetensors"
SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
INCOMPLETE = ".incomplete"  # suffix of files that are still being written
SHARD = re.compile(r".*-\d{5}-of-\d{5}\.safetensors")
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_OF_TORCH_SAVE = (b"PK\x03\x04", b"\x80\x02\x8a\x0a")  # a zip file; a pickle before torch 1.6


@dataclass(frozen=True, slots=True)
class Entry:
    name: str
    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset_bytes: int  # in the file
    size_bytes: int


def entries_of(path: Path) -> dict[str, Entry]:
    """All tensors of a checkpoint, by name.

    Args:
        path: a folder, or one file: `.safetensors` or `.safetensors.index.json`.

    Raises:
        CheckpointError: there is no complete checkpoint.
        MissingExtraError: `safetensors` is not installed.
    """
    library()
    try:
        if path.name.endswith(INDEX_SUFFIX):
            return _of_index(path)
        if os.path.isfile(path):  # False for an invalid name, for which Path raises
            return _of_files([path])
        if not os.path.isdir(path):
            raise CheckpointError(
                f"megacompile(): checkpoint {path} does not exist; needed a folder of safetensors "
                "(download it first), or one .safetensors file"
            )
        if (path / WEIGHTS).exists():
            return _of_files([path / WEIGHTS])
        indices = sorted(path.glob("*" + INDEX_SUFFIX))
        if len(indices) == 1:
            return _of_index(indices[0])
        files = sorted(path.glob("*" + SUFFIX))
        parts = [
            *path.glob("*" + INCOMPLETE),
            *(file for file in files if SHARD.fullmatch(file.name)),
        ]
        if len(files) == 1 and not indices and not SHARD.fullmatch(files[0].name):
            return _of_files(files)
        names = [file.name for file in (indices or files or sorted(path.iterdir()))[:5]]
        interrupted = "; the save or download was interrupted: repeat it" if parts else ""
        of_torch = "; for .bin or .pt leave out checkpoint=, and call load_state_dict() afterwards"
        raise CheckpointError(
            f"megacompile(): folder {path} has no checkpoint, or several: got {', '.join(names)}; "
            f"needed {WEIGHTS}, one *{INDEX_SUFFIX}, or one *{SUFFIX} (of "
            "safetensors.torch.save_file, or save_pretrained of transformers); pass the path of "
            f"one of several{'' if files else of_torch}{interrupted}"
        )
    except OSError as error:
        raise CheckpointError(
            f"megacompile(): checkpoint {path} cannot be read ({error}); "
            "check its permissions and the disk"
        ) from error


def library() -> Any:
    """The module `safetensors`. Raises MissingExtraError: it is not installed."""
    try:
        import safetensors
    except ImportError as error:
        raise MissingExtraError(
            "megacompile: reading and saving checkpoints needs the package safetensors; "
            "pip install 'megacompile[safetensors]'"
        ) from error
    return safetensors


def _of_index(index: Path) -> dict[str, Entry]:
    try:
        names = dict(json.loads(index.read_bytes())["weight_map"].items())
        files = sorted({str(Path(file)) for file in names.values()})
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"megacompile(): index {index} cannot be read ({type(error).__name__}: {error}); "
            'needed JSON with "weight_map": {tensor: file}; save or download it again'
        ) from error
    outside = [name for name in files if Path(name).name != name]
    missing = [name for name in files if not os.path.isfile(index.parent / name)]
    if outside or missing:
        raise CheckpointError(
            f"megacompile(): index {index} names {len(files)} files, of which {len(missing)} are "
            f"not in its folder: {', '.join((outside or missing)[:5])}; download or save them again"
        )
    entries = _of_files(index.parent / name for name in files)
    absent = [n for n, file in names.items() if n not in entries or entries[n].path.name != file]
    if absent:
        raise CheckpointError(
            f"megacompile(): index {index} says that {names[absent[0]]} has tensor {absent[0]}, "
            f"but it does not ({len(absent)} such tensors); files and index are of different "
            "saves; save or download them again"
        )
    return entries


def _of_files(paths: Iterable[Path]) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    for path in paths:
        for entry in _of_file(path):
            if entry.name in entries:
                raise CheckpointError(
                    f"megacompile(): tensor {entry.name} is in two files, "
                    f"{entries[entry.name].path} and {path.name}; needed one; save it again"
                )
            entries[entry.name] = entry
    return entries


def _of_file(path: Path) -> list[Entry]:
    """The tensors of one file. Raises CheckpointError: not a complete safetensors file; OSError:
    the file cannot be read."""
    with path.open("rb") as file:
        start = file.read(8)
        try:
            with library().safe_open(str(path), framework="pt"):
                pass
        except Exception as error:
            if start.startswith(_OF_TORCH_SAVE):
                raise CheckpointError(
                    f"megacompile(): file {path} was written by torch.save(); needed safetensors; "
                    "leave out checkpoint= and call model.load_state_dict(torch.load(...)) after "
                    "megacompile()"
                ) from error
            raise CheckpointError(
                f"megacompile(): file {path} is truncated or not a safetensors file ({error}); "
                "save or download it again"
            ) from error
        (length,) = struct.unpack("<Q", start)
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    entries = []
    for name, said in header.items():
        dtype = DTYPES.get(said["dtype"])
        if dtype is None:
            raise CheckpointError(
                f"megacompile(): tensor {name} of {path} has dtype {said['dtype']}; needed one of "
                f"{', '.join(DTYPES)}; convert it"
            )
        first, end = said["data_offsets"]
        shape = tuple(said["shape"])
        entries.append(Entry(name, path, dtype, shape, 8 + length + first, end - first))
    return entries


# Reads tensors into existing memory, on several threads.
#
# The system copies from the page cache or the disk directly into the destination. The first access
# to the memory takes longest (page faults), so threads share it: they read pieces of a bucket in
# parallel, in the order of the buckets, while the caller page-locks the finished ones.

PIECE_BYTES = 16 * 2**20
STAGED_BYTES = 4 * 2**20  # the same, for a conversion, which needs memory of its own
THREADS = 16  # maximum; more would contend for page faults


class Reader(AbstractContextManager["Reader"]):
    """Reads entries in the background, in the order of the calls.

    Use it as a context manager. On exit all reads have ended, so their memory may be freed."""

    def __init__(self, done: Callable[[int], object]) -> None:
        self._done = done  # called from any thread with the number of bytes read
        self._computing = ThreadPoolExecutor(1, "megacompile-convert")
        self._pool = ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1), "megacompile-read")

    def __exit__(self, *error: object) -> None:
        self._computing.shutdown(wait=False, cancel_futures=True)
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._computing.shutdown(wait=True)  # last, because it may wait for reads

    def read(self, entry: Entry, into: torch.Tensor) -> list[Future[None]]:
        """Start reading a tensor into another of the same shape, on any device; a different dtype
        converts values."""
        into = into.detach()
        plain = into.dtype == entry.dtype and into.device.type == "cpu"
        numel = (PIECE_BYTES if plain else STAGED_BYTES) // entry.dtype.itemsize
        pieces = into.view(-1).split(numel) if into.is_contiguous() else (into,)
        starts = range(0, max(1, entry.size_bytes), numel * entry.dtype.itemsize)
        return [
            self._pool.submit(self._read, entry, begin, piece)
            for begin, piece in zip(starts, pieces, strict=False)
        ]

    def compute(
        self, entries: Mapping[str, Entry], into: Callable[[Mapping[str, torch.Tensor]], None]
    ) -> Future[None]:
        """Start reading a group of entries and calling `into` with them, one group at a time."""

        def work() -> None:
            with torch.inference_mode(False), torch.no_grad():  # modes are per thread
                staged = {
                    name: torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
                    for name, entry in entries.items()
                }
                for pieces in [self.read(entry, staged[n]) for n, entry in entries.items()]:
                    wait(pieces)
                into(staged)

        return self._computing.submit(work)

    def _read(self, entry: Entry, begin: int, into: torch.Tensor) -> None:
        """Read values from byte `begin` of an entry; in memory of their own if `into` needs other
        ones."""
        on_host = into.device.type == "cpu" and into.is_contiguous()
        with torch.inference_mode(False), torch.no_grad():
            read = into
            if into.dtype != entry.dtype or not on_host:
                read = torch.empty(into.shape, dtype=entry.dtype, device="cpu")
            self._fill(entry, begin, read.view(-1).view(torch.uint8))
            if read is not into:
                into.copy_(read)

    def _fill(self, entry: Entry, begin: int, into: torch.Tensor) -> None:
        """Fill `into` (uint8) with an entry's bytes from offset `begin`."""
        memory: Any = into.numpy()
        at = entry.offset_bytes + begin
        try:
            with entry.path.open("rb") as file:
                file.seek(at)
                if file.readinto(memory) < len(memory):  # it was complete when its header was read
                    raise OSError("it ends before: it was truncated meanwhile")
        except OSError as error:
            raise CheckpointError(
                f"megacompile(): file {entry.path} cannot be read at byte {at} ({error}); needed "
                f"{len(memory)} more bytes of {entry.name}; check the disk, or load it again when "
                "it is complete"
            ) from error
        self._done(into.numel())


def wait(pieces: Iterable[Future[None]]) -> None:
    """Wait for the pieces of a read; raises their first error."""
    for piece in pieces:
        piece.result()
