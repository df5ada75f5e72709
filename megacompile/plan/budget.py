"""The budgets of device memory and disk space for plans, and the problems that plans solve under
them. The device's budget shrinks after an out-of-memory error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megacompile.cost.memory import MemoryKind
from megacompile.cost.places import stored_bytes, stored_weights_bytes, streamed_bytes
from megacompile.ir.capture import Variant
from megacompile.ir.plan import Choice, Placement, Places
from megacompile.ir.schedule import Schedule
from megacompile.options import Activations, Lowering
from megacompile.plan.drafts import Drafts
from megacompile.plan.fit import device_table
from megacompile.plan.pipeline import Pipeline
from megacompile.plan.problem import Problem
from megacompile.plan.setting import Setting
from megacompile.plan.wanted import OpenTo, WantedPlaces
from megacompile.text import format_bytes

_LESS = 0.9  # the next budget, if the largest plan ran out of memory: a share of its memory
_REMEMBERED = 8  # captured graphs; the smallest floor among them limits `step_down`


class Budget:
    """The device memory and disk space that plans may use.

    Args:
        setting: its free memory is the default limit, read at the first use.
        limit_bytes: of device memory. None: that of `setting`.
        disk_bytes: limit of the disk. None: that of `setting`, read at the first use.
    """

    def __init__(
        self, setting: Setting, limit_bytes: int | None = None, disk_bytes: int | None = None
    ) -> None:
        self._disk_bytes = disk_bytes
        self.setting = setting
        self.limit_bytes = setting.options.gpu_memory if limit_bytes is None else limit_bytes
        self._is_of_all = False  # have ranks agreed on a limit?
        self._needed_bytes = 0  # predicted, by the largest plan since the last `step_down`
        self._problems: list[Problem] = []  # of the captured graphs, the latest last

    def size_bytes(self) -> int:
        """The user's limit, or the memory that was free at the first use."""
        if self.limit_bytes is None:
            self.limit_bytes = self.setting.free_bytes()
        return self.limit_bytes

    def disk_bytes(self) -> int | None:
        """Disk space for the whole model, as of the first use; None: no disk."""
        if self._disk_bytes is None:
            self._disk_bytes = self.setting.disk_budget_bytes()
        return self._disk_bytes

    def agree(self) -> None:
        """Lower the limit to the smallest of all ranks, so that their plans keep the same buckets
        resident. This is a collective; it runs once."""
        if self.setting.least is not None and not self._is_of_all:
            self._is_of_all = True
            self.limit_bytes = self.setting.least(self.size_bytes())

    def note(self, problem: Problem, peak_bytes: int) -> None:
        """Record the peak device memory of a chosen plan."""
        self._needed_bytes = max(self._needed_bytes, peak_bytes)
        self._problems = [*self._problems[-(_REMEMBERED - 1) :], problem]

    def holds(self, more_bytes: int, peak_bytes: int) -> bool:
        """True if code fits whose peak is `peak_bytes` and that needs `more_bytes` in addition to
        the largest plan."""
        return max(self._needed_bytes + more_bytes, peak_bytes) <= self.size_bytes()

    def room(self, peak_bytes: int) -> int:
        """Device memory that is left next to a plan with this peak and next to the largest plan."""
        return self.size_bytes() - max(self._needed_bytes, peak_bytes)

    def step_down(self) -> str:
        """Lower the limit to nine tenths of the largest plan's memory; describes the new limit, or
        returns "" if nothing changes."""
        if not self._needed_bytes or not self.setting.options.plans:
            return ""
        floor_bytes = min(problem.floor_bytes() for problem in self._problems)
        if self._needed_bytes <= floor_bytes:
            return ""
        self.limit_bytes = max(int(_LESS * self._needed_bytes), floor_bytes)
        self._needed_bytes = 0
        return f"at most {format_bytes(self.limit_bytes)} of device memory"

    def needs(self) -> str:
        """Device memory of the smallest feasible plan, as a table; "" if unknown."""
        if not self._problems:
            return ""
        problem = self._problems[-1]
        return device_table(problem, Choice(0, problem.here), problem.floor().peak)


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
        """The problem of a plan to which only some decisions are open.

        Args:
            schedule: from `Pipeline.differentiated`.
            placement: where the model's buckets are.
            others: drafts of the other captured graphs.
        """
        own = frozenset(bucket.key for bucket in schedule.buckets)
        if placement.accumulates:
            variant = replace(variant, accumulate=True)  # needs the most memory
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
        own = {bucket.key for bucket in schedule.buckets} | wanted.resident
        others = (unit.bucket for unit in self.pipeline.units if unit.bucket.key not in own)
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
