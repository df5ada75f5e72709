"""Host memory that this process can still get, and the check that an allocation fits in it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from types import ModuleType

import psutil
import torch

from megacompile import notices
from megacompile.errors import HostMemoryError
from megacompile.text import format_bytes

resource: ModuleType | None
try:
    import resource
except ImportError:  # not on Windows
    resource = None

MARGIN_BYTES = 256 * 2**20  # left free for everything else in the process
_SHARE = 0.04  # of what is free, left to what a plan does not know: data loaders, say
_SHARE_BYTES = 6 * 2**30  # at most: most of that does not grow with the memory


def check_host_memory(rows: Sequence[tuple[str, int]], limit_bytes: int | None = None) -> None:
    """Raise before anything is allocated if `rows` of (what, additional bytes) do not fit.

    Args:
        rows: (what, additional bytes).
        limit_bytes: what the user allows; None: what is free, less a margin.

    Raises:
        HostMemoryError: with the table.
    """
    if lines := too_small(rows, free_bytes(limit_bytes)):
        raise HostMemoryError("megacompile(): host memory is too small\n" + "\n".join(lines[1:]))


def too_small(rows: Sequence[tuple[str, int]], available_bytes: int) -> tuple[str, ...]:
    """The lines of the error, if `rows` of (what, additional bytes) do not fit; else ()."""
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
    """Bytes that may be allocated: what is free, less a margin, and no more than the limit."""
    free = max(available_bytes() - MARGIN_BYTES, 0)
    return free if limit_bytes is None else min(free, limit_bytes)


def budget_bytes(held_bytes: int = 0, *, share: int = 1, beside_bytes: int = 0) -> int:
    """Host memory that a model may take: what is free, and what it holds now, less a margin.

    Args:
        held_bytes: by the model, which gives it up for its buckets. The part counts that is in RAM
            and is no file: `to_empty()` allocates memory that is free until a caller
            writes to it, and the pages of a mapped checkpoint are free whenever others need them.
        share: processes that do the same on this host: each has so much of what is free.
        beside_bytes: of processes that this one will start; the margin is that much at least, and
            a little more.
    """
    free = available_bytes() // share + min(held_bytes, in_ram_bytes())
    least = MARGIN_BYTES + beside_bytes
    return max(0, free - max(least, int(min(_SHARE * free, _SHARE_BYTES))))


def total_bytes() -> int:
    """Host memory that this process may have in all: the machine's, within its limits."""
    limits = [each["max"] for each in _cgroups() if "max" in each]
    total: int = psutil.virtual_memory().total
    return min([total, *limits, *(limit for limit, _ in _rlimits())])


def available_bytes() -> int:
    """Host memory that this process can still get: what is free, within its limits: those of its
    cgroup, of those that this one is in, and of the process itself."""
    free: int = psutil.virtual_memory().available
    left = [
        each["max"] - each["current"] + each.get("inactive_file", 0)
        for each in _cgroups()
        if "max" in each and "current" in each
    ]
    return min([free, *left, *(limit - used for limit, used in _rlimits())])


def in_ram_bytes() -> int:
    """Memory of this process in RAM: anonymous and shared, which page-locked memory is; where the
    system does not tell them apart, with the pages of files."""
    kinds: dict[str, str] = {}
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/status").read_text().splitlines()
        kinds = dict(line.split(":", 1) for line in lines)
    if "RssAnon" in kinds and "RssShmem" in kinds:
        return 1024 * sum(int(kinds[name].split()[0]) for name in ("RssAnon", "RssShmem"))
    return int(psutil.Process().memory_info().rss)


_V2 = {"memory.max": "max", "memory.current": "current"}
_V1 = {"memory.limit_in_bytes": "max", "memory.usage_in_bytes": "current"}
_FILES = {"inactive_file": "inactive_file", "total_inactive_file": "inactive_file"}  # of .stat


def _cgroups() -> list[dict[str, int]]:
    """Memory figures of each cgroup around this process: "max" (a limit), "current",
    "inactive_file"; bytes. A container sees its own at the root; a job of SLURM or a systemd unit
    is further down."""
    found = []
    for root, path, names in _places():
        for folder in (path, *path.parents):
            place = Path("/sys/fs/cgroup", root, *folder.parts[1:])
            if says := _figures(place, names):
                found.append(says)
    return found


def _places() -> Iterator[tuple[str, PurePosixPath, dict[str, str]]]:
    """Location of the cgroup of this process: its root folder, its path, and the names of files."""
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    paths = {"": PurePosixPath("/"), "memory": PurePosixPath("/")}
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, place = rest.partition(":")
        if not controllers or "memory" in controllers.split(","):
            paths["memory" if controllers else ""] = PurePosixPath(place)
    for root, path in paths.items():
        yield root, path if ".." not in path.parts else PurePosixPath("/"), _V1 if root else _V2


