"""Searches for the fastest plan that fits: which stages are kept, which buckets are resident.

There are four uses for more memory. A kept stage avoids its recompute. A resident bucket avoids its
copies and the host update. A bucket updated on the device avoids the host update. One more slot
avoids copying a bucket twice if the backward reads it soon. They compete for memory, so plans are
built and simulated. Each candidate has a number of resident buckets (the first in forward order,
whose updates the next forward waits for), a share of the other buckets that is updated on the
device, and as many kept stages as fit (the last ones, whose saved tensors live the shortest; fewer
are tried too if copies bound the step). The search alternates between the share and the number,
each over a coarse grid, and then refines the number. Then stages that are not kept may be kept on
the host if that pays off, and the remaining memory goes to slots.

Host memory and the disk are budgets too. Enough buckets are made resident that the others fit on
the host, including the gradients and states that they will get. If nothing fits that way, memory is
traded for time: inputs of the first stages wait on the host, stages run again for their outputs,
and what still does not fit on the host goes to a disk.

The host's rates are less certain than the device's: they vary from day to day and with its other
load. The fastest plan for the measured rates would finish its updates just when the next forward
needs them, so plans are compared by their mean time over the measured host and a slower one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from megacompile.garbage import old_objects_left_out
from megacompile.ir.plan import Choice
from megacompile.plan.problem import Problem
from megacompile.plan.tries import Tries, between
from megacompile.text import format_bytes

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


Search = Callable[
    [Problem], SearchResult | None
]  # returns the fastest choice that fits; None: none does


@old_objects_left_out()
def search(
    problem: Problem,
    *,
    resident: bool = True,
    activations_fixed: bool = False,
    device_update: bool = True,
    slots: bool = True,
) -> SearchResult | None:
    """Find the fastest choice that fits; None if not even the smallest does.

    Args:
        resident: buckets may be resident.
        activations_fixed: the options determine what is kept or offloaded.
        device_update: streamed buckets may be updated on the device.
        slots: there may be more than the options ask for.
    """
    least = problem.fewest_residents() if resident else 0
    if least is None:
        return None
    tries = Tries(problem, (1, 1) if activations_fixed else (0, problem.stages))
    most = max(least, problem.most_residents(Choice(0)) or 0) if resident else 0
    if not tries.add_everything(len(problem.candidates) if resident else 0):
        _add_grid(tries, (least, most), resident=resident, device_update=device_update)
    streamed = problem.with_residents(least)
    in_backward = problem.optimizer.in_backward
    if in_backward:  # states may leave or be fetched later
        tries.add_late_states(streamed, resident=resident)
        if resident:  # that frees memory for a few more
            later = Choice(0, state_lookahead=1)
            count = problem.most_residents(later) or 0
            if count > tries.count(tries.best):
                tries.add(replace(later, places=problem.places(count)))
    if not tries.times and not activations_fixed:
        late = replace(streamed, keep=0, state_lookahead=1 if in_backward else None)
        tries.add_offloaded(late, resident=resident)
    if not tries.times:
        return None
    best = tries.surest()
    if not activations_fixed:
        halves = tries.with_halves(best, resident=resident)
        each = [
            tries.with_memory_freed(b, resident=resident) for b in dict.fromkeys((halves, best))
        ]
        best = min(each, key=tries.times.__getitem__)
        best = tries.with_saved_on_host(best)
    if slots:
        best = tries.with_more_slots(best)
    return _result(tries, best)


@old_objects_left_out()
def search_near(problem: Problem, near: Choice) -> SearchResult | None:
    """Find the fastest of a few choices similar to one found for slightly less memory: with the
    same number of residents, a few more, as many as fit, and a number between; then with the same
    number of stages kept on the host, and twice as many. None if none of them fits."""
    tries = Tries(problem, (0, problem.stages))
    at = tries.count(near)
    most = max(at, problem.most_residents(Choice(0)) or 0)
    alike = replace(near, saved_on_host=0)
    for count in sorted({at, at + 1, at + 2, (at + most) // 2, most}):
        if count <= len(problem.candidates):
            tries.add(replace(alike, places=problem.places(count)))
    if not tries.times:
        return None
    best = tries.with_memory_freed(tries.surest(), resident=True)
    if near.saved_on_host:
        most = problem.stages - best.keep
        counts = {min(near.saved_on_host, most), min(2 * near.saved_on_host, most)}
        found = [best, *(tries.kept_on_host(best, count) for count in sorted(counts))]
        best = min(found, key=tries.times.__getitem__)
    else:
        best = tries.with_saved_on_host(best)
    return _result(tries, best)


def _add_grid(
    tries: Tries, residents: tuple[int, int], *, resident: bool, device_update: bool
) -> None:
    """Try numbers of residents and shares of device updates in turn; then refine the number.

    Args:
        residents: the least number, so that the others fit on the host, and the most that fit on
            the device.
        resident: as in `search`.
        device_update: as in `search`.
    """
    problem, total = tries.problem, len(tries.problem.candidates)
    least, most = residents
    counts = sorted({min(max(least, round(total * part)), most) for part in _COUNTS})
    shares = _SHARES if device_update else _SHARES[:1]
    # without the disk: the device never updates buckets with states there
    first = problem.fewest_residents(disk=False) if resident and device_update else least
    tries.add_each(sorted({least, least if first is None else first}), shares)
    if not resident:
        return
    handed = tries.best.device_update  # with residents a smaller share is enough
    likely = {0.0, handed, max((share for share in shares if share < handed), default=0.0)}
    tries.add_each(counts, likely)
    tries.add_each({tries.count(tries.best)}, shares)
    for _ in range(3):
        middles = between(tries.counts, tries.count(tries.best))
        tries.add_each(middles, {0.0, handed, tries.best.device_update})


def _result(tries: Tries, best: Choice) -> SearchResult:
    """The result of a search that ends at this choice."""
    peak, step_s = tries.problem.peak_bytes(best), tries.problem.step_s(best)
    why = _reasons(tries, best, step_s, peak)
    return SearchResult(best, step_s, peak, len(tries.times), why)


def _reasons(tries: Tries, best: Choice, step_s: float, peak: int) -> tuple[str, ...]:
    """The reasons for this plan: its memory, its time, and the time of the streamed plan."""
    problem, tried = tries.problem, tries.times
    budget = format_bytes(problem.budget_bytes)
    lines = [
        f"{best.keep} of {problem.stages} stages are kept and {len(best.places.resident)} of "
        f"{len(problem.buckets)} buckets are resident: {format_bytes(peak)} of {budget} of "
        f"device memory, {step_s * 1e3:.0f} ms a step predicted, "
        + (
            f"the fastest of {len(tried)} plans that fit"
            if len(tried) > 1
            else "the only plan tried"
        )
    ]
    floor = {choice: s for choice, s in tried.items() if not choice.places.resident}
    if best.state_lookahead is not None:
        lines.append(
            f"optimizer states are fetched {best.state_lookahead} stage ahead, later than weights, "
            "to save memory"
        )
    if floor and best.places.resident:
        streamed_s = problem.step_s(min(floor, key=floor.__getitem__))
        lines.append(f"with every bucket streamed it would take {streamed_s * 1e3:.0f} ms")
    return tuple(lines)
