"""Records the times of ops: `with megacompile.trace(model) as t:`.

On CUDA each op gets two timed events on its own stream, before and after its work, without its
waits for other streams; nothing waits for them until the times are read. On the CPU the host's
clock is read around the op.

[Note: one time axis] Events and the host's clock are aligned when recording begins: an event on a
new, idle stream is recorded and waited for between two readings of the clock. The distance between
the readings, a few microseconds, is the error of the host's lane relative to the others.
"""

from __future__ import annotations

import json
import platform
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch

from megacompile.cost import rates
from megacompile.cost.hardware import Hardware
from megacompile.cost.optimizer import OptimizerCost
from megacompile.errors import TraceError
from megacompile.ir import ops
from megacompile.ir.schedule import Schedule
from megacompile.views import critical_path, timeline
from megacompile.views.critical_path import RankSteps
from megacompile.views.timeline import OpInfo, Run, Span, Timeline, describe

_CLOCK_TRIES = 3


@dataclass(slots=True, eq=False)
class _Mark:
    """An issued op; its times are filled in when it runs."""

    info: OpInfo
    run: int
    done: threading.Event | None = None  # set when a background thread is done
    start: Any = None  # seconds of the host's clock, or an event
    stop: Any = None
    memory_bytes: int | None = None

    def note(self, lane: str, start_s: float, stop_s: float) -> None:
        """Set the lane and times of work in a background thread."""
        assert self.done is not None
        self.info = replace(self.info, lane=lane)
        self.start, self.stop = start_s, stop_s
        self.done.set()


class Recording:
    """The recording of one run of a graph."""

    def __init__(self, tracer: Tracer, infos: Sequence[OpInfo], index: int) -> None:
        self.tracer = tracer
        self.index = index
        self._infos = iter(infos)
        self._current: OpInfo | None = None

    def next_op(self) -> None:
        """Advance to the program's next op."""
        self._current = next(self._infos)

    def _mark(self, done: threading.Event | None = None) -> _Mark | None:
        """Mark the current op; returns None if it has a mark already."""
        info, self._current = self._current, None
        if info is None:
            return None
        mark = _Mark(info, self.index, done)
        self.tracer.marks.append(mark)
        return mark

    def timed(self, work: Callable[[], Any]) -> Callable[[], Any]:
        """Wrap the op's work to record its times; returns `work` itself if no op awaits a mark."""
        mark = self._mark()
        return work if mark is None else lambda: self.tracer.measure(mark, work)

    def noted_later(self) -> Callable[[str, float, float], None]:
        """For work in several threads: returns a function that records the lane, start and end.
        Call it in any case, because a trace waits for it."""
        mark = self._mark(threading.Event())
        assert mark is not None
        return mark.note

    def in_background(self) -> Callable[[str, Callable[[], None]], None]:
        """For work in a thread: returns a function that runs it and records its lane and times.
        Call it in any case."""
        note = self.noted_later()

        def timed(lane: str, work: Callable[[], None]) -> None:
            start_s = time.perf_counter()
            try:
                work()
            finally:
                note(lane, start_s, time.perf_counter())

        return timed


class Tracer:
    """The recorder of one model, shared by all its active traces."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.steps = frozenset(op.name for op in ops.OPS.values() if op.show is ops.Show.STEP)
        self.marks: list[_Mark] = []  # in the order of issue; several threads append
        self.runs: list[tuple[Schedule, str]] = []
        self.users = 0
        self._infos: dict[tuple[int, str], tuple[OpInfo, ...]] = {}
        self.measure = self._here
        if device.type == "cuda":
            self.measure = self._on_stream
            self._align()

    def _align(self) -> None:
        """[Note: one time axis]"""
        with torch.cuda.device(self.device):
            stream = torch.cuda.Stream(self.device, priority=-1)  # from a pool unused by copies
            best = float("inf")
            for _ in range(_CLOCK_TRIES):
                event = torch.cuda.Event(enable_timing=True)
                before = time.perf_counter()
                event.record(stream)
                event.synchronize()
                after = time.perf_counter()
                if after - before < best:
                    best = after - before
                    self._event, self._event_s = event, (before + after) / 2

    def at_s(self, mark: Any) -> float:
        """Seconds of a mark's start or stop on the host's clock; waits for an event."""
        if isinstance(mark, float):
            return mark
        mark.synchronize()
        return self._event_s + float(self._event.elapsed_time(mark)) / 1e3

    def run(self, schedule: Schedule, graph: str) -> Recording:
        """Start recording a run of a graph."""
        key = (id(schedule), graph)
        if key not in self._infos:
            self._infos[key] = describe(schedule, graph)
        self.runs.append((schedule, graph))  # keeps the schedule alive, so its id stays unique
        return Recording(self, self._infos[key], len(self.runs) - 1)

    def _here(self, mark: _Mark, work: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        value = work()
        mark.start, mark.stop = start, time.perf_counter()
        return value

    def _on_stream(self, mark: _Mark, work: Callable[[], Any]) -> Any:
        """Record events around the work on the current stream, which is the op's."""
        if mark.info.kind in self.steps:
            stats = torch.cuda.memory_stats_as_nested_dict(self.device)
            mark.memory_bytes = int(stats["allocated_bytes"]["all"]["current"])
        start = torch.cuda.Event(enable_timing=True)
        stop = torch.cuda.Event(enable_timing=True)
        start.record()
        value = work()
        stop.record()
        mark.start, mark.stop = start, stop
        return value


