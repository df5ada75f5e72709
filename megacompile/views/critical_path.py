"""The critical path of a measured step: the ops that it waited for, followed back from its end.

An op starts when the op before it on its stream is done and so is everything else that it waits
for; it waited for the one that was done last. From the last op of a step back to its beginning
these are a path without overlaps, whose pieces by stream say what the step's time went to: a stream
can be busy all the time and not be waited for. The method is that of the critical path of a
program's activity graph (Yang and Miller, "Critical path analysis for the execution of parallel and
distributed programs", 1988); `megacompile.cost.simulate` does the same for what it predicts.

The waits of an op are known: the schedule's edges within a graph, and the tokens between graphs.
The simulation knows which of them was the last one; here that is concluded from the times. Time on
the path in which no recorded op ran (the host had not issued the next one yet, or something was at
work that is no op of a schedule) belongs to none of the streams.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from megacompile.ir import ops
from megacompile.ir.edges import Handed, handed, stands_for, waits_for
from megacompile.ir.ops import Part
from megacompile.ir.schedule import Schedule
from megacompile.ir.values import producer, reads
from megacompile.views.timeline import COMM, UPDATERS, Span, Timeline

NONE = "none of them"  # where no recorded op was what the step waited for
_CLOCK_S = 20e-6  # by how much the clocks of two lanes, or an event's, may be apart


@dataclass(frozen=True, slots=True)
class Period:
    """Steps in the middle of training, one after the other; seconds of the timeline's axis."""

    start_s: float
    stop_s: float
    steps: int

    @property
    def step_s(self) -> float:
        return (self.stop_s - self.start_s) / self.steps


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a critical path: a span of it, or a time in which there was none."""

    span: Span | None
    start_s: float
    stop_s: float

    @property
    def lane(self) -> str:
        return NONE if self.span is None else self.span.op.lane


def period(timeline: Timeline, model: str, *, last: int | None = None) -> Period | None:
    """From the end of the first backward's computes to the end of the last one's.

    Where there are fewer than two backwards it is everything that ran; None if nothing did.
    With several captured graphs, the backward is that of the first, which ends a step.

    Args:
        last: only so many of the last steps; default: all of them.
    """
    ends = step_ends(timeline, model)
    if last is not None:
        ends = ends[-last - 1 :]
    if len(ends) > 1:
        return Period(ends[0], ends[-1], len(ends) - 1)
    spans = [span for span in timeline.spans if span.model == model]
    if not spans:
        return None
    start, stop = min(s.start_s for s in spans), max(s.stop_s for s in spans)
    return Period(start, stop, max(1, len(ends)))


def step_ends(timeline: Timeline, model: str) -> list[float]:
    """When the computes of each step ended; seconds of the timeline's axis."""
    return _ends(timeline, model, "backward") or _ends(timeline, model, "forward")


def _ends(timeline: Timeline, model: str, graph: str) -> list[float]:
    """When the computes of each run ended, of the schedule that ran most often."""
    last: dict[int, float] = {}
    for span in timeline.spans:
        if span.model == model and span.run >= 0 and span.op.lane == "compute":
            last[span.run] = max(last.get(span.run, span.stop_s), span.stop_s)
    runs: defaultdict[int, list[float]] = defaultdict(list)
    for i, run in enumerate(timeline.runs):
        if i in last and run.graph == graph:
            runs[id(run.schedule)].append(last[i])
    forwards = [id(run.schedule) for run in timeline.runs if run.graph == "forward"]
    order = {schedule: place for place, schedule in reversed(list(enumerate(forwards)))}
    most = max(runs, key=lambda key: (len(runs[key]), -order.get(key, 0)), default=None)
    return [] if most is None else sorted(runs[most])


