"""In how many tiles a plan runs: in as few as it takes to fit, and in some where that is faster.

What acts on each token alone needs less device memory in tiles, and a kept stage saves less: only
what attention reads and returns. That leaves memory to keep more stages. But what tiles compute is
computed again in the backward, whatever is kept: with short sequences that is most of a stage.

A search in tiles takes as long as one without. So two bounds on the gain come first: the memory
that tiles can free, and the time of the computes in tiles where all stages are kept. Where nothing
of a model can be cut, tiles are not tried.
"""

from __future__ import annotations

from dataclasses import replace

from megacompile.cost.memory import MemoryKind
from megacompile.ir.plan import Choice
from megacompile.plan.planner import Search, SearchResult
from megacompile.plan.problem import Problem

TILES = (4, 16, 64, 256)  # that are tried
_PAYS = 0.03  # of a step: what tiles must save where a plan fits without
_NOTABLE = 0.1  # of the budget: workspace that is worth cutting


def search_in_tiles(problem: Problem, search: Search) -> SearchResult | None:
    """The fastest choice that fits, with or without tiles.

    Args:
        problem: without tiles.
        search: finds the fastest choice that fits, and runs in the tiles of its problem.
    """
    best, at, count = search(problem), problem, 1
    why: tuple[str, ...] = ()
    for tiles in TILES:
        cut = problem.in_tiles(tiles)
        if best is not None and not _may_pay(at, best, cut):
            break
        if not cut.drafts.cut:  # and more tiles cut no more
            break
        found = search(cut)
        if found is not None and best is not None:
            before_s = at.expected_s(best.choice)
            if cut.expected_s(found.choice) > before_s * (1 - _PAYS):
                break
            why = (_instead(count, at.step_s(best.choice)),)
        if found is not None:
            best, at, count = found, cut, tiles
    if best is None:
        return None
    choice = replace(best.choice, tiles=count)
    return replace(best, choice=choice, reasons=(*best.reasons, *why))


def _instead(tiles: int, step_s: float) -> str:
    how = "without tiles" if tiles == 1 else f"in {tiles} tiles"
    return f"{how} it would take {step_s * 1e3:.0f} ms"


def _may_pay(problem: Problem, best: SearchResult, cut: Problem) -> bool:
    """True if more tiles may save enough of a step.

    Args:
        problem: what `best` was found for.
        cut: the same in more tiles.
    """
    enough_s = problem.expected_s(best.choice) * (1 - _PAYS)
    every = Choice(problem.stages)
    if problem.least_s(every) > enough_s:
        return False  # hardly anything is computed again, and nothing waited for
    moments = problem.memory(best.choice).moments
    workspace = max(moment.live_bytes.get(MemoryKind.WORKSPACE, 0) for moment in moments)
    if workspace < _NOTABLE * problem.budget_bytes:
        return False
    cut.schedule(every)
    return cut.least_s(every) < enough_s
