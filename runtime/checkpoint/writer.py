"""One file of safetensors, of which one tensor after the other is written.

`safetensors` itself takes all tensors of a file at once. Where ranks share a model, no more than
one of them is whole at a time. Format: https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import functools
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

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
