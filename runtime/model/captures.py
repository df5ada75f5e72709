"""The captured graphs of a model, and the calls that capture them.

A call that Dynamo could not trace runs in eager mode if none of its lines has run yet. A call
restarts if buckets have to move first or device memory runs out. A call that has already run some
lines restarts only if nothing fits otherwise and it has changed no buffer.
"""

from __future__ import annotations

import contextlib
import functools
import time
import weakref
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any

import torch
from torch import fx, nn

from megacompile import compat
from megacompile.errors import DeviceMemoryError
from megacompile.garbage import old_objects_left_out
from megacompile.ir.schedule import Schedule
from megacompile.progress import line
from megacompile.runtime.model import shortage
from megacompile.runtime.model.attempts import Attempts, CapturedAgain
from megacompile.runtime.model.captured import CapturedGraph
from megacompile.runtime.model.model_buckets import ModelBuckets
from megacompile.runtime.model.plans import MovesFirst
from megacompile.runtime.model.program import compiling
from megacompile.runtime.params.eager_notice import untraced_text
from megacompile.runtime.params.undo import Undos, undone
from megacompile.runtime.step.step import Updates
from megacompile.text import printable

_LOADING_S = 1.0  # per call, to load code compiled in the background

Compiled = Callable[..., Any]  # a function that `torch.compile` returned
Run = Callable[[Compiled, Undos], Any]  # calls the model by such a function