@dataclass(slots=True, eq=False)
class Traced:
    """A model under a trace, with its tracer and the range of marks that belong to the trace."""

    name: str
    machine: Any  # runtime.ops.machine.Machine
    optimizer: OptimizerCost  # for predicting its updates
    tracer: Tracer | None = None
    first: int = 0
    last: int | None = None


_TURN = threading.Lock()  # traces may begin and end in any thread


class Trace:
    """The times of every op of some models, and their totals.

    A context manager, entered once. The first access to the times waits for all work that was
    issued in the block, including updates on the host. Ops that failed are left out.
    """

    def __init__(
        self,
        models: Sequence[Traced],
        hardware: Hardware | None,
        patience_s: float | None = None,  # for work in threads; it never begins after a Ctrl-C
    ) -> None:
        self._models = models
        self._patience_s = patience_s
        self._hardware = hardware
        self._measured: Timeline | None = None
        self._predicted: Timeline | None = None
        self._start_s: float | None = None
        self._over = False
        self.rank_steps: dict[str, tuple[RankSteps, ...]] = {}  # of all ranks, after `save()`

    def __enter__(self) -> Self:
        if self._start_s is not None:
            raise TraceError("trace(): this trace was already used; make a new one for each block")
        self._start_s = time.perf_counter()
        with _TURN:
            for model in self._models:
                machine = model.machine
                machine.tracer = machine.tracer or Tracer(machine.device)
                model.tracer = machine.tracer
                model.tracer.users += 1
                model.first = len(model.tracer.marks)
        return self

    def __exit__(self, *error: object) -> None:
        with _TURN:
            for model in self._models:
                if model.tracer is None or model.last is not None:
                    continue  # Ctrl-C came in `__enter__`, or in an earlier `__exit__`
                model.last = len(model.tracer.marks)
                model.tracer.users -= 1
                if not model.tracer.users:
                    model.machine.tracer = None
        self._over = True

    @property
    def measured(self) -> Timeline:
        """The measured timeline, so far or complete."""
        if self._measured is not None:
            return self._measured
        runs: list[Run] = []
        spans = [span for model in self._models for span in self._spans(model, runs)]
        devices = dict.fromkeys(str(model.machine.device) for model in self._models)
        found = Timeline(timeline.in_order(spans), tuple(runs), ", ".join(devices))
        if self._over:
            self._measured = found
            for model in self._models:
                model.tracer = None  # and its events
        return found

    def _spans(self, model: Traced, runs: list[Run]) -> Iterator[Span]:
        tracer, places = model.tracer, dict[int, int]()  # the tracer's runs -> this trace's
        for mark in () if tracer is None else tracer.marks[model.first : model.last]:
            assert tracer is not None and self._start_s is not None
            if mark.done is not None:
                mark.done.wait(self._patience_s)
            if mark.stop is None:
                continue  # failed or never issued
            if mark.run not in places:
                schedule, graph = tracer.runs[mark.run]
                places[mark.run] = len(runs)
                runs.append(Run(model.name, graph, schedule))
            start, stop = (tracer.at_s(t) - self._start_s for t in (mark.start, mark.stop))
            place = places[mark.run]
            yield Span(mark.info, start, stop, model.name, place, mark.memory_bytes)

    @property
    def predicted(self) -> Timeline | None:
        """The cost model's prediction of each run, from its measured start; None without rates:
        those given to `trace()`, or cached by `python -m megacompile hardware`."""
        if self._predicted is None or not self._over:
            # not measured now: that needs device memory, which training may have used up
            hardware = self._hardware or rates.cached(self._models[0].machine.device)
            if hardware is None:
                return None
            costs = {model.name: model.optimizer for model in self._models}
            self._predicted = timeline.predicted(self.measured, hardware, costs)
        return self._predicted

    @property
    def spans(self) -> tuple[Span, ...]:
        """Every op with its start and end, ordered by start."""
        return self.measured.spans

    def table(self) -> str:
        """A table of busy and idle time per stream, of count, time and bytes per kind of op, and of
        the prediction."""
        return timeline.table(self.measured, self.predicted)

    def save(self, path: str) -> None:
        """Write a file for ui.perfetto.dev or chrome://tracing (the trace event format).

        Each model has a process with a row per stream, and another for the prediction. If ranks
        share a model, all of them call this after the block, and the first writes one file for all.
        Their clocks agree if they run on one host. Then `explain(model)` shows which rank the
        others wait for. An error in one rank raises in all.
        """
        shared = (model.machine.ranks for model in self._models if model.machine.ranks is not None)
        ranks = next(shared, None)  # a `runtime.device.ranks.Ranks`
        if ranks is None:
            Path(path).write_text(json.dumps(timeline.document(self.measured, self.predicted)))
            return
        with ranks.together("save() of a trace"):
            rank, host = ranks.mesh.get_rank(), platform.node()
            names = [model.name for model in self._models]
            steps = {n: critical_path.rank_steps(self.measured, n, rank, host) for n in names}
            mine = timeline.document(self.measured, self.predicted)
            found = ranks.all_gather_object((mine, self._start_s or 0.0, steps))
            documents, starts_s, of_ranks = zip(*found, strict=True)
            self.rank_steps = {
                name: tuple(filter(None, (s[name] for s in of_ranks))) for name in names
            }
            if ranks.is_first:
                Path(path).write_text(json.dumps(timeline.together(documents, starts_s)))

    def __repr__(self) -> str:
        names = ", ".join(model.name for model in self._models)
        state = "over" if self._over else "on" if self._start_s is not None else "not begun"
        shown = "; print(.table()) shows it" if self._over else ""
        return f"<trace of {names}: {state}{shown}>"
