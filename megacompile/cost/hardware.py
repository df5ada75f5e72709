"""What a machine can do: measured in a few seconds and kept in a file, or given by name.

Units: GB/s are 1e9 bytes a second, TFLOP/s 1e12 operations a second. `copy` rates are of
page-locked memory; "both" is what each direction gets while the other runs too. `known` has data
sheets of GPUs, multiplied by what was measured on one of them; `measure` measures this one.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from megacompile.errors import OptionError
from megacompile.host_memory import total_bytes

_COPY_BYTES = 256 * 2**20
_REPEATS = 5
_SUSTAINED_S = 1.0  # how long matrix products run for the sustained rate
_FORMAT = 3  # of the cached file: raised when fields change, or what they mean


@dataclass(frozen=True, slots=True)
class Hardware:
    """What a schedule's time and its fit depend on."""

    name: str
    h2d_gb_s: float  # alone
    d2h_gb_s: float
    h2d_both_gb_s: float  # while d2h runs too
    d2h_both_gb_s: float
    matmul_tflop_s: float  # a large bf16 matrix product, at once (fp32 on the CPU)
    memory_gb_s: float  # device memory, bytes read plus bytes written
    launch_s: float  # a kernel among others that does nothing
    matmul32_tflop_s: float = 1.0  # a large fp32 matrix product, as torch is set (TF32 or not)
    sustained: float = 1.0  # of the matmul rates: what products of a model's shapes get for long
    attention_share: float = 0.7  # of the matmul rate: what attention gets with long sequences
    copy_s: float = 0.0  # of a copy, whatever its size
    host_memory_gb_s: float = math.inf  # host memory, shared by copies and the CPU
    update_gb_s: float = math.inf  # read plus written by the optimizer's update on the CPU
    device_bytes: int | None = None  # None: not known
    host_bytes: int | None = None

    def replace(self, **changes: Any) -> Hardware:
        """The same machine with other figures: `h200.replace(host_bytes=256 * 2**30)`.

        Raises:
            OptionError: a figure that there is none of, or that is not positive.
        """
        names = [field.name for field in fields(self)]
        for name, value in changes.items():
            if name not in names:
                raise OptionError(
                    f"Hardware.replace(): got {name!r}; needed one of {', '.join(names)}"
                )
            if name != "name" and value is not None and not value >= _least(name):
                raise OptionError(
                    f"Hardware.replace(): got {name}={value!r}; needed a positive number"
                )
        return replace(self, **changes)


_GIB = 2**30

H200 = Hardware(
    "NVIDIA H200",
    *(55.5, 55.5, 50.8, 50.8, 804.0, 4300.0, 4e-6),
    matmul32_tflop_s=52.0,
    sustained=0.85,
    attention_share=0.7,
    copy_s=8e-6,
    host_memory_gb_s=150.0,
    update_gb_s=125.0,
    device_bytes=139 * _GIB,
)
"""One H200 on PCIe 5 with 16 CPU cores, on torch 2.11 with CUDA 13.

Measured: copies, matmul, memory, host memory, the update (0.18 s per billion parameters of 22
bytes). Fitted to whole steps (benchmarks/results): `sustained`, that is, to one layer's forward,
recompute and backward in 48 ms, and `attention_share`, to those of 28 layers at 131072 tokens in
39.5 s. fp32 is of the data sheet (67 TFLOP/s).
"""


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

    def hardware(self) -> Hardware:
        """What to expect of it: the sheet times what the H200 reached of its own."""
        link, both = 55.5 / 63.0, 50.8 / 63.0
        return Hardware(
            self.name,
            h2d_gb_s=self.pcie_gb_s * link,
            d2h_gb_s=self.pcie_gb_s * link,
            h2d_both_gb_s=self.pcie_gb_s * both,
            d2h_both_gb_s=self.pcie_gb_s * both,
            matmul_tflop_s=self.bf16_tflop_s * 804.0 / 989.0,
            memory_gb_s=self.memory_gb_s * 4300.0 / 4800.0,
            launch_s=H200.launch_s,
            matmul32_tflop_s=self.fp32_tflop_s * 52.0 / 67.0,
            sustained=H200.sustained,
            attention_share=H200.attention_share,
            copy_s=H200.copy_s,
            host_memory_gb_s=self.host_memory_gb_s,
            update_gb_s=self.host_memory_gb_s * 125.0 / 150.0,
            device_bytes=self.memory_bytes,
        )


