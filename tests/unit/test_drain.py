"""Memory whose free a backward defers is drained by the next forward, after the copies out of it.

The CPU has no events, so they are played: ops run in program order, and each gives an event that
has not happened. What waits for which is noted.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch.optim import AdamW

from megacompile import accumulate, megacompile
from megacompile.ir import ops
from megacompile.ir.stream import Stream
from tests import inside
from tests.zoo import Stack


class Event:
    """Stands in for an event after an op."""

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        pass


class Queue(list[Any]):
    """Stands in for a compute stream: the events that it waits for."""

    def wait_event(self, event: Event) -> None:
        self.append(event)


class Played:
    """Runs everything in program order and records the waits for copies to the host."""

    def __init__(self, machine: Any) -> None:
        self.streams = machine.streams
        self.fails_in = 0  # ops; 0: none fails
        self.waits: list[list[Any]] = []  # of computes, for copies
        self.issued: Callable[..., Any] = self.streams.issue
        self.streams.issue = self.issue

    def issue(self, stream: Stream, waits: Iterable[Any], work: Callable[[], Any]) -> Any:
        self.fails_in -= 1
        if self.fails_in == 0:
            raise RuntimeError("planted")
        awaited = [h.event for h in waits if h.stream is Stream.D2H and h.event]
        if stream is Stream.COMPUTE and awaited:
            self.waits.append(awaited)
        handle = self.issued(stream, (), work)
        handle.event = Event()
        return handle


def test_every_loop_drains_what_was_deferred(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, half-way through the next forward, whatever comes between; memory goes then."""
    queue = Queue()  # the compute stream that the user is in
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: queue)
    model: Any = Stack(layers=4)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    megacompile(model, device="cpu", lowering="eager", optimizer=optimizer)
    machine: Any = inside.machine(model)
    streams = Played(machine)

    def deferred() -> list[Any]:
        return list(machine.deferred._entries)

    drained: list[Any] = []  # the copies that computes of the last forward waited for

    def forward() -> Any:
        streams.waits.clear()
        loss = model(torch.ones(2, 16)).mean()
        drained[:] = streams.waits
        return loss

    def step() -> None:
        forward().backward()
        optimizer.step()
        optimizer.zero_grad()

    first = forward()
    assert not drained, "there is nothing yet"
    (executor,) = inside.executors(model)
    nodes = ops.nodes_of(executor.schedule.forward, ops.forward, ops.drain)
    labels = [ops.label(node) for node in nodes]
    assert labels.count("DRAIN") == 1 and 0 < labels.index("DRAIN") < len(labels) - 1
    del first
    step()
    copies = [entry.copied for entry in deferred()]
    updates = [entry for entry in deferred() if isinstance(entry.value, dict)]  # no norms
    memory = [weakref.ref(buffer.new) for entry in updates for buffer in entry.value.values()]
    del updates
    assert copies and memory and all(buffer() is not None for buffer in memory)
    streams.fails_in = 2
    with pytest.raises(RuntimeError, match="planted"):
        forward()
    assert len(deferred()) == len(copies), "a forward that fails before the drain loses nothing"
    queue.clear()
    waiting = forward()
    assert drained == [copies], "one op waits for all copies, and no other waits"
    assert queue == copies, "so does the stream whose memory it is"
    gc.collect()
    assert not deferred() and all(buffer() is None for buffer in memory)
    forward().backward()  # another one, before the backward
    assert not drained, "it is given back once"
    optimizer.step()
    assert deferred()
    del waiting
    model.eval()
    with torch.no_grad():
        forward()
    assert drained and not deferred(), "an evaluation drains too"
    model.train()
    with accumulate(model):  # leaves gradients, and defers nothing
        forward().backward()
    assert not deferred()
    step()
    assert deferred()