def critical_path(timeline: Timeline, model: str, within: Period | None = None) -> list[Chunk]:
    """The pieces of the path that ends with a period, in the order of time.

    Args:
        timeline: measured; of a predicted one, too.
        model: whose ops are looked at.
        within: default: `period(timeline, model)`.

    Returns:
        Nothing for a timeline that was read from a file: that has no schedule, and so no edges.
    """
    within = within or period(timeline, model)
    if within is None or any(run.schedule is None for run in timeline.runs):
        return []
    known = _Ops(timeline, model)
    at = known.ending(within.stop_s)
    now, chunks = within.stop_s, list[Chunk]()
    while at >= 0 and now > within.start_s:
        span = known.spans[at]
        if span.stop_s < now:  # nothing of what is recorded: wait for the next one
            chunks.append(Chunk(None, max(span.stop_s, within.start_s), now))
            now = span.stop_s
        if min(span.start_s, now) < now and now > within.start_s:
            chunks.append(Chunk(span, max(span.start_s, within.start_s), now))
            now = span.start_s
        at = known.blocker(at)
    if now > within.start_s:
        chunks.append(Chunk(None, within.start_s, now))
    return chunks[::-1]


def waited_s(chunks: Sequence[Chunk]) -> dict[str, float]:
    """Seconds of a path by lane, `NONE` among them, the most first."""
    found: defaultdict[str, float] = defaultdict(float)
    for chunk in chunks:
        found[chunk.lane] += chunk.stop_s - chunk.start_s
    return dict(sorted(found.items(), key=lambda item: -item[1]))


@dataclass(frozen=True, slots=True)
class StepFigures:
    """The figures that a trace has of a model's steps; seconds of one step, by stream."""

    step_s: float
    busy_s: Mapping[str, float]
    waited_s: Mapping[str, float]  # with `NONE`


def traced_steps(timeline: Timeline, model: str) -> StepFigures | None:
    """The steps of `period`, on average; None where the model did not run."""
    found = period(timeline, model)
    if found is None or not any(run.model == model for run in timeline.runs):
        return None
    waited = waited_s(critical_path(timeline, model, found))
    within = found.start_s, found.stop_s
    return StepFigures(
        found.step_s,
        {lane: timeline.busy_s(lane, model, within) / found.steps for lane in timeline.lanes},
        {lane: time_s / found.steps for lane, time_s in waited.items()},
    )


class _Ops:
    """The spans of a model, and the spans that each may have waited for."""

    def __init__(self, timeline: Timeline, model: str) -> None:
        chosen = [span for span in timeline.spans if span.model == model]
        self.spans = sorted(chosen, key=lambda span: (span.start_s, span.stop_s))
        self.timeline = timeline
        self.before: list[int] = []  # on the same lane, or -1
        last: dict[str, int] = {}
        for i, span in enumerate(self.spans):
            lane = span.op.lane
            if timeline.device == "cpu" and lane not in UPDATERS:
                lane = "issue"  # without a GPU every op runs where it is issued, one at a time
            self.before.append(last.get(lane, -1))
            last[lane] = i
        self.waits: dict[int, list[int]] = {}  # for those of other lanes
        self.begins: set[int] = set()  # they begin a graph's lane
        self._find_edges()

    def _find_edges(self) -> None:
        members: defaultdict[int, list[int]] = defaultdict(list)
        for i, span in enumerate(self.spans):
            if span.run >= 0:
                members[span.run].append(i)
        known: dict[tuple[int, str], RecordedEdges] = {}
        made: dict[Handed, list[int]] = {}  # by earlier graphs
        for run in sorted(members):  # as they were issued
            schedule, graph = self.timeline.runs[run].schedule, self.timeline.runs[run].graph
            assert schedule is not None
            key = id(schedule), graph
            if key not in known:
                known[key] = recorded_edges(schedule, graph)
            place = self._named(members[run])
            self._add_run(known[key], place, made)
            for what, names in known[key].hands_on.items():
                made[what] = [place[name] for name in names if name in place]

    def _named(self, members: Sequence[int]) -> dict[_Name, int]:
        counts: defaultdict[str, int] = defaultdict(int)
        place: dict[_Name, int] = {}
        for i in members:
            op = self.spans[i].op
            place[op.name, counts[op.name]] = i
            counts[op.name] += 1
        return place

    def _add_run(
        self,
        of_graph: RecordedEdges,
        place: Mapping[_Name, int],
        made: Mapping[Handed, list[int]],
    ) -> None:
        lanes: set[str] = set()
        for name, i in place.items():
            own = [place[wait] for wait in of_graph.waits.get(name, ()) if wait in place]
            takes = of_graph.takes.get(name, ())
            self.waits[i] = own + [at for what in takes for at in made.get(what, ())]
            if self.spans[i].op.lane not in lanes and not own:
                self.begins.add(i)
            lanes.add(self.spans[i].op.lane)

    def ending(self, at_s: float) -> int:
        """The span that ends at a time: of several, the one that ended last before it."""
        able = [i for i, span in enumerate(self.spans) if span.stop_s <= at_s]
        return max(able, key=lambda i: self.spans[i].stop_s, default=-1)

    def blocker(self, at: int) -> int:
        """The one that ended last of those that a span waited for; -1: none."""
        span = self.spans[at]
        able = [self.before[at], *self.waits.get(at, ())]
        if at in self.begins:
            able += self._latest(range(at), span)  # the host came to this graph when that was done
        if self._graph_of(at) == "update":  # which a backward that has returned comes before
            able += self._latest([i for i in range(at) if self._graph_of(i) == "backward"], span)
        # An op that began later was not waited for; so the way back comes to an end.
        able = [i for i in able if 0 <= i < at and self._done_before(i, span)]
        return max(able, key=lambda i: self.spans[i].stop_s, default=-1)

    def _latest(self, able: Sequence[int], span: Span) -> list[int]:
        done = [i for i in able if self._done_before(i, span)]
        return [max(done, key=lambda i: (self.spans[i].stop_s, i))] if done else []

    def _done_before(self, i: int, span: Span) -> bool:
        return self.spans[i].stop_s <= span.start_s + _CLOCK_S

    def _graph_of(self, i: int) -> str:
        run = self.spans[i].run
        return self.timeline.runs[run].graph if run >= 0 else ""


