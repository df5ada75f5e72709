"""`verify`: correct schedules pass, every planted fault is found and named, races as they are.

A fault is one edit of a correct schedule. The last tests compare with brute force: every
interleaving of the streams is walked, and what goes wrong in one of them must be what is reported.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from megacompile.errors import ScheduleError
from megacompile.ir import ops
from megacompile.ir.buckets import Bucket, Slot
from megacompile.ir.schedule import Schedule
from megacompile.verify.order import Order
from megacompile.verify.proof import HazardKind, hazards, verify
from tests.interleavings import Interleavings
from tests.schedules import Spec, arguments, build, call, find, set_arguments

PLAIN = Spec()
ADDING = Spec(accumulate=True)
SHARED = Spec(shared=True)
HOLDING = Spec(hold=True)
RANDOM = Spec(random=frozenset({1, 2}))
KEEPING = Spec(keep=frozenset({2}))
CHANGING = Spec(changes=frozenset({1}))
INFERENCE = Spec(training=False)
NORMS = Spec(norms=True)
UPDATING = Spec(update=True)
OFFLOADING = Spec(offload=frozenset({1, 2}))
KEPT_THERE = Spec(offload=frozenset({1, 2}), keep=frozenset({1, 2}))
EVERYTHING = Spec(
    stages=6,
    slots=3,
    accumulate=True,
    shared=True,
    hold=True,
    random=frozenset({1, 4}),
    keep=frozenset({2, 4}),
    changes=frozenset({1, 3}),
)
SPECS = [
    PLAIN,
    ADDING,
    SHARED,
    HOLDING,
    RANDOM,
    KEEPING,
    CHANGING,
    INFERENCE,
    EVERYTHING,
    Spec(stages=2, slots=2, hold=True, shared=True),
    Spec(stages=5, slots=4, accumulate=True, hold=True),
    Spec(stages=1),
    NORMS,
    replace(EVERYTHING, norms=True),
    UPDATING,
    replace(SHARED, update=True),
    replace(UPDATING, masters=True, hold=True),
    replace(EVERYTHING, update=True),
    replace(EVERYTHING, update=True, masters=True),
    Spec(stages=1, update=True),
    OFFLOADING,
    KEPT_THERE,
    replace(EVERYTHING, offload=frozenset({0, 1, 2, 3})),
    replace(UPDATING, offload=frozenset({1, 2, 3}), keep=frozenset({3})),
]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_correct_schedule_has_no_hazards(spec: Spec) -> None:
    schedule = build(spec)
    assert hazards(schedule) == []
    verify(schedule)


def test_memory_lives_as_long_as_one_of_its_names() -> None:
    """A sum replaces what was fetched to a room: three names of one memory."""
    schedule = build(ADDING)
    graph = schedule.graphs["backward"]
    frees = [free_of(graph, name) for name in ("alloc_grad_1", "fetch_grad_1", "add_grad_1")]
    find(schedule, "backward", "2FETCH_GRAD").append(frees[0])  # while it is being filled
    find(schedule, "backward", "2OFFLOAD_GRAD").append(frees[2])  # while it is being read
    frees[1].kwargs = frees[2].kwargs
    frees[2].kwargs = {}
    find(schedule, "backward", "1OFFLOAD_GRAD").append(frees[1])
    assert hazards(schedule) == []
    frees[1].kwargs = {}
    (hazard,) = hazards(schedule)
    assert (hazard.kind, hazard.label) == (HazardKind.FREED_TOO_EARLY, "2OFFLOAD_GRAD")


def test_what_is_parked_lives_until_its_copy_is_done() -> None:
    """Another of its names may be given up behind the park."""
    schedule = build(UPDATING)
    graph = schedule.graphs["backward"]
    graph.output_node().prepend(free_of(graph, "fetch_state_3"))
    assert hazards(schedule) == []
    free_of(graph, "update_3").kwargs = {}
    (hazard,) = hazards(schedule)
    assert (hazard.kind, hazard.label) == (HazardKind.FREED_TOO_EARLY, "0OFFLOAD_STATE")


@pytest.mark.parametrize("graph", ["forward", "backward"])
def test_a_reclaim_is_safe_wherever_it_is(graph: str) -> None:
    """What it gives back was parked by an earlier graph: nobody here has a name for it."""
    places = [n for n in build(UPDATING).graphs[graph].nodes if n.op != "placeholder"]
    for k in range(-len(places), 0):
        schedule = build(UPDATING)
        with schedule.graphs[graph].inserting_before(list(schedule.graphs[graph].nodes)[k]):
            ops.call(schedule.graphs[graph], ops.reclaim)
        assert hazards(schedule) == []
    without = build(UPDATING)
    without.forward.erase_node(find(without, "forward", "RECLAIM"))
    assert hazards(without) == []


# Planted faults. An edit changes a copy in place, or returns another schedule.

Edit = Callable[[Schedule], "Schedule | None"]
Found = tuple[str, str, str, str]  # kind, graph, label, other label


def drop_after(graph: str, label: str, nth: int = 0) -> Edit:
    def edit(schedule: Schedule) -> None:
        node = find(schedule, graph, label, nth)
        assert node.kwargs.get("after"), f"{label} has no edge to drop"
        node.kwargs = {}

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
    """The free, or park, of a value."""
    frees = ops.nodes_of(graph, ops.free, ops.park)
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


def one_slot(schedule: Schedule) -> None:
    for graph in schedule.graphs.values():
        for prefetch in ops.nodes_of(graph, ops.prefetch):
            set_arguments(prefetch, arguments(prefetch)[0], schedule.slots[0])


def erase(graph: str, label: str) -> Edit:
    """Take an op out, and out of everybody's `after`."""

    def edit(schedule: Schedule) -> None:
        node = find(schedule, graph, label)
        for user in list(node.users):
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


