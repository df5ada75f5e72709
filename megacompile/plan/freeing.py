"""Frees device memory that a fitting plan does not have to free: the inputs of recomputed stages
wait on the host, or are recomputed themselves.

This pays if the memory can hold more resident buckets or more kept stages. It is tried for the
fastest plan that frees nothing. Otherwise a device on which a plan just fits would get a slower
plan than a smaller device, which has to free memory. A bound on the gain is computed first from
known plans; if it is too small, no draft is built.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megacompile.ir.plan import Choice
from megacompile.plan.problem import Problem

_FREEING_PAYS = 0.01  # of a step: the least possible gain from inputs on the host
_MUCH = 0.03  # the same, if inputs are recomputed or other updates move to the device


def freed(problem: Problem, best: Choice, step_s: float, *, resident: bool) -> Iterator[Choice]:
    """Choices that may be faster, each using the freed memory in a different way.

    Args:
        best: the fastest choice that frees nothing.
        step_s: its time.
        resident: the search chooses the number of residents.
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
    """The choice with as many residents as fit, if there are more than in `way`."""
    most = problem.most_residents(way) or 0
    if most > len(way.places.resident - problem.here.resident):
        yield replace(way, places=problem.places(most))


def _by_residents_s(problem: Problem, best: Choice, step_s: float, size: float) -> float:
    """The most seconds per step that residents in the freed memory can save: they need no copies
    and no host updates. The step still takes at least as long as its computes.

    Args:
        size: freed bytes.
    """
    streamed = [b.key for b in problem.candidates if b.key not in best.places.resident]
    share = size / max(1.0, problem.resident_bytes(streamed, gradients=False))
    return min(step_s - problem.least_s(best), share * step_s)


def _by_keeping(problem: Problem, best: Choice, size: float) -> tuple[int, float]:
    """The most stages that can be kept in `size` bytes, and the seconds that this saves."""
    again = problem.again(best)
    if again is None:
        return 0, 0.0
    stage_s, stage_bytes = again
    stages = min(problem.stages - best.keep, -int(-size // stage_bytes))
    return stages, stages * stage_s
