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
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from megacompile.errors import DiskError
from megacompile.ir.buckets import Bucket
from megacompile.runtime.device.buffers import HostBuffer
from megacompile.runtime.device.disk_buffers import Disk, DiskBuffer
from megacompile.runtime.disk import scratch, transfers
from megacompile.runtime.disk.scratch import ScratchFile
from tests import interrupts

ROOT = Path(__file__).parent.parent
PAGE = mmap.PAGESIZE
SIZE = 8 * PAGE

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


def test_the_file_has_no_name_and_its_places_are_allocated(tmp_path: Path) -> None:
    file = ScratchFile(tmp_path)
    assert os.listdir(tmp_path) == [] and os.fstat(file.fd).st_nlink == 0
    place = file.take(SIZE - 1)
    assert place.size_bytes == SIZE and place.at % PAGE == 0
    assert os.fstat(file.fd).st_blocks * 512 >= SIZE
    file.give_back(place)
    file.take(PAGE)
    assert os.fstat(file.fd).st_blocks * 512 < SIZE


def test_without_files_that_have_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "O_TMPFILE")
    file = ScratchFile(tmp_path)
    assert os.listdir(tmp_path) == [] and os.fstat(file.fd).st_nlink == 0


def test_places_are_reused_and_read_as_zeros(disk: Memory) -> None:
    buffers = [disk.buffer(SIZE) for _ in range(3)]
    for buffer in buffers:
        done(disk.write([buffer], [memory(value=7)], "fill"))
    end = disk.file._end
    del buffers, buffer
    gc.collect()
    whole = disk.buffer(3 * SIZE)  # the three holes as one
    assert disk.file._end == end and disk.file.used_bytes == 3 * SIZE
    assert not contents(disk, whole).any() and not whole.bytes(3 * SIZE).any()


def test_a_limit(tmp_path: Path) -> None:
    file = ScratchFile(tmp_path, limit_bytes=2 * SIZE)
    first = file.take(SIZE)
    with pytest.raises(DiskError, match=r"disk_memory=64 KiB is too small: 32 KiB lie in "):
        file.take(SIZE + 1)
    file.take(SIZE)
    file.give_back(first)
    assert file.take(SIZE).size_bytes == SIZE


def test_a_full_disk_is_found_when_a_place_is_taken(tmp_path: Path) -> None:
    disk = Disk(ScratchFile(tmp_path))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 * PAGE, before[1]))
    try:
        with pytest.raises(
            DiskError, match=r"has no place for .* more \(File too large; .*free"
        ) as e:
            disk.buffer(SIZE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert e.value.errno == errno.EFBIG and disk.file.used_bytes == 0
    assert len(disk.buffer(SIZE)) == SIZE


@pytest.mark.parametrize("name", ["absent", "file"])
def test_a_folder_that_is_none(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DiskError, match=f"disk='.*{name}': no file can be made there"):
        ScratchFile(tmp_path / name)


def test_no_direct_io_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "_SAID", set())
    monkeypatch.setattr(scratch, "_is_coherent", lambda *_: False)
    with pytest.warns(UserWarning, match="megacompile: disk=.* has no direct I/O"):
        file = ScratchFile(tmp_path)
    assert file.direct_fd is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ScratchFile(tmp_path).direct_fd is None


def test_what_is_refused_when_it_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(scratch, "_SAID", set())
    monkeypatch.setattr(os, "preadv", refuse)
    with pytest.warns(UserWarning, match=r"no direct I/O \(Invalid argument\)"):
        assert ScratchFile(tmp_path).direct_fd is None


def test_nothing_is_left_of_a_process_that_is_killed(tmp_path: Path) -> None:
    code = """
    import os, signal, sys
    from megacompile.runtime.device.disk_buffers import Disk
    from megacompile.runtime.disk.scratch import ScratchFile
    buffer = Disk(ScratchFile(sys.argv[1])).buffer(2**20)
    buffer.bytes(2**20).fill_(1)
    os.kill(os.getpid(), signal.SIGKILL)
    """
    run = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code), str(tmp_path)]
    assert subprocess.run(run, cwd=ROOT, check=False).returncode == -9
    assert os.listdir(tmp_path) == []


