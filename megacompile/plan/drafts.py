"""Drafts: schedules that are built only to be simulated.

A search builds dozens of them, which takes most of its time. Many choices have the same computes
(`Choice.computing`). If saved tensors wait on the host or on a disk, their sizes are queried as
well. So the part of the passes that depends only on the computes is cached.
"""

from __future__ import annotations

from dataclasses import replace

from megacompile.cost.places import saved_elsewhere
from megacompile.ir.capture import Variant
from megacompile.ir.plan import Choice
from megacompile.ir.schedule import Schedule
from megacompile.plan.pipeline import Pipeline

_KEPT = 2  # latest results of `Pipeline.saving`


class Drafts:
    """Builds drafts of one captured graph.

    Args:
        pipeline: the passes.
        graphs: from `Pipeline.differentiated`.
        variant: of the schedules.
        tiles: number of tiles of tokenwise pieces, overriding the choice's; None: the choice's.
    """

    def __init__(
        self, pipeline: Pipeline, graphs: Schedule, variant: Variant, tiles: int | None = None
    ) -> None:
        self.pipeline, self.graphs, self.variant, self.tiles = pipeline, graphs, variant, tiles
        self._bundled: Schedule | None = None  # `graphs` in tiles, the start of every draft
        self._saving: dict[Choice, Schedule] = {}  # the latest in which saved tensors wait
        self._waiting: dict[Choice, list[tuple[int, int]]] = {}

    def in_tiles(self, tiles: int) -> Drafts:
        """Drafts of the same graph in `tiles` tiles."""
        return Drafts(self.pipeline, self.graphs, self.variant, tiles)

    @property
    def cut(self) -> bool:
        """True if anything runs in tiles."""
        rows = self._with_plan(self._as_here(Choice())).plan.stages
        return any(row.tiles > 1 for row in rows)

    def of(self, choice: Choice) -> Schedule:
        """The draft of a choice."""
        choice = self._as_here(choice)
        planned = self._with_plan(choice)
        if choice.offload or choice.saved_on_host:
            saving = replace(self._kept(choice).fresh(), plan=planned.plan)
        else:
            saving = self.pipeline.saving(planned, bundle=True)
        return self.pipeline.moving(saving, self.variant, choice)

    def waiting(self, choice: Choice) -> list[tuple[int, int]]:
        """The saved tensors that wait on the host or on a disk, as (stage, bytes)."""
        key = self._as_here(choice).computing
        if key not in self._waiting:
            self._waiting[key] = saved_elsewhere(self._kept(key))
        return self._waiting[key]

    def _kept(self, choice: Choice) -> Schedule:
        key = choice.computing
        if key not in self._saving:
            if len(self._saving) == _KEPT:
                del self._saving[next(iter(self._saving))]
            self._saving[key] = self.pipeline.saving(self._with_plan(key), bundle=True)
        return self._saving[key]

    def _as_here(self, choice: Choice) -> Choice:
        tiles = choice.tiles if self.tiles is None else self.tiles
        return replace(choice, tiles=tiles)

    def _with_plan(self, choice: Choice) -> Schedule:
        if self._bundled is None:
            self._bundled = self.pipeline.bundled(self.graphs, self.variant, self.tiles or 1)
        return self.pipeline.with_plan(self._bundled, self.variant, choice)
