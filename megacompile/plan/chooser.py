"""Chooses a plan for each captured graph and shape, once, with the search of `planner`.

The first plan that reads a bucket decides whether it is resident, and later plans keep that
decision (`wanted`). A later graph decides only about buckets that no earlier graph reads, and all
graphs together must fit in device memory. After the buckets have moved, each graph is planned again
and gets the same result.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from megacompile.cost.hardware import pageable_words
from megacompile.cost.memory import device_memory
from megacompile.cost.ops import computes_s
from megacompile.errors import DeviceMemoryError, HostMemoryError
from megacompile.ir.buckets import Bucket
from megacompile.ir.capture import Variant
from megacompile.ir.plan import Choice, Placement
from megacompile.ir.schedule import Schedule
from megacompile.ir.stages import Stage
from megacompile.options import Activations, Lowering
from megacompile.plan.budget import Budget, Problems
from megacompile.plan.fit import TOLERANCE, TRIED, device_refusal, device_short, host_refusal
from megacompile.plan.pipeline import Pipeline
from megacompile.plan.planner import SearchResult
from megacompile.plan.problem import Problem
from megacompile.plan.searches import Searches, nearest, search_with_weights, stay_that_fit
from megacompile.plan.setting import Setting
from megacompile.plan.wanted import OpenTo, WantedPlaces
from megacompile.text import format_bytes

_Stages = tuple[Stage, ...]  # from `Pipeline.partition`; they identify a captured graph

_SHORT_S = 4e-3  # forward and backward of a stage; Python takes that long to issue them

_SHARE = 0.9  # of the budget, for forwards without a backward: a KV cache may grow


class PlanChoice(NamedTuple):
    """The decisions that a schedule is built from."""

    choice: Choice
    reasons: tuple[str, ...] = ()


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

    def leaves_memory_for_gradients(self) -> bool:
        """True if it also fits when a forward starts with gradients of resident buckets on the
        device."""
        problem = replace(self.problem, gradients_stay=True)
        return problem.peak_bytes(self.found.choice) <= problem.budget_bytes


class Chooser:
    """Searches for choices and caches them.

    Args:
        setting: the options, and the machine.
        pipeline: builds the schedules to simulate.
        budget: of device memory; records the needs of chosen plans.
    """

    def __init__(self, setting: Setting, pipeline: Pipeline, budget: Budget) -> None:
        self.setting = setting
        self.pipeline = pipeline
        self.budget = budget
        self.wanted = WantedPlaces(setting.options)
        self.problems = Problems(setting, pipeline, budget, self.wanted)
        self._searches = Searches(setting)
        self._chosen: dict[Schedule, PlanChoice] = {}  # by the captured graph's stages
        self._stay_now = False  # do buckets stay in slots because memory allows it?
        self._no_stay = False  # did that run out of memory?
        self._planned: dict[_Stages, _Planned] = {}  # in the order of planning
        self._last_problems: dict[_Stages, Problem] = {}  # the last one searched
        self._nearest: dict[_Stages, Choice] = {}  # the closest choice, if nothing fits
        self._elsewhere: dict[_Stages, Choice] = {}  # the choices for other budgets

    def choose(
        self,
        stages: Schedule,
        schedule: Schedule,
        variant: Variant,
        placement: Placement,
        *,
        again: bool = False,
    ) -> PlanChoice:
        """The choice for these stages; the first call searches.

        Args:
            stages: from `Pipeline.partition`.
            schedule: the same, from `Pipeline.differentiated`.
            placement: where the buckets are.
            again: buckets that a plan for smaller inputs made resident may leave the device.

        Raises:
            DeviceMemoryError: no plan fits on the device.
            HostMemoryError: no plan that fits on the device fits on the host.
        """
        places = placement.places
        if schedule.backward is None:
            stay = self._stay(schedule, placement)
            tiles = max((each.found.choice.tiles for each in self._planned.values()), default=1)
            return PlanChoice(Choice(places=places, stay=stay, tiles=tiles))
        if not self.setting.plans:
            return PlanChoice(Choice(places=places))
        if stages in self._chosen:
            return self._chosen[stages]
        self._chosen[stages] = self._searched(stages, schedule, variant, placement, again=again)
        return self._chosen[stages]

    def may_merge(self, stages: Schedule, placement: Placement) -> bool:
        """True if one stage may be faster than the chosen plan of these: nothing moves, nothing is
        recomputed, and the stages are so short that the device waits for Python."""
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
        self,
        stages: Schedule,
        whole: Schedule,
        schedule: Schedule,
        variant: Variant,
        placement: Placement,
    ) -> bool:
        """Choose to run several stages as one, if that fits; returns True if it does.

        Args:
            stages: stages that `may_merge` accepts.
            whole: the same graph as one stage.
            schedule: the same, from `Pipeline.differentiated`.
        """
        problem = self._problem(whole, schedule, variant, placement, OpenTo())
        choice = Choice(places=problem.here)
        if not problem.fits(choice):
            return False
        peak_bytes, step_s = problem.peak_bytes(choice), problem.step_s(choice)
        self.budget.note(problem, peak_bytes)
        reasons = (
            f"{len(stages.stages)} short stages run as one: everything is kept and resident on "
            f"the device, in {format_bytes(peak_bytes)} of its "
            f"{format_bytes(problem.budget_bytes)}; {step_s * 1e3:.0f} ms a step predicted",
        )
        found = SearchResult(choice, step_s, peak_bytes, 1, reasons)
        self._planned.pop(whole.stages, None)
        planned = _Planned(problem, found, decided=False, merged=stages.stages)
        self._planned[whole.stages] = planned
        self._chosen[whole] = PlanChoice(choice, self._reasons(problem, found, placement))
        return True

    def learn(self, other: Chooser) -> None:
        """Reuse the predictions of a chooser with slightly different budgets; searches start near
        its choices."""
        self._last_problems |= other._last_problems
        self._elsewhere = {key: planned.found.choice for key, planned in other._planned.items()}

    def host_too_small(self, stages: Schedule) -> bool:
        """True if host memory ruled out a candidate in the last search, or there was no search."""
        problem = self._last_problems.get(stages.stages)
        return problem is None or problem.tiers.host_too_small

    def note_fetches(
        self, buckets: Sequence[Bucket], trained: Mapping[int, Sequence[int]], placement: Placement
    ) -> None:
        """Note that uncaptured code reads these buckets. Those that no plan has decided about
        become resident, as memory allows.

        Args:
            trained: the parameters that get a gradient: bucket key -> indices.
            placement: where the buckets are.
        """
        options = self.setting.options
        if (
            options.resident is not None
            or placement.stays
            or not self.setting.plans
            or options.ranks > 1
        ):
            return
        read = frozenset[int]().union(*(planned.keys for planned in self._planned.values()))
        cost = replace(self.setting.cost(), in_backward=False)  # gradients stay until a step

        def size(bucket: Bucket) -> float:
            return cost.resident_bytes(bucket, trained.get(bucket.key, ()))

        def room_bytes() -> float:
            return self.budget.size_bytes() - self._peak_bytes()

        self.wanted.note_fetches(buckets, read, size, room_bytes, placement)

    def _peak_bytes(self) -> int:
        """Peak device memory of all plans together."""
        planned = list(self._planned.values())
        if not planned:
            return 0
        return device_memory(
            self._latest(planned),
            optimizer=self.setting.cost(),
            fused=self.setting.options.lowering is Lowering.INDUCTOR,
            gradients_stay=any(each.problem.gradients_stay for each in planned),
        ).peak.total_bytes

    def _searched(
        self,
        stages: Schedule,
        schedule: Schedule,
        variant: Variant,
        placement: Placement,
        *,
        again: bool,
    ) -> PlanChoice:
        """Search, cache the result, and place the buckets that no plan has decided about."""
        self.budget.agree()
        open_to = self.wanted.open_to(schedule, placement, again=again)
        problem = self._problem(stages, schedule, variant, placement, open_to)
        found = before = self._earlier_result(stages, problem)
        if found is None:
            found = self._search_again(stages, problem)
        if found is None and problem.budget_bytes < self.budget.size_bytes():
            self.wanted.leave()
            problem = self._problem(stages, schedule, variant, placement, open_to)
            found = self._search_again(stages, problem)
        weights = bool(open_to.weights) and before is None
        problem, found = self._search(stages, problem, found, weights=weights)
        self.problems.trained |= schedule.gradient_params
        self.budget.note(problem, found.peak_bytes)
        decides = bool(open_to.keys) or found is before
        self._drop_planned(stages)
        self._planned[stages.stages] = _Planned(problem, found, decides)
        self.wanted.decide(open_to, found.choice, placement)
        return PlanChoice(found.choice, self._reasons(problem, found, placement))

    def _drop_planned(self, stages: Schedule) -> None:
        """Forget the last plan of these stages, even if it runs them as one."""
        for key, planned in list(self._planned.items()):
            if stages.stages in (key, planned.merged):
                del self._planned[key]

    def _search_again(self, stages: Schedule, problem: Problem) -> SearchResult | None:
        """Search again; None: nothing fits."""
        self._last_problems[stages.stages] = problem
        return self._searches.near(problem, self._elsewhere.get(stages.stages))

    def _search(
        self, stages: Schedule, problem: Problem, found: SearchResult | None, *, weights: bool
    ) -> tuple[Problem, SearchResult]:
        """Fall back until a plan fits: `found`; a plan with parameters on the disk (if `weights`);
        one that ignores other graphs; one with fewer states in host memory; the smallest plan.

        Returns:
            The problem that was finally solved, and its result.
        """
        near = functools.partial(self._searches.near, near=self._elsewhere.get(stages.stages))
        if weights:
            problem, found = search_with_weights(problem, found, near)
        if found is None and problem.others:  # and no bucket moves
            problem = replace(problem, others=(), undecided=())
            found = self._searches.everywhere(problem)
        if found is None:
            found = self._searches.with_fewer_states(problem)
        if found is None:
            found = self._too_small(stages, problem)
        return problem, found

    def _reasons(
        self, problem: Problem, found: SearchResult, placement: Placement
    ) -> tuple[str, ...]:
        """The reasons of the plan."""
        reasons = found.reasons
        if words := pageable_words(problem.hardware, problem.host_bytes(found.choice)):
            reasons = (*reasons, words)
        if placement.stays and self.setting.options.resident is None:
            reasons = (*reasons, f"buckets stay where they are: {placement.stays}")
        return reasons

    def _problem(
        self,
        stages: Schedule,
        schedule: Schedule,
        variant: Variant,
        placement: Placement,
        open_to: OpenTo,
    ) -> Problem:
        """The problem to solve, with the known costs of these stages."""
        own = frozenset(bucket.key for bucket in schedule.buckets)
        others = self._others(stages, own)
        problem = self.problems.open_to(open_to, schedule, variant, placement, others)
        if (known := self._last_problems.get(stages.stages)) is not None:
            problem.learn(known)
        return problem

    def _others(self, stages: Schedule, own: frozenset[int]) -> tuple[Schedule, ...]:
        """Drafts of the other captured graphs."""
        every = self._planned.items()
        return self._latest(
            [each for key, each in every if key != stages.stages and each.keys != own]
        )

    @staticmethod
    def _latest(every: Sequence[_Planned]) -> tuple[Schedule, ...]:
        """The latest draft of each set of buckets.

        Graphs that read the same buckets are the same code for other inputs, so only one of them
        runs at a time.
        """
        latest = {planned.keys: planned for planned in every}
        return tuple(planned.schedule for planned in latest.values())

    def _too_small(self, stages: Schedule, problem: Problem) -> SearchResult:
        """Nothing fits: use the smallest plan if its excess is within the error of predictions.

        Raises:
            DeviceMemoryError: the device is too small by more than that.
            HostMemoryError: the host is too small.
        """
        problem, tiles = self._searches.smallest(problem)
        choice = replace(problem.tightest(), tiles=tiles)
        little = problem.peak_bytes(choice) <= TOLERANCE * problem.budget_bytes
        if not (little and problem.fits_host(choice)):
            choice = replace(nearest(problem), tiles=tiles)
            self._nearest[stages.stages] = choice
        if not problem.fits_host(choice):
            self.wanted.set(choice.places)
            raise HostMemoryError(host_refusal(problem, choice, self.setting.options.disk_weights))
        peak = problem.memory(choice).peak
        if peak.total_bytes > TOLERANCE * problem.budget_bytes:
            if not self.wanted.known:
                self.wanted.set(choice.places)
            raise DeviceMemoryError(device_refusal(problem, choice, peak))
        over = peak.total_bytes > problem.budget_bytes
        short = device_short(peak.total_bytes, problem.budget_bytes)
        reasons = (f"{short}: {TRIED}" if over else "no other plan fits",)
        return SearchResult(choice, math.inf, peak.total_bytes, 0, reasons)

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
        budget_bytes = int(_SHARE * self.problems.budget_bytes(schedule, placement))
        count = stay_that_fit(self.pipeline, self.setting, schedule, placement.places, budget_bytes)
        self._stay_now |= count > 0
        return count

    def _earlier_result(self, stages: Schedule, problem: Problem) -> SearchResult | None:
        """The earlier choice for these stages, if its buckets are now where it wants them."""
        before = self._planned.get(stages.stages)
        if before is None or not before.decided or problem.undecided or problem.storable:
            return None
        if before.found.choice.places != problem.here:
            return None
        return before.found if problem.fits(before.found.choice) else None

    def choose_least(self, stages: Schedule, placement: Placement, reason: str) -> None:
        """Plan these stages with the choice closest to the budgets, although it exceeds them."""
        choice = self._nearest.get(stages.stages, Choice(0, state_lookahead=1))
        choice = replace(choice, places=placement.places)
        self._chosen[stages] = PlanChoice(choice, (reason,))

    def step_down(self) -> str:
        """Plan with less device memory from now on; describes the change, or returns "" if nothing
        changes.

        Stages keep the choices that they have, because a backward may be pending.
        """
        if self.wanted.end():
            return "buckets that only uncaptured code reads leave the device"
        how = self.budget.step_down()
        if how:
            self.wanted.reopen()
        elif self._stay_now:
            how = "no bucket stays in a slot from one forward to the next"
        self._no_stay |= self._stay_now
        self._stay_now = False
        return how

    def forget(self) -> None:
        """Choose again, with the buckets where they are. No backward may be pending."""
        self._chosen.clear()
        self.wanted.forget()

    def find_gradients(self) -> bool:
        """Expect forwards to start with gradients of resident buckets on the device. If a plan
        leaves no memory for them, everything is chosen again and the result is True. No backward
        may be pending."""
        if all(planned.leaves_memory_for_gradients() for planned in self._planned.values()):
            return False
        self.wanted.reopen()
        self.forget()
        return True

    def retain(self, stages: Collection[Schedule]) -> None:
        """Forget the choices of all stages except these."""
        for key in [key for key in self._chosen if key not in stages]:
            del self._chosen[key]
        kept = {each.stages for each in stages}
        known = (self._planned, self._last_problems, self._nearest, self._elsewhere)
        remembered: dict[_Stages, Any]
        for remembered in known:
            for each in [each for each in remembered if each not in kept]:
                del remembered[each]
