"""Finds the critical path of a measured step: the ops that it waited for, from its end back.

An op starts when the previous op of its stream and everything else that it waits for (the
schedule's edges within a graph, the tokens between graphs) are done; it waited for the last of
these, which is inferred from the times. The path back from the last op of a step has no overlaps
(Yang and Miller, "Critical path analysis for the execution of parallel and distributed programs",
1988); `megacompile.cost.simulate` does the same for predictions.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import fx

from megacompile.ir import ops
from megacompile.ir.edges import Handed, handed, stands_for
from megacompile.ir.ops import Part
from megacompile.ir.schedule import Schedule
from megacompile.ir.values import producer, reads
from megacompile.views.timeline import COMM, UPDATERS, Span, Timeline

NONE = "none of them"  # the step waited for no recorded op
_CLOCK_S = 20e-6  # possible error between the clocks of two lanes, or of an event


@dataclass(frozen=True, slots=True)
class Period:
    """Consecutive steps in the middle of training, in seconds of the timeline's axis."""

    start_s: float
    stop_s: float
    steps: int

    @property
    def step_s(self) -> float:
        return (self.stop_s - self.start_s) / self.steps


def period(timeline: Timeline, model: str) -> Period | None:
    """The period from the end of the first backward's computes to the end of the last one's. With
    fewer than two backwards it covers everything that ran; None if nothing did."""
    ends = _step_ends(timeline, model)
    if len(ends) > 1:
        return Period(ends[0], ends[-1], len(ends) - 1)
    spans = [span for span in timeline.spans if span.model == model]
    if not spans:
        return None
    start, stop = min(s.start_s for s in spans), max(s.stop_s for s in spans)
    return Period(start, stop, max(1, len(ends)))


def _step_ends(timeline: Timeline, model: str) -> list[float]:
    """The end of each step's computes, in seconds of the timeline's axis."""
    last: dict[int, float] = {}  # of each run
    for span in timeline.spans:
        if span.model == model and span.op.lane == "compute":
            last[span.run] = max(last.get(span.run, span.stop_s), span.stop_s)
    for graph in ("backward", "forward"):
        runs: dict[int, list[float]] = {id(run.schedule): [] for run in timeline.runs}
        for i, run in enumerate(timeline.runs):
            if i in last and run.graph == graph:
                runs[id(run.schedule)].append(last[i])
        if ends := max(runs.values(), key=len, default=[]):  # of the schedule that ran most often
            return sorted(ends)
    return []


def critical_path(timeline: Timeline, model: str, within: Period) -> dict[str, float]:
    """Seconds of the path that ends at the end of a period, by lane, the longest first. `NONE` has
    the gaps without a span."""
    chosen = [span for span in timeline.spans if span.model == model]
    spans = sorted(chosen, key=lambda span: (span.start_s, span.stop_s))
    waits, begins = _waits(timeline, spans)
    graphs = [timeline.runs[span.run].graph for span in spans]
    found: defaultdict[str, float] = defaultdict(float)

    def last_of(indices: Iterable[int], by_s: float) -> int:
        """Index of the span that ended last among those that end by a time; -1: none."""
        done = [i for i in indices if spans[i].stop_s <= by_s]
        return max(done, key=lambda i: (spans[i].stop_s, i), default=-1)

    def blocker(at: int) -> int:
        start = spans[at].start_s + _CLOCK_S
        able = [i for i in waits[at] if i < at]  # only earlier ones, so that the path ends
        if at in begins:
            able += [last_of(range(at), start)]  # the host began this graph after that
        if graphs[at] == "update":  # the step begins after a backward has returned
            able += [last_of((i for i in range(at) if graphs[i] == "backward"), start)]
        return last_of((i for i in able if i >= 0), start)

    at, now = last_of(range(len(spans)), within.stop_s), within.stop_s
    while now > within.start_s:
        start_s, lane = within.start_s, NONE  # no op ran earlier
        if at >= 0 and spans[at].stop_s < now:  # a gap without recorded ops
            start_s = max(spans[at].stop_s, start_s)
        elif at >= 0:
            start_s, lane = max(spans[at].start_s, start_s), spans[at].op.lane
            at = blocker(at)
        if start_s < now:
            found[lane] += now - start_s
            now = start_s
    return dict(sorted(found.items(), key=lambda item: -item[1]))


@dataclass(frozen=True, slots=True)
class StepFigures:
    """A model's steps in a trace: seconds per step, by stream."""

    step_s: float
    busy_s: Mapping[str, float]
    waited_s: Mapping[str, float]  # including `NONE`


def traced_steps(timeline: Timeline, model: str) -> StepFigures | None:
    """Averages over the steps of `period`; None if the model did not run."""
    found = period(timeline, model)
    if found is None:
        return None
    within = found.start_s, found.stop_s
    return StepFigures(
        found.step_s,
        {lane: timeline.busy_s(lane, model, within) / found.steps for lane in timeline.lanes},
        {k: v / found.steps for k, v in critical_path(timeline, model, found).items()},
    )


