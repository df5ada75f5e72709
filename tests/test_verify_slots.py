"""`verify` finds planted faults of slots: what fills them, when, and who reads them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megacompile.ir.buckets import Slot
from megacompile.ir.schedule import Schedule
from tests.schedule_faults import (
    ADDING,
    HOLDING,
    INFERENCE,
    PLAIN,
    Fault,
    assert_found,
    assert_helpful,
    both,
    bucket,
    drop_after,
    move_before,
    one_slot,
    set_arg,
)
from tests.schedules import Spec, find

# Edits of schedules.


def small_slots(schedule: Schedule) -> Schedule:
    return replace(schedule, slots=tuple(Slot(slot.index, 64) for slot in schedule.slots))


def swap_held(schedule: Schedule) -> Schedule:
    (a, first), (b, second) = schedule.reused
    return replace(schedule, reused=((a, second), (b, first)))


FAULTS = [
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
        lambda s: replace(s, reused=s.reused[1:]),
        (("not reused", "backward", "2REUSE@0", ""),),
    ),
    Fault(
        "held and left are not the same",
        HOLDING,
        swap_held,
        (
            ("not reused", "forward", "2PREFETCH@0", ""),
            ("not reused", "forward", "3PREFETCH@1", ""),
            ("not reused", "backward", "2REUSE@0", ""),
            ("not reused", "backward", "3REUSE@1", ""),
        ),
    ),
]


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_planted_fault_is_found_and_named(fault: Fault) -> None:
    assert_found(fault)


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_message_says_where_and_what_to_do(fault: Fault) -> None:
    assert_helpful(fault)
