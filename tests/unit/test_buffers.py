"""Memory of slots and of the host: it grows, is lent, is locked, gets its pages and values.

What users do to parameters in host buckets: tests/frames, tests/equality/test_dtypes.py.
"""

from __future__ import annotations

import gc
import itertools
import mmap
import multiprocessing
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megacompile import megacompile
from megacompile.errors import HostMemoryError
from megacompile.host_memory import PAGE_LOCKS, PageLocks
from megacompile.ir.buckets import Slot
from megacompile.ir.tensors import TensorMeta
from megacompile.runtime.device.buffers import HostBuffer
from megacompile.runtime.device.pool import OnHost
from megacompile.runtime.device.ranks import checksum
from megacompile.runtime.device.streams import DeviceSlots
from megacompile.runtime.params.host_bucket import HostBucket
from megacompile.runtime.params.pending import Fill
from tests import inside
from tests.checkpoints import layout_of, odd_tensors


def slots_of(*sizes: int) -> DeviceSlots:
    made = DeviceSlots(torch.device("cpu"))
    made.require([Slot(i, size) for i, size in enumerate(sizes)])
    return made


def test_views_of_a_buffer_that_grew_or_is_forgotten_are_made_anew() -> None:
    """Buckets that are laid out anew may have the keys of old ones, and other sizes."""
    layout, new = layout_of([torch.ones(8)]), layout_of([torch.ones(2, 2)])
    slots = slots_of(layout.size_bytes, layout.size_bytes)
    a, b = Slot(0, layout.size_bytes), Slot(1, layout.size_bytes)
    kept, old = slots.weights(b, layout), weakref.ref(slots.buffers[0])
    slots.weights(a, layout)
    slots.require([Slot(0, 10_000)])
    assert old() is None, "its memory is given back"
    assert slots.weights(a, layout)[0].data_ptr() == slots.buffers[0].data_ptr()
    assert slots.weights(b, layout) is kept
    generation, buffers = slots.generation, [weakref.ref(buffer) for buffer in slots.buffers]
    del kept
    slots.forget()
    assert [buffer() for buffer in buffers] == [None, None]
    slots.require([a])
    assert [weight.shape for weight in slots.weights(a, new)] == [(2, 2)]
    assert slots.generation > generation


def new_pool() -> Any:
    """The pool of a model that was not called yet."""
    return inside.machine(megacompile(torch.nn.Linear(2, 2), device="cpu")).activations


def test_a_smaller_value_takes_a_larger_buffer_but_not_a_huge_one() -> None:
    of = new_pool()
    OnHost.of(of, torch.zeros(1000), None)  # 4000 bytes, and free again
    for numel, held in ((500, 4000), (499, 1996)):  # no more is held than was in use at once
        value = OnHost.of(of, torch.ones(numel), None)
        assert of.held_bytes == held and torch.equal(value.back(None), torch.ones(numel))
        del value


TENSORS: list[Callable[[], Tensor]] = [
    lambda: torch.randn(3, 4, 5).permute(2, 0, 1),
    lambda: torch.randn(3, 1).expand(3, 50),
    lambda: torch.randn(6, 12)[1:4, 2:9],
    lambda: torch.randn(40)[::2],
    lambda: torch.randn(()),
    lambda: torch.randn(3, 0, 2),
    lambda: torch.randn(3, 5) > 0,
    lambda: torch.randn(9).bfloat16(),
    lambda: torch.randn(3, 4, dtype=torch.complex64).conj(),
]


def test_a_tensor_comes_back_as_it_was() -> None:
    """Values and strides: these choose the kernels, and compiled code relies on them."""
    for make in TENSORS:
        value = make()
        of = new_pool()
        waiting = OnHost.of(of, value, None)
        assert of.lent_bytes <= value.numel() * value.element_size()
        wanted = value.clone()
        if 0 not in value.stride():
            value.zero_()
        back = waiting.back(None)
        assert torch.equal(back, wanted) and back.dtype == wanted.dtype
        assert back.stride() == waiting.meta.stride == TensorMeta.of(make()).stride


def test_a_buffer_that_was_refused_takes_nothing_of_the_budget() -> None:
    model = megacompile(torch.nn.Linear(2, 2), device="cpu")
    budget: Any = type(inside.machine(model).host_budget)(limit_bytes=2**20)
    with pytest.raises(HostMemoryError, match="host_memory"):
        budget.make(2**21, "a test", pin=False)
    assert budget.held_bytes == 0
    assert len(budget.make(2**20, "a test", pin=False)) == 2**20


MIB = 2**20


