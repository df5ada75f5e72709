"""`verify` finds planted faults of gradients and their norms."""

from __future__ import annotations

import pytest

from megacompile.ir import ops
from megacompile.ir.schedule import Schedule
from megacompile.verify.proof import HazardKind, hazards
from tests.schedule_faults import (
    ADDING,
    NORMS,
    PLAIN,
    SHARED,
    Fault,
    assert_found,
    assert_helpful,
    both,
    bucket,
    erase,
    forget,
    free_of,
    move_before,
    node,
    set_arg,
    without_after,
)
from tests.schedules import Spec, build, call, find

UPDATED_NORMS = Spec(update=True, norms=True, accumulate=True)

# Edits of schedules.


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


FAULTS = [
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
        "buffer never freed",
        ADDING,
        forget("alloc_grad_2"),
        (("leak", "backward", "1ALLOC_GRAD", ""),),
    ),
    Fault(
        "gradients offloaded before their backward",
        PLAIN,
        move_before("backward", "2OFFLOAD_GRAD", "2B"),
        (
            ("gradients not ready", "backward", "2OFFLOAD_GRAD", "2B"),
            ("written too early", "update", "2UPDATE", "2PREFETCH@1"),
        ),
    ),
    Fault(
        "gradients offloaded that another backward adds to",
        SHARED,
        set_arg("backward", "0OFFLOAD_GRAD", 1, node("backward", "d3_2")),
        (
            ("gradients not ready", "backward", "0OFFLOAD_GRAD", "0B"),
            ("gradients lost", "backward", "0B", ""),
            ("use after free", "backward", "0OFFLOAD_GRAD", "3B"),
            ("written too early", "update", "0UPDATE", "0PREFETCH@0"),
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
            ("written too early", "update", "2UPDATE", "2PREFETCH@1"),
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
        (
            ("gradients lost", "backward", "1B", ""),
            ("written too early", "update", "1UPDATE", "1PREFETCH@0"),
        ),
    ),
    Fault(
        "sum that nobody offloads",
        ADDING,
        erase("backward", "1OFFLOAD_GRAD"),
        (
            ("gradients lost", "backward", "1ADD_GRAD", ""),
            ("written too early", "update", "1UPDATE", "1PREFETCH@0"),
        ),
    ),
    Fault(
        "gradients offloaded twice",
        PLAIN,
        offload_twice,
        (
            ("gradients lost", "backward", "2OFFLOAD_GRAD", "2OFFLOAD_GRAD"),
            ("read too early", "update", "2UPDATE", "2OFFLOAD_GRAD"),
            ("wrong token", "backward", "2OFFLOAD_GRAD", ""),
        ),
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
        "gradients fetched to another bucket's buffer",
        ADDING,
        set_arg("backward", "2FETCH_GRAD", 1, node("backward", "3ALLOC_GRAD")),
        (
            ("wrong buffer", "backward", "2FETCH_GRAD", ""),
            ("wrong buffer", "backward", "3FETCH_GRAD", ""),
            ("use after free", "backward", "2FETCH_GRAD", "3ALLOC_GRAD"),
        ),
    ),
    Fault(
        "gradients fetched before there is a buffer",
        ADDING,
        move_before("backward", "2FETCH_GRAD", "2ALLOC_GRAD"),
        (("use before made", "backward", "2FETCH_GRAD", "2ALLOC_GRAD"),),
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
        "partial gradients of another bucket",
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
            ("gradients lost", "backward", "2NORM_GRAD", ""),
            ("use after free", "backward", "2OFFLOAD_GRAD", "3NORM_GRAD"),
            ("wrong gradients", "backward", "2OFFLOAD_GRAD", "3NORM_GRAD"),
        ),
    ),
    Fault(
        "gradients instead of their norms",
        NORMS,
        set_arg("backward", "2OFFLOAD_GRAD", 2, node("backward", "d2_1")),
        (
            ("gradients lost", "backward", "2NORM_GRAD", ""),
            ("wrong gradients", "backward", "2OFFLOAD_GRAD", "2B"),
        ),
    ),
    Fault(
        "norms that nobody takes",
        NORMS,
        set_arg("backward", "2OFFLOAD_GRAD", 2, None),
        (("gradients lost", "backward", "2NORM_GRAD", ""),),
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
        "norms of other gradients than an update takes",
        UPDATED_NORMS,
        set_arg("backward", "2OFFLOAD_STATE", 2, node("backward", "3NORM_GRAD")),
        (
            ("gradients lost", "backward", "2NORM_GRAD", ""),
            ("use after free", "backward", "2OFFLOAD_STATE", "3NORM_GRAD"),
            ("wrong gradients", "backward", "2OFFLOAD_STATE", "3NORM_GRAD"),
        ),
    ),
    Fault(
        "norms without what earlier backwards left",
        UPDATED_NORMS,
        set_arg("backward", "2NORM_GRAD", 1, node("backward", "d2_1")),
        (
            ("use after free", "backward", "2NORM_GRAD", "2B"),
            ("wrong gradients", "backward", "2OFFLOAD_STATE", "2NORM_GRAD"),
        ),
    ),
    Fault(
        "norms never freed", NORMS, forget("norm_grad_1"), (("leak", "backward", "2NORM_GRAD", ""),)
    ),
]


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_planted_fault_is_found_and_named(fault: Fault) -> None:
    assert_found(fault)


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_message_says_where_and_what_to_do(fault: Fault) -> None:
    assert_helpful(fault)


def test_memory_lives_as_long_as_one_of_its_names() -> None:
    """A sum replaces what was fetched to a buffer: three names of one memory."""
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
