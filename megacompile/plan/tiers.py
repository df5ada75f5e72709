"""The parts of a choice on the host and on the disk: which states, parameters and saved tensors go.

States are faster on the host. So as few buckets as it takes have theirs on the disk: which, depends
on when a step uses them.

    exact            the last ones in forward order. Reads begin with `optimizer.step()`, and the
                     next forward waits for updates in its order: the drive has until the end of
                     that forward for the last ones, and no other update waits after theirs.
    in the backward  as far from one another as can be, but for the end of the forward, where the
                     backward begins. A read comes a few uses ahead of its own, so the drive works
                     all through the backward; next to one another they would wait for it, and leave
                     it idle before and after.

Parameters go there where all states are not enough, of as few buckets as it takes, if the search
has found nothing without (`megacompile.ir.plan.first_to_disk` says which).

Saved tensors that wait on the host go there where that is not enough, of as few stages as it takes:
the first ones, whose tensors wait the longest. They are written and read in each step, as
states are, and those of a stage are mostly larger than its states in 8 bits.

Buckets that are much larger than most (an embedding, a head) come last: each set of buffers has to
be as large as the largest of them. So has each slot, and where the backward takes states from a
disk, the large ones live on the device before most others do (`Problem.with_residents`).

Decision 28 has figures.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from megacompile.cost.memory import MemoryKind
from megacompile.cost.optimizer import OptimizerCost
from megacompile.cost.places import stored_bytes, stored_weights_bytes, streamed_bytes, whole_pages
from megacompile.ir.buckets import Bucket
from megacompile.ir.plan import LARGE, Choice, Places, Plan, Tier, first_to_disk
from megacompile.passes.schedule.disk import SAVED_SETS

_SPREAD = 0.9  # of the buckets, in forward order


def spread(buckets: Sequence[Bucket], count: int) -> list[Bucket]:
    """`count` of them, as far from one another as can be."""
    return [buckets[(2 * i + 1) * len(buckets) // (2 * count)] for i in range(count)]


def _with(choice: Choice, keys: Iterable[int], **parts: Tier) -> Choice:
    """With parts of the rows of some buckets replaced."""
    return replace(choice, places=choice.places.changed(keys, **parts))


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Bytes of one bucket that is streamed."""

    rest: int  # on the host, wherever states and parameters are
    states: int
    parameters: int
    stored: int  # of the states, on the disk
    weights: int  # of the parameters, there


