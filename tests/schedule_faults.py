"""Faults for the tests of `verify`: edits of correct schedules, each with what is reported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx

from megacompile.ir import ops
from megacompile.ir.buckets import Bucket
from megacompile.ir.schedule import Schedule
from megacompile.ir.tokens import token_of
from megacompile.verify.proof import hazards
from tests.schedules import Spec, arguments, build, find, set_arguments

# Schedules that faults are planted in.

PLAIN = Spec()
ADDING = Spec(accumulate=True)
SHARED = Spec(shared=True)
HOLDING = Spec(reuse=True)
RANDOM = Spec(random=frozenset({1, 2}))
KEEPING = Spec(keep=frozenset({2}))
CHANGING = Spec(changes=frozenset({1}))
INFERENCE = Spec(training=False)
NORMS = Spec(norms=True)
UPDATING = Spec(update=True)
OFFLOADING = Spec(offload=frozenset({1, 2}))
KEPT_THERE = Spec(offload=frozenset({1, 2}), keep=frozenset({1, 2}))
LATE = Spec(shared=True, late=True)
STEPPING = Spec(device=frozenset({0}), resident=frozenset({3}), helps=True, norms=True)
EVERYTHING = Spec(
    stages=6,
    slots=3,
    accumulate=True,
    shared=True,
    reuse=True,
    random=frozenset({1, 4}),
    keep=frozenset({2, 4}),
    changes=frozenset({1, 3}),
)


Edit = Callable[[Schedule], "Schedule | None"]
Found = tuple[str, str, str, str]  # kind, graph, label, other label


@dataclass(frozen=True)
class Fault:
    """An edit of a correct schedule, and what `verify` says of it."""

    name: str
    spec: Spec
    edit: Edit
    found: tuple[Found, ...]  # all of it, in any order

    def __str__(self) -> str:
        """For the ids of tests."""
        return self.name

    def planted(self) -> Schedule:
        """The schedule with the fault in it."""
        schedule = build(self.spec).copy()
        return self.edit(schedule) or schedule


def assert_found(fault: Fault) -> None:
    """It is found, and nothing else is."""
    found = [(h.kind.value, h.graph, h.label, h.other) for h in hazards(fault.planted())]
    assert sorted(found) == sorted(fault.found)


def assert_helpful(fault: Fault) -> None:
    """Every message begins with the graph, and says what to do."""
    for hazard in hazards(fault.planted()):
        where, _, rest = hazard.message.partition(": ")
        assert where == hazard.graph
        assert "; " in rest, "what to do stands behind a semicolon"
        assert len(hazard.message) < 300


# Edits.


def drop_after(graph: str, label: str, nth: int = 0) -> Edit:
    """Drop an op's edges to ops of its graph."""

    def edit(schedule: Schedule) -> None:
        node = find(schedule, graph, label, nth)
        lost = waits_for(node)
        assert lost, f"{label} has no edge to drop"
        after: Any = node.kwargs["after"]
        node.kwargs = {"after": tuple(n for n in after if n not in lost)}

    return edit


def waits_for(node: fx.Node) -> list[fx.Node]:
    """The ops of its graph that a node names in `after=`."""
    after: Any = node.kwargs.get("after", ())
    return [n for n in after if token_of(n) is None]


def drop_token(graph: str, label: str, token: str) -> Edit:
    def edit(schedule: Schedule) -> None:
        node = find(schedule, graph, label)
        after: Any = node.kwargs["after"]
        assert token in [n.name for n in after]
        node.kwargs = {"after": tuple(n for n in after if n.name != token)}

    return edit


def move_before(graph: str, label: str, target: str) -> Edit:
    """Issue an op, with its items, before another one."""

    def edit(schedule: Schedule) -> None:
        node, goal = find(schedule, graph, label), find(schedule, graph, target)
        for moved in (node, *(item for _, item in ops.items(node))):
            goal.prepend(moved)

    return edit


def free_earlier(value: str, target: str) -> Edit:
    def edit(schedule: Schedule) -> None:
        graph = schedule.graphs["backward"]
        find(schedule, "backward", target).prepend(free_of(graph, value))

    return edit


def free_of(graph: fx.Graph, value: str) -> fx.Node:
    """The free, deferred or not, of a value."""
    frees = ops.nodes_of(graph, ops.free, ops.defer_free)
    return next(n for n in frees if arguments(n)[0].name == value)


def set_arg(graph: str, label: str, position: int, value: Any) -> Edit:
    """Replace an argument; `value` may be a function of the schedule and the argument."""

    def edit(schedule: Schedule) -> None:
        node = find(schedule, graph, label)
        args = list(arguments(node))
        args[position] = value(schedule, args[position]) if callable(value) else value
        set_arguments(node, *args)

    return edit


def node(graph: str, label: str) -> Callable[[Schedule, Any], fx.Node]:
    return lambda schedule, _: find(schedule, graph, label)


def bucket(index: int) -> Callable[[Schedule, Any], Bucket]:
    return lambda schedule, _: schedule.buckets[index]


def set_returned(
    graph: fx.Graph, at: int, change: Callable[[tuple[fx.Node, ...]], tuple[fx.Node, ...]]
) -> None:
    """Change one of the tuples that a graph returns."""
    returned = list(ops.returned(graph))
    returned[at] = change(returned[at])
    graph.output_node().args = (tuple(returned),)


def without(node: fx.Node) -> Callable[[tuple[fx.Node, ...]], tuple[fx.Node, ...]]:
    return lambda nodes: tuple(n for n in nodes if n is not node)


def one_slot(schedule: Schedule) -> None:
    for graph in schedule.graphs.values():
        for prefetch in ops.nodes_of(graph, ops.prefetch):
            set_arguments(prefetch, arguments(prefetch)[0], schedule.slots[0])


def erase(graph: str, label: str) -> Edit:
    """Take an op out, out of everybody's `after`, and out of what is returned."""

    def edit(schedule: Schedule) -> None:
        node = find(schedule, graph, label)
        for user in list(node.users):
            if user.op == "output":
                set_returned(schedule.graphs[graph], -1, without(node))
                continue
            after: Any = user.kwargs["after"]
            user.kwargs = {"after": tuple(n for n in after if n is not node)}
        schedule.graphs[graph].erase_node(node)

    return edit


def both(*edits: Edit) -> Edit:
    def edit(schedule: Schedule) -> Schedule:
        for each in edits:
            schedule = each(schedule) or schedule
        return schedule

    return edit


def forget(value: str) -> Edit:
    def edit(schedule: Schedule) -> None:
        graph = schedule.graphs["backward"]
        graph.erase_node(free_of(graph, value))

    return edit


def without_after(value: str) -> Edit:
    """A value is given back, or deferred, without a wait for the copy that reads it."""

    def edit(schedule: Schedule) -> None:
        free_of(schedule.graphs["backward"], value).kwargs = {}

    return edit
