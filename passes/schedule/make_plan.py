"""Expands a choice into a plan, with a row per bucket and a row per stage.

The caller makes the choice (`megacompile.plan.planner`). By default, the last stage is kept: its
backward directly follows its forward, so its saved tensors take no memory at any other time, and
this avoids a second pass over the head, the largest matrix of most language models.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from megacompile.ir.buckets import Bucket
from megacompile.ir.plan import Choice, Places, Plan, SavedPart, StagePlan, Tier, Updater
from megacompile.ir.schedule import Schedule
from megacompile.text import format_bytes, numbered

ROWS = (1, 2, 3, 5)  # candidates: consecutive stages that run again for each saved output


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
    """Add the plan to a schedule.

    Args:
        choice: the decisions. The device never updates streamed buckets with states or weights on a
            disk.
        saves: if False, nothing is kept, regardless of the choice: a backward for gradients other
            than those that the forward was traced for has no saved tensors. Stages that would be
            kept on the host are recomputed from the values there.
        in_backward: the backward updates the buckets whose gradients it computes.
        activations: "auto", "keep", "selective", "recompute" or "offload", which may override the
            choice: all stages are kept, or all inputs wait on the host.
        lookahead: number of stages by which an offloaded value is fetched ahead.
        cut: the stages with pieces that run in tiles; see `stages_in_tiles`.
    """
    keys = frozenset(bucket.key for bucket in schedule.buckets)
    places = choice.places.only(keys)
    why = [*schedule.plan.reasons, *_tiles(schedule, choice.tiles, cut)]
    if schedule.backward is None:
        why += ["nothing is saved: no backward follows", *_residents(schedule, places.resident)]
        stay = _stay(schedule, places.resident, choice.stay, why)
        places = places.changed(keys - places.resident, states=Tier.HOST).changed(stay, stays=True)
        tiles = [choice.tiles if stage.index in cut else 1 for stage in schedule.stages]
        forwards = tuple(StagePlan(tiles=count) for count in tiles)
        return replace(schedule, plan=Plan(places, forwards, tuple(why)))
    count = choice.keep if saves else 0
    kept = _keep(schedule, count, activations, why)
    away = stages_on_host(schedule, choice, lookahead=lookahead) - kept
    on_host = away if count else frozenset[int]()
    halves: frozenset[int] = frozenset()
    if not cut and (choice.halves or activations == "selective"):  # tiles save little anyway
        halves = kept - {schedule.stages[-1].index}
    if on_host:
        why.append(
            f"{len(on_host)} stages from {min(on_host)} to {max(on_host)} are kept on the host: "
            f"{'what' if cut else 'half of what'} they save is copied there after their forward "
            "and fetched before their backward, which recomputes the rest"
        )
    if halves:
        why.append("all but the last save only half and recompute the rest")
    kept |= on_host
    halves |= frozenset() if cut else on_host  # halves the copies
    offload = len(schedule.stages) if activations == "offload" else choice.offload
    offloaded = _offload(schedule, offload, lookahead, why) | away
    again = _rerun(schedule, choice.rerun, why)
    why += _residents(schedule, places.resident)
    places = _updaters(schedule, places, choice.device_update, why, in_backward=in_backward)
    rows = []
    for i in (stage.index for stage in schedule.stages):
        saved = SavedPart.ALL if i in kept else SavedPart.INPUTS
        tier = Tier.DISK if i < choice.saved_on_disk else Tier.HOST
        rows.append(
            StagePlan(
                saved=SavedPart.HALF if i in halves else saved,
                tier=tier if i in offloaded else Tier.DEVICE,
                rerun=i in again,
                tiles=choice.tiles if i in cut else 1,
            )
        )
    # between neighboring stages on the host: a copy may take that long
    gaps = (after - one for one, after in itertools.pairwise(sorted(away)))
    longest = max(gaps, default=2 if away else 1)
    delays = {"state_delay": choice.state_delay, "saved_delay": longest}
    return replace(schedule, plan=Plan(places, tuple(rows), tuple(why), **delays))


def stages_on_host(schedule: Schedule, choice: Choice, *, lookahead: int) -> frozenset[int]:
    """The stages that are kept on the host: as many as chosen, evenly spread, so that the next
    stages compute while one is copied. The stages after them are kept on the device.

    The last `lookahead + 1` stages are excluded, because the backward needs their tensors as it
    begins.
    """
    able = [stage.index for stage in schedule.stages if stage.traced.has_backward]
    last = len(schedule.stages) - lookahead - 1
    saving = {s.index for s in schedule.stages if s.traced.saved}
    pool = [i for i in able[: len(able) - choice.keep] if i < last and i in saving]
    count = min(choice.saved_on_host, len(pool))
    return frozenset(pool[(2 * i + 1) * len(pool) // (2 * count)] for i in range(count))


def _residents(schedule: Schedule, resident: frozenset[int]) -> list[str]:
    if not resident:
        return []
    size = sum(bucket.shard_bytes for bucket in schedule.buckets if bucket.key in resident)
    count = f"{len(resident)} of {len(schedule.buckets)} buckets are resident"
    return [f"{count} ({format_bytes(size)} of parameters)"]


def staying(buckets: Sequence[Bucket], count: int) -> list[Bucket]:
    """`count` buckets, evenly spread, so that the others are fetched while these compute."""
    return [buckets[i * len(buckets) // count] for i in range(count)]


def _stay(
    schedule: Schedule, resident: frozenset[int], count: int, why: list[str]
) -> frozenset[int]:
    streamed = [bucket for bucket in schedule.buckets if bucket.key not in resident]
    chosen = staying(streamed, min(count, len(streamed)))
    if chosen:
        size = format_bytes(sum(bucket.size_bytes for bucket in chosen))
        why.append(
            f"{len(chosen)} of {len(streamed)} streamed buckets stay in their slots from one "
            f"forward to the next ({size})"
        )
    return frozenset(bucket.key for bucket in chosen)


def _keep(schedule: Schedule, count: int, activations: str, why: list[str]) -> frozenset[int]:
    able, last = [s for s in schedule.stages if s.traced.has_backward], schedule.stages[-1]
    kept = able[len(able) - min(count, len(able)) :]
    if count and activations in ("keep", "selective"):
        kept, reason = able, f"every stage is kept: activations={activations!r}"
    elif count == 1 and not last.traced.has_backward:
        kept, reason = [], f"stage {last.index} ({last.name}) has no backward: nothing to keep"
    elif not kept:
        reason = "every stage is recomputed"
    elif kept == [last]:
        reason = f"stage {last.index} ({last.name}) is kept: its backward is next"
    else:
        many = numbered("stage", kept[0].index, kept[-1].index)
        reason = f"{many} {'are' if len(kept) > 1 else 'is'} kept: they fit"
    why.append(reason)
    return frozenset(stage.index for stage in kept)


def _offload(schedule: Schedule, count: int, lookahead: int, why: list[str]) -> frozenset[int]:
    """The first `count` stages, except the last ones, whose values the backward needs as it begins.

    The result is the same for every backward of a forward, for any outputs.
    """
    stages = len(schedule.stages)
    chosen = min(count, max(0, stages - lookahead - 1))
    if chosen:
        why.append(
            f"saved tensors of {numbered('stage', 0, chosen - 1)} wait on the host; the backward "
            f"begins with the other {stages - chosen}"
        )
    elif count:
        reason = f"the backward needs the saved tensors of all {stages} stages too soon"
        why.append(f"nothing waits on the host: {reason}")
    return frozenset(range(chosen))


def reruns(stages: int, row: int) -> int:
    """Number of stages that run again if each saved output is followed by `row` such stages.

    The first and the last stage never do: all others read the first's outputs, and the last returns
    the loss.
    """
    able = max(0, stages - 2)
    return able - able // (row + 1)


def _rerun(schedule: Schedule, count: int, why: list[str]) -> frozenset[int]:
    """Stages 1, 3, 5, ..., without the first stage, whose outputs all others read in most models.
    If these are not enough, all stages but a few, evenly spread.

    The result is the same for every backward of a forward.
    """
    able = range(1, len(schedule.stages) - 1)
    chosen: Sequence[int] = able[::2][:count]
    which = ", every other one,"
    if count > len(chosen) and len(able) > count:
        saved = len(able) - count
        between = {able[(i + 1) * len(able) // (saved + 1)] for i in range(saved)}
        chosen = [index for index in able if index not in between]
        which = f", except {saved} in between,"
    elif count > len(chosen):
        chosen, which = able, ""
    if len(chosen) == 1:
        why.append(f"stage {chosen[0]} runs again in the backward: its outputs are not saved")
    elif chosen:
        why.append(
            f"stages {chosen[0]} to {chosen[-1]}{which} run again in the backward: their outputs "
            "are not saved"
        )
    return frozenset(chosen)


def _tiles(schedule: Schedule, tiles: int, cut: frozenset[int]) -> list[str]:
    """Reasons for the tiles: which stages run in tiles, and why others do not."""
    if tiles == 1:
        return []
    count = len(schedule.stages)
    changing = sum(stage.traced.symbols is not None for stage in schedule.stages)
    others = count - changing - len(cut)
    reasons = []
    if cut:
        where = "" if len(cut) == count else f", in {len(cut)} of {count} stages"
        reasons.append(
            f"tokenwise pieces run in {tiles} tiles{where}; their weight gradients "
            "are summed in float32"
        )
    if changing:
        reasons.append(
            f"{changing} of {count} stages are not tiled: their sizes change from call to call "
            "(dynamic=False)"
        )
    if others and cut:
        reasons.append(
            f"{others} of {count} stages are not tiled: they have no tokenwise matrix product"
        )
    elif others:
        reasons.append("nothing is tiled: no matrix product is tokenwise")
    return reasons


def _updaters(
    schedule: Schedule, places: Places, share: float, why: list[str], *, in_backward: bool
) -> Places:
    """Choose the updater of each bucket that gets gradients. The device updates the first ones, up
    to a share of the streamed parameters that are on the host with their states."""
    trained = schedule.gradient_params
    sizes = {
        bucket.key: sum(bucket.params[i].numel for i in trained[bucket.key])
        for bucket in schedule.buckets
        if bucket.key in trained and bucket.key not in places.resident
    }
    frozen = [b.key for b in schedule.buckets if b.key not in trained.keys() | places.resident]
    elsewhere = places.on_disk | places.weights_on_disk
    total, chosen = sum(sizes.values()), []
    left = share * sum(size for key, size in sizes.items() if key not in elsewhere)
    for bucket in schedule.buckets:
        if bucket.key not in elsewhere and 0 < sizes.get(bucket.key, 0) <= left:
            left -= sizes[bucket.key]
            chosen.append(bucket)
    places = places.changed(frozen, states=Tier.HOST)  # without states
    if in_backward:
        places = places.changed(trained, updater=Updater.BACKWARD)
    else:
        places = places.changed(places.resident & trained.keys(), updater=Updater.DEVICE)
    if chosen:
        part = sum(sizes[bucket.key] for bucket in chosen)
        which = f"bucket {chosen[0].label}"
        if len(chosen) > 1:
            which = f"buckets {chosen[0].label} to {chosen[-1].label}"
        why.append(
            f"optimizer.step() updates {which} ({part / total:.0%} of the streamed parameters) on "
            "the device while the host updates the others"
        )
    return places.changed((bucket.key for bucket in chosen), updater=Updater.DEVICE)
