"""The work of compiled code on a device: its kernels with their operations and bytes, and its
memory.

    kernel  ->  seconds: the largest of operations / rate, bytes / bandwidth, instructions / rate,
                plus a launch

`cost/fusion.py` finds the kernels of a graph.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from megacompile.cost.hardware import Hardware


class KernelBound(Enum):
    """The limiting resource of a kernel."""

    PRODUCT = "product"  # the matrix units, or memory for thin shapes
    ATTENTION = "attention"  # the matrix units at a lower rate, because of the softmax
    MEMORY = "memory"  # device memory


@dataclass(frozen=True, slots=True)
class Kernel:
    """One launch: operations, bytes read and written."""

    name: str  # of its last node
    kind: KernelBound
    flops: int
    size_bytes: int
    itemsize: int  # bytes of an operand's element: 1 (fp8), 2 or 4
    reached: float = 1.0  # share of the limiting rate that its size and access pattern allow
    instructions: int = 0  # of elementwise code, for all elements

    def seconds(self, hardware: Hardware) -> float:
        """Time on a device, without overlap between kernels."""
        moved = self.size_bytes / (hardware.memory_gb_s * 1e9)
        if self.kind is KernelBound.MEMORY:
            moved /= self.reached
        # fp32 products are FMAs of two operations; with TF32 the rate is higher and this too small
        issued = self.instructions / (hardware.matmul32_tflop_s / 2 * 1e12)
        return max(self.flops / self._rate(hardware), moved, issued) + hardware.launch_s

    def _rate(self, hardware: Hardware) -> float:
        rate = hardware.matmul32_tflop_s if self.itemsize > 2 else hardware.matmul_tflop_s
        if self.itemsize == 1:
            rate = hardware.matmul8_tflop_s or rate
        share = (
            hardware.attention_share if self.kind is KernelBound.ATTENTION else hardware.sustained
        )
        return rate * share * self.reached * 1e12


class KernelWork(NamedTuple):
    """The totals of compiled code."""

    flops: int  # of matrix products and attention
    size_bytes: int  # through device memory
    kernels: int


@dataclass(frozen=True, slots=True)
class Returned:
    """The memory of a tensor that a graph returns."""

    memory: int  # equal for tensors that share it; negative: an input's
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Analysis:
    """The result of `megacompile.cost.fusion.analyse` for a graph."""

    kernels: tuple[Kernel, ...]
    peak_bytes: int  # allocated while it runs, including results
    returned: tuple[Returned | None, ...]
    _seconds: dict[Hardware, float] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def work(self) -> KernelWork:
        return KernelWork(
            sum(kernel.flops for kernel in self.kernels),
            sum(kernel.size_bytes for kernel in self.kernels),
            len(self.kernels),
        )

    def seconds(self, hardware: Hardware) -> float:
        if hardware not in self._seconds:
            self._seconds[hardware] = sum(kernel.seconds(hardware) for kernel in self.kernels)
        return self._seconds[hardware]
