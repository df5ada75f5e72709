"""Schedules as frozen data.

A `Schedule` holds the FX graphs of a step (forward and, if gradients are needed, backward and
update). Every node is a `call_function` of an op in `megacompile.ir.ops`. Nothing here computes on
a device. Passes take a schedule and return another one; `Schedule.history` records their effects.

Sizes are in bytes. Printed names are the same everywhere: a stage is named by its index in
execution order, a bucket by the index of the first stage that reads it.
"""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from megacompile import compat
from megacompile.ir.buckets import Bucket, Slot
from megacompile.ir.capture import InputView, PassRecord
from megacompile.ir.plan import Plan
from megacompile.ir.stages import Stage, Template
from megacompile.ir.tensors import Symbols, TensorMeta

VIEWS: dict[str, Callable[..., Any]] = {}  # by name; filled by `megacompile.views`


@dataclass(frozen=True, eq=False, repr=False)
class Schedule:
    """The scheduled graphs of one captured graph, for one set of input shapes, or for many.

    With `symbols`, metas have the planned sizes. The schedule is valid for all symbol values that
    satisfy the conditions of its stages' code.

    `print(schedule)` is the Python that the executor runs. A forward returns its outputs and its
    saved values, which the backward's placeholders take by name; some are only for a backward of
    other outputs. A backward returns gradients, and values that stay on the device, which the
    update's placeholders take by name. `optimizer.step()` runs the update; if the backward updates,
    there is no update graph. `megacompile.ir.edges` describes the waits between graphs.
    """

    name: str
    forward: fx.Graph
    backward: fx.Graph | None
    stages: tuple[Stage, ...]
    saved_values: tuple[str, ...] = ()  # names of the forward's nodes that a backward may read
    tangents: tuple[int, ...] = ()  # the forward's outputs whose gradient the backward takes
    gradients: tuple[str, ...] = ()  # forward placeholders whose gradient the backward returns
    plan: Plan = Plan()
    slots: tuple[Slot, ...] = ()
    # (slot, bucket) pairs that the forward leaves for its backward, or else for the next forward
    reused: tuple[tuple[int, Bucket], ...] = ()
    history: tuple[PassRecord, ...] = ()
    draft: bool = False  # for simulation only: passes change its graphs in place
    update: fx.Graph | None = None
    left: tuple[str, ...] = ()  # names of the backward's nodes that the update reads
    symbols: Symbols | None = None  # of its sizes and numbers; None: for one set of sizes
    rest: tuple[Bucket, ...] = ()  # updated without gradients from this schedule's backward
    # forward placeholders whose in-place changes autograd records; new values are the last outputs
    recorded: tuple[str, ...] = ()
    # (output, parameter): user-visible views of parameters, which are copies here
    views: tuple[tuple[int, str], ...] = ()
    # (output, view) of outputs that are views of inputs; the forward returns the inputs
    input_views: tuple[tuple[int, InputView], ...] = ()
    defers: bool = False  # a later backward sums its gradients over replicas

    @property
    def graphs(self) -> dict[str, fx.Graph]:
        """The existing graphs, by name."""
        each = {"forward": self.forward, "backward": self.backward, "update": self.update}
        return {name: graph for name, graph in each.items() if graph is not None}

    @functools.cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """Every bucket that a stage reads, in the order of first use; then `rest`."""
        read = (b for stage in self.stages for b in stage.buckets)
        return tuple({b.key: b for b in (*read, *self.rest)}.values())

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
        """The same schedule with copied graphs for a pass to change; a draft returns itself."""
        return self if self.draft else self.fresh()

    def fresh(self) -> Schedule:
        """The same schedule with copied graphs, even for a draft."""
        graphs: dict[str, Any] = {n: compat.copy_graph(graph) for n, graph in self.graphs.items()}
        return replace(self, **graphs)

    def code(self) -> str:
        """The Python source that the executor runs, with comments."""
        return str(VIEWS["code"](self))

    def table(self) -> str:
        """Steps down, streams across."""
        return str(VIEWS["table"](self))

    def diff(self, other: Schedule) -> str:
        """A unified diff of this schedule's Python and that of `other`; "" if they are equal."""
        return str(VIEWS["diff"](self, other))

    def to_networkx(self) -> Any:
        """A `networkx.MultiDiGraph`: ops as nodes, with a `kind` on each edge."""
        return VIEWS["to_networkx"](self)

    def __str__(self) -> str:
        return self.code()

    def __repr__(self) -> str:
        """A line with the planned inputs of the call that the schedule is for."""
        placeholders = self.forward.find_nodes(op="placeholder")
        values = [node.meta["value"] for node in placeholders if "input" in node.meta]
        inputs = ", ".join(str(value) for value in values if isinstance(value, TensorMeta))
        inputs = textwrap.shorten(inputs, 60, placeholder=" ...") or "no tensors"
        sizes = inputs + " and other sizes" * (self.symbols is not None)
        of = f"{', '.join(self.graphs)} of {len(self.stages)} stages"
        return f"<schedule {self.name!r} for {sizes}: {of}; print() shows it>"
