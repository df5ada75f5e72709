"""`assign_slots`: who goes where, what each prefetch waits for, what stays for the backward."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from megacompile.ir.schedule import Schedule
from megacompile.passes.schedule.slots import assign_slots
from tests.actions import apply, parse, text, waits

FORWARD = "BEGIN 0PREFETCH@? 1PREFETCH@? 2PREFETCH@? 0F 3PREFETCH@? 1F 2F 3F"
BACKWARD = (
    "BEGIN 3PREFETCH@? 2PREFETCH@? 1PREFETCH@? 3B 0PREFETCH@? 2RECOMPUTE 2B 1RECOMPUTE 1B "
    "0RECOMPUTE 0B"
)


def placed(line: str, *, slots: int, reuse: bool = False, **stubs: Any) -> Schedule:
    return apply(functools.partial(assign_slots, slots=slots, reuse=reuse), parse(line, **stubs))


def out(line: str, *, slots: int, reuse: bool = False, **stubs: Any) -> str:
    schedule = placed(line, slots=slots, reuse=reuse, **stubs)
    return " | ".join(waits(graph) for graph in schedule.graphs.values())


def test_a_slot_is_filled_again_after_its_last_reader() -> None:
    """The docstring's first example."""
    line = "BEGIN 0PREFETCH@? 1PREFETCH@? 0F 2PREFETCH@? 1F 2F"
    assert out(line, slots=2) == (
        "BEGIN 0PREFETCH@0(after=BEGIN) 1PREFETCH@1(after=BEGIN) 0F 2PREFETCH@0(after=0F) 1F 2F"
    )


def test_the_last_reader_may_be_a_backward_behind_a_recompute() -> None:
    line = "0F 1F 2F | BEGIN 2PREFETCH@? 1PREFETCH@? 2RECOMPUTE 2B 0PREFETCH@? 1RECOMPUTE 1B 0B"
    assert out(line, slots=2).partition(" | ")[2] == (
        "BEGIN 2PREFETCH@0(after=BEGIN) 1PREFETCH@1(after=BEGIN) 2RECOMPUTE 2B "
        "0PREFETCH@0(after=2B) 1RECOMPUTE 1B 0B"
    )


def test_a_slot_that_is_empty_comes_first() -> None:
    line = "BEGIN 0PREFETCH@? 0F 1PREFETCH@? 1F 2PREFETCH@? 2F"
    assert out(line, slots=3) == (
        "BEGIN 0PREFETCH@0(after=BEGIN) 0F 1PREFETCH@1(after=BEGIN) 1F 2PREFETCH@2(after=BEGIN) 2F"
    )


def test_the_bucket_that_is_wanted_last_gives_way() -> None:
    """Bucket 1 is wanted again by 5F, bucket 2 is not: 4 takes the place of 2."""
    line = (
        "BEGIN 0PREFETCH@? 1PREFETCH@? 2PREFETCH@? 0F 1F 3PREFETCH@? 2F 4PREFETCH@? 3F "
        "1PREFETCH@? 4F 5F"
    )
    schedule = placed(line, slots=3, reads={5: "1"})
    assert text(schedule) == (
        "0PREFETCH@0 1PREFETCH@1 2PREFETCH@2 0F 1F 3PREFETCH@0 2F 4PREFETCH@2 3F 4F 5F"
    )


def test_what_is_still_in_a_slot_is_not_fetched_again() -> None:
    line = "BEGIN 0PREFETCH@? 1PREFETCH@? 0F 2PREFETCH@? 1F 0PREFETCH@? 2F 3F"
    assert text(placed(line, slots=3, reads={3: "0"})) == (
        "0PREFETCH@0 1PREFETCH@1 0F 2PREFETCH@2 1F 2F 3F"
    )
    assert text(placed(line, slots=2, reads={3: "0"})) == (
        "0PREFETCH@0 1PREFETCH@1 0F 2PREFETCH@0 1F 0PREFETCH@1 2F 3F"
    )


def test_a_slot_is_not_taken_from_a_later_reader_of_what_is_in_it() -> None:
    """3F reads bucket 0 where 0F left it, so 4 must not go there in front of 3F."""
    line = "BEGIN 0PREFETCH@? 1PREFETCH@? 0F 2PREFETCH@? 1F 0PREFETCH@? 2F 4PREFETCH@? 3F 4F"
    assert out(line, slots=3, reads={3: "0", 4: "4"}) == (
        "BEGIN 0PREFETCH@0(after=BEGIN) 1PREFETCH@1(after=BEGIN) 0F 2PREFETCH@2(after=BEGIN) 1F "
        "2F 4PREFETCH@1(after=1F) 3F 4F"
    )


