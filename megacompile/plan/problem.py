"""The problem that a plan solves, a captured graph on a machine with budgets, and the costs of
choices.

Memory is computed by walking a choice's schedule, time by simulating it. Both are cached.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from megacompile.cost.hardware import Hardware, with_pageable, with_slower_host
from megacompile.cost.memory import DeviceMemory, device_memory
from megacompile.cost.ops import computes_s
from megacompile.cost.script import Script
from megacompile.cost.simulate import simulate_script
from megacompile.ir.buckets import Bucket
from megacompile.ir.plan import LARGE, Choice, Places, Tier
from megacompile.ir.schedule import Schedule
from megacompile.passes.schedule.make_plan import reruns, stages_on_host
from megacompile.plan.tiers import Tiers, spread

DEVICE, HOST, DISK = "device memory", "host memory", "the disk"
_BUILT = 2  # cached drafts: the one measured for memory is often simulated next
_AT_ONCE = 3  # streamed buckets that the next forward waits for, as they are updated last


@dataclass(frozen=True, eq=False, kw_only=True)
class Problem(Tiers):
    """The problem that a plan solves.

    Args:
        stages: number of stages with a backward.
        hardware: rates of the machine.
        budget_bytes: device memory.
        fused: elementwise operations are fused.
        others: schedules of the model's other captured graphs, whose memory counts too.
        undecided: the buckets that may become resident; None: all.
        gradients_stay: gradients of resident buckets are on the device when a forward begins.
    """

    stages: int
    hardware: Hardware
    budget_bytes: int
    fused: bool = True
    others: Sequence[Schedule] = ()
    undecided: Sequence[Bucket] | None = None
    gradients_stay: bool = False
    # Known costs of choices.
    _peaks: dict[Choice, dict[int, int]] = field(default_factory=dict, init=False)  # by kept stages
    _steps_s: dict[Choice, float] = field(default_factory=dict, init=False)
    _slower_s: dict[Choice, float] = field(default_factory=dict, init=False)
    _computes_s: dict[Choice, float] = field(default_factory=dict, init=False)
    _built: dict[Choice, Schedule] = field(default_factory=dict, init=False)  # the latest
    _scripts: dict[Choice, Script] = field(default_factory=dict, init=False)  # the latest
    _places: dict[int, Places] = field(default_factory=dict, init=False)  # by new residents

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
        peaks = sorted(self._known(self._streamed(choice)).items())
        slopes = ((q - p) / (b - a) for (a, p), (b, q) in itertools.pairwise(peaks))
        steep = max(slopes, default=0.0)
        if none is None or every is None or steep <= 0:
            return None
        return max(0.0, none - every) / self.stages, steep

    def memory(self, choice: Choice) -> DeviceMemory:
        """Device memory of a choice over a step."""
        together, stay = [*self.others, self.schedule(choice)], self.gradients_stay
        return device_memory(
            together, optimizer=self.optimizer, fused=self.fused, gradients_stay=stay
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

    def _simulated(self, choice: Choice, hardware: Hardware) -> tuple[float, bool]:
        """Seconds of a step, and whether they depend on the host's rates."""
        if hardware.locked_bytes is not None:
            hardware = with_pageable(hardware, self.host_bytes(choice))
        if choice not in self._scripts:
            self._scripts.clear()
            script = Script([self.schedule(choice)], self.optimizer, fused=self.fused)
            self._scripts[choice] = script
        timeline = simulate_script(self._scripts[choice], hardware, steps=3)
        return timeline.step_s, timeline.uses_host

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

    def _streamed(self, choice: Choice) -> Choice:
        return replace(choice, places=self.here.without_disk, saved_on_disk=0)

    def _buffer_bytes(self, choice: Choice) -> float:
        """Device memory that is left next to new residents, which occupy theirs permanently."""
        new = choice.places.resident - self.here.resident
        return self.budget_bytes - self.resident_bytes(new, gradients=self.gradients_stay)

    def resident_bytes(self, keys: Collection[int], *, gradients: bool) -> float:
        """Device memory of resident buckets, with or without their gradients."""
        size, trained = self.optimizer.resident_bytes, self.trained
        return sum(
            size(bucket, trained.get(bucket.key, ()), gradients=gradients)
            for bucket in self.buckets
            if bucket.key in keys
        )

    def fits_exactly(self, choice: Choice) -> bool:
        """Like `fits`, but exact: computes the peak of the choice itself, which is slower."""
        if self._buffer_bytes(choice) < 0 or not self.fits_host(choice):
            return False
        return self.peak_bytes(choice) <= self.budget_bytes

    def lacking(self, choice: Choice) -> dict[str, int]:
        """Bytes that a choice needs beyond each budget; empty if it fits."""
        host, disk = self.host_budget_bytes, self.disk_budget_bytes or 0
        found = {
            DEVICE: self.peak_bytes(choice) - self.budget_bytes,
            HOST: 0 if host is None else self.host_bytes(choice) - host,
            DISK: self.disk_bytes(choice) - disk,
        }
        return {memory: size for memory, size in found.items() if size > 0}

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

    def fewest_residents(self, like: Choice | None = None) -> int | None:
        """The fewest residents for which the other buckets fit elsewhere, with the rest of the
        choice `like`; None if even all of them are not enough."""
        for count in range(len(self.candidates) + 1):
            choice = replace(like or Choice(), places=self.places(count))
            if self.fits_host(self.settled(choice)):
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
        """The most stages that can be kept between `least`, which is known to fit, and `most`.

        The peak is a convex function of the number: it is flat while the peak is elsewhere in the
        step, then rises by a stage's saved tensors. So it is below the chord between two known
        peaks. The number on the chord fits; if the next one does not, it is the most.
        """
        streamed, buffer = self._streamed(choice), self._buffer_bytes(choice)
        if self.peak_bytes(replace(streamed, keep=most)) <= buffer:
            return most
        known, halve = self._known(streamed), False
        while True:
            low = max(k for k, peak in known.items() if peak <= buffer and k <= most)
            high = min(k for k, peak in known.items() if peak > buffer and k <= most)
            share = (buffer - known[low]) / (known[high] - known[low])
            on_chord = min(low + math.floor(share * (high - low)), high - 1)
            if on_chord + 1 == high:
                return max(on_chord, least)
            middle = max(on_chord + 1, (low + high) // 2 if halve else 0)
            self.peak_bytes(replace(streamed, keep=middle))
            halve = not halve

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