_Name = tuple[str, int]  # as printed, and which one of those that print alike


@dataclass(frozen=True, slots=True)
class RecordedEdges:
    """The ops that those of a graph wait for, and those that ops of later graphs may wait for."""

    waits: Mapping[_Name, Sequence[_Name]]  # of other streams of the graph
    takes: Mapping[_Name, Sequence[Handed]]  # from earlier graphs
    hands_on: Mapping[Handed, Sequence[_Name]]  # to later graphs, with the ops that made it


def recorded_edges(schedule: Schedule, graph_name: str) -> RecordedEdges:
    """The edges that the runtime keeps, by op.

    What is not recorded hands on its waits to the next op of its stream: a `free` after a copy.
    """
    names: dict[fx.Node, _Name] = {}
    counts: defaultdict[str, int] = defaultdict(int)
    handed_on: defaultdict[object, list[_Name]] = defaultdict(list)
    waits: dict[_Name, list[_Name]] = {}
    takes: dict[_Name, list[Handed]] = {}
    for node in ops.nodes_of(schedule.graphs[graph_name]):
        op = ops.effects(node)
        if not op.waits:
            continue
        stream, made = ops.stream_of(node), [*map(producer, waits_for(node))]
        own = [names[n] for n in made if n in names and ops.stream_of(n) is not stream]
        if not op.issues:
            handed_on[stream] += own
            continue
        label = ops.label(node)
        names[node] = label, counts[label]
        counts[label] += 1
        waits[names[node]] = list(dict.fromkeys([*own, *handed_on.pop(stream, ())]))
        takes[names[node]] = [stands_for(schedule, n) for n in made if n.op == "placeholder"]
    hands_on = {}
    for what, node in handed(schedule, graph_name).items():
        is_part = isinstance(what[1], Part)  # new values of it: with the ops that made them
        makers = [node, *map(producer, reads(node))] if is_part else [node]
        hands_on[what] = [names[n] for n in makers if n in names]
    return RecordedEdges(waits, takes, hands_on)


# Finds the rank that comes last, by what all of them have measured.
#
# Ranks meet in every collective, so the steps of all ranks take equally long. The rank that comes
# last waits for no rank: its critical path (`megacompile.views.critical_path`) has less time in
# collectives than those of the others. On the CPU ranks also meet before a graph, where no op runs.


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
