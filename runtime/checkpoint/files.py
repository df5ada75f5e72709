"""A folder of safetensors, as a table of which tensor lies in which bytes of which file.

    folder/model.safetensors                      one file
    folder/model.safetensors.index.json           names -> files, as Hugging Face writes it
    folder/anything.safetensors                   where it is the only one

Nothing of the tensors is read. Every file is opened by the library `safetensors`, which checks its
header, and has all of its bytes. Format: https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megacompile.errors import CheckpointError, MissingExtraError

WEIGHTS = "model.safetensors"
SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
INCOMPLETE = ".incomplete"  # what is being written ends with it
SHARD = re.compile(r".*-\d{5}-of-\d{5}\.safetensors")
OTHERS = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".distcp")

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
    """Every tensor of a checkpoint, by its name.

    Args:
        path: a folder, or one file: `.safetensors` or `.safetensors.index.json`.

    Raises:
        CheckpointError: there is no whole checkpoint.
        MissingExtraError: `safetensors` is not installed.
    """
    library()
    if path.name.endswith(INDEX_SUFFIX):
        return _of_index(path)
    if path.is_file():
        return _of_files([path])
    if not path.is_dir():
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
        return f"{where} has several checkpoints: {names}; give the path of one of them"
    if any(path.glob("*" + INCOMPLETE)) or any(SHARD.fullmatch(file.name) for file in files):
        return (
            f"{where} has parts of a checkpoint and no index (*{INDEX_SUFFIX}), which is written "
            "last; the save or the download was cut off; save or download it again"
        )
    if files:
        names = ", ".join(file.name for file in files)
        return f"{where} has no index and several files: {names}; give the path of one of them"
    others = sorted(file.name for file in path.iterdir() if file.suffix in OTHERS)
    return (
        f"{where} has no .safetensors file"
        + (f" (it has {', '.join(others[:5])})" if others else "")
        + "; needed safetensors: save it with safetensors.torch.save_file, or with "
        "save_pretrained of transformers"
    )


def _of_index(index: Path) -> dict[str, Entry]:
    try:
        names: dict[str, str] = dict(json.loads(index.read_bytes())["weight_map"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"megacompile(): index {index} cannot be read ({type(error).__name__}: {error}); "
            'needed JSON with "weight_map": {tensor: file}; save or download it again'
        ) from error
    folder = index.parent
    files = sorted(set(names.values()))
    outside = [name for name in files if Path(name).name != name]
    missing = [name for name in files if not (folder / name).is_file()]
    if outside or missing:
        raise CheckpointError(
            f"megacompile(): index {index} names {len(files)} files, of which {len(missing)} are "
            f"not in its folder: {', '.join((outside or missing)[:5])}; download or save them again"
        )
    found = _of_files([folder / name for name in files])
    lost = [n for n, file in names.items() if n not in found or found[n].path.name != file]
    if lost:
        raise CheckpointError(
            f"megacompile(): index {index} says that {names[lost[0]]} has tensor {lost[0]}, and it "
            f"has not ({len(lost)} such tensors); files and index are not of one save; "
            "save or download them again"
        )
    return found


def _of_files(paths: Iterable[Path]) -> dict[str, Entry]:
    found: dict[str, Entry] = {}
    for path in paths:
        for entry in _of_file(path):
            if entry.name in found:
                raise CheckpointError(
                    f"megacompile(): tensor {entry.name} is in two files, "
                    f"{found[entry.name].path} and {path.name}; needed one; save it again"
                )
            found[entry.name] = entry
    return found


def _of_file(path: Path) -> list[Entry]:
    header, begin = _header(path)
    try:  # what is wrong with a header in any other way, the library knows
        with library().safe_open(str(path), framework="pt"):
            pass
    except Exception as error:
        raise CheckpointError(
            f"megacompile(): file {path} is no safetensors file ({error}); "
            "save or download it again"
        ) from error
    entries = []
    for name, said in header.items():
        if name == "__metadata__":
            continue
        dtype = DTYPES.get(said["dtype"])
        if dtype is None:
            raise CheckpointError(
                f"megacompile(): tensor {name} of {path} has dtype {said['dtype']}; needed one of "
                f"{', '.join(DTYPES)}; convert it"
            )
        first, end = said["data_offsets"]
        entries.append(
            Entry(name, path, dtype, tuple(said["shape"]), begin + first, end - first),
        )
    return entries


# A zip file; before torch 1.6, a pickle. Read as the length of a header, either is too much.
_OF_TORCH_SAVE = (b"PK\x03\x04", b"\x80\x02\x8a\x0a")


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """The header of a file that has all of its bytes, and where its tensors begin."""
    got = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        fits = 2 <= length <= got - 8
        if not fits and start.startswith(_OF_TORCH_SAVE):
            raise CheckpointError(
                f"megacompile(): file {path} is one of torch.save(); needed safetensors; leave out "
                "checkpoint= and call model.load_state_dict(torch.load(...)) after megacompile()"
            )
        if not fits:
            raise CheckpointError(
                f"megacompile(): file {path} is truncated or no safetensors file: got {got} bytes, "
                f"needed {8 + length} for its header alone; save or download it again"
            )
        text = file.read(length)
    try:
        header: dict[str, Any] = json.loads(text)
        ends = [said["data_offsets"][1] for n, said in header.items() if n != "__metadata__"]
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise CheckpointError(
            f"megacompile(): file {path} has a header that cannot be read ({error}); "
            "needed a safetensors file; save or download it again"
        ) from error
    needed = 8 + length + max(ends, default=0)
    if got < needed:
        raise CheckpointError(
            f"megacompile(): file {path} is truncated: got {got} bytes, needed {needed}; "
            "save or download it again"
        )
    return header, 8 + length
