"""The memory that plans may use, and the places where plans and uncaptured code want buckets.

The device's budget shrinks after an out-of-memory error. The first plan that reads a bucket decides
its place, and all later plans keep that decision.

Uncaptured code fetches every streamed bucket at each use and waits for it. So the buckets that only
it reads become resident if plans leave room; half of the room is left for what such code computes.
They leave the device if a plan does not fit next to them or the device runs out of memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from megacompile.ir.buckets import Bucket
from megacompile.ir.plan import RESIDENT, BucketPlan, Choice, Placement, Places, Tier
from megacompile.ir.schedule import Schedule
from megacompile.options import Options
from megacompile.plan.problem import Problem
from megacompile.plan.setting import Setting
from megacompile.text import format_bytes

_LESS = 0.9  # after an out-of-memory error: the next budget, as a share of the largest plan's


class Budget:
    """The device memory and disk space that plans may use: the given limits, or those of `setting`,
    read at the first use."""

    def __init__(
        self, setting: Setting, limit_bytes: int | None = None, disk_bytes: int | None = None
    ) -> None:
        self._disk_bytes = disk_bytes
        self.setting = setting
        self.limit_bytes = setting.options.gpu_memory if limit_bytes is None else limit_bytes
        self._is_of_all = False  # True once ranks have agreed on a limit
        self._needed_bytes = 0  # predicted, by the largest plan since the last `step_down`

    def size_bytes(self) -> int:
        """The user's limit, or the memory that was free at the first use."""
        if self.limit_bytes is None:
            self.limit_bytes = self.setting.free_bytes()
        return self.limit_bytes

    def disk_bytes(self) -> int | None:
        """Disk space for the whole model, as of the first use; None: no disk."""
        if self._disk_bytes is None:
            self._disk_bytes = self.setting.disk_budget_bytes()
        return self._disk_bytes

    def agree(self) -> None:
        """Lower the limit to the smallest of all ranks, so that their plans keep the same buckets
        resident. This is a collective; it runs once."""
        if self.setting.least is not None and not self._is_of_all:
            self._is_of_all = True
            self.limit_bytes = self.setting.least(self.size_bytes())

    def note(self, peak_bytes: int) -> None:
        """Record the peak device memory of a chosen plan."""
        self._needed_bytes = max(self._needed_bytes, peak_bytes)

    def room(self, peak_bytes: int) -> int:
        """Device memory that both a plan with this peak and the largest plan leave free."""
        return self.size_bytes() - max(self._needed_bytes, peak_bytes)

    def step_down(self, problems: Iterable[Problem]) -> str:
        """Lower the limit to nine tenths of the largest plan's memory, but not below the smallest
        floor of the captured graphs' problems; describes the new limit, or returns "" if nothing
        changes."""
        if not self._needed_bytes or not self.setting.options.plans:
            return ""
        floor_bytes = min((problem.floor_bytes() for problem in problems), default=0)
        if self._needed_bytes <= floor_bytes:
            return ""
        self.limit_bytes = max(int(_LESS * self._needed_bytes), floor_bytes)
        self._needed_bytes = 0
        return f"at most {format_bytes(self.limit_bytes)} of device memory"


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
    """The wanted places of buckets; one instance is shared by all plans of a model."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self._places: Places | None = None  # of plans; None: where the buckets are
        self._decided: frozenset[int] = frozenset()  # keys of buckets that plans have placed
        self._stored: frozenset[int] = frozenset()  # the same for states and weights
        # Buckets that are resident because uncaptured code reads them.
        self._home = BucketPlan(  # the place of a bucket until a plan decides it
            Tier.DISK if options.disk_weights else Tier.HOST,
            Tier.HOST if options.disk is None else Tier.DISK,
        )
        self._bytes: dict[int, float] = {}  # device memory, by key
        self._asked: frozenset[int] = frozenset()  # keys of buckets that `decide` or `take` saw
        self._leaving: frozenset[int] = frozenset()  # keys of evicted ones
        self._ended = False  # True once the device ran out of memory with them
        self._answer: tuple[Placement, Placement] | None = None  # of `placement`: now, wanted

    @property
    def known(self) -> bool:
        """True if a plan has decided where buckets should be."""
        return self._places is not None

    def places(self, now: Placement) -> Places:
        """The wanted places of all buckets, which are at `now`: those of plans, with the buckets of
        uncaptured code resident and evicted ones back where they were. If nothing may move, only
        buckets of uncaptured code that are on the device now are resident."""
        places = now.places if self._places is None else self._places
        if now.stays:
            return places.taken(now.places.resident.intersection(self._bytes), now.places)
        leaving = self._leaving & places.resident
        places = places.taken(leaving, Places(dict.fromkeys(leaving, self._home)))
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
        """The decisions that a captured graph's plan may make. With `again`, buckets that a plan
        made resident may leave the device."""
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
        """Make these the wanted places, regardless of earlier decisions."""
        self._places, self._answer = places, None

    def forget(self) -> None:
        """Make the current place of every bucket its wanted one."""
        self._places = self._answer = None

    def reopen(self) -> None:
        """Open all decisions again."""
        self._decided = self._stored = frozenset()

    # For uncaptured code.

    def is_open(self, bucket: Bucket) -> bool:
        """True if neither a plan nor `take` has considered a bucket yet."""
        return not self._ended and bucket.key not in self._decided | self._asked

    def take(self, sizes: Mapping[int, float], room_bytes: int, now: Placement) -> None:
        """Make buckets that uncaptured code reads resident, as many as fit into `room_bytes`:
        current residents first, then the others in order. `sizes` has their bytes on the device,
        with gradients and states, by key."""
        self._asked |= sizes.keys()
        self._answer = None
        left, resident = _SHARE * room_bytes - self.uncaptured_bytes(), now.places.resident
        for key in sorted(sizes, key=lambda key: key not in resident):
            if key in resident or sizes[key] <= left:
                self._bytes[key] = sizes[key]
                left -= sizes[key]

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