class Cuda:
    """What `torch.cuda.cudart()` gives; it locks so many bytes, as WSL 2 does."""

    def __init__(self) -> None:
        self.limit_bytes = 4 * MIB
        self.locked: dict[int, int] = {}
        self.asked: list[int] = []
        self.unlocked = self.synchronized = 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.asked.append(size)
        if sum(self.locked.values()) + size > self.limit_bytes:
            return 2
        self.locked[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.unlocked += 1
        assert self.synchronized == self.unlocked, "a copy may be under way"
        del self.locked[address]
        return 0

    def synchronize(self, *_: Any) -> None:
        self.synchronized += 1


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    """It has refused nothing yet."""
    made = Cuda()
    inside.say_again()
    vars(PAGE_LOCKS).update(vars(PageLocks()))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", made.synchronize)
    yield made
    vars(PAGE_LOCKS).update(vars(PageLocks()))


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_a_buffer_takes_what_it_needs_and_is_shared_with_forked_loaders(cuda: Cuda) -> None:
    """Not the next power of two: five pages and a bit are six pages. A private mapping would become
    copy-on-write under the DMA, see the note of the module."""

    def pages() -> int:  # of all of the process
        return int(Path("/proc/self/statm").read_text().split()[0])

    size = 5 * mmap.PAGESIZE + 3
    assert len(HostBuffer(size, pin=False)) == size
    before = pages()
    more = HostBuffer(size, pin=False)
    assert pages() - before == 6 and more.bytes(size).numel() == size
    start = HostBuffer(100, pin=True).bytes(100).data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, permissions = line.split()[:2]
        first, end = (int(part, 16) for part in place.split("-"))
        if first <= start < end:
            assert permissions == "rw-s"


def test_a_bucket_is_locked_as_a_whole_and_unlocked_with_its_last_tensor(cuda: Cuda) -> None:
    params = [nn.Parameter(t, requires_grad=t.is_floating_point()) for t in odd_tensors()]
    bucket = HostBucket(layout_of(params), params, pin=True)
    whole = {bucket.flat.data_ptr(): bucket.layout.size_bytes}
    assert cuda.locked == whole
    del bucket
    gc.collect()
    assert cuda.locked == whole, "the parameters still lie there"
    params.clear()
    gc.collect()
    assert cuda.locked == {}


@pytest.mark.filterwarnings("ignore:megacompile. cudaHostRegister")
def test_what_was_refused_is_not_asked_for_again(cuda: Cuda) -> None:
    locks = PAGE_LOCKS
    first = HostBuffer(3 * MIB, pin=True)
    assert first.locked
    refused = HostBuffer(2 * MIB, pin=True)
    assert not refused.locked and locks.limit_bytes == 3 * MIB
    again, small = HostBuffer(2 * MIB, pin=True), HostBuffer(MIB, pin=True)
    assert not again.locked and small.locked
    refused.lock()  # a buffer that was refused is left alone, and one that is locked
    first.lock()
    assert cuda.asked == [3 * MIB, 2 * MIB, MIB]
    assert locks.locked_bytes == 4 * MIB
    del refused, again, first
    gc.collect()
    assert locks.locked_bytes == MIB
    assert list(cuda.locked.values()) == [MIB]
    assert HostBuffer(2 * MIB, pin=True).locked, "there is room again"


def test_it_is_said_once_and_torch_forgets_the_error(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA keeps the error of a refusal, and the next kernel would raise it: one that may."""
    kernels: list[Any] = []

    def ones(*args: Any, **given: Any) -> torch.Tensor:
        kernels.append(given["device"])
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "ones", ones)
    with pytest.warns(UserWarning, match="cudaHostRegister"):
        HostBuffer(5 * MIB, pin=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        HostBuffer(4 * MIB + 4096, pin=True)
    assert kernels == ["cuda", "cuda"]


LITTLE = 64 * 2**20 + 5 * mmap.PAGESIZE  # which two threads share
CPU = torch.device("cpu")


def pages(address: int, size_bytes: int) -> int:
    """How many lie in memory."""
    with Path("/proc/self/pagemap").open("rb", buffering=0) as table:
        table.seek(address // mmap.PAGESIZE * 8)
        found = table.read(size_bytes // mmap.PAGESIZE * 8)
    return sum(entry >> 63 for entry in memoryview(found).cast("Q"))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
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


# Values: a plan waits for all of them, and whoever uses a parameter for its bucket.


class Later:
    """A thread that does nothing until it is told to."""

    def __init__(self) -> None:
        self.work: list[Callable[[], None]] = []

    def submit(self, work: Callable[[], None]) -> None:
        self.work.append(work)


def filled_later(params: Sequence[nn.Parameter], *, pin: bool = False) -> tuple[HostBucket, Later]:
    thread: Any = Later()
    return HostBucket(layout_of(params), params, pin=pin, filling=(CPU, thread)), thread


def filling(bucket: HostBucket) -> bool:
    return isinstance(bucket.pending.in_flight, Fill)


USES: dict[str, Callable[[nn.Parameter], Tensor]] = {
    "read": lambda p: p.detach().clone(),
    "computed with": lambda p: p * 1,
    "deepcopy": lambda p: torch.nn.ParameterList([p]).state_dict()["0"].clone(),
}


class Own(nn.Parameter):
    """A class of the user's."""


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("kind", [nn.Parameter, Own])
def test_who_uses_a_parameter_waits_for_it(use: str, kind: type[nn.Parameter]) -> None:
    """Though no thread does the work: who waits does it. The thread then finds nothing to do."""
    params = [kind(torch.randn(4, 4)), kind(torch.randn(3))]
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
        bucket.pending.wait()
    assert [p.data_ptr() for p in params] == places
    assert all(torch.equal(p, want) for p, want in zip(params, wanted, strict=True))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("fails", [False, True])
def test_a_fork_does_not_wait_and_its_child_does(cuda: Cuda, fails: bool) -> None:
    """Workers of a DataLoader use no parameter."""
    params = [nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(3))]
    wanted = [p.detach().tolist() for p in params]
    bucket, _ = filled_later(params, pin=True)
    here, there = multiprocessing.Pipe()

    def reads() -> None:
        there.send("begun")
        for param in (*params, params[0]):
            try:
                there.send(param.detach().tolist())
            except RuntimeError as error:
                there.send(str(error))

    child = multiprocessing.get_context("fork").Process(target=reads)
    child.start()
    try:
        assert here.recv() == "begun" and filling(bucket)
        fill = bucket.pending.in_flight
        assert isinstance(fill, Fill)
        if fails:
            fill.settle = lambda: pytest.fail("no pages")
            with pytest.raises(pytest.fail.Exception):
                bucket.pending.wait()
            assert all("failed" in here.recv() for _ in range(3))
        else:
            bucket.pending.wait()
            assert [here.recv() for _ in range(3)] == [*wanted, wanted[0]]
    finally:
        child.kill()
        child.join()


PART = 2**18  # int32 that are summed at once
MANY = 3 * PART + 5  # float32, over four parts
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.complex64)


