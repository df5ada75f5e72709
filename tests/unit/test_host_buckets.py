"""Memory of host buckets: its exact size, and page-locking. What users do to parameters that lie in
it is in tests/equality/test_parameter_looks.py."""

from __future__ import annotations

import gc
import mmap
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megacompile.host_memory import PAGE_LOCKS, PageLocks
from megacompile.runtime.device.buffers import HostBuffer
from megacompile.runtime.params.bucket import HostBucket
from tests import inside
from tests.layouts import layout_of, odd_tensors

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
    assert first.locked and not locks.pageable_bytes
    refused = HostBuffer(2 * MIB, pin=True)
    assert not refused.locked and locks.limit_bytes == 3 * MIB
    again, small = HostBuffer(2 * MIB, pin=True), HostBuffer(MIB, pin=True)
    assert not again.locked and small.locked
    refused.lock()  # a buffer that was refused is left alone, and one that is locked
    first.lock()
    assert cuda.asked == [3 * MIB, 2 * MIB, MIB]
    assert (locks.locked_bytes, locks.pageable_bytes) == (4 * MIB, 4 * MIB)
    del refused, again, first
    gc.collect()
    assert (locks.locked_bytes, locks.pageable_bytes) == (MIB, 0)
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
