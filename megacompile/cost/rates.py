"""Measures a machine's rates in a few seconds, caches them in files, and finds machines by name."""

from __future__ import annotations

import functools
import json
import math
import mmap
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TypeVar

import torch

from megacompile import compat, notices
from megacompile.cost.hardware import GPUS, H200, NAMES, Hardware, least
from megacompile.errors import OptionError
from megacompile.host_memory import pinned_empty, total_bytes
from megacompile.progress import phase
from megacompile.runtime.disk import Disk, FileSpan, Request, Way

_COPY_BYTES = 256 * 2**20
_REPEATS = 5
_SUSTAINED_S = 2.0  # duration of the sustained-rate test; a quarter of it on the CPU
_LAUNCHES = 100
_UPDATE_BYTES = 7 * _COPY_BYTES  # AdamW in float32 reads four values and writes three
_FP8_CAPABILITY = (8, 9)  # of CUDA: Ada, Hopper and later


class _Probe:
    """The timed operations and their buffers."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cuda = device.type == "cuda"
        make = pinned_empty if self.cuda else torch.empty
        self.on_host = [make((_COPY_BYTES,), dtype=torch.uint8).fill_(1) for _ in range(2)]
        self.on_device = [
            torch.ones(_COPY_BYTES, dtype=torch.uint8, device=device) for _ in range(2)
        ]
        self.streams = [torch.cuda.Stream(device) if self.cuda else None for _ in range(2)]
        param = torch.nn.Parameter(torch.ones(_COPY_BYTES // 4))
        param.grad = torch.ones_like(param)
        self.update = torch.optim.AdamW([param], fused=True).step

    def of_device(self) -> Hardware:
        """The rates of copies and of the device, and the sizes of both memories."""
        copy, (first, second) = _COPY_BYTES / 1e9, self.on_device

        def small_copy() -> None:
            first[:1].copy_(self.on_host[0][:1], non_blocking=True)

        h2d, d2h = copy / self.seconds(self.h2d), copy / self.seconds(self.d2h)
        both = copy / self.seconds(self.both_ways)
        n, half = (8192, torch.bfloat16) if self.cuda else (1024, torch.float32)
        peak = self.matmul_flop_s(n, half)
        host_bytes = device_bytes = total_bytes()
        name = "CPU"
        if self.cuda:
            name = torch.cuda.get_device_name(self.device)
            device_bytes = int(torch.cuda.get_device_properties(self.device).total_memory)
        return Hardware(
            name=name,
            h2d_gb_s=h2d,
            d2h_gb_s=d2h,
            h2d_both_gb_s=min(h2d, both),
            d2h_both_gb_s=min(d2h, both),
            matmul_tflop_s=peak / 1e12,
            memory_gb_s=2 * copy / self.seconds(lambda: first.copy_(second)),
            launch_s=self.seconds(lambda: first[:1].zero_(), _LAUNCHES),
            matmul32_tflop_s=self.matmul_flop_s(n // 2, torch.float32) / 1e12,
            matmul8_tflop_s=self.fp8_tflop_s(n),
            sustained=min(1.0, self.sustained_flop_s(half) / peak),
            attention_share=H200.attention_share,
            copy_s=self.seconds(small_copy, _LAUNCHES),
            device_bytes=device_bytes,
            host_bytes=host_bytes,
        )

    def with_host(self, measured: Hardware, meet: Callable[[], object]) -> Hardware:
        """Measure the host; its memory rate is at least every combined rate that was observed."""
        update_s = self.seconds(self.update)
        update, both = _UPDATE_BYTES / update_s / 1e9, 0.0
        copied = measured.h2d_both_gb_s + measured.d2h_both_gb_s
        meet()
        if self.cuda:
            copies = max(1, round(update_s * measured.h2d_gb_s * 1e9 / _COPY_BYTES))

            def together() -> None:
                for _ in range(copies):
                    self.h2d()
                self.update()

            both = (_UPDATE_BYTES + copies * _COPY_BYTES) / self.seconds(together) / 1e9
        return replace(measured, host_memory_gb_s=max(update, both, copied), update_gb_s=update)

    def seconds(self, work: Callable[[], object], runs: int = 1) -> float:
        """Median wall time of `work`, run several times in a row, after a warm-up."""
        times = []
        for _ in range(_REPEATS + 1):
            self._wait()
            start = time.perf_counter()
            for _ in range(runs):
                work()
            self._wait()
            times.append((time.perf_counter() - start) / runs)
        return statistics.median(times[1:])

    def _wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def h2d(self) -> None:
        self.on_device[0].copy_(self.on_host[0], non_blocking=True)

    def d2h(self) -> None:
        self.on_host[1].copy_(self.on_device[1], non_blocking=True)

    def both_ways(self) -> None:
        for stream, copy in zip(self.streams, (self.h2d, self.d2h), strict=True):
            with torch.cuda.stream(stream):
                copy()

    def matmul_flop_s(self, n: int, dtype: torch.dtype) -> float:
        a, b = (torch.randn(n, n, device=self.device, dtype=dtype) for _ in range(2))
        return 2 * n**3 / self.seconds(lambda: a @ b)

    def fp8_tflop_s(self, n: int) -> float | None:
        """Rate of products with one scale per operand; None if the device has no fp8 kernels.
        Uses random numbers, because equal ones take less power, which makes a power-limited GPU
        faster."""
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


# Measures a disk with direct reads and writes of a scratch file.
#
# A drive may slow down after long writes (its fast cache is full, it gets warm), which a
# measurement of seconds does not show.

_FILE_BYTES = 512 * 2**20  # in each of two places
_DISK_REPEATS = 3


@dataclass(frozen=True, slots=True)
class DiskRates:
    """Rates of one disk, GB/s."""

    disk_read_gb_s: float  # alone
    disk_write_gb_s: float
    disk_read_both_gb_s: float  # while it is written too
    disk_write_both_gb_s: float

    def on(self, hardware: Hardware) -> Hardware:
        """The machine with this disk."""
        return hardware.replace(**asdict(self))


def measure_disk(folder: str | os.PathLike[str]) -> DiskRates:
    """Measure the disk of a folder in a few seconds; uses 1 GiB of it meanwhile. Raises `DiskError`
    if no file can be created there, the disk is full, or I/O failed."""
    disk = Disk(folder)
    spans: dict[Way, FileSpan] = {}

    def begun(way: Way, span: FileSpan) -> Request:
        request = disk.request(way, [span], "measure_disk()")
        request.begin()
        return request

    for way in Way:
        place = disk.take(_FILE_BYTES)
        # random: some drives and file systems compress
        memory = torch.frombuffer(mmap.mmap(-1, place.size_bytes), dtype=torch.uint8)
        words = memory.view(torch.int64)
        words.random_(generator=torch.Generator().manual_seed(0))
        spans[way] = FileSpan(place, functools.partial(torch.Tensor.view, memory, -1))
        begun(Way.WRITE, spans[way]).wait()  # the first write to a place is slower

    def gb_s(*ways: Way) -> float:
        """The rate of each way, the best of several runs because others may use the disk."""
        times = []
        for _ in range(_DISK_REPEATS):
            start = time.perf_counter()
            for request in [begun(way, spans[way]) for way in ways]:
                request.wait()
            times.append(time.perf_counter() - start)
        return _FILE_BYTES / min(times) / 1e9

    # when one of the two has ended, the other has the disk to itself
    read, write, both = gb_s(Way.READ), gb_s(Way.WRITE), gb_s(*Way)
    return DiskRates(read, write, min(read, both), min(write, both))


# The cache, so that each machine is measured once.

_FORMAT = 8  # of the file; raised when fields or their meaning change
_DISK_FORMAT = 3

_Rates = TypeVar("_Rates", Hardware, DiskRates)


def load(device: torch.device | str, *, again: bool = False) -> Hardware:
    """The measured figures of `device`, from the cache if there are any. `again` measures in any
    case, for example because the device was busy the last time; ranks that share a model then
    measure again too.

    The cache file depends on the device, the number of threads, torch's version and the version of
    the format. An unreadable file is replaced.
    """
    device = torch.device(device)
    found = None if again else cached(device)
    if again and device.type == "cuda":
        of_ranks = _file(device, "*")
        for path in () if of_ranks is None else of_ranks.parent.glob(of_ranks.name):
            path.unlink(missing_ok=True)
    return found or measure_together(device)


def cached(device: torch.device, ranks: int = 1) -> Hardware | None:
    """The cached figures of one of `ranks` GPUs of this host that were measured together, if they
    are valid."""
    return _kept(_file(device, ranks), Hardware)


def measure_together(
    device: torch.device, ranks: int = 1, meet: Callable[[], object] = lambda: None
) -> Hardware:
    """Measure this device (about six seconds on a GPU) while the other ranks of this host measure
    theirs, without changing the random generators, and cache the result.

    On the CPU, copies are within host memory and directions do not overlap.

    Args:
        device: a GPU, or the CPU.
        ranks: of this host that measure.
        meet: a barrier of all ranks, called three times: before copies, before updates, and before
            updates next to copies. So all of them copy and update at the same time. Each measures
            its share of the host; the host has the sum.
    """
    gpus = [device] if device.type == "cuda" else []
    with phase("measuring the machine's rates"), torch.random.fork_rng(gpus):
        probe = _Probe(device)
        meet()
        measured = probe.of_device()
        probe.update()  # allocates its states
        meet()
        measured = probe.with_host(measured, meet)
    _keep(_file(device, ranks), measured)
    return measured


def load_disk(folder: str | os.PathLike[str], *, again: bool = False) -> DiskRates:
    """The measured rates of a folder's disk, cached as in `load`. Raises `DiskError` if no file can
    be created there, or it cannot be read or written."""
    path = _disk_file(Path(folder))
    found = None if again else _kept(path, DiskRates)
    if found is None:
        with phase("measuring the disk's rates"):
            found = measure_disk(folder)
        _keep(path, found)
    return found


def disk_on_file(folder: str | os.PathLike[str]) -> DiskRates | None:
    """The cached rates of a folder's disk; None if there are no valid ones."""
    return _kept(_disk_file(Path(folder)), DiskRates)