def test_files_are_closed(tmp_path: Path) -> None:
    Disk(ScratchFile(tmp_path)).buffer(SIZE)
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    disk = Disk(ScratchFile(tmp_path))
    buffers = [disk.buffer(SIZE) for _ in range(20)]
    assert len(os.listdir("/proc/self/fd")) <= before + 2  # none for a buffer
    del disk, buffers
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


# --- reads and writes


def test_a_round_trip_in_chunks(disk: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "CHUNK_BYTES", 3 * PAGE)
    buffers = [disk.buffer(size) for size in (SIZE, PAGE, 5 * PAGE)]
    source = [memory(len(buffer)).random_() for buffer in buffers]
    written = begun(disk.write(buffers, source, "fill"))
    assert written.size_bytes == 14 * PAGE
    there = [memory(len(buffer)) for buffer in buffers]
    done(disk.read(buffers, there, "look", after=[written]))
    assert all(map(torch.equal, there, source))
    assert written.done() and not written.failed() and not written.busy()


def test_chunks_are_large_and_enough_for_all_threads(disk: Memory) -> None:
    """A thread may wait 5 ms for the GIL between two of them."""
    mib, threads = 2**20, transfers.THREADS

    def sizes(size_bytes: int) -> list[int]:
        span = transfers.Span(disk.file.take(size_bytes), lambda: torch.empty(0))
        cut = transfers._chunks(span, disk.file.alignment)
        assert [at for _, at, _ in cut] == list(
            itertools.accumulate([0, *(n for *_, n in cut[:-1])])
        )
        return [size for *_, size in cut]

    assert sizes(PAGE) == [PAGE]
    assert sizes(16 * mib) == [4 * mib] * threads
    assert sizes(64 * mib) == [16 * mib] * threads
    assert sizes(200 * mib) == [*[32 * mib] * 6, 8 * mib]


def test_nothing_to_do_is_done(disk: Memory) -> None:
    done(disk.read([], [], "nothing"))


@pytest.mark.parametrize("way", ["preadv", "pwritev"])
@pytest.mark.parametrize("short", [77, PAGE, PAGE + 100])
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
    assert torch.equal(contents(disk, buffer), source)


def failing(way: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def call(fd: int, buffers: Sequence[memoryview], at: int) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, way, call)


@pytest.mark.parametrize(
    ("way", "number", "advice"),
    [("preadv", errno.EIO, "dmesg"), ("pwritev", errno.ENOSPC, "the disk is full: free space")],
)
def test_an_error_names_everything(
    disk: Memory, monkeypatch: pytest.MonkeyPatch, way: str, number: int, advice: str
) -> None:
    buffer, there = disk.buffer(SIZE), memory()
    failing(way, number, monkeypatch)
    start = disk.read if way == "preadv" else disk.write
    request = begun(start([buffer], [there], "3READ_STATE of 'layers.3'"))
    word = "read" if way == "preadv" else "write"
    expected = rf"3READ_STATE of 'layers.3': the {word} of 32 KiB failed at offset \d+ of .*errno"
    for _ in range(2):
        with pytest.raises(DiskError, match=expected) as caught:
            request.wait()
        assert caught.value.errno == number and advice in str(caught.value)
    assert request.failed() and request.done()


