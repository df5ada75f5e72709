"""The searches that the options allow: in tiles or not, near what is known, with fewer states."""

from __future__ import annotations

from dataclasses import replace

from megacompile import notices
from megacompile.ir.plan import Choice
from megacompile.options import Activations, Lowering
from megacompile.plan.planner import SearchResult, search, search_near
from megacompile.plan.problem import Problem
from megacompile.plan.setting import Setting
from megacompile.plan.tiling import TILES, search_in_tiles
from megacompile.text import format_bytes


class Searches:
    """The searches for plans of one model.

    Args:
        setting: the options, and the machine.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting

    def everywhere(self, problem: Problem) -> SearchResult | None:
        """The fastest choice that fits: in tiles too, where the plan may choose them."""
        if self._may_cut:
            return search_in_tiles(problem, self._uncut)
        return self._uncut(problem)

    def near(self, problem: Problem, near: Choice | None) -> SearchResult | None:
        """The fastest near a choice that was found for other budgets, if there is one and anything
        near it fits; else everywhere."""
        found = None if near is None else search_near(problem, near)
        return found or self.everywhere(problem)

    def with_fewer_states(self, problem: Problem) -> SearchResult | None:
        """The fastest with as many optimizer states as the host holds; says how many.

        Where a model runs, its optimizer is not known before the first step. A plan counts the
        states of AdamW. Where the host does not hold these, the model may still be trained by
        another one.
        """
        known = self.setting.options.optimizer is not None or self.setting.hardware is not None
        if known or problem.host_budget_bytes is None:
            return None
        assumed = problem.optimizer.states
        for states in range(assumed - 1, -1, -1):
            less = replace(problem, optimizer=self.setting.cost(states=states))
            found = None
            if less.disk_weights is None:
                found = self.everywhere(replace(less, disk_weights=False))
            if (found := found or self.everywhere(less)) is not None:
                notices.warn(
                    f"megacompile: host memory ({format_bytes(problem.host_budget_bytes)}) does "
                    f"not hold {assumed} optimizer states a parameter, which AdamW has; it holds "
                    f"{states}. A step that needs more is refused; state_dtype='int8' needs less",
                    notices.Whose.RANK,
                )
                return found
        return None

    def smallest(self, problem: Problem) -> tuple[Problem, int]:
        """The problem in so many tiles, or in none (1): what needs least of the device. The most
        may need more than fewer ones, which have attention in them where they divide the batch."""
        counts = (1, *TILES) if self._may_cut else (1,)
        each = [(problem.in_tiles(tiles), tiles) for tiles in counts]
        return min(each, key=lambda pair: pair[0].floor_bytes())

    @property
    def _may_cut(self) -> bool:
        """May the plan choose tiles? A matrix kernel may round otherwise for fewer rows, and eager
        code is to be bitwise. Ranks choose nothing that decides which weights a backward reads."""
        options = self.setting.options
        return (
            options.lowering is Lowering.INDUCTOR and options.ranks == 1 and options.tiles is None
        )

    def _uncut(self, problem: Problem) -> SearchResult | None:
        """In the tiles of the problem."""
        options = self.setting.options
        return search(
            problem,
            resident=bool(problem.candidates),
            activations_fixed=options.activations is not Activations.AUTO,
            device_update=(
                options.plans_device_update
                and options.device_update is None
                and self.setting.on_gpu
            ),
            slots=options.slots is None and options.ranks == 1,
        )
