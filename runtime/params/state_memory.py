"""The states of a bucket: flat buffers for each optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import WeakKeyDictionary, ref

import torch

from megacompile.ir.buckets import Bucket
from megacompile.runtime.device.buffers import DeviceBuffer, DiskBuffer, HostBuffer
from megacompile.runtime.optim.blockwise import absmax_numel

State = torch.Tensor | tuple[torch.Tensor, torch.Tensor]  # 8 bits: codes and absolute maxima


@dataclass(frozen=True, slots=True)
class NewStates:
    """New states shaped like some parameters of a bucket."""

    tensors: dict[int, torch.Tensor]  # parameter index -> state
    whole: torch.Tensor  # their buffer, flat, uint8
    buffer: HostBuffer | DeviceBuffer


class Home(Protocol):
    """The part of a bucket that its state memory uses."""

    layout: Bucket
    pin: bool
    values: list[torch.Tensor]

    def state_buffer(self, size_bytes: int, *, pin: bool) -> HostBuffer | DeviceBuffer:
        """Allocate memory for states."""

    def states_like(self, dtypes: Mapping[int, torch.dtype], *, pin: bool) -> NewStates:
        """Allocate states shaped like some of the parameters."""


@dataclass(slots=True)
class _Owned:
    """The states of one optimizer."""

    by_name: dict[str, dict[int, State]] = field(default_factory=dict)
    buffers: list[ref[HostBuffer]] = field(default_factory=list)
    memory: list[torch.Tensor] = field(default_factory=list)  # flat, uint8: states not in 8 bits
    blank: set[tuple[str, int]] = field(default_factory=set)  # still zero and never read


class StateMemory:
    """The states of one bucket. Owned by the bucket until its states move.

    References optimizers weakly, so that their memory is freed with them, and its owner, the
    bucket, too.
    """

    def __init__(self, home: Home) -> None:
        self._reference = ref(home)
        self._owned: WeakKeyDictionary[Any, _Owned] = WeakKeyDictionary()

    @property
    def _home(self) -> Home:
        home = self._reference()
        assert home is not None, "states of a bucket that is gone"
        return home

    def owners(self) -> list[object]:
        """The optimizers with states here."""
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
        self, owner: object, name: str, dtypes: Mapping[int, torch.dtype], *, pin: bool
    ) -> None:
        """Allocate a zero state for the parameters that have none of that dtype yet.

        Args:
            owner: the optimizer.
            name: the state's name.
            dtypes: parameter index -> dtype.
            pin: page-lock it.
        """
        there = self.of(owner).setdefault(name, {})
        missing = {
            i: dtype
            for i, dtype in dtypes.items()
            if not isinstance(have := there.get(i), torch.Tensor) or have.dtype != dtype
        }
        if missing:
            made = self._home.states_like(missing, pin=pin)
            self._owned[owner].memory.append(made.whole)
            if isinstance(made.buffer, HostBuffer):  # new pages are zero
                self._owned[owner].blank |= {(name, i) for i in missing}
            self._note(owner, made.buffer)
            there |= made.tensors

    def filled(self, owner: object, name: str, index: int) -> None:
        """Record a write to a state."""
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

    def make_codes(self, owner: object, name: str, params: Sequence[int], *, pin: bool) -> None:
        """The same for states in 8 bits: codes, and the absolute maximum of each block."""
        there = self.of(owner).setdefault(name, {})
        missing = [i for i in params if not isinstance(there.get(i), tuple)]
        if not missing:
            return
        layout = self._codes(missing)
        buffer = self._home.state_buffer(layout.size_bytes, pin=pin)
        self._note(owner, buffer)
        made = [buffer.tensor(place) for place in layout.params]
        there |= {i: (made[2 * k], made[2 * k + 1]) for k, i in enumerate(missing)}

    def codes_bytes(self, params: Sequence[int]) -> int:
        """Bytes of an 8-bit state for some parameters."""
        return self._codes(params).size_bytes

    def _codes(self, params: Sequence[int]) -> Bucket:
        likes = []
        for i in params:
            numel = self._home.values[i].numel()
            codes = torch.empty(numel, dtype=torch.uint8, device="meta")
            absmax = torch.empty(absmax_numel(numel), device="meta")
            likes += [(f"{i}.codes", codes), (f"{i}.absmax", absmax)]
        return Bucket.layout(self._home.layout.key, self._home.layout.name, likes)

    def _note(self, owner: object, buffer: HostBuffer | DeviceBuffer) -> None:
        if isinstance(buffer, HostBuffer):
            self._owned[owner].buffers.append(ref(buffer))

    def on_disk(self) -> list[DiskBuffer]:
        """The buffers on a disk."""
        found = (buffer() for owned in self._owned.values() for buffer in owned.buffers)
        return list({id(b): b for b in found if isinstance(b, DiskBuffer)}.values())

    def lock(self, owner: object) -> None:
        """Page-lock an optimizer's states that were allocated when no device copy was planned."""
        buffers = [buffer() for buffer in self._owned[owner].buffers if self._home.pin]
        for buffer in buffers:
            if buffer is not None:
                buffer.lock()

    def share(self, owner: object, name: str, index: int, state: torch.Tensor) -> None:
        """Share a buffer with an optimizer that received another optimizer's state without a
        copy."""
        for other, theirs in list(self._owned.items()):
            have = theirs.by_name.get(name, {}).get(index)
            if other is owner or not isinstance(have, torch.Tensor) or have.dtype != state.dtype:
                continue
            if state.numel() and have.data_ptr() == state.data_ptr():
                self.of(owner).setdefault(name, {})[index] = have
                mine = self._owned[owner].memory
                known = {id(memory) for memory in mine}
                mine += [memory for memory in theirs.memory if id(memory) not in known]
                self._owned[owner].buffers += theirs.buffers
