"""The graphs of a training step as the passes make them of a line of actions, without a model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megacompile.ir.schedule import Plan, Schedule
from megacompile.passes.schedule.device_update import insert_device_update
from megacompile.passes.schedule.free import insert_free
from megacompile.passes.schedule.offload_grad import offload_gradients
from megacompile.passes.schedule.prefetch import insert_prefetch
from megacompile.passes.schedule.slots import assign_slots
from megacompile.passes.schedule.tokens import insert_tokens
from megacompile.passes.schedule.update_graph import insert_update_graph
from megacompile.passes.schedule.update_in_backward import insert_updates
from tests.actions import apply, parse

LINE = "0F 1F 2F | 2B 1RECOMPUTE 1B 0RECOMPUTE 0B"


def made(
    line: str = LINE,
    *,
    accumulate: bool = False,
    in_backward: bool = False,
    slots: int = 3,
    **options: Any,
) -> Schedule:
    """What the passes from `offload_grad` on make; `options`: of the plan, and of stubs."""
    plan = {key: options.pop(key) for key in ("resident", "device_update") if key in options}
    schedule = replace(parse(line, **options), plan=Plan(**plan))
    if in_backward:
        schedule = insert_updates(
            schedule,
            accumulate=accumulate,
            lookahead=1,
            masters=False,
            updated_bytes=lambda item_bytes: 10.0,
            state_bytes=lambda item_bytes: 8.0,
        )
    else:
        schedule = offload_gradients(schedule, accumulate=accumulate)
        schedule = insert_device_update(schedule, state_bytes=lambda item_bytes: 10.0)
        schedule = insert_update_graph(schedule, helps=True)
    schedule = assign_slots(insert_prefetch(schedule), slots=slots, reuse=False)
    return apply(insert_tokens, insert_free(schedule))
