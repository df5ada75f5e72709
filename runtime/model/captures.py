"""The captured graphs of a model, and the calls that capture them.

A call that Dynamo could not trace runs in eager mode if none of its lines has run yet. A call
restarts if buckets have to move first or device memory runs out, with the same random numbers. A
call that has already run some lines restarts only if nothing fits otherwise and it has changed no
buffer.

Two kinds of calls run as plain code: calls in `megacompile.eager(model)`, and calls without
gradients that keep making schedules, such as a sampling loop with a growing cache. Plain code
copies each parameter to the device for each use, like any uncaptured code.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain
from operator import attrgetter
from types import CodeType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx, nn

from megacompile import compat, notices
from megacompile.errors import DeviceMemoryError
from megacompile.garbage import old_objects_left_out
from megacompile.ir.schedule import Schedule
from megacompile.plan.pipeline import Planned
from megacompile.progress import line
from megacompile.runtime.model.captured import Backoff, CapturedGraph
from megacompile.runtime.model.model_buckets import ModelBuckets
from megacompile.runtime.model.program import MovesFirst, compiling, first_line
from megacompile.runtime.ops.compute import random_state, set_random_state
from megacompile.runtime.params.eager_notice import untraced_text
from megacompile.runtime.params.swap import Undos, undone
from megacompile.runtime.step.step import Updates
from megacompile.text import printable

_MADE, _PROGRAMS = attrgetter("made"), attrgetter("programs")
_LOADING_S = 1.0  # per call, to load code compiled in the background

Compiled = Callable[..., Any]  # a function that `torch.compile` returned
Run = Callable[[Compiled, Undos], Any]  # calls the model by such a function
_State = tuple[Any, tuple[int, ...]]  # of the random generators and the buffers


class EagerBlocks(threading.local):
    """The number of `megacompile.eager` blocks of one model that this thread is in."""

    depth = 0


class _Current(threading.local):
    progress: bool | None = None  # the option of the model that this thread calls


_current = _Current()


@contextmanager
def tracing() -> Iterator[None]:
    """Wraps a trace by Dynamo, in a model's first call or a later one."""
    with line("capturing the model", _current.progress), old_objects_left_out():
        yield


