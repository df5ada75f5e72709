"""The end of a process whose GPU waits for collectives; without a GPU, with events of our own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from megacompile import compat
from megacompile.errors import RankError
from megacompile.runtime.device.agreement import Agreement, _Flying
from megacompile.runtime.device.rank_faults import Limits
from megacompile.runtime.device.ranks import abort_at_once
from tests.processes import group_of_one


class Group:
    """Of two groups of a mesh, each of which ends behind the other one's collectives."""

    def __init__(self, both: threading.Barrier) -> None:
        self.both, self.is_over = both, False

    def abort(self) -> None:
        self.both.wait(10)
        self.is_over = True


def test_the_groups_of_a_mesh_end_at_once() -> None:
    both = threading.Barrier(2)
    groups = [Group(both), Group(both)]
    abort_at_once(groups)
    assert all(group.is_over for group in groups)


@dataclass
class Event:
    """Of a collective that others may never answer."""

    done: threading.Event = field(default_factory=threading.Event)

    def query(self) -> bool:
        return self.done.is_set()


class Gpu(Agreement):
    """A rank of one, whose GPU is in a collective."""

    def __init__(self) -> None:
        self.aborted = 0
        limits, store = Limits(60, 60), lambda: compat.store("ends", timeout_s=5)
        super().__init__((0,), 0, store, limits, meets=False, abort=self._count_abort)
        self.event = Event()
        event: Any = self.event
        self._flying.append(_Flying("0ALL_GATHER", event))

    def _count_abort(self) -> None:
        self.aborted += 1


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    with group_of_one():
        made = Gpu()
        yield made
        made.event.done.set()
        made.notes.end()


def test_it_waits_for_them(gpu: Gpu) -> None:
    ends = threading.Thread(target=gpu.notes.end)
    ends.start()
    ends.join(0.3)
    assert ends.is_alive() and gpu.notes.are_written, "the thread would find who does not come"
    gpu.event.done.set()
    ends.join(10)
    assert not ends.is_alive() and not gpu.aborted


def test_those_that_a_fault_has_ended_are_not_waited_for(gpu: Gpu) -> None:
    gpu._fault = RankError("rank 1 was killed")
    gpu.notes.end()
    assert not gpu.aborted, "who found the fault did that"


def test_they_are_ended_where_nobody_can_be_asked(gpu: Gpu) -> None:
    gpu.notes._over.set()  # as where the store is gone
    gpu.notes._thread.join()
    gpu.notes._over.clear()
    gpu.notes.end()
    assert gpu.aborted == 1
