"""Shared code of all ops: an op issues its work on its stream after its waits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from megacompile import compat
from megacompile.ir.schedule import Schedule
from megacompile.ir.stages import Code
from megacompile.ir.stream import Stream
from megacompile.runtime.device.replay import Replay
from megacompile.runtime.device.streams import Handle
from megacompile.runtime.disk.transfers import Request
from megacompile.runtime.ops.machine import Machine
from megacompile.runtime.updates.update import BucketUpdate
from megacompile.views.recorder import Recording

Group = dict[int, torch.Tensor]  # parameter's index in its bucket -> gradient


class OpGroup:
    """A group of ops of one graph of a schedule, bound to a machine."""

    def __init__(self, schedule: Schedule, machine: Machine) -> None:
        self.machine = machine
        self.gradient_params = schedule.gradient_params
        self.captures = schedule.plan.cuda_graphs
        self.replays: dict[Code, Replay] = {}
        self.recording: Recording | None = None  # of the current run
        self.in_step = False  # True for the graph of `optimizer.step()`
        self.parts: Mapping[int, BucketUpdate] = {}  # of the current step, by bucket key
        self.resident_parts = 0  # of these, the work on resident buckets
        # tensors, their new values, and whether to bump the version counter
        self.to_write: list[tuple[Handle, Handle, bool]] = []
        self.residents: list[tuple[BucketUpdate, Any]] = []  # updates so far, and their `after`

    def _issue(self, stream: Stream, waits: Any, work: Callable[[], Any]) -> Handle:
        if self.recording is not None:
            work = self.recording.timed(work)
        if self.to_write:
            write_assigned(self)
        return self.machine.streams.issue(stream, handles(waits), work)

    def _note(self, request: Request | None) -> None:
        """Record the times of a read or a write in a trace."""
        if self.recording is not None and request is not None:
            note, lane = self.recording.noted_later(), request.way.value
            request.when_done(lambda: note(lane, request.began_s, request.ended_s))

    def _issue_many(self, waits: Any, work: Callable[[], Sequence[Any]]) -> tuple[Handle, ...]:
        whole = self._issue(Stream.COMPUTE, waits, work)
        event = whole.event
        return tuple([Handle(value, Stream.COMPUTE, event) for value in whole.value])


def nothing() -> None:
    """The work of an op that only waits."""


def write_assigned(group: OpGroup) -> None:
    """Write the collected new values in a few launches."""
    assigned, group.to_write = group.to_write, []
    by_dtype: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for tensor, new, counted in assigned:
        target = tensor.value
        targets, values = by_dtype.setdefault(target.dtype, ([], []))
        targets.append(target if counted else target.data)
        values.append(new.value)
    for targets, values in by_dtype.values():
        compat.FOREACH_COPY(targets, values)


def handles(values: Any) -> list[Handle]:
    """The handles in nested tuples."""
    found: list[Handle] = []
    for value in values:
        if isinstance(value, Handle):
            found.append(value)
        elif value and isinstance(value, tuple):
            found += handles(value)
    return found