class Captures:
    """The captured graphs of a model. The first one called from the code `entry` begins a call."""

    def __init__(self, buckets: ModelBuckets, updates: Updates, entry: CodeType) -> None:
        self.buckets = buckets
        self.updates = updates
        self.model = buckets.model
        self.machine = buckets.machine
        self.graphs: list[CapturedGraph] = []
        self.eager = EagerBlocks()
        self._entry = entry
        self._name = type(self.model).__name__
        self._took_s: deque[float] = deque(maxlen=16)  # per call; 0 if it captured nothing
        # attempts to capture, and calls without gradients that made programs
        self._functions = WeakKeyDictionary[Compiled, tuple[Backoff, Backoff]]()

    def add(self, module: fx.GraphModule) -> CapturedGraph:
        """Add a graph that Dynamo has captured."""
        name = printable(self._name) + (f".{len(self.graphs)}" if self.graphs else "")
        begins_call = functools.partial(compat.is_called_first, self._entry)
        graph = CapturedGraph(name, module, self.buckets, self.updates, begins_call)
        self.graphs.append(graph)
        return graph

    def current(self) -> list[CapturedGraph]:
        """The captured graphs whose programs ran last."""
        plans = self.buckets.plans
        fresh = [g for g in self.graphs if g.plans is plans and g.version == plans.version]
        return fresh or self.graphs

    def schedules(self) -> list[Schedule]:
        """The newest schedule of every program that has run, in the order of capture."""
        return [
            list(program.executors.values())[-1].schedule
            for graph in self.current()
            for program in graph.programs.values()
            if program is not None and program.executors
        ]

    def newest(self) -> tuple[list[Planned], list[Schedule]]:
        """The newest schedule of each captured graph: that of a training step, if one ran."""
        planned, schedules = [], []
        for graph in self.current():
            ran = [
                (program, variant, executor.schedule)
                for program in graph.programs.values()
                if program is not None
                for variant, executor in program.executors.items()
            ]
            trained = [each for each in ran if each[2].backward is not None]
            if ran:
                program, variant, schedule = (trained or ran)[-1]
                planned.append(Planned(program.stages, program.capture, variant))
                schedules.append(schedule)
        return planned, schedules

    def call(self, run: Run, compiled: Compiled, modules: Sequence[nn.Module]) -> Any:
        """Run a call. Raises DeviceMemoryError if nothing fits, or if it cannot restart."""
        if compiled not in self._functions:
            self._functions[compiled] = Backoff(), Backoff()
        attempts, inferences = self._functions[compiled]
        # ranks that share the model would have to agree on captures
        infers = not torch.is_grad_enabled() and self.machine.ranks is None
        if self.eager.depth or (infers and not inferences.is_due()):
            with self.buckets.notice.asked_for():
                return undone(functools.partial(run, compat.uncompiled(compiled)))
        before = random_state(self.machine.device), self._buffers(modules)
        made, start_s = list(map(_MADE, self.graphs)), time.perf_counter()
        if made:
            code = self.buckets.plans.compiler.pipeline.to_come
            if code.is_ready() and not self.machine.pending:
                with compiling("the stages that ran uncompiled", self.machine):
                    loaded = code.load(_LOADING_S)
                if loaded:  # all of the code that was compiled in the background
                    code.use()
        outer, show = _current.progress, self.buckets.options.progress
        _current.progress = show
        try:
            with nullcontext() if made else line("capturing the model", show):
                result = self._until_done(run, compiled, attempts, before)
        finally:
            _current.progress = outer
        if made:
            self._note_made(compiled, made, time.perf_counter() - start_s)
        if infers:
            self._note_inference(inferences, sum(map(_MADE, self.graphs)) - sum(made))
        return result

    def _note_inference(self, calls: Backoff, made: int) -> None:
        """Record a captured call without gradients and the number of programs that it made. Skips
        calls after consecutive ones that have made many, each at least one; warns once."""
        if not made:
            calls.failures = calls.programs = 0
            calls.skip(calls.skipped // 2)
            return
        calls.failures += 1
        calls.programs += made
        # a program costs about 0.1 s, a capture more
        if calls.skipped or (calls.failures >= 4 and calls.programs >= 24):
            calls.skip(max(1, 2 * calls.skipped))
            notices.warn_once(
                "calls without gradients",
                f"megacompile: {self._name} made {calls.programs} schedules in {calls.failures} "
                "consecutive calls without gradients, because each had new shapes or numbers. From "
                "now on, most such calls run in eager mode and fetch parameters at each use "
                "(slower, same numbers; shown once). Put a loop that samples into "
                "`with megacompile.eager(model):`, or keep shapes constant: a cache of a fixed "
                "size, with the position as a tensor",
                of=self.model,
            )

    def _buffers(self, modules: Sequence[nn.Module]) -> tuple[int, ...]:
        """Versions of the buffers, and the number of changes by schedules: those of a BatchNorm
        statistic do not change its version."""
        held = compat.holders(modules, "buffers")
        buffers = [b for holder in held for b in holder.values() if b is not None]
        return (self.machine.assigned, *map(compat.version, buffers))

    def _note_made(self, compiled: Compiled, before: list[int], took_s: float) -> None:
        """Record the duration of a call after the first; drop code that no program uses any more.
        Warns once if half of the last 16 calls captured again, or compiled for other sizes, which
        takes seconds each time: Dynamo gives up only after hundreds."""
        grown, evicted = None, False
        for graph, made in zip(self.graphs, before, strict=False):
            evicted = evicted or graph.has_evicted
            grown = graph if graph.made > made else grown
        captured = len(self.graphs) > len(before)
        self._took_s.append(took_s if captured or grown else 0.0)
        slow_s = list(filter(None, self._took_s))
        if self._took_s[-1] and len(slow_s) >= 8 and notices.is_new("captured again", self):
            if grown is not None and not captured:
                why, fix = grown.why_made, "pad to a few sizes"
            else:
                failed = compat.why_captured_again(compiled) or "TORCH_LOGS=recompiles shows it"
                why = f"a condition of earlier captures did not hold ({failed})"
                fix = (
                    "keep it constant from call to call, pass it as an argument or a tensor, or "
                    "make such calls in `with megacompile.eager(model):`"
                )
            notices.warn(
                f"megacompile: {self._name} was captured again in {len(slow_s)} of its last "
                f"{len(self._took_s)} calls, which took {sum(slow_s):.1f} s (slower, same numbers; "
                f"shown once): {why}; {fix}"
            )
        if evicted:
            programs = [p for graph in self.graphs for p in graph.programs.values() if p]
            schedules = {e.schedule for program in programs for e in program.executors.values()}
            self.buckets.plans.compiler.retain({program.stages for program in programs}, schedules)
            for graph in self.graphs:
                graph.has_evicted = False

    def _until_done(self, run: Run, compiled: Compiled, attempts: Backoff, before: _State) -> Any:
        """Run a call; restarts it if buckets must move first or memory runs out. It runs in eager
        mode if Dynamo cannot trace it before its first line runs, or is not to try. A user error (a
        wrong shape) is raised at the user's line, as in the plain model."""
        failed: Exception | None = None
        notice, tried = self.buckets.notice, attempts.is_due()
        while tried:
            ran_out, lacking = "", None
            try:
                result = undone(functools.partial(run, compiled))
                if attempts.failures:
                    attempts.reset()
                notice.say(self.model.parameters)
                return result
            except torch.OutOfMemoryError as error:
                ran_out = first_line(error)  # drop the error: its frames hold memory
            except MovesFirst as first:
                lacking = first.lacking
            except compat.CAPTURE_ERRORS as error:
                if not compat.is_raised_first(error):
                    raise
                failed = error
                break
            self._begin_again(before, ran_out, lacking)
        with notice.unless_it_raises():
            try:
                result = undone(functools.partial(run, compat.uncompiled(compiled)))
            except torch.OutOfMemoryError:
                if failed is None:
                    raise
                raise failed from None
        if failed is not None:
            failed.with_traceback(None)  # whose frames hold the call's inputs
            attempts.failed(untraced_text(compat.untraced_by(failed)))
        notice.say(self.model.parameters, attempts.why_not)
        return result

    def _begin_again(self, before: _State, ran_out: str, lacking: DeviceMemoryError | None) -> None:
        """Make a smaller plan if memory ran out, and move buckets, before a call restarts. Raises
        DeviceMemoryError if no plan is smaller, buckets cannot move, or the call has already
        changed a buffer."""
        plans, (random, buffers) = self.buckets.plans, before
        placement = plans.placement
        if self._buffers(compat.modules_of(self.model)) != buffers:
            why = ran_out or ("no memory" if lacking is None else first_line(lacking))
            raise DeviceMemoryError(
                f"megacompile(): device memory ran out in the forward ({why}), which has changed a "
                "buffer (running statistics?) and cannot be repeated; set a smaller budget: "
                "megacompile(model, gpu_memory=...)"
            )
        set_random_state(self.machine.device, random)
        if ran_out:
            plans.step_down(self.machine, ran_out, "the forward")
        plans.expire()
        self.buckets.move_if_wanted()
        if lacking is not None and plans.placement == placement:
            raise lacking

    def warn_of_views(self) -> None:
        """Warn, at a step, of a view of a parameter that the last forward has kept, once."""
        programs = chain.from_iterable(map(dict.values, map(_PROGRAMS, self.graphs)))
        for program in programs:
            for view, name in program.views if program is not None else ():
                if view() is not None and notices.is_new("a view", self):
                    notices.warn(
                        f"megacompile: the forward of {self._name} has kept a view of parameter "
                        f"{name!r}, or returned it, and the view is a copy: this step changes the "
                        "parameter, not the copy (shown once); read "
                        f"model.get_parameter({name!r}) where the view is used"
                    )
