"""Holds the updates of a `step()` back, so that a test can act while they are in flight."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from torch.optim import Optimizer

from megacompile.runtime.updates.flight import Flight
from megacompile.runtime.updates.host import HostUpdates
from megacompile.runtime.updates.part import BucketPart
from megacompile.runtime.updates.update import BucketUpdate
from tests.training import adamw, gradients, net, train
from tests.zoo import twins


class Gate:
    """Lets an update of a bucket run only when it is held no more, or when somebody waits for it.

    `waited` are the buckets that were waited for before they were done; `ran` those that are done.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.held = False
        self.waited: list[str] = []
        self.ran: list[str] = []
        self.fails = ""  # the bucket whose update raises
        self._queue: list[tuple[BucketUpdate, threading.Event]] = []
        run, wait, start = BucketUpdate.__call__, Flight.wait, HostUpdates.start

        def gated_start(updates: HostUpdates, part: BucketPart, *others: Any) -> Flight:
            may = threading.Event()
            if not self.held:
                may.set()
            self._queue.append((part.update, may))
            return start(updates, part, *others)

        def gated_run(update: BucketUpdate) -> None:
            name = update.bucket.layout.name
            assert next(may for queued, may in self._queue if queued is update).wait(60)
            if name == self.fails:
                raise ArithmeticError("out of numbers")
            run(update)
            self.ran.append(name)

        def gated_wait(flight: Any) -> None:
            if not flight.done():
                if self.held:
                    self.waited.append(flight.name)
                self.open(flight.name)
            wait(flight)

        monkeypatch.setattr(HostUpdates, "start", gated_start)
        monkeypatch.setattr(BucketUpdate, "__call__", gated_run)
        monkeypatch.setattr(Flight, "wait", gated_wait)

    def reuse(self) -> None:
        self.held = True
        self._queue.clear()
        self.ran.clear()

    def open(self, last: str | None = None) -> None:
        """All of them, or those up to `last`: one thread runs them in order."""
        names = self.names()
        count = len(names) - names[::-1].index(last) if last in names else len(names)
        for _, may in self._queue[:count]:
            may.set()

    def names(self) -> list[str]:
        """The buckets whose updates were started."""
        return [update.bucket.layout.name for update, _ in self._queue]


Pair = tuple[Any, Optimizer]


def in_flight(gate: Gate, **options: Any) -> tuple[Pair, Pair]:
    """(plain, its optimizer), (streamed, its optimizer): the third step of the latter is held."""
    plain, streamed = twins(net(), **options)
    (mine,), (theirs,) = adamw(plain), adamw(streamed)
    train(plain, [mine], 3)
    train(streamed, [theirs], 2)
    theirs.zero_grad()
    gradients(streamed, 2)
    gate.reuse()
    theirs.step()
    assert (gate.ran, gate.waited) == ([], []), "step() does not wait"
    return (plain, mine), (streamed, theirs)
