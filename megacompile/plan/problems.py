"""Builds the problems that plans solve, from a captured graph and the memory left for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megacompile.cost.memory import MemoryKind
from megacompile.cost.places import stored_bytes, stored_weights_bytes, streamed_bytes
from megacompile.ir.capture import Variant
from megacompile.ir.plan import Placement, Places
from megacompile.ir.schedule import Schedule
from megacompile.options import Activations, Lowering
from megacompile.plan.budget import Budget
from megacompile.plan.drafts import Drafts
from megacompile.plan.pipeline import Pipeline
from megacompile.plan.problem import Problem
from megacompile.plan.setting import Setting
from megacompile.plan.wanted import OpenTo, WantedPlaces


class Problems:
    """Builds the problems of one model's captured graphs.

    Args:
        setting: the options, and the machine.
        pipeline: builds the schedules to simulate.
        budget: of device memory and disk.
        wanted: the places that plans want buckets to be in.
    """

    def __init__(
        self, setting: Setting, pipeline: Pipeline, budget: Budget, wanted: WantedPlaces
    ) -> None:
        self.setting = setting
        self.pipeline = pipeline
        self.budget = budget
        self.wanted = wanted
        self.trained: dict[int, Sequence[int]] = {}  # bucket key -> parameters with a gradient

    def open_to(
        self,
        open_to: OpenTo,
        schedule: Schedule,
        variant: Variant,
        placement: Placement,
        others: Sequence[Schedule],
    ) -> Problem:
        """The problem of a plan that may make some decisions.

        Args:
            schedule: from `Pipeline.differentiated`.
            placement: where the model's buckets are.
            others: drafts of the other captured graphs.
        """
        own = frozenset(bucket.key for bucket in schedule.buckets)
        if placement.accumulates:
            variant = replace(variant, accumulate=True)  # which needs the most
        return replace(
            self.of(schedule, variant, placement),
            here=open_to.closed(placement.places.only(own)),
            undecided=[b for b in schedule.buckets if b.key in open_to.residents],
            storable=open_to.states,
            others=others,
            budget_bytes=self.budget_bytes(schedule, placement),
        )

    def budget_bytes(self, schedule: Schedule, placement: Placement) -> int:
        """Device memory for a graph and the other graphs."""
        return self.budget.size_bytes() - self.wanted.bytes_next_to(schedule, placement)

    def of(
        self,
        schedule: Schedule,
        variant: Variant,
        placement: Placement | None = None,
    ) -> Problem:
        """The problem that a plan solves.

        Args:
            schedule: from `Pipeline.differentiated`.
            placement: where the buckets of the model are. Default: on the host.
        """
        placement = placement or Placement()
        cost = self.setting.cost()
        accumulates = cost.in_backward and (variant.accumulate or not variant.update)
        moves = self.setting.options.resident is None and not placement.stays
        wanted = self.wanted.places(placement)
        on_host, on_disk = self._elsewhere_bytes(schedule, wanted, accumulates)
        disk_bytes = self.budget.disk_bytes()
        return Problem(
            drafts=Drafts(self.pipeline, schedule, variant),
            buckets=schedule.buckets,
            stages=sum(stage.traced.has_backward for stage in schedule.stages),
            hardware=self.setting.rates(),
            optimizer=cost,
            accumulates=accumulates,
            gradients_stay=(variant.accumulate or not moves) and not cost.in_backward,
            disk_weights=bool(self.setting.options.disk_weights),
            disk_saved=self.setting.options.disk_saved,
            offloads=self.setting.options.activations is Activations.OFFLOAD,
            budget_bytes=self.budget.size_bytes(),
            host_budget_bytes=self.setting.host_budget_bytes(),
            elsewhere_bytes=on_host,
            disk_budget_bytes=None if disk_bytes is None else max(0, disk_bytes - on_disk),
            fused=self.setting.options.lowering is Lowering.INDUCTOR,
            trained=schedule.gradient_params,
        )

    def _elsewhere_bytes(
        self, schedule: Schedule, wanted: Places, accumulates: bool
    ) -> tuple[int, int]:
        """Known bytes on the host and on the disk of the buckets that a captured graph does not
        read."""
        here = {bucket.key for bucket in schedule.buckets} | wanted.resident
        others = (unit.bucket for unit in self.pipeline.units if unit.bucket.key not in here)
        cost = self.setting.cost()
        on_host, on_disk = 0.0, 0
        for bucket in others:
            trained = self.trained.get(bucket.key, ())
            kinds = streamed_bytes(bucket, trained, cost, accumulates=accumulates)
            if bucket.key in wanted.on_disk:
                on_disk += stored_bytes(bucket, trained, cost)
                kinds.pop(MemoryKind.STATES)
            if self.setting.options.disk_weights or bucket.key in wanted.weights_on_disk:
                on_disk += stored_weights_bytes(bucket)
                kinds.pop(MemoryKind.PARAMETERS)
            on_host += sum(kinds.values())
        return int(on_host), on_disk