class Captures:
    """Owns the captured graphs of a model while it is megacompiled.

    Args:
        entry: the code that calls the model: the first graph called from it begins the call.
    """

    def __init__(self, buckets: ModelBuckets, updates: Updates, entry: CodeType) -> None:
        self.buckets = buckets
        self.updates = updates
        self.model = buckets.model
        self.machine = buckets.machine
        self.graphs: list[CapturedGraph] = []
        self._entry = entry
        self._again = CapturedAgain(type(self.model).__name__)
        self._attempts = weakref.WeakKeyDictionary[Compiled, Attempts]()

    def add(self, module: fx.GraphModule) -> CapturedGraph:
        """Add a graph that Dynamo has captured."""
        name = printable(type(self.model).__name__)
        if self.graphs:
            name += f".{len(self.graphs)}"
        entry = self._entry
        graph = CapturedGraph(
            name, module, self.buckets, self.updates, lambda: compat.is_called_first(entry)
        )
        self.graphs.append(graph)
        return graph

    def programs_made(self) -> int:
        """The number of programs of all graphs so far, including dropped ones."""
        return sum(graph.made for graph in self.graphs)

    def current(self) -> list[CapturedGraph]:
        """The captured graphs whose programs ran last."""
        return [graph for graph in self.graphs if not graph.is_stale] or self.graphs

    def schedules(self) -> list[Schedule]:
        """The newest schedule of every program that has run, in the order of capture."""
        return [
            list(program.executors.values())[-1].schedule
            for graph in self.current()
            for program in graph.programs.values()
            if program is not None and program.executors
        ]

    def call(self, run: Run, compiled: Compiled, modules: Sequence[nn.Module]) -> Any:
        """Run a call; captures it if no earlier capture fits.

        Args:
            modules: all of the model's.

        Raises:
            DeviceMemoryError: nothing fits, or the call cannot restart.
        """
        before = shortage.StepSnapshot.of(modules, self.machine)
        if not self.graphs:
            with line("capturing the model", self.buckets.options.progress):
                return self._until_done(run, compiled, before)
        self._use_code()
        made, start_s = [graph.made for graph in self.graphs], time.perf_counter()
        result = self._until_done(run, compiled, before)
        self._note_made(compiled, made, time.perf_counter() - start_s)
        return result

    def _use_code(self) -> None:
        """Switch to the code compiled in the background once all of it is loaded."""
        compiler = self.buckets.plans.compiler
        if compiler.code_is_ready() and not self.machine.pending:
            with compiling("the stages that ran uncompiled", self.machine):
                loaded = compiler.load_code(_LOADING_S)
            if loaded:
                compiler.use_code()

    def _note_made(self, compiled: Compiled, before: list[int], took_s: float) -> None:
        """Record the duration of a call after the first; it may have captured."""
        grown = [g for g, made in zip(self.graphs, before, strict=False) if g.made > made]
        if len(self.graphs) > len(before):
            self._again.note(compiled, took_s)
        elif grown:
            self._again.note(compiled, took_s, grown[-1].why_made)
        else:
            self._again.note(compiled, 0.0)
        for graph in self.graphs:
            if graph.has_evicted:
                self._forget_evicted()

    def _forget_evicted(self) -> None:
        """Make the compiler drop what no program uses."""
        programs = [p for graph in self.graphs for p in graph.programs.values() if p is not None]
        made = [e.schedule for program in programs for e in program.executors.values()]
        self.buckets.plans.compiler.retain({program.stages for program in programs}, set(made))
        for graph in self.graphs:
            graph.has_evicted = False

    def _until_done(self, run: Run, compiled: Compiled, before: shortage.StepSnapshot) -> Any:
        """Run a call; restarts it if buckets must move first or memory runs out."""
        attempts = self._attempts.get(compiled)
        if attempts is None:
            attempts = self._attempts[compiled] = Attempts()
        failed: Exception | None = None
        tried = attempts.is_due()
        while tried:
            try:
                with contextlib.nullcontext() if self.graphs else old_objects_left_out():
                    result = undone(functools.partial(run, compiled))
                attempts.traced()
                self.buckets.notice.say(self.model.parameters)
                return result
            except torch.OutOfMemoryError as error:
                ran_out = shortage.first_line(error)  # drop the error: its frames hold memory
            except MovesFirst as first:
                ran_out, lacking = "", first.lacking
            except compat.CAPTURE_ERRORS as error:
                if not compat.is_raised_first(error):
                    raise
                failed = error
                break
            if ran_out:
                self._step_down(before, ran_out)
            else:
                self._move_first(before, lacking)
        return self._in_eager_mode(run, compiled, attempts, failed)

    def _move_first(self, before: shortage.StepSnapshot, lacking: DeviceMemoryError | None) -> None:
        """Move buckets before a call restarts.

        Raises:
            DeviceMemoryError: they cannot move, or the call has already changed a buffer.
        """
        placement = self.buckets.plans.placement
        why = "no memory" if lacking is None else shortage.first_line(lacking)
        before.restore(self.model, self.machine, why)
        self.buckets.move_if_wanted()
        if lacking is not None and self.buckets.plans.placement == placement:
            raise lacking
        self.buckets.plans.expire()

    def _in_eager_mode(
        self,
        run: Run,
        compiled: Compiled,
        attempts: Attempts,
        failed: Exception | None,
    ) -> Any:
        """Run a call in eager mode: Dynamo could not trace it (`failed`) before its first line ran,
        or it is not attempted. A user error (a wrong shape) is raised at the user's line, as in the
        plain model."""
        with self.buckets.notice.unless_it_raises():
            try:
                result = undone(functools.partial(run, compat.uncompiled(compiled)))
            except torch.OutOfMemoryError:
                if failed is None:
                    raise
                raise failed from None
        if failed is not None:
            failed.with_traceback(None)  # whose frames hold the call's inputs
            attempts.failed(untraced_text(compat.untraced_by(failed)))
        self.buckets.notice.say(self.model.parameters, attempts.why_not)
        return result

    def _step_down(self, before: shortage.StepSnapshot, ran_out: str) -> None:
        """Make a smaller plan after a forward ran out of device memory; the call restarts."""
        before.restore(self.model, self.machine, ran_out)
        compiler = self.buckets.plans.compiler
        shortage.step_down(compiler, self.machine, ran_out, "the forward")
        self.buckets.plans.expire()
        self.buckets.move_if_wanted()
