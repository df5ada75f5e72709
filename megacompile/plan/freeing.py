"""Device memory that a plan which fits could still free: the inputs that stages are computed again
from wait on the host, or are themselves computed again.

That pays where other things can use the memory: more buckets live on the device, or more stages are
kept. It is tried for the fastest plan that frees nothing. Without that, a device on which a plan
just fits would get a slower one than a smaller device, where memory has to be freed. A bound on the
gain comes first, from what is known of other plans; where it is too little, no draft is made.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megacompile.ir.plan import Choice
from megacompile.plan.problem import Problem

_FREEING_PAYS = 0.01  # of a step: what inputs on the host must be able to save
_MUCH = 0.03  # the same, where inputs are computed again, or other updates go to the device


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
    if kept_s > _FREEING_PAYS * step_s:
        yield replace(best, offload=max(1, waiting.offload - stages))
    gain_s = _by_residents_s(problem, best, step_s, size) if resident else 0.0
    if gain_s > _FREEING_PAYS * step_s:
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
    if most > len(way.places.resident - problem.here.resident):
        yield replace(way, places=problem.places(most))


def _by_residents_s(problem: Problem, best: Choice, step_s: float, size: float) -> float:
    """The most that buckets can save by living in the freed memory, seconds of a step: they need no
    copies and no updates of the host. The step still takes as long as its computes.

    Args:
        size: bytes that are freed.
    """
    streamed = [b.key for b in problem.candidates if b.key not in best.places.resident]
    share = size / max(1.0, problem.resident_bytes(streamed, gradients=False))
    return min(step_s - problem.least_s(best), share * step_s)


def _by_keeping(problem: Problem, best: Choice, size: float) -> tuple[int, float]:
    """Number of stages that can be kept in `size` bytes, at most, and the seconds that this
    saves."""
    again = problem.again(best)
    if again is None:
        return 0, 0.0
    stage_s, stage_bytes = again
    stages = min(problem.stages - best.keep, -int(-size // stage_bytes))
    return stages, stages * stage_s
