"""Finds the rank that comes last, by what all of them have measured.

Ranks meet in every collective, so the steps of all ranks take equally long. The rank that comes
last waits for no rank: its critical path (`megacompile.tracing.critical_path`) has less time in
collectives than those of the others. On the CPU ranks also meet before a graph, where no op runs.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megacompile.tracing.critical_path import NONE, critical_path, period, step_ends, traced_steps
from megacompile.tracing.timeline import COMM, Timeline


@dataclass(frozen=True, slots=True)
class RankSteps:
    """The figures that a trace has of the steps of one rank; seconds."""

    rank: int  # of all processes
    host: str
    step_s: float  # a step
    busy_s: Mapping[str, float]  # of a step, by stream
    waited_s: tuple[float, ...]  # of each step, for other ranks


@dataclass(frozen=True, slots=True)
class LastRank:
    """The rank that the others wait for."""

    rank: int
    host: str
    steps: int  # in which it came last
    of: int  # of so many
    step_s: float
    lane: str  # what takes it longer than the others; `NONE`: nothing that was recorded
    busy_s: float  # a step, of that
    others_busy_s: float  # the median of theirs
    waited_s: float  # how much longer than it the others wait in a step (their median)


def rank_steps(timeline: Timeline, model: str, rank: int, host: str) -> RankSteps | None:
    """The figures that one rank sends to the others; None where the model did not run."""
    steps, within = traced_steps(timeline, model), period(timeline, model)
    if steps is None or within is None:
        return None
    meets = (COMM, NONE) if timeline.device == "cpu" else (COMM,)
    waits = [c for c in critical_path(timeline, model, within) if c.lane in meets]
    ends = [end for end in step_ends(timeline, model) if end < within.stop_s]
    edges = [within.start_s, *(end for end in ends if end > within.start_s), within.stop_s]
    waited = tuple(
        sum(max(0.0, min(c.stop_s, stop) - max(c.start_s, start)) for c in waits)
        for start, stop in zip(edges, edges[1:], strict=False)
    )
    return RankSteps(rank, host, steps.step_s, dict(steps.busy_s), waited)


def last_rank(ranks: Sequence[RankSteps]) -> LastRank | None:
    """The rank that came last in most steps; None where there is nothing to compare."""
    count = min((len(each.waited_s) for each in ranks), default=0)
    if len(ranks) < 2 or not count:
        return None
    waited = [each.waited_s[-count:] for each in ranks]
    firsts = [min(range(len(ranks)), key=lambda r: waited[r][k]) for k in range(count)]
    at = max(range(len(ranks)), key=lambda r: (firsts.count(r), -sum(waited[r])))
    last, others = ranks[at], [each for each in ranks if each is not ranks[at]]
    theirs = statistics.median(sum(each.waited_s[-count:]) for each in others)
    lanes = {lane: _median(others, lane) for lane in last.busy_s if lane != COMM}
    lane = max(lanes, key=lambda name: last.busy_s[name] - lanes[name], default=NONE)
    if lane == NONE or last.busy_s[lane] <= lanes[lane]:
        lane, lanes = NONE, {NONE: 0.0}
    return LastRank(
        last.rank,
        last.host,
        firsts.count(at),
        count,
        last.step_s,
        lane,
        last.busy_s.get(lane, 0.0),
        lanes[lane],
        (theirs - sum(waited[at])) / count,
    )


def _median(ranks: Sequence[RankSteps], lane: str) -> float:
    return statistics.median(each.busy_s.get(lane, 0.0) for each in ranks)