def _kept(path: Path | None, kind: type[_Rates]) -> _Rates | None:
    """The rates in a file; None if it is absent, of another format or has impossible figures."""
    try:
        if path is None or not path.is_file():  # opening a FIFO would block
            return None
        found = kind(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None
    for field in fields(kind):
        value = getattr(found, field.name)
        valid = type(value) in (int, float) and least(field.name) <= value < math.inf
        valid = isinstance(value, str) if field.name == "name" else valid or value == field.default
        if not valid:
            return None
    return found


def _keep(path: Path | None, rates: Hardware | DiskRates) -> None:
    """Write a cache file atomically, or warn if that fails."""
    try:
        if path is None:
            raise OSError("no home directory")
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(asdict(rates), file, indent=2)
        os.replace(file.name, path)
    except OSError as error:
        notices.warn(
            f"megacompile: the machine's rates cannot be cached ({error}), so each process "
            "measures them; set XDG_CACHE_HOME to a writable directory",
            notices.Whose.HOST,
        )


def _file(device: torch.device, ranks: int | str = 1) -> Path | None:
    """One file for each kind of device; for ranks one for each GPU of each machine, because GPUs of
    the same model differ, and machines may share a home."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    threads = torch.get_num_threads()  # of host updates
    key = f"{name.lower().replace(' ', '-')}-{threads}-torch-{torch.__version__}-v{_FORMAT}"
    if ranks != 1:
        uuid = torch.cuda.get_device_properties(device).uuid
        key = f"{key}-{_host()}-{uuid}-of-{ranks}"
    return _cached_as(key)


def _disk_file(folder: Path) -> Path | None:
    """The cache file for a folder's disk. It names the machine, because machines may share a
    cache."""
    try:
        device = os.stat(folder).st_dev
    except OSError:
        return None  # measuring reports the error
    name = f"disk-{_host()}-{os.major(device)}-{os.minor(device)}-v{_DISK_FORMAT}"
    return _cached_as(name)


def _host() -> str:
    return "".join(c if c.isalnum() else "-" for c in platform.node().lower())


def _cached_as(name: str) -> Path | None:
    """The path of a cache file; None without a home directory."""
    root = os.environ.get("XDG_CACHE_HOME")
    try:
        folder = Path(root) if root else Path.home() / ".cache"
    except RuntimeError:  # an unknown user without HOME
        return None
    return folder / "megacompile" / f"{name}.json"


def known(name: str) -> Hardware:
    """A machine by name: h200 (measured), h100, a100, 4090, 3090, 3080 (data sheets), this.

    "this" is the current machine, measured once. Host memory is only known for this one; set it for
    others: `known("4090").replace(host_bytes=128 * 2**30)`.

    Raises:
        OptionError: an unknown name.
    """
    key = name.lower() if isinstance(name, str) else name
    if key == "this":
        return load("cuda" if torch.cuda.is_available() else "cpu")
    found = GPUS.get(key)
    if found is None:
        raise OptionError(
            f"known(): got {name!r}; needed one of {', '.join(NAMES)}; or pass a "
            "megacompile.cost.hardware.Hardware with your own figures"
        )
    return found
