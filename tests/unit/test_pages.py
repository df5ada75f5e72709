"""Host memory gets its pages on several threads, and its values in the background."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megacompile.runtime.device.buffers import HostBuffer
from megacompile.runtime.params.bucket import HostBucket
from megacompile.runtime.params.fill import Fill, Filling
from tests.layouts import layout_of

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


def test_what_is_computed_from_the_values_comes_at_once() -> None:
    """A copy that is streamed is made of them."""
    params = [nn.Parameter(torch.randn(4))]
    half = layout_of([params[0].detach().bfloat16()])
    bucket = HostBucket(half, params, pin=False, filling=Filling(CPU, Later()))  # type: ignore[arg-type]
    assert not filling(bucket)
