"""A scratch file: its places, reads and writes behind the caller, and who looks at it.

What a training loop does with one: `tests/equality/test_disk.py`.
"""

from __future__ import annotations

import errno
import functools
import gc
import mmap
import os
import random
import resource
import sys
import warnings
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megacompile import DiskError, megacompile
from megacompile.errors import OptimizerError
from megacompile.runtime.device.buffers import DiskBuffer, HostBudget, HostBuffer
from megacompile.runtime.disk import Way
from megacompile.runtime.updates.staging import BucketBuffers, BucketLease
from tests import inside
from tests.processes import in_threads

PAGE = mmap.PAGESIZE
SIZE = 8 * PAGE

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="scratch files are for Linux"),
    pytest.mark.filterwarnings("ignore:megacompile. disk=.* has no direct I/O"),
]


def memory(size: int = SIZE, value: int = 0) -> torch.Tensor:
    """At the beginning of a page, as direct I/O needs it."""
    return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8).fill_(value)


def disk_of(folder: Path, **options: Any) -> Any:
    """The disk of a model, which has nothing on it yet."""
    model = megacompile(torch.nn.Linear(2, 2), device="cpu", disk=folder, **options)
    return inside.machine(model).disk


class Memory:
    """A disk's reads and writes, of memory that is there."""

    def __init__(self, disk: Any) -> None:
        self.disk = disk

    def buffer(self, size: int) -> DiskBuffer:
        return DiskBuffer(size, self.disk)

    def read(self, buffers: Sequence[Any], there: torch.Tensor, what: str, **more: Any) -> Any:
        here = functools.partial(there.view, -1)
        return self.disk.request(Way.READ, [each.span(here) for each in buffers], what, **more)

    def write(self, buffer: Any, there: torch.Tensor, what: str = "fill", **more: Any) -> Any:
        here = functools.partial(there.view, -1)
        return self.disk.request(Way.WRITE, [buffer.span(here)], what, **more)

    def contents(self, buffer: Any) -> torch.Tensor:
        """As direct I/O sees it."""
        there = memory(len(buffer), 255)
        done(self.read([buffer], there, "look"))
        return there


@pytest.fixture(params=["direct", "cached"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Memory:
    """With direct I/O where the folder has it, and without."""
    disk = disk_of(tmp_path)
    if request.param == "cached":
        disk.direct_fd = None
    elif disk.direct_fd is None:
        pytest.skip("no direct I/O on this disk")
    return Memory(disk)


def begun(request: Any) -> Any:
    request.begin()
    return request


def done(request: Any) -> None:
    begun(request).wait()


def test_the_file_has_no_name_and_its_places_are_allocated(tmp_path: Path) -> None:
    file = disk_of(tmp_path)
    assert os.listdir(tmp_path) == [] and os.fstat(file.fd).st_nlink == 0
    place = file.take(SIZE - 1)
    assert place.size_bytes == SIZE and place.at % PAGE == 0
    assert os.fstat(file.fd).st_blocks * 512 >= SIZE
    file.give_back(place)
    file.take(PAGE)
    assert os.fstat(file.fd).st_blocks * 512 < SIZE


def test_places_are_reused_and_read_as_zeros(disk: Memory) -> None:
    buffers = [disk.buffer(SIZE) for _ in range(3)]
    for buffer in buffers:
        done(disk.write(buffer, memory(value=7)))
    size = os.fstat(disk.disk.fd).st_size
    del buffers, buffer
    gc.collect(1)
    again = [disk.buffer(SIZE) for _ in range(3)]
    assert os.fstat(disk.disk.fd).st_size == size and disk.disk.used_bytes == 3 * SIZE
    assert not any(disk.contents(each).any() or each.bytes(SIZE).any() for each in again)


def test_places_are_taken_once_by_threads(tmp_path: Path) -> None:
    file = disk_of(tmp_path)
    holes = [file.take(PAGE) for _ in range(40)]
    for hole in holes[::2]:
        file.give_back(hole)
    taken: list[Any] = []
    in_threads(4 * [lambda: taken.extend(file.take(PAGE) for _ in range(100))])
    starts = [place.at for place in [*taken, *holes[1::2]]]
    assert len(set(starts)) == len(starts)


def test_a_limit_and_a_full_disk(tmp_path: Path) -> None:
    """Are found when a place is taken, which is not lost."""
    file = disk_of(tmp_path, disk_memory=2 * SIZE)
    first = file.take(SIZE)
    with pytest.raises(DiskError, match="disk_memory="):
        file.take(SIZE + 1)
    file.take(SIZE)
    file.give_back(first)
    assert file.take(SIZE).size_bytes == SIZE
    disk = disk_of(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 * PAGE, before[1]))
    try:
        with pytest.raises(DiskError) as e:
            DiskBuffer(SIZE, disk)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert e.value.errno == errno.EFBIG and disk.used_bytes == 0
    end = disk._end
    disk.take(SIZE)
    assert disk._end == end


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("fault", "device"), [("refused", -1), ("not coherent", -2)])
def test_no_direct_io_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, device: int
) -> None:
    """Of a device that nothing was said of yet."""
    real, real_open = os.fstat, os.open

    def opened(path: Any, flags: int, *more: Any) -> int:
        if fault == "refused" and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_open(path, flags, *more)

    def fstat(fd: int) -> Any:
        found = real(fd)
        fields = {key: getattr(found, key) for key in dir(found) if key.startswith("st_")}
        return SimpleNamespace(**{**fields, "st_dev": device})

    monkeypatch.setattr(os, "fstat", fstat)
    monkeypatch.setattr(os, "open", opened)
    if fault == "not coherent":
        monkeypatch.setattr(os, "preadv", lambda *_: 0)
    with pytest.warns(UserWarning, match="disk="):
        assert disk_of(tmp_path).direct_fd is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert disk_of(tmp_path).direct_fd is None


