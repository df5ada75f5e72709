"""Plans, verifies and lowers captured graphs: the facade over the parts of a planner."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch

from megacompile import compat, log
from megacompile.cost.hardware import Hardware
from megacompile.cost.memory import MemoryKind, device_memory
from megacompile.errors import UnsupportedGraphError
from megacompile.ir import ops
from megacompile.ir.buckets import Bucket, Unit
from megacompile.ir.capture import Variant
from megacompile.ir.plan import Placement
from megacompile.ir.schedule import Schedule
from megacompile.ir.tensors import Values
from megacompile.options import Lowering, Options
from megacompile.passes.schedule.updates import rest_of
from megacompile.passes.stages.numbers import resize
from megacompile.passes.stages.templates import TemplateCache
from megacompile.plan.budget import Budget
from megacompile.plan.chooser import Chooser
from megacompile.plan.pipeline import Pipeline, Planned
from megacompile.plan.setting import Setting
from megacompile.text import format_bytes
from megacompile.verify.proof import verify

_CAPTURES = 4  # at most, per stage: other sizes, evaluation, accumulated gradients


class PassCompiler:
    """Chooses, builds, verifies and lowers. Budgets are in bytes; None: the user's limit, or the
    free memory. `templates` has the code traced so far."""

    def __init__(
        self,
        setting: Setting,
        units: tuple[Unit, ...],
        *,
        budget_bytes: int | None = None,
        disk_budget_bytes: int | None = None,
        templates: TemplateCache | None = None,
    ) -> None:
        self.setting = setting
        self.pipeline = Pipeline(self.setting, units, templates)
        self.budget = Budget(self.setting, budget_bytes, disk_budget_bytes)
        self.chooser = Chooser(self.setting, self.pipeline, self.budget)
        self._last: tuple[Schedule, Variant, Schedule] | None = None  # `_differentiated`
        self._last_resized: tuple[object, Values, Schedule] | None = None
        self._lowered = False  # True once there is code
        self._waits = False  # True once uncompiled code ran out of memory

    def other(
        self,
        options: Options,
        *,
        hardware: Hardware,
        budget_bytes: int,
        host_bytes: int | None = None,
    ) -> PassCompiler:
        """A compiler that plans the same model from scratch with other options, sharing the traced
        code. By default the host's budget is the same; the disk is not queried again, because this
        model may have filled it meanwhile."""
        host_bytes = host_bytes or self.setting.host_bytes
        return PassCompiler(
            replace(
                self.setting, options=options, hardware=hardware, host_bytes=host_bytes, least=None
            ),
            self.pipeline.units,
            budget_bytes=budget_bytes,
            disk_budget_bytes=self.budget.disk_bytes(),
            templates=self.pipeline.templates,
        )

    def resized(self, stages: Schedule, values: Values) -> Schedule:
        """The stages, planned for other values of their symbols. Cached, because a call may start
        over after buckets have moved."""
        if self._last_resized is None or self._last_resized[:2] != (stages.stages, values):
            self._last_resized = (stages.stages, values, resize(stages, values))
        return replace(self._last_resized[2])

    def lower(self, schedule: Schedule) -> Schedule:
        """Lower a schedule that `plan` returned."""
        waits = not (self._lowered and self._may_run_uncompiled(schedule))
        schedule = self.pipeline.lowered(schedule, waits=waits)
        self._lowered = True
        log.schedule_made(schedule)
        return schedule

    def _may_run_uncompiled(self, schedule: Schedule) -> bool:
        """True if a step may run a schedule before its code is compiled: results need not be
        deterministic, and the plans leave enough device memory for unfused operators."""
        options = self.setting.options
        if options.lowering is Lowering.EAGER or options.ranks > 1 or self._waits:
            return False
        if torch.are_deterministic_algorithms_enabled():
            return False
        if options.device.type != "cuda":
            return True
        peaks = [
            device_memory([schedule], optimizer=self.setting.cost(), fused=fused).peak.total_bytes
            for fused in (True, False)
        ]
        beside = self.chooser.wanted.uncaptured_bytes()
        return peaks[1] - peaks[0] + beside <= self.budget.room(peaks[0])

    def choose(self, planned: Planned, placement: Placement, *, again: bool = False) -> Placement:
        """Make the choice that `plan` builds for buckets at `placement`; returns the placement that
        all plans so far want. With `again`, buckets that a plan for smaller inputs made resident
        may leave the device.

        Raises:
            DeviceMemoryError: no plan fits on the device.
            HostMemoryError: no plan that fits on the device fits on the host.
        """
        self.chooser.choose(planned, self._differentiated(planned), placement, again=again)
        return self.wants(placement)

    def plan(self, planned: Planned, placement: Placement, *, draft: bool = False) -> Schedule:
        """Build and verify the schedule for buckets that are at `placement` when it runs. Its
        templates have graphs, but no code yet. A `draft` is for simulation only: it is not verified
        and has no history.

        Raises:
            DeviceMemoryError, HostMemoryError: as `choose`.
        """
        planned = planned._replace(stages=self._as_run(planned, placement))
        schedule = self._differentiated(planned)
        choice, reasons = self.chooser.choose(planned, schedule, placement)
        choice = replace(choice, places=placement.places)
        schedule = self.pipeline.planned(schedule, planned.variant, choice, reasons, draft=draft)
        if not draft:
            verify(schedule)
        return schedule if draft else self._with_cuda_graphs(schedule)

    def _with_cuda_graphs(self, schedule: Schedule) -> Schedule:
        """The schedule, marked for capture as CUDA graphs if it has a single stage and the device
        has room for the graphs."""
        options, graphs = self.setting.options, (schedule.forward, schedule.backward)
        if (
            not (options.cuda_graphs and options.may_merge and options.plans)
            or len(schedule.stages) > 1
            or any(g is not None and ops.nodes_that(g, ops.leaves_compute) for g in graphs)
        ):
            return schedule
        peak = device_memory([schedule], optimizer=self.setting.cost()).peak
        kept = (MemoryKind.PARAMETERS, MemoryKind.STATES)
        # a captured backward frees nothing, and the forward's scratch memory is not shared
        more = 2 * (peak.total_bytes - sum(peak.live_bytes.get(kind, 0) for kind in kept))
        count = min(_CAPTURES, self.budget.room(peak.total_bytes) // max(more, 1))
        if count < 1:
            return schedule
        words = f"its stage is captured as CUDA graphs, which hold up to {format_bytes(more)}"
        plan = replace(schedule.plan, cuda_graphs=count, reasons=(*schedule.plan.reasons, words))
        return replace(schedule, plan=plan)

    def _as_run(self, planned: Planned, placement: Placement) -> Schedule:
        """The stages that run for the given ones: the same or, if they are short and everything
        fits, one for all of them. This is fixed once a backward is planned."""
        stages, running = planned.stages, self.chooser.running
        if stages in running:
            return running[stages]
        schedule = self._differentiated(planned)
        if schedule.backward is None:
            return stages
        self.chooser.choose(planned, schedule, placement)
        running[stages] = stages
        if self.chooser.may_merge(stages, placement):
            try:
                whole = self.pipeline.partition(planned.capture, whole=True)
                if stages.symbols is not None:
                    whole = resize(whole, stages.symbols.planned)
                merged = planned._replace(stages=whole)
                schedule = self._differentiated(merged)
            except (UnsupportedGraphError, compat.UntraceableSymbols):
                return stages
            if self.chooser.merge(stages, merged, schedule, placement):
                running[stages] = whole
        return running[stages]

    def _differentiated(self, planned: Planned) -> Schedule:
        """The schedule before the choice; cached, because `plan` follows `choose`."""
        key = planned.stages, planned.variant
        if self._last is None or self._last[:2] != key:
            self._last = (*key, self.pipeline.differentiated(*planned))
        return self._last[2]

    def rest(self, buckets: Sequence[Bucket], placement: Placement) -> Schedule:
        """A verified schedule with only an update, for these buckets in their current places."""
        cost = self.setting.cost()
        schedule = rest_of(buckets, placement.places, helps=cost.helped, state_bytes=cost.states_of)
        verify(schedule)
        return schedule

    def wants(self, placement: Placement) -> Placement:
        """The placement that all plans so far want, given the current one."""
        return self.chooser.wanted.placement(placement)

    def retain(self, stages: Collection[Schedule], schedules: Collection[Schedule]) -> None:
        """Forget the code and plans of all but these captured stages and schedules."""
        self._last = self._last_resized = None
        self.pipeline.retain(schedules)
        self.chooser.retain(stages)

    def step_down(self) -> str:
        """Plan with less device memory from now on; describes the change, or returns "" if nothing
        changes."""
        if self.pipeline.to_come:
            self._waits = True
            self.pipeline.to_come.load()
            self.pipeline.to_come.use()
            return "stages run compiled code"
        return self.chooser.step_down()


class SettledPlans:
    """Plans with every bucket where the plans want it, as in a model's calls after the first."""

    def __init__(self, compiler: PassCompiler) -> None:
        self.compiler = compiler
        self.placement = Placement()

    def schedule(self, planned: Planned, *, draft: bool = False) -> Schedule:
        """The schedule for buckets in the places that it wants; `draft` as in `plan`."""
        self.placement = self.compiler.choose(planned, self.placement)
        return self.compiler.plan(planned, self.placement, draft=draft)

    def choose_least(self, stages: Schedule, reason: str) -> None:
        """Plan these stages with the choice closest to the budgets, although it exceeds them."""
        self.placement = self.compiler.wants(self.placement)
        self.compiler.chooser.choose_least(stages, self.placement, reason)
