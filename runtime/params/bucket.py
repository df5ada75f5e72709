"""A bucket: its parameters, gradients and states, in flat buffers, one for each kind.

On the host they are exact-size and page-locked; those of a resident bucket lie on the device. A
tensor that work is in flight for, that an offer was made from, or whose streamed copy must follow
it has a guard, which asks its bucket before somebody uses the tensor.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import WeakKeyDictionary, ref

import torch

from megacompile import compat
from megacompile.errors import OptimizerError
from megacompile.ir.buckets import Bucket, Param
from megacompile.ir.ops import Part
from megacompile.ir.stream import Stream
from megacompile.runtime.device import forks
from megacompile.runtime.device.buffers import DeviceBuffer, HostBuffer, mirrored
from megacompile.runtime.device.streams import Handle
from megacompile.runtime.optim.blockwise import absmax_numel
from megacompile.runtime.params.bucket_guards import Offered, Wait, Watch
from megacompile.runtime.params.guards import guard, guard_of, release


class InFlight(Protocol):
    """Work on a bucket's host memory that has been started."""

    @property
    def fresh(self) -> dict[int, torch.Tensor]:
        """New parameters that are on the device too, flat: index -> (numel,). Until it is over."""

    def event(self, part: Part) -> torch.cuda.Event | None:
        """What a stream waits for before it touches a part; None: wait on the host."""

    def done(self) -> bool:
        """Is it over?"""

    def wait(self) -> None:
        """Return when it is; raise if it failed."""


class Offer(Protocol):
    """Something that is right only as long as nobody changes the bucket."""

    def drop(self) -> None:
        """Nobody takes it."""


