"""Measures a machine's rates in a few seconds."""

from __future__ import annotations

import functools
import mmap
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from megacompile import compat, numa
from megacompile.cost.hardware import H200, Hardware
from megacompile.host_memory import pinned_empty, total_bytes
from megacompile.runtime.disk.scratch import ScratchFile
from megacompile.runtime.disk.transfers import Disk, FileSpan, Request, Way

_COPY_BYTES = 256 * 2**20
_REPEATS = 5
_SUSTAINED_S = 2.0  # duration of the sustained-rate test; a quarter of it on the CPU
_LAUNCHES = 100
_FP8_CAPABILITY = (8, 9)  # of CUDA: Ada, Hopper and later


def measure(device: torch.device | str, *, meet: Callable[[], object] = lambda: None) -> Hardware:
    """Measure `device` (about six seconds on a GPU) without changing the random generators.

    On the CPU, copies are within host memory and directions do not overlap.

    Args:
        device: a GPU, or the CPU.
        meet: a barrier between processes that each measure one GPU, called three times: before
            copies, before updates, and before updates next to copies. So all of them copy and
            update at the same time. Each measures its share of the host; the host has the sum.
    """
    device = torch.device(device)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        probe = _Probe(device)
        meet()
        measured = _measure_device(probe)
        probe.update()  # allocates its memory
        meet()
        return _measure_host(probe, measured, meet)


