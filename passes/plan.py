"""Decide what is kept, recomputed or resident.

For now: everything is streamed and recomputed, but for the last stage. Its backward comes right
after its forward, so keeping its saved tensors takes no memory at any other time, and saves one
pass over the head, the largest matrix of most language models.
"""

from __future__ import annotations

from dataclasses import replace

from megacompile.ir import Plan, Schedule


def make_plan(schedule: Schedule, *, keep_last: bool = True) -> Schedule:
    """The schedule with its plan. `keep_last=False` recomputes every stage."""
    so_far = schedule.plan.reasons
    if not keep_last or schedule.backward is None:
        return replace(schedule, plan=Plan(frozenset(), (*so_far, "every stage is recomputed")))
    last = schedule.stages[-1]
    if not last.traced.has_backward:
        reason = f"stage {last.index} ({last.name}) has no backward: nothing to keep"
        return replace(schedule, plan=Plan(frozenset(), (*so_far, reason)))
    reason = f"stage {last.index} ({last.name}) is kept: its backward comes next"
    return replace(schedule, plan=Plan(frozenset({last.index}), (*so_far, reason)))