def set_after(schedule: Schedule, value: str, waited: str) -> None:
    """Let the free of a value wait for another one, too."""
    free = free_of(schedule.graphs["backward"], value)
    after: Any = free.kwargs["after"]
    free.kwargs = {"after": (*after, find(schedule, "backward", waited))}


def free_again(schedule: Schedule) -> None:
    graph = schedule.graphs["backward"]
    with graph.inserting_before(graph.output_node()):
        call(graph, ops.free, find(schedule, "backward", "s3_0"))


def free_weights(schedule: Schedule) -> None:
    with schedule.forward.inserting_before(schedule.forward.output_node()):
        call(schedule.forward, ops.free, find(schedule, "forward", "3PREFETCH@1"))


def forget(value: str) -> Edit:
    def edit(schedule: Schedule) -> None:
        graph = schedule.graphs["backward"]
        graph.erase_node(free_of(graph, value))

    return edit


def offload_first_part(schedule: Schedule) -> None:
    """The gradients of the shared bucket go to the host before 0B has added its own."""
    graph = schedule.graphs["backward"]
    part = find(schedule, "backward", "d3_2")
    with graph.inserting_after(part):
        offload = call(graph, ops.offload_grad, schedule.buckets[0], part)
    free_of(graph, "d3_2").kwargs = {"after": (offload,)}
    set_arg("backward", "0B", 5, ())(schedule)


def offload_twice(schedule: Schedule) -> None:
    graph = schedule.graphs["backward"]
    first = find(schedule, "backward", "2OFFLOAD_GRAD")
    with graph.inserting_after(first):
        second = call(graph, ops.offload_grad, *first.args)
    free_of(graph, "d2_1").kwargs = {"after": (second,)}


def skip_update(label: str) -> Edit:
    """Take out a bucket's update and its offload; its states are fetched for nothing."""

    def edit(schedule: Schedule) -> None:
        graph = schedule.graphs["backward"]
        update = find(schedule, "backward", f"{label}UPDATE")
        graph.erase_node(free_of(graph, update.name))
        erase("backward", f"{label}OFFLOAD_STATE")(schedule)
        erase("backward", f"{label}UPDATE")(schedule)

    return edit


def offload_state_twice(schedule: Schedule) -> None:
    graph = schedule.graphs["backward"]
    first = find(schedule, "backward", "2OFFLOAD_STATE")
    with graph.inserting_after(first):
        second = call(graph, ops.offload_state, *first.args)
    free_of(graph, "update_1").kwargs = {"after": (second,)}


def update_twice(schedule: Schedule) -> None:
    """A second step on the states that the first one read."""
    graph = schedule.graphs["backward"]
    first, room = find(schedule, "backward", "2UPDATE"), find(schedule, "backward", "2ALLOC_STATE")
    bucket, weights, gradients, _ = arguments(first)
    with graph.inserting_before(room):
        again = call(graph, ops.alloc_state, bucket, False)
        fetched = call(graph, ops.fetch_state, bucket, again, False)
    with graph.inserting_after(first):
        updated = call(graph, ops.update, bucket, weights, gradients, fetched)
    with graph.inserting_after(updated):
        offload = call(graph, ops.offload_state, bucket, updated)
    with graph.inserting_before(graph.output_node()):
        for value in (again, fetched, updated):
            call(graph, ops.free, value, after=(offload,))


def update_before_later_reader(schedule: Schedule) -> None:
    """The shared bucket is updated with the gradients of 3B, in front of 0B."""
    goal = find(schedule, "backward", "2PREFETCH@0")
    part, weights = find(schedule, "backward", "d3_2"), find(schedule, "backward", "0PREFETCH@1")
    room, state = (find(schedule, "backward", f"0{op}_STATE") for op in ("ALLOC", "FETCH"))
    update = find(schedule, "backward", "0UPDATE")
    bucket = arguments(update)[0]
    set_arguments(update, bucket, weights, part, state)
    for moved in (room, state, update, find(schedule, "backward", "0OFFLOAD_STATE")):
        goal.prepend(moved)


def residual_instead_of_snapshot(schedule: Schedule) -> Schedule:
    """The backward takes the input itself, which the forward changes."""
    name = find(schedule, "forward", "SNAPSHOT").name
    output, state = schedule.forward.output_node(), find(schedule, "forward", "state_1")
    outputs, residuals = arguments(output)[0]
    changed = tuple(state if n.name == name else n for n in residuals)
    output.args = ((outputs, changed),)
    schedule.forward.erase_node(find(schedule, "forward", "SNAPSHOT"))
    find(schedule, "backward", name).name = "state_1"
    names = tuple("state_1" if each == name else each for each in schedule.residuals)
    return replace(schedule, residuals=names)


def small_slots(schedule: Schedule) -> Schedule:
    return replace(schedule, slots=tuple(Slot(slot.index, 64) for slot in schedule.slots))


def swap_held(schedule: Schedule) -> Schedule:
    (a, first), (b, second) = schedule.held
    return replace(schedule, held=((a, second), (b, first)))


def without_after(value: str) -> Edit:
    """A value is given back, or parked, without a wait for the copy that reads it."""

    def edit(schedule: Schedule) -> None:
        free_of(schedule.graphs["backward"], value).kwargs = {}

    return edit


def park_again(schedule: Schedule) -> None:
    graph = schedule.graphs["backward"]
    with graph.inserting_before(graph.output_node()):
        call(graph, ops.park, find(schedule, "backward", "update_1"))


def free_at_once(value: str) -> Edit:
    """An activation is given back behind its last reader, without a wait for its offload."""

    def edit(schedule: Schedule) -> None:
        free_of(schedule.forward, value).kwargs = {}

    return edit


