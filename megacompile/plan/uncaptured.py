"""Buckets that live on the device because code reads them that is not captured.

Such code fetches what is elsewhere at each use, and computes meanwhile nothing. So what it reads
lives on the device, where plans leave room. No plan counts what such code computes: half of the
room is for that. Only buckets that no plan has decided about come into question, and a plan that
reads one decides about it. They leave where a plan finds no room beside them, and where the device
runs out of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from megacompile.ir.buckets import Bucket

_SHARE = 0.5  # of the room, for buckets; the rest is for what their code computes


class Uncaptured:
    """The buckets that do, and those that are to leave."""

    def __init__(self) -> None:
        self._bytes: dict[int, float] = {}  # of those that live there, by key
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
        there: Collection[int],
    ) -> None:
        """Decides which of some buckets live on the device: as many as fit, the first ones first.

        Args:
            buckets: which are new.
            size: of one, with gradients and states.
            room_bytes: that plans leave.
            there: keys of those that live there already: they stay.
        """
        self._asked = self._asked.union(bucket.key for bucket in buckets)
        left = _SHARE * room_bytes - self.all_bytes()
        for bucket in sorted(buckets, key=lambda bucket: bucket.key not in there):
            size_bytes = size(bucket)
            if bucket.key in there or size_bytes <= left:
                self._bytes[bucket.key] = size_bytes
                left -= size_bytes

    def beside(self, own: Collection[int], resident: frozenset[int]) -> int:
        """Bytes that they take next to a graph that reads the buckets `own`.

        Args:
            resident: keys of all buckets that are to live on the device.
        """
        return int(sum(self._bytes[key] for key in self.there(resident).difference(own)))

    def all_bytes(self) -> int:
        """Bytes that they take together."""
        return int(sum(self._bytes.values()))

    def there(self, resident: frozenset[int]) -> frozenset[int]:
        """Keys of those among residents."""
        return resident.intersection(self._bytes)

    def leave(self) -> None:
        """A plan finds no room beside them."""
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

    def placed(self, resident: frozenset[int]) -> frozenset[int]:
        """The residents: those that plans want, and these; without those that leave."""
        return resident.union(self._bytes) - self._leaving
