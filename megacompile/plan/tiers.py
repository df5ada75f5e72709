"""Builds drafts of choices, decides what goes to the disk, and sizes host and disk.

States are faster on the host, so as few buckets as necessary have theirs on the disk.

    exact            the last ones in forward order: the next forward needs them only at its end,
                     and no other update waits for theirs
    in the backward  evenly spread, except for the end of the forward, so that the drive works
                     during the whole backward

If that is not enough and the search found nothing else, the parameters of as few buckets as
necessary follow, in the order of `megacompile.ir.plan.first_to_disk`. Then saved tensors that wait
on the host follow, beginning with the first stages', which wait the longest. Among buckets, those
much larger than most (an embedding, a head) are the last to go, because each set of buffers must be
as large as the largest of them. Decision 28 has figures.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from megacompile.cost.memory import MemoryKind
from megacompile.cost.optimizer import OptimizerCost
from megacompile.cost.places import (
    saved_elsewhere,
    stored_bytes,
    stored_weights_bytes,
    streamed_bytes,
    whole_pages,
)
from megacompile.ir.buckets import Bucket
from megacompile.ir.capture import Variant
from megacompile.ir.plan import LARGE, Choice, Places, Plan, Tier, first_to_disk
from megacompile.ir.schedule import Schedule
from megacompile.passes.schedule.insert_disk import SAVED_SETS
from megacompile.plan.pipeline import Pipeline

_SPREAD = 0.9  # of the buckets, in forward order


class Drafts:
    """Builds drafts of one captured graph, schedules that are only simulated. `tiles` of tokenwise
    pieces overrides the choice's."""

    def __init__(
        self, pipeline: Pipeline, graphs: Schedule, variant: Variant, tiles: int | None = None
    ) -> None:
        self.pipeline, self.graphs, self.variant, self.tiles = pipeline, graphs, variant, tiles
        self._bundled: Schedule | None = None  # `graphs` in tiles, the start of every draft
        self._waiting: dict[Choice, list[tuple[int, int]]] = {}

    @property
    def cut(self) -> bool:
        """True if anything runs in tiles."""
        rows = self._with_plan(self._as_here(Choice())).plan.stages
        return any(row.tiles > 1 for row in rows)

    def of(self, choice: Choice) -> Schedule:
        """The draft of a choice."""
        choice = self._as_here(choice)
        saving = self.pipeline.saving(self._with_plan(choice), bundle=True)
        return self.pipeline.moving(saving, self.variant, choice)

    def waiting(self, choice: Choice) -> list[tuple[int, int]]:
        """The saved tensors that wait on the host or on a disk, as (stage, bytes)."""
        key = self._as_here(choice).computing
        if key not in self._waiting:
            saving = self.pipeline.saving(self._with_plan(key), bundle=True)
            self._waiting[key] = saved_elsewhere(saving)
        return self._waiting[key]

    def _as_here(self, choice: Choice) -> Choice:
        tiles = choice.tiles if self.tiles is None else self.tiles
        return replace(choice, tiles=tiles)

    def _with_plan(self, choice: Choice) -> Schedule:
        if self._bundled is None:
            self._bundled = self.pipeline.bundled(self.graphs, self.variant, self.tiles or 1)
        return self.pipeline.with_plan(self._bundled, self.variant, choice)