# Not measured. NVIDIA's data sheets: H100 SXM5 (989 TFLOP/s dense bf16, 3.35 TB/s), A100 SXM4 80 GB
# (312, 2.04 TB/s), and the Ada (RTX 4090) and Ampere GA102 (RTX 3090, 3080) architecture papers,
# whose bf16 figures with fp32 accumulation are 165, 71 and 59.5. PCIe 5.0 has 63 GB/s a direction
# over 16 lanes, 4.0 half of it. Hosts: a server as the H200's; two channels of DDR5-5600 (90 GB/s)
# and DDR4-3200 (51 GB/s) at 80 %. Memory is what torch reports, a little under the sheet's.
_SHEETS = {
    "h100": _Sheet("NVIDIA H100 SXM", 79 * _GIB, 3350.0, 989.0, 67.0, 63.0, 150.0),
    "a100": _Sheet("NVIDIA A100 SXM 80GB", 79 * _GIB, 2039.0, 312.0, 19.5, 31.5, 120.0),
    "4090": _Sheet("NVIDIA GeForce RTX 4090", 24080 * 2**20, 1008.0, 165.2, 82.6, 31.5, 72.0),
    "3090": _Sheet("NVIDIA GeForce RTX 3090", 24080 * 2**20, 936.0, 71.2, 35.6, 31.5, 41.0),
    "3080": _Sheet("NVIDIA GeForce RTX 3080", 9980 * 2**20, 760.0, 59.5, 29.8, 31.5, 41.0),
}
NAMES = ("h200", *_SHEETS, "this")


def known(name: str) -> Hardware:
    """A machine by name: h200 (measured), h100, a100, 4090, 3090, 3080 (data sheets), this.

    "this" is the machine at hand, measured once. How much memory a host has is not known but of
    this one: `known("4090").replace(host_bytes=128 * 2**30)`.

    Raises:
        OptionError: a name that is not among them.
    """
    key = name.lower() if isinstance(name, str) else name
    if key == "this":
        return load("cuda" if torch.cuda.is_available() else "cpu")
    if key == "h200":
        return H200
    if key not in _SHEETS:
        raise OptionError(
            f"known(): got {name!r}; needed one of {', '.join(NAMES)}; or make a "
            "megacompile.cost.hardware.Hardware of your own figures"
        )
    return _SHEETS[key].hardware()


def measure(device: torch.device | str) -> Hardware:
    """Measure `device` (about five seconds on a GPU); the random generators stay as they are.

    On the CPU, a copy is one within host memory, and directions do not overlap.
    """
    device = torch.device(device)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        return _measured(device)


def _measured(device: torch.device) -> Hardware:
    probe = _Probe(device)
    copy = _COPY_BYTES / 1e9
    h2d, d2h = copy / probe.seconds(probe.h2d), copy / probe.seconds(probe.d2h)
    both = probe.seconds(probe.both_ways)
    n = 8192 if device.type == "cuda" else 1024
    half = torch.bfloat16 if device.type == "cuda" else torch.float32
    peak = 2 * n**3 / probe.seconds(probe.matmul(n, half)) / 1e12
    update_s = probe.seconds(probe.update)
    update = probe.update_bytes / update_s / 1e9
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
        sustained=min(1.0, probe.sustained_flop_s(half) / (peak * 1e12)),
        attention_share=H200.attention_share,
        copy_s=probe.seconds(probe.small_copies) / _LAUNCHES,
        host_memory_gb_s=max(update, probe.host_gb_s(update_s, h2d)),
        update_gb_s=update,
        device_bytes=_device_bytes(device),
        host_bytes=total_bytes(),
    )


def load(device: torch.device | str) -> Hardware:
    """The measured figures of `device`, from the cache file if it was measured before.

    The file is of this device, this number of threads, this version of torch and this version of
    the format; one that cannot be read is written anew.
    """
    device = torch.device(device)
    found = cached(device)
    if found is not None:
        return found
    measured = measure(device)
    _keep(_file(device), json.dumps(asdict(measured), indent=2))
    return measured


