"""Schedules as frozen data.

Nothing here computes on a device. A `Schedule` holds the FX graphs of a step (forward and, where
gradients are needed, backward and update) whose every node is a `call_function` of an op in
`megacompile.ir.ops`. Passes take a schedule and return another one; `Schedule.history` keeps what
each of them did.

Sizes are in bytes. Names are those that are printed everywhere: a stage is its index in execution
order, a bucket carries the index of the first stage that reads it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from megacompile import compat
from megacompile.ir.buckets import Bucket, Slot
from megacompile.ir.capture import InputView
from megacompile.ir.plan import Plan
from megacompile.ir.stages import Stage, Template
from megacompile.ir.symbols import Symbols

VIEWS: dict[str, Callable[..., Any]] = {}  # how a schedule is shown; `megacompile.views` fills it


@dataclass(frozen=True, slots=True)
class PassRecord:
    """One entry of a schedule's history."""

    name: str
    before: str  # the schedule's actions, one graph a line; of a captured graph, what it calls
    after: str
    time_s: float
    nodes: int  # in all graphs, afterwards


@dataclass(frozen=True, eq=False, repr=False)
class Schedule:
    """The scheduled graphs of one captured graph, for one set of input shapes, or for many.

    With `symbols`, metas say what the schedule is planned for. It is right for all values of the
    symbols for which the conditions of its stages' code hold.

    `print(schedule)` is the Python that the executor runs. A forward returns its outputs and the
    saved values: the values that the backward's placeholders of the same names stand for, and more
    that a backward for other outputs would take. A backward returns gradients, and what it leaves
    on the device for the update's placeholders of the same names. The update is what
    `optimizer.step()` runs; there is none where the backward updates. How graphs wait for one
    another is in `megacompile.ir.tokens`.
    """

    name: str
    forward: fx.Graph
    backward: fx.Graph | None
    stages: tuple[Stage, ...]
    saved_values: tuple[str, ...] = ()  # names of the forward's nodes that a backward may take
    tangents: tuple[int, ...] = ()  # the forward's outputs whose gradient the backward takes
    gradients: tuple[str, ...] = ()  # forward placeholders whose gradient the backward returns
    plan: Plan = Plan()
    slots: tuple[Slot, ...] = ()
    # (slot, bucket) that the forward leaves: for its backward; without one, for the next one
    reused: tuple[tuple[int, Bucket], ...] = ()
    history: tuple[PassRecord, ...] = ()
    draft: bool = False  # only to be simulated: passes change its graphs in place
    update: fx.Graph | None = None
    left: tuple[str, ...] = ()  # names of the backward's nodes that the update takes
    symbols: Symbols | None = None  # of its sizes and numbers; None: it is for one set of sizes
    rest: tuple[Bucket, ...] = ()  # that the update updates, although no backward here has
    # forward placeholders that are changed in place, which autograd records: see the last outputs
    recorded: tuple[str, ...] = ()
    # forward placeholders that a backward changes in place; its placeholders of the same names are
    # their memory as it is then, and what reads them as the forward did takes a snapshot
    written: tuple[str, ...] = ()
    # (output, parameter) of outputs that are views of parameters to the user, and copies here
    views: tuple[tuple[int, str], ...] = ()
    # (output, where it is) of outputs that are views of inputs; the forward returns the inputs
    input_views: tuple[tuple[int, InputView], ...] = ()
    defers: bool = False  # its gradients are not summed over replicas: a later backward does that

    @property
    def graphs(self) -> dict[str, fx.Graph]:
        """The graphs that there are, by name."""
        each = {"forward": self.forward, "backward": self.backward, "update": self.update}
        return {name: graph for name, graph in each.items() if graph is not None}

    @functools.cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """Every bucket that a stage reads, in the order of first use; then `rest`."""
        read = (b for stage in self.stages for b in stage.buckets)
        return tuple({b.key: b for b in (*read, *self.rest)}.values())

    def first_readers(self) -> dict[int, Stage]:
        """The first stage that reads each bucket, by the bucket's key."""
        return {b.key: stage for stage in reversed(self.stages) for b in stage.buckets}

    @functools.cached_property
    def gradient_params(self) -> Mapping[int, tuple[int, ...]]:
        """The parameters that get a gradient: bucket key -> indices into its params."""
        found: dict[int, set[int]] = {b.key: set(range(len(b.params))) for b in self.rest}
        for stage in self.stages:
            for key, param in stage.gradient_params:
                found.setdefault(key, set()).add(param)
        return {key: tuple(sorted(params)) for key, params in found.items()}

    @property
    def templates(self) -> tuple[Template, ...]:
        """The distinct templates, in the order of first use."""
        return tuple(dict.fromkeys(stage.traced for stage in self.stages))

    def copy(self) -> Schedule:
        """The same schedule with graphs of its own for a pass to change; a draft returns itself."""
        return self if self.draft else self.fresh()

    def fresh(self) -> Schedule:
        """The same schedule with graphs of its own, a draft too."""
        return replace(
            self,
            forward=compat.copy_graph(self.forward),
            backward=None if self.backward is None else compat.copy_graph(self.backward),
            update=None if self.update is None else compat.copy_graph(self.update),
        )

    def code(self) -> str:
        """The Python source that the executor runs, with comments."""
        return str(VIEWS["code"](self))

    def table(self) -> str:
        """Steps down, streams across."""
        return str(VIEWS["table"](self))

    def diff(self, other: Schedule, *, code: bool = False) -> str:
        """Returns the difference of `other`: what it was made with, then a unified diff by stage.

        With `code`, the Python is compared instead of the actions. "" where they do the same.
        """
        return str(VIEWS["diff"](self, other, code=code))

    def passes(self) -> str:
        """The history as a table: each pass, its time, the nodes before and after it."""
        return str(VIEWS["passes"](self))

    def to_networkx(self) -> Any:
        """A `networkx.MultiDiGraph`: ops as nodes, with a `kind` on each edge."""
        return VIEWS["to_networkx"](self)

    def to_dot(self) -> str:
        """The same in the DOT language, a cluster for each stream."""
        return str(VIEWS["to_dot"](self))

    def __str__(self) -> str:
        return self.code()

    def __repr__(self) -> str:
        graphs = ", ".join(self.graphs)
        return f"<schedule {self.name!r}: {graphs} of {len(self.stages)} stages; print() shows it>"
