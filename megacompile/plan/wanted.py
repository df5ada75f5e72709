"""The places where the buckets of a model are to be: as its plans have decided, and for code that
is not captured.

The first plan that reads a bucket decides about it, and all later ones are made with that. Code
that is not captured fetches what is elsewhere at each use, and computes nothing meanwhile. So what
it reads lives on the device, where plans leave room. No plan counts what such code computes: half
of the room is for that. Only buckets that no plan has decided about come into question, and a plan
that reads one decides about it. They leave where a plan finds no room next to them, and where the
device runs out of memory: then they go back to where they were.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from megacompile.ir.buckets import Bucket
from megacompile.ir.plan import RESIDENT, BucketPlan, Choice, Placement, Places, Tier
from megacompile.ir.schedule import Schedule
from megacompile.options import Options

_SHARE = 0.5  # of the room, for buckets; the rest is for what their code computes


@dataclass(frozen=True, slots=True)
class OpenTo:
    """The decisions that are open to a plan: of which buckets, by their keys."""

    residents: frozenset[int] = frozenset()  # whether they live on the device
    states: frozenset[int] = frozenset()  # whether their states are on the disk
    weights: frozenset[int] = frozenset()  # whether their weights are

    @property
    def keys(self) -> frozenset[int]:
        """Buckets about which there is anything to decide; where weights are open, states are."""
        return self.residents | self.states

    def closed(self, places: Places) -> Places:
        """The part of a table about which there is nothing to decide."""
        return Places.of(
            places.resident - self.residents,
            places.on_disk - self.states,
            places.weights_on_disk - self.weights,
        )


class WantedPlaces:
    """The places where buckets are to be; a model's plans have one for all of them.

    Args:
        options: of the model.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self._places: Places | None = None  # as plans have it; None: where the buckets are
        self._decided: frozenset[int] = frozenset()  # keys: plans have decided about these
        self._stored: frozenset[int] = frozenset()  # the same, of their states and weights
        self._uncaptured = _Uncaptured(
            BucketPlan(
                Tier.DISK if options.disk_weights else Tier.HOST,
                Tier.HOST if options.disk is None else Tier.DISK,
            )
        )

    @property
    def known(self) -> bool:
        """True if a plan has said where buckets are to be."""
        return self._places is not None

    def places(self, now: Placement) -> Places:
        """The places of all buckets, as far as is decided.

        Args:
            now: where the buckets are.
        """
        places = now.places if self._places is None else self._places
        return self._uncaptured.placed(places, now)

    def placement(self, now: Placement) -> Placement:
        """The placement that is wanted; weights stay where nothing may move."""
        places = self.places(now)
        if now.stays:
            stored = now.places.weights_on_disk
            places = Places.of(places.resident, places.on_disk, stored)
        return replace(now, places=places)

    def open_to(self, schedule: Schedule, now: Placement, *, again: bool) -> OpenTo:
        """The decisions that are open to the plan of a captured graph.

        Args:
            again: residents may leave the device, where a plan has put them.
        """
        own = frozenset(bucket.key for bucket in schedule.buckets)
        none = frozenset[int]()
        stay = self.options.resident is not None or now.stays
        reopened = self.places(now).resident if again else none
        residents = none if stay else own - (self._decided - reopened)
        states = none if self.options.disk is None else own - self._stored
        move = self.options.may_store_weights and not now.stays
        return OpenTo(residents, states, states if move else none)

    def decide(self, open_to: OpenTo, choice: Choice, now: Placement) -> None:
        """A plan has decided what was open to it."""
        if not open_to.keys:
            return
        self._places = self.places(now).taken(open_to.keys, choice.places)
        self._decided |= open_to.residents
        self._stored |= open_to.states
        self._uncaptured.decided_by_plan(open_to.residents)

    def set(self, places: Places) -> None:
        """Buckets are to be there, whatever was decided."""
        self._places = places

    def forget(self) -> None:
        """Buckets are to be where they are."""
        self._places = None

    def reopen(self) -> None:
        """All may be decided again."""
        self._decided = self._stored = frozenset()

    # For code that is not captured.

    def note_fetches(
        self,
        buckets: Sequence[Bucket],
        read: Collection[int],
        size: Callable[[Bucket], float],
        room_bytes: Callable[[], float],
        now: Placement,
    ) -> None:
        """Such code reads buckets: as many of those that no plan has decided about live on the
        device as there is room for.

        Args:
            read: keys of the buckets that plans read.
            size: of one on the device, with gradients and states.
            room_bytes: that plans leave.
        """
        known = self._decided.union(read)
        new = self._uncaptured.new(bucket for bucket in buckets if bucket.key not in known)
        if new:
            self._uncaptured.decide(new, size, room_bytes(), now.places)

    def uncaptured_bytes(self) -> int:
        """Device memory of the buckets that live there for such code."""
        return self._uncaptured.all_bytes()

    def bytes_next_to(self, schedule: Schedule, now: Placement) -> int:
        """Device memory of those of them that a captured graph does not read."""
        own = {bucket.key for bucket in schedule.buckets}
        return self._uncaptured.next_to(own, self.places(now).resident)

    def leave(self) -> None:
        """A plan finds no room next to them: they leave."""
        self._uncaptured.leave()

    def end(self) -> bool:
        """The device ran out of memory. True if some leave for that; none comes any more."""
        return self._uncaptured.end()


