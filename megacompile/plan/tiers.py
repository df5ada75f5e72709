"""Chooses which states, parameters and saved tensors go to the disk, and sizes host and disk.

States are faster on the host, so as few buckets as necessary have theirs on the disk. Which ones
depends on when a step uses them.

    exact            the last ones in forward order. Reads begin with `optimizer.step()`, and the
                     next forward waits for updates in its order. So the drive has until the end of
                     that forward for the last ones, and no other update waits for theirs.
    in the backward  evenly spread, except for the end of the forward, where the backward begins.
                     Reads run a few uses ahead, so the drive works during the whole backward.
                     Neighboring buckets would wait for the drive, and leave it idle before and
                     after.

If moving all states is not enough, the parameters of as few buckets as necessary follow, provided
that the search found nothing else (`megacompile.ir.plan.first_to_disk` orders them).

If that is not enough, saved tensors that wait on the host follow, from as few stages as necessary:
the first ones, whose tensors wait the longest. Like states, they are written and read in each step,
and a stage's saved tensors are usually larger than its 8-bit states.

Buckets that are much larger than most (an embedding, a head) come last, because each set of buffers
must be as large as the largest of them. So must each slot; therefore large buckets become resident
before most others if the backward takes states from a disk (`Problem.with_residents`).

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
from megacompile.passes.schedule.insert_disk import SAVED_SETS

_SPREAD = 0.9  # of the buckets, in forward order


def spread(buckets: Sequence[Bucket], count: int) -> list[Bucket]:
    """`count` of the buckets, evenly spread."""
    return [buckets[(2 * i + 1) * len(buckets) // (2 * count)] for i in range(count)]


def _with(choice: Choice, keys: Iterable[int], **parts: Tier) -> Choice:
    """The choice with some buckets' weights or states moved."""
    return replace(choice, places=choice.places.changed(keys, **parts))


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Bytes of a streamed bucket."""

    rest: int  # on the host in any case
    states: int
    parameters: int
    stored: int  # states on the disk
    weights: int  # parameters on the disk


@dataclass(eq=False, kw_only=True)
class Tiers:
    """Host and disk of a problem.

    Args:
        buckets: in forward order.
        trained: the parameters that get a gradient, bucket key -> indices.
        optimizer: its costs.
        host_bytes: the budget of host memory; None: unknown.
        disk_bytes: the budget of the disk; None: no disk.
        elsewhere_bytes: host memory of the buckets that this graph does not read.
        here: places of the buckets that may not move.
        undecided: keys of the buckets whose states and parameters may move to the disk.
        accumulates: gradients of micro-batches wait on the host, wherever updates run.
        waiting: returns a choice's saved tensors on the host or disk as (stage, bytes).
        plan_of_all: returns the plan of a draft with all states on the disk, which has the number
            of buffer sets for states and parameters.
        disk_weights: put the parameters of streamed buckets on the disk too; False: no more than
            are there already; None: as few as necessary.
        disk_saved: saved tensors that wait on the host go on to the disk; None: as few as
            necessary.
        offloads: saved tensors wait on the host or disk, whatever the choice.
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
    host_too_small: bool = field(default=False, init=False)  # for some queried choice

    def of_host(self, choice: Choice) -> int:
        """Host memory during training, including gradients and states."""
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
        """Disk space of a choice."""
        on_disk, with_weights = choice.places.on_disk, self._weights(choice)
        weights = sum(self._of(b).weights for b in self.buckets if b.key in with_weights)
        states = sum(self._of(b).stored for b in self.buckets if b.key in on_disk)
        return weights + states + sum(map(whole_pages, self._saved(choice)[1]))

    def _weights(self, choice: Choice) -> frozenset[int]:
        """Keys of the buckets with parameters on the disk."""
        if self.disk_weights:
            return frozenset(bucket.key for bucket in self.buckets) - choice.places.resident
        return choice.places.weights_on_disk

    def _saved(self, choice: Choice) -> tuple[list[int], list[int]]:
        """Sizes of the saved tensors that wait on the host and on the disk."""
        each = self._each(choice)
        count = math.inf if self.disk_saved else choice.saved_on_disk
        on_host = [size for index, size in each if index >= count]
        return on_host, [size for index, size in each if index < count]

    def _each(self, choice: Choice) -> Sequence[tuple[int, int]]:
        waits = choice.offload or choice.saved_on_host or self.offloads
        return self.waiting(choice) if waits else ()

    def fit(self, choice: Choice) -> bool:
        """True if a choice fits both known budgets."""
        if self.host_bytes is not None and self.of_host(choice) > self.host_bytes:
            self.host_too_small = True
            return False
        return self.of_disk(choice) <= (self.disk_bytes or 0)

    def settled(self, choice: Choice) -> Choice:
        """The choice with as few states on the disk as necessary for the rest to fit on the host,
        or as many as the disk holds if that is not enough or host memory is unknown. If it is not
        enough, parameters of as few buckets as necessary follow, and then saved tensors of as few
        stages."""
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
        """The choice with the parameters of some buckets on the disk too, if moving all states is
        not enough: of as few as necessary, or of the number that needs the least host memory."""
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
        found = self._first_that_fits(chosen, sizes, over)
        return found or min(map(chosen, range(most + 1)), key=self.of_host)

    def _first_that_fits(
        self, chosen: Callable[[int], Choice], sizes: Iterable[int], over: int
    ) -> Choice | None:
        """The first of `chosen(0)`, `chosen(1)`, ... that fits; None if none does.

        Args:
            sizes: the most host bytes that each further bucket can free.
            over: host bytes missing in `chosen(0)`.
        """
        saved = list(itertools.accumulate(sizes, initial=0))
        choices = map(chosen, range(bisect.bisect_left(saved, over), len(saved)))
        return next(filter(self.fit, choices), None)

    def _without_large_states(self, choice: Choice) -> Choice:
        """The choice without large states on the disk: their buffers may take more host memory than
        the states themselves."""
        states = {b.key: self._of(b).states for b in self.buckets if b.key in choice.places.on_disk}
        usual = LARGE * statistics.median(states.values()) if states else 0
        large = {key for key, size in states.items() if size > usual}
        return _with(choice, large & self.undecided, states=Tier.HOST)

    @functools.cached_property
    def _first_to_disk(self) -> Sequence[Bucket]:
        return first_to_disk(self.buckets, {key for key in self.trained if self.trained[key]})

    def _with_saved(self, choice: Choice) -> Choice:
        """The choice with saved tensors on the disk, if that makes it fit."""
        if self.disk_saved is not None or self.host_bytes is None or self.fit(choice):
            return choice
        each = self._each(choice)
        for last in sorted({index for index, _ in each}):
            if self.fit(more := replace(choice, saved_on_disk=last + 1)):
                return more
        return choice

    def _fewest(self, choice: Choice) -> Choice:
        """The choice with the states of as few buckets as necessary on the disk; see `settled`."""
        order = [b for b in self.buckets if b.key in self.undecided - choice.places.resident]
        order = [bucket for bucket in order if self._of(bucket).stored]
        places = itertools.accumulate(sorted(self._of(bucket).stored for bucket in order))
        left = (self.disk_bytes or 0) - self.of_disk(choice)
        most = sum(place <= left for place in places)  # an upper bound: the smallest that fit

        def chosen(count: int) -> Choice:
            keys = (bucket.key for bucket in self._picked(order, count))
            return _with(choice, keys, states=Tier.DISK)

        if self.host_bytes is not None:
            gains = sorted((self._of(bucket).states for bucket in order), reverse=True)
            over = self.of_host(chosen(0)) - self.host_bytes
            self.host_too_small |= over > 0
            if (found := self._first_that_fits(chosen, gains[:most], over)) is not None:
                return found
        while most and self.of_disk(chosen(most)) > (self.disk_bytes or 0):
            most -= 1
        return chosen(most)

    def _picked(self, order: Sequence[Bucket], count: int) -> Sequence[Bucket]:
        """The best `count` buckets; see the module's docstring."""
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
        """Bytes of the buffer sets for states from the disk."""
        if not on_disk:
            return 0
        largest = max((self._of(b).stored for b in self.buckets if b.key in on_disk), default=0)
        return largest * min(len(on_disk), self._plan.state_sets)

    def _staged_weights(self, choice: Choice) -> int:
        """Bytes of the buffers for parameters from and to the disk."""
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