def fetch_what_stayed(schedule: Schedule) -> None:
    """A fetch from a residual that is on the device, which no offload made ready."""
    other = find(schedule, "backward", "x")
    for label in ("1ALLOC", "1FETCH"):
        set_arg("backward", label, 1, other)(schedule)
    free = free_of(schedule.graphs["backward"], "y0_0_host")
    schedule.graphs["backward"].erase_node(free)


def forget_offload(schedule: Schedule) -> Schedule:
    """The copy on the host is no residual; the backward takes the value itself."""
    backward = schedule.graphs["backward"]
    for name in ("alloc_1", "y0_0_host"):
        backward.erase_node(free_of(backward, name))
    fetch, on_host = find(schedule, "backward", "1FETCH"), find(schedule, "backward", "y0_0_host")
    room = find(schedule, "backward", "1ALLOC")
    fetch.replace_all_uses_with(on_host)
    for node in (fetch, room):
        backward.erase_node(node)
    on_host.name = "y0_0"
    schedule.forward.erase_node(free_of(schedule.forward, "y0_0"))
    outputs, residuals = arguments(schedule.forward.output_node())[0]
    value = find(schedule, "forward", "y0_0")
    changed = tuple(value if node.name == "y0_0_host" else node for node in residuals)
    schedule.forward.output_node().args = ((outputs, changed),)
    return replace(schedule, residuals=tuple(node.name for node in changed))


@dataclass(frozen=True)
class Fault:
    name: str
    spec: Spec
    edit: Edit
    found: tuple[Found, ...]  # all of it, in any order


