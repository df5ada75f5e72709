"""Decide what is kept, recomputed, resident, and where updates are made.

By default everything is streamed and recomputed, but for the last stage. Its backward comes right
after its forward, so keeping its saved tensors takes no memory at any other time, and saves one
pass over the head, the largest matrix of most language models.
"""

from __future__ import annotations

from dataclasses import replace

from megacompile.ir import Plan, Schedule


def make_plan(
    schedule: Schedule,
    *,
    keep_last: bool = True,
    activations: str = "auto",
    lookahead: int = 2,
    hand_over: float = 0.0,
    hand_over_bytes: float = 0.0,
    element_bytes: float = 0.0,
) -> Schedule:
    """The schedule with its plan.

    Args:
        keep_last: False recomputes every stage: a backward for other gradients than those that the
            forward was traced for has no saved tensors.
        activations: "auto", "keep", "selective", "recompute" or "offload".
        lookahead: how many stages ahead an offloaded value comes back.
        hand_over: the share of the trained parameters, the first in forward order, that
            `optimizer.step()` updates on the device.
        hand_over_bytes: device memory that may hold what these updates need.
        element_bytes: what an update needs of it for one parameter: value, gradient, states.
    """
    if schedule.backward is None:
        return replace(schedule, plan=Plan(frozenset(), ("every stage is recomputed",)))
    keep, reason = _keep(schedule, keep_last, activations)
    offload, waits = _offload(schedule, activations, lookahead)
    budgets, within = _budgets(schedule, keep, activations)
    chosen, why = _hand_over(schedule, hand_over, hand_over_bytes, element_bytes)
    return replace(
        schedule, plan=Plan(keep, (reason, *within, *waits, *why), chosen, offload, budgets)
    )


def _keep(schedule: Schedule, keep_last: bool, activations: str) -> tuple[frozenset[int], str]:
    if not keep_last:
        return frozenset(), "every stage is recomputed"
    if activations in ("keep", "selective"):
        able = frozenset(stage.index for stage in schedule.stages if stage.traced.has_backward)
        return able, f"every stage is kept: activations={activations!r}"
    last = schedule.stages[-1]
    if not last.traced.has_backward:
        return frozenset(), f"stage {last.index} ({last.name}) has no backward: nothing to keep"
    reason = f"stage {last.index} ({last.name}) is kept: its backward comes next"
    return frozenset({last.index}), reason


def _offload(
    schedule: Schedule, activations: str, lookahead: int
) -> tuple[frozenset[int], tuple[str, ...]]:
    """All stages but the last ones: what these take is wanted back as soon as the backward begins.

    The same for every backward of a forward, whatever outputs get a gradient.
    """
    if activations != "offload":
        return frozenset(), ()
    stay = min(lookahead + 1, len(schedule.stages))
    chosen = frozenset(range(len(schedule.stages) - stay))
    if not chosen:
        return chosen, (f"nothing waits on the host: the backward begins with {stay} stages",)
    reason = (
        f"what stages 0 to {max(chosen)} take from the forward waits on the host; the backward "
        f"begins with the other {stay}"
    )
    return chosen, (reason,)


_SELECTIVE = 0.5  # of the saved tensors of a 7B layer: 4 % of its time for half of the memory


def _budgets(
    schedule: Schedule, keep: frozenset[int], activations: str
) -> tuple[tuple[tuple[int, float], ...], tuple[str, ...]]:
    """Half of what each kept stage saves, but for the last: its backward comes next."""
    last = schedule.stages[-1].index
    chosen = tuple((index, _SELECTIVE) for index in sorted(keep - {last}))
    if activations != "selective" or not chosen:
        return (), ()
    return chosen, (f"all but the last save {_SELECTIVE:.0%} of it, and compute the rest again",)


def _hand_over(
    schedule: Schedule, share: float, limit_bytes: float, element_bytes: float
) -> tuple[frozenset[int], tuple[str, ...]]:
    """The first buckets up to a share of the parameters, as far as the memory goes."""
    trained = schedule.gradient_params
    sizes = {
        bucket.key: sum(bucket.params[i].numel for i in trained[bucket.key])
        for bucket in schedule.buckets
        if bucket.key in trained
    }
    total, so_far, chosen = sum(sizes.values()), 0, []
    for bucket in schedule.buckets:
        if bucket.key not in sizes:
            continue
        so_far += sizes[bucket.key]
        if so_far > share * total or so_far * element_bytes > limit_bytes:
            break
        chosen.append(bucket)
    if not chosen:
        return frozenset(), ()
    part = sum(sizes[bucket.key] for bucket in chosen)
    reason = (
        f"optimizer.step() updates buckets {chosen[0].label} to {chosen[-1].label} "
        f"({part / total:.0%} of the parameters) on the device, and the host the others meanwhile"
    )
    return frozenset(bucket.key for bucket in chosen), (reason,)
