"""Host memory gets its pages on several threads, and its values in the background."""

from __future__ import annotations

import mmap
import random
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megacompile.cost.places import flat_bytes
from megacompile.runtime.device.buffers import HostBuffer
from megacompile.runtime.device.touch import CHUNK_BYTES, touch
from megacompile.runtime.params.bucket import HostBucket
from megacompile.runtime.params.fill import Fill, Filling
from tests.layouts import layout_of

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
SIZE = 3 * CHUNK_BYTES + 5 * mmap.PAGESIZE  # that threads share
LITTLE = CHUNK_BYTES + 5 * mmap.PAGESIZE
CPU = torch.device("cpu")


def made(size_bytes: int = SIZE) -> Tensor:
    memory = mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8)


def pages(address: int, size_bytes: int) -> int:
    """How many lie in memory."""
    with Path("/proc/self/pagemap").open("rb", buffering=0) as table:
        table.seek(address // mmap.PAGESIZE * 8)
        found = table.read(size_bytes // mmap.PAGESIZE * 8)
    return sum(entry >> 63 for entry in memoryview(found).cast("Q"))


# Pages.


@linux
@pytest.mark.parametrize("refused", [False, True])
def test_every_page_is_there_and_nothing_changes(refused: bool) -> None:
    """Also where the kernel does not know the request."""
    memory = made(LITTLE)
    memory[CHUNK_BYTES + 7] = 42
    assert pages(memory.data_ptr(), LITTLE) < 2 * 512
    touch(memory, advise=(lambda *_: -1) if refused else None)
    assert pages(memory.data_ptr(), LITTLE) == LITTLE // mmap.PAGESIZE
    assert int(memory.sum()) == 42


@pytest.mark.parametrize("threads", [0, 3])
def test_threads_share_the_chunks(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is done once, whoever does it: no thread waits, but for one that cannot be started."""
    memory, begun = made(), threading.Barrier(threads + 1)
    done: list[tuple[int, int, int]] = []
    waited = set[int]()

    def advise(start: int, size_bytes: int, advice: int) -> int:
        name = threading.get_ident()
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

    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(16)))
    monkeypatch.setattr(threading.Thread, "start", limited)
    touch(memory, advise=advise)
    firsts = range(0, SIZE, CHUNK_BYTES)
    wanted = [(first, min(CHUNK_BYTES, SIZE - first)) for first in firsts]
    assert sorted(each[:2] for each in done) == wanted
    assert len({name for *_, name in done}) == threads + 1
    assert not any(thread.is_alive() for thread in begins)
    begins.clear()
    if not threads:
        touch(made(CHUNK_BYTES), advise=lambda *_: 0)
        assert not begins, "little memory needs no thread"


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

    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    with pytest.raises(KeyboardInterrupt):
        touch(made(), advise=advise)
    may.set()
    for thread in threading.enumerate():
        if thread.name == "megacompile-touch":
            thread.join(60)
    assert len(done) <= 1


@linux
@pytest.mark.parametrize("pin", [True, False])
def test_pages_are_there_before_they_are_locked(pin: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is locked when it is made, and states that are locked at their first step."""
    locked: list[tuple[int, int]] = []

    def register(address: int, size_bytes: int, flags: int) -> int:
        locked.append((pages(address, size_bytes), size_bytes))
        return 0

    fake = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=lambda address: 0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    buffer = HostBuffer(LITTLE, pin=pin)
    if not pin:
        assert not locked
        buffer.bytes(LITTLE)[3] = 7
        buffer.lock()
        assert int(buffer.bytes(LITTLE).sum()) == 7
    ((count, size_bytes),) = locked
    assert buffer.locked and count == size_bytes // mmap.PAGESIZE
    del buffer


# Values. A plan waits for all of them, and whoever uses a parameter for its bucket.


class Later:
    """A thread that does nothing until it is told to."""

    def __init__(self) -> None:
        self.work: list[Callable[[], None]] = []

    def submit(self, work: Callable[[], None]) -> None:
        self.work.append(work)


def filled_later(params: Sequence[nn.Parameter]) -> tuple[HostBucket, Later]:
    thread: Any = Later()
    return HostBucket(layout_of(params), params, pin=False, filling=Filling(CPU, thread)), thread


def filling(bucket: HostBucket) -> bool:
    return isinstance(bucket.pending.in_flight, Fill)


USES: dict[str, Callable[[nn.Parameter], Tensor]] = {
    "read": lambda p: p.detach().clone(),
    "computed with": lambda p: p * 1,
    "deepcopy": lambda p: torch.nn.ParameterList([p]).state_dict()["0"].clone(),
}


@pytest.mark.parametrize("use", USES)
def test_who_uses_a_parameter_waits_for_it(use: str) -> None:
    """Though no thread does the work: who waits does it. The thread then finds nothing to do."""
    params = [nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(3))]
    wanted = [p.detach().clone() for p in params]
    bucket, thread = filled_later(params)
    assert filling(bucket) and len(thread.work) == 1
    assert not torch.equal(bucket.values[0], wanted[0])
    assert torch.equal(USES[use](params[0]), wanted[0])
    assert not filling(bucket)
    with torch.no_grad():
        params[1].fill_(3)
    thread.work[0]()
    assert torch.equal(params[0], wanted[0]) and bool((params[1] == 3).all())
    assert params[0].data_ptr() == bucket.values[0].data_ptr()


def test_what_fails_leaves_the_values_where_they_were() -> None:
    """It is raised once."""
    params = [nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(3))]
    wanted, places = [p.detach().clone() for p in params], [p.data_ptr() for p in params]
    bucket, _ = filled_later(params)
    fill = bucket.pending.in_flight
    assert isinstance(fill, Fill)

    def run_out() -> None:
        raise OSError("no pages")

    fill.settle = run_out
    with pytest.raises(OSError, match="no pages"):
        bucket.pending.settle()
    assert [p.data_ptr() for p in params] == places
    assert all(torch.equal(p, want) for p, want in zip(params, wanted, strict=True))


def test_parameters_of_a_class_of_their_own_are_waited_for() -> None:
    class Own(nn.Parameter):
        pass

    own = Own(torch.randn(4))
    wanted = own.detach().clone()
    bucket, _ = filled_later([own])
    assert filling(bucket)
    assert torch.equal(own.detach(), wanted) and not filling(bucket)


def test_what_is_computed_from_the_values_comes_at_once() -> None:
    """A copy that is streamed is made of them."""
    params = [nn.Parameter(torch.randn(4))]
    half = layout_of([params[0].detach().bfloat16()])
    bucket = HostBucket(half, params, pin=False, filling=Filling(CPU, Later()))  # type: ignore[arg-type]
    assert not filling(bucket)


def constant(value: float) -> Callable[[object], float]:
    return lambda _: value


def test_states_do_not_overlap_and_plans_count_what_they_take() -> None:
    for seed in range(25):
        rng = random.Random(seed)
        kinds = rng.choice([(torch.float32,), (torch.bfloat16,), (torch.float32, torch.bfloat16)])
        sizes = [rng.choice((1, 5, 63, 64, 255, 256, 300, 1025)) for _ in range(rng.randint(1, 6))]
        params = [nn.Parameter(torch.randn(size).to(rng.choice(kinds))) for size in sizes]
        layout = layout_of(params)
        bucket = HostBucket(layout, params, pin=False)
        chosen = [i for i in range(len(params)) if rng.random() < 0.7]
        rng.shuffle(chosen)
        dtype = rng.choice((torch.float32, torch.bfloat16))
        states = bucket.states_like(dict.fromkeys(chosen, dtype), pin=False)
        assert states.whole.numel() == flat_bytes(layout, chosen, constant(dtype.itemsize))
        last, start = 0, states.whole.data_ptr() if chosen else 0
        for i in sorted(chosen):
            at = states.tensors[i].data_ptr() - start
            assert at >= last and at % dtype.itemsize == 0
            last = at + states.tensors[i].nbytes
        assert last == states.whole.numel()