FAULTS = [
    Fault(
        "an activation is given back before its offload is done",
        OFFLOADING,
        free_at_once("y0_0"),
        (("freed too early", "forward", "1OFFLOAD", "FREE"),),
    ),
    Fault(
        "a saved tensor is given back before its offload is done",
        KEPT_THERE,
        free_at_once("y1_2"),
        (("freed too early", "forward", "1OFFLOAD", "FREE"),),
    ),
    Fault(
        "a fetch of what no offload gives",
        OFFLOADING,
        fetch_what_stayed,
        (
            ("not offloaded", "backward", "1FETCH", ""),
            ("wrong argument", "backward", "1RECOMPUTE", ""),
        ),
    ),
    Fault(
        "a fetch to another value's room",
        OFFLOADING,
        set_arg("backward", "1FETCH", 2, node("backward", "2ALLOC")),
        (
            ("wrong room", "backward", "1FETCH", ""),
            ("wrong room", "backward", "2FETCH", ""),
        ),
    ),
    Fault(
        "another stage's activation",
        OFFLOADING,
        set_arg("backward", "1RECOMPUTE", 2, lambda s, _: (find(s, "backward", "2FETCH"),)),
        (
            ("wrong argument", "backward", "1RECOMPUTE", ""),
            ("use after free", "backward", "1RECOMPUTE", "2FETCH"),
        ),
    ),
    Fault(
        "another stage's saved tensor, from the host",
        KEPT_THERE,
        set_arg("backward", "1FETCH", 1, node("backward", "y1_2_host")),
        (
            ("wrong saved", "backward", "1B", "1FETCH"),
            ("wrong room", "backward", "1FETCH", ""),
        ),
    ),
    Fault(
        "a compute takes the copy on the host",
        OFFLOADING,
        set_arg("backward", "1RECOMPUTE", 2, lambda s, _: (find(s, "backward", "y0_0_host"),)),
        (
            ("on host", "backward", "1RECOMPUTE", "y0_0_host"),
            ("wrong argument", "backward", "1RECOMPUTE", ""),
        ),
    ),
    Fault(
        "an offload that the backward does not find",
        OFFLOADING,
        forget_offload,
        (("offload lost", "forward", "1OFFLOAD", ""),),
    ),
    Fault(
        "the copy on the host is given back while it is read",
        OFFLOADING,
        free_earlier("y0_0_host", "1RECOMPUTE"),
        (("freed too early", "backward", "1FETCH", "FREE"),),
    ),
    Fault(
        "an activation comes back before there is room",
        OFFLOADING,
        move_before("backward", "1FETCH", "1ALLOC"),
        (("use before made", "backward", "1FETCH", "1ALLOC"),),
    ),
    Fault(
        "prefetch without after",
        PLAIN,
        drop_after("forward", "2PREFETCH@0"),
        (("slot overwritten", "forward", "0F", "2PREFETCH@0"),),
    ),
    Fault(
        "prefetch without after in the backward",
        ADDING,
        drop_after("backward", "1PREFETCH@0"),
        (("slot overwritten", "backward", "3B", "1PREFETCH@0"),),
    ),
    Fault(
        "prefetch after the recompute instead of the backward",
        PLAIN,
        lambda s: setattr(
            find(s, "backward", "1PREFETCH@0"),
            "kwargs",
            {"after": (find(s, "backward", "s3_0"),)},
        ),
        (("slot overwritten", "backward", "3B", "1PREFETCH@0"),),
    ),
    Fault(
        "held slot filled without after",
        HOLDING,
        drop_after("backward", "1PREFETCH@1"),
        (
            ("slot overwritten", "backward", "3B", "1PREFETCH@1"),
            ("before begin", "backward", "1PREFETCH@1", "BEGIN"),
        ),
    ),
    Fault(
        "too few slots: two stages in one",
        Spec(stages=2),
        one_slot,
        (
            ("slot refilled", "forward", "0F", "1PREFETCH@0"),
            ("slot refilled", "backward", "1RECOMPUTE", "0PREFETCH@0"),
        ),
    ),
    Fault(
        "prefetch issued too early",
        PLAIN,
        both(drop_after("forward", "2PREFETCH@0"), move_before("forward", "2PREFETCH@0", "0F")),
        (("slot refilled", "forward", "0F", "2PREFETCH@0"),),
    ),
    Fault(
        "a slot that is not there",
        INFERENCE,
        lambda s: replace(s, slots=s.slots[:1]),
        (
            ("unknown slot", "forward", "1PREFETCH@1", ""),
            ("unknown slot", "forward", "3PREFETCH@1", ""),
        ),
    ),
    Fault(
        "slots too small",
        Spec(stages=2, training=False),
        small_slots,
        (
            ("slot too small", "forward", "0PREFETCH@0", ""),
            ("slot too small", "forward", "1PREFETCH@1", ""),
        ),
    ),
    Fault(
        "prefetch before begin",
        PLAIN,
        drop_after("forward", "0PREFETCH@0"),
        (("before begin", "forward", "0PREFETCH@0", "BEGIN"),),
    ),
    Fault(
        "prefetch of the wrong bucket",
        PLAIN,
        set_arg("forward", "2PREFETCH@0", 0, bucket(1)),
        (("wrong weights", "forward", "2F", "1PREFETCH@0"),),
    ),
    Fault(
        "no weights",
        PLAIN,
        set_arg("backward", "2B", 1, (None,)),
        (("missing weights", "backward", "2B", ""),),
    ),
    Fault(
        "hold of what the forward did not leave",
        HOLDING,
        lambda s: replace(s, held=s.held[1:]),
        (("not held", "backward", "2HOLD@0", ""),),
    ),
    Fault(
        "held and left are not the same",
        HOLDING,
        swap_held,
        (
            ("not held", "forward", "2PREFETCH@0", ""),
            ("not held", "forward", "3PREFETCH@1", ""),
            ("not held", "backward", "2HOLD@0", ""),
            ("not held", "backward", "3HOLD@1", ""),
        ),
    ),
    Fault(
        "backward before its recompute",
        PLAIN,
        move_before("backward", "2B", "2RECOMPUTE"),
        (
            ("use before made", "backward", "2B", "2RECOMPUTE"),
            ("use before made", "backward", "2B", "2RECOMPUTE"),
            ("slot overwritten", "backward", "2RECOMPUTE", "0PREFETCH@1"),
        ),
    ),
    Fault(
        "stages swapped",
        INFERENCE,
        move_before("forward", "2F", "1F"),
        (("use before made", "forward", "2F", "1F"),),
    ),
    Fault(
        "saved tensor freed before its backward",
        PLAIN,
        free_earlier("s2_1", "2B"),
        (("use after free", "backward", "2B", "2RECOMPUTE"),),
    ),
    Fault(
        "activation freed before its recompute",
        PLAIN,
        free_earlier("y1_0", "2RECOMPUTE"),
        (("use after free", "backward", "2RECOMPUTE", "y1_0"),),
    ),
    Fault(
        "gradients freed while they are offloaded",
        PLAIN,
        lambda s: setattr(free_of(s.graphs["backward"], "d2_1"), "kwargs", {}),
        (("freed too early", "backward", "2OFFLOAD_GRAD", "FREE"),),
    ),
    Fault(
        "sum freed while it is offloaded",
        ADDING,
        lambda s: setattr(free_of(s.graphs["backward"], "add_grad_1"), "kwargs", {}),
        (("freed too early", "backward", "2OFFLOAD_GRAD", "FREE"),),
    ),
    Fault(
        "freed twice",
        PLAIN,
        free_again,
        (("double free", "backward", "3RECOMPUTE", "FREE"),),
    ),
    Fault(
        "weights freed",
        PLAIN,
        free_weights,
        (("not owned", "forward", "3PREFETCH@1", "FREE"),),
    ),
    Fault(
        "saved tensor never freed", PLAIN, forget("s1_0"), (("leak", "backward", "1RECOMPUTE", ""),)
    ),
    Fault(
        "room never freed",
        ADDING,
        forget("alloc_grad_2"),
        (("leak", "backward", "1ALLOC_GRAD", ""),),
    ),
    Fault(
        "gradients offloaded before their backward",
        PLAIN,
        move_before("backward", "2OFFLOAD_GRAD", "2B"),
        (("gradients not ready", "backward", "2OFFLOAD_GRAD", "2B"),),
    ),
    Fault(
        "gradients offloaded that another backward adds to",
        SHARED,
        set_arg("backward", "0OFFLOAD_GRAD", 1, node("backward", "d3_2")),
        (
            ("gradients not ready", "backward", "0OFFLOAD_GRAD", "0B"),
            ("gradients lost", "backward", "0B", ""),
            ("use after free", "backward", "0OFFLOAD_GRAD", "3B"),
        ),
    ),
    Fault(
        "two parts offloaded instead of carried",
        SHARED,
        offload_first_part,
        (
            ("arguments", "backward", "0B", ""),
            ("gradients lost", "backward", "0OFFLOAD_GRAD", "0OFFLOAD_GRAD"),
        ),
    ),
    Fault(
        "gradients of another bucket",
        PLAIN,
        set_arg("backward", "2OFFLOAD_GRAD", 0, bucket(1)),
        (
            ("wrong gradients", "backward", "1OFFLOAD_GRAD", "2B"),
            ("gradients lost", "backward", "1OFFLOAD_GRAD", "1OFFLOAD_GRAD"),
        ),
    ),
    Fault(
        "an activation offloaded as gradients",
        PLAIN,
        set_arg("backward", "2OFFLOAD_GRAD", 1, node("backward", "s2_0")),
        (
            ("wrong gradients", "backward", "2OFFLOAD_GRAD", "2RECOMPUTE"),
            ("gradients lost", "backward", "2B", ""),
            ("use after free", "backward", "2OFFLOAD_GRAD", "2RECOMPUTE"),
        ),
    ),
    Fault(
        "gradients that nobody offloads",
        PLAIN,
        erase("backward", "1OFFLOAD_GRAD"),
        (("gradients lost", "backward", "1B", ""),),
    ),
    Fault(
        "sum that nobody offloads",
        ADDING,
        erase("backward", "1OFFLOAD_GRAD"),
        (("gradients lost", "backward", "1ADD_GRAD", ""),),
    ),
    Fault(
        "gradients offloaded twice",
        PLAIN,
        offload_twice,
        (("gradients lost", "backward", "2OFFLOAD_GRAD", "2OFFLOAD_GRAD"),),
    ),
    Fault(
        "gradients on the host overwritten while they are fetched",
        ADDING,
        set_arg("backward", "2OFFLOAD_GRAD", 1, node("backward", "d2_1")),
        (
            ("gradients refilled", "backward", "2FETCH_GRAD", "2OFFLOAD_GRAD"),
            ("gradients lost", "backward", "2ADD_GRAD", ""),
            ("use after free", "backward", "2OFFLOAD_GRAD", "2B"),
        ),
    ),
    Fault(
        "gradients fetched to another bucket's room",
        ADDING,
        set_arg("backward", "2FETCH_GRAD", 1, node("backward", "3ALLOC_GRAD")),
        (
            ("wrong room", "backward", "2FETCH_GRAD", ""),
            ("wrong room", "backward", "3FETCH_GRAD", ""),
            ("use after free", "backward", "2FETCH_GRAD", "3ALLOC_GRAD"),
        ),
    ),
    Fault(
        "gradients fetched before there is room",
        ADDING,
        move_before("backward", "2FETCH_GRAD", "2ALLOC_GRAD"),
        (("use before made", "backward", "2FETCH_GRAD", "2ALLOC_GRAD"),),
    ),
    Fault(
        "input changed before its reader",
        CHANGING,
        both(
            move_before("forward", "ASSIGN", "1F"),
            set_arg("forward", "ASSIGN", 1, node("forward", "y0_0")),
        ),
        (
            ("changed in place", "forward", "1F", "ASSIGN"),
            ("change lost", "forward", "1F", ""),
            ("change lost", "forward", "ASSIGN", ""),
        ),
    ),
    Fault(
        "new value not written",
        CHANGING,
        erase("forward", "ASSIGN"),
        (("change lost", "forward", "1F", ""),),
    ),
    Fault(
        "saved tensor not passed",
        PLAIN,
        set_arg("backward", "2B", 3, lambda _, saved: (None, *saved[1:])),
        (("arguments", "backward", "2B", ""),),
    ),
    Fault(
        "gradients not passed",
        PLAIN,
        set_arg("backward", "2OFFLOAD_GRAD", 1, None),
        (("arguments", "backward", "2OFFLOAD_GRAD", ""),),
    ),
    Fault(
        "gradient of another value passed",
        PLAIN,
        set_arg("backward", "3B", 4, lambda s, _: (find(s, "backward", "y2_0"),)),
        (("wrong gradients", "backward", "3B", ""),),
    ),
    Fault(
        "state freed while another free waits for it",
        PLAIN,
        lambda s: set_after(s, "d1_1", "s2_0"),
        (("use after free", "backward", "FREE", "2RECOMPUTE"),),
    ),
    Fault(
        "snapshot made too late",
        CHANGING,
        lambda s: find(s, "forward", "ASSIGN").append(find(s, "forward", "SNAPSHOT")),
        (("changed in place", "forward", "SNAPSHOT", "ASSIGN"),),
    ),
    Fault(
        "the backward takes what the forward changed",
        CHANGING,
        residual_instead_of_snapshot,
        (("changed in place", "forward", "state_1", "ASSIGN"),),
    ),
    Fault(
        "recompute without the generators' state",
        RANDOM,
        both(forget("save_rng"), set_arg("backward", "1RECOMPUTE", 3, None)),
        (("wrong rng", "backward", "1RECOMPUTE", ""),),
    ),
    Fault(
        "state saved behind the forward that draws",
        RANDOM,
        lambda s: find(s, "forward", "y1_0").append(find(s, "forward", "1RNG")),
        (
            ("wrong rng", "forward", "1RNG", ""),
            ("wrong rng", "backward", "1RECOMPUTE", ""),
        ),
    ),
    Fault(
        "state of another stage",
        RANDOM,
        set_arg("backward", "2RECOMPUTE", 3, node("backward", "save_rng")),
        (("wrong rng", "backward", "2RECOMPUTE", ""),),
    ),
    Fault(
        "too many tangents",
        PLAIN,
        set_arg("backward", "2B", 4, lambda s, tangents: tangents * 2),
        (("arguments", "backward", "2B", ""),),
    ),
    Fault(
        "an argument that is not given",
        PLAIN,
        set_arg("backward", "2RECOMPUTE", 2, (None,)),
        (("arguments", "backward", "2RECOMPUTE", ""),),
    ),
    Fault(
        "recompute of another activation",
        PLAIN,
        set_arg("backward", "2RECOMPUTE", 2, lambda s, _: (find(s, "backward", "y0_0"),)),
        (("wrong argument", "backward", "2RECOMPUTE", ""),),
    ),
    Fault(
        "saved tensors of another stage",
        KEEPING,
        set_arg("backward", "1B", 3, lambda s, own: (find(s, "backward", "y2_1"), own[1])),
        (
            ("wrong saved", "backward", "1B", "y2_1"),
            ("use after free", "backward", "1B", "y2_1"),
        ),
    ),
    Fault(
        "saved tensors swapped",
        PLAIN,
        set_arg("backward", "1B", 3, lambda s, own: own[::-1]),
        (("wrong saved", "backward", "1B", "1RECOMPUTE"),) * 2,
    ),
    Fault(
        "residuals in another order",
        PLAIN,
        lambda s: replace(s, residuals=s.residuals[::-1]),
        (("residuals", "forward", "output", ""),),
    ),
    Fault(
        "a residual that the forward does not give",
        Spec(stages=2),
        lambda s: setattr(find(s, "backward", "y0_0"), "name", "y7_0"),
        (
            ("residuals", "backward", "y7_0", ""),
            ("wrong argument", "backward", "1RECOMPUTE", ""),
        ),
    ),
    Fault(
        "carries of another bucket",
        SHARED,
        set_arg("backward", "0B", 5, lambda s, _: (find(s, "backward", "d3_1"),)),
        (
            ("use after free", "backward", "0B", "3B"),
            ("gradients not ready", "backward", "3OFFLOAD_GRAD", "0B"),
            ("gradients lost", "backward", "3B", ""),
            ("wrong gradients", "backward", "0B", ""),
        ),
    ),
    Fault(
        "norms of other gradients",
        NORMS,
        set_arg("backward", "2OFFLOAD_GRAD", 2, node("backward", "3NORM_GRAD")),
        (
            ("use after free", "backward", "2OFFLOAD_GRAD", "3NORM_GRAD"),
            ("wrong gradients", "backward", "2OFFLOAD_GRAD", "3NORM_GRAD"),
        ),
    ),
    Fault(
        "gradients instead of their norms",
        NORMS,
        set_arg("backward", "2OFFLOAD_GRAD", 2, node("backward", "d2_1")),
        (("wrong gradients", "backward", "2OFFLOAD_GRAD", "2B"),),
    ),
    Fault(
        "norms taken of another bucket",
        NORMS,
        set_arg("backward", "2NORM_GRAD", 0, bucket(1)),
        (("wrong gradients", "backward", "1NORM_GRAD", "2B"),),
    ),
    Fault(
        "norms freed while they are offloaded",
        NORMS,
        both(without_after("d2_1"), without_after("norm_grad_1")),
        (
            ("freed too early", "backward", "2OFFLOAD_GRAD", "FREE"),
            ("freed too early", "backward", "2OFFLOAD_GRAD", "FREE"),
        ),
    ),
    Fault(
        "norms never freed", NORMS, forget("norm_grad_1"), (("leak", "backward", "2NORM_GRAD", ""),)
    ),
    Fault(
        "update with the states of another bucket",
        UPDATING,
        set_arg("backward", "2UPDATE", 3, node("backward", "3FETCH_STATE")),
        (
            ("use after free", "backward", "2UPDATE", "3FETCH_STATE"),
            ("wrong state", "backward", "2UPDATE", "3FETCH_STATE"),
            ("updated too early", "backward", "2FETCH_STATE", "2OFFLOAD_STATE"),
        ),
    ),
    Fault(
        "update with states that were not fetched",
        UPDATING,
        set_arg("backward", "2UPDATE", 3, node("backward", "2ALLOC_STATE")),
        (
            ("wrong state", "backward", "2UPDATE", "2ALLOC_STATE"),
            ("updated too early", "backward", "2FETCH_STATE", "2OFFLOAD_STATE"),
        ),
    ),
    Fault(
        "update that nobody offloads",
        UPDATING,
        erase("backward", "2OFFLOAD_STATE"),
        (("state lost", "backward", "2UPDATE", ""),),
    ),
    Fault(
        "new states for another bucket",
        UPDATING,
        set_arg("backward", "2OFFLOAD_STATE", 0, bucket(3)),
        (("state lost", "backward", "2UPDATE", ""),),
    ),
    Fault(
        "new states offloaded twice",
        UPDATING,
        offload_state_twice,
        (("state lost", "backward", "2UPDATE", ""),),
    ),
    Fault(
        "a bucket updated twice",
        UPDATING,
        update_twice,
        (
            ("slot overwritten", "backward", "2UPDATE", "0PREFETCH@1"),
            ("state lost", "backward", "2UPDATE", "2UPDATE"),
        ),
    ),
    Fault(
        "update without weights",
        UPDATING,
        set_arg("backward", "2UPDATE", 1, None),
        (("missing weights", "backward", "2UPDATE", ""),),
    ),
    Fault(
        "update with weights of another bucket",
        UPDATING,
        set_arg("backward", "2UPDATE", 1, node("backward", "1PREFETCH@0")),
        (("wrong weights", "backward", "2UPDATE", "1PREFETCH@0"),),
    ),
    Fault(
        "update with a copy of the masters",
        replace(UPDATING, masters=True),
        set_arg("backward", "2UPDATE", 1, node("backward", "2PREFETCH@1")),
        (("wrong weights", "backward", "2UPDATE", "2PREFETCH@1"),),
    ),
    Fault(
        "update with an activation for weights",
        UPDATING,
        set_arg("backward", "2UPDATE", 1, node("backward", "d2_0")),
        (("wrong weights", "backward", "2UPDATE", "2B"),),
    ),
    Fault(
        "slot filled while the update reads it",
        UPDATING,
        lambda s: setattr(
            find(s, "backward", "1PREFETCH@0"), "kwargs", {"after": (find(s, "backward", "d3_0"),)}
        ),
        (("slot overwritten", "backward", "3UPDATE", "1PREFETCH@0"),),
    ),
    Fault(
        "states fetched to another bucket's room",
        UPDATING,
        set_arg("backward", "2FETCH_STATE", 1, node("backward", "3ALLOC_STATE")),
        (
            ("use after free", "backward", "2FETCH_STATE", "3ALLOC_STATE"),
            ("wrong room", "backward", "2FETCH_STATE", ""),
            ("wrong room", "backward", "3FETCH_STATE", ""),
        ),
    ),
    Fault(
        "states fetched to room for gradients",
        replace(UPDATING, accumulate=True),
        set_arg("backward", "2FETCH_STATE", 1, node("backward", "2ALLOC_GRAD")),
        (
            ("wrong room", "backward", "2FETCH_GRAD", ""),
            ("wrong room", "backward", "2FETCH_STATE", ""),
        ),
    ),
    Fault(
        "gradients that no update takes",
        UPDATING,
        skip_update("2"),
        (
            ("slot overwritten", "backward", "2B", "0PREFETCH@1"),
            ("gradients lost", "backward", "2B", ""),
        ),
    ),
    Fault(
        "sum that no update takes",
        replace(UPDATING, accumulate=True),
        skip_update("2"),
        (
            ("slot overwritten", "backward", "2B", "0PREFETCH@1"),
            ("gradients lost", "backward", "2ADD_GRAD", ""),
        ),
    ),
    Fault(
        "update with gradients of another bucket",
        UPDATING,
        set_arg("backward", "2UPDATE", 2, node("backward", "d3_1")),
        (
            ("use after free", "backward", "2UPDATE", "3B"),
            ("gradients lost", "backward", "2B", ""),
            ("wrong gradients", "backward", "2UPDATE", "3B"),
        ),
    ),
    Fault(
        "update before its backward",
        UPDATING,
        move_before("backward", "2UPDATE", "2B"),
        (
            ("use before made", "backward", "2UPDATE", "2B"),
            ("slot overwritten", "backward", "2B", "0PREFETCH@1"),
        ),
    ),
    Fault(
        "update freed while it is offloaded",
        UPDATING,
        without_after("update_1"),
        (("freed too early", "backward", "2OFFLOAD_STATE", "FREE"),),
    ),
    Fault(
        "update parked while it is offloaded",
        UPDATING,
        without_after("update_3"),
        (("freed too early", "backward", "0OFFLOAD_STATE", "PARK"),),
    ),
    Fault(
        "update parked before it is offloaded",
        UPDATING,
        lambda s: find(s, "backward", "0OFFLOAD_STATE").prepend(
            free_of(s.graphs["backward"], "update_3")
        ),
        (
            ("use before made", "backward", "PARK", "0OFFLOAD_STATE"),
            ("use after free", "backward", "0OFFLOAD_STATE", "0UPDATE"),
        ),
    ),
    Fault(
        "parked and freed", UPDATING, park_again, (("double free", "backward", "2UPDATE", "PARK"),)
    ),
    Fault(
        "update never freed", UPDATING, forget("update_1"), (("leak", "backward", "2UPDATE", ""),)
    ),
    Fault(
        "bucket prefetched behind its update",
        UPDATING,
        set_arg("backward", "1PREFETCH@0", 0, bucket(3)),
        (
            ("wrong weights", "backward", "1RECOMPUTE", "3PREFETCH@0"),
            ("wrong weights", "backward", "1B", "3PREFETCH@0"),
            ("wrong weights", "backward", "1UPDATE", "3PREFETCH@0"),
            ("updated too early", "backward", "3PREFETCH@0", "3OFFLOAD_STATE"),
        ),
    ),
    Fault(
        "states fetched behind their update",
        UPDATING,
        set_arg("backward", "2FETCH_STATE", 0, bucket(3)),
        (
            ("wrong room", "backward", "3FETCH_STATE", ""),
            ("wrong state", "backward", "2UPDATE", "3FETCH_STATE"),
            ("updated too early", "backward", "3FETCH_STATE", "3OFFLOAD_STATE"),
        ),
    ),
    Fault(
        "update in front of a later reader",
        replace(SHARED, update=True),
        update_before_later_reader,
        (
            ("slot overwritten", "backward", "0UPDATE", "1PREFETCH@1"),
            ("gradients not ready", "backward", "0UPDATE", "0B"),
            ("gradients lost", "backward", "0B", ""),
            ("updated too early", "backward", "0PREFETCH@0", "0OFFLOAD_STATE"),
        ),
    ),
]


