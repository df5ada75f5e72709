"""Searches for the fastest plan that fits: which stages are kept, which buckets are resident.

A kept stage needs no recompute, a resident bucket neither copies nor a host update, and a bucket
that is updated on the device no host update. They compete for memory, so plans are built and
simulated.
Each candidate has a number of resident buckets (the first in forward order, whose updates the next
forward waits for), a share of the other buckets that is updated on the device, and as many kept
stages as fit (the last ones, whose saved tensors live the shortest). The search alternates between
the share and the number, each over a coarse grid, then refines the number, and then tries the moves
of `candidates`.

At least as many buckets are made resident as are needed for the others to fit on the host. If
nothing fits, time is traded for memory: inputs of the first stages wait on the host, stages are
rerun for their outputs, and what still does not fit on the host goes to a disk.

The host's rates vary from day to day and with its other load, so plans are compared by their mean
time over the measured host and a slower one.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megacompile import notices
from megacompile.cost.memory import MemoryKind, device_memory
from megacompile.garbage import old_objects_left_out
from megacompile.ir.capture import Variant
from megacompile.ir.plan import Choice, Places
from megacompile.ir.schedule import Schedule
from megacompile.options import Activations, Lowering
from megacompile.passes.schedule.make_plan import staying
from megacompile.plan.candidates import Candidates
from megacompile.plan.pipeline import Pipeline
from megacompile.plan.problem import Problem
from megacompile.plan.setting import Setting
from megacompile.text import duration, format_bytes

_COUNTS = (0, 1 / 24, 1 / 12, 1 / 6, 1 / 3, 2 / 3, 1)  # of the buckets, resident
_SHARES = (0.0, 0.1, 0.2, 0.4, 0.7, 1.0)  # of the parameters, updated on the device


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The best choice and its predicted costs."""

    choice: Choice
    step_s: float
    peak_bytes: int
    tried: int  # plans that were simulated
    reasons: tuple[str, ...]


@old_objects_left_out()
def search(
    problem: Problem,
    *,
    resident: bool = True,
    activations_fixed: bool = False,
    device_update: bool = True,
) -> SearchResult | None:
    """Find the fastest choice that fits; None if not even the smallest does.

    With `resident`, buckets may be resident. `activations_fixed`: the options determine what is
    kept or offloaded. With `device_update`, streamed buckets may be updated on the device.
    """
    least = problem.fewest_residents() if resident else 0
    if least is None:
        return None
    keeps = (1, 1) if activations_fixed else (0, problem.stages)
    candidates = Candidates(problem, keeps, resident=resident)
    if not candidates.add_everything():
        _add_grid(candidates, least, _SHARES if device_update else _SHARES[:1])
    streamed = problem.with_residents(least)
    in_backward = problem.optimizer.in_backward
    if in_backward:  # states may leave or be fetched later
        candidates.add_late_states(streamed)
    if not candidates.times and not activations_fixed:
        late = replace(streamed, keep=0, state_lookahead=1 if in_backward else None)
        candidates.add_offloaded(late)
    if not candidates.times:
        return None
    best = candidates.surest()
    if not activations_fixed:
        both = dict.fromkeys((candidates.with_halves(best), best))
        best = min(map(candidates.with_memory_freed, both), key=candidates.times.__getitem__)
        best = candidates.with_saved_on_host(best)
    peak, step_s = problem.peak_bytes(best), problem.step_s(best)
    why = _reasons(candidates, best, step_s, peak)
    return SearchResult(best, step_s, peak, len(candidates.times), why)


