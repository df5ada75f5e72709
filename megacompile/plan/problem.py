"""The problem that a plan solves (a captured graph on a machine with budgets) and the costs of
choices.

Memory is computed by walking a choice's schedule, time by simulating it. Both are cached.
"""

from __future__ import annotations

import bisect
import itertools
import math
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from megacompile.cost.hardware import Hardware, with_pageable, with_slower_host
from megacompile.cost.memory import DeviceMemory, device_memory
from megacompile.cost.ops import computes_s
from megacompile.cost.simulate import Script, simulate_script
from megacompile.ir.buckets import Bucket
from megacompile.ir.plan import LARGE, Choice, Places, Tier
from megacompile.ir.schedule import Schedule
from megacompile.passes.schedule.make_plan import stages_on_host
from megacompile.plan.setting import Setting
from megacompile.plan.tiers import Drafts, Tiers, spread

DEVICE, HOST, DISK = "device memory", "host memory", "the disk"
_BUILT = 2  # cached drafts: the one measured for memory is often simulated next
_AT_ONCE = 3  # number of first buckets; they are updated last, and the next forward waits


@dataclass(frozen=True, eq=False, kw_only=True)
class Problem(Tiers):
    """The problem that a plan solves."""

    stages: int  # with a backward
    hardware: Hardware
    budget_bytes: int  # of device memory
    fused: bool = True  # elementwise operations are fused
    others: Sequence[Schedule] = ()  # of the other captured graphs, whose memory counts too
    undecided: Sequence[Bucket] | None = None  # that may become resident; None: all
    gradients_stay: bool = False  # residents' are on the device when a forward begins
    # Known costs of choices.
    _peaks: dict[Choice, dict[int, int]] = field(default_factory=dict, init=False)  # by kept stages
    _steps_s: dict[Choice, float] = field(default_factory=dict, init=False)
    _slower_s: dict[Choice, float] = field(default_factory=dict, init=False)
    _computes_s: dict[Choice, float] = field(default_factory=dict, init=False)
    _built: dict[Choice, Schedule] = field(default_factory=dict, init=False)  # the latest
    _scripts: dict[Choice, Script] = field(default_factory=dict, init=False)  # the latest
    _places: dict[int, Places] = field(default_factory=dict, init=False)  # by new residents

    @property
    def setting(self) -> Setting:
        """The options, and the machine."""
        return self.drafts.pipeline.setting

    @property
    def candidates(self) -> Sequence[Bucket]:
        """The buckets that may become resident."""
        return self.buckets if self.undecided is None else self.undecided

    def in_tiles(self, tiles: int) -> Problem:
        """The same problem with tokenwise pieces in `tiles` tiles."""
        drafts = self.drafts
        drafts = Drafts(drafts.pipeline, drafts.graphs, drafts.variant, tiles)
        return replace(self, drafts=drafts)

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
        """True if a choice fits the budgets. The estimate for the device is quick and slightly
        pessimistic: it ignores the slots that new residents free, and other device updates."""
        return self.fits_host(choice) and self._fits_device(choice)

    def _fits_device(self, choice: Choice) -> bool:
        if self.resident_bytes(choice.places.resident, gradients=True) > self.budget_bytes:
            return False  # at the end of the backward
        streamed, buffer = self._streamed(choice), self._buffer_bytes(choice)
        for delay in range(1, choice.state_delay):  # does not fit if a shorter delay does not
            if self._known(replace(streamed, state_delay=delay)).get(choice.keep, 0) > buffer:
                return False
        return self.peak_bytes(streamed) <= buffer

    def _streamed(self, choice: Choice) -> Choice:
        return replace(choice, places=self.here.without_disk, saved_on_disk=0)

    def _buffer_bytes(self, choice: Choice) -> float:
        """Device memory that new residents, which never free theirs, leave for the rest."""
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

        If updates in the backward may take states from a disk, only the first few stay in front,
        because the next forward needs their new parameters at once. Then come large buckets,
        because slots and buffers are as large as the largest streamed bucket, and then the rest,
        evenly spread.
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
        each = (replace(like or Choice(), places=self.places(n)) for n in self._counts)
        fits = (n for n, choice in enumerate(each) if self.fits_host(self.settled(choice)))
        return next(fits, None)

    @property
    def _counts(self) -> range:
        return range(len(self.candidates) + 1)

    def fewest_offloaded(self, choice: Choice) -> int | None:
        """The least number of first stages with offloaded inputs for which a choice fits on the
        device; None if even all of them are not enough."""

        def fits(count: int) -> bool:
            return self._fits_device(replace(choice, offload=count))

        if not fits(self.stages):
            return None
        return bisect.bisect_left(range(self.stages), True, key=fits)

    @property
    def may_rerun(self) -> bool:
        """True unless ranks share the model (see `Options.ranks`) or there is no stage to rerun:
        never the first or the last."""
        return self.stages > 2 and all(bucket.ranks == 1 for bucket in self.buckets)

    def most_residents(self, like: Choice) -> int | None:
        """The most residents that fit on the device with the rest of the choice `like`; None if
        none does. Ignores the slots that they free, as `fits` does."""
        each = ((n, replace(like, places=self.places(n))) for n in reversed(self._counts))
        return next((n for n, choice in each if self._fits_device(choice)), None)

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
        """The largest number of kept stages that fits, from `least`, which fits, to `most`.

        The peak is a convex function of the number, so it is below the chord between two known
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
        every, ahead = replace(choice, saved_on_host=self.stages), self.setting.options.lookahead
        return len(stages_on_host(self.drafts.graphs, every, lookahead=ahead))

    def peak_bytes(self, choice: Choice) -> int:
        """Peak device memory of a choice."""
        known = self._known(choice)
        if choice.keep not in known:
            known[choice.keep] = self.memory(choice).peak.total_bytes
        return known[choice.keep]

    def _known(self, choice: Choice) -> dict[int, int]:
        """The known peaks of choices like this one, by their number of kept stages. They do not
        depend on what is on the disk, unless the device updates buckets that are on the host."""
        place = replace(choice, keep=0, saved_on_disk=0)
        if not (choice.device_update or self.optimizer.helped):
            place = replace(place, places=place.places.without_disk)
        return self._peaks.setdefault(place, {})