def _waits(timeline: Timeline, spans: Sequence[Span]) -> tuple[list[list[int]], set[int]]:
    """For each span, the spans that it may have waited for; and the first span of each lane of a
    run, if it waits for no span of the run. All are indices."""
    waits: list[list[int]] = [[] for _ in spans]
    last: dict[str, int] = {}
    places: defaultdict[int, dict[_Name, int]] = defaultdict(dict)  # by run
    for i, span in enumerate(spans):
        lane = span.op.lane
        if timeline.device == "cpu" and lane not in UPDATERS:
            lane = "issue"  # without a GPU every op runs when it is issued, one at a time
        waits[i] += [last[lane]] if lane in last else []
        last[lane] = i
        place = places[span.run]
        number = next(k for k in itertools.count() if (span.op.name, k) not in place)
        place[span.op.name, number] = i
    begins: set[int] = set()
    known: dict[tuple[int, str], _Edges] = {}
    made: dict[Handed, list[int]] = {}  # by earlier graphs
    for number, place in sorted(places.items()):  # in the order of issue
        run = timeline.runs[number]
        key = id(run.schedule), run.graph
        if key not in known:
            known[key] = _edges(run.schedule, run.graph)
        waits_of, takes_of, hands_on = known[key]
        lanes: set[str] = set()
        for name, i in place.items():
            own = [place[wait] for wait in waits_of.get(name, ()) if wait in place]
            given = takes_of.get(name, ())
            waits[i] += own + [at for what in given for at in made.get(what, ())]
            if spans[i].op.lane not in lanes and not own:
                begins.add(i)
            lanes.add(spans[i].op.lane)
        for what, names in hands_on.items():
            made[what] = [place[name] for name in names if name in place]
    return waits, begins


_Name = tuple[str, int]  # printed name, and its number among equal ones


_Edges = tuple[dict[_Name, list[_Name]], dict[_Name, list[Handed]], dict[Handed, list[_Name]]]


def _edges(schedule: Schedule, graph_name: str) -> _Edges:
    """The edges that the runtime enforces: for each op, the ops on other streams of the graph that
    it waits for, and its values of earlier graphs; for each value for later graphs, the ops that
    made it. An op that is not recorded, such as a `free` after a copy, passes its waits to the next
    op of its stream."""
    names: dict[fx.Node, _Name] = {}
    counts: Counter[str] = Counter()
    handed_on: defaultdict[object, list[_Name]] = defaultdict(list)
    waits: dict[_Name, list[_Name]] = {}
    takes: dict[_Name, list[Handed]] = {}
    for node in ops.nodes_that(schedule.graphs[graph_name], lambda op: op.waits):
        stream, made = ops.stream_of(node), [*map(producer, node.all_input_nodes)]
        own = [names[n] for n in made if n in names and ops.stream_of(n) is not stream]
        if not ops.effects(node).issues:
            handed_on[stream] += own
            continue
        label = ops.label(node)
        names[node] = label, counts[label]
        counts[label] += 1
        waits[names[node]] = [*own, *handed_on.pop(stream, ())]
        takes[names[node]] = [stands_for(schedule, n) for n in made if n.op == "placeholder"]
    hands_on = {}
    for what, node in handed(schedule, graph_name).items():
        is_part = isinstance(what[1], Part)  # new values: include the ops that made them
        makers = [node, *map(producer, reads(node))] if is_part else [node]
        hands_on[what] = [names[n] for n in makers if n in names]
    return waits, takes, hands_on


# Finds the rank that comes last to every collective, from the traces of all ranks: its critical
# path has less time in collectives than the others'. On the CPU, ranks also meet before a graph,
# where no op runs.


class RankSteps(NamedTuple):
    """The steps of one rank in a trace."""

    rank: int  # of all processes
    host: str
    steps: StepFigures
    waited_s: float  # for other ranks, per step


@dataclass(frozen=True, slots=True)
class LastRank:
    """The rank that the others wait for; times in seconds per step."""

    rank: int
    host: str
    step_s: float
    lane: str  # stream on which it takes longer than the others; `NONE`: no recorded one
    busy_s: float  # on that stream
    others_busy_s: float  # median of the others
    waited_s: float  # that the others wait longer (median)


def rank_steps(timeline: Timeline, model: str, rank: int, host: str) -> RankSteps | None:
    """The steps of this rank, to be sent to the others; None if the model did not run."""
    steps = traced_steps(timeline, model)
    if steps is None:
        return None
    meets = (COMM, NONE) if timeline.device == "cpu" else (COMM,)
    waited_s = sum(steps.waited_s.get(lane, 0.0) for lane in meets)
    return RankSteps(rank, host, steps, waited_s)


def last_rank(ranks: Sequence[RankSteps]) -> LastRank | None:
    """The rank that waited least; None if there is nothing to compare."""
    if len(ranks) < 2:
        return None
    last = min(ranks, key=lambda each: each.waited_s)
    others = [each for each in ranks if each is not last]

    def median(lane: str) -> float:
        return statistics.median(each.steps.busy_s.get(lane, 0.0) for each in others)

    mine = last.steps.busy_s
    more = {lane: busy - median(lane) for lane, busy in mine.items() if lane != COMM}
    lane = max(more, key=more.__getitem__, default=NONE)
    lane = lane if more.get(lane, 0.0) > 0 else NONE
    waited_s = statistics.median(each.waited_s for each in others) - last.waited_s
    busy = mine.get(lane, 0.0), median(lane)
    return LastRank(last.rank, last.host, last.steps.step_s, lane, *busy, waited_s)
