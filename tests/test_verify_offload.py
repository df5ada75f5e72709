"""`verify` finds planted faults of activations and saved tensors that wait on the host."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megacompile.ir.schedule import Schedule
from tests.schedule_faults import (
    KEPT_THERE,
    OFFLOADING,
    Edit,
    Fault,
    assert_found,
    assert_helpful,
    free_earlier,
    free_of,
    move_before,
    node,
    set_arg,
)
from tests.schedules import arguments, find

# Edits of schedules.


def free_at_once(value: str) -> Edit:
    """An activation is given back behind its last reader, without a wait for its offload."""

    def edit(schedule: Schedule) -> None:
        free_of(schedule.forward, value).kwargs = {}

    return edit


def fetch_what_stayed(schedule: Schedule) -> None:
    """A fetch from a saved value that is on the device, which no offload made ready."""
    other = find(schedule, "backward", "x")
    for label in ("1ALLOC_SAVED", "1FETCH_SAVED"):
        set_arg("backward", label, 1, other)(schedule)
    free = free_of(schedule.graphs["backward"], "y0_0_host")
    schedule.graphs["backward"].erase_node(free)


def forget_offload(schedule: Schedule) -> Schedule:
    """The copy on the host is no saved value; the backward takes the value itself."""
    backward = schedule.graphs["backward"]
    for name in ("alloc_saved_1", "y0_0_host"):
        backward.erase_node(free_of(backward, name))
    fetch, on_host = (
        find(schedule, "backward", "1FETCH_SAVED"),
        find(schedule, "backward", "y0_0_host"),
    )
    buffer = find(schedule, "backward", "1ALLOC_SAVED")
    fetch.replace_all_uses_with(on_host)
    for taken_out in (fetch, buffer):
        backward.erase_node(taken_out)
    on_host.name = "y0_0"
    schedule.forward.erase_node(free_of(schedule.forward, "y0_0"))
    outputs, saved_values = arguments(schedule.forward.output_node())[0]
    value = find(schedule, "forward", "y0_0")
    changed = tuple(value if node.name == "y0_0_host" else node for node in saved_values)
    schedule.forward.output_node().args = ((outputs, changed),)
    return replace(schedule, saved_values=tuple(node.name for node in changed))


FAULTS = [
    Fault(
        "an activation is given back before its offload is done",
        OFFLOADING,
        free_at_once("y0_0"),
        (("freed too early", "forward", "1OFFLOAD_SAVED", "FREE"),),
    ),
    Fault(
        "a saved tensor is given back before its offload is done",
        KEPT_THERE,
        free_at_once("y1_2"),
        (("freed too early", "forward", "1OFFLOAD_SAVED", "FREE"),),
    ),
    Fault(
        "a fetch of what no offload gives",
        OFFLOADING,
        fetch_what_stayed,
        (
            ("not offloaded", "backward", "1FETCH_SAVED", ""),
            ("wrong argument", "backward", "1RECOMPUTE", ""),
        ),
    ),
    Fault(
        "a fetch to another value's buffer",
        OFFLOADING,
        set_arg("backward", "1FETCH_SAVED", 2, node("backward", "2ALLOC_SAVED")),
        (
            ("wrong buffer", "backward", "1FETCH_SAVED", ""),
            ("wrong buffer", "backward", "2FETCH_SAVED", ""),
        ),
    ),
    Fault(
        "another stage's activation",
        OFFLOADING,
        set_arg("backward", "1RECOMPUTE", 2, lambda s, _: (find(s, "backward", "2FETCH_SAVED"),)),
        (
            ("wrong argument", "backward", "1RECOMPUTE", ""),
            ("use after free", "backward", "1RECOMPUTE", "2FETCH_SAVED"),
        ),
    ),
    Fault(
        "another stage's saved tensor, from the host",
        KEPT_THERE,
        set_arg("backward", "1FETCH_SAVED", 1, node("backward", "y1_2_host")),
        (
            ("wrong saved", "backward", "1B", "1FETCH_SAVED"),
            ("wrong buffer", "backward", "1FETCH_SAVED", ""),
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
        (("offload lost", "forward", "1OFFLOAD_SAVED", ""),),
    ),
    Fault(
        "the copy on the host is given back while it is read",
        OFFLOADING,
        free_earlier("y0_0_host", "1RECOMPUTE"),
        (("freed too early", "backward", "1FETCH_SAVED", "FREE"),),
    ),
    Fault(
        "an activation comes back before there is a buffer",
        OFFLOADING,
        move_before("backward", "1FETCH_SAVED", "1ALLOC_SAVED"),
        (("use before made", "backward", "1FETCH_SAVED", "1ALLOC_SAVED"),),
    ),
]


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_planted_fault_is_found_and_named(fault: Fault) -> None:
    assert_found(fault)


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_message_says_where_and_what_to_do(fault: Fault) -> None:
    assert_helpful(fault)
