"""Headers and indices that are damaged: each is a `CheckpointError` that names the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megacompile import CheckpointError, megacompile

pytest.importorskip("safetensors")

DEEP = "[" * 100_000
INDEX = "model.safetensors.index.json"


class Net(nn.Module):
    """Of the tensors in the file."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.c = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(1))
        self.register_buffer("b", torch.zeros(4, dtype=torch.int64))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file of three tensors."""
    from safetensors.torch import save_file

    path = tmp_path / "model.safetensors"
    save_file(Net().state_dict(), str(path), {"format": "pt"})
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


def reads(path: Path) -> bool:
    """Is a checkpoint read? Then it is whole. Else it is refused in a line that names the
    folder."""
    with torch.device("meta"):
        model = Net()
    try:
        megacompile(model, device="cpu", checkpoint=path)
    except CheckpointError as error:
        assert str(path.parent) in str(error) and len(str(error)) < 100_000, error
        return False
    assert all(map(torch.equal, model.state_dict().values(), Net().state_dict().values()))
    return True


def test_files_that_are_cut(file: Path) -> None:
    assert reads(file)
    data = file.read_bytes()
    for end in range(len(data)):
        file.write_bytes(data[:end])
        assert not reads(file), end


# bytes, or what the entry of "c" has instead
HEADERS: dict[str, bytes | dict[str, Any]] = {
    "deep inside": b'{"a": ' + DEEP.encode(),
    "not utf-8": b'{"\xff": 1}',
    "a list": b"[1, 2]",
    "an entry is a list": b'{"a": [1]}',
    "many digits": b'{"a": ' + b"9" * 5000 + b"}",
    "twice": b'{"a": {"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
    b'"a": {"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
    "offsets are text": {"data_offsets": "ab"},
    "offsets are one": {"data_offsets": [0]},
    "negative": {"data_offsets": [-4, 0]},
    "backwards": {"data_offsets": [60, 56]},
    "out of the file": {"data_offsets": [10**9, 10**9 + 4]},
    "huge": {"data_offsets": [2**64, 2**64 + 4]},
    "overlap": {"data_offsets": [0, 4]},
    "shape is deep": {"shape": [[1]]},
    "shape is huge": {"shape": [2**40, 2**40]},
    "shape is true": {"shape": [True]},
    "dtype is a list": {"dtype": ["F32"]},
    "dtype is unknown": {"dtype": "F33"},
    "dtype is null": {"dtype": None},
    "a shape of texts": {"shape": ["a"]},
    "an offset is a text": {"data_offsets": [56, "60"]},
    "an offset is not whole": {"data_offsets": [56.5, 60]},
    "no dtype": {"dtype": ...},
}


def test_headers_that_are_refused(file: Path) -> None:
    header, tensors = parts(file)
    for case, change in HEADERS.items():
        if isinstance(change, dict):
            entry = {k: v for k, v in (header["c"] | change).items() if v is not ...}
            change = text(header | {"c": entry})
        write(file, change, tensors)
        assert not reads(file), case
    write(file, text(header | {"__metadata__": [1]}), tensors)
    assert not reads(file)


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
    index.write_bytes(text({"weight_map": dict.fromkeys("abc", file.name)}))
    assert reads(index)
    for case, data in INDICES.items():
        index.write_bytes(data)
        assert not reads(index), case


def test_a_folder_in_the_place_of_a_file(file: Path) -> None:
    file.unlink()
    file.mkdir()
    assert not reads(file.parent)
