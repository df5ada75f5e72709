"""What several threads use at a time. Where one would switch to another, another one's work is done
there: so each test meets the moment that it is about."""

from __future__ import annotations

import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megacompile.errors import HostMemoryError
from megacompile.host_memory import PageLocks
from megacompile.ir.ops import Part
from megacompile.runtime.device.background import Background
from megacompile.runtime.device.buffers import SharedFile, Wanted
from megacompile.runtime.device.forks import Live
from megacompile.runtime.device.host_budget import HostBudget
from megacompile.runtime.disk.scratch import Place, ScratchFile
from megacompile.runtime.params.fill import Fill
from megacompile.runtime.params.guards import guard_of
from megacompile.runtime.params.pending import Pending
from megacompile.runtime.params.streamed_copy import StreamedCopy
from tests.interrupts import traced
from tests.stateful.late import AtCall

TIMEOUT_S = 60


@pytest.fixture
def often() -> Iterator[None]:
    """Threads take turns after each call."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def test_buffers_that_are_made_at_a_time_have_no_memory_in_common(often: None) -> None:
    """As by the thread that makes gradients' buffers ahead, and the one that runs the backward."""
    file, sizes = SharedFile(), [100, 2**22 + 1, 2**21, 2**23]
    assert file.fd is not None
    with ThreadPoolExecutor(8) as pool:
        taken = list(pool.map(file.take, 500 * sizes))
    places = sorted(zip([at for at in taken if at is not None], 500 * sizes, strict=True))
    for (at, size), (following, _) in itertools.pairwise(places):
        assert at + size <= following
    assert os.fstat(file.fd).st_size >= sum(places[-1]), "memory behind its end is nobody's"


def test_what_a_kernel_reads_is_kept() -> None:
    """Two threads drop what is read: neither drops what the other one has looked at."""
    fetch = pytest.importorskip("megacompile.runtime.optim.kernels.fetch")
    others: list[Callable[[], None]] = [fetch._drop_read]

    def is_read() -> bool:
        if others:
            others.pop()()  # the other thread is faster
        return True

    read, not_read = SimpleNamespace(query=is_read), SimpleNamespace(query=lambda: False)
    fetch._in_use.extend([("read", read), ("not read", not_read)])
    try:
        fetch._drop_read()
        assert [name for name, _ in fetch._in_use] == ["not read"]
    finally:
        fetch._in_use.clear()


class _Work:
    """Work on a bucket that is over when `then` has been called."""

    def __init__(self, then: Callable[[], None] = lambda: None) -> None:
        self.fresh: dict[int, torch.Tensor] = {}
        self.then = [then]

    def event(self, part: Part) -> None:
        del part

    def ahead(self, part: Part) -> None:
        del part

    def wait(self) -> None:
        pass

    def done(self) -> bool:
        if self.then:
            self.then.pop()()
        return True


class _Home:
    """Stands for a bucket."""


def test_the_next_work_on_a_bucket_is_not_forgotten() -> None:
    """One thread has waited for work; another one has too, and starts the next."""
    params = tuple(nn.Parameter(torch.ones(2)) for _ in range(2))
    home: Any = _Home()
    home.params = home.values = home.streamed = params
    home.has_copy = False
    pending = Pending(params, StreamedCopy(home))
    following = _Work()

    def faster() -> None:
        pending.settle()
        pending.start(following, range(2), ())

    pending.start(_Work(faster), range(2), ())
    pending.settle()
    assert pending.busy() is False and pending.in_flight is following
    assert all(guard_of(param) is not None for param in params)
    pending.settle()
    assert not any(map(guard_of, params))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_goes_on_behind_a_fault() -> None:
    thread, done = Background("megacompile-test"), threading.Event()

    def fails() -> None:
        raise ValueError("a fault")

    thread.submit(fails)
    thread.submit(done.set)
    assert done.wait(TIMEOUT_S)