def _add_grid(candidates: Candidates, least: int, shares: Sequence[float]) -> None:
    """Try numbers of residents, from `least`, and shares of device updates in turn; then refine the
    number."""
    problem, total = candidates.problem, len(candidates.problem.candidates)
    candidates.add_each([least], shares)
    if not candidates.resident:
        return
    most = max(least, problem.most_residents(Choice(0)) or 0)
    handed = candidates.best.device_update  # with residents a smaller share is enough
    likely = {0.0, handed, max((share for share in shares if share < handed), default=0.0)}
    counts = sorted({min(max(least, round(total * part)), most) for part in _COUNTS})
    candidates.add_each(counts, likely)
    at = candidates.count(candidates.best)
    candidates.add_each([at], shares)

    def look(count: int) -> Choice:
        candidates.add_each([count], {0.0, handed, candidates.best.device_update})
        return candidates.best

    gaps = [b - a for a, b in itertools.pairwise(counts) if at in (a, b)]
    candidates.climb(at, max(gaps, default=0) // 2, range(least, most + 1), look)


def _reasons(candidates: Candidates, best: Choice, step_s: float, peak: int) -> tuple[str, ...]:
    """The reasons for this plan: its memory, its time, and the time of the streamed plan."""
    problem, tried = candidates.problem, candidates.times
    budget = format_bytes(problem.budget_bytes)
    lines = [
        f"{best.keep} of {problem.stages} stages are kept and {len(best.places.resident)} of "
        f"{len(problem.buckets)} buckets are resident: {format_bytes(peak)} of {budget} of "
        f"device memory, {duration(step_s)} a step predicted, "
        + (
            f"the fastest of {len(tried)} plans that fit"
            if len(tried) > 1
            else "the only plan tried"
        )
    ]
    streamed = {choice: s for choice, s in tried.items() if not choice.places.resident}
    if best.state_lookahead is not None:
        lines.append("optimizer states are fetched a stage ahead, later than weights, for memory")
    if streamed and best.places.resident:
        streamed_s = problem.step_s(min(streamed, key=streamed.__getitem__))
        lines.append(f"with every bucket streamed it would take {duration(streamed_s)}")
    return tuple(lines)


TILES = (4, 16, 64, 256)  # numbers of tiles that are tried
_TILES_PAY = 0.03  # of a step: the least gain if a plan fits without tiles
_NOTABLE = 0.1  # of the budget: the least workspace worth cutting


def search_everywhere(problem: Problem) -> SearchResult | None:
    """Find the fastest choice that fits, under the options. If plans may use tiles, try them too:
    as few as necessary to fit, and more if that is faster.

    Tokenwise pieces need less device memory in tiles, and a kept stage saves less: only the inputs
    and outputs of attention. That leaves memory to keep more stages. But even a kept stage
    recomputes in the backward what its tiles compute, which is most of it with short sequences.
    """
    best, at, count = _uncut(problem), problem, 1
    why: tuple[str, ...] = ()
    for tiles in _tiles_of(problem):
        cut = problem.in_tiles(tiles)
        if best is not None and not _may_pay(at, best, cut):
            break
        if not cut.drafts.cut:  # nothing can be tiled, with any number of tiles
            break
        found = _uncut(cut)
        if found is not None and best is not None:
            before_s = at.expected_s(best.choice)
            if cut.expected_s(found.choice) > before_s * (1 - _TILES_PAY):
                break
            how = "without tiles" if count == 1 else f"in {count} tiles"
            why = (f"{how} it would take {at.step_s(best.choice) * 1e3:.0f} ms",)
        if found is not None:
            best, at, count = found, cut, tiles
    if best is None:
        return None
    choice = replace(best.choice, tiles=count)
    return replace(best, choice=choice, reasons=(*best.reasons, *why))


def _tiles_of(problem: Problem) -> tuple[int, ...]:
    """The numbers of tiles that a plan may choose. Matrix kernels may round differently for fewer
    rows, but eager code must be bitwise equal; and ranks must all read the same weights in a
    backward."""
    options = problem.setting.options
    may = options.lowering is Lowering.INDUCTOR and options.ranks == 1 and options.tiles is None
    return TILES if may else ()


def _uncut(problem: Problem) -> SearchResult | None:
    """Search with the problem's number of tiles."""
    setting, options = problem.setting, problem.setting.options
    updates = options.plans_device_update and options.device_update is None
    return search(
        problem,
        resident=bool(problem.candidates),
        activations_fixed=options.activations is not Activations.AUTO,
        device_update=updates and setting.on_gpu,
    )


def _may_pay(problem: Problem, best: SearchResult, cut: Problem) -> bool:
    """True if a search with more tiles (`cut`) may pay off; it takes as long as the one for `best`.
    Depends on the memory that tiles can free, and the time of their computes with all stages
    kept."""
    enough_s = problem.expected_s(best.choice) * (1 - _TILES_PAY)
    every = Choice(problem.stages)
    if problem.least_s(every) > enough_s:
        return False  # little is recomputed and the device never waits
    moments = problem.memory(best.choice).moments
    workspace = max(moment.live_bytes.get(MemoryKind.WORKSPACE, 0) for moment in moments)
    if workspace < _NOTABLE * problem.budget_bytes:
        return False
    cut.schedule(every)
    return cut.least_s(every) < enough_s


def with_weights(
    problem: Problem, found: SearchResult | None
) -> tuple[Problem, SearchResult | None]:
    """Put the parameters of as few buckets as necessary on the disk, if nothing fits otherwise
    (`found` is None) or if that is faster than saved tensors there. Each of these buckets is read
    twice a step; see decision 30."""
    if found is not None and not found.choice.saved_on_disk:
        return problem, found
    more = replace(problem, disk_weights=None)
    other = search_everywhere(more)
    if other is None or not other.choice.places.weights_on_disk:
        return (more, other) if found is None else (problem, found)
    why = "no other plan fits: host memory does not hold all parameters next to the rest"
    if found is not None:
        if problem.expected_s(found.choice) <= more.expected_s(other.choice):
            return problem, found
        why = (
            "with all parameters in host memory, and more saved tensors on the disk, it would take "
            f"{problem.step_s(found.choice) * 1e3:.0f} ms"
        )
    return more, replace(other, reasons=(*other.reasons, why))


def with_fewer_states(problem: Problem) -> SearchResult | None:
    """Find the fastest choice with as many optimizer states as the host holds, and warn about it.

    A model's optimizer is unknown before the first step, so plans assume AdamW's states. If the
    host does not hold these, another optimizer may still be able to train the model.
    """
    setting = problem.setting
    known = setting.options.optimizer is not None or setting.hardware is not None
    if known or problem.host_budget_bytes is None:
        return None
    for states in reversed(range(problem.optimizer.states)):
        less = replace(problem, optimizer=setting.cost(states=states))
        found = None
        if less.disk_weights is None:
            found = search_everywhere(replace(less, disk_weights=False))
        if (found := found or search_everywhere(less)) is not None:
            notices.warn(
                f"megacompile: host memory ({format_bytes(problem.host_budget_bytes)}) holds "
                f"{states} optimizer states for each parameter, and AdamW has "
                f"{problem.optimizer.states}. An optimizer step that needs more raises an error; "
                "state_dtype='int8' needs less",
                notices.Whose.RANK,
            )
            return found
    return None


def smallest(problem: Problem) -> tuple[Problem, int]:
    """The problem with the number of tiles (1: none) that needs the least device memory, and that
    number."""
    each = [(problem.in_tiles(tiles), tiles) for tiles in (1, *_tiles_of(problem))]
    return min(each, key=lambda pair: pair[0].floor_bytes())


def nearest(problem: Problem) -> Choice:
    """The choice that lacks the fewest bytes, summed over all memories, if none fits.

    Choices have as many residents as fit or none, inputs of stages on the device or as many as
    necessary on the host, and reruns or not: offloading and recomputing move the shortage from the
    device to the host.
    """
    tightest, found = problem.tightest(), []
    for places in dict.fromkeys((tightest.places, problem.here)):
        for rerun in (False, True) if problem.may_rerun else (False,):
            choice = replace(tightest, places=places, rerun=rerun)
            few = problem.fewest_offloaded(choice)
            for offload in sorted({0, problem.stages if few is None else few}):
                found.append(problem.settled(replace(choice, offload=offload)))
    return min(found, key=lambda choice: sum(problem.lacking(choice).values()))


def stay_that_fit(
    pipeline: Pipeline,
    setting: Setting,
    schedule: Schedule,
    places: Places,
    budget_bytes: int,
) -> int:
    """The maximum number of streamed buckets that may stay in their own slots between forwards
    without a backward (evaluation, generation), next to everything else. Training leaves the
    gradients and states of residents on the device too."""
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
        return len(streamed)  # and no other slots are needed
    return max(
        count
        for count in range(len(streamed))
        if not count or sum(b.size_bytes for b in staying(streamed, count)) <= left_bytes
    )
