"""Finds the tensors of a folder of safetensors: the file and the bytes of each.

    folder/model.safetensors                      one file
    folder/model.safetensors.index.json           names -> files, as Hugging Face writes it
    folder/anything.safetensors                   if it is the only file

Reads only headers. The library `safetensors` opens every file and checks its header; truncated
files are errors. Format: https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megacompile.errors import CheckpointError, MissingExtraError

WEIGHTS = "model.safetensors"
SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
INCOMPLETE = ".incomplete"  # suffix of files that are still being written
SHARD = re.compile(r".*-\d{5}-of-\d{5}\.safetensors")
OTHERS = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".distcp")


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a checkpoint."""

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
        return _entries_of(path)
    except OSError as error:
        raise CheckpointError(
            f"megacompile(): checkpoint {path} cannot be read ({error}); "
            "check its permissions and the disk"
        ) from error


def _entries_of(path: Path) -> dict[str, Entry]:
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
    if len(files) != 1 or len(indices) > 1 or SHARD.fullmatch(files[0].name):
        raise CheckpointError(_no_one_checkpoint(path, files, indices))
    return _of_files(files)


def library() -> Any:
    """The module `safetensors`.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        import safetensors
    except ImportError as error:
        raise MissingExtraError(
            "megacompile: reading and saving checkpoints needs the package safetensors; "
            "pip install 'megacompile[safetensors]'"
        ) from error
    return safetensors


def _no_one_checkpoint(path: Path, files: list[Path], indices: list[Path]) -> str:
    where = f"megacompile(): folder {path}"
    if len(indices) > 1:
        names = ", ".join(index.name for index in indices)
        return f"{where} has several checkpoints: {names}; pass the path of one of them"
    if any(path.glob("*" + INCOMPLETE)) or any(SHARD.fullmatch(file.name) for file in files):
        return (
            f"{where} has parts of a checkpoint and no index (*{INDEX_SUFFIX}), which is written "
            "last; the save or download was interrupted; save or download it again"
        )
    if files:
        names = ", ".join(file.name for file in files)
        return f"{where} has no index and several files: {names}; pass the path of one of them"
    others = sorted(file.name for file in path.iterdir() if file.suffix in OTHERS)
    return (
        f"{where} has no .safetensors file"
        + (f" (it has {', '.join(others[:5])})" if others else "")
        + "; needed safetensors: save it with safetensors.torch.save_file, or with "
        "save_pretrained of transformers"
    )


def _of_index(index: Path) -> dict[str, Entry]:
    names = read_index(index)
    folder = index.parent
    files = sorted(set(names.values()))
    outside = [name for name in files if Path(name).name != name]
    missing = [name for name in files if not os.path.isfile(folder / name)]
    if outside or missing:
        raise CheckpointError(
            f"megacompile(): index {index} names {len(files)} files, of which {len(missing)} are "
            f"not in its folder: {', '.join((outside or missing)[:5])}; download or save them again"
        )
    entries = _of_files([folder / name for name in files])
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
    header, begin = read_header(path)
    try:  # the library detects all other errors in a header
        with library().safe_open(str(path), framework="pt"):
            pass
    except Exception as error:
        raise CheckpointError(
            f"megacompile(): file {path} is not a safetensors file ({error}); "
            "save or download it again"
        ) from error
    entries = []
    for name, (said, shape, first, end) in header.items():
        dtype = DTYPES.get(said)
        if dtype is None:
            raise CheckpointError(
                f"megacompile(): tensor {name} of {path} has dtype {said}; needed one of "
                f"{', '.join(DTYPES)}; convert it"
            )
        entries.append(Entry(name, path, dtype, shape, begin + first, end - first))
    return entries


# The JSON of a checkpoint: the header of a safetensors file, and the index of several files.
#
# Files may be damaged or malicious. So everything is validated before use: types, numbers, byte
# ranges, duplicate names. Every violation is a `CheckpointError` that names the file.

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
_MOST_BYTES = 100_000_000  # of a header: the limit of the library `safetensors`

# A zip file, or a pickle before torch 1.6. As the length of a header, either is too large.
_OF_TORCH_SAVE = (b"PK\x03\x04", b"\x80\x02\x8a\x0a")


class Described(NamedTuple):
    """A tensor's entry in a header."""

    dtype: str
    shape: tuple[int, ...]
    first: int  # byte offset after the header
    end: int


