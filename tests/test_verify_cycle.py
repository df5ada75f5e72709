"""`verify` finds planted faults between the graphs of a step, and of the next one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import fx

from megacompile.ir import ops
from megacompile.ir.ops import Part
from megacompile.ir.schedule import Schedule
from megacompile.ir.tokens import Token
from tests.schedule_faults import (
    ADDING,
    CHANGING,
    INFERENCE,
    LATE,
    PLAIN,
    STEPPING,
    Edit,
    Fault,
    assert_found,
    assert_helpful,
    both,
    drop_after,
    drop_token,
    free_of,
    node,
    set_arg,
    set_returned,
    without,
)
from tests.schedules import call, find

# Edits of schedules.


def graph_of(schedule: Schedule) -> fx.Graph:
    assert schedule.update is not None
    return schedule.update


def waits_instead(graph: str, label: str, other: str) -> Edit:
    """An op waits for another node, and for nothing else."""

    def edit(schedule: Schedule) -> None:
        find(schedule, graph, label).kwargs = {"after": (find(schedule, graph, other),)}

    return edit


def forget_token(graph: str, label: str) -> Edit:
    def edit(schedule: Schedule) -> None:
        lost = without(find(schedule, graph, label))
        set_returned(schedule.graphs[graph], -1, lost)

    return edit


def return_instead(graph: str, label: str, other: str) -> Edit:
    def edit(schedule: Schedule) -> None:
        was, new = find(schedule, graph, label), find(schedule, graph, other)
        change: Any = lambda nodes: tuple(new if n is was else n for n in nodes)  # noqa: E731
        set_returned(schedule.graphs[graph], -1, change)

    return edit


def stands_for(graph: str, name: str, part: Part, key: int) -> Edit:
    """A placeholder is a token of a part of a bucket, which may be none of the schedule's."""

    def edit(schedule: Schedule) -> None:
        bucket = replace(schedule.buckets[0], key=key, label=str(key))
        find(schedule, graph, name).meta["token"] = Token(bucket, part)

    return edit


def offload_again(schedule: Schedule) -> None:
    """Other gradients of bucket 2 follow, and nobody is told of them."""
    first = find(schedule, "backward", "2OFFLOAD_GRAD")
    with schedule.graphs["backward"].inserting_after(first):
        call(schedule.graphs["backward"], ops.offload_grad, *first.args)


def waits_for_nothing(value: str) -> Edit:
    def edit(schedule: Schedule) -> None:
        free_of(graph_of(schedule), value).kwargs = {}

    return edit


def wait_for_others(schedule: Schedule) -> None:
    """A left value is kept until the gradients of another bucket are on the host."""
    copied = find(schedule, "update", "gradients_1")
    free_of(graph_of(schedule), "d0_1").kwargs = {"after": (copied,)}


