"""Number of buckets that stay in slots of their own between forwards without a backward.

Evaluation and generation read the same weights in every forward. What fits is fetched once.
"""

from __future__ import annotations

from megacompile.cost.memory import MemoryKind, device_memory
from megacompile.ir.capture import Variant
from megacompile.ir.plan import Choice, Places
from megacompile.ir.schedule import Schedule
from megacompile.options import Lowering
from megacompile.passes.schedule.plan import staying
from megacompile.plan.pipeline import Pipeline
from megacompile.plan.setting import Setting


def stay_that_fit(
    pipeline: Pipeline,
    setting: Setting,
    schedule: Schedule,
    places: Places,
    budget_bytes: int,
) -> int:
    """The largest number of streamed buckets that fit into device memory next to everything else.

    Args:
        schedule: what `Pipeline.differentiated` returns, without a backward.
        places: where the buckets are. Those on the device have gradients and states there too,
            as training leaves them.
    """
    variant = Variant((), keep_last=True)
    draft = pipeline.planned(schedule, variant, Choice(places=places), draft=True)
    cost = setting.cost()
    fused = setting.options.lowering is Lowering.INDUCTOR
    peak = device_memory(draft, optimizer=cost, fused=fused).peak
    slots_bytes = peak.live_bytes.get(MemoryKind.SLOTS, 0)
    trained_bytes = sum(
        int(cost.resident_bytes(b, range(len(b.params))) - cost.resident_bytes(b, ()))
        for b in draft.buckets
        if b.key in places.resident
    )
    left_bytes = budget_bytes - peak.total_bytes - trained_bytes
    streamed = [b for b in draft.buckets if b.key not in places.resident]
    if sum(b.size_bytes for b in streamed) <= left_bytes + slots_bytes:
        return len(streamed)  # which then need no other slots
    return max(
        count
        for count in range(len(streamed))
        if not count or sum(b.size_bytes for b in staying(streamed, count)) <= left_bytes
    )
