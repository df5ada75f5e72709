"""How schedules differ, and what passes did, as text."""

from __future__ import annotations

import re
from dataclasses import replace

from megacompile.ir.buckets import Slot
from megacompile.ir.schedule import Plan
from megacompile.show.diff import differences, lookahead
from tests.schedules import Spec, build, find
from tests.zoo import scheduled


def changed(diff: str) -> list[str]:
    return [line for line in diff.splitlines() if re.match(r"[-+] ", line)]


def test_a_diff_shows_the_actions_by_stage() -> None:
    before = build(Spec(stages=3, training=False))
    after = before.copy()
    find(after, "forward", "2PREFETCH@0").kwargs = {"after": (find(after, "forward", "1F"),)}
    assert before.diff(after).splitlines() == [
        "--- model: 3 stages by slots",
        "+++ model: 3 stages by slots",
        "@@ -1,4 +1,4 @@",
        " forward",
        "   0 layers.0 | 0PREFETCH@0 1PREFETCH@1 0F",
        "-  1 layers.1 | 2PREFETCH@0(after=0F) 1F",
        "+  1 layers.1 | 2PREFETCH@0(after=1F) 1F",
        "   2 layers.2 | 2F",
    ]


def test_equal_schedules_have_no_diff() -> None:
    schedule = build(Spec())
    assert schedule.diff(schedule.copy()) == ""
    assert schedule.diff(schedule.copy(), code=True) == ""


def test_a_diff_of_the_code() -> None:
    before = build(Spec(stages=2, training=False))
    after = before.copy()
    find(after, "forward", "1PREFETCH@1").kwargs = {"after": ()}
    lines = [re.sub(r"\s+#.*", "", line) for line in changed(before.diff(after, code=True))]
    assert lines == [
        "-    prefetch_1 = prefetch(bucket_1, slot_1, after=(weights_1, begin_))",
        "+    prefetch_1 = prefetch(bucket_1, slot_1)",
    ]


def test_the_header_tells_what_the_schedules_were_made_with() -> None:
    far, near = scheduled(lookahead=2), scheduled(lookahead=1)
    lines = far.diff(near).splitlines()
    assert lines[0].startswith("--- Stack")
    assert lines[1].startswith("+++ Stack")
    head = [line for line in lines if line.startswith("# ")]
    assert head[-1] == "# lookahead: 2 -> 1"
    assert any(re.match(r"# slots: \d of .* -> \d of ", line) for line in head)
    assert changed(far.diff(near))


def test_every_difference_has_its_line() -> None:
    before = build(Spec(stages=3))
    after = replace(
        before,
        plan=Plan(frozenset({1}), ("there is room",)),
        slots=(*before.slots, Slot(2, 128)),
        history=(*before.history, replace(before.history[0], name="free")),
        reused=((0, before.buckets[0]),),
    )
    assert differences(before, after) == [
        "passes: slots -> slots, free",
        "kept, not recomputed: none -> 1",
        "plan: none -> there is room",
        "slots: 2 of 256 B -> 3 of 384 B",
        "left in the slots by the forward: none -> 0@0",
    ]
    diff = before.diff(after)
    assert diff.splitlines()[2:] == [f"# {d}" for d in differences(before, after)]


def test_lookahead_is_read_off_the_forward() -> None:
    assert [lookahead(scheduled(lookahead=k)) for k in (1, 2, 3)] == [1, 2, 3]
    alone = build(Spec(stages=1, slots=1, training=False))
    assert lookahead(alone) == 0


def test_the_history_is_a_table() -> None:
    schedule = scheduled()
    rows = [line.split() for line in schedule.passes().splitlines()]
    assert rows[0] == ["pass", "ms", "nodes", "actions"]
    assert [row[0] for row in rows[1:-1]] == [record.name for record in schedule.history]
    nodes = [0, *(record.nodes for record in schedule.history)]
    assert [(int(r[2]), int(r[4])) for r in rows[1:-1]] == list(zip(nodes, nodes[1:], strict=False))
    by_name = {row[0]: row[-1] for row in rows[1:-1]}
    assert by_name["plan"] == "="
    prefetches = sum(
        record.after.count("PREFETCH") for record in schedule.history if record.name == "prefetch"
    )
    assert by_name["prefetch"] == f"+{prefetches}"
    total = sum(record.time_s for record in schedule.history) * 1e3
    assert abs(float(rows[-1][1]) - total) <= 0.06
    assert replace(schedule, history=()).passes() == "Stack: made by hand, no pass has run"
