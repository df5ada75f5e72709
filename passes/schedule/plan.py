"""Write down what is kept, recomputed, resident, and where updates are made.

How much of it is for the caller to say (`megacompile.plan.planner`). By default, the last
stage is kept: its backward comes right after its forward, so its saved tensors take no memory at
any other time, and it saves one pass over the head, the largest matrix of most language models.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from megacompile.ir.buckets import Bucket
from megacompile.ir.schedule import Plan, Schedule
from megacompile.text import format_bytes, numbered

ROWS = (1, 2, 3, 5)  # stages that run again for each whose output is saved: what is tried
_SELECTIVE = 0.5  # of the saved tensors of a 7B layer: 4 % of its time for half of the memory


def make_plan(
    schedule: Schedule,
    *,
    keep: int = 1,
    halves: bool = False,
    activations: str = "auto",
    lookahead: int = 2,
    device_update: float = 0.0,
    resident: frozenset[int] = frozenset(),
    state_delay: int = 1,
    stay: int = 0,
    offload: int = 0,
    rerun: int = 0,
    on_disk: frozenset[int] = frozenset(),
    saved_on_host: frozenset[int] = frozenset(),
    tiles: int = 1,
    cut: frozenset[int] = frozenset(),
    samples: frozenset[int] = frozenset(),
) -> Schedule:
    """The schedule with its plan.

    Args:
        keep: how many of the last stages keep their saved tensors. 0: none, whatever `activations`
            is: a backward for other gradients than those that the forward was traced for has no
            saved tensors.
        halves: all of them but the last keep half of what they save, and compute the rest again.
        activations: "auto", "keep", "selective", "recompute" or "offload".
        lookahead: how many stages ahead an offloaded value comes back.
        device_update: the share of the trained parameters, the first in forward order, that
            `optimizer.step()` updates on the device.
        resident: keys of the buckets that live on the device.
        state_delay: see `Plan`.
        stay: how many of the streamed buckets keep their slots from one forward to the next, where
            there is no backward.
        offload: of how many of the first stages what is recomputed from waits on the host;
            with `activations="offload"` of all.
        rerun: how many stages run again in the backward for their outputs, which are then not
            saved: of every two of the first ones the second; where these are too few, rows of
            stages as long as one another.
        on_disk: keys of the streamed buckets whose states or parameters are on a disk; the device
            does not update those.
        saved_on_host: other stages that are kept, whose saved tensors wait on the host; see
            `stages_on_host`. Where `keep` is 0, they are recomputed from what waits there.
        tiles: in which what acts on each token alone runs.
        cut: the stages that have something to run in so many tiles; see `stages_in_tiles`.
        samples: those of them that can run in tiles as a whole; see `stages_by_samples`. Where
            they are recomputed, they do.
    """
    so_far = schedule.plan.reasons
    in_tiles = tuple((index, tiles) for index in sorted(cut))
    so_far += _tiles(schedule, tiles, cut)
    keys = frozenset(bucket.key for bucket in schedule.buckets)
    here = resident & keys
    if schedule.backward is None:
        slots, why = _stay(schedule, here, stay)
        reasons = (*so_far, "every stage is recomputed", *_residents(schedule, here), *why)
        plan = Plan(reasons=reasons, resident=here, stay=slots, tiles=in_tiles)
        return replace(schedule, plan=plan)
    kept, reason = _keep(schedule, keep, activations)
    count = len(schedule.stages) if activations == "offload" else offload
    waiting, waits = _offload(schedule, count, lookahead)
    able = {stage.index for stage in schedule.stages if stage.traced.has_backward}
    away = (saved_on_host & able) - kept
    again, runs = _rerun(schedule, rerun)
    halves = not in_tiles and (halves or activations == "selective")
    saved_fractions, within = _saved_fractions(schedule, kept) if halves else ((), ())
    saves = away if keep else frozenset()
    kept = kept | saves
    if not in_tiles:  # which save little, and compute the rest again
        saved_fractions = _with_halves(saved_fractions, saves)
    chosen, why = _device_update(schedule, here, on_disk, device_update)
    by_samples = samples - kept
    how = (
        reason,
        *_by_samples(by_samples),
        *_away(saves, "what" if in_tiles else "half of what"),
        *within,
        *waits,
        *runs,
        *_residents(schedule, here),
        *why,
    )
    plan = Plan(
        keep=kept,
        reasons=(*so_far, *how),
        resident=here,
        device_update=chosen,
        offload=waiting | away,
        rerun=again,
        saved_fractions=saved_fractions,
        tiles=in_tiles,
        samples=by_samples,
        state_delay=state_delay,
        saved_delay=_apart(away),
    )
    return replace(schedule, plan=plan)


def stages_on_host(schedule: Schedule, *, count: int, keep: int, lookahead: int) -> frozenset[int]:
    """`count` stages before the last `keep`, as far from one another as can be: while one is
    copied to the host, the next ones compute.

    The last `lookahead + 1` stages are not among them: theirs is wanted back as the backward
    begins.
    """
    able = [stage.index for stage in schedule.stages if stage.traced.has_backward]
    last = len(schedule.stages) - lookahead - 1
    saving = {s.index for s in schedule.stages if s.traced.saved or s.traced.samples}
    pool = [i for i in able[: len(able) - keep] if i < last and i in saving]
    count = min(count, len(pool))
    return frozenset(pool[(2 * i + 1) * len(pool) // (2 * count)] for i in range(count))


def _apart(stages: frozenset[int]) -> int:
    """The most stages from one of these to the next: for so long a copy may take."""
    gaps = (after - one for one, after in itertools.pairwise(sorted(stages)))
    return max(gaps, default=2 if stages else 1)


def _away(stages: frozenset[int], what: str) -> tuple[str, ...]:
    if not stages:
        return ()
    return (
        f"{len(stages)} stages from {min(stages)} to {max(stages)} are kept on the host: {what} "
        "they save goes there behind their forward, and is back ahead of their backward, which "
        "computes the rest again",
    )


def _residents(schedule: Schedule, resident: frozenset[int]) -> tuple[str, ...]:
    if not resident:
        return ()
    size = sum(bucket.shard_bytes for bucket in schedule.buckets if bucket.key in resident)
    return (
        f"{len(resident)} of {len(schedule.buckets)} buckets live on the device "
        f"({format_bytes(size)} of parameters)",
    )


def staying(buckets: Sequence[Bucket], count: int) -> list[Bucket]:
    """`count` buckets, as far from one another as can be: computes of those that stay give time to
    fetch the others."""
    return [buckets[i * len(buckets) // count] for i in range(count)]


def _stay(
    schedule: Schedule, resident: frozenset[int], count: int
) -> tuple[frozenset[int], tuple[str, ...]]:
    streamed = [bucket for bucket in schedule.buckets if bucket.key not in resident]
    chosen = staying(streamed, min(count, len(streamed)))
    if not chosen:
        return frozenset(), ()
    size = format_bytes(sum(bucket.size_bytes for bucket in chosen))
    reason = (
        f"{len(chosen)} of {len(streamed)} streamed buckets stay in their slots from one forward "
        f"to the next ({size})"
    )
    return frozenset(bucket.key for bucket in chosen), (reason,)


def _keep(schedule: Schedule, count: int, activations: str) -> tuple[frozenset[int], str]:
    if count and activations in ("keep", "selective"):
        every = frozenset(stage.index for stage in schedule.stages if stage.traced.has_backward)
        return every, f"every stage is kept: activations={activations!r}"
    last = schedule.stages[-1]
    if count == 1 and not last.traced.has_backward:
        return frozenset(), f"stage {last.index} ({last.name}) has no backward: nothing to keep"
    able = [stage for stage in schedule.stages if stage.traced.has_backward]
    kept = able[len(able) - min(count, len(able)) :]
    if not kept:
        return frozenset(), "every stage is recomputed"
    if kept == [last]:
        reason = f"stage {last.index} ({last.name}) is kept: its backward comes next"
    else:
        many = numbered("stage", kept[0].index, kept[-1].index)
        reason = f"{many} {'are' if len(kept) > 1 else 'is'} kept: there is room"
    return frozenset(stage.index for stage in kept), reason


def _offload(
    schedule: Schedule, count: int, lookahead: int
) -> tuple[frozenset[int], tuple[str, ...]]:
    """The first stages; at least the last ones stay: what these take is wanted back as soon as the
    backward begins.

    The same for every backward of a forward, whatever outputs get a gradient.
    """
    if not count:
        return frozenset(), ()
    stay = len(schedule.stages) - min(count, max(0, len(schedule.stages) - lookahead - 1))
    chosen = frozenset(range(len(schedule.stages) - stay))
    if not chosen:
        why = f"the backward wants the saved tensors of all {stay} stages too soon"
        return chosen, (f"nothing waits on the host: {why}",)
    reason = (
        f"saved tensors of {numbered('stage', 0, max(chosen))} wait on the host; the backward "
        f"begins with the other {stay}"
    )
    return chosen, (reason,)


def reruns(stages: int, row: int) -> int:
    """Number of stages that run again, of so many, where `row` in a row do for each whose output is
    saved.

    The first and the last do not: they give what all others read, and the loss.
    """
    able = max(0, stages - 2)
    return able - able // (row + 1)


def _rerun(schedule: Schedule, count: int) -> tuple[frozenset[int], tuple[str, ...]]:
    """Stages 1, 3, 5, ...: the first of them all returns what all others read, in most models.
    Where that is too few, all but some that are as far from one another as can be.

    The same for every backward of a forward, as of those that wait on the host.
    """
    able = range(1, len(schedule.stages) - 1)
    chosen: Sequence[int] = able[::2][:count]
    which = ", every other one,"
    if count > len(chosen) and len(able) > count:
        saved = len(able) - count
        between = {able[(i + 1) * len(able) // (saved + 1)] for i in range(saved)}
        chosen = [index for index in able if index not in between]
        which = f", but for {saved} in between,"
    elif count > len(chosen):
        chosen, which = able, ""
    if not chosen:
        return frozenset(), ()
    if len(chosen) == 1:
        reason = f"stage {chosen[0]} runs again in the backward: what it gives is not saved"
    else:
        reason = (
            f"stages {chosen[0]} to {chosen[-1]}{which} run again in the backward: what they give "
            "to the next ones is not saved"
        )
    return frozenset(chosen), (reason,)


def _with_halves(
    saved_fractions: tuple[tuple[int, float], ...], away: frozenset[int]
) -> tuple[tuple[int, float], ...]:
    """Stages that are kept on the host save half of it: that takes half of the copies."""
    return tuple(sorted((*saved_fractions, *((index, _SELECTIVE) for index in away))))


def _tiles(schedule: Schedule, tiles: int, cut: frozenset[int]) -> tuple[str, ...]:
    """In how many tiles how many stages run, and why others do not."""
    if tiles == 1:
        return ()
    count = len(schedule.stages)
    changing = sum(stage.traced.symbols is not None for stage in schedule.stages)
    others = count - changing - len(cut)
    reasons = []
    if cut:
        where = "" if len(cut) == count else f", in {len(cut)} of {count} stages"
        reasons.append(
            f"what acts on each token alone runs in {tiles} tiles{where}; their gradients of "
            "weights are added up in float32"
        )
    if changing:
        reasons.append(
            f"{changing} of {count} stages are not cut: their sizes change from call to call "
            "(dynamic=False)"
        )
    if others and cut:
        reasons.append(
            f"{others} of {count} stages are not cut: no product of matrices in them acts on each "
            "token alone"
        )
    elif others:
        reasons.append("nothing is cut: no product of matrices acts on each token alone")
    return tuple(reasons)


def _by_samples(stages: frozenset[int]) -> tuple[str, ...]:
    """Stages without attention are among them, whose tiles may be of tokens."""
    if not stages:
        return ()
    return (
        f"{len(stages)} recomputed stages run tile by tile as a whole, including any attention, "
        "as over micro-batches",
    )


def _saved_fractions(
    schedule: Schedule, keep: frozenset[int]
) -> tuple[tuple[tuple[int, float], ...], tuple[str, ...]]:
    """Half of what each kept stage saves, but for the last: its backward comes next."""
    last = schedule.stages[-1].index
    chosen = tuple((index, _SELECTIVE) for index in sorted(keep - {last}))
    if not chosen:
        return (), ()
    return chosen, (f"all but the last save {_SELECTIVE:.0%} of it, and compute the rest again",)


def _device_update(
    schedule: Schedule, resident: frozenset[int], on_disk: frozenset[int], share: float
) -> tuple[frozenset[int], tuple[str, ...]]:
    """The first buckets that make up no more than a share of the streamed parameters which are on
    the host, with their states."""
    trained = schedule.gradient_params
    sizes = {
        bucket.key: sum(bucket.params[i].numel for i in trained[bucket.key])
        for bucket in schedule.buckets
        if bucket.key in trained and bucket.key not in resident
    }
    total, chosen = sum(sizes.values()), []
    left = share * sum(size for key, size in sizes.items() if key not in on_disk)
    for bucket in schedule.buckets:
        if bucket.key not in on_disk and 0 < sizes.get(bucket.key, 0) <= left:
            left -= sizes[bucket.key]
            chosen.append(bucket)
    if not chosen:
        return frozenset(), ()
    part = sum(sizes[bucket.key] for bucket in chosen)
    which = f"bucket {chosen[0].label}"
    if len(chosen) > 1:
        which = f"buckets {chosen[0].label} to {chosen[-1].label}"
    reason = (
        f"optimizer.step() updates {which} ({part / total:.0%} of the streamed parameters) on the "
        "device, and the host the others meanwhile"
    )
    return frozenset(bucket.key for bucket in chosen), (reason,)
