"""`verify` finds planted faults in the update graph, and in what a backward leaves for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torch import fx

from megacompile.ir import ops
from megacompile.ir.buckets import Bucket
from megacompile.ir.schedule import Schedule
from tests.schedule_faults import (
    PLAIN,
    SHARED,
    STEPPING,
    UPDATING,
    Edit,
    Fault,
    assert_found,
    assert_helpful,
    both,
    erase,
    free_of,
    move_before,
    node,
    set_arg,
    set_returned,
)
from tests.schedules import arguments, build, call, find, set_arguments

# Edits of schedules.


def graph_of(schedule: Schedule) -> fx.Graph:
    assert schedule.update is not None
    return schedule.update


def add_update(
    op: Callable[..., Any], wanted: Callable[[Schedule], Bucket]
) -> Callable[[Schedule], None]:
    def edit(schedule: Schedule) -> None:
        graph, bucket = graph_of(schedule), wanted(schedule)
        with graph.inserting_before(graph.output_node()):
            done = call(graph, op, bucket, after=tuple(graph.find_nodes(op="placeholder")))
        set_returned(graph, -1, lambda nodes: (*nodes, done))

    return edit


def not_there(schedule: Schedule) -> Bucket:
    return replace(schedule.buckets[0], key=9, label="9")


def update_in_both(schedule: Schedule) -> Schedule:
    """The backward updates each bucket, and so does the step."""
    other = build(PLAIN).update
    return replace(schedule, update=other)


def made_by(op: Callable[..., Any], label: str) -> Edit:
    def edit(schedule: Schedule) -> None:
        find(schedule, "update", label).target = op

    return edit


def leave_less(schedule: Schedule) -> None:
    set_returned(schedule.graphs["backward"], 1, lambda nodes: nodes[1:])


def leave_partial_gradients(schedule: Schedule) -> Schedule:
    """Of the shared bucket, what the first of two contributors gives."""
    backward, update = schedule.graphs["backward"], graph_of(schedule)
    partial, whole = (find(schedule, "backward", name) for name in ("d3_2", "d0_1"))
    backward.erase_node(free_of(backward, partial.name))
    set_returned(backward, 1, lambda nodes: tuple(partial if n is whole else n for n in nodes))
    offload = find(schedule, "backward", "0OFFLOAD_GRAD")
    with backward.inserting_before(backward.output_node()):
        call(backward, ops.free, whole, after=(offload,))
    taken = find(schedule, "update", whole.name)
    with update.inserting_after(taken):
        new = update.create_node("placeholder", partial.name, name=partial.name)
    new.meta = dict(taken.meta)
    taken.replace_all_uses_with(new)
    update.erase_node(taken)
    return replace(schedule, left=(partial.name, *schedule.left[1:]))


def swap_left(schedule: Schedule) -> None:
    """Each of two updates takes the other's states."""
    one, other = (find(schedule, "update", f"{k}UPDATE") for k in (0, 1))
    states = arguments(one)[3], arguments(other)[3]
    for update, state in zip((one, other), reversed(states), strict=True):
        set_arguments(update, *arguments(update)[:3], state)
    for update in (one, other):  # behind both
        free = free_of(graph_of(schedule), arguments(update)[3].name)
        graph_of(schedule).output_node().prepend(free)


def waits_for_nothing(value: str) -> Edit:
    def edit(schedule: Schedule) -> None:
        free_of(graph_of(schedule), value).kwargs = {}

    return edit


def keep(value: str) -> Edit:
    def edit(schedule: Schedule) -> None:
        graph_of(schedule).erase_node(free_of(graph_of(schedule), value))

    return edit


def free_before(value: str, label: str) -> Edit:
    def edit(schedule: Schedule) -> None:
        find(schedule, "update", label).prepend(free_of(graph_of(schedule), value))

    return edit


def free_a_token(schedule: Schedule) -> None:
    graph = graph_of(schedule)
    with graph.inserting_before(graph.output_node()):
        call(graph, ops.free, find(schedule, "update", "gradients_1"))


def help_with(*labels: str) -> Edit:
    def edit(schedule: Schedule) -> None:
        named = tuple(find(schedule, "update", label) for label in labels)
        set_arguments(find(schedule, "update", "HELP_HOST"), named)

    return edit


def bring_back_twice(schedule: Schedule) -> None:
    first = find(schedule, "update", "0OFFLOAD_STATE")
    with graph_of(schedule).inserting_after(first):
        second = call(graph_of(schedule), ops.offload_state, *first.args)
    free_of(graph_of(schedule), "update").kwargs = {"after": (first, second)}
    set_returned(graph_of(schedule), -1, lambda nodes: (*nodes, second))


