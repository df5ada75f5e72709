"""`verify`: correct schedules pass, errors show where; the order that it goes by.

Planted faults are in `test_verify_*.py`, by subject.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from megacompile.errors import ScheduleError
from megacompile.ir import ops
from megacompile.verify.order import Order
from megacompile.verify.proof import HazardKind, hazards, verify
from tests import (
    test_verify_cycle,
    test_verify_gradients,
    test_verify_offload,
    test_verify_slots,
    test_verify_step,
    test_verify_updates,
    test_verify_values,
)
from tests.schedule_faults import (
    ADDING,
    CHANGING,
    EVERYTHING,
    HOLDING,
    INFERENCE,
    KEEPING,
    KEPT_THERE,
    LATE,
    NORMS,
    OFFLOADING,
    PLAIN,
    RANDOM,
    SHARED,
    STEPPING,
    UPDATING,
    drop_after,
    one_slot,
)
from tests.schedules import Spec, arguments, build, find, set_arguments

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
    Spec(stages=2, slots=2, reuse=True, shared=True),
    Spec(stages=5, slots=4, accumulate=True, reuse=True),
    Spec(stages=1),
    NORMS,
    replace(EVERYTHING, norms=True),
    UPDATING,
    replace(UPDATING, norms=True, accumulate=True),
    replace(SHARED, update=True),
    replace(UPDATING, masters=True, reuse=True),
    replace(EVERYTHING, update=True),
    replace(EVERYTHING, update=True, masters=True),
    Spec(stages=1, update=True),
    OFFLOADING,
    KEPT_THERE,
    replace(EVERYTHING, offload=frozenset({0, 1, 2, 3})),
    replace(UPDATING, offload=frozenset({1, 2, 3}), keep=frozenset({3})),
    STEPPING,
    LATE,
    replace(STEPPING, accumulate=True, shared=True),
    replace(LATE, accumulate=True, device=frozenset({0, 1})),
    Spec(resident=frozenset({0, 1, 2, 3})),
    Spec(device=frozenset({0, 1, 2, 3}), reuse=True),
]


SUBJECTS = (
    test_verify_slots,
    test_verify_offload,
    test_verify_values,
    test_verify_gradients,
    test_verify_updates,
    test_verify_cycle,
    test_verify_step,
)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_correct_schedule_has_no_hazards(spec: Spec) -> None:
    schedule = build(spec)
    assert hazards(schedule) == []
    verify(schedule)


def test_every_kind_of_hazard_is_planted() -> None:
    faults = [fault for subject in SUBJECTS for fault in subject.FAULTS]
    kinds = set(HazardKind) - {HazardKind.NOT_READ, HazardKind.NOT_WRITTEN}  # test_disk_pass.py
    kinds -= {HazardKind.TOO_MANY_BUFFERS}  # test_disk_saved_pass.py
    kinds -= {HazardKind.RANKS_DIFFER}  # test_verify_ranks.py
    assert {kind.value for kind in kinds} == {f[0] for fault in faults for f in fault.found}


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


def test_one_dropped_edge_is_found_among_eighty_layers() -> None:
    schedule = build(replace(EVERYTHING, stages=80))
    prefetches = ops.nodes_of(schedule.graphs["backward"], ops.prefetch)
    (dropped,) = [n for n in prefetches if arguments(n)[0] is schedule.buckets[40]]
    dropped.kwargs = {}
    (hazard,) = hazards(schedule)
    assert (hazard.kind, hazard.label) == (HazardKind.SLOT_OVERWRITTEN, "43B")
    assert hazard.other == ops.label(dropped)


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