def planted(fault: Fault) -> Schedule:
    schedule = build(fault.spec).copy()
    return fault.edit(schedule) or schedule


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found_and_named(fault: Fault) -> None:
    found = [(h.kind.value, h.graph, h.label, h.other) for h in hazards(planted(fault))]
    assert sorted(found) == sorted(fault.found)


def test_every_kind_of_hazard_is_planted() -> None:
    assert {kind.value for kind in HazardKind} == {f[0] for fault in FAULTS for f in fault.found}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_message_says_where_and_what_to_do(fault: Fault) -> None:
    for hazard in hazards(planted(fault)):
        where, _, rest = hazard.message.partition(": ")
        assert where == hazard.graph
        assert "; " in rest, "what to do stands behind a semicolon"
        assert len(hazard.message) < 300


# The error.


def test_the_error_marks_the_table() -> None:
    schedule = build(PLAIN)
    drop_after("forward", "2PREFETCH@0")(schedule)
    with pytest.raises(ScheduleError) as raised:
        verify(schedule)
    lines = str(raised.value).splitlines()
    assert lines[:7] == [
        "schedule 'model' has 1 hazard:",
        "  forward: 0F reads stage 'layers.0' bucket 0 in slot 0, but 2PREFETCH@0 may overwrite it "
        "first: no edge orders 0F before it; add after=(0F) to 2PREFETCH@0",
        "",
        "forward",
        "step | h2d                     | compute | d2h",
        "   0 | 0PREFETCH@0 1PREFETCH@1 | 0F      |      <-- 0F: slot overwritten",
        "   1 | 2PREFETCH@0             | 1F      |      <-- 2PREFETCH@0: slot overwritten",
    ]


