"""Runs passes and records each one's input, output and time in `Schedule.history` and in the log.

A draft has no history: it is only simulated, and there are many of them.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from megacompile import log
from megacompile.ir import ops
from megacompile.ir.capture import Capture
from megacompile.ir.schedule import PassRecord, Schedule

SchedulePass = tuple[str, Callable[[Schedule], Schedule]]
CapturePass = tuple[str, Callable[[Capture], Capture | tuple[Capture, tuple[str, ...]]]]


def run(schedule: Schedule, passes: Sequence[SchedulePass]) -> Schedule:
    """Run passes, each a name and a function."""
    for name, function in passes:
        if schedule.draft:
            schedule = function(schedule)
        else:
            schedule = timed(name, schedule, functools.partial(function, schedule))
    return schedule


def timed(
    name: str,
    before: Schedule | None,
    function: Callable[[], Schedule],
    history: tuple[PassRecord, ...] = (),
) -> Schedule:
    """Run a pass and record it.

    Args:
        before: the pass's input; None if only `history` precedes it.
    """
    start = time.perf_counter()
    after = function()
    record = PassRecord(
        name=name,
        before="" if before is None else _actions(before),
        after=_actions(after),
        time_s=time.perf_counter() - start,
        nodes=sum(len(graph.nodes) for graph in after.graphs.values()),
    )
    history = history if before is None else before.history
    log.pass_done(after.name, record, history[-1].nodes if history else 0)
    return replace(after, history=(*history, record))


def _actions(schedule: Schedule) -> str:
    return "\n".join(ops.actions(graph) for graph in schedule.graphs.values())


class Rewritten(NamedTuple):
    """A captured graph after the passes on it."""

    capture: Capture
    reasons: tuple[str, ...]  # of the passes, for the plan
    history: tuple[PassRecord, ...]


def run_on_capture(capture: Capture, passes: Sequence[CapturePass]) -> Rewritten:
    """Run passes on a captured graph, each a name and a function."""
    reasons: tuple[str, ...] = ()
    history: tuple[PassRecord, ...] = ()
    for name, function in passes:
        start = time.perf_counter()
        result = function(capture)
        after, why = (result, ()) if isinstance(result, Capture) else result
        record = PassRecord(
            name=name,
            before=_called(capture),
            after=_called(after),
            time_s=time.perf_counter() - start,
            nodes=len(after.module.graph.nodes),
        )
        log.pass_done(after.name, record, history[-1].nodes if history else 0)
        capture, reasons, history = after, (*reasons, *why), (*history, record)
    return Rewritten(capture, reasons, history)


def _called(capture: Capture) -> str:
    """Names of the call nodes of a captured graph."""
    return " ".join(n.name for n in capture.module.graph.nodes if n.op.startswith("call_"))
