"""Parameters on the disk: whether a plan has some there that need not be there.

A plan with parameters on the disk reads each of their buckets twice a step. So one is sought only
where none fits without, or only with saved tensors on the disk; decision 30 says why.
"""

from __future__ import annotations

from dataclasses import replace

from megacompile.plan.planner import Search, SearchResult
from megacompile.plan.problem import Problem

_NO_OTHER = "no other plan fits: host memory does not hold all parameters beside the rest"


def search_with_weights(
    problem: Problem, found: SearchResult | None, search: Search
) -> tuple[Problem, SearchResult | None]:
    """The problem and the choice with parameters of as few buckets on the disk as it takes, where
    nothing fits without, or where that is faster than saved tensors there.

    Args:
        problem: where no more parameters are there than before.
        found: what was found for it; None: nothing fits.
        search: finds the fastest choice that fits.
    """
    if found is not None and not found.choice.saved_on_disk:
        return problem, found
    more = replace(problem, disk_weights=None)
    more.learn(problem)
    other = search(more)
    if other is None or not other.choice.places.weights_on_disk:
        return (more, other) if found is None else (problem, found)
    why = _NO_OTHER
    if found is not None:
        if problem.expected_s(found.choice) <= more.expected_s(other.choice):
            return problem, found
        why = (
            "with all parameters in host memory, and more saved tensors on the disk, it would "
            f"take {problem.step_s(found.choice) * 1e3:.0f} ms"
        )
    return more, replace(other, reasons=(*other.reasons, why))