def test_the_end_of_the_file_is_an_error(disk: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = disk.buffer(SIZE)
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    with pytest.raises(DiskError, match="errno 5"):
        contents(disk, buffer)


def test_what_comes_behind_a_failure_fails_too(
    disk: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = disk.buffer(SIZE)
    with monkeypatch.context() as patched:
        failing("pwritev", errno.EIO, patched)
        first = begun(disk.write([buffer], [memory()], "3WRITE_STATE"))
        second = begun(disk.read([buffer], [memory()], "3READ_STATE", after=[first]))
        with pytest.raises(DiskError, match=r"3WRITE_STATE: the write"):
            done(second)


def test_a_disk_that_is_never_ready_is_an_error(
    disk: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)
    failing("preadv", errno.EAGAIN, monkeypatch)
    with pytest.raises(DiskError, match=f"errno {errno.EAGAIN}"):
        contents(disk, disk.buffer(SIZE))


def test_a_slow_disk_is_said(disk: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "_PATIENCE_S", 0.01)
    monkeypatch.setattr(transfers, "_SLOW_S", 0.0)
    monkeypatch.setattr(transfers, "_SLOW", set())
    gate = threading.Event()
    buffer = disk.buffer(SIZE)
    request = begun(disk.read([buffer], [memory()], "3READ_STATE", before=gate.wait))
    real = transfers.Request._say_slow

    def say(self: transfers.Request, seconds: float) -> None:
        real(self, seconds)
        gate.set()

    monkeypatch.setattr(transfers.Request, "_say_slow", say)
    with pytest.warns(UserWarning, match="megacompile: 3READ_STATE: the read .* the disk is slow"):
        done(request)


@pytest.mark.parametrize("seed", range(20))
def test_requests_in_any_order(disk: Memory, seed: int) -> None:
    """Each is behind those that it names, and several are under way."""
    rng = random.Random(seed)
    buffers = [disk.buffer(SIZE) for _ in range(2)]
    plain = [memory() for _ in buffers]
    reads: list[tuple[transfers.Request, torch.Tensor, torch.Tensor]] = []
    last: list[list[transfers.Request]] = [[] for _ in buffers]
    for _ in range(30):
        i = rng.randrange(2)
        if rng.random() < 0.5:
            source = memory().random_()
            request = begun(disk.write([buffers[i]], [source], "fill", after=last[i]))
            last[i], plain[i] = [request], source
        else:
            there = memory()
            request = begun(disk.read([buffers[i]], [there], "look", after=last[i][:1]))
            last[i] = [*last[i], request]
            reads.append((request, there, plain[i]))
    for request, there, expected in reads:
        request.wait()
        assert torch.equal(there, expected)


# --- who looks through the mapping


@pytest.mark.parametrize("seed", range(20))
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


def test_tensors_of_it_are_ordinary(disk: Memory, tmp_path: Path) -> None:
    likes = [("a", torch.empty(5, 3)), ("b", torch.empty(0)), ("c", torch.empty(7).bfloat16())]
    layout = Bucket.layout(0, "layers.0", [(n, t.to("meta")) for n, t in likes])
    buffer = disk.buffer(layout.size_bytes)
    a, b, c = (buffer.tensor(place) for place in layout.params)
    assert (a.shape, b.shape, c.dtype) == ((5, 3), (0,), torch.bfloat16)
    a.normal_()
    c.fill_(3)
    torch.save({"a": a, "c": c}, tmp_path / "states.pt")
    loaded = torch.load(tmp_path / "states.pt")
    assert torch.equal(loaded["a"], a) and torch.equal(loaded["c"], c)
    del buffer, b, c
    gc.collect()
    kept = a.clone()
    done(disk.write([disk.buffer(SIZE)], [memory(value=1)], "elsewhere"))
    assert torch.equal(a, kept) and disk.file.used_bytes > SIZE  # `a` keeps the place


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
        gc.collect()
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
    interrupt = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        request.wait()
    assert request.busy()
    gate.set()
    request.wait()
    assert torch.equal(contents(disk, buffer), source)


def test_a_request_that_nobody_began_is_begun_by_who_waits(
    disk: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "_PATIENCE_S", 0.01)
    buffer, source = disk.buffer(SIZE), memory(value=5)
    request = disk.write([buffer], [source], "fill")
    assert request is not None
    request.wait()
    assert torch.equal(contents(disk, buffer), source)


def test_ctrl_c_at_any_opcode(disk: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was interrupted can be waited for, with threads that have begun and with new ones."""
    monkeypatch.setattr(transfers, "_PATIENCE_S", 0.01)
    monkeypatch.setattr(transfers, "CHUNK_BYTES", PAGE)
    buffer, source = disk.buffer(SIZE), memory().random_()
    counted = interrupts.Opcodes()
    with interrupts.traced(counted):
        done(Memory(Disk(disk.file)).write([buffer], [source], "fill"))
    for name, count in counted.counts.items():
        for k in range(1, count + 1, max(1, count // 20)):
            request = Memory(Disk(disk.file)).write([buffer], [source.random_()], "fill")
            assert request is not None
            stopper = interrupts.Opcodes((name, k))
            with suppress(KeyboardInterrupt), interrupts.traced(stopper):
                done(request)
            request.wait()
            assert torch.equal(contents(disk, buffer), source), stopper.stopped
