"""The searches that options allow: in tiles, near a known choice, with fewer states, with
parameters on the disk; and the closest choice if nothing fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megacompile import notices
from megacompile.cost.memory import MemoryKind, device_memory
from megacompile.ir.capture import Variant
from megacompile.ir.plan import Choice, Places
from megacompile.ir.schedule import Schedule
from megacompile.options import Activations, Lowering
from megacompile.passes.schedule.make_plan import ROWS, staying
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
        """Find the fastest choice that fits, also in tiles if the plan may choose them."""
        if self._may_cut:
            return search_in_tiles(problem, self._uncut)
        return self._uncut(problem)

    def near(self, problem: Problem, near: Choice | None) -> SearchResult | None:
        """Search near a choice found for other budgets, or everywhere if there is none or nothing
        near it fits."""
        found = None if near is None else search_near(problem, near)
        return found or self.everywhere(problem)

    def with_fewer_states(self, problem: Problem) -> SearchResult | None:
        """Find the fastest choice with as many optimizer states as the host holds, and warn about
        it.

        A model's optimizer is unknown before the first step, so plans assume AdamW's states. If the
        host does not hold these, another optimizer may still be able to train the model.
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
                    f"megacompile: host memory ({format_bytes(problem.host_budget_bytes)}) holds "
                    f"{states} optimizer states for each parameter, and AdamW has {assumed}. An "
                    "optimizer step that needs more raises an error; state_dtype='int8' needs "
                    "less",
                    notices.Whose.RANK,
                )
                return found
        return None

    def smallest(self, problem: Problem) -> tuple[Problem, int]:
        """The problem with the number of tiles (1: none) that needs the least device memory. More
        tiles may need more, because tiles that divide the batch include attention."""
        counts = (1, *TILES) if self._may_cut else (1,)
        each = [(problem.in_tiles(tiles), tiles) for tiles in counts]
        return min(each, key=lambda pair: pair[0].floor_bytes())

    @property
    def _may_cut(self) -> bool:
        """True if the plan may choose tiles. Matrix kernels may round differently for fewer rows,
        but eager code must be bitwise equal; and ranks must all read the same weights in a
        backward."""
        options = self.setting.options
        return (
            options.lowering is Lowering.INDUCTOR and options.ranks == 1 and options.tiles is None
        )

    def _uncut(self, problem: Problem) -> SearchResult | None:
        """Search with the tiles of the problem."""
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


# Tiles: as few as necessary to fit, and more if that is faster.
#
# Tokenwise pieces need less device memory in tiles, and a kept stage saves less: only the inputs
# and outputs of attention. That leaves memory to keep more stages. But whatever tiles compute is
# recomputed in the backward, even in kept stages: with short sequences, most of a stage.
#
# A search in tiles takes as long as one without. So two bounds on the gain are checked first: the
# memory that tiles can free, and the time of the computes in tiles if all stages are kept. Tiles
# are not tried if nothing in a model can be tiled.

TILES = (4, 16, 64, 256)  # numbers of tiles that are tried
_TILES_PAY = 0.03  # of a step: the least gain if a plan fits without tiles
_NOTABLE = 0.1  # of the budget: the least workspace worth cutting


def search_in_tiles(problem: Problem, search: Search) -> SearchResult | None:
    """Find the fastest choice that fits, with or without tiles.

    Args:
        problem: without tiles.
        search: finds the fastest choice with the tiles of its problem.
    """
    best, at, count = search(problem), problem, 1
    why: tuple[str, ...] = ()
    for tiles in TILES:
        cut = problem.in_tiles(tiles)
        if best is not None and not _may_pay(at, best, cut):
            break
        if not cut.drafts.cut:  # nothing can be tiled, with any number of tiles
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
        problem: that `best` solves.
        cut: the same in more tiles.
    """
    enough_s = problem.expected_s(best.choice) * (1 - _TILES_PAY)
    every = Choice(problem.stages)
    if problem.least_s(every) > enough_s:
        return False  # little is recomputed and the device never waits
    moments = problem.memory(best.choice).moments
    workspace = max(moment.live_bytes.get(MemoryKind.WORKSPACE, 0) for moment in moments)
    if workspace < _NOTABLE * problem.budget_bytes:
        return False
    cut.schedule(every)
    return cut.least_s(every) < enough_s


# Optional parameters on the disk.
#
# A plan with parameters on the disk reads each of these buckets twice a step. So it is tried only
# if otherwise no plan fits, or only one with saved tensors on the disk; see decision 30.

_NO_OTHER = "no other plan fits: host memory does not hold all parameters next to the rest"


def search_with_weights(
    problem: Problem, found: SearchResult | None, search: Search
) -> tuple[Problem, SearchResult | None]:
    """Put the parameters of as few buckets as necessary on the disk, if nothing fits otherwise or
    if that is faster than saved tensors there.

    Args:
        problem: without more parameters on the disk.
        found: its solution; None: nothing fits.
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


# The choice closest to the budgets, if none fits all of them.
#
# A refusal shows this choice: among the candidates, it needs the least additional memory to fit.
# Offloading and recomputing move the shortage from the device to the host, so candidates with and
# without them are compared.

DEVICE, HOST, DISK = "device memory", "host memory", "the disk"


def nearest(problem: Problem) -> Choice:
    """The choice that lacks the fewest bytes in all memories together."""
    return min(_candidates(problem), key=lambda choice: sum(lacking(problem, choice).values()))


def lacking(problem: Problem, choice: Choice) -> dict[str, int]:
    """Bytes that a choice needs beyond each budget; empty if it fits."""
    host, budget = problem.host_bytes(choice), problem.host_budget_bytes
    found = {
        DEVICE: problem.peak_bytes(choice) - problem.budget_bytes,
        HOST: 0 if budget is None else host - budget,
        DISK: problem.tiers.of_disk(choice) - (problem.disk_budget_bytes or 0),
    }
    return {memory: size for memory, size in found.items() if size > 0}


def _candidates(problem: Problem) -> Iterator[Choice]:
    """Choices with as many residents as fit and with none, with inputs of stages on the device or
    as many as necessary on the host, and with or without rows of stages that run again."""
    tightest = problem.tightest()
    for places in dict.fromkeys((tightest.places, problem.here)):
        for rerun in (0, *map(problem.reruns, ROWS)):
            choice = replace(tightest, places=places, rerun=rerun)
            few = problem.fewest_offloaded(choice)
            for offload in sorted({0, problem.stages if few is None else few}):
                yield problem.settled(replace(choice, offload=offload))


# Buckets that stay in their own slots between forwards without a backward.
#
# Evaluation and generation read the same weights in every forward, so those that fit are fetched
# once.


def stay_that_fit(
    pipeline: Pipeline,
    setting: Setting,
    schedule: Schedule,
    places: Places,
    budget_bytes: int,
) -> int:
    """The maximum number of streamed buckets that fit into device memory next to everything else.

    Args:
        schedule: from `Pipeline.differentiated`, without a backward.
        places: where the buckets are. Training leaves the gradients and states of residents on the
            device too.
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
        return len(streamed)  # and no other slots are needed
    return max(
        count
        for count in range(len(streamed))
        if not count or sum(b.size_bytes for b in staying(streamed, count)) <= left_bytes
    )
