"""Host buckets: exact-size memory, a storage a parameter, page-locking, states."""

from __future__ import annotations

import gc
import mmap
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from megacompile.host_memory import PAGE_LOCKS, PageLocks
from megacompile.ir.buckets import Bucket
from megacompile.runtime.device.buffers import HostBuffer
from megacompile.runtime.device.host_budget import HostBudget
from megacompile.runtime.params.bucket import HostBucket
from tests.layouts import layout_of, odd_tensors


def parameters() -> list[nn.Parameter]:
    """Different shapes, dtypes and strides."""
    tensors = [*odd_tensors(), torch.randn(6, 10)[:, ::2]]
    return [nn.Parameter(t, requires_grad=t.is_floating_point()) for t in tensors]


def bucket_of(params: Sequence[nn.Parameter], *, pin: bool = False) -> HostBucket:
    return HostBucket(layout_of(params), params, pin=pin)


linux = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")


# --- memory


@linux
def test_a_buffer_takes_what_it_needs() -> None:
    """Not the next power of two: five pages and a bit are six pages."""

    def pages() -> int:  # of all of the process
        return int(Path("/proc/self/statm").read_text().split()[0])

    size = 5 * mmap.PAGESIZE + 3
    buffer = HostBuffer(size, pin=False)
    assert len(buffer) == size == buffer.bytes(size).numel()
    before = pages()
    more = HostBuffer(size, pin=False)
    assert pages() - before == 6
    del more


@linux
def test_a_locked_buffer_is_shared_with_forked_loaders(cuda: Cuda) -> None:
    """A private mapping would become copy-on-write under the DMA, see the note of the module."""
    start = HostBuffer(100, pin=True).bytes(100).data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, permissions = line.split()[:2]
        first, end = (int(part, 16) for part in place.split("-"))
        if first <= start < end:
            assert permissions == "rw-s"


def test_a_bucket_holds_the_values_of_its_parameters() -> None:
    params = parameters()
    before = [(p, p.detach().clone(), p.requires_grad) for p in params]
    bucket = bucket_of(params)
    assert bucket.flat.numel() == bucket.layout.size_bytes
    assert [id(p) for p in bucket.params] == [id(p) for p in params]
    for (param, value, requires_grad), place in zip(before, bucket.layout.params, strict=True):
        assert torch.equal(param.detach(), value)
        assert (param.stride(), param.requires_grad) == (place.stride, requires_grad)
        raw = bucket.flat[place.offset_bytes : place.offset_bytes + place.size_bytes]
        if place.numel:
            assert param.data_ptr() == raw.data_ptr()
            there = raw.view(place.dtype).as_strided(place.shape, place.stride)
            assert torch.equal(there, value)


# --- adopting what the user did


REPLACEMENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "other strides": lambda t: (t * 2).t().contiguous().t(),
    "view of a larger tensor": lambda t: torch.cat([t, t])[: len(t)],
    "expanded": lambda t: torch.ones(()).expand(t.shape),
}


@pytest.mark.parametrize("kind", REPLACEMENTS)
def test_replaced_data_is_adopted(kind: str) -> None:
    params = parameters()
    bucket = bucket_of(params)
    theirs = REPLACEMENTS[kind](params[0].detach())
    wanted = theirs.clone()
    params[0].data = theirs
    version = params[0]._version
    assert bucket.adopt()
    assert params[0].data_ptr() == bucket.flat.data_ptr()
    assert params[0].stride() == bucket.layout.params[0].stride
    assert params[0]._version > version, "a pending backward must see that it changed"
    theirs.data = torch.zeros(())
    assert torch.equal(params[0].detach(), wanted), "what was given is copied, not kept"


def test_another_shape_or_dtype_needs_another_layout() -> None:
    for theirs in (torch.zeros(33, 8), torch.zeros(33, 77, dtype=torch.float64)):
        params = parameters()
        bucket = bucket_of(params)
        params[0].data = theirs
        assert not bucket.adopt()
        assert params[0].data_ptr() == theirs.data_ptr(), "left for the new layout"


# --- page-locking


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


def forget_refusals() -> None:
    """Nothing was refused yet."""
    vars(PAGE_LOCKS).update(vars(PageLocks()))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    made = Cuda()
    forget_refusals()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", made.synchronize)
    yield made
    forget_refusals()