def test_the_error_counts_what_it_does_not_spell_out() -> None:
    schedule = build(replace(PLAIN, stages=8))
    one_slot(schedule)
    with pytest.raises(ScheduleError, match=r"has 14 hazards:\n(  .*\n){5}  \.\.\. and 9 more\n"):
        verify(schedule)


# Size.


def test_one_dropped_edge_is_found_among_eighty_layers() -> None:
    schedule = build(replace(EVERYTHING, stages=80))
    prefetches = ops.nodes_of(schedule.graphs["backward"], ops.prefetch)
    (dropped,) = [n for n in prefetches if arguments(n)[0] is schedule.buckets[40]]
    dropped.kwargs = {}
    (hazard,) = hazards(schedule)
    assert (hazard.kind, hazard.label) == (HazardKind.SLOT_OVERWRITTEN, "43B")
    assert hazard.other == ops.label(dropped)


# Brute force.

SMALL = [
    Spec(stages=3),
    Spec(stages=4, slots=3),
    Spec(stages=3, accumulate=True),
    Spec(stages=3, shared=True, accumulate=True),
    Spec(stages=4, hold=True, slots=3),
    Spec(stages=3, changes=frozenset({1}), keep=frozenset({0}), random=frozenset({1})),
    Spec(stages=3, norms=True),
    Spec(stages=3, update=True),
    Spec(stages=3, update=True, accumulate=True, shared=True),
    Spec(stages=3, offload=frozenset({1, 2})),
    Spec(stages=3, offload=frozenset({0, 1}), keep=frozenset({1})),
    Spec(stages=3, offload=frozenset({1, 2}), changes=frozenset({1}), accumulate=True),
]