def spread(buckets: Sequence[Bucket], count: int) -> list[Bucket]:
    """`count` of the buckets, evenly spread."""
    return [buckets[(2 * i + 1) * len(buckets) // (2 * count)] for i in range(count)]


def _with(choice: Choice, buckets: Iterable[Bucket], **parts: Tier) -> Choice:
    """The choice with some buckets' weights or states moved."""
    keys = (bucket.key for bucket in buckets)
    return replace(choice, places=choice.places.changed(keys, **parts))


class _Sizes(NamedTuple):
    """Bytes of a streamed bucket."""

    rest: int  # on the host in any case
    states: int
    parameters: int
    stored: int  # states on the disk
    weights: int  # parameters on the disk


@dataclass(frozen=True, eq=False, kw_only=True)
class Tiers:
    """Buckets and saved tensors of a captured graph, and the budgets of host and disk."""

    drafts: Drafts  # builds schedules of choices
    buckets: Sequence[Bucket]  # in forward order
    optimizer: OptimizerCost
    host_budget_bytes: int | None = None  # for all buckets; None: unknown
    disk_budget_bytes: int | None = None  # None: no disk
    elsewhere_bytes: int = 0  # host memory of the buckets that this graph does not read
    here: Places = Places()  # of buckets that may not move and are not on the host
    trained: Mapping[int, Sequence[int]] = field(default_factory=dict)  # key -> with a gradient
    storable: frozenset[int] | None = None  # keys that may move to the disk; None: all
    accumulates: bool = False  # gradients of micro-batches wait for a later backward's update
    # parameters on the disk; False: no more than are there now; None: as few as necessary
    disk_weights: bool | None = False
    disk_saved: bool | None = None  # saved tensors that wait; None: as few as necessary
    offloads: bool = False  # saved tensors wait on the host or disk, whatever the choice
    _sizes: dict[int, _Sizes] = field(default_factory=dict, init=False)
    _settled: dict[object, Choice] = field(default_factory=dict, init=False)

    def host_bytes(self, choice: Choice) -> int:
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

    def disk_bytes(self, choice: Choice) -> int:
        """Disk space of a choice."""
        on_disk, with_weights = choice.places.on_disk, self._weights(choice)
        weights = sum(self._of(b).weights for b in self.buckets if b.key in with_weights)
        states = sum(self._of(b).stored for b in self.buckets if b.key in on_disk)
        return weights + states + sum(map(whole_pages, self._saved(choice)[1]))

    @functools.cached_property
    def _keys(self) -> frozenset[int]:
        return frozenset(bucket.key for bucket in self.buckets)

    def _weights(self, choice: Choice) -> frozenset[int]:
        """Keys of the buckets with parameters on the disk."""
        if self.disk_weights:
            return self._keys - choice.places.resident
        return choice.places.weights_on_disk

    def _saved(self, choice: Choice) -> tuple[list[int], list[int]]:
        """Sizes of the saved tensors that wait on the host and on the disk."""
        each = self._each(choice)
        count = math.inf if self.disk_saved else choice.saved_on_disk
        on_host = [size for index, size in each if index >= count]
        return on_host, [size for index, size in each if index < count]

    def _each(self, choice: Choice) -> Sequence[tuple[int, int]]:
        """The saved tensors that wait on the host or the disk, as (stage, bytes)."""
        waits = choice.offload or choice.saved_on_host or self.offloads
        return self.drafts.waiting(choice) if waits else ()

    def fits_host(self, choice: Choice) -> bool:
        """True if a choice fits the known budgets of host memory and disk."""
        host = self.host_budget_bytes
        fits = host is None or self.host_bytes(choice) <= host
        return fits and self.disk_bytes(choice) <= (self.disk_budget_bytes or 0)

    def settled(self, choice: Choice) -> Choice:
        """The choice with as few states on the disk as necessary for the rest to fit on the host,
        or as many as the disk holds if host memory is unknown. If that is not enough, parameters of
        as few buckets as necessary follow, and then saved tensors of as few stages."""
        resident = choice.places.resident
        if self.disk_budget_bytes is None:
            return replace(choice, places=choice.places.without_disk, saved_on_disk=0)
        like = (resident, choice.offload, choice.rerun, choice.saved_on_host)
        if like not in self._settled:
            already = Places.of(resident, self.here.on_disk, self.here.weights_on_disk)
            self._settled[like] = self._moved(replace(choice, places=already, saved_on_disk=0))
        found = self._settled[like]
        return replace(choice, places=found.places, saved_on_disk=found.saved_on_disk)

    def _moved(self, choice: Choice) -> Choice:
        storable = self._keys if self.storable is None else self.storable
        free = storable - choice.places.resident
        order = [b for b in self.buckets if b.key in free and self._of(b).stored]
        found = self._with_fewest(
            len(order),
            lambda count: _with(choice, self._picked(order, count), states=Tier.DISK),
        )
        if self.disk_weights is None and not self.fits_host(found):
            free -= choice.places.weights_on_disk
            trained = {key for key in self.trained if self.trained[key]}
            order = [b for b in first_to_disk(self.buckets, trained) if b.key in free]
            # buffers for large states may take more host memory than the states themselves
            stored = [b for b in self.buckets if b.key in found.places.on_disk]
            usual = self._usual_states(stored)
            large = [b for b in stored if self._of(b).states > usual and b.key in storable]
            less = _with(found, large, states=Tier.HOST)
            states = min(found, less, key=self.host_bytes)
            found = self._with_fewest(
                len(order), lambda count: _with(states, order[:count], weights=Tier.DISK)
            )
        found = self._with_saved(found)
        if self.disk_weights:
            streamed = [bucket for bucket in self.buckets if bucket.key in self._weights(found)]
            found = _with(found, streamed, weights=Tier.DISK)
        return found

    def _usual_states(self, buckets: Sequence[Bucket]) -> float:
        """Bytes of states above which a bucket counts as much larger than most."""
        return LARGE * statistics.median([self._of(b).states for b in buckets] or [0])

    def _with_fewest(self, count: int, moved: Callable[[int], Choice]) -> Choice:
        """The choice with as few of `count` buckets moved as necessary for the rest to fit on the
        host, or as many as the disk holds if that is not enough or host memory is unknown."""
        choices = [moved(n) for n in range(count + 1)]
        found = None
        if self.host_budget_bytes is not None:
            found = next(filter(self.fits_host, choices), None)
        disk = self.disk_budget_bytes or 0
        held = (each for each in reversed(choices) if self.disk_bytes(each) <= disk)
        return found or next(held, choices[0])

    def _with_saved(self, choice: Choice) -> Choice:
        """The choice with saved tensors on the disk, if that makes it fit."""
        if self.disk_saved is not None or self.host_budget_bytes is None or self.fits_host(choice):
            return choice
        counts = sorted({index + 1 for index, _ in self._each(choice)})
        more = (replace(choice, saved_on_disk=count) for count in counts)
        return next(filter(self.fits_host, more), choice)

    def _picked(self, order: Sequence[Bucket], count: int) -> Sequence[Bucket]:
        """The best `count` buckets; see the module's docstring."""
        if not count:
            return ()
        usual = self._usual_states(order)
        pool = [bucket for bucket in order if self._of(bucket).states <= usual]
        if count >= len(pool):
            larger = [bucket for bucket in order if bucket not in pool]
            larger.sort(key=lambda bucket: self._of(bucket).states)
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
        """The plan with all states on the disk, which has the number of buffer sets."""
        stored = self._keys if self.disk_weights is None else self.here.weights_on_disk
        places = Places.of(self.here.resident, self._keys, stored)
        return self.drafts.of(Choice(0, places)).plan

    def _of(self, bucket: Bucket) -> _Sizes:
        if bucket.key not in self._sizes:
            trained, cost = self.trained.get(bucket.key, ()), self.optimizer
            kinds = streamed_bytes(bucket, trained, cost, accumulates=self.accumulates)
            states, parameters = kinds.pop(MemoryKind.STATES), kinds.pop(MemoryKind.PARAMETERS)
            on_disk = stored_bytes(bucket, trained, cost), stored_weights_bytes(bucket)
            self._sizes[bucket.key] = _Sizes(sum(kinds.values()), states, parameters, *on_disk)
        return self._sizes[bucket.key]
