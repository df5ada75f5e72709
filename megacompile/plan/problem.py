"""The problem that a plan solves, a captured graph on a machine with budgets, and the costs of
choices.

Memory is computed by walking a choice's schedule, time by simulating it. Both are cached.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from megacompile.cost.hardware import Hardware, with_pageable, with_slower_host
from megacompile.cost.memory import DeviceMemory, device_memory
from megacompile.cost.ops import computes_s
from megacompile.cost.optimizer import OptimizerCost
from megacompile.cost.script import Script
from megacompile.cost.simulate import simulate_script
from megacompile.ir.buckets import Bucket
from megacompile.ir.plan import LARGE, Choice, Places, Tier
from megacompile.ir.schedule import Schedule
from megacompile.passes.schedule.make_plan import reruns, stages_on_host
from megacompile.plan.drafts import Drafts
from megacompile.plan.tiers import Tiers, spread

_BUILT = 2  # cached drafts: the one measured for memory is often simulated next
_AT_ONCE = (
    3  # buckets that the next forward waits for if they are streamed, as they are updated last
)
_STRAIGHT = 0.01  # slopes that differ by less make a straight line


@dataclass(frozen=True, slots=True)
class Problem:
    """The problem that a plan solves.

    Args:
        drafts: builds schedules of choices.
        buckets: in forward order.
        stages: number of stages with a backward.
        hardware: rates of the machine.
        optimizer: its costs.
        budget_bytes: device memory.
        host_budget_bytes: host memory for all buckets; None: unknown.
        elsewhere_bytes: host memory of the buckets that this graph does not read.
        fused: elementwise operations are fused.
        here: places of the buckets that may not move: the residents, and those with states or
            weights on the disk.
        trained: the parameters that get a gradient, bucket key -> indices.
        others: schedules of the model's other captured graphs, whose memory counts too.
        undecided: the buckets that may become resident; None: all.
        disk_budget_bytes: of the disk for states; None: no disk.
        storable: keys of the buckets whose states and weights may move to the disk; None: all.
        accumulates: gradients of micro-batches wait for the update in a later backward.
        gradients_stay: gradients of resident buckets are on the device when a forward begins.
        disk_weights: put the weights of streamed buckets on the disk; False: no more than are there
            already; None: as few as necessary.
        disk_saved: saved tensors that wait on the host go on to the disk; None: as few as
            necessary.
        offloads: saved tensors wait on the host or disk, whatever the choice.
    """

    drafts: Drafts
    buckets: Sequence[Bucket]
    stages: int
    hardware: Hardware
    optimizer: OptimizerCost
    budget_bytes: int
    host_budget_bytes: int | None = None
    elsewhere_bytes: int = 0
    fused: bool = True
    here: Places = Places()
    trained: Mapping[int, Sequence[int]] = field(default_factory=dict)
    others: Sequence[Schedule] = ()
    undecided: Sequence[Bucket] | None = None
    disk_budget_bytes: int | None = None
    storable: frozenset[int] | None = None
    accumulates: bool = False
    gradients_stay: bool = False
    disk_weights: bool | None = False
    disk_saved: bool | None = None
    offloads: bool = False
    # Known costs of choices.
    _peaks: dict[Choice, dict[int, int]] = field(default_factory=dict, init=False)  # by kept stages
    _steps_s: dict[Choice, float] = field(default_factory=dict, init=False)
    _slower_s: dict[Choice, float] = field(default_factory=dict, init=False)
    _computes_s: dict[Choice, float] = field(default_factory=dict, init=False)
    _built: dict[Choice, Schedule] = field(default_factory=dict, init=False)  # the latest
    _scripts: dict[Choice, Script] = field(default_factory=dict, init=False)  # the latest
    _steepest: dict[Choice, float] = field(default_factory=dict, init=False)  # bytes a kept stage
    _places: dict[int, Places] = field(default_factory=dict, init=False)  # by new residents
    tiers: Tiers = field(init=False)  # host and disk

    def __post_init__(self) -> None:
        every = frozenset(bucket.key for bucket in self.buckets)
        stored = every if self.disk_weights is None else self.here.weights_on_disk
        full = Places.of(self.here.resident, every, stored)
        tiers = Tiers(
            buckets=self.buckets,
            trained=self.trained,
            optimizer=self.optimizer,
            host_bytes=self.host_budget_bytes,
            disk_bytes=self.disk_budget_bytes,
            elsewhere_bytes=self.elsewhere_bytes,
            here=self.here,
            undecided=every if self.storable is None else self.storable,
            accumulates=self.accumulates,
            waiting=self.drafts.waiting,
            plan_of_all=lambda: self.schedule(Choice(0, full)).plan,
            disk_weights=self.disk_weights,
            disk_saved=self.disk_saved,
            offloads=self.offloads,
        )
        object.__setattr__(self, "tiers", tiers)

    @property
    def candidates(self) -> Sequence[Bucket]:
        """The buckets that may become resident."""
        return self.buckets if self.undecided is None else self.undecided

    def in_tiles(self, tiles: int) -> Problem:
        """The same problem with tokenwise pieces in `tiles` tiles."""
        return replace(self, drafts=self.drafts.in_tiles(tiles))

    def schedule(self, choice: Choice) -> Schedule:
        """The draft of a choice."""
        if choice not in self._built:
            if len(self._built) == _BUILT:
                del self._built[next(iter(self._built))]
            self._built[choice] = draft = self.drafts.of(choice)
            if (key := choice.computing) not in self._computes_s:
                self._computes_s[key] = computes_s(draft, self.hardware, fused=self.fused)
        return self._built[choice]

    def least_s(self, choice: Choice) -> float:
        """Lower bound of a step in seconds: the time of its computes, which does not depend on the
        places of buckets. 0.0 if no choice with the same computes was built yet."""
        return self._computes_s.get(choice.computing, 0.0)

    def again(self, choice: Choice) -> tuple[float, float] | None:
        """Mean seconds per step that one more kept stage saves, and the most device memory that it
        takes; None if unknown for similar choices."""
        like = choice.computing
        none, every = (self._computes_s.get(replace(like, keep=n)) for n in (0, self.stages))
        known = self._known(self._streamed(choice))
        steep = max(_slopes(known), default=0.0)
        if none is None or every is None or steep <= 0:
            return None
        return max(0.0, none - every) / self.stages, steep

    def memory(self, choice: Choice) -> DeviceMemory:
        """Device memory of a choice over a step."""
        together = [*self.others, self.schedule(choice)]
        return device_memory(
            together,
            optimizer=self.optimizer,
            fused=self.fused,
            gradients_stay=self.gradients_stay,
        )

    def step_s(self, choice: Choice) -> float:
        """Seconds of a step in the middle of training."""
        if choice not in self._steps_s:
            self._steps_s[choice], on_host = self._simulated(choice, self.hardware)
            if not on_host:
                self._slower_s[choice] = self._steps_s[choice]
        return self._steps_s[choice]

    def expected_s(self, choice: Choice) -> float:
        """The mean of `step_s` and the time with a slower host."""
        step_s = self.step_s(choice)
        if choice not in self._slower_s:
            self._slower_s[choice], _ = self._simulated(choice, with_slower_host(self.hardware))
        return (step_s + self._slower_s[choice]) / 2

    def learn(self, other: Problem) -> None:
        """Reuse the results of a problem with the same options: its drafts and, if only budgets
        differ, the costs of choices."""
        self.drafts.learn(other.drafts)
        mine, its = (
            (p.here.resident, p.optimizer, p.fused, p.others, p.accumulates, p.gradients_stay)
            for p in (self, other)
        )
        machines = (replace(each.hardware, host_bytes=None) for each in (self, other))
        if mine == its and len(set(machines)) == 1:
            for choice, peaks in other._peaks.items():
                self._peaks.setdefault(choice, {}).update(peaks)
            self._steps_s.update(other._steps_s)
            self._slower_s.update(other._slower_s)
            self._computes_s.update(other._computes_s)

    def _simulated(self, choice: Choice, hardware: Hardware) -> tuple[float, bool]:
        """Seconds of a step, and whether they depend on the host's rates."""
        if hardware.locked_bytes is not None:
            hardware = with_pageable(hardware, self.host_bytes(choice))
        timeline = simulate_script(self._script(choice), hardware, steps=3)
        return timeline.step_s, timeline.uses_host

    def _script(self, choice: Choice) -> Script:
        if choice not in self._scripts:
            self._scripts.clear()
            script = Script([self.schedule(choice)], self.optimizer, fused=self.fused)
            self._scripts[choice] = script
        return self._scripts[choice]

    def fits(self, choice: Choice) -> bool:
        """True if a choice fits the budgets, by a quick and slightly pessimistic estimate of the
        device.

        Adds new residents to the peak without them. Ignores the slots that they free and the
        changed set of device updates.
        """
        return self.fits_host(choice) and self._fits_device(choice)

    def _fits_device(self, choice: Choice) -> bool:
        if self.resident_bytes(choice.places.resident, gradients=True) > self.budget_bytes:
            return False  # at the end of the backward
        streamed, buffer = self._streamed(choice), self._buffer_bytes(choice)
        for delay in range(1, choice.state_delay):  # if states that leave sooner do not fit
            if self._known(replace(streamed, state_delay=delay)).get(choice.keep, 0) > buffer:
                return False
        return self.peak_bytes(streamed) <= buffer

    def fits_host(self, choice: Choice) -> bool:
        """True if a choice fits the known budgets of host memory and disk."""
        return self.tiers.fit(choice)

    def host_bytes(self, choice: Choice) -> int:
        """Host memory during training, including gradients and states."""
        return self.tiers.of_host(choice)

    def settled(self, choice: Choice) -> Choice:
        """The choice with as little on the disk as possible; see `Tiers.settled`."""
        return self.tiers.settled(choice)

    def _streamed(self, choice: Choice) -> Choice:
        return replace(choice, places=self.here.without_disk, saved_on_disk=0)

    def _buffer_bytes(self, choice: Choice) -> float:
        """Device memory that is left next to new residents, which occupy theirs permanently."""
        new = choice.places.resident - self.here.resident
        return self.budget_bytes - self.resident_bytes(new, gradients=self.gradients_stay)

    def resident_bytes(self, keys: Collection[int], *, gradients: bool) -> float:
        """Device memory of resident buckets, with or without their gradients."""
        return sum(
            self.optimizer.resident_bytes(
                bucket, self.trained.get(bucket.key, ()), gradients=gradients
            )
            for bucket in self.buckets
            if bucket.key in keys
        )

    def fits_exactly(self, choice: Choice) -> bool:
        """Like `fits`, but exact: computes the peak of the choice itself, which is slower."""
        if self._buffer_bytes(choice) < 0 or not self.fits_host(choice):
            return False
        return self.peak_bytes(choice) <= self.budget_bytes

    def with_residents(self, count: int, *, keep: int = 1) -> Choice:
        """The choice with `count` more residents and as little on the disk as possible."""
        return self.settled(Choice(keep, self.places(count)))

    def places(self, count: int) -> Places:
        """The places of buckets with `count` more residents (see `_residents`)."""
        if count not in self._places:
            keys = (bucket.key for bucket in self._residents(count))
            self._places[count] = self.here.changed(keys, weights=Tier.DEVICE, states=Tier.DEVICE)
        return self._places[count]

    def _residents(self, count: int) -> Sequence[Bucket]:
        """The best `count` candidates for residents: the first in forward order.

        If updates in the backward may take states from a disk, another order is better. The first
        few still come first, because the next forward needs their new parameters at once. Then come
        large buckets, because slots and buffers are as large as the largest streamed bucket. The
        rest are spread evenly, so that the drive has work during the whole backward.
        """
        candidates = self.candidates
        if not (self.optimizer.in_backward and self.disk_budget_bytes and candidates):
            return candidates[:count]
        usual = LARGE * statistics.median(bucket.size_bytes for bucket in candidates)
        large = [b for b in candidates[_AT_ONCE:] if b.size_bytes > usual]
        first = [*candidates[:_AT_ONCE], *large]
        rest = [bucket for bucket in candidates[_AT_ONCE:] if bucket not in large]
        return [*first[:count], *spread(rest, count - len(first))]

    def fewest_residents(self, like: Choice | None = None, *, disk: bool = True) -> int | None:
        """The fewest residents for which the other buckets fit elsewhere.

        Args:
            like: the rest of the choice.
            disk: more may move to the disk than is there already.

        Returns:
            None if even all of them are not enough.
        """
        for count in range(len(self.candidates) + 1):
            choice = replace(like or Choice(), places=self.places(count))
            if self.fits_host(self.settled(choice) if disk else choice):
                return count
        return None

    def fewest_offloaded(self, choice: Choice) -> int | None:
        """The fewest first stages with inputs on the host for which a choice fits on the device;
        None if even all of them are not enough."""
        return _fewest(self.stages, lambda n: self._fits_device(replace(choice, offload=n)))

    def fewest_reruns(self, choice: Choice) -> int | None:
        """The fewest stages that must run again so that what waits on the host fits there; None if
        even every other stage is not enough."""
        return _fewest(self.reruns(1), lambda n: self.fits_host(replace(choice, rerun=n)))

    def reruns(self, row: int) -> int:
        """Number of stages that run again if each saved output is followed by `row` such stages.

        0 if ranks share the model: see `Options.ranks`.
        """
        shared = any(bucket.ranks > 1 for bucket in self.buckets)
        return 0 if shared else reruns(self.stages, row)

    def most_residents(self, like: Choice) -> int | None:
        """The most residents that fit on the device with the rest of the choice `like`; None if
        none does. Ignores the slots that they free, as `fits` does."""
        for count in range(len(self.candidates), -1, -1):
            if self._fits_device(replace(like, places=self.places(count))):
                return count
        return None

    def tightest(self) -> Choice:
        """The choice with the least host memory: as many residents as fit on the device."""
        ahead = 1 if self.optimizer.in_backward else None
        least = Choice(0, self.here, state_lookahead=ahead)
        return self.settled(replace(least, places=self.places(self.most_residents(least) or 0)))

    def floor(self) -> DeviceMemory:
        """Device memory of the smallest plan with the current residents."""
        streamed = Choice(0, self.here, state_lookahead=1)
        both = [self.memory(streamed), self.memory(replace(streamed, offload=self.stages))]
        return min(both, key=lambda memory: memory.peak.total_bytes)

    def floor_bytes(self) -> int:
        """Peak of `floor`."""
        return self.floor().peak.total_bytes

    def most_kept(self, choice: Choice, least: int, most: int) -> int:
        """The most stages that can be kept, approximately, between `least`, which is known to fit,
        and `most`.

        The peak is a convex function of the number: it is flat while the peak is elsewhere in the
        step, then rises by a stage's saved tensors. So it is below the chord between two known
        peaks, on the chord if the neighboring interval is as steep, and above a line with the
        steepest slope. That slope does not depend on the places of buckets, so it is cached.
        """
        streamed, buffer = self._streamed(choice), self._buffer_bytes(choice)
        family = replace(streamed.computing, keep=0)
        by_chord = True
        while True:
            known = self._known(streamed)
            low = max(k for k, peak in known.items() if peak <= buffer and k <= most)
            too_many = (k for k, peak in known.items() if peak > buffer and k <= most)
            high = min(too_many, default=most + 1)
            if low == most:
                return max(low, least)
            if high > most:
                self.peak_bytes(replace(streamed, keep=most))
                continue
            over = known[high] - buffer
            share = (buffer - known[low]) / (known[high] - known[low])
            on_chord = min(low + math.floor(share * (high - low)), high - 1)
            if straight := _is_straight(known, low, high):
                self._steepest[family] = max(*_slopes(known), self._steepest.get(family, 0.0))
            steepest = self._steepest.get(family)
            on_line = high - 1 if steepest is None else high - math.ceil(over / steepest)
            if straight or on_line <= on_chord:
                return max(on_chord, least)
            middle = on_line
            if steepest is None:
                middle = max(on_chord, low + 1) if by_chord else (low + high) // 2
                by_chord = not by_chord
            self.peak_bytes(replace(streamed, keep=middle))

    def most_waiting(self, choice: Choice, least: int, most: int) -> int:
        """The most stages, between `least`, which fits, and `most`, that can be kept if their saved
        tensors wait on the host."""
        if not choice.offload or self.fits_host(replace(choice, keep=most)):
            return most
        fewer = _fewest(most - least, lambda n: self.fits_host(replace(choice, keep=most - n)))
        return least if fewer is None else most - fewer

    def most_on_host(self, choice: Choice) -> int:
        """The most stages that may be kept on the host."""
        lookahead = self.drafts.pipeline.setting.options.lookahead
        graphs = self.drafts.graphs
        every = replace(choice, saved_on_host=self.stages)
        return len(stages_on_host(graphs, every, lookahead=lookahead))

    def peak_bytes(self, choice: Choice) -> int:
        """Peak device memory of a choice."""
        known = self._known(choice)
        if choice.keep not in known:
            known[choice.keep] = self.memory(choice).peak.total_bytes
        return known[choice.keep]

    def _known(self, choice: Choice) -> dict[int, int]:
        """The known peaks of choices like this one, by their number of kept stages.

        The peak does not depend on whether states, parameters and saved tensors are on the host or
        the disk, unless the device updates buckets that are on the host.
        """
        place = replace(choice, keep=0, saved_on_disk=0)
        if not (choice.device_update or self.optimizer.helped):
            place = replace(place, places=place.places.without_disk)
        return self._peaks.setdefault(place, {})


def _fewest(most: int, fits: Callable[[int], bool]) -> int | None:
    """The smallest number that fits, by bisection; None: not even `most` fits."""
    if not fits(most):
        return None
    low, high = -1, most  # low may not fit, high does
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _slopes(known: Mapping[int, int]) -> list[float]:
    """Slopes between neighboring known points."""
    return [(known[b] - known[a]) / (b - a) for a, b in itertools.pairwise(sorted(known))]


def _is_straight(known: Mapping[int, int], low: int, high: int) -> bool:
    """True if the neighboring points show that a convex function is straight in an interval."""
    at = sorted(known)
    i, k = at.index(low), at.index(high)
    steep = (known[high] - known[low]) / (high - low)
    beside = [(at[i - 1], low)] if i else []
    beside += [(high, at[k + 1])] if k + 1 < len(at) else []
    slopes = [(known[right] - known[left]) / (right - left) for left, right in beside]
    return any(abs(slope - steep) <= _STRAIGHT * steep for slope in slopes)
