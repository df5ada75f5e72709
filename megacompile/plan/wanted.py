"""The places that plans and uncaptured code want a model's buckets to be in.

The first plan that reads a bucket decides about it, and all later plans keep that decision.
Uncaptured code fetches every streamed bucket at each use and waits for it. So the buckets that it
reads become resident if plans leave room. Half of the room is left for what such code computes,
because no plan counts it. Only buckets that no plan has decided about are eligible, and a plan that
reads one takes over the decision. They go back to where they were if a plan does not fit next to
them or the device runs out of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from megacompile.ir.buckets import Bucket
from megacompile.ir.plan import RESIDENT, BucketPlan, Choice, Placement, Places, Tier
from megacompile.ir.schedule import Schedule
from megacompile.options import Options

_SHARE = 0.5  # of the room, for buckets; the rest is for the code's tensors


@dataclass(frozen=True, slots=True)
class OpenTo:
    """The decisions that a plan may make, as keys of buckets."""

    residents: frozenset[int] = frozenset()  # may become resident
    states: frozenset[int] = frozenset()  # states may move to the disk
    weights: frozenset[int] = frozenset()  # weights may move to the disk

    @property
    def keys(self) -> frozenset[int]:
        """Buckets with any open decision; open weights imply open states."""
        return self.residents | self.states

    def closed(self, places: Places) -> Places:
        """The decided part of a table."""
        return Places.of(
            places.resident - self.residents,
            places.on_disk - self.states,
            places.weights_on_disk - self.weights,
        )


class WantedPlaces:
    """The wanted places of buckets; one instance is shared by all plans of a model.

    Args:
        options: of the model.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self._places: Places | None = None  # of plans; None: where the buckets are
        self._decided: frozenset[int] = frozenset()  # keys of buckets that plans have decided about
        self._stored: frozenset[int] = frozenset()  # the same for states and weights
        # The buckets that are resident because uncaptured code reads them.
        self._home = BucketPlan(  # the place of a bucket that no plan has decided about
            Tier.DISK if options.disk_weights else Tier.HOST,
            Tier.HOST if options.disk is None else Tier.DISK,
        )
        self._bytes: dict[int, float] = {}  # device memory, by key
        self._before: dict[int, BucketPlan] = {}  # where they were
        self._asked: frozenset[int] = frozenset()  # keys of buckets already decided about
        self._leaving: frozenset[int] = frozenset()  # keys of evicted ones
        self._ended = False  # did the device run out of memory with them?
        self._answer: tuple[Placement, Placement] | None = None  # the last question and answer

    @property
    def known(self) -> bool:
        """True if a plan has decided where buckets should be."""
        return self._places is not None

    def places(self, now: Placement) -> Places:
        """The wanted places of all buckets: those of plans, with the buckets of uncaptured code
        resident and evicted ones back where they were. If nothing may move, only buckets of
        uncaptured code that are on the device now are resident.

        Args:
            now: where the buckets are.
        """
        places = now.places if self._places is None else self._places
        if now.stays:
            return places.taken(now.places.resident.intersection(self._bytes), now.places)
        places = places.taken(self._leaving & places.resident, Places(self._before))
        return places.taken(self._bytes, Places(dict.fromkeys(self._bytes, RESIDENT)))

    def placement(self, now: Placement) -> Placement:
        """The wanted placement; weights stay if nothing may move."""
        if self._answer is None or self._answer[0] is not now:
            places = self.places(now)
            if now.stays:
                stored = now.places.weights_on_disk
                places = Places.of(places.resident, places.on_disk, stored)
            self._answer = now, now if places == now.places else replace(now, places=places)
        return self._answer[1]

    def open_to(self, schedule: Schedule, now: Placement, *, again: bool) -> OpenTo:
        """The decisions that a captured graph's plan may make.

        Args:
            again: buckets that a plan made resident may leave the device.
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
        """Record a plan's decisions."""
        if not open_to.keys:
            return
        self._answer = None
        self._places = self.places(now).taken(open_to.keys, choice.places)
        self._decided |= open_to.residents
        self._stored |= open_to.states
        self._asked |= open_to.residents
        self._leaving -= open_to.residents
        for key in open_to.residents:
            self._bytes.pop(key, None)

    def set(self, places: Places) -> None:
        """Want these places, regardless of earlier decisions."""
        self._places, self._answer = places, None

    def forget(self) -> None:
        """Want every bucket to stay where it is."""
        self._places = self._answer = None

    def reopen(self) -> None:
        """Open all decisions again."""
        self._decided = self._stored = frozenset()

    # For uncaptured code.

    def note_fetches(
        self,
        buckets: Sequence[Bucket],
        read: Collection[int],
        size: Callable[[Bucket], float],
        room_bytes: Callable[[], float],
        now: Placement,
    ) -> None:
        """Note that uncaptured code reads these buckets. Of those that no plan has decided about,
        as many become resident as fit: current residents first, then the others in order.

        Args:
            read: keys of the buckets that plans read.
            size: returns a resident bucket's bytes, with gradients and states.
            room_bytes: returns the device memory that plans leave.
        """
        known = self._decided.union(read, self._asked)
        new = [bucket for bucket in buckets if bucket.key not in known]
        if self._ended or not new:
            return
        self._asked = self._asked.union(bucket.key for bucket in new)
        self._answer = None
        left, resident = _SHARE * room_bytes() - self.uncaptured_bytes(), now.places.resident
        for bucket in sorted(new, key=lambda bucket: bucket.key not in resident):
            is_resident, size_bytes = bucket.key in resident, size(bucket)
            if is_resident or size_bytes <= left:
                self._bytes[bucket.key] = size_bytes
                self._before[bucket.key] = self._home if is_resident else now.places[bucket.key]
                left -= size_bytes

    def uncaptured_bytes(self) -> int:
        """Device memory of the buckets that are resident for uncaptured code."""
        return int(sum(self._bytes.values()))

    def bytes_next_to(self, schedule: Schedule, now: Placement) -> int:
        """The part of `uncaptured_bytes` that a captured graph does not read."""
        own = {bucket.key for bucket in schedule.buckets}
        keys = self.places(now).resident.intersection(self._bytes).difference(own)
        return int(sum(self._bytes[key] for key in keys))

    def leave(self) -> None:
        """Evict the buckets of uncaptured code, because a plan does not fit next to them."""
        self._leaving = self._leaving.union(self._bytes)
        self._bytes.clear()
        self._answer = None

    def end(self) -> bool:
        """Evict the buckets of uncaptured code for good, because the device ran out of memory; True
        if there were any."""
        some, self._ended = bool(self._bytes), True
        self.leave()
        return some
