"""A folder of safetensors, as a table of which tensor is in which bytes of which file.

    folder/model.safetensors                      one file
    folder/model.safetensors.index.json           names -> files, as Hugging Face writes it
    folder/anything.safetensors                   where it is the only one

Nothing of the tensors is read. Every file is opened by the library `safetensors`, which checks its
header, and has all of its bytes. Format: https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megacompile.errors import CheckpointError, MissingExtraError
from megacompile.runtime.checkpoint.header import DTYPES, read_header, read_index

WEIGHTS = "model.safetensors"
SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
INCOMPLETE = ".incomplete"  # what is being written ends with it
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
    """Every tensor of a checkpoint, by its name.

    Args:
        path: a folder, or one file: `.safetensors` or `.safetensors.index.json`.

    Raises:
        CheckpointError: there is no whole checkpoint.
        MissingExtraError: `safetensors` is not installed.
    """
    library()
    try:
        return _entries_of(path)
    except OSError as error:
        raise CheckpointError(
            f"megacompile(): checkpoint {path} cannot be read ({error}); "
            "check its rights and the disk"
        ) from error


def _entries_of(path: Path) -> dict[str, Entry]:
    if path.name.endswith(INDEX_SUFFIX):
        return _of_index(path)
    if os.path.isfile(path):  # False for a name that no file can have, where Path raises
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
    header, begin = read_header(path)
    try:  # what is wrong with a header in any other way, the library knows
        with library().safe_open(str(path), framework="pt"):
            pass
    except Exception as error:
        raise CheckpointError(
            f"megacompile(): file {path} is no safetensors file ({error}); "
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