def _measure_device(probe: _Probe) -> Hardware:
    device = probe.device
    copy = _COPY_BYTES / 1e9
    h2d, d2h = copy / probe.seconds(probe.h2d), copy / probe.seconds(probe.d2h)
    both = probe.seconds(probe.both_ways)
    n = 8192 if device.type == "cuda" else 1024
    half = torch.bfloat16 if device.type == "cuda" else torch.float32
    peak = 2 * n**3 / probe.seconds(probe.matmul(n, half)) / 1e12
    return Hardware(
        name=torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        h2d_gb_s=h2d,
        d2h_gb_s=d2h,
        h2d_both_gb_s=min(h2d, copy / both),
        d2h_both_gb_s=min(d2h, copy / both),
        matmul_tflop_s=peak,
        memory_gb_s=2 * copy / probe.seconds(probe.device_copy),
        launch_s=probe.seconds(probe.launches) / _LAUNCHES,
        matmul32_tflop_s=2
        * (n // 2) ** 3
        / probe.seconds(probe.matmul(n // 2, torch.float32))
        / 1e12,
        matmul8_tflop_s=probe.fp8_tflop_s(n),
        sustained=min(1.0, probe.sustained_flop_s(half) / (peak * 1e12)),
        attention_share=H200.attention_share,
        copy_s=probe.seconds(probe.small_copies) / _LAUNCHES,
        device_bytes=_device_bytes(device),
        host_bytes=total_bytes(),
    )


def _measure_host(probe: _Probe, measured: Hardware, meet: Callable[[], object]) -> Hardware:
    """Measure the host; its memory rate is at least every combined rate that was observed."""
    update_s = probe.seconds(probe.update)
    update = probe.update_bytes / update_s / 1e9
    copies = measured.h2d_both_gb_s + measured.d2h_both_gb_s
    meet()
    both = probe.host_gb_s(update_s, measured.h2d_gb_s)
    return replace(measured, host_memory_gb_s=max(update, both, copies), update_gb_s=update)


def _device_bytes(device: torch.device) -> int | None:
    if device.type != "cuda":
        return total_bytes()
    return int(torch.cuda.get_device_properties(device).total_memory)


class _Probe:
    """The timed operations and their buffers."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cuda = device.type == "cuda"
        self.on_host = [self._host_buffer() for _ in range(2)]
        self.on_device = [
            torch.ones(_COPY_BYTES, dtype=torch.uint8, device=device) for _ in range(2)
        ]
        self._optimizers: list[torch.optim.Optimizer] = []
        self.streams = [torch.cuda.Stream(device) for _ in range(2)] if self.cuda else []

    def _host_buffer(self) -> torch.Tensor:
        make = pinned_empty if self.cuda else torch.empty
        with numa.bound(numa.node_of(self.device)):  # near the GPU, like buckets
            buffer = make((_COPY_BYTES,), dtype=torch.uint8)
        return buffer.fill_(1)

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
        self.on_device[0].copy_(self.on_host[0], non_blocking=True)

    def d2h(self) -> None:
        self.on_host[1].copy_(self.on_device[1], non_blocking=True)

    def both_ways(self) -> None:
        if not self.cuda:
            self.h2d()
            self.d2h()
            return
        for stream, copy in zip(self.streams, (self.h2d, self.d2h), strict=True):
            with torch.cuda.stream(stream):
                copy()

    def device_copy(self) -> None:
        self.on_device[0].copy_(self.on_device[1])

    def launches(self) -> None:
        for _ in range(_LAUNCHES):
            self.on_device[0][:1].zero_()

    def small_copies(self) -> None:
        for _ in range(_LAUNCHES):
            self.on_device[0][:1].copy_(self.on_host[0][:1], non_blocking=True)

    def matmul(self, n: int, dtype: torch.dtype) -> Callable[[], object]:
        a, b = (torch.randn(n, n, device=self.device, dtype=dtype) for _ in range(2))
        return lambda: a @ b

    def fp8_tflop_s(self, n: int) -> float | None:
        """Rate of products with one scale per operand; None if the device has no fp8 kernels.

        Uses random numbers, because equal ones take less power, which makes a power-limited GPU
        faster.
        """
        if not self.cuda or torch.cuda.get_device_capability(self.device) < _FP8_CAPABILITY:
            return None
        a, b = (torch.randn(n, n, device=self.device).to(torch.float8_e4m3fn) for _ in range(2))
        one = torch.ones((), device=self.device)
        product = functools.partial(compat.SCALED_MM, a, b.t(), one, one, out_dtype=torch.bfloat16)
        return 2 * n**3 / self.seconds(product) / 1e12

    def sustained_flop_s(self, dtype: torch.dtype) -> float:
        """Mean rate of a linear layer's three products over `_SUSTAINED_S`.

        At its power limit a GPU's clock oscillates. An H100 ran them at 730 TFLOP/s for 0.8 s, at
        590 for the next 0.2 s, and so on around 693 with decreasing amplitude.
        """
        m, k, n = (8192, 4096, 14336) if self.cuda else (256, 512, 1024)
        x, w, dy = (
            torch.randn(shape, device=self.device, dtype=dtype)
            for shape in ((m, k), (n, k), (m, n))
        )
        least_s = _SUSTAINED_S if self.cuda else _SUSTAINED_S / 4
        done = 0
        self._wait()
        start = now = time.perf_counter()
        while now - start < least_s:
            for _ in range(20):
                _ = x @ w.t(), dy @ w, dy.t() @ x
            self._wait()
            now, done = time.perf_counter(), done + 20
        return done * 6 * m * k * n / (now - start) if done else 0.0

    @property
    def update_bytes(self) -> int:
        """Bytes of one update: AdamW in float32 reads four values and writes three."""
        return 7 * 4 * self._update_numel()

    @staticmethod
    def _update_numel() -> int:
        return _COPY_BYTES // 4

    def update(self) -> None:
        if not self._optimizers:
            param = torch.nn.Parameter(torch.ones(self._update_numel()))
            param.grad = torch.ones_like(param)
            self._optimizers.append(torch.optim.AdamW([param], fused=True))
        self._optimizers[0].step()

    def host_gb_s(self, update_s: float, h2d_gb_s: float) -> float:
        """Combined bandwidth of the update and concurrent copies."""
        if not self.cuda:
            return 0.0
        copies = max(1, round(update_s * h2d_gb_s * 1e9 / _COPY_BYTES))

        def together() -> None:
            for _ in range(copies):
                self.h2d()
            self.update()

        return (self.update_bytes + copies * _COPY_BYTES) / self.seconds(together) / 1e9


# Measures a disk with direct reads and writes of a scratch file.
#
# A drive may slow down after long writes (its fast cache is full, it gets warm), which a
# measurement of seconds does not show.

_FILE_BYTES = 512 * 2**20  # in each of two places
_DISK_REPEATS = 3


@dataclass(frozen=True, slots=True)
class DiskRates:
    """Rates of one disk, GB/s."""

    read_gb_s: float  # alone
    write_gb_s: float
    read_both_gb_s: float  # while it is written too
    write_both_gb_s: float

    def on(self, hardware: Hardware) -> Hardware:
        """The machine with this disk."""
        return hardware.replace(
            disk_read_gb_s=self.read_gb_s,
            disk_write_gb_s=self.write_gb_s,
            disk_read_both_gb_s=self.read_both_gb_s,
            disk_write_both_gb_s=self.write_both_gb_s,
        )


def measure_disk(folder: str | os.PathLike[str]) -> DiskRates:
    """Measure the disk of a folder in a few seconds; uses 1 GiB of it meanwhile.

    Raises:
        DiskError: no file can be created there, the disk is full, or I/O failed.
    """
    disk = Disk(ScratchFile(folder))
    spans = {}
    for way in Way:
        place = disk.file.take(_FILE_BYTES)
        # random: some drives and file systems compress
        memory = torch.frombuffer(mmap.mmap(-1, place.size_bytes), dtype=torch.uint8)
        words = memory.view(torch.int64)
        words.random_(generator=torch.Generator().manual_seed(0))
        spans[way] = FileSpan(place, functools.partial(torch.Tensor.view, memory, -1))
        _begun(disk, Way.WRITE, spans[way]).wait()  # new places are slower

    def seconds(*ways: Way) -> dict[Way, float]:
        """Seconds until each way is done, the best of several runs because others may use the
        disk."""
        found = dict.fromkeys(ways, float("inf"))
        for _ in range(_DISK_REPEATS):
            start = time.perf_counter()
            running = [_begun(disk, way, spans[way]) for way in ways]
            for way, request in zip(ways, running, strict=True):
                request.wait()
                found[way] = min(found[way], time.perf_counter() - start)
        return found

    size = _FILE_BYTES / 1e9
    alone = {way: size / seconds(way)[way] for way in Way}
    together = max(seconds(*Way).values())  # after the first ends, the other has the disk alone
    both = size / together
    return DiskRates(
        alone[Way.READ],
        alone[Way.WRITE],
        min(alone[Way.READ], both),
        min(alone[Way.WRITE], both),
    )


def _begun(disk: Disk, way: Way, span: FileSpan) -> Request:
    request = disk.request(way, [span], "measure_disk()")
    request.begin()
    return request
