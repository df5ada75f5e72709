"""A scratch file: its places, reads and writes behind the caller, and who looks at it."""

from __future__ import annotations

import errno
import functools
import gc
import itertools
import mmap
import os
import random
import resource
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megacompile.errors import DiskError
from megacompile.runtime.device.buffers import HostBuffer
from megacompile.runtime.device.disk_buffers import Disk, DiskBuffer
from megacompile.runtime.disk import scratch, transfers
from megacompile.runtime.disk.scratch import ScratchFile
from tests import interrupts

PAGE = mmap.PAGESIZE
SIZE = 8 * PAGE
DEVICES = itertools.count(-1, -1)  # that nothing was said of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="scratch files are for Linux")


@pytest.fixture(params=["direct", "cached"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Memory]:
    """With direct I/O where the folder has it, and without."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        file = ScratchFile(tmp_path)
    if request.param == "cached":
        file.direct_fd = None
    elif file.direct_fd is None:
        pytest.skip(f"no direct I/O on {scratch.kind_of(tmp_path)}")
    yield Memory(Disk(file))


def memory(size: int = SIZE, value: int = 0) -> torch.Tensor:
    return HostBuffer(size, pin=False).bytes(size).fill_(value)


class Memory:
    """A disk's reads and writes, of memory that is there."""

    def __init__(self, disk: Disk) -> None:
        self.file, self.buffer, self._disk = disk.file, disk.buffer, disk
        self.moved_bytes = disk.moved_bytes

    def read(
        self, buffers: Sequence[DiskBuffer], there: Sequence[torch.Tensor], what: str, **more: Any
    ) -> transfers.Request | None:
        return self._disk.read(
            buffers, [functools.partial(torch.Tensor.view, t, -1) for t in there], what, **more
        )

    def write(
        self, buffers: Sequence[DiskBuffer], there: Sequence[torch.Tensor], what: str, **more: Any
    ) -> transfers.Request | None:
        return self._disk.write(
            buffers, [functools.partial(torch.Tensor.view, t, -1) for t in there], what, **more
        )


def begun(request: transfers.Request | None) -> transfers.Request:
    assert request is not None
    request.begin()
    return request


def done(request: transfers.Request | None) -> None:
    if request is not None:  # else it is done: in a child
        begun(request).wait()


def contents(disk: Memory, buffer: DiskBuffer) -> torch.Tensor:
    """As direct I/O sees it."""
    there = memory(len(buffer), 255)
    done(disk.read([buffer], [there], "look"))
    return there


# --- places


@pytest.mark.parametrize("unnamed", [True, False], ids=["", "without files that have no name"])
def test_the_file_has_no_name_and_its_places_are_allocated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unnamed: bool
) -> None:
    if not unnamed:
        monkeypatch.delattr(os, "O_TMPFILE")
    file = ScratchFile(tmp_path)
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
        done(disk.write([buffer], [memory(value=7)], "fill"))
    end = disk.file._end
    del buffers, buffer
    gc.collect(1)
    whole = disk.buffer(3 * SIZE)  # the three holes as one
    assert disk.file._end == end and disk.file.used_bytes == 3 * SIZE
    assert not contents(disk, whole).any() and not whole.bytes(3 * SIZE).any()


def test_a_limit(tmp_path: Path) -> None:
    file = ScratchFile(tmp_path, limit_bytes=2 * SIZE)
    first = file.take(SIZE)
    with pytest.raises(DiskError, match="disk_memory="):
        file.take(SIZE + 1)
    file.take(SIZE)
    file.give_back(first)
    assert file.take(SIZE).size_bytes == SIZE


