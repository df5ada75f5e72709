"""Plans as data: a row per bucket for its place and its updater, and a row per stage for its saved
tensors and their place. A search has a `Choice`, which `megacompile.passes.schedule.make_plan`
expands to the `Plan` of a schedule; the runtime has a `Placement`.
"""

from __future__ import annotations

import enum
import functools
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from megacompile.ir.buckets import Bucket

LARGE = 1.5  # times the median: such buckets go to the disk last and to the device first


class Tier(enum.Enum):
    """A kind of memory."""

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
    HALF = "half kept"  # the rest is recomputed
    INPUTS = "recomputed"  # the inputs of the recompute

    __hash__ = object.__hash__


class BucketPlan(NamedTuple):
    """The place of one bucket, and of its update."""

    weights: Tier = Tier.HOST
    states: Tier = Tier.HOST  # optimizer states; on the device if and only if the weights are
    updater: Updater = Updater.HOST  # set in a `Plan`
    stays: bool = False  # keeps its slot between forwards; set in a `Plan`


class StagePlan(NamedTuple):
    """The saved tensors of one stage, and its execution."""

    saved: SavedPart = SavedPart.INPUTS
    tier: Tier = Tier.DEVICE  # where they are stored until the backward
    rerun: bool = False  # its outputs are not saved: it reruns in the backward
    tiles: int = 1  # for tokenwise operations

    @property
    def treatment(self) -> str:
        """ "kept", "half kept on the host", "recomputed, offloaded", "recomputed, 16 tiles", ..."""
        words = self.saved.value
        if self.tier is not Tier.DEVICE:
            words += ", offloaded" if self.saved is SavedPart.INPUTS else " on the host"
        words += ", outputs too" if self.rerun else ""
        return words + (f", {self.tiles} tiles" if self.tiles > 1 else "")


ON_HOST = BucketPlan()
RESIDENT = BucketPlan(Tier.DEVICE, Tier.DEVICE)  # lives on the device, is not streamed


class Places(dict[int, BucketPlan]):
    """The places of buckets: bucket key -> row, for buckets not entirely on the host. Buckets
    without a row are on the host. Tables never change; `len()` counts the rows."""

    def __init__(self, rows: Mapping[int, BucketPlan] | None = None) -> None:
        super().__init__({key: row for key, row in (rows or {}).items() if row != ON_HOST})

    @staticmethod
    def of(
        resident: Iterable[int] = (),
        on_disk: Iterable[int] = (),
        weights_on_disk: Iterable[int] = (),
    ) -> Places:
        """A table of residents, and of streamed buckets with states or weights on the disk."""
        rows = {key: BucketPlan(states=Tier.DISK) for key in on_disk}
        for key in weights_on_disk:
            rows[key] = rows.get(key, ON_HOST)._replace(weights=Tier.DISK)
        return Places(rows | dict.fromkeys(resident, RESIDENT))

    def changed(self, keys: Iterable[int], **parts: Any) -> Places:
        """The table with these fields replaced in some buckets' rows."""
        return Places({**self, **{key: self[key]._replace(**parts) for key in keys}})

    def taken(self, keys: Iterable[int], other: Places) -> Places:
        """The table with some buckets' rows taken from another table."""
        return Places({**self, **{key: other[key] for key in keys}})

    def only(self, keys: Collection[int]) -> Places:
        """The rows of some buckets."""
        return Places({key: row for key, row in self.items() if key in keys})

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
        """The table with everything on the disk moved to the host."""
        return Places.of(self.resident)

    def those(self, holds: Callable[[BucketPlan], bool]) -> frozenset[int]:
        """Keys of the buckets whose row is of a kind."""
        return frozenset(key for key, row in self.items() if holds(row))

    def __missing__(self, key: int) -> BucketPlan:
        return ON_HOST

    @functools.cached_property
    def _hash(self) -> int:
        return hash(frozenset(self.items()))

    def __hash__(self) -> int:  # type: ignore[override]
        return self._hash


