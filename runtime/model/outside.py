"""Uses of parameters outside of every schedule: gradients from code outside of calls, and views.

A call of a module in the model is scheduled (`submodule_calls`). Its other methods, and losses that
read parameters, are not: they compute where the parameter is. The runtime sees only their
gradients.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import nn

from megacompile import notices
from megacompile.ir.capture import ParamInput
from megacompile.runtime.model.captured import CapturedGraph
from megacompile.runtime.model.program import Program
from megacompile.runtime.ops.machine import Machine
from megacompile.runtime.params.eager_notice import share


class OutsideNotice:
    """Warns once if a model's parameters are used outside of schedules, and once if a forward has
    kept a view of one, which is a copy.

    Args:
        machine: its buckets hold the parameters.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._said = self._said_view = False
        self._noted: weakref.WeakSet[Program] = weakref.WeakSet()
        self._read: set[int] = set()  # ids of parameters read by any schedule

    def say(self, model: nn.Module, graphs: Iterable[CapturedGraph], *, is_known: bool) -> None:
        """Warn of such views and gradients; called at a step.

        Args:
            is_known: code in eager mode has used parameters, with its own warning.
        """
        programs = [program for graph in graphs for program in graph.programs.values()]
        if not self._said_view:
            self._say_view(model, programs)
        if self._said or is_known:
            return
        if None in programs:  # a graph that runs in eager mode, with its own warning
            self._said = True
            return
        for program in programs:
            if program is not None and program not in self._noted:
                self._note(program)
        for bucket in self.machine.buckets.values():
            for param in bucket.params:
                if param.grad is not None and id(param) not in self._read:
                    self._say_outside(model)
                    return

    def _note(self, program: Program) -> None:
        """Record the parameters that a program's schedules read."""
        self._noted.add(program)
        for given in program.capture.inputs:
            if isinstance(given, ParamInput) and given.bucket.key in self.machine.buckets:
                params = self.machine.buckets[given.bucket.key].params
                self._read |= {id(param) for param in params[given.param : given.param + 1]}

    def _say_outside(self, model: nn.Module) -> None:
        self._said = True
        params = [p for b in self.machine.buckets.values() for p in b.params]
        outside = {id(p) for p in params if p.grad is not None and id(p) not in self._read}
        kind = type(model).__name__
        name = next(name for name, param in model.named_parameters() if id(param) in outside)
        module = name.rpartition(".")[0]
        call = f"model.{module}(...)" if module else "model(...)"
        notices.warn(
            f"megacompile: {share(params, outside)} of {kind} have gradients that no schedule has "
            f"computed, {name!r} first: code outside of every call used them, on the device where "
            f"they are stored (slower, same numbers; shown once); write {call}, not .forward(...) "
            "or the parameter itself, or move that code into a module's forward"
        )

    def _say_view(self, model: nn.Module, programs: Iterable[Program | None]) -> None:
        """Warn of views that still exist: those that a forward did not keep are freed already."""
        views = [view for program in programs if program is not None for view in program.views]
        for view, name in views:
            if view() is None:
                continue
            self._said_view = True
            notices.warn(
                f"megacompile: the forward of {type(model).__name__} has kept a view of parameter "
                f"{name!r}, or returned it, and the view is a copy: this step changes the "
                "parameter, not the copy (shown once); read "
                f"model.get_parameter({name!r}) where the view is used"
            )
            return