class _Uncaptured:
    """Buckets that live on the device because code reads them that is not captured, and those that
    are to leave.

    Args:
        home: where a bucket is that no plan has decided about.
    """

    def __init__(self, home: BucketPlan) -> None:
        self.home = home
        self._bytes: dict[int, float] = {}  # of those that live there, by key
        self._before: dict[int, BucketPlan] = {}  # where they were
        self._asked: frozenset[int] = frozenset()  # keys of those that were decided about
        self._leaving: frozenset[int] = frozenset()  # keys
        self._ended = False  # did the device run out of memory with them?

    def new(self, buckets: Iterable[Bucket]) -> list[Bucket]:
        """Those of some buckets that are still to be decided about."""
        if self._ended:
            return []
        return [bucket for bucket in buckets if bucket.key not in self._asked]

    def decide(
        self,
        buckets: Collection[Bucket],
        size: Callable[[Bucket], float],
        room_bytes: float,
        now: Places,
    ) -> None:
        """Decides which of some buckets live on the device: as many as fit, the first ones first;
        those that are there already stay."""
        self._asked = self._asked.union(bucket.key for bucket in buckets)
        left = _SHARE * room_bytes - self.all_bytes()
        for bucket in sorted(buckets, key=lambda bucket: bucket.key not in now.resident):
            there, size_bytes = bucket.key in now.resident, size(bucket)
            if there or size_bytes <= left:
                self._bytes[bucket.key] = size_bytes
                self._before[bucket.key] = self.home if there else now[bucket.key]
                left -= size_bytes

    def next_to(self, own: Collection[int], resident: frozenset[int]) -> int:
        """Bytes that they take next to a graph that reads the buckets `own`.

        Args:
            resident: keys of all buckets that are to live on the device.
        """
        keys = resident.intersection(self._bytes).difference(own)
        return int(sum(self._bytes[key] for key in keys))

    def all_bytes(self) -> int:
        """Bytes that they take together."""
        return int(sum(self._bytes.values()))

    def leave(self) -> None:
        """A plan finds no room next to them."""
        self._leaving = self._leaving.union(self._bytes)
        self._bytes.clear()

    def end(self) -> bool:
        """The device ran out of memory. True if some leave for that; none comes any more."""
        some, self._ended = bool(self._bytes), True
        self.leave()
        return some

    def decided_by_plan(self, keys: Collection[int]) -> None:
        """A plan has decided about buckets."""
        self._asked = self._asked.union(keys)
        self._leaving = self._leaving.difference(keys)
        for key in keys:
            self._bytes.pop(key, None)

    def placed(self, places: Places, now: Placement) -> Places:
        """The places that plans want, with these on the device, and without those that leave; where
        nothing may move, with those of these that are there."""
        if now.stays:
            stay = now.places.resident.intersection(self._bytes)
            return places.taken(stay, now.places)
        leaving = Places(self._before)
        places = places.taken(self._leaving & places.resident, leaving)
        return places.taken(self._bytes, Places(dict.fromkeys(self._bytes, RESIDENT)))
