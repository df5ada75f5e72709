"""Host memory that this process can still allocate, page locks, and cores."""

from __future__ import annotations

import contextlib
import os
import re
import resource
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

import psutil
import torch

from megacompile import notices
from megacompile.errors import HostMemoryError
from megacompile.text import format_bytes

MARGIN_BYTES = 256 * 2**20  # reserve for the rest of the process
_SHARE = 0.04  # share of free memory reserved for users unknown to the plan, such as data loaders
_SHARE_BYTES = 6 * 2**30  # upper bound of that reserve


def check_host_memory(rows: Sequence[tuple[str, int]], limit_bytes: int | None = None) -> None:
    """Raise a HostMemoryError, with a table of `rows` of (what, additional bytes), if planned
    allocations do not fit into the user's limit, or into the free memory, less a margin; before
    anything is allocated."""
    if lines := too_small(rows, free_bytes(limit_bytes)):
        raise HostMemoryError("megacompile(): host memory is too small\n" + "\n".join(lines[1:]))


def too_small(rows: Sequence[tuple[str, int]], available_bytes: int) -> tuple[str, ...]:
    """The lines of the error if `rows` of (what, additional bytes) do not fit, else ()."""
    needed = sum(size for _, size in rows)
    if needed <= available_bytes:
        return ()
    table = [*rows, ("needed", needed), ("available", available_bytes)]
    width = max(len(what) for what, _ in rows)
    return (
        "host memory is too small",
        *(f"  {what:<{width}}  {format_bytes(size):>10}" for what, size in table),
        "free host memory (or raise host_memory=), use a smaller dtype (model.bfloat16()), or "
        "freeze parameters (requires_grad_(False)), which need no gradients",
    )


def free_bytes(limit_bytes: int | None = None) -> int:
    """Bytes that may be allocated: free memory less a margin, within the limit."""
    free = max(available_bytes() - MARGIN_BYTES, 0)
    return free if limit_bytes is None else min(free, limit_bytes)


def budget_bytes(held_bytes: int = 0, *, share: int = 1, beside_bytes: int = 0) -> int:
    """Host memory budget of a model: free memory and what the model holds now, less a margin.

    Args:
        held_bytes: the model's memory, as far as it is in RAM without pages of files: memory of
            `to_empty()` and pages of a mapped checkpoint are free.
        share: number of processes on this host that divide the free memory.
        beside_bytes: memory of processes that this one will start, part of the margin.
    """
    free = available_bytes() // share + min(held_bytes, in_ram_bytes())
    least = MARGIN_BYTES + beside_bytes
    return max(0, free - max(least, int(min(_SHARE * free, _SHARE_BYTES))))


def total_bytes() -> int:
    """The machine's memory, within the limits of this process."""
    total: int = psutil.virtual_memory().total
    return min([total, *(limit for limit, _ in _limits())])


def available_bytes() -> int:
    """Free memory, within the limits of this process, its cgroup and the parents of that."""
    free: int = psutil.virtual_memory().available
    return min([free, *(limit - used for limit, used in _limits())])


def in_ram_bytes() -> int:
    """Anonymous and shared memory of this process in RAM, page-locked memory included. On systems
    that do not distinguish them, pages of files count too."""
    kinds = re.findall(r"^Rss(?:Anon|Shmem):\s+(\d+)", _read(Path("/proc/self/status")), re.M)
    if len(kinds) == 2:
        return 1024 * sum(map(int, kinds))
    return int(psutil.Process().memory_info().rss)


_V1 = "memory.limit_in_bytes", "memory.usage_in_bytes"
_V2 = "memory.max", "memory.current"


