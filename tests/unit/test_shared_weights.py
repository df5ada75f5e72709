"""Memory that ranks map together: here by several ranks of one process."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from megacompile.errors import OptimizerError
from megacompile.ir.buckets import Bucket
from megacompile.ir.ops import Part
from megacompile.runtime.device import shared_buffers
from megacompile.runtime.device.buffers import SharedFile
from megacompile.runtime.device.host_budget import HostBudget
from megacompile.runtime.device.rank_notes import namespace
from megacompile.runtime.device.ranks import Ranks
from megacompile.runtime.device.shared_weights import Rows, SharedWeights
from megacompile.runtime.params.bucket import HostBucket

MIB = 2**20


class Agreement:
    """Waits as a rank does that finds nothing wrong with the others."""

    def __init__(self) -> None:
        self.notes = SimpleNamespace(position=(1, 0, ""))
        self.waited = 0

    def wait(self, work: Any) -> None:
        self.waited += 1
        work.wait(timedelta(seconds=5))


def ranks(count: int = 2) -> list[Any]:
    each = [SimpleNamespace(rank=r, count=count, agreement=Agreement()) for r in range(count)]
    for one in each:
        one.note_op = lambda one=one: Ranks.note_op(one)
    return each


def shared(sizes: dict[int, int], count: int = 2) -> list[SharedWeights]:
    """The same memory, as each of some ranks has it."""
    file = SharedFile()
    assert file.take(shared_buffers.layout(count, sizes)[2]) == 0
    assert file.fd is not None
    each = [file, *(SharedFile(os.dup(file.fd)) for _ in range(count - 1))]
    return [SharedWeights(f, r, sizes) for f, r in zip(each, ranks(count), strict=True)]


class Work:
    """Something that is in flight until it is let go."""

    def __init__(self, error: Exception | None = None) -> None:
        self.over = threading.Event()
        self.error = error

    def event(self, part: Part) -> None:
        del part

    def ahead(self, part: Part) -> None:
        del part

    def done(self) -> bool:
        return self.over.is_set()

    def wait(self) -> None:
        self.over.wait()
        if self.error is not None:
            raise self.error


def until(there: Any) -> None:
    end_s = time.monotonic() + 5
    while not there():
        assert time.monotonic() < end_s
        time.sleep(0.001)


def test_a_bucket_is_one_memory_in_all_ranks() -> None:
    a, b = shared({7: 3 * MIB, 9: 100})
    both = [
        (each.buffer(7, each.rows(7).leave), each.buffer(9, each.rows(9).leave)) for each in (a, b)
    ]
    both[0][0].bytes(3 * MIB).fill_(5)
    both[1][1].bytes(100).fill_(6)
    assert bool((both[1][0].bytes(3 * MIB) == 5).all())
    assert bool((both[0][1].bytes(100) == 6).all())


def test_work_in_the_background_is_waited_for_by_all() -> None:
    a, b = shared({0: 100, 1: 100})
    work = Work()
    a.rows(0).begin(work)
    a.tell()
    assert a.rows(0).busy() and b.rows(0).busy()
    assert not b.rows(1).busy(), "only that bucket"
    threading.Timer(0.05, work.over.set).start()
    b.rows(0).settle()
    assert work.done() and not b.rows(0).busy() and not a.rows(0).busy()


def test_work_of_a_graph_is_not_waited_for_by_ranks_that_are_behind_in_it() -> None:
    """It may wait for a sum that they have not come to. The next graph waits for it."""
    a, b = shared({0: 100})
    work = Work()
    a.rows(0).begin(work)
    assert a.rows(0).busy() and not b.rows(0).busy()
    b.rows(0).settle()
    entered = threading.Thread(target=lambda: next(iter(_entering(a))))
    entered.start()
    for _ in _entering(b):
        assert b.rows(0).busy()
        work.over.set()
        b.rows(0).settle()
        break
    entered.join()


def _entering(own: SharedWeights) -> Iterator[None]:
    """As a rank that has entered a graph."""
    with own.copied(lambda: None):
        yield


def test_what_comes_later_is_not_over_with_what_came_before() -> None:
    a, b = shared({0: 100})
    first, second = Work(), Work()
    a.rows(0).begin(first)
    a.rows(0).begin(second)
    a.tell()
    first.over.set()
    until(lambda: len(a._under_way) == 1)
    assert b.rows(0).busy()
    second.over.set()
    b.rows(0).settle()


def test_work_that_failed_is_not_over_until_its_rank_has_raised_it() -> None:
    a, b = shared({0: 100})
    work = Work(OptimizerError("half updated"))
    a.rows(0).begin(work)
    a.tell()
    work.over.set()
    until(lambda: not a._under_way)
    assert b.rows(0).busy()
    a.rows(0).finish()
    assert not b.rows(0).busy()


@pytest.mark.parametrize("late", ["to come", "with its copies"])
def test_ranks_wait_for_one_another_around_a_graph(late: str) -> None:
    a, b = shared({0: 100})
    seen: list[str] = []

    def graph(own: SharedWeights, name: str, before_s: float, copies_s: float) -> None:
        time.sleep(before_s)
        seen.append(f"{name} comes")
        with own.copied(lambda: time.sleep(copies_s)):
            seen.append(f"{name} copies")
        seen.append(f"{name} goes on")

    slow = (0.05, 0.0) if late == "to come" else (0.0, 0.05)
    threads = [
        threading.Thread(target=graph, args=(a, "a", 0.0, 0.0)),
        threading.Thread(target=graph, args=(b, "b", *slow)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(seen.index("a comes"), seen.index("b comes")) < seen.index("a copies")
    assert seen.index("b copies") < seen.index("a goes on")
    assert a.ranks.agreement.notes.position[1] == 1, "whoever waits at its end is at another op"


def test_the_memory_of_a_bucket_goes_with_the_last_rank() -> None:
    a, b = shared({0: 4 * MIB})
    both = [each.buffer(0, each.rows(0).leave) for each in (a, b)]
    both[0].bytes(4 * MIB).fill_(1)
    assert a._file.fd is not None

    def taken() -> int:
        return os.fstat(a._file.fd or 0).st_blocks * 512

    before = taken()
    assert before >= 4 * MIB
    del both[0]
    gc.collect()
    assert taken() >= before, "another rank has it"
    both.clear()
    gc.collect()
    assert taken() < MIB


def test_a_child_of_a_fork_has_its_own() -> None:
    (a,) = shared({0: 100}, count=1)
    buffer = a.buffer(0, a.rows(0).leave)
    buffer.bytes(100).fill_(1)
    pid = os.fork()
    if pid == 0:
        ctypes.memset(buffer.bytes(100).data_ptr(), 2, 100)
        a.write(1, 77)
        os._exit(0)
    os.waitpid(pid, 0)
    assert bool((buffer.bytes(100) == 1).all()) and a.read(1) == 0


class Runtime:
    """Of CUDA: notes what is page-locked."""

    def __init__(self) -> None:
        self.locked: list[tuple[int, ...]] = []

    def cudaHostRegister(self, *args: int) -> int:
        self.locked.append(args)
        return 0


def test_locking_writes_nothing_to_the_rows_of_others() -> None:
    """To touch pages may write what was read, and their ranks write at the same time."""
    (a,) = shared({0: MIB}, count=1)
    runtime = Runtime()
    with mock.patch.object(torch.cuda, "cudart", lambda: runtime):
        buffer = a.buffer(0, a.rows(0).leave)
        before = os.fstat(a._file.fd or 0).st_blocks
        buffer.settle()
    assert len(runtime.locked) == 1
    assert os.fstat(a._file.fd or 0).st_blocks == before, "no page was touched"


def test_each_rank_locks_the_pages_of_the_whole_bucket() -> None:
    """And its budget has its own rows."""
    linear = torch.nn.Linear(64, 96, bias=False)
    whole = Bucket.layout(3, "layer", [("weight", linear.weight)], ranks=2)
    budgets, made, runtime = [HostBudget(), HostBudget()], [], Runtime()
    with mock.patch.object(torch.cuda, "cudart", lambda: runtime):
        for rank, (own, budget) in enumerate(
            zip(shared({3: whole.size_bytes}), budgets, strict=True)
        ):
            rows = linear.weight.detach().chunk(2)[rank].clone()
            param = torch.nn.Parameter(rows)
            made.append(
                HostBucket(whole, [param], pin=True, rank=rank, budget=budget, shared_weights=own)
            )
    assert [size for _, size, _ in runtime.locked] == 2 * [max(whole.size_bytes, mmap.PAGESIZE)]
    assert len({address for address, *_ in runtime.locked}) == 2, "each maps it elsewhere"
    for bucket, budget in zip(made, budgets, strict=True):
        assert bucket.flat.view(torch.float32).equal(linear.weight.detach().flatten())
        assert budget.held_bytes == budget.locked_bytes == whole.size_bytes // 2
    with torch.no_grad():
        made[1].params[0].fill_(3.0)
    assert bool((made[0].flat.view(torch.float32)[64 * 48 :] == 3.0).all())


def test_what_another_process_says_is_not_believed() -> None:
    """A number that is taken by another file; another host, of which it may be right."""
    file = SharedFile()
    assert file.fd is not None and file.take(MIB) == 0
    said = shared_buffers._Said(namespace(), os.getpid(), file.fd, 12345)
    opened = shared_buffers._opened
    assert opened(said, 0)[1]
    gone = shared_buffers._Said(namespace(), os.getpid(), 10**6, 12345)
    assert "rank 4" in opened(gone, 4)[1]
    other = shared_buffers._Said("another boot", os.getpid(), file.fd, 12345)
    assert "another host" in opened(other, 4)[1]


def test_it_has_no_name() -> None:
    before = set(Path("/dev/shm").iterdir())
    kept = shared({0: MIB})
    assert {p for p in set(Path("/dev/shm").iterdir()) - before if "megacompile" in p.name} == set()
    assert isinstance(kept[0].rows(0), Rows)