def test_a_bucket_is_locked_as_a_whole_and_unlocked_with_its_last_tensor(cuda: Cuda) -> None:
    params = parameters()
    bucket = bucket_of(params, pin=True)
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
    assert first.locked and not locks.pageable_bytes
    refused = HostBuffer(2 * MIB, pin=True)
    assert not refused.locked and locks.limit_bytes == 3 * MIB
    again, small = HostBuffer(2 * MIB, pin=True), HostBuffer(MIB, pin=True)
    assert not again.locked and small.locked
    assert cuda.asked == [3 * MIB, 2 * MIB, MIB]
    assert (locks.locked_bytes, locks.pageable_bytes) == (4 * MIB, 4 * MIB)
    refused.lock()  # a buffer that was refused is left alone, and one that is locked
    first.lock()
    assert cuda.asked == [3 * MIB, 2 * MIB, MIB]
    del refused, again, first
    gc.collect()
    assert (locks.locked_bytes, locks.pageable_bytes) == (MIB, 0)
    assert list(cuda.locked.values()) == [MIB]
    budget = HostBudget()
    kept = [budget.make(2 * MIB, "a bucket", pin=True) for _ in range(2)]
    assert kept[0].locked, "there is room again"
    assert budget.held_bytes == 4 * MIB and budget.locked_bytes == 2 * MIB


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
    assert kernels == ["cuda"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        HostBuffer(4 * MIB + 4096, pin=True)
    assert kernels == ["cuda", "cuda"]


# --- states, codes, copies

OWNER = SGD([torch.zeros(1)])


def test_states_mirror_the_parameters() -> None:
    """Neighbours are as far apart, in elements, so that one span covers them in each."""
    bucket = bucket_of([nn.Parameter(torch.randn(n)) for n in (5, 300, 7)])
    bucket.states.make(OWNER, "exp_avg", {i: torch.bfloat16 for i in range(3)}, pin=False)
    bucket.make_grads()
    first = bucket.values[0].data_ptr()
    distances = [(v.data_ptr() - first) // v.itemsize for v in bucket.values]
    states = bucket.states.of(OWNER)["exp_avg"]
    assert all(isinstance(state, Tensor) and not state.any() for state in states.values())
    for found in (states, bucket.grads):
        tensors = [t for t in found.values() if isinstance(t, Tensor)]
        start = tensors[0].data_ptr()
        assert [(t.data_ptr() - start) // t.itemsize for t in tensors] == distances
        tensors[2].fill_(3)
        span = bucket.span(tensors[0], distances[2] + 7)
        assert span.dtype == tensors[0].dtype and span[-7:].tolist() == [3.0] * 7
    with pytest.raises(AssertionError, match="leaves the memory"):
        bucket.span(bucket.grads[2], 2**20)


def test_a_state_is_kept_until_its_dtype_changes() -> None:
    bucket = bucket_of([nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(3))])
    bucket.states.make(OWNER, "m", {0: torch.float32}, pin=False)
    before = bucket.states.of(OWNER)["m"][0]
    bucket.states.make(OWNER, "m", {0: torch.float32, 1: torch.float32}, pin=False)
    assert bucket.states.of(OWNER)["m"][0] is before
    bucket.states.make(OWNER, "m", {0: torch.bfloat16}, pin=False)
    assert bucket.states.of(OWNER)["m"][0] is not before


def test_a_copy_in_another_dtype_follows_the_parameters() -> None:
    params = [nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(5))]
    likes = [(f"p{i}", p.detach().to(torch.bfloat16)) for i, p in enumerate(params)]
    bucket = HostBucket(Bucket.layout(0, "unit", likes), params, pin=False)
    assert bucket.has_copy and bucket.flat.numel() == bucket.layout.size_bytes
    assert not bucket_of([nn.Parameter(torch.ones(1))]).has_copy
    for through_data in (False, True):
        with torch.no_grad():
            (params[0].data if through_data else params[0]).mul_(2)
        bucket.refresh()
        assert torch.equal(bucket.streamed[0], params[0].detach().to(torch.bfloat16))
    bucket.streamed[1].fill_(7)
    bucket.copy.take_back(1)
    assert params[1].tolist() == [7.0] * 5


def test_new_memory_is_zeros_once() -> None:
    """Nobody writes to it: billions of zeros would be written twice, the first time by Linux."""
    bucket = bucket_of([nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(3))])
    states = bucket.states
    states.make(OWNER, "exp_avg", {0: torch.float32, 1: torch.float32}, pin=False)
    first, second = (states.of(OWNER)["exp_avg"][i] for i in (0, 1))
    assert isinstance(first, Tensor) and isinstance(second, Tensor)
    for state in (first, second):
        state.fill_(1.0)
    states.clear(OWNER, "exp_avg", 0)
    assert first.all()
    states.clear(OWNER, "exp_avg", 0)
    assert not first.any()
    states.filled(OWNER, "exp_avg", 1)
    states.clear(OWNER, "exp_avg", 1)
    assert not second.any()