def _figures(place: Path, names: dict[str, str]) -> dict[str, int]:
    """Figures of one cgroup; {} if it has no limit. Each new buffer asks, so no more files are
    read."""
    found: dict[str, int] = {}
    for name in (*names, "memory.stat"):  # the limit comes first
        with contextlib.suppress(OSError):
            for line in (place / name).read_text().splitlines():
                key, _, value = line.rpartition(" ")
                if (known := names.get(name) or _FILES.get(key)) and value != "max":
                    found[known] = int(value)
        if "max" not in found:
            break
    return found


def _rlimits() -> list[tuple[int, int]]:
    """Limits of this process (`ulimit -v`, `ulimit -d`), and its use of each."""
    if resource is None:
        return []
    try:
        pages = Path("/proc/self/statm").read_text().split()
    except OSError:
        return []
    found = []
    for kind, at in ((resource.RLIMIT_AS, 0), (resource.RLIMIT_DATA, 5)):
        limit, _ = resource.getrlimit(kind)
        if limit != resource.RLIM_INFINITY:
            found.append((limit, int(pages[at]) * resource.getpagesize()))
    return found


# Page-locked memory of this process: how much there is, and where the system has refused more.
#
# It is not known in advance how much can be locked. `ulimit -l` is not asked by NVIDIA's driver.
# Under WSL 2 it is what Windows lends, which can be as little as 0.5 GiB; some containers allow
# none. So the limit is found by trying: what was refused once is not asked for again, and buffers
# that are not locked are pageable. The numbers are the same. Their copies are slower, and plans
# allow for that (`megacompile.cost.hardware`).


class PageLocks:
    """Page locks, and those that the system refused, by the address of buffers."""

    def __init__(self) -> None:
        self._locked: dict[int, int] = {}  # dictionaries, because several threads lock
        self._pageable: dict[int, int] = {}
        self._refused_bytes: int | None = None  # in all, with the smallest that was refused

    @property
    def locked_bytes(self) -> int:
        """Bytes of all buffers of this process that are locked now."""
        return sum(list(self._locked.values()))

    @property
    def pageable_bytes(self) -> int:
        """Bytes of those that should be locked, and are not."""
        return sum(list(self._pageable.values()))

    @property
    def limit_bytes(self) -> int | None:
        """Bytes that can be locked in all, as far as is known; None: nothing was refused yet."""
        return None if self._refused_bytes is None else self.locked_bytes

    def lock(self, address: int, size_bytes: int) -> bool:
        """Lock whole pages for CUDA; False where they stay pageable."""
        if address in self._locked:
            return True
        now = self.locked_bytes + size_bytes
        if self._refused_bytes is None or now < self._refused_bytes:
            error = int(torch.cuda.cudart().cudaHostRegister(address, size_bytes, 0))
            if not error:
                self._locked[address] = size_bytes
                self._pageable.pop(address, None)
                return True
            self._refused_bytes = now
            _forget_error()
            self._say(size_bytes, error)
        self._pageable[address] = size_bytes
        return False

    def unlock(self, address: int) -> None:
        """The memory goes. A copy may be under way: it is waited for."""
        self._pageable.pop(address, None)
        try:
            if address in self._locked and torch.cuda.is_initialized():
                torch.cuda.synchronize()
                torch.cuda.cudart().cudaHostUnregister(address)
        finally:
            self._locked.pop(address, None)  # not before: another thread may lock meanwhile

    def _say(self, size_bytes: int, error: int) -> None:
        notices.warn_once(
            "memory that stays pageable",
            f"megacompile: cudaHostRegister of {format_bytes(size_bytes)} failed with error "
            f"{error}, with {format_bytes(self.locked_bytes)} locked: memory that the "
            "system will not lock stays pageable, copies from and to it run at about half the "
            "speed, and plans allow for that (said once)",
            notices.Whose.RANK,
        )


PAGE_LOCKS = PageLocks()  # of this process, as the limit is


def pinned_empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A small host tensor for a copy: page-locked, where the system allows it."""
    try:
        return torch.empty(shape, dtype=dtype, pin_memory=True)
    except RuntimeError:  # torch has forgotten the error
        return torch.empty(shape, dtype=dtype)


def _forget_error() -> None:
    """CUDA keeps the last error of a thread, and the next kernel would raise it in torch's name.
    Launch one here, which consumes it."""
    with contextlib.suppress(RuntimeError, AssertionError):  # or torch has no CUDA
        torch.ones(1, device="cuda")
