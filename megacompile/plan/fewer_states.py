"""Plans for an optimizer with fewer states than the one that is assumed.

Where a model runs, its optimizer is not known before the first step. A plan counts the states of
AdamW. Where the host does not hold these, the model may still be trained by another one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from megacompile import notices
from megacompile.cost.optimizer import OptimizerCost
from megacompile.plan.planner import Search, SearchResult
from megacompile.plan.problem import Problem
from megacompile.text import format_bytes


def search_with_fewer_states(
    problem: Problem, cost: Callable[[int], OptimizerCost], search: Search
) -> SearchResult | None:
    """The fastest choice that fits with as many states as host memory holds; says how many.

    Args:
        problem: that nothing fits, with a budget of host memory.
        cost: of an optimizer with so many states a parameter.
        search: finds the fastest choice that fits.
    """
    assert problem.host_budget_bytes is not None
    assumed = problem.optimizer.states
    for states in range(assumed - 1, -1, -1):
        less = replace(problem, optimizer=cost(states))
        found = None
        if less.disk_weights is None:
            found = search(replace(less, disk_weights=False))
        if (found := found or search(less)) is not None:
            notices.warn(
                f"megacompile: host memory ({format_bytes(problem.host_budget_bytes)}) does "
                f"not hold {assumed} optimizer states a parameter, which AdamW has; it holds "
                f"{states}. A step that needs more is refused; state_dtype='int8' needs less",
                notices.Whose.RANK,
            )
            return found
    return None