@pytest.mark.parametrize("spec", SMALL, ids=str)
def test_no_interleaving_corrupts_a_correct_schedule(spec: Spec) -> None:
    for graph in build(spec).graphs.values():
        assert Interleavings(graph).corrupted() == set()


def edges(schedule: Schedule) -> list[tuple[str, int]]:
    """Every `after=` entry: its graph and the position of its node."""
    return [
        (name, i)
        for name, graph in schedule.graphs.items()
        for i, n in enumerate(graph.nodes)
        if n.kwargs.get("after")
    ]


@pytest.mark.parametrize("spec", SMALL, ids=str)
def test_a_dropped_edge_is_found_exactly_where_it_matters(spec: Spec) -> None:
    needed = 0
    for name, i in edges(build(spec)):
        schedule = build(spec)
        graph = schedule.graphs[name]
        list(graph.nodes)[i].kwargs = {}
        corrupted = Interleavings(graph).corrupted()
        assert bool(hazards(schedule)) == bool(corrupted), corrupted
        needed += bool(corrupted)
    assert needed > 0


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(SMALL), st.data())
def test_random_edits_are_judged_as_brute_force_judges_them(
    spec: Spec, data: st.DataObject
) -> None:
    """Edges dropped, copies issued elsewhere, slots exchanged: several at once."""
    schedule = build(spec)
    name = data.draw(st.sampled_from(sorted(schedule.graphs)))
    graph = schedule.graphs[name]
    for _ in range(data.draw(st.integers(1, 3))):
        copies = (ops.prefetch, ops.fetch_grad, ops.offload_grad, ops.fetch_state)
        others = (ops.offload_state, ops.offload, ops.fetch, ops.free, ops.park)
        movable = ops.nodes_of(graph, *copies, *others)
        if not movable:
            continue
        node = data.draw(st.sampled_from(movable), label="node")
        what = data.draw(st.sampled_from(["drop", "move", "slot"]), label="edit")
        if what == "drop":
            node.kwargs = {}
        elif what == "move":
            goals = [
                n for n in graph.nodes if n.op != "placeholder" and n.target is not operator.getitem
            ]
            goal = data.draw(st.sampled_from(goals), label="goal")
            if goal is not node:
                goal.prepend(node)
        elif node.target is ops.prefetch:
            slot = data.draw(st.sampled_from(schedule.slots), label="slot")
            set_arguments(node, arguments(node)[0], slot)
    found = hazards(replace(schedule, held=()) if name == "forward" else schedule)
    races = [h for h in found if h.graph == name and h.kind is not HazardKind.LEAK]
    corrupted = Interleavings(graph).corrupted()
    assert bool(races) == bool(corrupted), (corrupted, found)


