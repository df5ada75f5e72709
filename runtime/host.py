"""Host memory of the parameters and gradients: exact-size, page-locked, one buffer a bucket.

[Note: exact-size pinned memory]
`torch.empty(pin_memory=True)` rounds up to a power of two: a 525 MiB layer takes 1 GiB. An
anonymous shared mapping registered with `cudaHostRegister` takes what it needs. It is shared, not
private, so that a forked data loader never turns its pages into copy-on-write ones under the DMA.

[Note: one storage a parameter]
Each parameter is a tensor with a storage of its own inside the buffer, so `torch.save`,
safetensors and everything else that looks at storages sees ordinary parameters.
"""

from __future__ import annotations

import mmap
import os
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

from megacompile.errors import HostMemoryError
from megacompile.ir import Bucket, Param, format_bytes

_MARGIN_BYTES = 256 * 2**20  # left free for everything else in the process


class HostBuffer(mmap.mmap):
    """Anonymous shared memory, page-locked for a CUDA device where that works.

    It is unmapped, and unlocked before, when the last tensor on it is gone.
    """

    _address: int = 0
    _warned: bool = False

    def __new__(cls, size_bytes: int, *, pin: bool) -> HostBuffer:
        return super().__new__(cls, -1, max(size_bytes, mmap.PAGESIZE))

    def __init__(self, size_bytes: int, *, pin: bool) -> None:
        del size_bytes
        if pin:
            self._lock()

    def _lock(self) -> None:
        address = torch.frombuffer(self, dtype=torch.uint8).data_ptr()
        # Touch it first, on all threads: locking touched pages is four times faster.
        torch.frombuffer(self, dtype=torch.uint8).zero_()
        error = torch.cuda.cudart().cudaHostRegister(address, len(self), 0)
        if int(error) == 0:
            self._address = address
        elif not HostBuffer._warned:
            HostBuffer._warned = True
            warnings.warn(
                f"megacompile: cudaHostRegister of {format_bytes(len(self))} failed with error "
                f"{int(error)}; parameters stay pageable, and copies run at about half the speed "
                "(raise the limit on locked memory: ulimit -l)",
                stacklevel=2,
            )

    def __del__(self) -> None:
        if self._address and torch.cuda.is_initialized():
            torch.cuda.cudart().cudaHostUnregister(self._address)

    def tensor(self, param: Param) -> torch.Tensor:
        """A tensor in the place of `param`, with a storage of its own."""
        if param.numel == 0:
            return torch.empty(param.shape, dtype=param.dtype)
        flat = torch.frombuffer(
            self, dtype=param.dtype, count=param.numel, offset=param.offset_bytes
        )
        # not as_strided: a view would keep `flat` alive, a second user of the storage
        whole = torch.empty(0, dtype=param.dtype)
        return whole.set_(flat.untyped_storage(), 0, param.shape, param.stride)

    def bytes(self, size_bytes: int) -> torch.Tensor:
        """The first `size_bytes` as one flat uint8 tensor."""
        return torch.frombuffer(self, dtype=torch.uint8)[:size_bytes]  # 0 is no count for it


class HostBucket:
    """A bucket's parameters on the host, and its gradients once there are any."""

    def __init__(self, layout: Bucket, params: Sequence[torch.nn.Parameter], *, pin: bool) -> None:
        self.layout = layout
        self.params = tuple(params)
        self.pin = pin
        buffer = HostBuffer(layout.size_bytes, pin=pin)
        self.flat = buffer.bytes(layout.size_bytes)  # (size_bytes,) uint8
        self.values = tuple(buffer.tensor(place) for place in layout.params)
        self.grads: tuple[torch.Tensor, ...] = ()
        for param, value in zip(self.params, self.values, strict=True):
            value.copy_(param.detach())
            param.data = value

    def replaced(self) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Parameters whose storage the user replaced, and their places here."""
        return [
            (param, value)
            for param, value in zip(self.params, self.values, strict=True)
            if param.data_ptr() != value.data_ptr() or param.stride() != value.stride()
        ]

    def adopt(self) -> bool:
        """Take over storage that the user replaced; False where the layout no longer fits."""
        for param, value in self.replaced():
            if param.shape != value.shape or param.dtype != value.dtype:
                return False
            theirs = param.detach()
            param.data = value
            with torch.no_grad():
                param.copy_(theirs)  # by its name, so that a pending backward sees a new version
        return True

    def make_grads(self) -> None:
        """Get memory for the gradients: the first time, or when the user still holds the last."""
        buffer = HostBuffer(self.layout.size_bytes, pin=self.pin)
        self.grads = tuple(buffer.tensor(place) for place in self.layout.params)


def check_host_memory(rows: Sequence[tuple[str, int]]) -> None:
    """Raise before anything is allocated if `rows` of (what, additional bytes) do not fit.

    Raises:
        HostMemoryError: with the table.
    """
    needed = sum(size for _, size in rows)
    free = available_bytes()
    if needed + _MARGIN_BYTES <= free:
        return
    width = max(len(what) for what, _ in rows)
    table = "\n".join(f"  {what:<{width}}  {format_bytes(size):>10}" for what, size in rows)
    raise HostMemoryError(
        f"megacompile(): host memory is too small\n{table}\n"
        f"  {'needed':<{width}}  {format_bytes(needed):>10}\n"
        f"  {'available':<{width}}  {format_bytes(max(free - _MARGIN_BYTES, 0)):>10}\n"
        "free host memory, use a smaller dtype (model.bfloat16()), or freeze parameters "
        "(requires_grad_(False)), which need no gradients"
    )


def available_bytes() -> int:
    """Host memory that this process can still get: what is free, within its cgroup's limit."""
    free = _meminfo_bytes("MemAvailable")
    limit, used = _cgroup_bytes("memory.max"), _cgroup_bytes("memory.current")
    if limit is not None and used is not None:
        free = min(free, limit - used + (_cgroup_stat("inactive_file") or 0))
    return free


def _meminfo_bytes(name: str) -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # not Linux
        return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    found = next(line for line in lines if line.startswith(f"{name}:"))
    return int(found.split()[1]) * 1024


def _cgroup_bytes(name: str) -> int | None:
    try:
        text = Path("/sys/fs/cgroup", name).read_text().strip()
    except OSError:
        return None
    return None if text == "max" else int(text)


def _cgroup_stat(name: str) -> int | None:
    try:
        lines = Path("/sys/fs/cgroup/memory.stat").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.split()[0] == name), None)