FAULTS = [
    Fault(
        "token taken for a value",
        CHANGING,
        set_arg("forward", "SNAPSHOT", 0, node("forward", "weights_1")),
        (
            ("wrong token", "forward", "SNAPSHOT", "weights_1"),
            ("wrong argument", "backward", "1RECOMPUTE", ""),
        ),
    ),
    Fault(
        "prefetch that does not wait for the last update",
        PLAIN,
        drop_token("forward", "2PREFETCH@0", "weights_2"),
        (("read too early", "forward", "2PREFETCH@0", "2UPDATE"),),
    ),
    Fault(
        "prefetch of a forward alone that waits for nobody",
        INFERENCE,
        drop_token("forward", "2PREFETCH@0", "weights_2"),
        (("read too early", "forward", "2PREFETCH@0", ""),),
    ),
    Fault(
        "prefetch that waits for the update of another bucket",
        PLAIN,
        waits_instead("forward", "1PREFETCH@1", "weights_2"),
        (("read too early", "forward", "1PREFETCH@1", "1UPDATE"),),
    ),
    Fault(
        "neither forward nor backward waits for the update",
        PLAIN,
        both(
            drop_token("forward", "2PREFETCH@0", "weights_2"),
            drop_token("backward", "2PREFETCH@1", "weights_2"),
        ),
        (
            ("read too early", "backward", "2PREFETCH@1", "2UPDATE"),
            ("read too early", "forward", "2PREFETCH@0", "2UPDATE"),
            ("written too early", "backward", "2OFFLOAD_GRAD", "2UPDATE"),
        ),
    ),
    Fault(
        "gradients fetched before they are there",
        ADDING,
        drop_token("backward", "2FETCH_GRAD", "gradients_2"),
        (("read too early", "backward", "2FETCH_GRAD", ""),),
    ),
    Fault(
        "update that does not wait for gradients",
        PLAIN,
        drop_token("update", "2UPDATE", "gradients_2"),
        (
            ("read too early", "update", "2UPDATE", "2OFFLOAD_GRAD"),
            ("written too early", "update", "2UPDATE", "2PREFETCH@1"),
        ),
    ),
    Fault(
        "update that waits for earlier gradients",
        PLAIN,
        waits_instead("update", "1UPDATE", "gradients_3"),
        (
            ("read too early", "update", "1UPDATE", "1OFFLOAD_GRAD"),
            ("written too early", "update", "1UPDATE", "1PREFETCH@0"),
        ),
    ),
    Fault(
        "update that waits for that of another bucket",
        PLAIN,
        waits_instead("update", "2UPDATE", "1UPDATE"),
        (
            ("read too early", "update", "2UPDATE", "2OFFLOAD_GRAD"),
            ("written too early", "update", "2UPDATE", "2PREFETCH@1"),
        ),
    ),
    Fault(
        "update before a late reader of the weights",
        LATE,
        drop_after("backward", "0OFFLOAD_GRAD"),
        (("written too early", "update", "0UPDATE", "0PREFETCH@0"),),
    ),
    Fault(
        "gradients whose token is not returned",
        PLAIN,
        forget_token("backward", "2OFFLOAD_GRAD"),
        (
            ("read too early", "update", "2UPDATE", "2OFFLOAD_GRAD"),
            ("wrong token", "backward", "2OFFLOAD_GRAD", ""),
            ("written too early", "update", "2UPDATE", "2PREFETCH@1"),
        ),
    ),
    Fault(
        "an update whose token is not returned",
        STEPPING,
        forget_token("update", "1UPDATE"),
        (
            ("read too early", "backward", "1PREFETCH@1", "1UPDATE"),
            ("read too early", "forward", "1PREFETCH@1", "1UPDATE"),
            ("written too early", "backward", "1OFFLOAD_GRAD", "1UPDATE"),
            ("wrong token", "update", "1UPDATE", ""),
        ),
    ),
    Fault(
        "an earlier op returned",
        PLAIN,
        return_instead("backward", "2OFFLOAD_GRAD", "3OFFLOAD_GRAD"),
        (
            ("read too early", "update", "2UPDATE", "2OFFLOAD_GRAD"),
            ("wrong token", "backward", "2OFFLOAD_GRAD", ""),
            ("written too early", "update", "2UPDATE", "2PREFETCH@1"),
        ),
    ),
    Fault(
        "gradients that are offloaded behind the token",
        PLAIN,
        offload_again,
        (
            ("freed too early", "backward", "2OFFLOAD_GRAD", "FREE"),
            ("gradients lost", "backward", "2OFFLOAD_GRAD", "2OFFLOAD_GRAD"),
            ("read too early", "update", "2UPDATE", "2OFFLOAD_GRAD"),
            ("wrong token", "backward", "2OFFLOAD_GRAD", ""),
        ),
    ),
    Fault(
        "token of a bucket that there is not",
        PLAIN,
        stands_for("forward", "weights_2", Part.WEIGHTS, 9),
        (
            ("read too early", "forward", "2PREFETCH@0", "2UPDATE"),
            ("wrong token", "forward", "weights_2", ""),
        ),
    ),
    Fault(
        "left gradients freed under the copy",
        replace(STEPPING, norms=False),
        waits_for_nothing("d0_1"),
        (("freed too early", "update", "0OFFLOAD_GRAD", "DEFER_FREE"),),
    ),
    Fault(
        "left gradients that wait for other gradients",
        replace(STEPPING, norms=False),
        wait_for_others,
        (("freed too early", "update", "0OFFLOAD_GRAD", "DEFER_FREE"),),
    ),
]


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_planted_fault_is_found_and_named(fault: Fault) -> None:
    assert_found(fault)


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_message_says_where_and_what_to_do(fault: Fault) -> None:
    assert_helpful(fault)
