"""Machines that need not be at hand: one that was measured, and data sheets of others."""

from __future__ import annotations

from dataclasses import dataclass

from megacompile.cost.hardware import H200, Hardware

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class _Sheet:
    """A data sheet, and the host that such a GPU usually has."""

    name: str
    memory_bytes: int
    memory_gb_s: float
    bf16_tflop_s: float  # dense, fp32 accumulation
    fp32_tflop_s: float
    pcie_gb_s: float  # of 16 lanes, each way, after encoding
    host_memory_gb_s: float
    nvlink_gb_s: float | None = None  # each way; None: collectives go over PCIe, by the host
    fp8_tflop_s: float | None = None  # dense, fp32 accumulation; None: it has none

    def hardware(self) -> Hardware:
        """Expected rates: the sheet times the share that the H200 reached of its own."""
        link, both, product = 55.5 / 63.0, 50.8 / 63.0, 804.0 / 989.0
        made = Hardware(
            self.name,
            h2d_gb_s=self.pcie_gb_s * link,
            d2h_gb_s=self.pcie_gb_s * link,
            h2d_both_gb_s=self.pcie_gb_s * both,
            d2h_both_gb_s=self.pcie_gb_s * both,
            matmul_tflop_s=self.bf16_tflop_s * product,
            memory_gb_s=self.memory_gb_s * 4300.0 / 4800.0,
            launch_s=H200.launch_s,
            matmul32_tflop_s=self.fp32_tflop_s * 52.0 / 67.0,
            matmul8_tflop_s=None if self.fp8_tflop_s is None else self.fp8_tflop_s * product,
            sustained=H200.sustained,
            attention_share=H200.attention_share,
            copy_s=H200.copy_s,
            host_memory_gb_s=self.host_memory_gb_s,
            update_gb_s=self.host_memory_gb_s * 125.0 / 150.0,
            device_bytes=self.memory_bytes,
        )
        return made.with_interconnect(self._interconnect_gb_s())

    def _interconnect_gb_s(self) -> float:
        """Bandwidth of a collective: of NVLink as much as on the H200 (450 GB/s each way)."""
        if self.nvlink_gb_s is not None:
            return self.nvlink_gb_s * H200.interconnect_gb_s / 450.0
        return self.pcie_gb_s * 50.8 / 63.0 / 2


# Not measured. NVIDIA's data sheets: H100 SXM5 (989 TFLOP/s dense bf16, 3.35 TB/s), A100 SXM4 80 GB
# (312, 2.04 TB/s), and the Ada (RTX 4090) and Ampere GA102 (RTX 3090, 3080) architecture papers,
# whose bf16 figures with fp32 accumulation are 165, 71 and 59.5. In fp8, with that accumulation,
# the H100 has 1979 and the RTX 4090 330; Ampere has none. PCIe 5.0 has 63 GB/s a direction
# over 16 lanes, 4.0 half of it; NVLink of the H100 450 GB/s a direction, of the A100 300. Hosts: a
# server as the H200's; two channels of DDR5-5600 (90 GB/s) and DDR4-3200 (51 GB/s) at 80 %. Memory
# is what torch reports, a little under the sheet's.
_SHEETS = {
    "h100": _Sheet("NVIDIA H100 SXM", 79 * _GIB, 3350.0, 989.0, 67.0, 63.0, 150.0, 450.0, 1979.0),
    "a100": _Sheet("NVIDIA A100 SXM 80GB", 79 * _GIB, 2039.0, 312.0, 19.5, 31.5, 120.0, 300.0),
    "4090": _Sheet(
        *("NVIDIA GeForce RTX 4090", 24080 * 2**20, 1008.0, 165.2, 82.6, 31.5, 72.0),
        fp8_tflop_s=330.3,
    ),
    "3090": _Sheet("NVIDIA GeForce RTX 3090", 24080 * 2**20, 936.0, 71.2, 35.6, 31.5, 41.0),
    "3080": _Sheet("NVIDIA GeForce RTX 3080", 9980 * 2**20, 760.0, 59.5, 29.8, 31.5, 41.0),
}
NAMES = ("h200", *_SHEETS, "this")


def of_sheet(name: str) -> Hardware | None:
    """One of `NAMES`; None for another name, and for "this", which has no sheet."""
    if name == "h200":
        return H200
    return _SHEETS[name].hardware() if name in _SHEETS else None
