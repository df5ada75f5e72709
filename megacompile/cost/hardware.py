"""The rates and sizes of a machine.

Units: GB/s are 1e9 bytes a second, TFLOP/s 1e12 operations a second. Copy rates are for page-locked
memory; "both" rates apply to each direction while the other runs too. `cost/rates.py` measures
machines and finds them by name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

from megacompile.errors import OptionError

ASSUMED_NETWORK_GB_S = 12.5


@dataclass(frozen=True, slots=True)
class Hardware:
    """The figures that determine a schedule's time and whether it fits."""

    name: str
    h2d_gb_s: float  # alone
    d2h_gb_s: float
    h2d_both_gb_s: float  # while d2h runs too
    d2h_both_gb_s: float
    matmul_tflop_s: float  # a large bf16 matrix product, cold (fp32 on the CPU)
    memory_gb_s: float  # device memory, bytes read plus bytes written
    launch_s: float  # an empty kernel among others
    matmul32_tflop_s: float = 1.0  # a large fp32 matrix product, under torch's TF32 setting
    matmul8_tflop_s: float | None = None  # a large fp8 matrix product; None: no fp8 kernels
    sustained: float = 1.0  # share of the matmul rates that a model's products sustain
    attention_share: float = 0.7  # of the matmul rate, that attention reaches with long sequences
    copy_s: float = 0.0  # per copy, regardless of its size
    host_memory_gb_s: float = math.inf  # host memory, shared by copies and the CPU
    update_gb_s: float = math.inf  # bytes read plus written by the optimizer's update on the CPU
    device_bytes: int | None = None  # None: unknown
    host_bytes: int | None = None
    locked_bytes: int | None = None  # limit of page-locked host memory; None: no limit
    disk_read_gb_s: float | None = None  # direct I/O of a scratch file; None: no disk
    disk_write_gb_s: float | None = None
    disk_read_both_gb_s: float | None = None  # while writes run too
    disk_write_both_gb_s: float | None = None
    interconnect_gb_s: float = math.inf  # that one rank receives in a collective
    collective_s: float = 0.0  # per collective, regardless of its size
    gathers_over_pcie: float = 0.0  # 1.0: collectives use the link to the host, in both directions
    network_gb_s: float | None = None  # that one rank receives in sums over replicas
    unified: bool = False  # True: `device_bytes` are the machine's only memory, the host's too

    def replace(self, **changes: Any) -> Hardware:
        """The same machine with other figures: `h200.replace(host_bytes=256 * 2**30)`.

        Raises:
            OptionError: an unknown figure, or one that is not positive.
        """
        names = [field.name for field in fields(self)]
        for name, value in changes.items():
            if name not in names:
                raise OptionError(
                    f"Hardware.replace(): got {name!r}; needed one of {', '.join(names)}"
                )
            if name != "name" and value is not None and not value >= least(name):
                raise OptionError(
                    f"Hardware.replace(): got {name}={value!r}; needed a positive number"
                )
        return replace(self, **changes)

    def with_interconnect(self, gb_s: float) -> Hardware:
        """The same machine with an interconnect of `gb_s` per rank.

        An interconnect that is no faster than the link to the host is assumed to run over that link
        (to other GPUs of this host, or to its network) and to share it with copies.

        Raises:
            OptionError: not a positive number.
        """
        over_pcie = 1.0 if gb_s <= self.h2d_gb_s else 0.0
        return self.replace(interconnect_gb_s=gb_s, gathers_over_pcie=over_pcie)

    @property
    def replicas_gb_s(self) -> float:
        """Bandwidth at which one rank receives from its replicas, usually on other hosts, while all
        ranks of its host communicate; 100 Gbit/s if it was neither measured nor given."""
        return ASSUMED_NETWORK_GB_S if self.network_gb_s is None else self.network_gb_s

    def with_link(self, gb_s: float) -> Hardware:
        """The same machine with a link of `gb_s` between host and device, in one direction at a
        time.

        The rates with both directions busy, and those of collectives over this link, scale with it.

        Raises:
            OptionError: not a positive number.
        """
        changes = {
            "h2d_gb_s": gb_s,
            "d2h_gb_s": gb_s,
            "h2d_both_gb_s": gb_s * self.h2d_both_gb_s / self.h2d_gb_s,
            "d2h_both_gb_s": gb_s * self.d2h_both_gb_s / self.d2h_gb_s,
        }
        if self.gathers_over_pcie:
            changes["interconnect_gb_s"] = gb_s * self.interconnect_gb_s / self.h2d_gb_s
        return self.replace(**changes)

    def shared_by(self, ranks: int) -> Hardware:
        """One rank's share of a host with several: its own GPU, and equal parts of the host's
        memory, page-lock limit, bandwidth, update rate and disk."""
        return self.divided(ranks, "host_memory_gb_s", "update_gb_s", *DISK_RATES, *_HOST_BYTES)

    def divided(self, ranks: int, *names: str) -> Hardware:
        """The same machine with an equal part of some figures."""
        known = {name: value for name in names if (value := getattr(self, name)) is not None}
        return replace(
            self,
            **{n: v // ranks if n in _HOST_BYTES else v / ranks for n, v in known.items()},
        )


# Fields of `Hardware`.
_HOST_BYTES = ("host_bytes", "locked_bytes")
_COPIES = ("h2d_gb_s", "d2h_gb_s", "h2d_both_gb_s", "d2h_both_gb_s")
DISK_RATES = (
    *("disk_read_gb_s", "disk_write_gb_s"),
    *("disk_read_both_gb_s", "disk_write_both_gb_s"),
)


def least(name: str) -> float:
    """The smallest valid value of a figure."""
    zero = ("launch_s", "copy_s", "locked_bytes", "collective_s", "gathers_over_pcie")
    return 0.0 if name in zero else 1e-12


H200 = Hardware(
    "NVIDIA H200",
    *(55.5, 55.5, 50.8, 50.8, 804.0, 4300.0, 4e-6),
    matmul32_tflop_s=52.0,
    matmul8_tflop_s=1609.0,
    sustained=0.85,
    attention_share=0.7,
    copy_s=8e-6,
    host_memory_gb_s=150.0,
    update_gb_s=125.0,
    device_bytes=139 * 2**30,
    interconnect_gb_s=395.0,
)
"""One H200 on PCIe 5 with 16 CPU cores, on torch 2.11 with CUDA 13.

Measured: copies, matmul, memory, host memory, the update (0.18 s per billion parameters at 22
bytes), a gather over NVLink. Fitted to whole steps (benchmarks/results): `sustained`, to 48 ms for
one layer's forward, recompute and backward, and `attention_share`, to 39.5 s for those of 28 layers
at 131072 tokens. fp32 (67 TFLOP/s) and fp8 (1979 TFLOP/s) are from the data sheet, scaled by the
share of its data-sheet rate that bf16 reached.
"""


# Machines by name: one that was measured, and the data sheets of others.


def _of_sheet(
    name: str,
    device_bytes: int,
    memory_gb_s: float,
    bf16_tflop_s: float,  # dense, fp32 accumulation
    fp32_tflop_s: float,
    link_gb_s: float,  # to the host, per direction: 16 lanes of PCIe, after encoding
    host_memory_gb_s: float,  # of a typical host
    *,
    nvlink_gb_s: float | None = None,  # per direction; None: collectives go over PCIe and the host
    fp8_tflop_s: float | None = None,  # dense, fp32 accumulation; None: no fp8
) -> Hardware:
    """Expected rates: the sheet's, times the share that the H200 reached of its sheet."""
    link, both, product = link_gb_s / 63.0 * 55.5, link_gb_s / 63.0 * 50.8, 804.0 / 989.0
    gather = both / 2 if nvlink_gb_s is None else nvlink_gb_s * H200.interconnect_gb_s / 450.0
    return H200.replace(
        name=name,
        h2d_gb_s=link,
        d2h_gb_s=link,
        h2d_both_gb_s=both,
        d2h_both_gb_s=both,
        matmul_tflop_s=bf16_tflop_s * product,
        memory_gb_s=memory_gb_s * 4300.0 / 4800.0,
        matmul32_tflop_s=fp32_tflop_s * 52.0 / 67.0,
        matmul8_tflop_s=None if fp8_tflop_s is None else fp8_tflop_s * product,
        host_memory_gb_s=host_memory_gb_s,
        update_gb_s=host_memory_gb_s * 125.0 / 150.0,
        device_bytes=device_bytes,
    ).with_interconnect(gather)


def _unified(
    name: str,
    memory_gb_s: float,
    bf16_tflop_s: float,
    fp32_tflop_s: float,
    fp8_tflop_s: float | None = None,
) -> Hardware:
    """A machine of 128 GB with one memory, in which nothing needs a copy."""
    rates = (memory_gb_s, bf16_tflop_s, fp32_tflop_s, memory_gb_s / 2, memory_gb_s)
    found = _of_sheet(name, 120 * 10**9, *rates, fp8_tflop_s=fp8_tflop_s)
    return replace(found, host_bytes=0, unified=True)


# Not measured. NVIDIA's data sheets: H100 SXM5 (989 TFLOP/s dense bf16, 3.35 TB/s), A100 SXM4 (312;
# 2.04 TB/s with 80 GB, 1.56 with 40), and the Blackwell (RTX 5090), Ada (RTX 4090) and Ampere (RTX
# 3090, 3080, 3060) architecture papers, whose bf16 figures with fp32 accumulation are 210, 165, 71,
# 59.5 and 25.5. In fp8, with that accumulation, the H100 has 1979, the RTX 5090 419 and the RTX
# 4090 330; Ampere has no fp8. PCIe 5.0 has 63 GB/s per direction over 16 lanes, 4.0 half of that;
# NVLink has 450 GB/s per direction on the H100 and 300 on the A100. Hosts: a server like the
# H200's; two channels of DDR5-5600 (90 GB/s) and DDR4-3200 (51 GB/s) at 80 %. Memory is the size
# that torch reports, slightly below the sheet's.
#
# The GPU of a GH200 reads Grace's 480 GB of LPDDR5X (512 GB/s, at 80 %) over 450 GB/s per
# direction. A GB10 (DGX Spark; 273 GB/s, 125 TFLOP/s bf16: an eighth of its sparse fp4) and a Strix
# Halo (Ryzen AI Max+ 395; 256 GB/s, 59 TFLOP/s) have 128 GB for the CPU and the GPU together, of
# which the system keeps 8.
GPUS = {
    "h200": H200,
    "h100": _of_sheet(
        *("NVIDIA H100 SXM", 79 * 2**30, 3350.0, 989.0, 67.0, 63.0, 150.0),
        nvlink_gb_s=450.0,
        fp8_tflop_s=1979.0,
    ),
    "gh200": _of_sheet(
        *("NVIDIA GH200", 95 * 2**30, 4000.0, 989.0, 67.0, 450.0, 410.0),
        nvlink_gb_s=450.0,
        fp8_tflop_s=1979.0,
    ).replace(host_bytes=440 * 2**30),
    "a100": _of_sheet(
        *("NVIDIA A100 SXM 80GB", 79 * 2**30, 2039.0, 312.0, 19.5, 31.5, 120.0),
        nvlink_gb_s=300.0,
    ),
    "a100-40gb": _of_sheet(
        *("NVIDIA A100 SXM 40GB", 39 * 2**30, 1555.0, 312.0, 19.5, 31.5, 120.0),
        nvlink_gb_s=300.0,
    ),
    "5090": _of_sheet(
        *("NVIDIA GeForce RTX 5090", 32110 * 2**20, 1792.0, 209.5, 104.8, 63.0, 72.0),
        fp8_tflop_s=419.0,
    ),
    "4090": _of_sheet(
        *("NVIDIA GeForce RTX 4090", 24080 * 2**20, 1008.0, 165.2, 82.6, 31.5, 72.0),
        fp8_tflop_s=330.3,
    ),
    "3090": _of_sheet("NVIDIA GeForce RTX 3090", 24080 * 2**20, 936.0, 71.2, 35.6, 31.5, 41.0),
    "3080": _of_sheet("NVIDIA GeForce RTX 3080", 9980 * 2**20, 760.0, 59.5, 29.8, 31.5, 41.0),
    "3060": _of_sheet("NVIDIA GeForce RTX 3060", 12040 * 2**20, 360.0, 25.5, 12.7, 31.5, 41.0),
    "gb10": _unified("NVIDIA GB10", 273.0, 125.0, 31.0, fp8_tflop_s=250.0),
    "strix-halo": _unified("AMD Strix Halo", 256.0, 59.4, 14.8),
}
NAMES = (*GPUS, "this")


# Copies if the system limits page-locked memory. A copy from or to pageable memory goes through a
# small locked buffer of the driver, at about half the rate. Which buffers are locked depends on the
# order in which they are allocated, so each copy is assumed to have the average share of pageable
# memory.

SHARE = 0.5  # of the rate of a copy from or to page-locked memory


def with_pageable(hardware: Hardware, host_bytes: int) -> Hardware:
    """The machine with the copy rates that apply if `host_bytes` of host memory are used, some of
    them beyond the known limit of page-locked memory."""
    locked = hardware.locked_bytes
    if locked is None or locked >= host_bytes:
        return hardware
    share = (host_bytes - locked) / host_bytes
    reached = 1 / (1 - share + share / SHARE)
    return replace(hardware, **{name: reached * getattr(hardware, name) for name in _COPIES})


# Plans are also compared on a slower host.

_SLOWER = 0.65  # of the host's measured rates, on a bad day


def with_slower_host(hardware: Hardware) -> Hardware:
    """The same machine with a slower host. Copies alone keep their rates, so a choice without host
    updates need not be simulated again."""
    memory_gb_s = hardware.host_memory_gb_s
    copies_gb_s = min(memory_gb_s, hardware.h2d_both_gb_s + hardware.d2h_both_gb_s)
    return replace(
        hardware,
        update_gb_s=_SLOWER * hardware.update_gb_s,
        host_memory_gb_s=max(_SLOWER * memory_gb_s, copies_gb_s),
    )