FAULTS = [
    Fault(
        "bucket that is not updated",
        PLAIN,
        erase("update", "2UPDATE"),
        (("not updated", "update", "output", ""),),
    ),
    Fault(
        "nothing is updated",
        PLAIN,
        lambda s: replace(s, update=None),
        (
            ("not updated", "backward", "output", ""),
            ("not updated", "backward", "output", ""),
            ("not updated", "backward", "output", ""),
            ("not updated", "backward", "output", ""),
        ),
    ),
    Fault(
        "bucket without gradients that is updated",
        PLAIN,
        add_update(ops.update_host, not_there),
        (("wrong update", "update", "9UPDATE", ""),),
    ),
    Fault(
        "bucket updated twice in a step",
        PLAIN,
        add_update(ops.update_host, lambda s: s.buckets[1]),
        (
            ("state lost", "update", "1UPDATE", "1UPDATE"),
            ("written too early", "backward", "1OFFLOAD_GRAD", "1UPDATE"),
        ),
    ),
    Fault(
        "updated in the backward and in the step",
        UPDATING,
        update_in_both,
        (
            ("read too early", "update", "0UPDATE", "0OFFLOAD_STATE"),
            ("read too early", "update", "1UPDATE", "1OFFLOAD_STATE"),
            ("read too early", "update", "2UPDATE", "2OFFLOAD_STATE"),
            ("read too early", "update", "3UPDATE", "3OFFLOAD_STATE"),
            ("written too early", "update", "0UPDATE", "0OFFLOAD_STATE"),
            ("written too early", "update", "1UPDATE", "1OFFLOAD_STATE"),
            ("written too early", "update", "2UPDATE", "2OFFLOAD_STATE"),
            ("written too early", "update", "3UPDATE", "3OFFLOAD_STATE"),
            ("wrong update", "update", "0UPDATE", ""),
            ("wrong update", "update", "1UPDATE", ""),
            ("wrong update", "update", "2UPDATE", ""),
            ("wrong update", "update", "3UPDATE", ""),
        ),
    ),
    Fault(
        "resident bucket updated on the host",
        STEPPING,
        made_by(ops.update_host, "3UPDATE"),
        (
            ("written too early", "backward", "3KEEP_GRAD", "3UPDATE"),
            ("wrong update", "update", "3UPDATE", ""),
        ),
    ),
    Fault(
        "bucket on the host updated as if it were resident",
        STEPPING,
        both(help_with("2UPDATE"), made_by(ops.update_resident, "1UPDATE")),
        (("wrong update", "update", "1UPDATE", ""),),
    ),
    Fault(
        "the backward leaves less than the update takes",
        STEPPING,
        leave_less,
        (
            ("leak", "backward", "0B", ""),
            ("left behind", "backward", "output", ""),
        ),
    ),
    Fault(
        "the backward leaves what is added to",
        replace(SHARED, device=frozenset({0})),
        leave_partial_gradients,
        (("left behind", "backward", "3B", ""),),
    ),
    Fault(
        "update with what was left of another bucket",
        replace(STEPPING, device=frozenset({0, 1})),
        swap_left,
        (
            ("written too early", "update", "0OFFLOAD_STATE", "0FETCH_STATE"),
            ("wrong state", "update", "0UPDATE", "fetch_state"),
            ("wrong state", "update", "1UPDATE", "fetch_state_1"),
        ),
    ),
    Fault(
        "update with gradients for states",
        STEPPING,
        set_arg("update", "0UPDATE", 3, node("update", "d0_1")),
        (
            ("written too early", "update", "0OFFLOAD_STATE", "0FETCH_STATE"),
            ("wrong state", "update", "0UPDATE", "d0_1"),
        ),
    ),
    Fault(
        "left gradients never freed",
        STEPPING,
        keep("d0_1"),
        (("leak", "update", "d0_1", ""),),
    ),
    Fault(
        "left states never freed",
        STEPPING,
        keep("fetch_state"),
        (("leak", "update", "fetch_state", ""),),
    ),
    Fault(
        "left gradients freed before the update",
        STEPPING,
        free_before("d0_1", "0UPDATE"),
        (("use after free", "update", "0UPDATE", "d0_1"),),
    ),
    Fault(
        "new states freed under the copy",
        STEPPING,
        waits_for_nothing("update"),
        (("freed too early", "update", "0OFFLOAD_STATE", "DEFER_FREE"),),
    ),
    Fault(
        "a token freed",
        STEPPING,
        free_a_token,
        (("not owned", "update", "gradients_1", "FREE"),),
    ),
    Fault(
        "new states stay on the device",
        STEPPING,
        erase("update", "0OFFLOAD_STATE"),
        (("state lost", "update", "0UPDATE", ""),),
    ),
    Fault(
        "new states brought back twice",
        STEPPING,
        bring_back_twice,
        (("state lost", "update", "0UPDATE", ""),),
    ),
    Fault(
        "help with what the device does",
        STEPPING,
        help_with("1UPDATE", "3UPDATE"),
        (("wrong help", "update", "HELP_HOST", "3UPDATE"),),
    ),
    Fault(
        "help with one update twice",
        STEPPING,
        help_with("1UPDATE", "1UPDATE"),
        (("wrong help", "update", "HELP_HOST", "1UPDATE"),),
    ),
    Fault(
        "help before there is an update",
        STEPPING,
        move_before("update", "HELP_HOST", "2UPDATE"),
        (("use before made", "update", "HELP_HOST", "2UPDATE"),),
    ),
]


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_planted_fault_is_found_and_named(fault: Fault) -> None:
    assert_found(fault)


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_message_says_where_and_what_to_do(fault: Fault) -> None:
    assert_helpful(fault)