def cached(device: torch.device) -> Hardware | None:
    """The figures of `device` if it was measured before, and they are figures."""
    path = _file(device)
    try:
        if path is None or not path.is_file():  # to open a FIFO would wait for ever
            return None
        found = Hardware(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return found if _are_figures(found) else None


def _are_figures(hardware: Hardware) -> bool:
    """Is every figure a number that there can be? 0, NaN and text are in no measurement."""
    for field in fields(hardware):
        value = getattr(hardware, field.name)
        if field.name == "name":
            if not isinstance(value, str):
                return False
            continue
        if value is None and field.name in ("device_bytes", "host_bytes"):
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return False
        if not value >= _least(field.name) or (math.isinf(value) and field.default != math.inf):
            return False
    return True


def _least(name: str) -> float:
    return 0.0 if name in ("launch_s", "copy_s") else 1e-12


def _keep(path: Path | None, text: str) -> None:
    """Write the cache file as a whole, or say that there is none."""
    try:
        if path is None:
            raise OSError("there is no home directory")
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            file.write(text)
        os.replace(file.name, path)
    except OSError as error:
        warnings.warn(
            f"megacompile: the machine's rates cannot be kept ({error}), and are measured anew by "
            "each process; set XDG_CACHE_HOME to a directory that can be written",
            stacklevel=3,
        )


def _file(device: torch.device) -> Path | None:
    folder = _cache()
    return None if folder is None else folder / f"{_key(device)}.json"


def _key(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    threads = torch.get_num_threads()  # that the update on the host has
    return f"{name.lower().replace(' ', '-')}-{threads}-torch-{torch.__version__}-v{_FORMAT}"


def _cache() -> Path | None:
    """Where rates are kept; None where there is no home directory."""
    root = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(root) if root else Path.home() / ".cache") / "megacompile"
    except RuntimeError:  # an unknown user, and no HOME
        return None


def _device_bytes(device: torch.device) -> int | None:
    if device.type != "cuda":
        return total_bytes()
    return int(torch.cuda.get_device_properties(device).total_memory)


_LAUNCHES = 100


class _Probe:
    """The operations that are timed, on buffers of their own."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cuda = device.type == "cuda"
        self.host = [self._host() for _ in range(2)]
        self.there = [self._device() for _ in range(2)]
        self._optimizers: list[torch.optim.Optimizer] = []
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

    def launches(self) -> None:
        for _ in range(_LAUNCHES):
            self.there[0][:1].zero_()

    def small_copies(self) -> None:
        for _ in range(_LAUNCHES):
            self.there[0][:1].copy_(self.host[0][:1], non_blocking=True)

    def matmul(self, n: int, dtype: torch.dtype) -> Callable[[], object]:
        a, b = (torch.randn(n, n, device=self.device, dtype=dtype) for _ in range(2))
        return lambda: a @ b

    def sustained_flop_s(self, dtype: torch.dtype) -> float:
        """A linear layer's three products again and again, until the clock has settled."""
        m, k, n = (8192, 4096, 14336) if self.cuda else (256, 512, 1024)
        x, w, dy = (
            torch.randn(shape, device=self.device, dtype=dtype)
            for shape in ((m, k), (n, k), (m, n))
        )
        done, last = 0, 0.0
        self._wait()
        start = now = time.perf_counter()
        while now - start < _SUSTAINED_S:
            before = now
            for _ in range(20):
                _ = x @ w.t(), dy @ w, dy.t() @ x
            self._wait()
            now = time.perf_counter()
            done, last = done + 1, now - before
        return 20 * 6 * m * k * n / last if done else 0.0

    @property
    def update_bytes(self) -> int:
        """AdamW in float32 reads four values and writes three."""
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
        """What the update and copies beside it move together."""
        if not self.cuda:
            return 0.0
        copies = max(1, round(update_s * h2d_gb_s * 1e9 / _COPY_BYTES))

        def together() -> None:
            for _ in range(copies):
                self.h2d()
            self.update()

        return (self.update_bytes + copies * _COPY_BYTES) / self.seconds(together) / 1e9
