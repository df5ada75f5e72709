"""Bandwidths and rates of a machine: measured in a few seconds and kept in a file, or given.

Units: GB/s are 1e9 bytes a second, TFLOP/s 1e12 operations a second. `copy` rates are of
page-locked memory; "both" is what each direction gets while the other runs too.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

_COPY_BYTES = 256 * 2**20
_REPEATS = 5


@dataclass(frozen=True, slots=True)
class Hardware:
    """What a schedule's time depends on."""

    name: str
    h2d_gb_s: float  # alone
    d2h_gb_s: float
    h2d_both_gb_s: float  # while d2h runs too
    d2h_both_gb_s: float
    matmul_tflop_s: float  # a large bf16 matrix product (fp32 on the CPU)
    memory_gb_s: float  # device memory, bytes read plus bytes written
    launch_s: float  # an op that does nothing, issued and done


H200 = Hardware("NVIDIA H200", 55.5, 55.5, 50.8, 50.8, 804.0, 4300.0, 10e-6)
"""One H200 on PCIe 5, as measured on torch 2.11 with CUDA 13."""


def measure(device: torch.device | str) -> Hardware:
    """Measure `device` (about three seconds on a GPU).

    On the CPU, a copy is one within host memory, and directions do not overlap.
    """
    device = torch.device(device)
    probe = _Probe(device)
    copy = _COPY_BYTES / 1e9
    h2d, d2h = copy / probe.seconds(probe.h2d), copy / probe.seconds(probe.d2h)
    both = probe.seconds(probe.both_ways)
    n = 8192 if device.type == "cuda" else 1024
    return Hardware(
        name=torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        h2d_gb_s=h2d,
        d2h_gb_s=d2h,
        h2d_both_gb_s=min(h2d, copy / both),
        d2h_both_gb_s=min(d2h, copy / both),
        matmul_tflop_s=2 * n**3 / probe.seconds(probe.matmul(n)) / 1e12,
        memory_gb_s=2 * copy / probe.seconds(probe.device_copy),
        launch_s=probe.seconds(probe.nothing),
    )


def load(device: torch.device | str) -> Hardware:
    """The measured rates of `device`, from the cache file if it was measured before."""
    device = torch.device(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    path = _cache() / f"{name.lower().replace(' ', '-')}.json"
    if path.exists():
        return Hardware(**json.loads(path.read_text()))
    measured = measure(device)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(measured), indent=2))
    return measured


def _cache() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "megacompile"


class _Probe:
    """The operations that are timed, on buffers of their own."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cuda = device.type == "cuda"
        self.host = [self._host() for _ in range(2)]
        self.there = [self._device() for _ in range(2)]
        self.streams = [torch.cuda.Stream(device) for _ in range(2)] if self.cuda else []

    def _host(self) -> torch.Tensor:
        return torch.ones(_COPY_BYTES, dtype=torch.uint8, pin_memory=self.cuda)

    def _device(self) -> torch.Tensor:
        return torch.ones(_COPY_BYTES, dtype=torch.uint8, device=self.device)

    def seconds(self, work: Callable[[], object]) -> float:
        """Median wall time of `work`, after one run to warm up."""
        times = []
        for _ in range(_REPEATS + 1):
            self._wait()
            start = time.perf_counter()
            work()
            self._wait()
            times.append(time.perf_counter() - start)
        return statistics.median(times[1:])

    def _wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def h2d(self) -> None:
        self.there[0].copy_(self.host[0], non_blocking=True)

    def d2h(self) -> None:
        self.host[1].copy_(self.there[1], non_blocking=True)

    def both_ways(self) -> None:
        if not self.cuda:
            self.h2d()
            self.d2h()
            return
        for stream, copy in zip(self.streams, (self.h2d, self.d2h), strict=True):
            with torch.cuda.stream(stream):
                copy()

    def device_copy(self) -> None:
        self.there[0].copy_(self.there[1])

    def nothing(self) -> None:
        self.there[0][:1].zero_()

    def matmul(self, n: int) -> Callable[[], object]:
        dtype = torch.bfloat16 if self.cuda else torch.float32
        a, b = (torch.randn(n, n, device=self.device, dtype=dtype) for _ in range(2))
        return lambda: a @ b