def test_a_full_disk_is_found_when_a_place_is_taken(tmp_path: Path) -> None:
    disk = Disk(ScratchFile(tmp_path))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 * PAGE, before[1]))
    try:
        with pytest.raises(DiskError) as e:
            disk.buffer(SIZE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert e.value.errno == errno.EFBIG and disk.file.used_bytes == 0
    assert disk.file.take(SIZE).at == 0, "the place is not lost"


def refuse(*args: Any) -> int:
    raise OSError(errno.EINVAL, "Invalid argument")


@pytest.mark.parametrize(
    ("name", "fault"),
    [("open", refuse), ("preadv", lambda *_: 0)],
    ids=["refused", "not coherent"],
)
def test_no_direct_io_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, fault: Any
) -> None:
    real, real_open, device = os.fstat, os.open, next(DEVICES)

    def opened(path: Any, flags: int, *more: Any) -> int:
        return fault() if flags & os.O_DIRECT else real_open(path, flags, *more)

    def fstat(fd: int) -> Any:  # a device that nothing was said of
        found = real(fd)
        fields = {key: getattr(found, key) for key in dir(found) if key.startswith("st_")}
        return SimpleNamespace(**{**fields, "st_dev": device})

    monkeypatch.setattr(os, "fstat", fstat)
    monkeypatch.setattr(os, name, opened if name == "open" else fault)
    with pytest.warns(UserWarning, match="has no direct I/O"):
        file = ScratchFile(tmp_path)
    assert file.direct_fd is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ScratchFile(tmp_path).direct_fd is None


def test_files_are_closed(tmp_path: Path) -> None:
    Disk(ScratchFile(tmp_path)).buffer(SIZE)
    gc.collect(1)
    before = len(os.listdir("/proc/self/fd"))
    disk = Disk(ScratchFile(tmp_path))
    buffers = [disk.buffer(SIZE) for _ in range(20)]
    assert len(os.listdir("/proc/self/fd")) <= before + 2  # none for a buffer
    del disk, buffers
    gc.collect(1)
    assert len(os.listdir("/proc/self/fd")) == before


# --- reads and writes


@pytest.mark.parametrize("way", ["preadv", "pwritev"])
@pytest.mark.parametrize("short", [77, PAGE + 100])
def test_short_and_interrupted_calls_go_on(
    disk: Memory, monkeypatch: pytest.MonkeyPatch, way: str, short: int
) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)
    real = getattr(os, way)
    faults = itertools.cycle([InterruptedError, BlockingIOError, None])

    def call(fd: int, buffers: Sequence[memoryview], at: int) -> int:
        fault = next(faults)
        if fault is not None:
            raise fault(0, "again")
        (view,) = buffers
        if fd == disk.file.direct_fd:
            assert at % PAGE == 0 and len(view) % PAGE == 0
            # the system itself is short in pages here; less is what it may do as well
            moved = real(disk.file.fd, [view[: min(short, len(view))]], at)
            return int(moved)
        return int(real(fd, [view[: min(short * 7, len(view))]], at))

    buffer, source = disk.buffer(SIZE), memory().random_()
    monkeypatch.setattr(os, way, call)
    done(disk.write([buffer], [source], "fill"))
    assert disk.moved_bytes(transfers.Way.WRITE) == SIZE
    assert torch.equal(contents(disk, buffer), source)


