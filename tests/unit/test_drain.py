"""Device memory that a backward defers: the next forward drains it, behind the copies out of it.

The CPU has no events, so they are played: ops run in program order, and each gives an event that a
test lets happen. What waits for which is noted.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from megacompile import accumulate, megacompile
from megacompile.ir import ops
from megacompile.ir.stream import Stream
from megacompile.runtime.device.streams import Handle, Streams
from megacompile.runtime.updates.device_buffers import (
    Deferred,
    DeferredFrees,
    Landing,
    UpdateBuffer,
)
from tests import inside
from tests.zoo import WIDTH


class Event:
    """Stands in for an event behind an op."""

    happened = False

    def query(self) -> bool:
        return self.happened

    def synchronize(self) -> None:
        self.happened = True


class Queue(list[Any]):
    """Stands in for a compute stream: the events that it waits for."""

    def wait_event(self, event: Event) -> None:
        self.append(event)


class Played(Streams):
    """Streams that run everything at once, and note who waits for copies to the host."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.issued = 0
        self.fails_at = -1  # the op that raises, counted from the next one
        self.waits: list[tuple[int, list[Event]]] = []  # of computes: which op, for which copies

    def issue(self, stream: Stream, waits: Iterable[Handle], work: Callable[[], Any]) -> Handle:
        self.issued += 1
        self.fails_at -= 1
        if self.fails_at == 0:
            raise RuntimeError("planted")
        waits = tuple(waits)
        awaited: list[Any] = [h.event for h in waits if h.stream is Stream.D2H and h.event]
        if stream is Stream.COMPUTE and awaited:
            self.waits.append((self.issued, awaited))
        handle = super().issue(stream, (), work)
        handle.event = Event()  # type: ignore[assignment]
        return handle


class Tower(nn.Module):
    """Four layers; with `breaks`, two captured graphs."""

    def __init__(self, *, breaks: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.breaks = breaks

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:2]:
            x = torch.tanh(layer(x))
        if self.breaks:
            torch._dynamo.graph_break()
        for layer in self.layers[2:]:
            x = torch.tanh(layer(x))
        return x.square().mean()


class Subject:
    """A model whose backward updates, on played streams."""

    def __init__(self, *, breaks: bool = False) -> None:
        torch.manual_seed(0)
        torch.compiler.reset()
        self.model: Any = Tower(breaks=breaks)
        self.optimizer = AdamW(self.model.parameters(), lr=1e-2)
        megacompile(self.model, device="cpu", lowering="eager", optimizer=self.optimizer)
        streamed: Any = inside.streamed(self.model)
        machine = streamed.machine
        machine.streams = machine.gradients.streams = self.streams = Played()
        self.deferred_frees: DeferredFrees = machine.deferred

    @property
    def deferred(self) -> list[Deferred]:
        return self.deferred_frees._entries

    def forward(self) -> Tensor:
        """Gives the loss; `waits` are those of its compute stream for copies to the host."""
        self.streams.waits.clear()
        loss: Tensor = self.model(torch.ones(2, WIDTH))
        self.waits = list(self.streams.waits)
        return loss

    @property
    def drained(self) -> list[Event]:
        """The copies that the last forward waited for."""
        return [event for _, events in self.waits for event in events]

    def step(self) -> None:
        self.forward().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.fixture(autouse=True)
def queue(monkeypatch: pytest.MonkeyPatch) -> Iterator[Queue]:
    """The compute stream that the user is in."""
    made = Queue()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: made)
    yield made


def test_the_next_forward_waits_for_the_copies_and_lets_the_memory_go(
    monkeypatch: pytest.MonkeyPatch, queue: Queue
) -> None:
    subject = Subject()
    subject.step()
    copies: list[Any] = [entry.copied for entry in subject.deferred]
    updates = [entry for entry in subject.deferred if isinstance(entry.value, dict)]  # no norms
    memory = [weakref.ref(buffer.new) for entry in updates for buffer in entry.value.values()]
    del updates
    assert copies and memory and all(buffer() is not None for buffer in memory)
    before = subject.streams.issued
    queue.clear()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Queue())
    subject.forward()
    (at, waited), *others = subject.waits
    assert waited == copies and not others, "one op waits for all copies, and no other waits"
    assert queue == copies, "so does the stream whose memory it is"
    assert before < at < subject.streams.issued
    gc.collect()
    assert subject.deferred == [] and all(buffer() is None for buffer in memory)
    subject.forward()
    assert subject.drained == [], "it is given back once"


def test_every_loop_drains_what_was_deferred() -> None:
    """Once, half-way through the next forward, whatever comes between."""
    subject = Subject()
    first = subject.forward()
    assert subject.drained == [], "there is nothing yet"
    (executor,) = inside.executors(subject.model)
    nodes = ops.nodes_of(executor.schedule.forward, ops.forward, ops.drain)
    assert " ".join(map(ops.label, nodes)) == "0F 1F 2F DRAIN 3F"
    del first
    subject.step()
    waiting = subject.forward()
    assert subject.drained and not subject.deferred
    subject.forward().backward()  # another one, before the backward
    assert not subject.drained
    subject.optimizer.step()
    assert subject.deferred
    del waiting
    subject.model.eval()
    with torch.no_grad():
        subject.forward()
    assert subject.drained and not subject.deferred, "an evaluation drains too"
    subject.model.train()
    for _ in range(2):
        with accumulate(subject.model):  # leaves gradients, and defers nothing
            subject.forward().backward()
        assert not subject.deferred
        subject.step()
        assert subject.deferred


def test_the_first_of_several_graphs_reclaims_what_all_parked() -> None:
    subject = Subject(breaks=True)
    subject.step()
    assert len(inside.streamed(subject.model).graphs) == 2
    deferred = len(subject.deferred)
    assert deferred >= 2, "both backwards park"
    subject.step()
    assert len(subject.drained) == deferred and len(subject.waits) == 1
    assert len(subject.deferred) == deferred


def test_a_forward_that_fails_loses_nothing() -> None:
    """Before the drain all is still deferred, and the next forward takes it; then it is gone."""
    subject = Subject()
    before = subject.streams.issued
    subject.forward()
    length = subject.streams.issued - before
    subject.step()
    deferred = len(subject.deferred)
    for behind in (False, True):
        subject.streams.fails_at = length if behind else 2
        with pytest.raises(RuntimeError, match="planted"):
            subject.forward()
        assert len(subject.deferred) == (0 if behind else deferred)
        subject.step()
        assert len(subject.drained) == (0 if behind else deferred)
        assert len(subject.deferred) == deferred


def test_where_no_forward_comes_memory_goes_once_its_copy_is_done() -> None:
    deferred = DeferredFrees()
    queue: Any = Queue()
    events: list[Any] = [Event() for _ in range(3)]
    for event in events[:2]:
        deferred.add(Deferred("old", event, queue))
    events[0].happened = True
    deferred.add(Deferred("new", events[2], queue))
    assert [entry.copied for entry in deferred.take()] == events[1:]


def test_parameters_that_have_another_name_are_read_on_the_host() -> None:
    """Somebody may write under it."""
    subject = Subject()
    bucket = next(iter(inside.buckets(subject.model).values()))
    buffers = {0: UpdateBuffer(torch.ones(1), None, ())}
    landing = Landing(bucket, None, None)  # type: ignore[arg-type]
    landing.stays(buffers)
    assert landing.fresh.keys() == {0}
    landing.fresh.clear()
    alias = bucket.params[0].detach()
    landing.stays(buffers)
    assert landing.fresh == {}
    del alias