def read_index(index: Path) -> dict[str, str]:
    """The file of each tensor in an index.

    Raises:
        CheckpointError: the index cannot be read.
    """
    try:
        names = _table(_parsed(index.read_bytes())["weight_map"], "weight_map")
        for name, file in names.items():
            if not isinstance(file, str):
                raise TypeError(f"the file of tensor {name!r} is {_short(file)}")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"megacompile(): index {index} cannot be read ({type(error).__name__}: {error}); "
            'needed JSON with "weight_map": {tensor: file}; save or download it again'
        ) from error
    return names


def read_header(path: Path) -> tuple[dict[str, Described], int]:
    """The tensors of a file by name, and the offset of their data in bytes.

    Raises:
        CheckpointError: not a complete safetensors file.
        OSError: the file cannot be read.
    """
    got = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        _check_length(path, start, length, got)
        text = file.read(length)
    try:
        header = {
            name: _described(name, said)
            for name, said in _table(_parsed(text), "the header").items()
            if name != "__metadata__"
        }
    except (ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"megacompile(): file {path} has a header that cannot be read ({error}); "
            "needed a safetensors file; save or download it again"
        ) from error
    needed = 8 + length + max((each.end for each in header.values()), default=0)
    if got < needed:
        raise CheckpointError(
            f"megacompile(): file {path} is truncated: got {got} bytes, needed {needed}; "
            "save or download it again"
        )
    return header, 8 + length


def _check_length(path: Path, start: bytes, length: int, got: int) -> None:
    """Raise if the first 8 bytes are not a possible header length for this file."""
    if 2 <= length <= min(got - 8, _MOST_BYTES):
        return
    if start.startswith(_OF_TORCH_SAVE):
        raise CheckpointError(
            f"megacompile(): file {path} was written by torch.save(); needed safetensors; leave "
            "out checkpoint= and call model.load_state_dict(torch.load(...)) after megacompile()"
        )
    raise CheckpointError(
        f"megacompile(): file {path} is truncated or not a safetensors file: got {got} bytes, "
        f"needed {8 + length} for its header alone; save or download it again"
    )


def _parsed(text: bytes) -> Any:
    """Parse JSON; duplicate names are errors."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in table if names.count(name) > 1)
            raise ValueError(f"it has {twice!r} twice")
        return table

    return json.loads(text, object_pairs_hook=once)


def _table(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{what} is {_short(value)}; needed names and values")
    return value


def _described(name: str, said: Any) -> Described:
    """Validate one entry of a header."""
    entry = _table(said, f"tensor {name!r}")
    dtype: Any = entry.get("dtype")
    shape: Any = entry.get("shape")
    offsets: Any = entry.get("data_offsets")
    if not isinstance(dtype, str):
        raise TypeError(f"tensor {name!r} has dtype {_short(dtype)}; needed a name")
    if not _are_sizes(shape):
        raise TypeError(f"tensor {name!r} has shape {_short(shape)}; needed a list of sizes")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise TypeError(
            f"tensor {name!r} has data_offsets {_short(offsets)}; needed its first byte and its end"
        )
    if dtype in DTYPES and math.prod(shape) * DTYPES[dtype].itemsize != offsets[1] - offsets[0]:
        raise ValueError(
            f"tensor {name!r} of shape {_short(shape)} and dtype {dtype} has "
            f"{offsets[1] - offsets[0]} bytes"
        )
    return Described(dtype, tuple(shape), *offsets)


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(each) is int and each >= 0 for each in value)


def _short(value: Any) -> str:
    """A value's text for an error; the value may be huge, or nested too deeply to print."""
    if isinstance(value, dict | list):
        text = f"{type(value).__name__} of {len(value)}"
        flat = not any(isinstance(each, dict | list) for each in value)
        return repr(value) if flat and len(value) <= 8 else f"a {text}"
    return repr(value)[:80]
