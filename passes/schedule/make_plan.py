"""Expands a choice into a plan, with a row per bucket and a row per stage.

The caller makes the choice (`megacompile.plan.planner`). By default, the last stage is kept: its
backward directly follows its forward, so its saved tensors take no memory at any other time, and
this avoids a second pass over the head, the largest matrix of most language models.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from megacompile.ir.buckets import Bucket
from megacompile.ir.plan import Choice, Places, Plan, SavedPart, StagePlan, Tier, Updater
from megacompile.ir.schedule import Schedule
from megacompile.ir.stages import Stage
from megacompile.text import format_bytes, numbered


def make_plan(
    schedule: Schedule,
    choice: Choice,
    *,
    saves: bool = True,
    in_backward: bool = False,
    activations: str = "auto",
    lookahead: int = 2,
    cut: frozenset[int] = frozenset(),
) -> Schedule:
    """Add the plan of a choice to a schedule. The device never updates streamed buckets with states
    or weights on a disk. Every backward of a forward finds the same saved values on the host.

    Args:
        saves: False for a backward of gradients that the forward was not traced for: it has no
            saved tensors, so nothing is kept.
        activations: the option, which may override the choice.
        lookahead: number of stages by which an offloaded value is fetched ahead.
        cut: the stages with pieces that run in tiles; see `stages_in_tiles`.
    """
    stages, keys = schedule.stages, frozenset(bucket.key for bucket in schedule.buckets)
    places = choice.places.only(keys)
    tiles = [choice.tiles if stage.index in cut else 1 for stage in stages]
    if schedule.backward is None:
        streamed = [bucket for bucket in schedule.buckets if bucket.key not in places.resident]
        stay = frozenset(b.key for b in staying(streamed, min(choice.stay, len(streamed))))
        places = places.changed(keys - places.resident, states=Tier.HOST).changed(stay, stays=True)
        plan = Plan(places, tuple(StagePlan(tiles=count) for count in tiles))
    else:
        count = choice.keep if saves else 0
        able = [stage.index for stage in stages if stage.traced.has_backward]
        if count and activations in ("keep", "selective"):
            kept = frozenset(able)
        else:
            last = count == 1 and not stages[-1].traced.has_backward
            kept = frozenset(() if last else able[len(able) - min(count, len(able)) :])
        away = stages_on_host(schedule, choice, lookahead=lookahead) - kept
        halves = away if count else frozenset[int]()  # half is saved, for half of the copies
        if choice.halves or activations == "selective":
            halves |= kept - {stages[-1].index}
        kept |= away if count else frozenset()
        offload = len(stages) if activations == "offload" else choice.offload
        # not the last ones, whose values the backward needs as it begins
        waiting = away | {*range(min(offload, len(stages) - lookahead - 1))}
        # not the first, whose outputs all others read in most models, nor the last
        again = range(1, len(stages) - 1, 2) if choice.rerun else ()
        rows = []
        for i in (stage.index for stage in stages):
            # stages whose pieces run in tiles save little anyway
            part = SavedPart.HALF if i in halves and not cut else SavedPart.ALL
            tier = Tier.DISK if i < choice.saved_on_disk else Tier.HOST
            rows.append(
                StagePlan(
                    saved=part if i in kept else SavedPart.INPUTS,
                    tier=tier if i in waiting else Tier.DEVICE,
                    rerun=i in again,
                    tiles=tiles[i],
                )
            )
        places = _updaters(schedule, places, choice.device_update, in_backward=in_backward)
        # a copy may last until the next stage on the host
        gaps = (after - one for one, after in itertools.pairwise(sorted(away)))
        longest = max(gaps, default=2 if away else 1)
        delay = choice.state_delay
        plan = Plan(places, tuple(rows), state_delay=delay, saved_delay=longest)
    uncut = () if choice.tiles == 1 else [s for s in stages if s.index not in cut]
    reasons = (*schedule.plan.reasons, *_reasons(schedule, plan, uncut))
    return replace(schedule, plan=replace(plan, reasons=reasons))


def stages_on_host(schedule: Schedule, choice: Choice, *, lookahead: int) -> frozenset[int]:
    """The stages that are kept on the host: as many as chosen, evenly spread, so that the next
    stages compute while one is copied. The last `lookahead + 1` stages are excluded, because the
    backward needs their tensors as it begins."""
    able = [stage.index for stage in schedule.stages if stage.traced.has_backward]
    last = len(schedule.stages) - lookahead - 1
    saving = {s.index for s in schedule.stages if s.traced.saved}
    pool = [i for i in able[: len(able) - choice.keep] if i < last and i in saving]
    count = min(choice.saved_on_host, len(pool))
    return frozenset(pool[(2 * i + 1) * len(pool) // (2 * count)] for i in range(count))


def staying(buckets: Sequence[Bucket], count: int) -> list[Bucket]:
    """`count` buckets, evenly spread, so that the others are fetched while these compute."""
    return [buckets[i * len(buckets) // count] for i in range(count)]


def _updaters(schedule: Schedule, places: Places, share: float, *, in_backward: bool) -> Places:
    """Choose the updater of each bucket that gets gradients. The device updates the first ones, up
    to a share of the streamed parameters that are on the host with their states."""
    trained = schedule.gradient_params
    sizes = _trained_numel(schedule, places)
    elsewhere = places.on_disk | places.weights_on_disk
    chosen = []
    left = share * sum(size for key, size in sizes.items() if key not in elsewhere)
    for bucket in schedule.buckets:
        if bucket.key not in elsewhere and 0 < sizes.get(bucket.key, 0) <= left:
            left -= sizes[bucket.key]
            chosen.append(bucket.key)
    frozen = [b.key for b in schedule.buckets if b.key not in trained.keys() | places.resident]
    places = places.changed(frozen, states=Tier.HOST)  # they have no states
    if in_backward:
        places = places.changed(trained, updater=Updater.BACKWARD)
    else:
        places = places.changed(places.resident & trained.keys(), updater=Updater.DEVICE)
    return places.changed(chosen, updater=Updater.DEVICE)


def _trained_numel(schedule: Schedule, places: Places) -> dict[int, int]:
    """Number of elements that get a gradient in each streamed bucket, by key."""
    trained = schedule.gradient_params
    return {
        bucket.key: sum(bucket.params[i].numel for i in trained[bucket.key])
        for bucket in schedule.buckets
        if bucket.key in trained and bucket.key not in places.resident
    }


def _reasons(schedule: Schedule, plan: Plan, uncut: Sequence[Stage]) -> Iterator[str]:
    """Lines on a plan; `uncut`: the stages that do not run in tiles although the plan has some."""
    for changes in sorted({stage.traced.symbols is not None for stage in uncut}):
        count = sum((stage.traced.symbols is not None) == changes for stage in uncut)
        why = "sizes that change (dynamic=False)" if changes else "no tokenwise matrix product"
        yield f"{count} of {len(schedule.stages)} stages are not tiled: they have {why}"
    if schedule.backward is None:
        yield "nothing is saved: no backward follows"
    for row in dict.fromkeys(plan.stages) if schedule.backward is not None else ():
        mine = [i for i, other in enumerate(plan.stages) if other == row]
        which = numbered("stage", mine[0], mine[-1])
        every = "" if mine[-1] - mine[0] < len(mine) else f"{len(mine)} of "
        yield f"{every}{which}: {row.treatment}"
    if plan.resident:
        size = format_bytes(sum(b.shard_bytes for b in schedule.buckets if b.key in plan.resident))
        buckets = f"{len(plan.resident)} of {len(schedule.buckets)} buckets are resident"
        yield f"{buckets} ({size} of parameters)"
    if plan.stay:
        size = format_bytes(sum(b.size_bytes for b in schedule.buckets if b.key in plan.stay))
        yield (
            f"{len(plan.stay)} of {len(schedule.buckets) - len(plan.resident)} streamed buckets "
            f"stay in their slots from one forward to the next ({size})"
        )
    if plan.device_update and schedule.backward is not None:
        sizes = _trained_numel(schedule, plan.places)
        part = sum(sizes[key] for key in plan.device_update) / sum(sizes.values())
        labels = [bucket.label for bucket in schedule.buckets if bucket.key in plan.device_update]
        yield (
            f"optimizer.step() updates {numbered('bucket', labels[0], labels[-1])} ({part:.0%} of "
            "the streamed parameters) on the device while the host updates the others"
        )