class HostBucket:
    """A bucket on the host: parameters, gradients once there are any, optimizer states.

    `layout` is what is streamed. Where that is a copy in `compute_dtype`, the parameters (the
    masters) lie in memory of their own, and `refresh` brings the copy up to date.

    Args:
        layout: names, shapes, strides and dtypes of the parameters as they are streamed.
        params: what the user holds; they become views of this bucket's memory.
        pin: page-lock what is copied to and from the device.
        grad_dtype: of the gradients. Default: each parameter's own.
        pin_masters: page-lock parameters that are not streamed themselves.
        resident: the device that all of it lies on, if it does.
    """

    said_moved = False

    def __init__(
        self,
        layout: Bucket,
        params: Sequence[torch.nn.Parameter],
        *,
        pin: bool,
        grad_dtype: torch.dtype | None = None,
        pin_masters: bool = False,
        resident: torch.device | None = None,
    ) -> None:
        self.resident = resident
        self.layout = layout
        self.params = tuple(params)
        self.pin = pin
        self.pin_masters = pin_masters
        self.grad_dtype = grad_dtype
        buffer = self._buffer(layout.size_bytes, pin=pin)
        self.flat = buffer.bytes(layout.size_bytes)  # (size_bytes,) uint8
        self.streamed = tuple(buffer.tensor(place) for place in layout.params)
        self._memory: list[torch.Tensor] = []  # flat, uint8: of masters and gradients
        self._grad_memory: torch.Tensor | None = None  # that of them which holds the gradients
        # the parameters' own memory
        self._values_lie_in, self._places, self.values = self._masters(buffer)
        self.homes = [value.data_ptr() for value in self.values]
        self.grads: dict[int, torch.Tensor] = {}
        self.states: WeakKeyDictionary[Any, StateBuffers] = WeakKeyDictionary()  # by the optimizer
        self.in_flight: InFlight | None = None
        self._failed = False  # and somebody is to be told
        self.gradients_copied: torch.cuda.Event | None = None  # behind the last copy to the host
        self.offered: Offer | None = None  # to optimizer.step(), by the backward
        self._guarded: list[torch.Tensor] = []  # until what is in flight is done
        self._offer_guarded: list[torch.Tensor] = []  # until the offer is taken
        self._fresh: dict[int, int] = {}  # parameter -> its version when its copy was made
        for param, value in zip(self.params, self.values, strict=True):
            release(param)
            value.copy_(param.detach())
            param.data = value
            if grad_dtype is not None and param.requires_grad:
                param.grad_dtype = grad_dtype
        self.refresh()
        forks.tell(self)

    def _buffer(self, size_bytes: int, *, pin: bool) -> HostBuffer | DeviceBuffer:
        if self.resident is not None:
            return DeviceBuffer(self.resident)
        return HostBuffer(size_bytes, pin=pin)

    def _masters(
        self, buffer: HostBuffer | DeviceBuffer
    ) -> tuple[HostBuffer | DeviceBuffer, Sequence[Param], tuple[torch.Tensor, ...]]:
        """Where the parameters lie: the buffer (that of what is streamed, if it is theirs too),
        their places in it, and they."""
        named = zip(self.layout.params, self.params, strict=True)
        if all(place.dtype == param.dtype for place, param in named):
            return buffer, self.layout.params, self.streamed
        places = mirrored(self.layout, {i: param.dtype for i, param in enumerate(self.params)})
        end = max((place.offset_bytes + place.size_bytes for place in places), default=0)
        buffer = self._buffer(end, pin=self.pin_masters)
        self._memory.append(buffer.bytes(end))
        return buffer, places, tuple(buffer.tensor(place) for place in places)

    @property
    def has_copy(self) -> bool:
        """Is what is streamed a copy of the parameters, in another dtype?"""
        return self.streamed is not self.values

    def refresh(self) -> None:
        """Bring the streamed copy up to date with what the user changed."""
        if not self.has_copy:
            return
        for i, param in enumerate(self.params):
            fresh = self._fresh.get(i) == compat.version(param)
            if not fresh or (self.aliased(i) and self.in_flight is None):
                self.streamed[i].copy_(self.values[i])
                if self.aliased(i):
                    self.forget(i)  # a write under the other name would go unseen
                else:
                    self.mark_fresh(i)
        self._watch()

    def aliased(self, index: int) -> bool:
        """Does somebody hold a parameter's memory under another name?"""
        return compat.storage_users(self.values[index]) > _OWN_USERS

    def take_back(self, index: int) -> None:
        """Bring a master up to date with its copy, which eager code wrote to."""
        if self.has_copy:
            self.values[index].copy_(self.streamed[index])

    def mark_fresh(self, index: int) -> None:
        """The streamed copy of a parameter is what the parameter is now."""
        self._fresh[index] = compat.version(self.params[index])

    def forget(self, index: int) -> None:
        """The user has a parameter in hands: its streamed copy may be stale."""
        self._fresh.pop(index, None)

    def _watch(self) -> None:
        """Notice changes that leave no trace in the version: those through `p.data`."""
        for i, param in enumerate(self.params):
            if guard_of(param) is None:
                guard(param, Watch(self, i))

    # What is in flight.

    def start(self, work: InFlight, updated: Sequence[int], states: Sequence[torch.Tensor]) -> None:
        """Note work on some parameters and states; whoever uses one of them waits for it."""
        assert self.in_flight is None, "a bucket serves one piece of work at a time"
        self._failed = False
        self.in_flight = work
        self._guarded = [self.params[i] for i in updated] + list(states)
        for i in updated:
            guard(self.params[i], Wait(self, i))
        for state in states:
            guard(state, Wait(self, None))

    def last_write(self, part: Part) -> Handle:
        """What a token of this bucket stands for (`megacompile.ir.tokens`)."""
        if part is Part.GRADIENTS:
            return Handle(None, Stream.D2H, self.gradients_copied)
        work = self.in_flight
        if work is None:
            return Handle(None, Stream.HOST)
        event = work.event(part)
        if event is None:
            return Handle(work, Stream.HOST, host=self)
        return Handle(work, Stream.D2H, event)

    def busy(self) -> bool:
        """Is something in flight that is not done?"""
        return self.in_flight is not None and not self.in_flight.done()

    def land(self, work: InFlight, updated: Sequence[int], states: Sequence[torch.Tensor]) -> None:
        """Note copies from the device to this bucket's memory, behind what was there before."""
        self.settle()
        self.start(work, updated, states)

    def before_fork(self) -> None:
        """What is in flight would be half done in the child, for ever."""
        self.finish()

    def after_fork(self, *, in_child: bool) -> None:
        """What another thread has started meanwhile is over for the child."""
        if in_child and self.in_flight is not None and not self._failed:
            self._landed()

    def finish(self) -> None:
        """Wait for what is in flight; if it failed, whoever uses the bucket next is told."""
        work = self.in_flight
        if work is None:
            return
        try:
            work.wait()
        except OptimizerError:
            self._failed = True
            return
        self.settle()

    def settle(self) -> None:
        """Wait for what is in flight on this bucket; raise if it failed."""
        work = self.in_flight
        if work is None:
            return
        try:
            work.wait()
        finally:
            if self.in_flight is work and work.done():  # else Ctrl-C: it goes on, and so do guards
                self._landed()

    def _landed(self) -> None:
        if self.in_flight is not None:
            self.in_flight.fresh.clear()
        self.in_flight = None
        for tensor in self._guarded:
            if isinstance(guard_of(tensor), Wait):
                release(tensor)
        self._guarded = []
        if self.has_copy:
            self._watch()

    # What is offered to the next step.

    def offer(self, what: Offer, params: Sequence[int], states: Sequence[torch.Tensor]) -> None:
        """Keep something for the next step, unless somebody touches these before."""
        self.withdraw()
        self.offered = what
        self._offer_guarded = [self.params[i] for i in params] + list(states)
        for i in params:
            guard(self.params[i], Offered(self, i))
        for state in states:
            guard(state, Offered(self, None))

    def take_offer(self) -> Offer | None:
        """What is offered, for the step that uses it (or `drop`s it)."""
        offer, self.offered = self.offered, None
        for tensor in self._offer_guarded:
            if isinstance(guard_of(tensor), Offered):
                release(tensor)
        self._offer_guarded = []
        if offer is not None and self.has_copy:
            self._watch()
        return offer

    def withdraw(self) -> None:
        """What is offered is no longer right."""
        offer = self.take_offer()
        if offer is not None:
            offer.drop()

    # What the user replaced.

    def replaced(self) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Parameters whose storage the user replaced, and their places here."""
        return [(self.params[i], self.values[i]) for i in self._replaced()]

    def _replaced(self) -> list[int]:
        return [
            i
            for i, (param, home) in enumerate(zip(self.params, self.homes, strict=True))
            if param.data_ptr() != home or param.stride() != self.values[i].stride()
        ]

    def adopt(self, *, moved: bool = True) -> bool:
        """Take over storage that the user replaced; False where the layout no longer fits.

        Args:
            moved: also where torch has moved it to memory that processes share, which moves our
                own tensors too. Whoever made other ones of them then needs new ones.
        """
        for i in self._replaced():
            param, value = self.params[i], self.values[i]
            if param.shape != value.shape or param.dtype != value.dtype:
                return False
            if value.data_ptr() != self.homes[i]:
                if not moved:
                    continue
                value = self._return_home(i)
            theirs = param.detach()
            param.data = value
            with torch.no_grad():
                param.copy_(theirs)  # by its name, so that a pending backward sees a new version
        return True

    def _return_home(self, index: int) -> torch.Tensor:
        """New tensors in a parameter's old place, from which it was moved."""
        _say_moved(self.layout.params[index].name)
        value = self._values_lie_in.tensor(self._places[index])
        values = (*self.values[:index], value, *self.values[index + 1 :])
        if not self.has_copy:
            self.streamed = values
        self.values = values
        self.homes[index] = value.data_ptr()
        return value

    # Gradients and states.

    def make_grads(self) -> None:
        """Get memory for the gradients: the first time, or when the user still holds the last."""
        trained = [i for i, param in enumerate(self.params) if param.requires_grad]
        dtypes = {i: self.grad_dtype or self.params[i].dtype for i in trained}
        self._memory = [memory for memory in self._memory if memory is not self._grad_memory]
        self.grads = self._like(dtypes, self._memory, pin=self.pin)
        self._grad_memory = self._memory[-1]

    def states_of(self, owner: object) -> dict[str, dict[int, State]]:
        """The buffers of an optimizer's states: name -> parameter's index -> state."""
        return self.states.setdefault(owner, StateBuffers()).by_name

    def make_state(
        self, owner: object, name: str, dtypes: Mapping[int, torch.dtype], *, pin: bool
    ) -> None:
        """Get memory for a state, zeros, of those parameters that have none of that dtype yet.

        Args:
            owner: the optimizer, which is referred to weakly: the memory goes when it does.
            name: of the state.
            dtypes: by the parameter's index.
            pin: page-lock it.
        """
        there = self.states_of(owner).setdefault(name, {})
        missing = {
            i: dtype
            for i, dtype in dtypes.items()
            if not isinstance(have := there.get(i), torch.Tensor) or have.dtype != dtype
        }
        if missing:
            mine = self.states[owner]
            made = self._like(missing, mine.memory, mine.buffers, pin=pin)
            there |= made

    def lock_states(self, owner: object) -> None:
        """Page-lock an optimizer's states, which were made when no copy of them was foreseen."""
        buffers = [buffer() for buffer in self.states[owner].buffers if self.pin]
        for buffer in buffers:
            if buffer is not None:
                buffer.lock()

    def share_state(self, owner: object, name: str, index: int, state: torch.Tensor) -> None:
        """Let an optimizer that was given another one's state, not a copy, have its buffer too."""
        for other, theirs in list(self.states.items()):
            have = theirs.by_name.get(name, {}).get(index)
            if other is owner or not isinstance(have, torch.Tensor) or have.dtype != state.dtype:
                continue
            if state.numel() and have.data_ptr() == state.data_ptr():
                self.states_of(owner).setdefault(name, {})[index] = have
                mine = self.states[owner].memory
                known = {id(memory) for memory in mine}
                mine += [memory for memory in theirs.memory if id(memory) not in known]
                self.states[owner].buffers += theirs.buffers

    def make_codes(self, owner: object, name: str, params: Sequence[int], *, pin: bool) -> None:
        """The same for states in 8 bits: codes and a largest magnitude for each block."""
        there = self.states_of(owner).setdefault(name, {})
        missing = [i for i in params if not isinstance(there.get(i), tuple)]
        if not missing:
            return
        likes = []
        for i in missing:
            numel = self.values[i].numel()
            codes = torch.empty(numel, dtype=torch.uint8, device="meta")
            absmax = torch.empty(absmax_numel(numel), device="meta")
            likes += [(f"{i}.codes", codes), (f"{i}.absmax", absmax)]
        layout = Bucket.layout(self.layout.key, self.layout.name, likes)
        buffer = self._buffer(layout.size_bytes, pin=pin)
        if isinstance(buffer, HostBuffer):
            self.states[owner].buffers.append(ref(buffer))
        made = [buffer.tensor(place) for place in layout.params]
        there |= {i: (made[2 * k], made[2 * k + 1]) for k, i in enumerate(missing)}

    def _like(
        self,
        dtypes: Mapping[int, torch.dtype],
        memory: list[torch.Tensor],
        buffers: list[ref[HostBuffer]] | None = None,
        *,
        pin: bool,
    ) -> dict[int, torch.Tensor]:
        """New memory like some of the parameters, one buffer for all, noted in the lists."""
        places = dict(zip(dtypes, mirrored(self.layout, dtypes), strict=True))
        end = max((place.offset_bytes + place.size_bytes for place in places.values()), default=0)
        buffer = self._buffer(end, pin=pin)
        memory.append(buffer.bytes(end))
        if buffers is not None and isinstance(buffer, HostBuffer):
            buffers.append(ref(buffer))
        return {i: buffer.tensor(place) for i, place in places.items()}

    def span(self, first: torch.Tensor, numel: int) -> torch.Tensor:
        """`numel` elements of this bucket's memory, from the first of a tensor in it: (numel,)."""
        found = self._slice(first, numel)
        assert found is not None, "a span that leaves the memory of its bucket"
        return found

    def holds(self, tensor: torch.Tensor) -> bool:
        """Does a dense tensor lie in memory that this bucket has now?"""
        return self._slice(tensor, tensor.numel()) is not None

    def _slice(self, first: torch.Tensor, numel: int) -> torch.Tensor | None:
        start, size = first.data_ptr(), numel * first.itemsize
        of_states = (memory for owned in self.states.values() for memory in owned.memory)
        for memory in (self.flat, *self._memory, *of_states):
            offset = start - memory.data_ptr()
            if 0 <= offset and offset + size <= memory.numel():
                return memory[offset : offset + size].view(first.dtype)
        return None


State = torch.Tensor | tuple[torch.Tensor, torch.Tensor]  # 8 bits: codes and largest magnitudes


@dataclass(slots=True)
class StateBuffers:
    """Where the states of one optimizer lie, of the parameters of one bucket."""

    by_name: dict[str, dict[int, State]] = field(default_factory=dict)
    buffers: list[ref[HostBuffer]] = field(default_factory=list)
    memory: list[torch.Tensor] = field(default_factory=list)  # flat, uint8: of those not in 8 bits


_OWN_USERS = 3  # of a parameter's memory: the bucket, the parameter, its proxy


def _say_moved(name: str) -> None:
    if HostBucket.said_moved:
        return
    HostBucket.said_moved = True
    warnings.warn(
        f"megacompile: parameter {name!r} (and maybe others) was moved to memory that processes "
        "share, by share_memory() or by sending it to another process. megacompile has taken the "
        "values back into memory of its own: other processes keep what they were until now, and "
        "what they write there is not seen here. Send state_dict() again when they shall know "
        "newer ones (said once)",
        stacklevel=6,
    )
