"""Memory gets its pages on several threads, before it is page-locked."""

from __future__ import annotations

import mmap
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megacompile.page_locks import PageLocks
from megacompile.runtime.device import buffers
from megacompile.runtime.device import touch as module
from megacompile.runtime.device.buffers import HostBuffer
from megacompile.runtime.device.touch import CHUNK_BYTES, touch

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
SIZE = 3 * CHUNK_BYTES + 5 * mmap.PAGESIZE


def made(size_bytes: int = SIZE) -> torch.Tensor:
    memory = mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8)


def resident_pages(address: int, size_bytes: int) -> int:
    """Pages that lie in memory."""
    with Path("/proc/self/pagemap").open("rb", buffering=0) as pages:
        pages.seek(address // mmap.PAGESIZE * 8)
        found = pages.read(size_bytes // mmap.PAGESIZE * 8)
    return sum(entry >> 63 for entry in memoryview(found).cast("Q"))


def resident(memory: torch.Tensor) -> int:
    return resident_pages(memory.data_ptr(), memory.numel())


@linux
@pytest.mark.parametrize("old", [False, True])
def test_every_page_is_there_and_nothing_changes(
    old: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the kernel does not know the request."""
    if old:
        monkeypatch.setattr(module, "_madvise", lambda: lambda *_: -1)
    memory = made()
    memory[CHUNK_BYTES + 7] = 42
    assert resident(memory) < 2 * 512
    touch(memory)
    assert resident(memory) == SIZE // mmap.PAGESIZE
    assert int(memory.sum()) == 42


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_threads_share_the_chunks(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is done once, whoever does it: no thread waits, but for one that cannot be started."""
    memory, begun = made(), threading.Barrier(threads + 1)
    done: list[tuple[int, int, str]] = []
    waited = set[str]()

    def advise(start: int, size_bytes: int, advice: int) -> int:
        name = threading.current_thread().name + str(threading.get_ident())
        if name not in waited:
            waited.add(name)
            begun.wait(60)
        done.append((start - memory.data_ptr(), size_bytes, name))
        return 0

    start = threading.Thread.start
    begins: list[threading.Thread] = []

    def limited(thread: threading.Thread) -> None:
        if len(begins) == threads:
            raise RuntimeError("can't start new thread")
        begins.append(thread)
        start(thread)

    monkeypatch.setattr(module, "_madvise", lambda: advise)
    monkeypatch.setattr(module, "cores", lambda: 16)
    monkeypatch.setattr(threading.Thread, "start", limited)
    touch(memory)
    firsts = range(0, SIZE, CHUNK_BYTES)
    wanted = [(first, min(CHUNK_BYTES, SIZE - first)) for first in firsts]
    assert sorted(each[:2] for each in done) == wanted
    assert len({name for *_, name in done}) == threads + 1
    assert not any(thread.is_alive() for thread in begins)


def test_little_memory_needs_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "cores", lambda: 16)
    monkeypatch.setattr(threading, "Thread", None)
    touch(made(CHUNK_BYTES))


def test_an_interrupt_ends_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the chunks that they have begun."""
    main, may = threading.main_thread(), threading.Event()
    done: list[int] = []

    def advise(start: int, size_bytes: int, advice: int) -> int:
        if threading.current_thread() is main:
            raise KeyboardInterrupt
        assert may.wait(60)
        done.append(start)
        return 0

    monkeypatch.setattr(module, "_madvise", lambda: advise)
    monkeypatch.setattr(module, "cores", lambda: 2)
    with pytest.raises(KeyboardInterrupt):
        touch(made())
    may.set()
    for thread in threading.enumerate():
        if thread.name == "megacompile-touch":
            thread.join(60)
    assert len(done) <= 1


@linux
@pytest.mark.parametrize("pin", [True, False])
@pytest.mark.filterwarnings("ignore:megacompile. cudaHostRegister")
def test_pages_are_there_before_they_are_locked(pin: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is locked when it is made, and states that are locked at their first step."""
    found: list[tuple[int, int]] = []

    def register(address: int, size_bytes: int, flags: int) -> int:
        found.append((resident_pages(address, size_bytes), size_bytes))
        return 1  # it cannot: nothing is there to be undone

    fake = SimpleNamespace(cudaHostRegister=register)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(buffers, "PAGE_LOCKS", PageLocks())
    buffer = HostBuffer(SIZE, pin=pin)
    if not pin:
        assert not found
        buffer.bytes(SIZE)[3] = 7
        buffer.lock()
        assert int(buffer.bytes(SIZE).sum()) == 7
    ((pages, size_bytes),) = found
    assert pages == size_bytes // mmap.PAGESIZE
