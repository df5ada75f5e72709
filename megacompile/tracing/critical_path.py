"""What a measured step waited for: the way back from its end, over who let whom start.

An op starts when the op before it on its stream is done and so is everything else that it waits
for; the one that was done last is who it waited for. From the last op of a step back to its
beginning these are a path without overlaps, whose pieces by stream say what the step's time went
to: a stream can be busy all the time and have nobody wait for it. The method is that of the
critical path of a program's activity graph (Yang and Miller, "Critical path analysis for the
execution of parallel and distributed programs", 1988); `megacompile.cost.simulate` does the same
for what it predicts.

Whom an op waits for is known: the schedule's edges within a graph, and between graphs what the
runtime keeps. Time on the path in which no recorded op ran (the host had not issued the next one
yet, or something was at work that is no op of a schedule) belongs to none of the streams.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from megacompile.ir import ops
from megacompile.ir.schedule import Schedule
from megacompile.ir.values import producer
from megacompile.tracing.timeline import UPDATE_ON_HOST, UPDATERS, Span, Timeline

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
    ends = _ends(timeline, model, "backward") or _ends(timeline, model, "forward")
    if last is not None:
        ends = ends[-last - 1 :]
    if len(ends) > 1:
        return Period(ends[0], ends[-1], len(ends) - 1)
    spans = [span for span in timeline.spans if span.model == model]
    if not spans:
        return None
    start, stop = min(s.start_s for s in spans), max(s.stop_s for s in spans)
    return Period(start, stop, max(1, len(ends)))


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
        if span.stop_s < now:  # nothing of what is recorded: wait for whoever comes next
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
class Steps:
    """What a trace has of a model's steps; seconds of one step, by stream."""

    step_s: float
    busy_s: Mapping[str, float]
    waited_s: Mapping[str, float]  # with `NONE`


def traced_steps(timeline: Timeline, model: str) -> Steps | None:
    """The steps of `period`, on average; None where the model did not run."""
    found = period(timeline, model)
    if found is None or not any(run.model == model for run in timeline.runs):
        return None
    waited = waited_s(critical_path(timeline, model, found))
    within = found.start_s, found.stop_s
    return Steps(
        found.step_s,
        {lane: timeline.busy_s(lane, model, within) / found.steps for lane in timeline.lanes},
        {lane: time_s / found.steps for lane, time_s in waited.items()},
    )


class _Ops:
    """The spans of a model, and whom each may have waited for."""

    def __init__(self, timeline: Timeline, model: str) -> None:
        chosen = [span for span in timeline.spans if span.model == model]
        self.spans = sorted(chosen, key=lambda span: (span.start_s, span.stop_s))
        self.timeline = timeline
        self.before: list[int] = []  # on the same lane, or -1
        self.of_module: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
        last: dict[str, int] = {}
        for i, span in enumerate(self.spans):
            lane = span.op.lane
            if timeline.device == "cpu" and lane not in UPDATERS:
                lane = "issue"  # without a GPU every op runs where it is issued, one at a time
            self.before.append(last.get(lane, -1))
            last[lane] = i
            for what in _BRINGS.get(span.op.kind, ()):
                self.of_module[what, span.op.module].append(i)
        self.waits, self.begins = self._edges()

    def _edges(self) -> tuple[dict[int, list[int]], set[int]]:
        """By span: those of other lanes that it waits for; and those that begin a graph's lane."""
        runs: defaultdict[int, list[int]] = defaultdict(list)
        for i, span in enumerate(self.spans):
            if span.run >= 0:
                runs[span.run].append(i)
        found: dict[int, list[int]] = {}
        begins = set()
        edges: dict[tuple[int, str], dict[_Name, list[_Name]]] = {}
        for run, members in runs.items():
            schedule, graph = self.timeline.runs[run].schedule, self.timeline.runs[run].graph
            assert schedule is not None
            key = id(schedule), graph
            if key not in edges:
                edges[key] = dependencies(schedule, graph)
            counts: defaultdict[str, int] = defaultdict(int)
            place: dict[_Name, int] = {}
            lanes: set[str] = set()
            for i in members:
                op = self.spans[i].op
                place[op.name, counts[op.name]] = i
                counts[op.name] += 1
            for name, i in place.items():
                found[i] = [place[wait] for wait in edges[key].get(name, ()) if wait in place]
                if self.spans[i].op.lane not in lanes and not found[i]:
                    begins.add(i)
                lanes.add(self.spans[i].op.lane)
        return found, begins

    def ending(self, at_s: float) -> int:
        """The span that ends at a time: of several, the one that ended last before it."""
        able = [i for i, span in enumerate(self.spans) if span.stop_s <= at_s]
        return max(able, key=lambda i: self.spans[i].stop_s, default=-1)

    def blocker(self, at: int) -> int:
        """Of those that a span waited for the one that ended last; -1: nobody."""
        span = self.spans[at]
        able = [self.before[at], *self.waits.get(at, ())]
        for what in _WANTS.get(span.op.kind, ()):
            able += self._latest(self.of_module[what, span.op.module], span)
        if at in self.begins:
            able += self._latest(range(at), span)  # the host came to this graph when that was done
        if span.op.lane in UPDATERS:
            able += self._latest([i for i in range(at) if self._of_backward(i)], span)
        # Whoever began later was not waited for; with that, the way back comes to an end.
        able = [i for i in able if 0 <= i < at and self._done_before(i, span)]
        return max(able, key=lambda i: self.spans[i].stop_s, default=-1)

    def _latest(self, able: Sequence[int], span: Span) -> list[int]:
        done = [i for i in able if self._done_before(i, span)]
        return [max(done, key=lambda i: (self.spans[i].stop_s, i))] if done else []

    def _done_before(self, i: int, span: Span) -> bool:
        return self.spans[i].stop_s <= span.start_s + _CLOCK_S

    def _of_backward(self, i: int) -> bool:
        run = self.spans[i].run
        return run >= 0 and self.timeline.runs[run].graph == "backward"


# What of a bucket or a stage must be there before, wherever it was made: the update in host memory
# or new parameters on their way before a prefetch, states before they are fetched, a stage's input
# on the host before it comes back.
_BRINGS = {
    UPDATE_ON_HOST: ("updated",),
    "offload_state": ("states",),
    "update": ("states",),
    "offload_saved": ("activations",),
}
_WANTS = {
    "prefetch": ("updated", "states"),
    "fetch_state": ("updated", "states"),
    "fetch_saved": ("activations",),
}

_Name = tuple[str, int]  # as printed, and which one of those that print alike


def dependencies(schedule: Schedule, graph_name: str) -> dict[_Name, list[_Name]]:
    """By op: those of other streams that it waits for, by the edges that the runtime keeps.

    What is not recorded hands on its waits to the next op of its stream: a `free` behind a copy.
    `defer_free` makes nothing wait.
    """
    names: dict[fx.Node, _Name] = {}
    counts: defaultdict[str, int] = defaultdict(int)
    handed: defaultdict[object, list[_Name]] = defaultdict(list)
    found: dict[_Name, list[_Name]] = {}
    for node in ops.nodes_of(schedule.graphs[graph_name]):
        op = ops.effects(node)
        if not op.waits:
            continue
        stream = ops.stream_of(node)
        made = [producer(source) for source in node.all_input_nodes]
        waits = [names[n] for n in made if n in names and ops.stream_of(n) is not stream]
        if not op.issues:
            handed[stream] += waits
            continue
        label = ops.label(node)
        names[node] = label, counts[label]
        counts[label] += 1
        found[names[node]] = list(dict.fromkeys([*waits, *handed.pop(stream, ())]))
    return found
