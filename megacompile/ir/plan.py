"""Plans as data: a row a bucket, for where it lives and what updates it; a row a stage, for what it
saves, and where that waits.

    Choice     what a search varies: a table of buckets, and how many stages are kept, wait, ...
    Plan       what passes read: the choice written out for the buckets and stages of a schedule
    Placement  what the runtime keeps: the table of the buckets as they are now

`megacompile.passes.schedule.make_plan` makes a `Plan` of a `Choice`.
"""

from __future__ import annotations

import enum
import functools
import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from megacompile.ir.buckets import Bucket

LARGE = 1.5  # times the median: what goes to the disk last, and lives on the device first


class Tier(enum.Enum):
    """A memory that something is in."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"

    __hash__ = object.__hash__  # a member is one object; Enum hashes its name, in Python


class Updater(enum.Enum):
    """The place where a bucket is updated."""

    HOST = "host"  # in `optimizer.step()`
    DEVICE = "device"  # in `optimizer.step()`
    BACKWARD = "backward"  # the device, in the backward

    __hash__ = object.__hash__


class SavedPart(enum.Enum):
    """The part of its saved tensors that a stage saves for its backward."""

    ALL = "kept"
    HALF = "half kept"  # the rest is computed again
    INPUTS = "recomputed"  # what it is computed again from

    __hash__ = object.__hash__


class BucketPlan(NamedTuple):
    """The place of one bucket, and of its update."""

    weights: Tier = Tier.HOST
    states: Tier = Tier.HOST  # optimizer states; on the device if and only if the weights are
    updater: Updater = Updater.HOST  # known in a `Plan`
    stays: bool = False  # it keeps its slot from one forward to the next; known in a `Plan`


class StagePlan(NamedTuple):
    """The way one stage saves for its backward, and runs."""

    saved: SavedPart = SavedPart.INPUTS
    tier: Tier = Tier.DEVICE  # where that waits
    rerun: bool = False  # its outputs are not saved: it runs again in the backward
    tiles: int = 1  # in which what acts on each token alone runs
    samples: bool = False  # these tiles are of whole samples, and all of the stage runs in them


ON_HOST = BucketPlan()
RESIDENT = BucketPlan(Tier.DEVICE, Tier.DEVICE)  # it lives on the device, and is not streamed


class Places(Mapping[int, BucketPlan]):
    """The places where buckets live: a row for each that is not all on the host, by its key.

    Other keys stand for buckets on the host. Tables are immutable; `len()` counts the rows.
    """

    def __init__(self, rows: Mapping[int, BucketPlan] | None = None) -> None:
        self._rows = {key: row for key, row in (rows or {}).items() if row != ON_HOST}

    @staticmethod
    def of(
        resident: Iterable[int] = (),
        on_disk: Iterable[int] = (),
        weights_on_disk: Iterable[int] = (),
    ) -> Places:
        """The table of residents, and of streamed buckets with states or weights on the disk."""
        rows = {key: BucketPlan(states=Tier.DISK) for key in on_disk}
        for key in weights_on_disk:
            rows[key] = rows.get(key, ON_HOST)._replace(weights=Tier.DISK)
        return Places(rows | dict.fromkeys(resident, RESIDENT))

    def changed(self, keys: Iterable[int], **parts: Any) -> Places:
        """With these parts of the rows of some buckets replaced."""
        return Places(self._rows | {key: self[key]._replace(**parts) for key in keys})

    def taken(self, keys: Iterable[int], other: Places) -> Places:
        """With the rows that another table has of some buckets."""
        return Places(self._rows | {key: other[key] for key in keys})

    def only(self, keys: Collection[int]) -> Places:
        """The rows of some buckets."""
        return Places({key: row for key, row in self._rows.items() if key in keys})

    @functools.cached_property
    def resident(self) -> frozenset[int]:
        """Keys of the buckets that live on the device."""
        return self.those(lambda row: row.weights is Tier.DEVICE)

    @functools.cached_property
    def on_disk(self) -> frozenset[int]:
        """Keys of the buckets whose states are on the disk."""
        return self.those(lambda row: row.states is Tier.DISK)

    @functools.cached_property
    def weights_on_disk(self) -> frozenset[int]:
        """Keys of the buckets whose weights are on the disk."""
        return self.those(lambda row: row.weights is Tier.DISK)

    @functools.cached_property
    def without_disk(self) -> Places:
        """The same, with everything on the host that is on the disk."""
        return Places.of(self.resident)

    def those(self, holds: Callable[[BucketPlan], bool]) -> frozenset[int]:
        """Keys of the buckets whose row is of a kind."""
        return frozenset(key for key, row in self._rows.items() if holds(row))

    def __getitem__(self, key: int) -> BucketPlan:
        return self._rows.get(key, ON_HOST)

    def __iter__(self) -> Iterator[int]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Places) and self._rows == other._rows)

    @functools.cached_property
    def _hash(self) -> int:
        return hash(frozenset(self._rows.items()))

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        rows = (f"{k}: {r.weights.value}, {r.states.value}" for k, r in sorted(self._rows.items()))
        return f"Places({'; '.join(rows)})"


@dataclass(frozen=True, slots=True)
class Choice:
    """The decisions that a plan is made from."""

    keep: int = 1  # stages, counted from the last, whose saved tensors are kept
    places: Places = Places()  # where buckets live
    device_update: float = 0.0  # the share of the streamed parameters that the device updates
    more_slots: int = 0  # than were asked for
    offload: int = 0  # of the first stages: what their recomputes take waits on the host
    saved_on_disk: int = 0  # of these, the first ones: it goes on from there to the disk
    rerun: int = 0  # stages whose outputs are computed again in the backward, not saved
    state_lookahead: int | None = None  # stages that states are fetched ahead; None: as weights
    state_delay: int = 1  # backwards that are issued before one waits for states to leave
    saved_on_host: int = 0  # other stages that are kept, with their saved tensors on the host
    halves: bool = False  # all kept stages but the last keep half, and compute the rest again
    tiles: int = 1  # in which what acts on each token alone runs
    stay: int = 0  # streamed buckets that keep their slots between forwards without a backward

    @property
    def computing(self) -> Choice:
        """The part that changes what is computed, and what is saved for that: not where buckets
        live, who updates them, and when they come and go."""
        where = Choice()
        return replace(
            self,
            places=where.places,
            saved_on_disk=where.saved_on_disk,
            device_update=where.device_update,
            more_slots=where.more_slots,
            state_lookahead=where.state_lookahead,
            state_delay=where.state_delay,
        )

    def __str__(self) -> str:
        return f"{self.keep} stages kept, {len(self.places.resident)} buckets resident"


@dataclass(frozen=True)
class Plan:
    """The decisions that a schedule is built from, for its buckets and its stages."""

    places: Places = Places()  # a row a bucket
    stages: tuple[StagePlan, ...] = ()  # a row a stage
    reasons: tuple[str, ...] = ()
    state_delay: int = 1  # backwards that are issued before one waits for states to leave
    saved_delay: int = 1  # forwards that are issued before one waits for saved tensors to leave
    state_sets: int = 0  # sets of host buffers that states on a disk come to, one a bucket
    state_set_bytes: int = 0  # of each, as far as is known
    saved_sets: int = 0  # host buffers of saved tensors on their way to a disk, and as many back
    weight_sets: int = 0  # host buffers that prefetches copy weights on a disk from
    new_weight_sets: int = 0  # host buffers in which updates leave them, until they are written
    cuda_graphs: int = 0  # captures of the only stage that the device holds, forward and backward

    # Keys of the buckets, and indices of the stages, of a kind.

    @property
    def resident(self) -> frozenset[int]:
        """Buckets that live on the device."""
        return self.places.resident

    @property
    def on_disk(self) -> frozenset[int]:
        """Buckets whose states are on a disk."""
        return self.places.on_disk

    @property
    def weights_on_disk(self) -> frozenset[int]:
        """Buckets whose weights are on a disk."""
        return self.places.weights_on_disk

    @functools.cached_property
    def device_update(self) -> frozenset[int]:
        """Streamed buckets that `optimizer.step()` updates on the device."""
        return self.places.those(
            lambda row: row.updater is Updater.DEVICE and row.weights is not Tier.DEVICE
        )

    @functools.cached_property
    def stay(self) -> frozenset[int]:
        """Buckets that keep their slots from one forward to the next."""
        return self.places.those(lambda row: row.stays)

    @functools.cached_property
    def keep(self) -> frozenset[int]:
        """Stages whose saved tensors are kept, all or half of them, not recomputed."""
        return frozenset(
            i for i, row in enumerate(self.stages) if row.saved is not SavedPart.INPUTS
        )

    @functools.cached_property
    def offload(self) -> frozenset[int]:
        """Stages whose saved values wait on the host, or go on from there to a disk."""
        return self._stages(lambda row: row.tier is not Tier.DEVICE)

    @functools.cached_property
    def saved_on_disk(self) -> frozenset[int]:
        """Stages whose saved values go on from the host to a disk."""
        return self._stages(lambda row: row.tier is Tier.DISK)

    @functools.cached_property
    def rerun(self) -> frozenset[int]:
        """Stages whose outputs are not saved, but computed again."""
        return self._stages(lambda row: row.rerun)

    def _stages(self, holds: Callable[[StagePlan], bool]) -> frozenset[int]:
        return frozenset(i for i, row in enumerate(self.stages) if holds(row))


@dataclass(frozen=True, slots=True)
class Placement:
    """The places where the buckets of a model are now. The runtime keeps it, and plans are made for
    it."""

    places: Places = Places()
    accumulates: bool = False  # may a forward find gradients there, of a backward before it?
    stays: str = ""  # why no bucket may go elsewhere; "": they may

    def moving(self, now: Placement) -> frozenset[int]:
        """Keys of the buckets whose weights go elsewhere, from where they are now."""
        keys = self.places.keys() | now.places.keys()
        return frozenset(
            key for key in keys if self.places[key].weights is not now.places[key].weights
        )


def first_to_disk(buckets: Sequence[Bucket], trained: Collection[int]) -> list[Bucket]:
    """Buckets in the order in which their weights go to a disk, where host memory is short.

    Frozen ones are only read, so they come first. Those that are much larger than most come last:
    each buffer that a disk is read into is as large as the largest. The first few of the others are
    far from one another, however many they are, so that a drive has work all through a step.

    Args:
        buckets: in forward order.
        trained: keys of those that have a parameter which gets a gradient.
    """
    usual = LARGE * statistics.median(bucket.size_bytes for bucket in buckets) if buckets else 0
    bits = len(buckets).bit_length()

    def place(i: int) -> tuple[int, bool, str]:
        size = buckets[i].size_bytes
        return size if size > usual else 0, buckets[i].key in trained, f"{i + 1:0{bits}b}"[::-1]

    return [buckets[i] for i in sorted(range(len(buckets)), key=place)]