def drawn(numel: int = MANY, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(1)).to(dtype)


def test_a_bit_anywhere_and_the_order_are_seen() -> None:
    x = drawn()
    first, second, *rest = x.split(PART)
    others = [x.flip(0), -x, torch.cat((second, first, *rest))]
    for at, bit in itertools.product((0, 1, PART, MANY - 1), (0, 15, 31)):
        others.append(x.clone())
        others[-1].view(torch.int32)[at] ^= -(2**31) if bit == 31 else 2**bit
    assert len({checksum(other) for other in (x, *others)}) == 1 + len(others)
    some = torch.arange(4 * 7 + 3, dtype=torch.uint8)
    ends = [some.index_fill(0, torch.tensor([at]), 99) for at in range(4 * 7, 4 * 7 + 3)]
    assert len({checksum(other) for other in (some, *ends)}) == 4, "no whole word"
    nan = torch.full((8,), torch.nan)
    nan.view(torch.int32)[3] += 1
    assert checksum(nan) != checksum(torch.full((8,), torch.nan))
    zeros = [torch.zeros(4), -torch.zeros(4), torch.zeros(5)]
    assert len(set(map(checksum, zeros))) == 3


def test_strides_and_places_do_not_matter_and_nothing_is_drawn() -> None:
    before = torch.get_rng_state()
    for numel, dtype in itertools.product((0, 1, 3, 1001), DTYPES):
        assert checksum(drawn(numel, dtype)) == checksum(drawn(numel, dtype)), (numel, dtype)
    x = drawn(1000 * 77).view(1000, 77)
    assert checksum(x.t().contiguous().t()) == checksum(x)
    pairs = torch.view_as_complex(x[:, :2].contiguous())
    assert checksum(pairs.conj().conj()) == checksum(pairs)
    odd = torch.cat((torch.zeros(1), x.reshape(-1))).bfloat16()[1:]
    assert odd.storage_offset() * 2 % 4 == 2 and checksum(odd) == checksum(odd.clone())
    assert torch.get_rng_state().equal(before)