@pytest.mark.parametrize(("way", "short"), [("preadv", PAGE + 100), ("pwritev", 77)])
def test_short_calls_go_on(
    disk: Memory, monkeypatch: pytest.MonkeyPatch, way: str, short: int
) -> None:
    real = getattr(os, way)

    def call(fd: int, buffers: Sequence[memoryview], at: int) -> int:
        (view,) = buffers
        if fd == disk.disk.direct_fd:
            assert at % PAGE == 0 and len(view) % PAGE == 0
            # the system itself is short in pages here; less is what it may do as well
            moved = real(disk.disk.fd, [view[: min(short, len(view))]], at)
            return int(moved)
        return int(real(fd, [view[: min(short * 7, len(view))]], at))

    buffer, source = disk.buffer(SIZE), memory().random_()
    monkeypatch.setattr(os, way, call)
    request = begun(disk.write(buffer, source))
    request.wait()
    assert torch.equal(disk.contents(buffer), source)


@pytest.mark.parametrize(
    ("way", "number", "found"),
    [
        ("preadv", errno.EIO, errno.EIO),
        ("pwritev", errno.ENOSPC, errno.ENOSPC),
        ("preadv", 0, errno.EIO),  # the end of the file
    ],
)
def test_an_error_is_that_of_the_request(
    disk: Memory, monkeypatch: pytest.MonkeyPatch, way: str, number: int, found: int
) -> None:
    """Each time that somebody waits for it, and of what comes behind it."""

    def call(fd: int, buffers: Sequence[memoryview], at: int) -> int:
        if number:
            raise OSError(number, os.strerror(number))
        return 0

    buffer, what = disk.buffer(SIZE), "3READ_STATE of 'layers.3'"
    with monkeypatch.context() as patched:
        patched.setattr(os, way, call)
        first = disk.read([buffer], memory(), what) if way == "preadv" else None
        request = begun(first or disk.write(buffer, memory(), what))
        behind = begun(disk.read([buffer], memory(), "2READ_STATE", before=request.wait))
        for each in (request, request, behind):
            with pytest.raises(DiskError, match="3READ_STATE") as caught:
                each.wait()
            assert caught.value.errno == found
    assert request.done()


def test_mapping_and_direct_io_see_the_same(disk: Memory) -> None:
    rng = random.Random(0)
    buffer, plain = disk.buffer(SIZE), memory()
    seen = buffer.bytes(SIZE)
    for _ in range(120):
        action = rng.choice(["look", "change", "read", "write", "drop"])
        if action == "look":
            assert torch.equal(seen, plain)
        elif action == "change":
            start = rng.randrange(SIZE)
            value, end = rng.randrange(256), rng.randrange(start, SIZE)
            seen[start:end] = value
            plain[start:end] = value
        elif action == "read":
            assert torch.equal(disk.contents(buffer), plain)
        elif action == "write":
            plain = memory().random_()
            done(disk.write(buffer, plain))
        else:
            buffer.madvise(mmap.MADV_DONTNEED)
    assert torch.equal(seen, plain)


def test_a_place_that_the_disk_refused_is_used_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = disk_of(tmp_path)
    first = file.take(3 * PAGE)

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as patch, pytest.raises(DiskError, match="no space"):
        patch.setattr(os, "posix_fallocate", full)
        file.take(3 * PAGE)
    assert file.take(3 * PAGE).at == first.at + 3 * PAGE, "the file has a gap"


def test_free_ranges_of_other_sizes_are_given_up_for_a_saved_tensor(tmp_path: Path) -> None:
    machine: Any = inside.machine(
        megacompile(torch.nn.Linear(2, 2), device="cpu", disk=tmp_path, disk_memory=64 * PAGE)
    )
    file, saved = machine.disk, machine.saved_disk
    saved.give_back(saved.lend(32 * PAGE))
    saved.forget()  # but its peak is known
    saved.give_back(saved.lend(16 * PAGE))
    assert saved.held_bytes == 16 * PAGE
    file.take(64 * PAGE - file.used_bytes)
    assert saved.lend(PAGE).size_bytes == PAGE


def test_a_run_that_failed_leaves_nobody_waiting(tmp_path: Path) -> None:
    """Neither for a buffer that came nor for one that was to come."""
    disk = disk_of(tmp_path)
    host: Any = SimpleNamespace(layout=SimpleNamespace(name="a layer"))
    pool = BucketBuffers(torch.device("cpu"), "test", "states", HostBudget())
    pool.require(1, SIZE)
    leases = []
    for place in (DiskBuffer(SIZE, disk), DiskBuffer(SIZE, disk)):
        lease = BucketLease(pool, host, [place])
        leases.append(pool.lend(lease, disk.request(Way.READ, lease.spans(), "look")))
    leases[0].wait()
    assert not leases[1].done(), "there is one buffer"
    pool.give_up(leases[::-1])  # or the first would make room for the second
    for lease in leases:
        assert lease.done()
        with pytest.raises(OptimizerError):
            lease.wait()


def test_buffers_that_are_larger_than_any_bucket_are_freed() -> None:
    made: list[weakref.ref[HostBuffer]] = []

    class Budget(HostBudget):
        def make(self, *args: Any, **named: Any) -> HostBuffer:
            buffer = super().make(*args, **named)
            made.append(weakref.ref(buffer))
            return buffer

    pool = BucketBuffers(torch.device("cpu"), "test", "states", Budget())
    for size in (8 * PAGE, 5 * PAGE):
        pool.require(1, size)
        pool.reserve()
    assert [buffer() is None for buffer in made] == [True, False]
