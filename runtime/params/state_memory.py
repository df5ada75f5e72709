"""The states of a bucket: flat buffers for each optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch

from megacompile.ir.buckets import Bucket
from megacompile.runtime.device.buffers import DeviceBuffer, DiskBuffer, HostBuffer
from megacompile.runtime.optim.blockwise import absmax_numel

State = torch.Tensor | tuple[torch.Tensor, torch.Tensor]  # 8 bits: codes and absolute maxima
StateDtype = torch.dtype | str  # or "int8"


# new tensors shaped like some parameters of a bucket, by index; their buffer, flat, uint8
NewStates = tuple[dict[int, torch.Tensor], torch.Tensor, HostBuffer | DeviceBuffer]


@dataclass(slots=True)
class _Owned:
    """The states of one optimizer."""

    by_name: dict[str, dict[int, State]] = field(default_factory=dict)
    buffers: list[ref[HostBuffer]] = field(default_factory=list)
    memory: list[torch.Tensor] = field(default_factory=list)  # flat, uint8: states not in 8 bits
    blank: set[tuple[str, int]] = field(default_factory=set)  # still zero and never read


class StateMemory:
    """The states of one bucket. Owned by the bucket until its states move. References optimizers
    weakly, so that their memory is freed with them, and the bucket, too."""

    def __init__(self, home: Any) -> None:  # a `HostBucket`
        self._reference = ref(home)
        self._owned: WeakKeyDictionary[Any, _Owned] = WeakKeyDictionary()

    @property
    def _home(self) -> Any:
        home = self._reference()
        assert home is not None, "states of a bucket that is gone"
        return home

    def owners(self) -> list[object]:
        return list(self._owned)

    def of(self, owner: object) -> dict[str, dict[int, State]]:
        """An optimizer's states: name -> parameter index -> state."""
        owned = self._owned.get(owner)
        if owned is None:
            owned = self._owned[owner] = _Owned()
        return owned.by_name

    def memory(self) -> Iterator[torch.Tensor]:
        """All memory not in 8 bits, flat, uint8."""
        for owned in self._owned.values():
            yield from owned.memory

    def make(
        self, owner: object, name: str, dtypes: Mapping[int, StateDtype], *, pin: bool
    ) -> None:
        """Allocate an optimizer's zero state for the parameters, by index, that have none of that
        dtype yet. In 8 bits: codes, and the absolute maximum of each block. `pin` page-locks it."""
        there = self.of(owner).setdefault(name, {})
        missing: dict[int, StateDtype] = {
            i: dtype
            for i, dtype in dtypes.items()
            if (have := there.get(i)) is None
            or ("int8" if isinstance(have, tuple) else have.dtype) != dtype
        }
        if not missing:
            return
        owned, (wide, narrow) = self._owned[owner], _by_width(missing)
        if wide:
            tensors, whole, buffer = self._home.states_like(wide, pin=pin)
            owned.memory.append(whole)
            if isinstance(buffer, HostBuffer):  # new pages are zero
                owned.blank |= {(name, i) for i in wide}
                owned.buffers.append(ref(buffer))
            there |= tensors
        if narrow:
            layout = self._codes(narrow)
            buffer = self._home.state_buffer(layout.size_bytes, pin=pin)
            if isinstance(buffer, HostBuffer):
                owned.buffers.append(ref(buffer))
            codes = [buffer.tensor(place) for place in layout.params]
            there |= {i: (codes[2 * k], codes[2 * k + 1]) for k, i in enumerate(narrow)}

    def sizes(self, dtypes: Mapping[int, StateDtype]) -> list[int]:
        """Bytes of the buffers that `make` allocates for a state."""
        wide, narrow = _by_width(dtypes)
        sizes = [self._home.bytes_like(wide)] if wide else []
        return sizes + ([self._codes(narrow).size_bytes] if narrow else [])

    def _codes(self, params: Sequence[int]) -> Bucket:
        likes = []
        for i in params:
            numel = self._home.values[i].numel()
            codes = torch.empty(numel, dtype=torch.uint8, device="meta")
            absmax = torch.empty(absmax_numel(numel), device="meta")
            likes += [(f"{i}.codes", codes), (f"{i}.absmax", absmax)]
        return Bucket.layout(self._home.layout.key, self._home.layout.name, likes)

    def filled(self, owner: object, name: str, index: int) -> None:
        self._owned[owner].blank.discard((name, index))

    def clear(self, owner: object, name: str, index: int) -> None:
        """Zero a state that is not in 8 bits. New memory is zero already, and no page of it is
        touched."""
        owned = self._owned[owner]
        if (name, index) in owned.blank:
            owned.blank.remove((name, index))
            return
        state = owned.by_name[name][index]
        assert isinstance(state, torch.Tensor)
        state.zero_()

    def on_disk(self) -> list[DiskBuffer]:
        """The buffers on a disk."""
        found = (buffer() for owned in self._owned.values() for buffer in owned.buffers)
        return [buffer for buffer in found if isinstance(buffer, DiskBuffer)]

    def lock(self, owner: object) -> None:
        """Page-lock an optimizer's states that were allocated when no device copy was planned."""
        buffers = [buffer() for buffer in self._owned[owner].buffers if self._home.pin]
        for buffer in buffers:
            if buffer is not None:
                buffer.lock()


def _by_width(dtypes: Mapping[int, StateDtype]) -> tuple[dict[int, torch.dtype], list[int]]:
    wide = {i: dtype for i, dtype in dtypes.items() if isinstance(dtype, torch.dtype)}
    return wide, sorted(dtypes.keys() - wide.keys())