@dataclass(eq=False, kw_only=True)
class Tiers:
    """Host and disk of a problem.

    Args:
        buckets: in forward order.
        trained: the parameters that get a gradient: bucket key -> indices.
        optimizer: what updates between two steps.
        host_bytes: the budget of host memory; None: not known.
        disk_bytes: the budget of the disk; None: there is no disk.
        elsewhere_bytes: host memory of the buckets that this graph does not read.
        here: where the buckets are that are not to move.
        undecided: keys of the buckets whose states may go to the disk, and parameters.
        accumulates: gradients of micro-batches wait on the host, whatever updates.
        waiting: saved tensors of a choice that wait on the host or on the disk: stage, bytes.
        plan_of_all: the plan of a draft where all states are on the disk: it says how many sets of
            buffers they need, and parameters.
        disk_weights: the parameters of streamed buckets are on the disk too; False: no more than
            do already; None: of as few as it takes.
        disk_saved: what waits on the host goes on to the disk; None: as little as it takes.
        offloads: saved tensors wait elsewhere, whatever is chosen.
    """

    buckets: Sequence[Bucket]
    trained: Mapping[int, Sequence[int]]
    optimizer: OptimizerCost
    host_bytes: int | None
    disk_bytes: int | None
    elsewhere_bytes: int
    here: Places
    undecided: frozenset[int]
    accumulates: bool
    waiting: Callable[[Choice], Sequence[tuple[int, int]]]
    plan_of_all: Callable[[], Plan]
    disk_weights: bool | None = False
    disk_saved: bool | None = None
    offloads: bool = False
    _sizes: dict[int, _Sizes] = field(default_factory=dict, init=False)
    _settled: dict[object, Choice] = field(default_factory=dict, init=False)
    host_too_small: bool = field(default=False, init=False)  # for something that was asked about

    def of_host(self, choice: Choice) -> int:
        """Host memory once training runs, with the gradients and states that are made by then."""
        size = self.elsewhere_bytes
        resident, on_disk = choice.places.resident, choice.places.on_disk
        weights = self._weights(choice)
        for bucket in self.buckets:
            if bucket.key not in resident:
                sizes = self._of(bucket)
                size += sizes.rest + (0 if bucket.key in on_disk else sizes.states)
                size += 0 if bucket.key in weights else sizes.parameters
        size += self._staged(on_disk) + self._staged_weights(choice)
        on_host, stored = self._saved(choice)
        return size + sum(on_host) + 2 * SAVED_SETS * max(stored, default=0)

    def of_disk(self, choice: Choice) -> int:
        """Bytes on the disk."""
        on_disk, there = choice.places.on_disk, self._weights(choice)
        weights = sum(self._of(b).weights for b in self.buckets if b.key in there)
        states = sum(self._of(b).stored for b in self.buckets if b.key in on_disk)
        return weights + states + sum(map(whole_pages, self._saved(choice)[1]))

    def _weights(self, choice: Choice) -> frozenset[int]:
        """Keys of the buckets whose parameters are there."""
        if self.disk_weights:
            return frozenset(bucket.key for bucket in self.buckets) - choice.places.resident
        return choice.places.weights_on_disk

    def _saved(self, choice: Choice) -> tuple[list[int], list[int]]:
        """Bytes of the saved tensors that wait on the host, and of those on the disk."""
        each = self._each(choice)
        count = math.inf if self.disk_saved else choice.saved_on_disk
        on_host = [size for index, size in each if index >= count]
        return on_host, [size for index, size in each if index < count]

    def _each(self, choice: Choice) -> Sequence[tuple[int, int]]:
        waits = choice.offload or choice.saved_on_host or self.offloads
        return self.waiting(choice) if waits else ()

    def fit(self, choice: Choice) -> bool:
        """True if it stays within both budgets, as far as they are known."""
        if self.host_bytes is not None and self.of_host(choice) > self.host_bytes:
            self.host_too_small = True
            return False
        return self.of_disk(choice) <= (self.disk_bytes or 0)

    def settled(self, choice: Choice) -> Choice:
        """The choice with the states of as few buckets on the disk as it takes for the others to
        fit on the host; where that is not known or not enough, of as many as the disk holds. Where
        it is not enough, with parameters of as few buckets there as it takes, and then with saved
        tensors of as few stages."""
        resident = choice.places.resident
        if self.disk_bytes is None:
            return replace(choice, places=choice.places.without_disk, saved_on_disk=0)
        like = (resident, choice.offload, choice.rerun, choice.saved_on_host)
        if like not in self._settled:
            already = Places.of(resident, self.here.on_disk, self.here.weights_on_disk)
            states = self._fewest(replace(choice, places=already, saved_on_disk=0))
            found = self._with_saved(self._with_weights(states))
            if self.disk_weights:
                found = _with(found, self._weights(found), weights=Tier.DISK)
            self._settled[like] = found
        found = self._settled[like]
        return replace(choice, places=found.places, saved_on_disk=found.saved_on_disk)

    def _with_weights(self, choice: Choice) -> Choice:
        """With parameters on the disk too, where all states are not enough: of as few buckets as it
        takes, or else of as many as the disk holds, if that needs less of the host."""
        if self.disk_weights is not None or self.host_bytes is None:
            return choice
        if self.of_host(choice) <= self.host_bytes:
            return choice
        choice = min(choice, self._without_large_states(choice), key=self.of_host)
        over = self.of_host(choice) - self.host_bytes
        free = self.undecided - choice.places.resident - choice.places.weights_on_disk
        order = [bucket for bucket in self._first_to_disk if bucket.key in free]
        left = (self.disk_bytes or 0) - self.of_disk(choice)
        places = itertools.accumulate(self._of(bucket).weights for bucket in order)
        most = sum(place <= left for place in places)

        def chosen(count: int) -> Choice:
            return _with(choice, (bucket.key for bucket in order[:count]), weights=Tier.DISK)

        sizes = (self._of(bucket).parameters for bucket in order[:most])
        saved = list(itertools.accumulate(sizes, initial=0))
        for count in range(bisect.bisect_left(saved, over), most + 1):
            if self.fit(chosen(count)):
                return chosen(count)
        return min(map(chosen, range(most + 1)), key=self.of_host)

    def _without_large_states(self, choice: Choice) -> Choice:
        """Their sets of buffers may take more of the host than they do."""
        states = {b.key: self._of(b).states for b in self.buckets if b.key in choice.places.on_disk}
        usual = LARGE * statistics.median(states.values()) if states else 0
        large = {key for key, size in states.items() if size > usual}
        return _with(choice, large & self.undecided, states=Tier.HOST)

    @functools.cached_property
    def _first_to_disk(self) -> Sequence[Bucket]:
        return first_to_disk(self.buckets, {key for key in self.trained if self.trained[key]})

    def _with_saved(self, choice: Choice) -> Choice:
        """With saved tensors on the disk, where that makes it fit."""
        if self.disk_saved is not None or self.host_bytes is None or self.fit(choice):
            return choice
        each = self._each(choice)
        for last in sorted({index for index, _ in each}):
            if self.fit(more := replace(choice, saved_on_disk=last + 1)):
                return more
        return choice

    def _fewest(self, choice: Choice) -> Choice:
        """With the states of as few buckets there as it takes; see `settled`."""
        order = [b for b in self.buckets if b.key in self.undecided - choice.places.resident]
        order = [bucket for bucket in order if self._of(bucket).stored]
        places = itertools.accumulate(sorted(self._of(bucket).stored for bucket in order))
        left = (self.disk_bytes or 0) - self.of_disk(choice)
        most = sum(place <= left for place in places)  # that the disk holds, were they the smallest

        def chosen(count: int) -> Choice:
            keys = (bucket.key for bucket in self._picked(order, count))
            return _with(choice, keys, states=Tier.DISK)

        if self.host_bytes is not None:
            gains = sorted((self._of(bucket).states for bucket in order), reverse=True)
            over = self.of_host(chosen(0)) - self.host_bytes
            self.host_too_small |= over > 0
            saved = list(itertools.accumulate(gains[:most], initial=0))
            for count in range(bisect.bisect_left(saved, over), most + 1):
                if self.fit(chosen(count)):
                    return chosen(count)
        while most and self.of_disk(chosen(most)) > (self.disk_bytes or 0):
            most -= 1
        return chosen(most)

    def _picked(self, order: Sequence[Bucket], count: int) -> Sequence[Bucket]:
        """`count` of them; see above."""
        if not count:
            return ()
        usual = LARGE * statistics.median(self._of(bucket).states for bucket in order)
        pool = [bucket for bucket in order if self._of(bucket).states <= usual]
        if count >= len(pool):
            larger = sorted(
                (bucket for bucket in order if bucket not in pool),
                key=lambda bucket: self._of(bucket).states,
            )
            return [*pool, *larger[: count - len(pool)]]
        if not self.optimizer.in_backward:
            return pool[len(pool) - count :]
        pool = pool[: max(count, math.ceil(_SPREAD * len(pool)))]
        return spread(pool, count)

    def _staged(self, on_disk: frozenset[int]) -> int:
        """Bytes of the sets of buffers that states from the disk come to."""
        if not on_disk:
            return 0
        largest = max((self._of(b).stored for b in self.buckets if b.key in on_disk), default=0)
        return largest * min(len(on_disk), self._plan.state_sets)

    def _staged_weights(self, choice: Choice) -> int:
        """Bytes of the buffers that parameters from the disk come to, and go there from."""
        if not (keys := self._weights(choice)):
            return 0
        sets = self._plan.weight_sets
        if any(self.trained.get(key) for key in keys):
            sets += self._plan.new_weight_sets
        return sets * max(self._of(b).weights for b in self.buckets if b.key in keys)

    @functools.cached_property
    def _plan(self) -> Plan:
        return self.plan_of_all()

    def _of(self, bucket: Bucket) -> _Sizes:
        if bucket.key not in self._sizes:
            trained = self.trained.get(bucket.key, ())
            kinds = streamed_bytes(bucket, trained, self.optimizer, accumulates=self.accumulates)
            states = kinds[MemoryKind.STATES]
            parameters = kinds[MemoryKind.PARAMETERS]
            rest = sum(kinds.values()) - states - parameters
            stored = stored_bytes(bucket, trained, self.optimizer)
            weights = stored_weights_bytes(bucket)
            self._sizes[bucket.key] = _Sizes(rest, states, parameters, stored, weights)
        return self._sizes[bucket.key]