def test_places_of_a_disk_are_taken_once(tmp_path: Path, often: None) -> None:
    file = ScratchFile(tmp_path)
    holes = [file.take(file.alignment) for _ in range(40)]
    for hole in holes[::2]:
        file.give_back(hole)
    with ThreadPoolExecutor(4) as pool:
        taken = list(pool.map(lambda _: file.take(file.alignment), range(400)))
    starts = sorted(place.at for place in [*taken, *holes[1::2]])
    assert len(set(starts)) == len(starts)


def test_a_hole_is_whose_who_looks_at_it(tmp_path: Path) -> None:
    """Another thread takes a place while a hole is looked at."""
    file = ScratchFile(tmp_path)
    first, _ = file.take(file.alignment), file.take(file.alignment)
    file.give_back(first)
    file._collect()
    theirs: list[Place] = []

    class Meanwhile(Place):
        @property
        def size_bytes(self) -> int:
            if not theirs:
                theirs.append(Place(-1, 0))
                theirs[0] = file._find(file.alignment)
            return file.alignment

    hole = object.__new__(Meanwhile)
    object.__setattr__(hole, "at", first.at)
    file._free.clear()
    file._free.append(hole)
    mine = file._find(file.alignment)
    assert mine.at != theirs[0].at


def test_those_that_live_are_told_while_others_come(often: None) -> None:
    live: Live[Any] = Live()
    kept = [_Work() for _ in range(50)]
    for each in kept:
        live.add(each)
    over = threading.Event()

    def come() -> None:
        while not over.is_set():
            live.add(_Work())

    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(come)
        for _ in range(100):
            assert list(live)[:50] == kept
        over.set()
        coming.result()
    assert len(live) == 50 and kept[0] in live
    live.discard(kept[0])
    assert list(live) == kept[1:]


def test_memory_that_is_being_made_ahead_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody asks for it: who needs memory of another size waits until it is gone."""
    stub = SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: stub)
    budget, size = HostBudget(3 * 2**20), 2 * 2**20
    begun, go_on = threading.Event(), threading.Event()

    def hold(frame: Any, event: str, arg: Any) -> None:
        if event == "call" and frame.f_code.co_name == "settle" and not begun.is_set():
            begun.set()
            go_on.wait(TIMEOUT_S)

    threading.settrace(hold)  # of threads that begin now
    try:
        budget.make_ahead([Wanted(size, pin=True)], "gradients", torch.device("cpu"))
        assert begun.wait(TIMEOUT_S)
    finally:
        threading.settrace(None)
    threading.Timer(0.05, go_on.set).start()
    kept = budget.make(size - 4096, "parameters", pin=False)
    assert len(kept) == size - 4096
    with pytest.raises(HostMemoryError):
        budget.make(size, "more", pin=False)


@pytest.mark.filterwarnings("ignore:megacompile")
def test_locked_memory_counts_until_it_is_unlocked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread locks while memory goes, and what is refused then is no limit."""
    locks, limit = PageLocks(), 10
    held: dict[int, int] = {}

    def register(address: int, size: int, flags: int) -> int:
        if sum(held.values()) + size > limit:
            return 2
        held[address] = size
        return 0

    def unregister(address: int) -> int:
        assert not locks.lock(200, 5)
        return 0 if held.pop(address) else 1

    stub = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: stub)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert locks.lock(100, 8)
    locks.unlock(100)
    assert locks.lock(300, 6), "13 were refused, and 6 are not"


def test_ctrl_c_before_a_fill_begins_leaves_the_parameters() -> None:
    """Whoever waits for it is told, and does not wait for ever."""
    param = nn.Parameter(torch.ones(2))
    value = torch.zeros(2)
    fill = Fill([param], [value], lambda: None, torch.device("cpu"))
    param.data = value
    with pytest.raises(KeyboardInterrupt), traced(AtCall("fulfil", 1, KeyboardInterrupt())):
        fill.wait()
    assert fill.done() and bool((param == 1).all())
    with pytest.raises(KeyboardInterrupt):
        fill.wait()
