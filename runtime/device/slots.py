"""Device buffers that buckets are streamed into, shared by all schedules of a model.

Schedules run one after another on the compute stream, and each starts with a wait for it (`begin`),
so they can share buffers. `generation` counts the runs: a backward may reuse its forward's slots
only if it is the very next run. `left` records the buckets that a forward without a backward leaves
in their slots for the next forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from megacompile.ir.buckets import Bucket, Slot

_NEVER = 2**31


class BucketVersion(Protocol):
    """The state of a bucket when it was copied into a slot."""

    def holds(self) -> bool:
        """True if the bucket is still in that state."""


class DeviceSlots:
    """Buffers by slot index, each as large as the largest bucket it had to hold."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.buffers: list[torch.Tensor] = []  # (size_bytes,) uint8 each
        self.generation = 0
        self.stay_from = _NEVER  # the first slot for buckets that stay between forwards
        self.left: dict[int, tuple[int, BucketVersion]] = {}  # slot -> bucket key, its state
        self._views: dict[tuple[int, int], tuple[torch.Tensor, ...]] = {}

    def has(self, wanted: Sequence[tuple[int, Bucket]]) -> bool:
        """True if these slots hold these buckets in their current state."""
        for index, bucket in wanted:
            key, mark = self.left.get(index, (None, None))
            if key != bucket.key or mark is None or not mark.holds():
                return False
        return bool(wanted)

    def trim(self, count: int) -> None:
        """Free the slots after the first `count` that were for buckets that stay."""
        keep = max(count, self.stay_from)
        if keep < len(self.buffers):
            del self.buffers[keep:]
            self._views = {key: v for key, v in self._views.items() if key[0] < keep}
            self.left = {index: held for index, held in self.left.items() if index < keep}
            self.generation += 1

    def keeps(self, slots: Sequence[Slot]) -> bool:
        """True if `require` would replace no buffer, so that their contents stay."""
        return not any(map(self._must_grow, slots))

    def _must_grow(self, slot: Slot) -> bool:
        """True if a buffer exists and is too small."""
        is_allocated = slot.index < len(self.buffers)
        return is_allocated and self.buffers[slot.index].numel() < slot.size_bytes

    def require(self, slots: Sequence[Slot]) -> None:
        """Allocate `slots` as needed. Buffers that must grow are replaced, on the compute stream.

        The old buffer is freed to the allocator. Its next user on the compute stream runs after
        every reader of the buffer, and these readers ran after the copies into it.
        """
        for slot in slots:
            if self._must_grow(slot):
                self.buffers[slot.index] = self._allocate(slot)
            elif slot.index < len(self.buffers):
                continue
            else:
                assert slot.index == len(self.buffers), "slots are numbered from 0"
                self.buffers.append(self._allocate(slot))
            self._views = {key: v for key, v in self._views.items() if key[0] != slot.index}
            self.generation += 1

    def _allocate(self, slot: Slot) -> torch.Tensor:
        with torch.inference_mode(False):  # later runs write to it outside of inference mode
            return torch.empty(slot.size_bytes, dtype=torch.uint8, device=self.device)

    def flat(self, slot: Slot, bucket: Bucket) -> torch.Tensor:
        """The part of a slot that a bucket fills: (bucket.size_bytes,) uint8."""
        return self.buffers[slot.index][: bucket.size_bytes]

    def weights(self, slot: Slot, bucket: Bucket) -> tuple[torch.Tensor, ...]:
        """A bucket's parameters as views of a slot."""
        key = (slot.index, bucket.key)
        if key not in self._views:
            buffer = self.buffers[slot.index]
            self._views[key] = tuple(
                buffer[p.offset_bytes : p.offset_bytes + p.size_bytes]
                .view(p.dtype)
                .as_strided(p.shape, p.stride)
                if p.numel
                else torch.empty(p.shape, dtype=p.dtype, device=self.device)
                for p in bucket.params
            )
        return self._views[key]

    def forget(self) -> None:
        """Free the buffers; called when other buckets are streamed, which need other sizes.

        First waits for copies into them that a failed run left in flight.
        """
        if self.buffers and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.buffers.clear()
        self.left.clear()
        self.stay_from = _NEVER
        self._views.clear()
        self.generation += 1
