"""What tensors look like, without their data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from megacompile import compat


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """What a tensor looks like, without its data."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...]
    requires_grad: bool = False
    device: torch.device = torch.device("cpu")

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorMeta:
        """The meta of a dense tensor."""
        return TensorMeta(
            tuple(int(n) for n in tensor.shape),
            tensor.dtype,
            tuple(int(n) for n in tensor.stride()),
            tensor.requires_grad and not _cut_off(tensor),
            tensor.device,
        )

    def empty(self) -> torch.Tensor:
        """A new tensor like this (a fake one under a fake mode)."""
        return torch.empty_strided(
            self.shape,
            self.stride,
            dtype=self.dtype,
            device=self.device,
            requires_grad=self.requires_grad,
        )

    def zeros(self) -> torch.Tensor:
        """A new tensor of zeros like this."""
        with torch.no_grad():
            return self.empty().zero_()

    @property
    def size_bytes(self) -> int:
        """Bytes of its elements (not of the storage it may be a view of)."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{short_dtype(self.dtype)}[{', '.join(map(str, self.shape))}]"


def _cut_off(tensor: torch.Tensor) -> bool:
    """Was it made as a view under `no_grad`? It says `requires_grad`, but no gradient flows."""
    base = compat.base_of(tensor)
    return base is not None and base.requires_grad and tensor.grad_fn is None


def short_dtype(dtype: torch.dtype) -> str:
    """ "bf16" for torch.bfloat16, as FX prints it."""
    name = str(dtype).removeprefix("torch.")
    for long, short in (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "i")):
        if name.startswith(long):
            return short + name[len(long) :]
    return name


def tensors_bytes(value: Any) -> int:
    """Bytes of a TensorMeta or of a nested tuple of them (None counts nothing)."""
    if isinstance(value, TensorMeta):
        return value.size_bytes
    if isinstance(value, tuple):
        return sum(tensors_bytes(item) for item in value)
    return 0