def _limits() -> Iterator[tuple[int, int]]:
    """(limit, use) in bytes of this process's cgroup and its parents, and of the process (`ulimit
    -v`, `ulimit -d`). A container sees its own cgroup at the root; a SLURM job or systemd unit is
    deeper. Called for each new buffer, so it reads no more files than it must."""
    paths = {"": PurePosixPath("/"), "memory": PurePosixPath("/")}
    for line in _read(Path("/proc/self/cgroup")).splitlines():
        controllers, _, place = line.partition(":")[2].partition(":")
        if (not controllers or "memory" in controllers.split(",")) and ".." not in place:
            paths["memory" if controllers else ""] = PurePosixPath(place)
    for root, path in paths.items():
        for each in (path, *path.parents):
            folder = Path("/sys/fs/cgroup", root, *each.parts[1:])
            limit, used = (folder / name for name in (_V1 if root else _V2))
            if (most := _read(limit).strip()).isdecimal():  # else "max", or no such file
                stat = _read(folder / "memory.stat")
                cached = re.findall(r"^(?:total_)?inactive_file (\d+)", stat, re.M) or [0]
                yield int(most), int(_read(used) or 0) - int(cached[-1])
    pages = _read(Path("/proc/self/statm")).split()
    if pages:
        for kind, k in ((resource.RLIMIT_AS, 0), (resource.RLIMIT_DATA, 5)):
            if (most_bytes := resource.getrlimit(kind)[0]) != resource.RLIM_INFINITY:
                yield most_bytes, int(pages[k]) * resource.getpagesize()


def _read(path: Path) -> str:
    """The text of a file of the system; "" if there is none."""
    with contextlib.suppress(OSError):
        return path.read_text()
    return ""


class PageLocks:
    """The page-locked memory of this process, and the limit that the system sets, which is found by
    trying (WSL 2 may allow 0.5 GiB, some containers none). An amount that was refused is not
    requested again: the remaining buffers stay pageable, and plans count on slower copies."""

    def __init__(self) -> None:
        self._locked: dict[int, int] = {}  # bytes by address; for access by several threads
        self._refused_bytes: int | None = None  # smallest total that was refused

    @property
    def locked_bytes(self) -> int:
        """Bytes of the buffers that are locked now."""
        return sum(list(self._locked.values()))

    @property
    def limit_bytes(self) -> int | None:
        """Bytes that can be locked in total; None if no lock was refused yet."""
        return None if self._refused_bytes is None else self.locked_bytes

    def lock(self, address: int, size_bytes: int) -> bool:
        """Lock whole pages for CUDA; False if they stay pageable."""
        if address in self._locked:
            return True
        now = self.locked_bytes + size_bytes
        if self._refused_bytes is None or now < self._refused_bytes:
            error = int(torch.cuda.cudart().cudaHostRegister(address, size_bytes, 0))
            if not error:
                self._locked[address] = size_bytes
                return True
            self._refused_bytes = now
            with contextlib.suppress(RuntimeError, AssertionError):  # torch without CUDA
                torch.ones(1, device="cuda")  # or the next kernel would raise the thread's error
            notices.warn_once(
                "memory that stays pageable",
                f"megacompile: cudaHostRegister of {format_bytes(size_bytes)} failed with error "
                f"{error}, with {format_bytes(self.locked_bytes)} locked: the system locks no more "
                "memory; the rest stays pageable, its copies run at about half the speed, and "
                "plans count on that (shown once)",
                notices.Whose.RANK,
            )
        return False

    def unlock(self, address: int) -> None:
        """Unlock memory that is about to be freed, after copies in flight."""
        try:
            if address in self._locked and torch.cuda.is_initialized():
                torch.cuda.synchronize()
                torch.cuda.cudart().cudaHostUnregister(address)
        finally:
            self._locked.pop(address, None)  # not before: another thread may lock meanwhile


PAGE_LOCKS = PageLocks()  # the limit holds for the process


def pinned_empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A small host tensor for a copy: page-locked, where the system allows it."""
    try:
        return torch.empty(shape, dtype=dtype, pin_memory=True)
    except RuntimeError:  # torch has cleared CUDA's error
        return torch.empty(shape, dtype=dtype)


def usable_cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0))
