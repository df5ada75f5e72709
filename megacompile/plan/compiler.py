"""From a captured graph to its schedule: the parts that choose and build, put together.

Setting    the options, and the machine that is planned for
Pipeline   the passes: builds a schedule from a `Choice`
Budget     the device memory that plans may use
Chooser    seeks a `Choice` that fits
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import torch

from megacompile import compat, log
from megacompile.cost.hardware import Hardware
from megacompile.cost.memory import device_memory
from megacompile.cost.ranks import Agreed
from megacompile.errors import UnsupportedGraphError
from megacompile.ir.buckets import Bucket, Unit
from megacompile.ir.capture import Capture, Variant
from megacompile.ir.plan import Placement
from megacompile.ir.schedule import Schedule
from megacompile.ir.symbols import Values
from megacompile.options import Lowering, Options
from megacompile.passes.schedule.update_graph import rest_of
from megacompile.passes.stages.numbers import resize
from megacompile.passes.stages.templates import TemplateCache
from megacompile.plan.budget import Budget
from megacompile.plan.chooser import Chooser
from megacompile.plan.pipeline import Pipeline
from megacompile.plan.setting import Setting
from megacompile.verify.proof import verify


class PassCompiler:
    """Chooses, builds, verifies and lowers.

    Args:
        options: validated.
        units: of the model.
        hardware: a GPU that plans are made for. None: the one at hand.
        budget_bytes: device memory that plans may use. None: what the user said, or what is free.
        host_bytes: host memory that the model may take. None: what the user said, or not known.
        templates: code that was traced already.
        agreed: the rates of the ranks that share the model.
        disk_bytes: this rank's part of a disk that ranks share.
        least: see `Setting`.
        disk_budget_bytes: of the disk. None: what the user said, or what is free.
    """

    def __init__(
        self,
        options: Options,
        units: tuple[Unit, ...],
        *,
        hardware: Hardware | None = None,
        budget_bytes: int | None = None,
        host_bytes: int | None = None,
        templates: TemplateCache | None = None,
        agreed: Agreed | None = None,
        disk_bytes: int | None = None,
        disk_budget_bytes: int | None = None,
        least: Callable[[int], int] | None = None,
    ) -> None:
        self.setting = Setting(options, hardware, host_bytes, agreed, disk_bytes, least)
        self.pipeline = Pipeline(self.setting, units, templates)
        self.budget = Budget(self.setting, budget_bytes, disk_budget_bytes)
        self.chooser = Chooser(self.setting, self.pipeline, self.budget)
        self._last: tuple[Schedule, Variant, Schedule] | None = None  # `_differentiated`
        self._last_resized: tuple[object, Values, Schedule] | None = None
        self._run: dict[Schedule, Schedule] = {}  # what `partition` gave -> what is planned of it
        self._lowered = False  # is there code already?
        self._waits = False  # was memory too short for code that is not compiled?

    def other(
        self,
        options: Options,
        *,
        hardware: Hardware,
        budget_bytes: int,
        host_bytes: int | None = None,
        disk_budget_bytes: int | None = None,
        same: bool = False,
    ) -> PassCompiler:
        """One that plans the same model with other options, from nothing, and knows its code.

        Args:
            host_bytes: default: as here.
            disk_budget_bytes: default: as here. The disk is not asked again: this model may have
                filled it meanwhile.
            same: all is the same but for budgets, so that predictions hold there too, and the plan
                is sought near the one here.
        """
        made = PassCompiler(
            options,
            self.pipeline.units,
            hardware=hardware,
            budget_bytes=budget_bytes,
            host_bytes=self.setting.host_bytes if host_bytes is None else host_bytes,
            templates=self.pipeline.templates,
            agreed=self.setting.agreed,
            disk_bytes=self.setting.disk_bytes,
            disk_budget_bytes=disk_budget_bytes or self.budget.disk_bytes(),
        )
        if same:
            made._last = self._last
            made.chooser.learn(self.chooser)
        return made

    def partition(self, capture: Capture) -> Schedule:
        """Stages only."""
        return self.pipeline.partition(capture)

    def resized(self, stages: Schedule, values: Values) -> Schedule:
        """The stages, planned for other values of their symbols; remembered, because a call may
        begin again when buckets have moved."""
        if self._last_resized is None or self._last_resized[:2] != (stages.stages, values):
            self._last_resized = (stages.stages, values, resize(stages, values))
        return replace(self._last_resized[2])

    def lower(self, schedule: Schedule) -> Schedule:
        """Lowers what `plan` returned."""
        waits = not (self._lowered and self._may_run_uncompiled(schedule))
        schedule = self.pipeline.lowered(schedule, waits=waits)
        self._lowered = True
        log.schedule_made(schedule)
        return schedule

    def _may_run_uncompiled(self, schedule: Schedule) -> bool:
        """True if a step may run a schedule before its code is compiled.

        Not where numbers must be the same in each run, nor where operators that are not fused need
        more device memory than the plans leave.
        """
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
        return self.budget.holds(peaks[1] - peaks[0] + beside, peaks[1] + beside)

    def code_is_ready(self) -> bool:
        """True if code is compiled by now that schedules ran without."""
        return self.pipeline.to_come.is_ready()

    def load_code(self, patience_s: float) -> bool:
        """Loads it, for so long. True if all of it is loaded."""
        return self.pipeline.to_come.load(patience_s)

    def use_code(self) -> None:
        """Runs the loaded code from now on. No backward may be to come."""
        self.pipeline.to_come.use()

    def choose(
        self,
        stages: Schedule,
        capture: Capture,
        variant: Variant,
        placement: Placement,
        *,
        again: bool = False,
    ) -> Placement:
        """Choose what `plan` builds; returns where the plans made so far want the buckets.

        Args:
            stages: what `partition` gave.
            placement: where the buckets are.
            again: they may leave the device, where a plan for smaller inputs has put them.

        Raises:
            DeviceMemoryError: nothing fits.
            HostMemoryError: nothing fits that fits on the device.
        """
        schedule = self._differentiated(stages, capture, variant)
        self.chooser.choose(stages, schedule, variant, placement, again=again)
        return self.wants(placement)

    def plan(
        self,
        stages: Schedule,
        capture: Capture,
        variant: Variant,
        placement: Placement,
        *,
        draft: bool = False,
    ) -> Schedule:
        """The verified schedule, whose templates have graphs and no code yet.

        Args:
            stages: what `partition` gave.
            placement: where the buckets are; the schedule is for that.
            draft: only to be simulated: not verified, and without a history.

        Raises:
            DeviceMemoryError: nothing fits.
            HostMemoryError: nothing fits that fits on the device.
        """
        stages = self._as_run(stages, capture, variant, placement)
        schedule = self._differentiated(stages, capture, variant)
        choice, reasons = self.chooser.choose(stages, schedule, variant, placement)
        choice = replace(choice, places=placement.places)
        schedule = self.pipeline.planned(schedule, variant, choice, reasons, draft=draft)
        if not draft:
            verify(schedule)
        return schedule

    def _as_run(
        self, stages: Schedule, capture: Capture, variant: Variant, placement: Placement
    ) -> Schedule:
        """The stages that are run for these: themselves, or one for all of them, where all of it
        fits and they are short. Once a backward is planned it stays so."""
        if stages in self._run:
            return self._run[stages]
        schedule = self._differentiated(stages, capture, variant)
        if schedule.backward is None:
            return stages
        self.chooser.choose(stages, schedule, variant, placement)
        self._run[stages] = stages
        if self.chooser.may_merge(stages, placement):
            try:
                whole = self.pipeline.partition(capture, whole=True)
                if stages.symbols is not None:
                    whole = resize(whole, stages.symbols.planned)
                merged = self._differentiated(whole, capture, variant)
            except (UnsupportedGraphError, compat.UntraceableSymbols):
                return stages
            if self.chooser.merge(stages, whole, merged, variant, placement):
                self._run[stages] = whole
        return self._run[stages]

    def _differentiated(self, stages: Schedule, capture: Capture, variant: Variant) -> Schedule:
        """Before the choice; remembered, because `plan` comes right after `choose`."""
        if self._last is None or self._last[:2] != (stages, variant):
            made = self.pipeline.differentiated(stages, capture, variant)
            self._last = (stages, variant, made)
        return self._last[2]

    def rest(self, buckets: Sequence[Bucket], placement: Placement) -> Schedule:
        """A verified schedule that is an update alone: of these buckets, where they are."""
        cost = self.setting.cost()
        schedule = rest_of(buckets, placement.places, helps=cost.helped, state_bytes=cost.states_of)
        verify(schedule)
        return schedule

    def wants(self, placement: Placement) -> Placement:
        """The placement that the plans made so far want for the buckets, which are as `placement`
        says."""
        return self.chooser.wanted.placement(placement)

    def note_fetches(
        self, buckets: Sequence[Bucket], trained: Mapping[int, Sequence[int]], placement: Placement
    ) -> None:
        """Code that is not captured reads buckets: they may live on the device."""
        self.chooser.note_fetches(buckets, trained, placement)

    def retain(self, stages: Collection[Schedule], schedules: Collection[Schedule]) -> None:
        """Forget what was traced and planned for all but these captured stages and schedules."""
        self._last = self._last_resized = None
        self._run = {key: run for key, run in self._run.items() if key in stages}
        self.pipeline.retain(schedules)
        self.chooser.retain([*stages, *self._run.values()])

    def replan(self) -> None:
        """Choose again, with the buckets where they are. No backward may be to come."""
        self._run.clear()
        self.chooser.forget()

    def find_gradients(self) -> bool:
        """From now on a forward may find gradients on the device. True if plans are chosen again
        for that. No backward may be to come."""
        again = self.chooser.find_gradients()
        if again:
            self._run.clear()
        return again

    def step_down(self) -> str:
        """Plan with less device memory from now on; says how, or "" where that changes nothing."""
        if self.pipeline.to_come:
            self._waits = True
            self.pipeline.to_come.load()
            self.pipeline.to_come.use()
            return "stages run compiled code"
        return self.chooser.step_down()

    def needs(self) -> str:
        """Device memory of the smallest feasible plan, as a table; "" if not known."""
        return self.budget.needs()


class SettledPlans:
    """Plans with the buckets where plans want them, as a model's calls after the first have it.

    Args:
        compiler: makes the plans.
        placement: where the buckets are at first.
    """

    def __init__(self, compiler: PassCompiler, placement: Placement | None = None) -> None:
        self.compiler = compiler
        self.placement = placement or Placement()

    def schedule(
        self, stages: Schedule, capture: Capture, variant: Variant, *, draft: bool = False
    ) -> Schedule:
        """The schedule for buckets that are where it wants them; `draft` as in `plan`."""
        wants = self.compiler.choose(stages, capture, variant, self.placement)
        if wants != self.placement:
            self.placement = wants
            self.compiler.replan()
        return self.compiler.plan(stages, capture, variant, wants, draft=draft)

    def choose_least(self, stages: Schedule, reason: str) -> None:
        """Plan these stages with what comes nearest to the budgets, though that is too much."""
        self.placement = self.compiler.wants(self.placement)
        self.compiler.chooser.choose_least(stages, self.placement, reason)
