"""Chooses a plan: once for each captured graph and shape, by the search of `planner`.

The first plan that reads a bucket decides whether it lives on the device, and all later ones are
planned with that. Later captured graphs decide about buckets of their own, in what earlier graphs
leave of the device memory: what all of them need together counts. A graph is planned again when the
buckets are there, which finds what was found before.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from megacompile import notices
from megacompile.cost.memory import Kind, streamed_bytes
from megacompile.cost.pageable import pageable_words
from megacompile.cost.places import stored_bytes, stored_weights_bytes
from megacompile.errors import DeviceMemoryError, HostMemoryError
from megacompile.ir.capture import Variant
from megacompile.ir.placement import Placement
from megacompile.ir.schedule import Schedule
from megacompile.ir.stages import Stage
from megacompile.options import Activations, Lowering
from megacompile.plan.budget import Budget
from megacompile.plan.choice import Choice
from megacompile.plan.copying import pick
from megacompile.plan.drafts import Drafts
from megacompile.plan.fit import TOLERANCE, TRIED, device_short, refusal
from megacompile.plan.nearest import nearest
from megacompile.plan.pipeline import Pipeline
from megacompile.plan.planner import SearchResult, search, search_near
from megacompile.plan.problem import Problem
from megacompile.plan.reasons import does_not_fit
from megacompile.plan.scenario import Scenario
from megacompile.plan.setting import Setting
from megacompile.plan.stay import stay_that_fit
from megacompile.plan.tiling import TILES, search_in_tiles
from megacompile.text import format_bytes

_SHARE = 0.9  # of the budget, for forwards without a backward: a cache may grow


class PlanChoice(NamedTuple):
    """What a schedule is built from."""

    choice: Choice
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Planned:
    """What a captured graph was planned with last."""

    stages: tuple[Stage, ...]  # as `Pipeline.partition` made them
    problem: Problem
    found: SearchResult
    decided: bool  # did it decide where buckets live, for which it will be planned again?

    @cached_property
    def keys(self) -> frozenset[int]:
        """Of its buckets."""
        return frozenset(bucket.key for bucket in self.problem.buckets)

    @cached_property
    def schedule(self) -> Schedule:
        """A draft, for the memory that it takes."""
        return self.problem.drafts.of(self.found.choice)

    def leaves_memory_for_gradients(self) -> bool:
        """Does it fit too where a forward finds gradients of resident buckets?"""
        problem = replace(self.problem, gradients_stay=True)
        return problem.peak_bytes(self.found.choice) <= problem.budget_bytes


class Chooser:
    """Seeks what plans are made from, and remembers it.

    Args:
        setting: the options, and the machine.
        pipeline: builds what is simulated.
        budget: the device memory that there is; told of what plans need.
        disk_bytes: the budget of the disk. None: asked for when it is needed.
    """

    def __init__(
        self, setting: Setting, pipeline: Pipeline, budget: Budget, disk_bytes: int | None = None
    ) -> None:
        self.setting = setting
        self.pipeline = pipeline
        self.budget = budget
        self._chosen: dict[Schedule, PlanChoice] = {}  # by captured stages
        self._trained: dict[int, Sequence[int]] = {}  # bucket key -> parameters with a gradient
        self._stay_now = False  # do buckets stay in slots, because there is memory for them?
        self._no_stay = False  # was memory too short for that?
        self._decided: frozenset[int] = frozenset()  # buckets that some plan has decided about
        self._stored: frozenset[int] = frozenset()  # the same, whether their states are on the disk
        self._wanted: Placement | None = None  # where buckets are to be; None: where they are
        self._disk_bytes = disk_bytes  # that states may take there; None: not asked yet
        self._planned: dict[int, _Planned] = {}  # captured graphs: id(stages.stages) -> its plan
        self._sought: dict[int, Problem] = {}  # the same -> the last that a search was made for
        self._nearest: dict[int, Choice] = {}  # the same -> what lacks the least, if nothing fits
        self._near: dict[int, Choice] = {}  # the same -> what was found for other budgets
        self.whole: frozenset[int] | None = None  # buckets that ranks copy whole; None: not decided
        self._why_whole: tuple[str, ...] = ()

    def choose(
        self, stages: Schedule, schedule: Schedule, variant: Variant, placement: Placement
    ) -> PlanChoice:
        """What the plan of these stages is made from; sought at the first call.

        Args:
            stages: what `Pipeline.partition` gave.
            schedule: what `Pipeline.differentiated` made of it.
            placement: where the buckets are.

        Raises:
            DeviceMemoryError: nothing fits.
            HostMemoryError: nothing fits that fits on the device.
        """
        planned = self.setting.options.plans or self.setting.hardware is not None
        if schedule.backward is None:
            stay = self._stay(schedule, placement)
            tiles = max((each.found.choice.tiles for each in self._planned.values()), default=1)
            return PlanChoice(Choice(resident=placement.resident, stay=stay, tiles=tiles))
        if not planned:
            return PlanChoice(Choice(resident=placement.resident))
        if stages in self._chosen:
            return self._chosen[stages]
        self._chosen[stages] = self._searched(stages, schedule, variant, placement)
        return self._chosen[stages]

    def learn(self, other: Chooser) -> None:
        """Take predictions from one whose options and machine differ in their budgets alone, by a
        little, and seek near what it has found."""
        self._sought |= other._sought
        self._near = {key: planned.found.choice for key, planned in other._planned.items()}

    def host_too_small(self, stages: Schedule) -> bool:
        """Has the budget of host memory kept a search from anything? Also where none was made."""
        problem = self._sought.get(id(stages.stages))
        return problem is None or problem.tiers.host_too_small

    def wants(self, placement: Placement) -> Placement:
        """Where plans want the buckets, which are as `placement` says."""
        if self.whole is not None:
            placement = replace(placement, whole=self.whole)
        if self._wanted is None:
            return placement
        wants = replace(placement, resident=self._wanted.resident, on_disk=self._wanted.on_disk)
        if placement.stays or not self.setting.options.may_store_weights:
            return wants
        return replace(wants, weights_on_disk=self._wanted.weights_on_disk)

    def _searched(
        self, stages: Schedule, schedule: Schedule, variant: Variant, placement: Placement
    ) -> PlanChoice:
        options = self.setting.options
        own = frozenset(bucket.key for bucket in schedule.buckets)
        free = own - self._decided - (self.whole or frozenset())
        if options.resident is not None or placement.stays:
            free = frozenset()
        storable = frozenset() if options.disk is None else own - self._stored
        moves = options.may_store_weights and not placement.stays  # parameters, to and from a disk
        if placement.accumulates:
            variant = replace(variant, accumulate=True)  # which needs the most
        wanted = placement if self._wanted is None else self._wanted
        here = replace(placement, resident=(placement.resident & own) - free)
        problem = replace(
            self.problem_of(schedule, variant, here, wanted),
            undecided=[bucket for bucket in schedule.buckets if bucket.key in free],
            on_disk=(placement.on_disk & own) - storable,
            weights_on_disk=(placement.weights_on_disk & own)
            - (storable if moves else frozenset()),
            storable=storable,
            others=self._others(stages, own),
        )
        if self.whole:
            problem = problem.copying(self.whole)
        if (known := self._sought.get(id(stages.stages))) is not None:
            problem.learn(known)
        found = before = self._found_before(stages, problem)
        why: tuple[str, ...] = ()
        if found is None:
            self._sought[id(stages.stages)] = problem
            found = self._found_near(stages, problem) or self._search(problem)
        if self.whole is None and self.setting.meet is not None:
            wanted_whole = bool(options.whole_buckets)
            self.whole, found, why = pick(
                problem, found, self._search, self.setting.meet, wanted=wanted_whole
            )
            problem = problem.copying(self.whole)
            self._sought[id(stages.stages)] = problem
        if moves and storable and before is None:
            problem, found = self._with_weights(stages, problem, found)
        if found is None and problem.others:  # as if it were alone; no bucket can go there, too
            problem = replace(problem, others=(), undecided=())
            found = self._search(problem)
        if found is None:
            found = self._with_fewer_states(problem)
        if found is None:
            found = self._too_small(stages, problem)
        self._trained |= schedule.gradient_params
        self.budget.note(problem, found.peak_bytes)
        decides = bool(free or storable or why) or found is before
        self._planned[id(stages.stages)] = _Planned(stages.stages, problem, found, decides)
        self._why_whole = self._why_whole or why
        reasons = (*found.reasons, *self._why_whole)
        if words := pageable_words(problem.hardware, problem.host_bytes(found.choice)):
            reasons = (*reasons, words)
        if placement.stays and options.resident is None:
            reasons = (*reasons, f"buckets stay where they are: {placement.stays}")
        if free or storable:
            self._decided |= free
            self._stored |= storable
            self._wanted = replace(
                wanted,
                resident=(wanted.resident - free) | (found.choice.resident & free),
                on_disk=(wanted.on_disk - storable) | (found.choice.on_disk & storable),
            )
            if moves:
                there = found.choice.weights_on_disk & storable
                kept = wanted.weights_on_disk - storable
                self._wanted = replace(self._wanted, weights_on_disk=kept | there)
        return PlanChoice(found.choice, reasons)

    def _found_near(self, stages: Schedule, problem: Problem) -> SearchResult | None:
        near = self._near.get(id(stages.stages))
        return None if near is None else search_near(problem, near)

    def _with_weights(
        self, stages: Schedule, problem: Problem, found: SearchResult | None
    ) -> tuple[Problem, SearchResult | None]:
        """The same with parameters of some buckets on the disk, where nothing fits without, or only
        with saved tensors on the disk, and a step is longer then."""
        if found is not None and not found.choice.saved_on_disk:
            return problem, found
        more = replace(problem, disk_weights=None)
        more.learn(problem)
        other = self._found_near(stages, more) or self._search(more)
        if other is None or not other.choice.weights_on_disk:
            return (more, other) if found is None else (problem, found)
        why = "no other plan fits: host memory does not hold all parameters beside the rest"
        if found is not None:
            before_s = problem.step_s(found.choice)
            if problem.expected_s(found.choice) <= more.expected_s(other.choice):
                return problem, found
            why = (
                "with all parameters in host memory, and more saved tensors on the disk, it would "
                f"take {before_s * 1e3:.0f} ms"
            )
        return more, replace(other, reasons=(*other.reasons, why))

    def _search(self, problem: Problem) -> SearchResult | None:
        """The fastest choice that fits: in tiles too, where the plan may choose them."""
        if self._may_cut:
            return search_in_tiles(problem, self._search_whole)
        return self._search_whole(problem)

    @property
    def _may_cut(self) -> bool:
        """May the plan choose tiles? A matrix kernel may round otherwise for fewer rows, and eager
        code is to be bitwise. Ranks choose nothing that decides which weights a backward reads."""
        options = self.setting.options
        alone = options.ranks == 1 and options.tiles is None
        return alone and options.lowering is Lowering.INDUCTOR

    def _search_whole(self, problem: Problem) -> SearchResult | None:
        options = self.setting.options
        return search(
            problem,
            resident=bool(problem.candidates),
            pinned=options.activations is not Activations.AUTO,
            device_update=(
                options.plans_device_update
                and options.device_update is None
                and self.setting.on_gpu
            ),
            slots=options.slots is None and options.ranks == 1,
        )

    def _others(self, stages: Schedule, own: frozenset[int]) -> tuple[Schedule, ...]:
        """Of the other captured graphs, as they were planned: the last for each set of buckets.

        Graphs of the same buckets are the same code for other inputs, in place of one another.
        """
        latest: dict[frozenset[int], _Planned] = {}
        for key, planned in self._planned.items():
            if key != id(stages.stages) and planned.keys != own:
                latest[planned.keys] = planned
        return tuple(planned.schedule for planned in latest.values())

    def _with_fewer_states(self, problem: Problem) -> SearchResult | None:
        """Where a model runs, nobody knows the optimizer before its first step: one with fewer
        states may fit."""
        known = self.setting.options.optimizer is not None or self.setting.hardware is not None
        if known or problem.host_budget_bytes is None:
            return None
        assumed = problem.optimizer.states
        for states in range(assumed - 1, -1, -1):
            less = replace(problem, optimizer=self.setting.cost(states=states))
            found = None
            if less.disk_weights is None:
                found = self._search(replace(less, disk_weights=False))
            if (found := found or self._search(less)) is not None:
                notices.warn(
                    f"megacompile: host memory ({format_bytes(problem.host_budget_bytes)}) does "
                    f"not hold {assumed} optimizer states a parameter, which AdamW has; it holds "
                    f"{states}. A step that needs more is refused; state_dtype='int8' needs less",
                    notices.Whose.RANK,
                )
                return found
        return None

    def _too_small(self, stages: Schedule, problem: Problem) -> SearchResult:
        """Nothing fits. The prediction may be off by a little; then it is tried.

        Raises:
            DeviceMemoryError: the device is too small by more than that.
            HostMemoryError: the host is too small.
        """
        problem, tiles = self._smallest(problem)
        choice = replace(problem.tightest(), tiles=tiles)
        little = problem.peak_bytes(choice) <= TOLERANCE * problem.budget_bytes
        if not (little and problem.fits_host(choice)):
            choice = replace(nearest(problem), tiles=tiles)
            self._nearest[id(stages.stages)] = choice
        if not problem.fits_host(choice):
            self._wanted = _placed(choice)
            raise HostMemoryError(
                refusal(
                    Scenario(
                        (problem.schedule(choice),),
                        problem.hardware,
                        problem.optimizer,
                        problem.fused,
                        problem.budget_bytes,
                        _less(problem.host_budget_bytes, problem.elsewhere_bytes),
                        problem.disk_budget_bytes,
                        disk_weights=self.setting.options.disk_weights,
                    ),
                    problem.peak_bytes(choice),
                )
            )
        peak = problem.memory(choice).peak
        if peak.total_bytes > TOLERANCE * problem.budget_bytes:
            if self._wanted is None:
                self._wanted = _placed(choice)
            raise DeviceMemoryError(does_not_fit(problem, choice, peak))
        over = peak.total_bytes > problem.budget_bytes
        short = device_short(peak.total_bytes, problem.budget_bytes)
        reasons = (f"{short}: {TRIED}" if over else "no other plan fits",)
        return SearchResult(choice, math.inf, peak.total_bytes, 0, reasons)

    def _smallest(self, problem: Problem) -> tuple[Problem, int]:
        """In so many tiles, or in none: what needs least of the device. The most may need more than
        fewer ones, which have attention in them where they divide the batch."""
        counts = (1, *TILES) if self._may_cut else (1,)
        each = [(problem.in_tiles(tiles), tiles) for tiles in counts]
        return min(each, key=lambda pair: pair[0].floor_bytes())

    def _elsewhere_bytes(
        self, schedule: Schedule, wanted: Placement, accumulates: bool
    ) -> tuple[int, int]:
        """Host memory, and memory on the disk, of the buckets that a captured graph does not read,
        as far as is known."""
        here = {bucket.key for bucket in schedule.buckets} | wanted.resident
        others = (unit.bucket for unit in self.pipeline.units if unit.bucket.key not in here)
        cost = self.setting.cost()
        on_host, on_disk = 0.0, 0
        for bucket in others:
            trained = self._trained.get(bucket.key, ())
            kinds = streamed_bytes(bucket, trained, cost, accumulates=accumulates)
            if bucket.key in wanted.on_disk:
                on_disk += stored_bytes(bucket, trained, cost)
                kinds.pop(Kind.STATES)
            if self.setting.options.disk_weights or bucket.key in wanted.weights_on_disk:
                on_disk += stored_weights_bytes(bucket)
                kinds.pop(Kind.PARAMETERS)
            on_host += sum(kinds.values())
        return int(on_host), on_disk

    def disk_budget_bytes(self) -> int | None:
        """Of the whole model, as it was when it was first asked for."""
        if self._disk_bytes is None:
            self._disk_bytes = self.setting.disk_budget_bytes()
        return self._disk_bytes

    def _stay(self, schedule: Schedule, placement: Placement) -> int:
        """How many streamed buckets stay in slots between forwards without a backward."""
        options = self.setting.options
        streamed = [b for b in schedule.buckets if b.key not in placement.resident]
        if len(streamed) <= options.least_slots:
            return len(streamed)  # each has a slot anyway
        if options.ranks > 1:
            return 0  # see `Options.ranks`
        if options.slots is not None:
            return max(0, options.slots - options.lookahead - 1)
        if not options.plans or self._no_stay:
            return 0
        budget_bytes = int(_SHARE * self.budget.size_bytes())
        count = stay_that_fit(self.pipeline, self.setting, schedule, placement, budget_bytes)
        self._stay_now |= count > 0
        return count

    def problem_of(
        self,
        schedule: Schedule,
        variant: Variant,
        here: Placement | None = None,
        wanted: Placement | None = None,
    ) -> Problem:
        """What a plan is sought for.

        Args:
            schedule: what `Pipeline.differentiated` gives.
            here: where its buckets lie, whatever the plan.
            wanted: where all buckets of the model are to lie, as far as is decided.
        """
        cost = self.setting.cost()
        accumulates = cost.in_backward and (variant.accumulate or not variant.update)
        moves = self.setting.options.resident is None and not (wanted and wanted.stays)
        on_host, on_disk = self._elsewhere_bytes(schedule, wanted or Placement(), accumulates)
        disk_bytes = self.disk_budget_bytes()
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
            resident=frozenset() if here is None else here.resident,
            trained=schedule.gradient_params,
        )

    def _found_before(self, stages: Schedule, problem: Problem) -> SearchResult | None:
        """What the same was planned with before its buckets were moved to where that wants them."""
        before = self._planned.get(id(stages.stages))
        if before is None or not before.decided or problem.undecided or problem.storable:
            return None
        choice = before.found.choice
        there = (problem.resident, problem.on_disk, problem.weights_on_disk - problem.resident)
        if (choice.resident, choice.on_disk, choice.weights_on_disk) != there:
            return None
        return before.found if problem.fits(before.found.choice) else None

    def choose_least(self, stages: Schedule, placement: Placement, reason: str) -> None:
        """Plan these stages with what comes nearest to the budgets, though that is too much."""
        choice = self._nearest.get(id(stages.stages), Choice(0, state_lookahead=1))
        choice = replace(choice, resident=placement.resident)
        self._chosen[stages] = PlanChoice(choice, (reason,))

    def step_down(self) -> str:
        """Plan with less device memory from now on; says how, or "" where that changes nothing.

        Stages that have their choice keep it: a backward may be to come.
        """
        how = self.budget.step_down()
        if how:
            self._decided = self._stored = frozenset()
        elif self._stay_now:
            how = "no bucket stays in a slot from one forward to the next"
        self._no_stay |= self._stay_now
        self._stay_now = False
        return how

    def forget(self) -> None:
        """Choose anew, with the buckets where they are. No backward may be to come."""
        self._chosen.clear()
        self._wanted = None

    def find_gradients(self) -> bool:
        """From now on a forward may find gradients of resident buckets. Is there a plan that leaves
        no memory for them? Then all is chosen anew. No backward may be to come."""
        if all(planned.leaves_memory_for_gradients() for planned in self._planned.values()):
            return False
        self._decided = self._stored = frozenset()
        self.forget()
        return True

    def retain(self, stages: Collection[Schedule]) -> None:
        """Forget what was chosen for all but these captured stages."""
        for key in [key for key in self._chosen if key not in stages]:
            del self._chosen[key]
        kept = {id(each.stages) for each in stages}
        known: tuple[dict[int, Any], ...] = (self._planned, self._sought, self._nearest)
        for remembered in known:
            for each in [each for each in remembered if each not in kept]:
                del remembered[each]


def _placed(choice: Choice) -> Placement:
    return Placement(choice.resident, choice.on_disk, choice.weights_on_disk)


def _less(size_bytes: int | None, other_bytes: int) -> int | None:
    return None if size_bytes is None else size_bytes - other_bytes