def test_order_is_streams_and_edges_only() -> None:
    schedule = build(PLAIN)
    order = Order(schedule.forward)

    def before(first: str, second: str) -> bool:
        return order.before(find(schedule, "forward", first), find(schedule, "forward", second))

    assert before("0F", "3F") and not before("3F", "0F"), "a stream's order"
    assert before("0F", "2PREFETCH@0"), "an after= edge"
    assert before("BEGIN", "3PREFETCH@1"), "a path of edges"
    assert before("2PREFETCH@0", "2F"), "a data edge"
    assert not before("1F", "2PREFETCH@0"), "nothing else"


def test_it_ends_on_values_that_are_made_of_one_another() -> None:
    schedule = build(ADDING)
    total, fetched = (find(schedule, "backward", label) for label in ("2ADD_GRAD", "2FETCH_GRAD"))
    set_arguments(fetched, arguments(fetched)[0], total)
    assert HazardKind.USE_BEFORE_MADE in {hazard.kind for hazard in hazards(schedule)}


def test_an_input_assigned_to_itself_is_found() -> None:
    schedule = build(CHANGING)
    assign = find(schedule, "forward", "ASSIGN")
    set_arguments(assign, arguments(assign)[0], arguments(assign)[0])
    assert HazardKind.CHANGE_LOST in {hazard.kind for hazard in hazards(schedule)}
