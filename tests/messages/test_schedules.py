"""What errors about schedules say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megacompile.errors import ScheduleError
from megacompile.ir.schedule import Schedule
from megacompile.verify.proof import verify
from tests.edits import edited
from tests.schedules import Spec, build


def message(schedule: Schedule) -> list[str]:
    with pytest.raises(ScheduleError) as raised:
        verify(schedule)
    return str(raised.value).splitlines()


def test_a_hazard_is_explained_and_marked_in_the_table() -> None:
    lines = message(edited(build(Spec()), "forward: 2PREFETCH@0 waits for tokens"))
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


def test_hazards_that_are_not_spelt_out_are_counted() -> None:
    schedule = build(Spec(stages=8))
    one = replace(schedule, slots=schedule.slots[:1])
    lines = message(one)
    assert lines[0] == "schedule 'model' has 8 hazards:"
    assert lines[6] == "  ... and 3 more"
