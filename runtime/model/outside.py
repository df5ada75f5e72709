"""Uses of parameters outside of every schedule: gradients from code outside of calls, and views.

A call of a module in the model is scheduled (`parts`). Its other methods, and losses that read
parameters, are not: they compute where the parameter is. The runtime sees only their gradients.
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
    """Warns once if a model's parameters are used outside of schedules.

    Args:
        machine: its buckets hold the parameters.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.said = False
        self._noted: weakref.WeakSet[Program] = weakref.WeakSet()
        self._read: set[int] = set()  # ids of parameters read by any schedule

    def note(self, graphs: Iterable[CapturedGraph]) -> None:
        """Record the parameters that schedules have read so far."""
        if self.said:
            return
        for program in [program for graph in graphs for program in graph.programs.values()]:
            if program is None:  # runs in eager mode, with its own warning
                self.said = True
                return
            if program in self._noted:
                continue
            self._noted.add(program)
            for given in program.capture.inputs:
                if isinstance(given, ParamInput) and given.bucket.key in self.machine.buckets:
                    params = self.machine.buckets[given.bucket.key].params
                    self._read |= {id(param) for param in params[given.param : given.param + 1]}

    def say(self, model: nn.Module) -> None:
        """At a step: warn of such gradients."""
        if self.said:
            return
        params = [p for b in self.machine.buckets.values() for p in b.params]
        outside = {id(p) for p in params if p.grad is not None and id(p) not in self._read}
        if not outside:
            return
        self.said = True
        kind = type(model).__name__
        name = next(name for name, param in model.named_parameters() if id(param) in outside)
        module = name.rpartition(".")[0]
        call = f"model.{module}(...)" if module else "model(...)"
        notices.warn(
            f"megacompile: {share(params, outside)} of {kind} have gradients that no schedule has "
            f"computed, {name!r} first: code outside of every call used them, where they lie "
            f"(slower, same numbers; said once); write {call}, not .forward(...) nor the parameter "
            "itself, or move that code into a module's forward"
        )


class ViewNotice:
    """Warns once that a view of a parameter, kept by a forward, is a copy."""

    def __init__(self) -> None:
        self.said = False

    def say(self, model: nn.Module, graphs: Iterable[CapturedGraph]) -> None:
        """At a step: warn if such a view exists. Views that a forward did not keep are freed
        already."""
        if self.said:
            return
        programs = [p for graph in graphs for p in graph.programs.values() if p is not None]
        views = (view for program in programs for view in program.views)
        name = next((name for view, name in views if view() is not None), None)
        if name is None:
            return
        self.said = True
        notices.warn(
            f"megacompile: the forward of {type(model).__name__} has kept a view of parameter "
            f"{name!r}, or returned it, and it is a copy: this step changes the parameter, not the "
            f"copy (said once); read model.get_parameter({name!r}) where the view is used"
        )