def failing(way: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def call(fd: int, buffers: Sequence[memoryview], at: int) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(time, "sleep", lambda _: None)
    monkeypatch.setattr(os, way, call if number else lambda *_: 0)


@pytest.mark.parametrize(
    ("way", "number", "found"),
    [
        ("preadv", errno.EIO, errno.EIO),
        ("pwritev", errno.ENOSPC, errno.ENOSPC),
        ("preadv", errno.EAGAIN, errno.EAGAIN),  # a disk that is never ready
        ("preadv", 0, errno.EIO),  # the end of the file
    ],
)
def test_an_error_is_that_of_the_request(
    disk: Memory, monkeypatch: pytest.MonkeyPatch, way: str, number: int, found: int
) -> None:
    """Each time that somebody waits for it, and of what comes behind it."""
    buffer, there = disk.buffer(SIZE), memory()
    start = disk.read if way == "preadv" else disk.write
    with monkeypatch.context() as patched:
        failing(way, number, patched)
        request = begun(start([buffer], [there], "3READ_STATE of 'layers.3'"))
        behind = begun(disk.read([buffer], [memory()], "2READ_STATE", after=[request]))
        for each in (request, request, behind):
            with pytest.raises(DiskError, match=r"3READ_STATE of 'layers\.3'") as caught:
                each.wait()
            assert caught.value.errno == found
    assert request.failed() and request.done() and not any(map(disk.moved_bytes, transfers.Way))


def test_a_slow_disk_is_said(disk: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """And then it goes on."""
    gate, said = threading.Event(), list[str]()
    times = itertools.count(step=40)

    def warn(message: str, *_: Any, **__: Any) -> None:
        said.append(message)
        gate.set()

    monkeypatch.setattr(time, "monotonic", lambda: float(next(times)))
    monkeypatch.setattr(warnings, "warn_explicit", warn)
    request = begun(disk.read([disk.buffer(SIZE)], [memory()], "3READ_STATE", before=gate.wait))
    done(request)
    assert len(said) == 1 and "3READ_STATE" in said[0]


# --- who looks through the mapping


@pytest.mark.parametrize("seed", range(3))
def test_mapping_and_direct_io_see_the_same(disk: Memory, seed: int) -> None:
    rng = random.Random(seed)
    buffer, plain = disk.buffer(SIZE), memory()
    seen = buffer.bytes(SIZE)
    for _ in range(40):
        action = rng.choice(["look", "change", "read", "write", "drop"])
        if action == "look":
            assert torch.equal(seen, plain)
        elif action == "change":
            start = rng.randrange(SIZE)
            value, end = rng.randrange(256), rng.randrange(start, SIZE)
            seen[start:end] = value
            plain[start:end] = value
        elif action == "read":
            assert torch.equal(contents(disk, buffer), plain)
        elif action == "write":
            plain = memory().random_()
            done(disk.write([buffer], [plain], "fill"))
        else:
            buffer.madvise(mmap.MADV_DONTNEED)
    assert torch.equal(seen, plain)


def in_child(function: Callable[[], bool]) -> int:
    child = os.fork()
    if not child:
        code = 2
        try:
            code = 0 if function() else 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_child_does_not_write_into_the_file(disk: Memory) -> None:
    buffer, ones = disk.buffer(SIZE), memory(value=1)
    request = begun(disk.write([buffer], [ones], "fill"))

    def child() -> bool:
        seen = buffer.bytes(SIZE)
        found = torch.equal(seen, ones)
        done(disk.write([buffer], [memory(value=2)], "mine"))
        seen[:PAGE] = 3
        there = contents(disk, buffer)
        return bool(found and (there[:PAGE] == 3).all() and (there[PAGE:] == 2).all())

    assert in_child(child) == 0
    done(request)
    assert torch.equal(buffer.bytes(SIZE), ones) and torch.equal(contents(disk, buffer), ones)


def test_a_child_that_ends_gives_nothing_back(disk: Memory) -> None:
    holder = [disk.buffer(SIZE)]
    done(disk.write(holder, [memory(value=1)], "fill"))

    def child() -> bool:
        holder.clear()
        gc.collect(1)
        return not disk.file._given_back

    assert in_child(child) == 0
    assert (holder[0].bytes(SIZE) == 1).all()


# --- interrupts


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A shell lets what it runs in the background ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_while_it_waits(disk: Memory) -> None:
    gate = threading.Event()
    buffer, source = disk.buffer(SIZE), memory(value=5)
    request = begun(disk.write([buffer], [source], "fill", before=gate.wait))
    with pytest.raises(KeyboardInterrupt):
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
        request.wait()
    assert request.busy()
    gate.set()
    request.wait()
    assert torch.equal(contents(disk, buffer), source)


def test_a_request_that_nobody_began_is_begun_by_who_waits(disk: Memory) -> None:
    buffer, source = disk.buffer(SIZE), memory(value=5)
    request = disk.write([buffer], [source], "fill")
    assert request is not None
    request.wait()
    assert torch.equal(contents(disk, buffer), source)


@pytest.mark.thorough
def test_ctrl_c_anywhere(disk: Memory) -> None:
    """What was interrupted can be waited for, with threads that have begun and with new ones."""
    buffer, source = disk.buffer(SIZE), memory().random_()
    counted = interrupts.Places()
    with interrupts.traced(counted):
        done(Memory(Disk(disk.file)).write([buffer], [source], "fill"))
    for name, count in counted.counts.items():
        for k in range(1, count + 1, max(1, count // 8)):
            request = Memory(Disk(disk.file)).write([buffer], [source.random_()], "fill")
            assert request is not None
            stopper = interrupts.Places((name, k))
            with suppress(KeyboardInterrupt), interrupts.traced(stopper):
                done(request)
            request.wait()
            assert torch.equal(contents(disk, buffer), source), stopper.stopped
