"""Device memory that a plan which fits could still free: what stages are computed again from waits
on the host, or is itself computed again.

That pays where the memory is wanted: for buckets that live on the device then, and for stages that
are kept. It is sought for the fastest plan that was found otherwise, though that fits: or else a
device with more memory would get a slower plan than one on which nothing fits without. What it can
bring is bounded first, by what is known of other plans; where that is too little, no draft is made.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megacompile.plan.choice import Choice
from megacompile.plan.problem import Problem

_PAYS = 0.01  # of a step: what it must be able to save
_MUCH = 0.03  # the same, where it is computed again, or another share of updates goes with it


def freed(problem: Problem, best: Choice, step_s: float, *, resident: bool) -> Iterator[Choice]:
    """Choices that may be faster, each with something else in the memory that is freed.

    Args:
        best: the fastest choice that frees nothing.
        step_s: what it takes.
        resident: the number of residents is for the search to say.
    """
    if best.offload or best.rerun or best.keep == problem.stages:
        return
    waiting = replace(best, offload=problem.stages - best.keep)
    size = sum(size for _, size in problem.drafts.waiting(replace(waiting, keep=0)))
    stages, kept_s = _by_keeping(problem, best, size)
    if kept_s > _PAYS * step_s:
        yield replace(best, offload=max(1, waiting.offload - stages))
    gain_s = _by_residents_s(problem, best, step_s, size) if resident else 0.0
    if gain_s > _PAYS * step_s:
        yield from _with_residents(problem, waiting)
    if gain_s > _MUCH * step_s:
        ways = [waiting] if best.device_update else []
        if again := problem.reruns(1):
            run_again = replace(best, rerun=again, keep=0)
            ways += [run_again, replace(run_again, offload=problem.stages)]
        for way in ways:
            yield from _with_residents(problem, replace(way, device_update=0.0))


def _with_residents(problem: Problem, way: Choice) -> Iterator[Choice]:
    """With as many residents as fit, if these are more than there are."""
    most = problem.most_residents(way) or 0
    residents = problem.with_residents(most).resident
    if len(residents) > len(way.resident):
        yield replace(way, resident=residents)


def _by_residents_s(problem: Problem, best: Choice, step_s: float, size: float) -> float:
    """The most that buckets can save which live in so much more of the device's memory: they need
    no copies and no updates of the host. What computes take stays."""
    streamed = [b.key for b in problem.candidates if b.key not in best.resident]
    share = size / max(1.0, problem.resident_bytes(streamed, gradients=False))
    return min(step_s - problem.least_s(best), share * step_s)


def _by_keeping(problem: Problem, best: Choice, size: float) -> tuple[int, float]:
    """How many stages can be kept in so much memory, at most, and what that saves."""
    again = problem.again(best)
    if again is None:
        return 0, 0.0
    stage_s, stage_bytes = again
    stages = min(problem.stages - best.keep, -int(-size // stage_bytes))
    return stages, stages * stage_s
