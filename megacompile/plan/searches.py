"""The searches that the options allow: in tiles or not, near what is known, with fewer states, with
parameters on the disk; and the choice that comes nearest, where nothing fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megacompile import notices
from megacompile.cost.memory import MemoryKind, device_memory
from megacompile.ir.capture import Variant
from megacompile.ir.plan import Choice, Places
from megacompile.ir.schedule import Schedule
from megacompile.options import Activations, Lowering
from megacompile.passes.schedule.plan import ROWS, staying
from megacompile.plan.pipeline import Pipeline
from megacompile.plan.planner import Search, SearchResult, search, search_near
from megacompile.plan.problem import Problem
from megacompile.plan.setting import Setting
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


# Tiles: in as few as it takes to fit, and in some where that is faster.
#
# What acts on each token alone needs less device memory in tiles, and a kept stage saves less: only
# what attention reads and returns. That leaves memory to keep more stages. But what tiles compute
# is computed again in the backward, whatever is kept: with short sequences, most of a stage.
#
# A search in tiles takes as long as one without. So two bounds on the gain come first: the memory
# that tiles can free, and the time of the computes in tiles where all stages are kept. Where
# nothing of a model can be cut, tiles are not tried.

TILES = (4, 16, 64, 256)  # that are tried
_TILES_PAY = 0.03  # of a step: what tiles must save where a plan fits without
_NOTABLE = 0.1  # of the budget: workspace that is worth cutting


def search_in_tiles(problem: Problem, search: Search) -> SearchResult | None:
    """The fastest choice that fits, with or without tiles.

    Args:
        problem: without tiles.
        search: finds the fastest choice that fits, and runs in the tiles of its problem.
    """
    best, at, count = search(problem), problem, 1
    why: tuple[str, ...] = ()
    for tiles in TILES:
        cut = problem.in_tiles(tiles)
        if best is not None and not _may_pay(at, best, cut):
            break
        if not cut.drafts.cut:  # and more tiles cut no more
            break
        found = search(cut)
        if found is not None and best is not None:
            before_s = at.expected_s(best.choice)
            if cut.expected_s(found.choice) > before_s * (1 - _TILES_PAY):
                break
            why = (_instead(count, at.step_s(best.choice)),)
        if found is not None:
            best, at, count = found, cut, tiles
    if best is None:
        return None
    choice = replace(best.choice, tiles=count)
    return replace(best, choice=choice, reasons=(*best.reasons, *why))


def _instead(tiles: int, step_s: float) -> str:
    how = "without tiles" if tiles == 1 else f"in {tiles} tiles"
    return f"{how} it would take {step_s * 1e3:.0f} ms"


def _may_pay(problem: Problem, best: SearchResult, cut: Problem) -> bool:
    """True if more tiles may save enough of a step.

    Args:
        problem: what `best` was found for.
        cut: the same in more tiles.
    """
    enough_s = problem.expected_s(best.choice) * (1 - _TILES_PAY)
    every = Choice(problem.stages)
    if problem.least_s(every) > enough_s:
        return False  # hardly anything is computed again, and nothing waited for
    moments = problem.memory(best.choice).moments
    workspace = max(moment.live_bytes.get(MemoryKind.WORKSPACE, 0) for moment in moments)
    if workspace < _NOTABLE * problem.budget_bytes:
        return False
    cut.schedule(every)
    return cut.least_s(every) < enough_s


# Parameters on the disk that need not be there.
#
# A plan with parameters on the disk reads each of their buckets twice a step. So one is sought only
# where none fits without, or only with saved tensors on the disk; decision 30 says why.

_NO_OTHER = "no other plan fits: host memory does not hold all parameters beside the rest"


def search_with_weights(
    problem: Problem, found: SearchResult | None, search: Search
) -> tuple[Problem, SearchResult | None]:
    """The problem and the choice with parameters of as few buckets on the disk as it takes, where
    nothing fits without, or where that is faster than saved tensors there.

    Args:
        problem: where no more parameters are there than before.
        found: what was found for it; None: nothing fits.
        search: finds the fastest choice that fits.
    """
    if found is not None and not found.choice.saved_on_disk:
        return problem, found
    more = replace(problem, disk_weights=None)
    more.learn(problem)
    other = search(more)
    if other is None or not other.choice.places.weights_on_disk:
        return (more, other) if found is None else (problem, found)
    why = _NO_OTHER
    if found is not None:
        if problem.expected_s(found.choice) <= more.expected_s(other.choice):
            return problem, found
        why = (
            "with all parameters in host memory, and more saved tensors on the disk, it would "
            f"take {problem.step_s(found.choice) * 1e3:.0f} ms"
        )
    return more, replace(other, reasons=(*other.reasons, why))


# The choice that comes nearest to the budgets, where none is within all of them.
#
# It is what a refusal shows: what it lacks is the least memory that would make the step fit, as far
# as the search goes. What waits on the host or is computed again leaves the device less to hold, so
# the device may have too little with neither, and the host with both.

DEVICE, HOST, DISK = "device memory", "host memory", "the disk"


def nearest(problem: Problem) -> Choice:
    """The choice that lacks the fewest bytes, of all memories together."""
    return min(_candidates(problem), key=lambda choice: sum(lacking(problem, choice).values()))


def lacking(problem: Problem, choice: Choice) -> dict[str, int]:
    """Bytes that a choice needs beyond the budgets, by memory; empty where it fits."""
    host, there = problem.host_bytes(choice), problem.host_budget_bytes
    found = {
        DEVICE: problem.peak_bytes(choice) - problem.budget_bytes,
        HOST: 0 if there is None else host - there,
        DISK: problem.tiers.of_disk(choice) - (problem.disk_budget_bytes or 0),
    }
    return {memory: size for memory, size in found.items() if size > 0}


def _candidates(problem: Problem) -> Iterator[Choice]:
    """With as many residents as fit, and with none; what stages take waits on the device, or on
    the host as far as it must; rows of stages run again, or none does."""
    tightest = problem.tightest()
    for places in dict.fromkeys((tightest.places, problem.here)):
        for rerun in (0, *map(problem.reruns, ROWS)):
            choice = replace(tightest, places=places, rerun=rerun)
            few = problem.fewest_offloaded(choice)
            for offload in sorted({0, problem.stages if few is None else few}):
                yield problem.settled(replace(choice, offload=offload))


# Number of buckets that stay in slots of their own between forwards without a backward.
#
# Evaluation and generation read the same weights in every forward. What fits is fetched once.


def stay_that_fit(
    pipeline: Pipeline,
    setting: Setting,
    schedule: Schedule,
    places: Places,
    budget_bytes: int,
) -> int:
    """The largest number of streamed buckets that fit into device memory next to everything else.

    Args:
        schedule: what `Pipeline.differentiated` returns, without a backward.
        places: where the buckets are. Those on the device have gradients and states there too,
            as training leaves them.
    """
    variant = Variant((), keep_last=True)
    draft = pipeline.planned(schedule, variant, Choice(places=places), draft=True)
    cost = setting.cost()
    fused = setting.options.lowering is Lowering.INDUCTOR
    peak = device_memory(draft, optimizer=cost, fused=fused).peak
    slots_bytes = peak.live_bytes.get(MemoryKind.SLOTS, 0)
    trained_bytes = sum(
        int(cost.resident_bytes(b, range(len(b.params))) - cost.resident_bytes(b, ()))
        for b in draft.buckets
        if b.key in places.resident
    )
    left_bytes = budget_bytes - peak.total_bytes - trained_bytes
    streamed = [b for b in draft.buckets if b.key not in places.resident]
    if sum(b.size_bytes for b in streamed) <= left_bytes + slots_bytes:
        return len(streamed)  # which then need no other slots
    return max(
        count
        for count in range(len(streamed))
        if not count or sum(b.size_bytes for b in staying(streamed, count)) <= left_bytes
    )
