"""The captured graphs of a model, and the calls that they are captured in.

A call that Dynamo could not trace, and of which no line has run, runs in eager mode. A call begins
again where buckets have to move first, or where device memory runs out: also one that has begun, if
nothing fits otherwise and it has changed no buffer.
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
from megacompile.runtime.model.buckets import ModelBuckets
from megacompile.runtime.model.captured import CapturedGraph
from megacompile.runtime.model.plans import MovesFirst
from megacompile.runtime.model.program import compiling
from megacompile.runtime.params.eager_notice import untraced_text
from megacompile.runtime.params.undo import Undos, undone
from megacompile.runtime.step.step import Updates
from megacompile.text import printable

_LOADING_S = 1.0  # of a call, for code that was compiled meanwhile

Compiled = Callable[..., Any]  # a function that `torch.compile` returned
Run = Callable[[Compiled, Undos], Any]  # a call of the model by such a function


class Captures:
    """Owns the captured graphs of a model, for as long as that is megacompiled.

    Args:
        entry: the code that calls the model: a graph that is called there first begins the call.
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
        """One more graph that Dynamo has captured."""
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
        """The programs of all graphs so far, with those that were given up."""
        return sum(graph.made for graph in self.graphs)

    def current(self) -> list[CapturedGraph]:
        """The captured graphs whose programs are those that ran last."""
        return [graph for graph in self.graphs if not graph.is_stale] or self.graphs

    def schedules(self) -> list[Schedule]:
        """The newest schedule of every program that ran, in the order of capture."""
        return [
            list(program.executors.values())[-1].schedule
            for graph in self.current()
            for program in graph.programs.values()
            if program is not None and program.executors
        ]

    def call(self, run: Run, compiled: Compiled, modules: Sequence[nn.Module]) -> Any:
        """The result of a call, captured where nothing that was captured before serves.

        Args:
            modules: all of the model's.

        Raises:
            DeviceMemoryError: nothing fits, or the call cannot begin again.
        """
        before = shortage.Before.of(modules, self.machine)
        if not self.graphs:
            with line("capturing the model", self.buckets.options.progress):
                return self._until_done(run, compiled, before)
        self._use_code()
        made, start_s = [graph.made for graph in self.graphs], time.perf_counter()
        result = self._until_done(run, compiled, before)
        self._note_made(compiled, made, time.perf_counter() - start_s)
        return result

    def _use_code(self) -> None:
        """Use the code that was compiled meanwhile, once all of it is loaded."""
        compiler = self.buckets.plans.compiler
        if compiler.code_is_ready() and not self.machine.pending:
            with compiling("the stages that ran uncompiled", self.machine):
                loaded = compiler.load_code(_LOADING_S)
            if loaded:
                compiler.use_code()

    def _note_made(self, compiled: Compiled, before: list[int], took_s: float) -> None:
        """A call that was not the first one has taken so long, and may have captured."""
        grown = [g for g, made in zip(self.graphs, before, strict=False) if g.made > made]
        if len(self.graphs) > len(before):
            self._again.note(compiled, took_s)
        elif grown:
            self._again.note(compiled, took_s, grown[-1].why_made)
        else:
            self._again.note(compiled, 0.0)
        if True in [graph.has_evicted for graph in self.graphs]:
            self._forget_evicted()

    def _forget_evicted(self) -> None:
        """Makes the compiler forget what no program uses any more."""
        programs = [p for graph in self.graphs for p in graph.programs.values() if p is not None]
        made = [e.schedule for program in programs for e in program.executors.values()]
        self.buckets.plans.compiler.retain({program.stages for program in programs}, set(made))
        for graph in self.graphs:
            graph.has_evicted = False

    def _until_done(self, run: Run, compiled: Compiled, before: shortage.Before) -> Any:
        """The result of a call, which begins again where buckets move first or memory has run
        out."""
        attempts = self._attempts.setdefault(compiled, Attempts())
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
                ran_out = shortage.first_line(error)  # not the error: its frames hold memory
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

    def _move_first(self, before: shortage.Before, lacking: DeviceMemoryError | None) -> None:
        """Moves buckets before a call begins again.

        Raises:
            DeviceMemoryError: they cannot move, or a line that has run changed a buffer.
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
        """A call that Dynamo could not trace (`failed`), and of which no line ran, or that is not
        tried. Where the fault is the user's (a wrong shape), it is raised at the user's line, as
        the plain model raises it."""
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

    def _step_down(self, before: shortage.Before, ran_out: str) -> None:
        """After a forward that ran out of device memory: a plan that needs less, from the start."""
        before.restore(self.model, self.machine, ran_out)
        compiler = self.buckets.plans.compiler
        shortage.step_down(compiler, self.machine.slots, ran_out, "the forward")
        self.buckets.plans.expire()
        self.buckets.move_if_wanted()
