"""`verify` finds planted faults of values: order, lifetimes, arguments, random states."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megacompile.ir import ops
from megacompile.ir.schedule import Schedule
from tests.schedule_faults import (
    CHANGING,
    INFERENCE,
    KEEPING,
    PLAIN,
    RANDOM,
    Fault,
    assert_found,
    assert_helpful,
    both,
    erase,
    forget,
    free_earlier,
    free_of,
    move_before,
    node,
    set_arg,
)
from tests.schedules import Spec, arguments, call, find

# Edits of schedules.


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


def residual_instead_of_snapshot(schedule: Schedule) -> Schedule:
    """The backward takes the input itself, which the forward changes."""
    name = find(schedule, "forward", "SNAPSHOT").name
    output, state = schedule.forward.output_node(), find(schedule, "forward", "state_1")
    outputs, saved_values = arguments(output)[0]
    changed = tuple(state if n.name == name else n for n in saved_values)
    output.args = ((outputs, changed),)
    schedule.forward.erase_node(find(schedule, "forward", "SNAPSHOT"))
    find(schedule, "backward", name).name = "state_1"
    names = tuple("state_1" if each == name else each for each in schedule.saved_values)
    return replace(schedule, saved_values=names)


FAULTS = [
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
        "saved values in another order",
        PLAIN,
        lambda s: replace(s, saved_values=s.saved_values[::-1]),
        (("saved values", "forward", "output", ""),),
    ),
    Fault(
        "a saved value that the forward does not give",
        Spec(stages=2),
        lambda s: setattr(find(s, "backward", "y0_0"), "name", "y7_0"),
        (
            ("saved values", "backward", "y7_0", ""),
            ("wrong argument", "backward", "1RECOMPUTE", ""),
        ),
    ),
]


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_planted_fault_is_found_and_named(fault: Fault) -> None:
    assert_found(fault)


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_message_says_where_and_what_to_do(fault: Fault) -> None:
    assert_helpful(fault)
