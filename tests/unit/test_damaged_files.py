"""Headers and indices that are damaged: each is a `CheckpointError` that names the file."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megacompile.errors import CheckpointError
from megacompile.runtime.checkpoint.files import Entry, entries_of

pytest.importorskip("safetensors")

CASES = 150  # of each kind
DEEP = "[" * 100_000
INDEX = "model.safetensors.index.json"
ODD: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 3, 2**31, 2**63, 2**64, 10**30, 1.5, float("nan"), float("inf")),
    *("", "ab", "F32", "\x00", "\ud800", "..", "a" * 5000, "0"),
    *([], {}, [[]], {"a": {}}, [0, 4], [4, 0], [-4, 0], [0, "4"], [0, 4, 8], [0, True], ["a"]),
    {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file of three tensors."""
    from safetensors.torch import save_file

    path = tmp_path / "model.safetensors"
    tensors = {"a": torch.ones(2, 3), "b": torch.zeros(4, dtype=torch.int64), "c": torch.ones(1)}
    save_file(tensors, str(path), {"format": "pt"})
    return path


def parts(path: Path) -> tuple[Any, bytes]:
    """The header of a file, and the bytes of its tensors."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def write(path: Path, header: bytes, tensors: bytes) -> None:
    path.write_bytes(len(header).to_bytes(8, "little") + header + tensors)


def text(value: Any) -> bytes:
    return json.dumps(value).encode()


def odd(value: Any, rng: random.Random) -> Any:
    """JSON with one place changed."""
    value = copy.deepcopy(value)
    holder: Any = value
    while True:
        keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        key = rng.choice(keys)
        inner = holder[key]
        if not isinstance(inner, dict | list) or not inner or rng.random() < 0.3:
            break
        holder = inner
    change = rng.random()
    if change < 0.6:
        holder[key] = copy.deepcopy(rng.choice(ODD))
    elif change < 0.8:
        del holder[key]
    elif isinstance(holder, dict):
        holder[rng.choice(["a", "b", "shape", "d", "", "__metadata__"])] = inner
    else:
        holder.append(rng.choice(ODD))
    return value


def flipped(data: bytes, rng: random.Random, end: int) -> bytes:
    """Bytes with some bits of the first ones turned."""
    found = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 8])):
        found[rng.randrange(min(end, len(found)))] ^= 1 << rng.randrange(8)
    return bytes(found)


def look(path: Path) -> dict[str, Entry] | None:
    """What a checkpoint has, which is within its files; None where it is refused in a line."""
    try:
        found = entries_of(path)
    except CheckpointError as error:
        assert str(path.parent if path.is_file() else path) in str(error), error
        assert "; " in str(error) and len(str(error)) < 100_000
        return None
    ends: dict[Path, int] = {}
    for entry in sorted(found.values(), key=lambda e: e.offset_bytes):
        assert entry.offset_bytes >= ends.get(entry.path, 0), "they overlap"
        ends[entry.path] = entry.offset_bytes + entry.size_bytes
        assert ends[entry.path] <= entry.path.stat().st_size
        assert entry.size_bytes == torch.Size(entry.shape).numel() * entry.dtype.itemsize
    return found


def test_headers_with_one_odd_value_or_turned_bits(file: Path) -> None:
    header, tensors = parts(file)
    assert look(file) is not None
    rng = random.Random(0)
    for _ in range(CASES):
        changed = header
        for _ in range(rng.choice([1, 1, 1, 3])):
            changed = odd(changed, rng) if changed else changed
        write(file, text(changed), tensors)
        look(file)
    write(file, text(header), tensors)
    data = file.read_bytes()
    for _ in range(CASES):
        file.write_bytes(flipped(data, rng, 8 + len(text(header))))
        look(file)


def test_headers_that_are_cut(file: Path) -> None:
    data = file.read_bytes()
    for end in range(len(data)):
        file.write_bytes(data[:end])
        assert look(file) is None


def _offsets(first: Any, end: Any) -> Callable[[Any], None]:
    def change(header: Any) -> None:
        header["c"]["data_offsets"] = [first, end]

    return change


HEADERS: dict[str, bytes | Callable[[Any], None]] = {
    "deep inside": b'{"a": ' + DEEP.encode(),
    "not utf-8": b'{"\xff": 1}',
    "a list": b"[1, 2]",
    "many digits": b'{"a": ' + b"9" * 5000 + b"}",
    "twice": b'{"a": {"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
    b'"a": {"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
    "offsets are text": lambda header: header["c"].update(data_offsets="ab"),
    "offsets are one": lambda header: header["c"].update(data_offsets=[0]),
    "negative": _offsets(-4, 0),
    "backwards": _offsets(60, 56),
    "out of the file": _offsets(10**9, 10**9 + 4),
    "huge": _offsets(2**64, 2**64 + 4),
    "overlap": _offsets(0, 4),
    "shape is deep": lambda header: header["c"].update(shape=[[1]]),
    "shape is huge": lambda header: header["c"].update(shape=[2**40, 2**40]),
    "shape is true": lambda header: header["c"].update(shape=[True]),
    "dtype is a list": lambda header: header["c"].update(dtype=["F32"]),
    "dtype is unknown": lambda header: header["c"].update(dtype="F33"),
    "no dtype": lambda header: header["c"].pop("dtype"),
    "metadata is a list": lambda header: header.update(__metadata__=[1]),
}


def test_headers_that_are_refused(file: Path) -> None:
    header, tensors = parts(file)
    for case, change in HEADERS.items():
        if isinstance(change, bytes):
            write(file, change, tensors)
        else:
            changed = copy.deepcopy(header)
            change(changed)
            write(file, text(changed), tensors)
        assert look(file) is None, case


INDICES: dict[str, bytes] = {
    "a list is a file": b'{"weight_map": {"a": ["model.safetensors"]}}',
    "pairs": b'{"weight_map": [["a", "model.safetensors"]]}',
    "deep": DEEP.encode(),
    "none": b"",
    "not utf-8": b'{"weight_map": {"\xff": "model.safetensors"}}',
    "twice": b'{"weight_map": {"a": "model.safetensors", "a": "model.safetensors"}}',
    "dots": b'{"weight_map": {"a": ".."}}',
    "no name": b'{"weight_map": {"a": ""}}',
    "a zero byte": b'{"weight_map": {"a": "a\\u0000b"}}',
    "a lone surrogate": b'{"weight_map": {"a": "\\ud800"}}',
    "a long name": b'{"weight_map": {"a": "' + b"x" * 5000 + b'"}}',
    "itself": b'{"weight_map": {"a": "model.safetensors.index.json"}}',
}


def test_indices_that_are_refused(file: Path) -> None:
    index = file.parent / INDEX
    for case, data in INDICES.items():
        index.write_bytes(data)
        assert look(index) is None, case


def test_indices_with_one_odd_value(file: Path) -> None:
    index, rng = file.parent / INDEX, random.Random(2)
    whole = {"metadata": {"total_size": 60}, "weight_map": dict.fromkeys("abc", file.name)}
    index.write_bytes(text(whole))
    assert look(index) is not None
    for i in range(CASES):
        index.write_bytes(text(odd(whole, rng)) if i % 2 else flipped(text(whole), rng, 10**6))
        look(index)


def test_a_folder_in_the_place_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(CheckpointError, match="cannot be read"):
        entries_of(tmp_path)