def test_a_stage_of_many_buckets_gets_as_many_slots() -> None:
    line = "BEGIN 0PREFETCH@? 1PREFETCH@? 1.1PREFETCH@? 1.2PREFETCH@? 0F 2PREFETCH@? 1F 2F"
    schedule = placed(line, slots=2, reads={1: "1 1.1 1.2"})
    assert len(schedule.slots) == 4
    assert text(schedule) == (
        "0PREFETCH@0 1PREFETCH@1 1.1PREFETCH@2 1.2PREFETCH@3 0F 2PREFETCH@0 1F 2F"
    )


def test_a_slot_is_as_large_as_the_largest_bucket_that_it_gets() -> None:
    line = "BEGIN 0PREFETCH@? 0F 1PREFETCH@? 1F"
    schedule = placed(line, slots=3, sizes={"0": 100, "1": 70})
    assert [(slot.index, slot.size_bytes) for slot in schedule.slots] == [(0, 100), (1, 70)]


def test_large_buckets_share_a_slot() -> None:
    """3 could go to slot 0 or 1, whose buckets are not wanted again; slot 1 need not grow."""
    line = "BEGIN 0PREFETCH@? 0F 1PREFETCH@? 1F 2PREFETCH@? 2F 3PREFETCH@? 3F"
    sizes = {"0": 70, "1": 100, "2": 70, "3": 100}
    schedule = placed(line, slots=3, sizes=sizes)
    assert text(schedule) == "0PREFETCH@0 0F 1PREFETCH@1 1F 2PREFETCH@2 2F 3PREFETCH@1 3F"
    assert [slot.size_bytes for slot in schedule.slots] == [70, 100, 70]


def test_a_slot_of_a_small_bucket_is_used_like_the_others() -> None:
    """It grows once, and is not left out."""
    line = "BEGIN 0PREFETCH@? 0F 1PREFETCH@? 1F 2PREFETCH@? 2F 3PREFETCH@? 3F"
    schedule = placed(line, slots=2, sizes={"0": 1, "1": 70, "2": 70, "3": 70})
    assert text(schedule) == "0PREFETCH@0 0F 1PREFETCH@1 1F 2PREFETCH@0 2F 3PREFETCH@1 3F"
    assert [slot.size_bytes for slot in schedule.slots] == [70, 70]


def test_the_backward_of_large_buckets_lets_a_slot_grow() -> None:
    line = "BEGIN 0PREFETCH@? 0F 1PREFETCH@? 1F | BEGIN 1PREFETCH@? 1B 0PREFETCH@? 0B"
    schedule = placed(line, slots=1, sizes={"0": 100, "1": 70})
    assert [slot.size_bytes for slot in schedule.slots] == [100]


def test_at_the_turn_the_backward_takes_what_the_forward_left() -> None:
    """The docstring's second example."""
    forward, _, backward = out(f"{FORWARD} | {BACKWARD}", slots=3, reuse=True).partition(" | ")
    assert forward.endswith("3PREFETCH@0(after=0F) 1F 2F 3F")
    assert backward == (
        "BEGIN 3REUSE@0(after=BEGIN) 2REUSE@2(after=BEGIN) 1REUSE@1(after=BEGIN) 3B "
        "0PREFETCH@0(after=3B) 2RECOMPUTE 2B 1RECOMPUTE 1B 0RECOMPUTE 0B"
    )


def test_without_hold_the_backward_fetches_everything() -> None:
    backward = out(f"{FORWARD} | {BACKWARD}", slots=3).partition(" | ")[2]
    assert backward.startswith(
        "BEGIN 3PREFETCH@0(after=BEGIN) 2PREFETCH@1(after=BEGIN) 1PREFETCH@2(after=BEGIN) 3B "
    )


@pytest.mark.parametrize("reuse", [False, True])
def test_the_schedule_says_what_the_forward_leaves(reuse: bool) -> None:
    schedule = placed(f"{FORWARD} | {BACKWARD}", slots=3, reuse=reuse)
    assert [(slot, bucket.label) for slot, bucket in schedule.reused] == [
        (0, "3"),
        (1, "1"),
        (2, "2"),
    ]


def test_what_was_held_is_fetched_once_it_was_replaced() -> None:
    """0PREFETCH takes the slot that bucket 1 was left in; 1B fetches it again."""
    line = "BEGIN 0PREFETCH@? 0F 1PREFETCH@? 1F | BEGIN 0PREFETCH@? 0B 1PREFETCH@? 1B"
    schedule = placed(line, slots=1, reuse=True)
    assert text(schedule) == "0PREFETCH@0 0F 1PREFETCH@0 1F | 0PREFETCH@0 0B 1PREFETCH@0 1B"


def test_what_is_wanted_soon_is_not_replaced_before_it_is_held() -> None:
    """The first prefetch takes the slot of bucket 0, which is not wanted any more."""
    forward = "BEGIN 0PREFETCH@? 0F 1PREFETCH@? 1F 2F"
    line = f"{forward} | BEGIN 2PREFETCH@? 2B 1PREFETCH@? 1B"
    assert (
        text(placed(line, slots=2, reuse=True)).partition(" | ")[2] == "2PREFETCH@0 2B 1REUSE@1 1B"
    )
