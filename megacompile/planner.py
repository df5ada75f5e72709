"""Search for the fastest plan that fits: which stages are kept, which buckets live on the device.

More memory can be used in three ways: a kept stage saves its recompute, a resident bucket its
copies and the host's update, a bucket that is handed over a part of the host's update. They trade
against one another, so plans are built and simulated: for a number of resident buckets (the first
in forward order, whose updates the next forward waits for), as many kept stages as fit (the last
ones, whose saved tensors are held the shortest), with and without handing over. The step time is a
smooth function of the number of resident buckets; the best of a coarse grid is refined once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from megacompile.hardware import Hardware
from megacompile.ir import Bucket, Schedule, format_bytes
from megacompile.memory import DeviceMemory, Moment, device_memory
from megacompile.optimizer_cost import OptimizerCost
from megacompile.simulate import simulate

_GRID = 4  # intervals that the buckets are first divided into
_EQUAL = 0.01  # predictions this close are as good as one another; what is resident is then surer


@dataclass(frozen=True, slots=True)
class Choice:
    """What a plan is made from."""

    keep: int = 1  # stages, counted from the last, whose saved tensors are kept
    resident: frozenset[int] = frozenset()  # bucket keys
    hands_over: bool = True
    offload: bool = False  # what recomputes take from the forward waits on the host
    state_lookahead: int | None = None  # stages that states are fetched ahead; None: as weights

    def __str__(self) -> str:
        return f"{self.keep} stages kept, {len(self.resident)} buckets resident"


@dataclass(frozen=True, slots=True)
class Found:
    """The best choice, and what is expected of it."""

    choice: Choice
    step_s: float
    peak_bytes: int
    tried: int  # plans that were simulated
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Problem:
    """What a plan is sought for.

    Args:
        build: the schedule of a choice.
        buckets: in forward order.
        stages: how many have a backward.
        hardware: rates of the machine.
        optimizer: what updates between two steps.
        budget_bytes: device memory.
        fused: elementwise operations are fused.
        resident: keys of the buckets that live on the device already.
        trained: the parameters that get a gradient: bucket key -> indices.
    """

    build: Callable[[Choice], Schedule]
    buckets: Sequence[Bucket]
    stages: int
    hardware: Hardware
    optimizer: OptimizerCost
    budget_bytes: int
    fused: bool = True
    resident: frozenset[int] = frozenset()
    trained: Mapping[int, Sequence[int]] = field(default_factory=dict)
    peaks: dict[Choice, int] = field(default_factory=dict)  # that are known

    def memory(self, choice: Choice) -> DeviceMemory:
        """Device memory of a choice over a step."""
        schedule = self.build(choice)
        return device_memory(schedule, optimizer=self.optimizer, fused=self.fused)

    def step_s(self, choice: Choice) -> float:
        """Seconds of a step in the middle of training."""
        schedule = self.build(choice)
        options = {"optimizer": self.optimizer, "steps": 3, "fused": self.fused}
        return simulate(schedule, self.hardware, **options).step_s  # type: ignore[arg-type]

    def fits(self, choice: Choice) -> bool:
        """Does its peak stay within the budget? A little pessimistic, and quick.

        Resident buckets are added to the peak without them; that they need no slot is left out.
        """
        streamed = replace(choice, resident=self.resident)
        return self._peak_bytes(streamed) <= self._room_bytes(choice)

    def _room_bytes(self, choice: Choice) -> float:
        """The budget less what new resident buckets take."""
        return self.budget_bytes - sum(
            self.optimizer.resident_bytes(bucket, self.trained.get(bucket.key, ()))
            for bucket in self.buckets
            if bucket.key in choice.resident - self.resident
        )

    def floor(self) -> DeviceMemory:
        """Memory of a plan that keeps nothing on the device that need not be there."""
        streamed = Choice(0, self.resident, hands_over=False, state_lookahead=1)
        both = [self.memory(streamed), self.memory(replace(streamed, offload=True))]
        return min(both, key=lambda memory: memory.peak.total_bytes)

    def floor_bytes(self) -> int:
        """Its peak."""
        return self.floor().peak.total_bytes

    def guess(self, choice: Choice, low: int, high: int) -> int:
        """About how many stages can be kept, between `low`, which fits, and `high`, which does not:
        the peak grows by about the same for each."""
        top = min(high, self.stages)
        base = replace(choice, resident=self.resident)
        least, most = (self._peak_bytes(replace(base, keep=k)) for k in (low, top))
        if most <= least:
            return high - 1
        room = self._room_bytes(choice) - least
        steps = math.floor(room / ((most - least) / max(1, top - low)))
        return min(max(low + steps, low + 1), high - 1)

    def _peak_bytes(self, choice: Choice) -> int:
        if choice not in self.peaks:
            self.peaks[choice] = self.memory(choice).peak.total_bytes
        return self.peaks[choice]


def search(
    problem: Problem, *, resident: bool = True, pinned: bool = False, hand_over: bool = True
) -> Found | None:
    """The fastest choice that fits; None where not even the floor does.

    Args:
        resident: buckets may live on the device.
        pinned: what is kept or offloaded is not for the search to say.
        hand_over: buckets may be handed over.
    """
    counts = [0]
    if resident:
        total = len(problem.buckets)
        counts = sorted({round(total * k / _GRID) for k in range(_GRID + 1)})
    keeps = (1, 1) if pinned else (0, problem.stages)
    tried: dict[Choice, float] = {}
    for count in counts:
        _try(problem, count, tried, keeps, hands_over=hand_over)
    if hand_over:
        _try(problem, 0, tried, keeps, hands_over=False)
    if problem.optimizer.in_backward and all(c.keep < problem.stages for c in tried):
        _try(problem, 0, tried, keeps, hands_over=False, state_lookahead=1)
    if not tried and not pinned:
        late = 1 if problem.optimizer.in_backward else None
        _try(problem, 0, tried, keeps, hands_over=False, offload=True, state_lookahead=late)
    if not tried:
        return None
    best = min(tried, key=tried.__getitem__)
    if resident and len(best.resident) in counts:
        for count in _between(counts, len(best.resident)):
            _try(problem, count, tried, keeps, hands_over=best.hands_over)
    fast = [choice for choice in tried if tried[choice] <= min(tried.values()) * (1 + _EQUAL)]
    best = max(fast, key=lambda choice: (len(choice.resident), -tried[choice]))
    peak = problem.memory(best).peak.total_bytes
    return Found(best, tried[best], peak, len(tried), _reasons(problem, best, tried, peak))


def _between(counts: Sequence[int], at: int) -> Iterable[int]:
    """The middles of the intervals beside a point of the grid."""
    k = counts.index(at)
    return {(at + other) // 2 for other in counts[max(0, k - 1) : k + 2]} - set(counts)


def _try(
    problem: Problem,
    count: int,
    tried: dict[Choice, float],
    keeps: tuple[int, int],
    *,
    hands_over: bool,
    offload: bool = False,
    state_lookahead: int | None = None,
) -> None:
    """Simulate the choice with `count` resident buckets that keeps as many stages as fit."""
    keys = problem.resident | {bucket.key for bucket in problem.buckets[:count]}
    low, most = keeps
    least = Choice(low, keys, hands_over, offload, state_lookahead)
    if not problem.fits(least):
        return
    high = most + 1  # does not fit, as far as is known; low does
    while high - low > 1:
        middle = problem.guess(least, low, high)
        if problem.fits(replace(least, keep=middle)):
            low = middle
        else:
            high = middle
    choice = replace(least, keep=low)
    if choice not in tried:
        tried[choice] = problem.step_s(choice)


def _reasons(
    problem: Problem, best: Choice, tried: dict[Choice, float], peak: int
) -> tuple[str, ...]:
    """Why this one: what it needs, what it takes, and the floor beside it."""
    budget = format_bytes(problem.budget_bytes)
    lines = [
        f"{best.keep} of {problem.stages} stages are kept and {len(best.resident)} of "
        f"{len(problem.buckets)} buckets live on the device: {format_bytes(peak)} of {budget} of "
        f"device memory, {tried[best] * 1e3:.0f} ms a step predicted, the fastest of "
        f"{len(tried)} plans that fit"
    ]
    floor = [s for choice, s in tried.items() if not choice.resident]
    if best.offload:
        lines.append("nothing else fits but to let the stages' inputs wait on the host")
    if best.state_lookahead is not None:
        lines.append(
            f"optimizer states are fetched {best.state_lookahead} stage ahead, later than weights: "
            "they take less memory"
        )
    if floor and best.resident:
        lines.append(f"with every bucket streamed it would take {min(floor) * 1e3:.0f} ms")
    return tuple(lines)


def table(problem: Problem, peak: Moment) -> str:
    """What needs how much of device memory, and what there is."""
    needed = sorted(peak.live_bytes.items(), key=lambda item: -item[1])
    rows = [(kind.value, size) for kind, size in needed if size]
    rows += [("needed", peak.total_bytes), ("there", problem.budget_bytes)]
    width = max(len(what) for what, _ in rows)
    return "\n".join(f"  {what:<{width}}  {format_bytes(size):>10}" for what, size in rows)


def does_not_fit(problem: Problem, peak: Moment) -> str:
    """The error of a model for which there is too little device memory."""
    return (
        f"megacompile(): device memory is too small, at {peak.graph} {peak.label}, with every "
        f"stage recomputed and nothing resident\n{table(problem, peak)}\nuse smaller batches or "
        "sequences, or raise gpu_memory=; where the head is the largest, let the model return its "
        "loss alone "
        '(head="chunked")'
    )
