"""Predicts when each op of a schedule runs by simulating its streams and the resources they share.

An op starts when the previous op of its stream and everything that it waits for are done: the edges
that `megacompile.verify` checks and the runtime keeps, within and between graphs, and the host's
waits (`megacompile.cost.script`). The costs of computes come from `megacompile.cost.ops`, those of
updates from `megacompile.cost.optimizer`; the rates of copies and updates depend on what else runs
(`megacompile.cost.queues`). Times are in seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from megacompile.cost.hardware import Hardware
from megacompile.cost.optimizer import OptimizerCost
from megacompile.cost.queues import STREAMS, Queues
from megacompile.cost.script import Script, Steps
from megacompile.ir.schedule import Schedule
from megacompile.ir.stream import Stream


@dataclass(frozen=True, slots=True)
class Event:
    """One op in the predicted timeline."""

    graph: str  # "forward", "backward" or "update"
    label: str
    stream: Stream
    start_s: float
    stop_s: float
    step: int = 0


@dataclass(frozen=True)
class Prediction:
    """The predicted run of one or more steps."""

    total_s: float  # from start to end
    step_s: float  # from the end of the second-to-last step to the end of the last
    start_s: float  # start of that period
    critical_s: Mapping[Stream, float]  # of that period, by the stream on the critical path
    _run: Queues = field(repr=False, compare=False)

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """Events of all steps, ordered by their ends."""
        run, found = self._run, []
        for i in sorted(range(len(run.works)), key=run.stop_s.__getitem__):
            work = run.works[i]
            start_s = run.start_s[i if work.since < 0 else work.since]
            if work.label:
                place = (work.graph, work.label, STREAMS[work.queue])
                found.append(Event(*place, start_s, run.stop_s[i], work.step))
        return tuple(found)

    @property
    def uses_host(self) -> bool:
        """True if anything is updated in host memory; otherwise the host's update rate is
        irrelevant."""
        return self._run.uses_host

    def busy_s(self, stream: Stream) -> float:
        """Busy seconds of a stream in the last step's period."""
        start_s, stop_s = self.start_s, self.start_s + self.step_s
        spans = ((e.start_s, e.stop_s) for e in self.events if e.stream is stream)
        return sum(max(0.0, min(stop, stop_s) - max(start, start_s)) for start, stop in spans)

    @property
    def bound(self) -> Stream:
        """The stream that the step waits for the longest."""
        return max(Stream, key=lambda stream: self.critical_s.get(stream, 0.0))

    def __str__(self) -> str:
        lines = [f"{self.step_s * 1e3:.1f} ms predicted, bound by {self.bound.value}"]
        for stream in Stream:
            busy, critical = self.busy_s(stream), self.critical_s.get(stream, 0.0)
            if busy or stream.in_every_step:
                share = (busy / self.step_s, critical / self.step_s) if self.step_s else (0.0, 0.0)
                lines.append(
                    f"{stream.value:8} {busy * 1e3:9.1f} ms busy, {share[0]:4.0%}; "
                    f"critical path {share[1]:4.0%}"
                )
        return "\n".join(lines)


def simulate(
    schedule: Schedule | Sequence[Schedule],
    hardware: Hardware,
    *,
    optimizer: OptimizerCost | None = None,
    steps: int = 1,
    fused: bool = True,
) -> Prediction:
    """Predict `steps` steps on `hardware`.

    Args:
        schedule: one, or one for each captured graph of a model; their forwards run in order, their
            backwards in reverse.
        optimizer: its costs; None: no updates.
        steps: one runs from idle to idle; with three, the period of the last is a training step.
        fused: elementwise operations are fused (lowering "inductor").
    """
    schedules = [schedule] if isinstance(schedule, Schedule) else list(schedule)
    return simulate_script(Script(schedules, optimizer, fused=fused), hardware, steps=steps)


def simulate_script(script: Script, hardware: Hardware, *, steps: int = 1) -> Prediction:
    """Like `simulate`, with a script, which can be reused for all machines."""
    run, added = Queues(hardware), Steps(script, hardware)
    ends = [added.add(run, step) for step in range(steps)]
    run.go()
    start = run.stop_s[ends[-2]] if steps > 1 else 0.0
    total = max(run.stop_s, default=0.0)
    stop = run.stop_s[ends[-1]] if steps > 1 else total
    last = ends[-1] if steps > 1 else max(range(len(run.works)), key=run.stop_s.__getitem__)
    return Prediction(
        total_s=total,
        step_s=stop - start,
        start_s=start,
        critical_s=run.critical(last, start),
        _run=run,
    )