@dataclass(frozen=True, slots=True)
class Choice:
    """The decisions that determine a plan."""

    keep: int = 1  # stages, counted from the last, whose saved tensors are kept
    places: Places = Places()  # where buckets live
    device_update: float = 0.0  # the share of the streamed parameters that the device updates
    offload: int = 0  # number of first stages whose recompute inputs are offloaded to the host
    saved_on_disk: int = 0  # of these, the number offloaded further to the disk
    rerun: bool = False  # every other stage reruns in the backward instead of saving its outputs
    state_lookahead: int | None = None  # lookahead of state fetches, in stages; None: like weights
    state_delay: int = 1  # backwards issued before one waits for offloaded states
    saved_on_host: int = 0  # number of other kept stages, with offloaded saved tensors
    halves: bool = False  # all kept stages but the last save half and recompute the rest
    tiles: int = 1  # for tokenwise operations
    stay: int = 0  # streamed buckets that keep their slots between forwards

    @property
    def computing(self) -> Choice:
        """The part that affects computation and saved tensors, without the buckets' places,
        updaters and transfer times."""
        moved = replace(self, places=Places(), saved_on_disk=0, device_update=0.0)
        return replace(moved, state_lookahead=None, state_delay=1)

    def __str__(self) -> str:
        return f"{self.keep} stages kept, {len(self.places.resident)} buckets resident"


@dataclass(frozen=True)
class Plan:
    """The decisions that a schedule is built from, for its buckets and its stages."""

    places: Places = Places()  # a row per bucket
    stages: tuple[StagePlan, ...] = ()  # a row per stage
    reasons: tuple[str, ...] = ()
    state_delay: int = 1  # backwards issued before one waits for offloaded states
    saved_delay: int = 1  # forwards issued before one waits for offloaded saved tensors
    state_sets: int = 0  # number of host buffer sets for states on a disk, one per bucket
    state_set_bytes: int = 0  # of each, as far as is known
    saved_sets: int = 0  # host buffers for saved tensors, per direction of the disk
    weight_sets: int = 0  # number of host buffers for prefetches of weights on a disk
    new_weight_sets: int = 0  # number of host buffers for updated weights until they are written
    cuda_graphs: int = 0  # number of CUDA graphs of the only stage, forward and backward

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
        """Stages that keep all or half of their saved tensors instead of recomputing."""
        return self._stages(lambda row: row.saved is not SavedPart.INPUTS)

    @functools.cached_property
    def offload(self) -> frozenset[int]:
        """Stages whose saved values are offloaded to the host or further to a disk."""
        return self._stages(lambda row: row.tier is not Tier.DEVICE)

    @functools.cached_property
    def saved_on_disk(self) -> frozenset[int]:
        """Stages whose saved values are offloaded to a disk."""
        return self._stages(lambda row: row.tier is Tier.DISK)

    @functools.cached_property
    def rerun(self) -> frozenset[int]:
        """Stages whose outputs are recomputed instead of saved."""
        return self._stages(lambda row: row.rerun)

    def _stages(self, holds: Callable[[StagePlan], bool]) -> frozenset[int]:
        return frozenset(i for i, row in enumerate(self.stages) if holds(row))


@dataclass(frozen=True, slots=True)
class Placement:
    """The current places of a model's buckets. Kept by the runtime; plans are made for it."""

    places: Places = Places()
    accumulates: bool = False  # a forward may find gradients of an earlier backward there
    stays: str = ""  # the reason why buckets must not move; "": they may

    def moving(self, now: Placement) -> frozenset[int]:
        """Keys of the buckets whose weights must move from their current place."""
        keys = self.places.keys() | now.places.keys()
        return frozenset(
            key for key in keys if self.places[key].weights is not now.places[key].weights
        )


def first_to_disk(buckets: Sequence[Bucket], trained: Collection[int]) -> list[Bucket]:
    """Buckets in the order in which their weights go to a disk if host memory is short. Frozen
    buckets are only read, so they come first. Buckets much larger than most come last: each disk
    read buffer must fit the largest. Any prefix of the others is spread over the model, so that the
    drive is busy during the whole step. `buckets` are in forward order; `trained`: keys of those
    with a parameter that gets a gradient."""
    usual = LARGE * statistics.median(bucket.size_bytes for bucket in buckets) if buckets else 0
    bits = len(buckets).bit_length()

    def place(i: int) -> tuple[int, bool, str]:
        size = buckets[i].size_bytes
        return size if size > usual else 0, buckets[i].key in trained, f"{i + 1:0{bits}b}"[::-1]

    return [buckets[i] for i in sorted(range(len(buckets)), key=place)]
