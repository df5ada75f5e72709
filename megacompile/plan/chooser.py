"""Chooses a plan: once for each captured graph and shape, by the search of `planner`.

The first plan that reads a bucket decides whether it lives on the device, and all later ones are
planned with that (`wanted`). Later captured graphs decide about buckets of their own, in what
earlier graphs leave of the device memory: what all of them need together counts. A graph is planned
again when the buckets are there, which finds what was found before.
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
from megacompile.plan.budget import Budget
from megacompile.plan.fit import TOLERANCE, TRIED, device_refusal, device_short, host_refusal
from megacompile.plan.pipeline import Pipeline
from megacompile.plan.planner import SearchResult
from megacompile.plan.problem import Problem
from megacompile.plan.problems import Problems
from megacompile.plan.searches import Searches, nearest, search_with_weights, stay_that_fit
from megacompile.plan.setting import Setting
from megacompile.plan.wanted import OpenTo, WantedPlaces
from megacompile.text import format_bytes

_Stages = tuple[Stage, ...]  # as `Pipeline.partition` made them: they stand for a captured graph

_SHORT_S = 4e-3  # of a stage, forward and backward: Python takes as long to issue one

_SHARE = 0.9  # of the budget, for forwards without a backward: a cache may grow


class PlanChoice(NamedTuple):
    """The decisions that a schedule is built from."""

    choice: Choice
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Planned:
    """The last plan of a captured graph."""

    problem: Problem
    found: SearchResult
    decided: bool  # did it decide where buckets live, for which it will be planned again?
    merged: _Stages | None = None  # the stages that it runs as one

    @cached_property
    def keys(self) -> frozenset[int]:
        """Keys of its buckets."""
        return frozenset(bucket.key for bucket in self.problem.buckets)

    @cached_property
    def schedule(self) -> Schedule:
        """A draft, for the memory that it takes."""
        return self.problem.drafts.of(self.found.choice)

    def leaves_memory_for_gradients(self) -> bool:
        """True if it fits too where a forward finds gradients of resident buckets."""
        problem = replace(self.problem, gradients_stay=True)
        return problem.peak_bytes(self.found.choice) <= problem.budget_bytes


class Chooser:
    """Seeks what plans are made from, and remembers it.

    Args:
        setting: the options, and the machine.
        pipeline: builds what is simulated.
        budget: the device memory that there is; told of what plans need.
    """

    def __init__(self, setting: Setting, pipeline: Pipeline, budget: Budget) -> None:
        self.setting = setting
        self.pipeline = pipeline
        self.budget = budget
        self.wanted = WantedPlaces(setting.options)
        self.problems = Problems(setting, pipeline, budget, self.wanted)
        self._searches = Searches(setting)
        self._chosen: dict[Schedule, PlanChoice] = {}  # by captured stages
        self._stay_now = False  # do buckets stay in slots, because there is memory for them?
        self._no_stay = False  # was memory too short for that?
        self._planned: dict[_Stages, _Planned] = {}  # the one that was planned last comes last
        self._sought: dict[_Stages, Problem] = {}  # the last that a search was made for
        self._nearest: dict[_Stages, Choice] = {}  # what lacks the least, where nothing fits
        self._elsewhere: dict[_Stages, Choice] = {}  # what was found for other budgets

    def choose(
        self,
        stages: Schedule,
        schedule: Schedule,
        variant: Variant,
        placement: Placement,
        *,
        again: bool = False,
    ) -> PlanChoice:
        """The choice for these stages; sought at the first call.

        Args:
            stages: what `Pipeline.partition` gave.
            schedule: what `Pipeline.differentiated` made of it.
            placement: where the buckets are.
            again: they may leave the device, where a plan for smaller inputs has put them.

        Raises:
            DeviceMemoryError: nothing fits.
            HostMemoryError: nothing fits that fits on the device.
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
        """True if one stage may do better than the chosen plan of these: nothing moves, nothing is
        computed again, and they are so short that the device waits for Python."""
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
        """Choose that one stage runs for several, if it fits; returns that.

        Args:
            stages: those for which it `may_merge`.
            whole: the same in one.
            schedule: what `Pipeline.differentiated` made of it.
        """
        problem = self._problem(whole, schedule, variant, placement, OpenTo())
        choice = Choice(places=problem.here)
        if not problem.fits(choice):
            return False
        peak_bytes, step_s = problem.peak_bytes(choice), problem.step_s(choice)
        self.budget.note(problem, peak_bytes)
        reasons = (
            f"{len(stages.stages)} short stages run as one: all of it is kept and lives on the "
            f"device, which takes {format_bytes(peak_bytes)} of "
            f"{format_bytes(problem.budget_bytes)} of its memory, {step_s * 1e3:.0f} ms a step "
            "predicted",
        )
        found = SearchResult(choice, step_s, peak_bytes, 1, reasons)
        self._planned.pop(whole.stages, None)
        planned = _Planned(problem, found, decided=False, merged=stages.stages)
        self._planned[whole.stages] = planned
        self._chosen[whole] = PlanChoice(choice, self._reasons(problem, found, placement))
        return True

    def learn(self, other: Chooser) -> None:
        """Take predictions from one whose options and machine differ in their budgets alone, by a
        little, and seek near what it has found."""
        self._sought |= other._sought
        self._elsewhere = {key: planned.found.choice for key, planned in other._planned.items()}

    def host_too_small(self, stages: Schedule) -> bool:
        """Has the budget of host memory kept a search from anything? Also where none was made."""
        problem = self._sought.get(stages.stages)
        return problem is None or problem.tiers.host_too_small

    def note_fetches(
        self, buckets: Sequence[Bucket], trained: Mapping[int, Sequence[int]], placement: Placement
    ) -> None:
        """Code that is not captured reads buckets: let those that no plan has decided about live on
        the device, as far as there is room.

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
        cost = replace(self.setting.cost(), in_backward=False)  # which leaves their gradients

        def size(bucket: Bucket) -> float:
            return cost.resident_bytes(bucket, trained.get(bucket.key, ()))

        def room_bytes() -> float:
            return self.budget.size_bytes() - self._peak_bytes()

        self.wanted.note_fetches(buckets, read, size, room_bytes, placement)

    def _peak_bytes(self) -> int:
        """Device memory that the plans take together."""
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
        """Search, remember what was found, and decide about buckets that no plan has decided
        about."""
        self.budget.agree()
        open_to = self.wanted.open_to(schedule, placement, again=again)
        problem = self._problem(stages, schedule, variant, placement, open_to)
        found = before = self._found_before(stages, problem)
        if found is None:
            found = self._sought_anew(stages, problem)
        if found is None and problem.budget_bytes < self.budget.size_bytes():
            self.wanted.leave()
            problem = self._problem(stages, schedule, variant, placement, open_to)
            found = self._sought_anew(stages, problem)
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
        """Forget the last plan of these stages, and of one stage for all of them."""
        for key, planned in list(self._planned.items()):
            if stages.stages in (key, planned.merged):
                del self._planned[key]

    def _sought_anew(self, stages: Schedule, problem: Problem) -> SearchResult | None:
        """The result of a search; None: nothing fits."""
        self._sought[stages.stages] = problem
        return self._searches.near(problem, self._elsewhere.get(stages.stages))

    def _search(
        self, stages: Schedule, problem: Problem, found: SearchResult | None, *, weights: bool
    ) -> tuple[Problem, SearchResult]:
        """The first of these that there is: what was found, with parameters on the disk
        (`weights`: where they may go there), as if no other graph were there, with fewer states in
        host memory, the smallest plan.

        Returns:
            what was sought in the end, and what was found.
        """
        anew = functools.partial(self._searches.near, near=self._elsewhere.get(stages.stages))
        if weights:
            problem, found = search_with_weights(problem, found, anew)
        if found is None and problem.others:  # no bucket can go where they are, too
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
        """The problem to solve, with what is known already of these stages."""
        own = frozenset(bucket.key for bucket in schedule.buckets)
        others = self._others(stages, own)
        problem = self.problems.open_to(open_to, schedule, variant, placement, others)
        if (known := self._sought.get(stages.stages)) is not None:
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
        """Drafts: of each set of buckets, the one planned last.

        Graphs that read the same buckets are the same code for other inputs, and run in place of
        one another.
        """
        latest = {planned.keys: planned for planned in every}
        return tuple(planned.schedule for planned in latest.values())

    def _too_small(self, stages: Schedule, problem: Problem) -> SearchResult:
        """Nothing fits. The prediction may be off by a little; then it is tried.

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
            return len(streamed)  # each has a slot anyway
        if options.slots is not None:
            return max(0, options.slots - options.lookahead - 1)
        if not options.plans or self._no_stay:
            return 0
        budget_bytes = int(_SHARE * self.problems.budget_bytes(schedule, placement))
        count = stay_that_fit(self.pipeline, self.setting, schedule, placement.places, budget_bytes)
        self._stay_now |= count > 0
        return count

    def _found_before(self, stages: Schedule, problem: Problem) -> SearchResult | None:
        """The choice that was made for the same before its buckets were moved to where it wants
        them."""
        before = self._planned.get(stages.stages)
        if before is None or not before.decided or problem.undecided or problem.storable:
            return None
        if before.found.choice.places != problem.here:
            return None
        return before.found if problem.fits(before.found.choice) else None

    def choose_least(self, stages: Schedule, placement: Placement, reason: str) -> None:
        """Plan these stages with what comes nearest to the budgets, though that is too much."""
        choice = self._nearest.get(stages.stages, Choice(0, state_lookahead=1))
        choice = replace(choice, places=placement.places)
        self._chosen[stages] = PlanChoice(choice, (reason,))

    def step_down(self) -> str:
        """Plan with less device memory from now on; says how, or "" where that changes nothing.

        Stages that have their choice keep it: a backward may be to come.
        """
        if self.wanted.end():
            return "what code reads that is not captured leaves the device"
        how = self.budget.step_down()
        if how:
            self.wanted.reopen()
        elif self._stay_now:
            how = "no bucket stays in a slot from one forward to the next"
        self._no_stay |= self._stay_now
        self._stay_now = False
        return how

    def forget(self) -> None:
        """Choose again, with the buckets where they are. No backward may be to come."""
        self._chosen.clear()
        self.wanted.forget()

    def find_gradients(self) -> bool:
        """From now on a forward may find gradients of resident buckets. Is there a plan that leaves
        no memory for them? Then all is chosen again. No backward may be to come."""
        if all(planned.leaves_memory_for_gradients() for planned in self._planned.values()):
            return False
        self.wanted.reopen()
        self.forget()
        return True

    def retain(self, stages: Collection[Schedule]) -> None:
        """Forget what was chosen for all but these captured stages."""
        for key in [key for key in self._chosen if key not in stages]:
            del self._chosen[key]
        kept = {each.stages for each in stages}
        known = (self._planned, self._sought, self._nearest, self._elsewhere)
        remembered: dict[_Stages, Any]
        for remembered in known:
            for each in [each for each in remembered if each not in kept]:
                del remembered[each]
