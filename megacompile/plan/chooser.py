"""Chooses a plan for each captured graph and shape, once, with the search of `planner`.

The first plan that reads a bucket decides whether it is resident, and later plans keep that
decision (`wanted`). All graphs together must fit in device memory. After buckets have moved, each
graph is planned again and gets the same result.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from megacompile.cost.memory import MemoryKind, device_memory
from megacompile.cost.ops import computes_s
from megacompile.cost.places import stored_bytes, stored_weights_bytes, streamed_bytes
from megacompile.errors import DeviceMemoryError, HostMemoryError
from megacompile.ir.buckets import Bucket
from megacompile.ir.capture import Variant
from megacompile.ir.plan import Choice, Placement, Places
from megacompile.ir.schedule import Schedule
from megacompile.ir.stages import Stage
from megacompile.options import Activations, Lowering
from megacompile.plan import planner
from megacompile.plan.budget import Budget, OpenTo, WantedPlaces
from megacompile.plan.fit import TOLERANCE, TRIED, device_table, refusal, short
from megacompile.plan.pipeline import Pipeline, Planned
from megacompile.plan.planner import SearchResult
from megacompile.plan.problem import DEVICE, Problem
from megacompile.plan.setting import Setting
from megacompile.plan.tiers import Drafts
from megacompile.text import duration, format_bytes

_Stages = tuple[Stage, ...]  # from `Pipeline.partition`; they identify a captured graph

_SHORT_S = 4e-3  # forward and backward of a stage; Python takes that long to issue them

_SHARE = 0.9  # of the budget, for forwards without a backward: a KV cache may grow


_PlanChoice = tuple[Choice, tuple[str, ...]]  # with the reasons


@dataclass(frozen=True)
class _Planned:
    """The last plan of a captured graph."""

    problem: Problem
    found: SearchResult
    decided: bool  # it placed buckets, so it will be planned again
    merged: _Stages | None = None  # the stages that it replaces by one

    @cached_property
    def keys(self) -> frozenset[int]:
        """Keys of its buckets."""
        return frozenset(bucket.key for bucket in self.problem.buckets)

    @cached_property
    def schedule(self) -> Schedule:
        """A draft, to account for its memory."""
        return self.problem.drafts.of(self.found.choice)


class Chooser:
    """Searches for choices and caches them; `budget` records the needs of chosen plans."""

    def __init__(self, setting: Setting, pipeline: Pipeline, budget: Budget) -> None:
        self.setting = setting
        self.pipeline = pipeline
        self.budget = budget
        self.wanted = WantedPlaces(setting.options)
        self._trained: dict[int, Sequence[int]] = {}  # bucket key -> parameters with a gradient
        self._chosen: dict[Schedule, _PlanChoice] = {}  # by the captured graph's stages
        self.running: dict[Schedule, Schedule] = {}  # stages -> the stages that run for them
        self._stay_now = False  # True if buckets stay in slots because memory allows it
        self._no_stay = False  # True once that ran out of memory
        self._planned: dict[_Stages, _Planned] = {}  # in the order of planning
        self._newest: _Planned | None = None  # of the last search
        self._nearest: dict[_Stages, Choice] = {}  # the closest choice, if nothing fits

    def choose(
        self, planned: Planned, schedule: Schedule, placement: Placement, *, again: bool = False
    ) -> _PlanChoice:
        """The choice for these stages; the first call searches. `schedule` is their schedule from
        `Pipeline.differentiated`; see `PassCompiler.choose`."""
        places = placement.places
        if schedule.backward is None:
            stay = self._stay(schedule, placement)
            tiles = max((each.found.choice.tiles for each in self._planned.values()), default=1)
            return Choice(places=places, stay=stay, tiles=tiles), ()
        if not self.setting.plans:
            return Choice(places=places), ()
        if planned.stages not in self._chosen:
            found = self._searched(planned, schedule, placement, again=again)
            self._chosen[planned.stages] = found
        return self._chosen[planned.stages]

    def may_merge(self, stages: Schedule, placement: Placement) -> bool:
        """True if these stages may be faster as one than in the chosen plan: nothing moves, nothing
        is recomputed, and the stages are so short that the device waits for Python."""
        options, planned = self.setting.options, self._planned.get(stages.stages)
        if planned is None or len(stages.stages) < 2 or not options.may_merge:
            return False
        problem, choice = planned.problem, planned.found.choice
        keep = 1 if options.activations is Activations.KEEP else problem.stages
        if choice.computing != Choice(keep):
            return False
        time_s = computes_s(planned.schedule, problem.hardware, fused=problem.fused)
        return planned.keys <= placement.places.resident and time_s < _SHORT_S * len(stages.stages)

    def merge(
        self, stages: Schedule, merged: Planned, schedule: Schedule, placement: Placement
    ) -> bool:
        """Choose to run stages that `may_merge` accepts as one (`schedule` from
        `Pipeline.differentiated`), if that fits; returns True if it does."""
        whole = merged.stages
        others = self._others(whole, schedule)
        problem = self.problem(schedule, merged.variant, placement, OpenTo(), others)
        choice = Choice(places=problem.here)
        if not problem.fits(choice):
            return False
        peak_bytes, step_s = problem.peak_bytes(choice), problem.step_s(choice)
        self.budget.note(peak_bytes)
        reasons = (
            f"{len(stages.stages)} short stages run as one: everything is kept and resident on "
            f"the device, in {format_bytes(peak_bytes)} of its "
            f"{format_bytes(problem.budget_bytes)}; {duration(step_s)} a step predicted",
        )
        found = SearchResult(choice, step_s, peak_bytes, 1, reasons)
        self._planned.pop(whole.stages, None)  # the new one comes last
        self._planned[whole.stages] = _Planned(problem, found, decided=False, merged=stages.stages)
        self._chosen[whole] = choice, self._reasons(found, placement)
        return True

    def note_fetches(
        self, buckets: Sequence[Bucket], trained: Mapping[int, Sequence[int]], placement: Placement
    ) -> None:
        """Note that uncaptured code reads these buckets. Those that no plan has placed become
        resident, as memory allows. `trained` has the parameters that get a gradient, bucket
        key -> indices."""
        options = self.setting.options
        may_move = options.resident is None and not placement.stays and options.ranks == 1
        if not (may_move and self.setting.plans):
            return
        read = frozenset[int]().union(*(planned.keys for planned in self._planned.values()))
        new = [b for b in buckets if b.key not in read and self.wanted.is_open(b)]
        if new:
            cost = replace(self.setting.cost(), in_backward=False)  # gradients stay until a step
            sizes = {b.key: cost.resident_bytes(b, trained.get(b.key, ())) for b in new}
            self.wanted.take(sizes, self.budget.size_bytes() - self._peak_bytes(), placement)

    def _peak_bytes(self) -> int:
        """Peak device memory of all plans together."""
        planned = self._planned.values()
        return device_memory(
            self._latest(planned),
            optimizer=self.setting.cost(),
            fused=self.setting.options.lowering is Lowering.INDUCTOR,
            gradients_stay=any(each.problem.gradients_stay for each in planned),
        ).peak.total_bytes

    def _searched(
        self, planned: Planned, schedule: Schedule, placement: Placement, *, again: bool
    ) -> _PlanChoice:
        """Search, cache the result, and place the buckets that no plan has placed.

        If no plan fits, tries in turn one without the buckets of uncaptured code, with parameters
        on the disk, without regard to other graphs, with fewer states in host memory, and finally
        the smallest one.
        """
        self.budget.agree()
        stages, variant = planned.stages, planned.variant
        open_to = self.wanted.open_to(schedule, placement, again=again)
        others = self._others(stages, schedule)
        problem = self.problem(schedule, variant, placement, open_to, others)
        before = self._earlier_result(stages, problem, placement)
        found = before or planner.search_everywhere(problem)
        if found is None and problem.budget_bytes < self.budget.size_bytes():
            self.wanted.leave()
            problem = self.problem(schedule, variant, placement, open_to, others)
            found = planner.search_everywhere(problem)
        if open_to.weights and before is None:
            problem, found = planner.with_weights(problem, found)
        if found is None and problem.others:  # and no bucket moves
            problem = replace(problem, others=(), undecided=())
            found = planner.search_everywhere(problem)
        if found is None:
            found = planner.with_fewer_states(problem) or self._too_small(stages, problem)
        self._trained |= schedule.gradient_params
        self.budget.note(found.peak_bytes)
        for key, each in list(self._planned.items()):  # the last plan, even if merged
            if stages.stages in (key, each.merged):
                del self._planned[key]
        decides = bool(open_to.keys) or found is before
        self._planned[stages.stages] = self._newest = _Planned(problem, found, decides)
        self.wanted.decide(open_to, found.choice, placement)
        return found.choice, self._reasons(found, placement)

    def problem(
        self,
        schedule: Schedule,
        variant: Variant,
        placement: Placement | None = None,
        open_to: OpenTo | None = None,
        others: Sequence[Schedule] = (),
    ) -> Problem:
        """The problem that a plan solves for a schedule from `Pipeline.differentiated`. By default
        the buckets of the model are on the host and all decisions are open. `others` are drafts of
        the other captured graphs."""
        placement = placement or Placement()
        if placement.accumulates:
            variant = replace(variant, accumulate=True)  # needs the most memory
        cost, options = self.setting.cost(), self.setting.options
        own = frozenset(bucket.key for bucket in schedule.buckets)
        open_to = open_to or OpenTo(own, own, own)
        accumulates = cost.in_backward and (variant.accumulate or not variant.update)
        moves = options.resident is None and not placement.stays
        wanted = self.wanted.places(placement)
        on_host, on_disk = self._elsewhere_bytes(schedule, wanted, accumulates)
        disk_bytes = self.budget.disk_bytes()
        return Problem(
            drafts=Drafts(self.pipeline, schedule, variant),
            buckets=schedule.buckets,
            stages=sum(stage.traced.has_backward for stage in schedule.stages),
            hardware=self.setting.rates(),
            optimizer=cost,
            here=open_to.closed(placement.places.only(own)),
            undecided=[b for b in schedule.buckets if b.key in open_to.residents],
            storable=open_to.states,
            others=others,
            accumulates=accumulates,
            gradients_stay=(variant.accumulate or not moves) and not cost.in_backward,
            disk_weights=bool(options.disk_weights),
            disk_saved=options.disk_saved,
            offloads=options.activations is Activations.OFFLOAD,
            budget_bytes=self.budget.size_bytes() - self.wanted.bytes_next_to(schedule, placement),
            host_budget_bytes=self.setting.host_budget_bytes(),
            elsewhere_bytes=on_host,
            disk_budget_bytes=None if disk_bytes is None else max(0, disk_bytes - on_disk),
            fused=options.lowering is Lowering.INDUCTOR,
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
            trained = self._trained.get(bucket.key, ())
            kinds = streamed_bytes(bucket, trained, cost, accumulates=accumulates)
            if bucket.key in wanted.on_disk:
                on_disk += stored_bytes(bucket, trained, cost)
                kinds.pop(MemoryKind.STATES)
            if self.setting.options.disk_weights or bucket.key in wanted.weights_on_disk:
                on_disk += stored_weights_bytes(bucket)
                kinds.pop(MemoryKind.PARAMETERS)
            on_host += sum(kinds.values())
        return int(on_host), on_disk

    def _reasons(self, found: SearchResult, placement: Placement) -> tuple[str, ...]:
        if placement.stays and self.setting.options.resident is None:
            return (*found.reasons, f"buckets stay where they are: {placement.stays}")
        return found.reasons

    def _others(self, stages: Schedule, schedule: Schedule) -> tuple[Schedule, ...]:
        """Drafts of the other captured graphs."""
        own = {bucket.key for bucket in schedule.buckets}
        every = self._planned.items()
        return self._latest(
            [each for key, each in every if key != stages.stages and each.keys != own]
        )

    @staticmethod
    def _latest(every: Iterable[_Planned]) -> tuple[Schedule, ...]:
        """The latest draft for each set of buckets: graphs that read the same buckets are the same
        code for different inputs, so only one of them runs at a time."""
        latest = {planned.keys: planned for planned in every}
        return tuple(planned.schedule for planned in latest.values())

    def _too_small(self, stages: Schedule, problem: Problem) -> SearchResult:
        """Nothing fits: use the closest plan if its excess is within the error of predictions,
        else raise `DeviceMemoryError` or `HostMemoryError`."""
        problem, tiles = planner.smallest(problem)
        choice = self._nearest[stages.stages] = replace(planner.nearest(problem), tiles=tiles)
        peak_bytes, fits_host = problem.peak_bytes(choice), problem.fits_host(choice)
        if peak_bytes > TOLERANCE * problem.budget_bytes or not fits_host:
            if not (fits_host and self.wanted.known):
                self.wanted.set(choice.places)
            kind = DeviceMemoryError if fits_host else HostMemoryError
            raise kind(refusal(problem, choice, self.setting.options.disk_weights))
        device = short(DEVICE, peak_bytes, problem.budget_bytes)
        over = peak_bytes > problem.budget_bytes
        reasons = (f"{device}: {TRIED}" if over else "no other plan fits",)
        return SearchResult(choice, math.inf, peak_bytes, 0, reasons)

    def _stay(self, schedule: Schedule, placement: Placement) -> int:
        """Number of streamed buckets that stay in slots between forwards without a backward."""
        options = self.setting.options
        if options.ranks > 1:
            return 0  # see `Options.ranks`
        streamed = [b for b in schedule.buckets if b.key not in placement.places.resident]
        if len(streamed) <= options.least_slots:
            return len(streamed)  # each has its own slot anyway
        if options.slots is not None:
            return max(0, options.slots - options.lookahead - 1)
        if not options.plans or self._no_stay:
            return 0
        size = self.budget.size_bytes() - self.wanted.bytes_next_to(schedule, placement)
        size = int(_SHARE * size)
        count = planner.stay_that_fit(self.pipeline, self.setting, schedule, placement.places, size)
        self._stay_now |= count > 0
        return count

    def _earlier_result(
        self, stages: Schedule, problem: Problem, placement: Placement
    ) -> SearchResult | None:
        """The earlier choice for these stages, if its buckets are now where it wants them. While
        decisions are open, only that of the last search, for which buckets have just moved."""
        before, here = self._planned.get(stages.stages), problem.here
        if before is None or not before.decided:
            return None
        if problem.undecided or problem.storable:
            if before is not self._newest:
                return None
            here = placement.places.only({bucket.key for bucket in problem.buckets})
        choice = before.found.choice
        return before.found if choice.places == here and problem.fits(choice) else None

    def choose_least(self, stages: Schedule, placement: Placement, reason: str) -> None:
        """Plan these stages with the choice closest to the budgets, although it exceeds them."""
        choice = self._nearest.get(stages.stages, Choice(0, state_lookahead=1))
        choice = replace(choice, places=placement.places)
        self._chosen[stages] = choice, (reason,)

    def step_down(self) -> str:
        """Plan with less device memory from now on; describes the change, or returns "" if nothing
        changes. Stages keep the choices that they have, because a backward may be pending."""
        self._newest = None
        if self.wanted.end():
            return "buckets that only uncaptured code reads leave the device"
        how = self.budget.step_down([each.problem for each in self._planned.values()])
        if how:
            self.wanted.reopen()
        elif self._stay_now:
            how = "no bucket stays in a slot from one forward to the next"
        self._no_stay |= self._stay_now
        self._stay_now = False
        return how

    def needs(self) -> str:
        """Device memory of the latest graph's smallest plan, as a table; "" if none was planned."""
        if not self._planned:
            return ""
        *_, problem = (each.problem for each in self._planned.values())
        return device_table(problem, Choice(0, problem.here), problem.floor().peak)

    def forget(self) -> None:
        """Choose again, with the buckets where they are. No backward may be pending."""
        self._chosen.clear()
        self._newest = None
        self.running.clear()
        self.wanted.forget()

    def find_gradients(self) -> bool:
        """Expect forwards to start with gradients of resident buckets on the device. If a plan
        leaves no memory for them, everything is chosen again and the result is True. No backward
        may be pending."""
        for each in self._planned.values():
            problem = replace(each.problem, gradients_stay=True)
            if problem.peak_bytes(each.found.choice) > problem.budget_bytes:
                break
        else:
            return False
        self.wanted.reopen()
        self.forget()
        return True

    def retain(self, stages: Collection[Schedule]) -> None:
        """Forget the choices of all stages except these, and those that run for them."""
        self.running = {key: run for key, run in self.running.items() if key in stages}
        every = {*stages, *self.running.values()}
        self._chosen = {key: each for key, each in self._chosen.items() if key in every}
        kept = {each.stages for each in every}
        self._planned = {key: each for key, each in self._planned.items() if key in kept}
        self._nearest = {key: each for key, each in self._nearest.items() if key in kept}
