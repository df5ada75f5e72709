"""`verify` finds planted faults of updates in the backward and of optimizer states."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megacompile.ir import ops
from megacompile.ir.schedule import Schedule
from megacompile.verify.proof import HazardKind, hazards
from tests.schedule_faults import (
    SHARED,
    UPDATING,
    Edit,
    Fault,
    assert_found,
    assert_helpful,
    bucket,
    erase,
    forget,
    free_of,
    move_before,
    node,
    set_arg,
    without_after,
)
from tests.schedules import arguments, build, call, find, set_arguments

# Edits of schedules.


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
    first, buffer = (
        find(schedule, "backward", "2UPDATE"),
        find(schedule, "backward", "2ALLOC_STATE"),
    )
    bucket, weights, gradients, _ = arguments(first)
    with graph.inserting_before(buffer):
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
    buffer, state = (find(schedule, "backward", f"0{op}_STATE") for op in ("ALLOC", "FETCH"))
    update = find(schedule, "backward", "0UPDATE")
    bucket = arguments(update)[0]
    set_arguments(update, bucket, weights, part, state)
    for moved in (buffer, state, update, find(schedule, "backward", "0OFFLOAD_STATE")):
        goal.prepend(moved)


def defer_again(schedule: Schedule) -> None:
    graph = schedule.graphs["backward"]
    with graph.inserting_before(graph.output_node()):
        call(graph, ops.defer_free, find(schedule, "backward", "update_1"))


FAULTS = [
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
        (
            ("state lost", "backward", "2UPDATE", ""),
            ("wrong token", "backward", "2OFFLOAD_STATE", ""),
        ),
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
        "states fetched to another bucket's buffer",
        UPDATING,
        set_arg("backward", "2FETCH_STATE", 1, node("backward", "3ALLOC_STATE")),
        (
            ("use after free", "backward", "2FETCH_STATE", "3ALLOC_STATE"),
            ("wrong buffer", "backward", "2FETCH_STATE", ""),
            ("wrong buffer", "backward", "3FETCH_STATE", ""),
        ),
    ),
    Fault(
        "states fetched to a buffer for gradients",
        replace(UPDATING, accumulate=True),
        set_arg("backward", "2FETCH_STATE", 1, node("backward", "2ALLOC_GRAD")),
        (
            ("wrong buffer", "backward", "2FETCH_GRAD", ""),
            ("wrong buffer", "backward", "2FETCH_STATE", ""),
        ),
    ),
    Fault(
        "gradients that no update takes",
        UPDATING,
        skip_update("2"),
        (
            ("slot overwritten", "backward", "2B", "0PREFETCH@1"),
            ("gradients lost", "backward", "2B", ""),
            ("not updated", "backward", "output", ""),
        ),
    ),
    Fault(
        "sum that no update takes",
        replace(UPDATING, accumulate=True),
        skip_update("2"),
        (
            ("slot overwritten", "backward", "2B", "0PREFETCH@1"),
            ("gradients lost", "backward", "2ADD_GRAD", ""),
            ("not updated", "backward", "output", ""),
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
        "update deferred while it is offloaded",
        UPDATING,
        without_after("update_3"),
        (("freed too early", "backward", "0OFFLOAD_STATE", "DEFER_FREE"),),
    ),
    Fault(
        "update deferred before it is offloaded",
        UPDATING,
        lambda s: find(s, "backward", "0OFFLOAD_STATE").prepend(
            free_of(s.graphs["backward"], "update_3")
        ),
        (
            ("use before made", "backward", "DEFER_FREE", "0OFFLOAD_STATE"),
            ("use after free", "backward", "0OFFLOAD_STATE", "0UPDATE"),
        ),
    ),
    Fault(
        "deferred and freed",
        UPDATING,
        defer_again,
        (("double free", "backward", "2UPDATE", "DEFER_FREE"),),
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
            ("wrong buffer", "backward", "3FETCH_STATE", ""),
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


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_planted_fault_is_found_and_named(fault: Fault) -> None:
    assert_found(fault)


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_message_says_where_and_what_to_do(fault: Fault) -> None:
    assert_helpful(fault)


def test_what_is_parked_lives_until_its_copy_is_done() -> None:
    """Another of its names may be given up behind the deferred free."""
    schedule = build(UPDATING)
    graph = schedule.graphs["backward"]
    graph.output_node().prepend(free_of(graph, "fetch_state_3"))
    assert hazards(schedule) == []
    free_of(graph, "update_3").kwargs = {}
    (hazard,) = hazards(schedule)
    assert (hazard.kind, hazard.label) == (HazardKind.FREED_TOO_EARLY, "0OFFLOAD_STATE")


@pytest.mark.parametrize("graph", ["forward", "backward"])
def test_a_reclaim_is_safe_wherever_it_is(graph: str) -> None:
    """What it gives back was deferred by an earlier graph: nobody here has a name for it."""
    places = [n for n in build(UPDATING).graphs[graph].nodes if n.op != "placeholder"]
    for k in range(-len(places), 0):
        schedule = build(UPDATING)
        with schedule.graphs[graph].inserting_before(list(schedule.graphs[graph].nodes)[k]):
            ops.call(schedule.graphs[graph], ops.drain)
        assert hazards(schedule) == []
    without = build(UPDATING)
    without.forward.erase_node(find(without, "forward", "DRAIN"))
    assert hazards(without) == []
