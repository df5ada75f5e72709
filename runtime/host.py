"""Memory of the parameters, gradients and states of a bucket: flat buffers, one for each kind.

On the host they are exact-size and page-locked; those of a resident bucket lie on the device.

[Note: exact-size pinned memory]
`torch.empty(pin_memory=True)` rounds up to a power of two: a 525 MiB layer takes 1 GiB. An
anonymous shared mapping registered with `cudaHostRegister` takes what it needs. It is shared, not
private, so that a forked data loader never turns its pages into copy-on-write ones under the DMA.
Memory that only the CPU uses is private, in huge pages where the system has them.

[Note: one storage a parameter]
Each parameter is a tensor with a storage of its own inside the buffer, so `torch.save`,
safetensors and everything else that looks at storages sees ordinary parameters.
"""

from __future__ import annotations

import mmap
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakKeyDictionary, ref

import torch

from megacompile import compat
from megacompile.errors import HostMemoryError
from megacompile.ir import Bucket, Param, format_bytes
from megacompile.runtime.blockwise import absmax_numel
from megacompile.runtime.guards import guard, guard_of, release

_MARGIN_BYTES = 256 * 2**20  # left free for everything else in the process


class HostBuffer(mmap.mmap):
    """Anonymous shared memory, page-locked for a CUDA device where that works.

    It is unmapped, and unlocked before, when the last tensor on it is gone.
    """

    _address: int = 0
    _warned: bool = False

    def __new__(cls, size_bytes: int, *, pin: bool, private: bool = False) -> HostBuffer:
        kind = mmap.MAP_PRIVATE if private else mmap.MAP_SHARED
        made = super().__new__(cls, -1, max(size_bytes, mmap.PAGESIZE), kind | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):  # a tenth more bandwidth for the CPU
            made.madvise(mmap.MADV_HUGEPAGE)  # shared memory has them on few systems
        return made

    def __init__(self, size_bytes: int, *, pin: bool, private: bool = False) -> None:
        del size_bytes
        self.private = private
        if pin:
            # Touch it first, on all threads: locking touched pages is four times faster.
            torch.frombuffer(self, dtype=torch.uint8).zero_()
            self.lock()

    def lock(self) -> None:
        """Page-lock it, where that was not done when it was made."""
        if self._address:
            return
        if self.private and hasattr(mmap, "MADV_DONTFORK"):
            self.madvise(mmap.MADV_DONTFORK)  # its pages would be copied on write, under the DMA
        address = torch.frombuffer(self, dtype=torch.uint8).data_ptr()
        error = torch.cuda.cudart().cudaHostRegister(address, len(self), 0)
        if int(error) == 0:
            self._address = address
        elif not HostBuffer._warned:
            HostBuffer._warned = True
            warnings.warn(
                f"megacompile: cudaHostRegister of {format_bytes(len(self))} failed with error "
                f"{int(error)}; parameters stay pageable, and copies run at about half the speed "
                "(raise the limit on locked memory: ulimit -l)",
                stacklevel=2,
            )

    def __del__(self) -> None:
        if self._address and torch.cuda.is_initialized():
            torch.cuda.synchronize()  # a copy may be under way
            torch.cuda.cudart().cudaHostUnregister(self._address)

    def tensor(self, param: Param) -> torch.Tensor:
        """A tensor in the place of `param`, with a storage of its own."""
        if param.numel == 0:
            return torch.empty(param.shape, dtype=param.dtype)
        flat = torch.frombuffer(
            self, dtype=param.dtype, count=param.numel, offset=param.offset_bytes
        )
        # not as_strided: a view would keep `flat` alive, a second user of the storage
        whole = torch.empty(0, dtype=param.dtype)
        return whole.set_(flat.untyped_storage(), 0, param.shape, param.stride)

    def bytes(self, size_bytes: int) -> torch.Tensor:
        """The first `size_bytes` as one flat uint8 tensor."""
        return torch.frombuffer(self, dtype=torch.uint8)[:size_bytes]  # 0 is no count for it


class DeviceBuffer:
    """Memory of the device's allocator, with the interface of `HostBuffer`: a tensor at a time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def tensor(self, param: Param) -> torch.Tensor:
        """A tensor like `param`, with a storage of its own."""
        with torch.inference_mode(False):  # it outlives the mode
            return torch.empty_strided(
                param.shape, param.stride, dtype=param.dtype, device=self.device
            )

    def bytes(self, size_bytes: int) -> torch.Tensor:
        """Nothing: what lies on the device is not copied as a whole."""
        del size_bytes
        return torch.empty(0, dtype=torch.uint8)


class InFlight(Protocol):
    """Work on a bucket's host memory that has been started."""

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
        self.values = self._masters()  # the parameters' own memory
        self.grads: dict[int, torch.Tensor] = {}
        self.states: WeakKeyDictionary[Any, StateRooms] = WeakKeyDictionary()  # by the optimizer
        self.in_flight: InFlight | None = None
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

    def _buffer(
        self, size_bytes: int, *, pin: bool, private: bool = False
    ) -> HostBuffer | DeviceBuffer:
        if self.resident is not None:
            return DeviceBuffer(self.resident)
        return HostBuffer(size_bytes, pin=pin, private=private)

    def _masters(self) -> tuple[torch.Tensor, ...]:
        named = zip(self.layout.params, self.params, strict=True)
        if all(place.dtype == param.dtype for place, param in named):
            return self.streamed
        dtypes = {i: param.dtype for i, param in enumerate(self.params)}
        return tuple(self._room(dtypes, self._memory, pin=self.pin_masters).values())

    @property
    def has_copy(self) -> bool:
        """Is what is streamed a copy of the parameters, in another dtype?"""
        return self.streamed is not self.values

    def refresh(self) -> None:
        """Bring the streamed copy up to date with what the user changed."""
        if not self.has_copy:
            return
        for i, param in enumerate(self.params):
            fresh = self._fresh.get(i) == param._version
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
        self._fresh[index] = self.params[index]._version

    def forget(self, index: int) -> None:
        """The user has a parameter in hands: its streamed copy may be stale."""
        self._fresh.pop(index, None)

    def _watch(self) -> None:
        """Notice changes that leave no trace in the version: those through `p.data`."""
        for i, param in enumerate(self.params):
            if guard_of(param) is None:
                guard(param, _Watch(self, i))

    # What is in flight.

    def start(self, work: InFlight, updated: Sequence[int], states: Sequence[torch.Tensor]) -> None:
        """Note work on some parameters and states; whoever uses one of them waits for it."""
        assert self.in_flight is None, "a bucket serves one piece of work at a time"
        self.in_flight = work
        self._guarded = [self.params[i] for i in updated] + list(states)
        for i in updated:
            guard(self.params[i], _Wait(self, i))
        for state in states:
            guard(state, _Wait(self, None))

    def busy(self) -> bool:
        """Is something in flight that is not done?"""
        return self.in_flight is not None and not self.in_flight.done()

    def land(self, work: InFlight, updated: Sequence[int], states: Sequence[torch.Tensor]) -> None:
        """Note copies from the device to this bucket's memory, behind what was there before."""
        self.settle()
        self.start(work, updated, states)

    def settle(self) -> None:
        """Wait for what is in flight on this bucket; raise if it failed."""
        if self.in_flight is None:
            return
        work, self.in_flight = self.in_flight, None
        try:
            work.wait()
        finally:
            for tensor in self._guarded:
                if isinstance(guard_of(tensor), _Wait):
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
            guard(self.params[i], _Offered(self, i))
        for state in states:
            guard(state, _Offered(self, None))

    def take_offer(self) -> Offer | None:
        """What is offered, for the step that uses it (or `drop`s it)."""
        offer, self.offered = self.offered, None
        for tensor in self._offer_guarded:
            if isinstance(guard_of(tensor), _Offered):
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
        return [
            (param, value)
            for param, value in zip(self.params, self.values, strict=True)
            if param.data_ptr() != value.data_ptr() or param.stride() != value.stride()
        ]

    def adopt(self) -> bool:
        """Take over storage that the user replaced; False where the layout no longer fits."""
        for param, value in self.replaced():
            if param.shape != value.shape or param.dtype != value.dtype:
                return False
            theirs = param.detach()
            param.data = value
            with torch.no_grad():
                param.copy_(theirs)  # by its name, so that a pending backward sees a new version
        return True

    # Gradients and states.

    def make_grads(self) -> None:
        """Get memory for the gradients: the first time, or when the user still holds the last."""
        trained = [i for i, param in enumerate(self.params) if param.requires_grad]
        dtypes = {i: self.grad_dtype or self.params[i].dtype for i in trained}
        self._memory = [memory for memory in self._memory if memory is not self._grad_memory]
        self.grads = self._room(dtypes, self._memory, pin=self.pin)
        self._grad_memory = self._memory[-1]

    def states_of(self, owner: object) -> dict[str, dict[int, State]]:
        """The rooms of an optimizer's states: name -> parameter's index -> state."""
        return self.states.setdefault(owner, StateRooms()).by_name

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
            rooms = self.states[owner]
            made = self._room(missing, rooms.memory, rooms.buffers, pin=pin, private=not pin)
            there |= made

    def lock_states(self, owner: object) -> None:
        """Page-lock an optimizer's states, which were made when no copy of them was foreseen."""
        buffers = [buffer() for buffer in self.states[owner].buffers if self.pin]
        for buffer in buffers:
            if buffer is not None:
                buffer.lock()

    def share_state(self, owner: object, name: str, index: int, state: torch.Tensor) -> None:
        """Let an optimizer that was given a state of another one, not a copy, have its room too."""
        for other, rooms in list(self.states.items()):
            room = rooms.by_name.get(name, {}).get(index)
            if other is owner or not isinstance(room, torch.Tensor) or room.dtype != state.dtype:
                continue
            if state.numel() and room.data_ptr() == state.data_ptr():
                self.states_of(owner).setdefault(name, {})[index] = room
                mine = self.states[owner].memory
                known = {id(memory) for memory in mine}
                mine += [memory for memory in rooms.memory if id(memory) not in known]
                self.states[owner].buffers += rooms.buffers

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
        buffer = self._buffer(layout.size_bytes, pin=pin, private=not pin)
        if isinstance(buffer, HostBuffer):
            self.states[owner].buffers.append(ref(buffer))
        made = [buffer.tensor(place) for place in layout.params]
        there |= {i: (made[2 * k], made[2 * k + 1]) for k, i in enumerate(missing)}

    def _room(
        self,
        dtypes: Mapping[int, torch.dtype],
        memory: list[torch.Tensor],
        buffers: list[ref[HostBuffer]] | None = None,
        *,
        pin: bool,
        private: bool = False,
    ) -> dict[int, torch.Tensor]:
        """New memory like some of the parameters, one buffer for all, noted in the lists."""
        places = dict(zip(dtypes, mirrored(self.layout, dtypes), strict=True))
        end = max((place.offset_bytes + place.size_bytes for place in places.values()), default=0)
        buffer = self._buffer(end, pin=pin, private=private)
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
        of_states = (memory for rooms in self.states.values() for memory in rooms.memory)
        for memory in (self.flat, *self._memory, *of_states):
            offset = start - memory.data_ptr()
            if 0 <= offset and offset + size <= memory.numel():
                return memory[offset : offset + size].view(first.dtype)
        return None


State = torch.Tensor | tuple[torch.Tensor, torch.Tensor]  # 8 bits: codes and largest magnitudes


@dataclass(slots=True)
class StateRooms:
    """Where the states of one optimizer lie, of the parameters of one bucket."""

    by_name: dict[str, dict[int, State]] = field(default_factory=dict)
    buffers: list[ref[HostBuffer]] = field(default_factory=list)
    memory: list[torch.Tensor] = field(default_factory=list)  # flat, uint8: of those not in 8 bits


_PADDED = 256  # elements that places are rounded up to, where they mirror no others


def mirrored(layout: Bucket, dtypes: Mapping[int, torch.dtype]) -> Sequence[Param]:
    """Places for tensors like some of a bucket's parameters, in other dtypes.

    Neighbours are as many elements apart as in `layout`, so that parameters, gradients and states
    of neighbours are spans of equal length, and one kernel call can update them. Where dtypes are
    mixed they lie one after the other.
    """
    params = [layout.params[i] for i in dtypes]
    if len(set(dtypes.values())) > 1 or len({param.dtype for param in params}) > 1:
        likes = [
            (p.name, torch.empty_strided(p.shape, p.stride, dtype=dtype, device="meta"))
            for p, dtype in zip(params, dtypes.values(), strict=True)
        ]
        return Bucket.layout(layout.key, layout.name, likes).params
    places: list[Param] = []
    offset, last = 0, -2
    for (i, dtype), param in zip(dtypes.items(), params, strict=True):
        if places and last == i - 1:
            gap_bytes = param.offset_bytes - layout.params[last].offset_bytes
            offset += gap_bytes // param.dtype.itemsize
        elif places:
            offset += -(-places[-1].numel // _PADDED) * _PADDED
        places.append(replace(param, dtype=dtype, offset_bytes=offset * dtype.itemsize))
        last = i
    return places


_OWN_USERS = 3  # of a parameter's memory: the bucket, the parameter, its proxy


@dataclass(frozen=True, slots=True)
class _OfBucket:
    """Guards a tensor of a bucket; the bucket does `before` when somebody uses it."""

    bucket: HostBucket
    param: int | None  # its index, where it is a parameter

    def before(self) -> None:
        """Make the tensor safe to use."""

    def open(self, tensor: torch.Tensor) -> None:
        self.before()
        release(tensor)
        if self.param is not None:
            self.bucket.forget(self.param)

    def serve(self, function: Any, args: Any, kwargs: Any) -> Any:
        del function, args, kwargs
        return NotImplemented


class _Wait(_OfBucket):
    """Guards a tensor in whose memory something is in flight."""

    def before(self) -> None:
        self.bucket.settle()


class _Offered(_OfBucket):
    """Guards a tensor that something offered was made from."""

    def before(self) -> None:
        self.bucket.withdraw()


class _Watch(_OfBucket):
    """Guards a parameter whose streamed copy must follow it."""


def check_host_memory(rows: Sequence[tuple[str, int]], limit_bytes: int | None = None) -> None:
    """Raise before anything is allocated if `rows` of (what, additional bytes) do not fit.

    Args:
        rows: (what, additional bytes).
        limit_bytes: what the user allows; None: what is free, less a margin.

    Raises:
        HostMemoryError: with the table.
    """
    needed = sum(size for _, size in rows)
    there = max(available_bytes() - _MARGIN_BYTES, 0)
    if limit_bytes is not None:
        there = min(there, limit_bytes)
    if needed <= there:
        return
    width = max(len(what) for what, _ in rows)
    table = "\n".join(f"  {what:<{width}}  {format_bytes(size):>10}" for what, size in rows)
    raise HostMemoryError(
        f"megacompile(): host memory is too small\n{table}\n"
        f"  {'needed':<{width}}  {format_bytes(needed):>10}\n"
        f"  {'available':<{width}}  {format_bytes(there):>10}\n"
        "free host memory (or raise host_memory=), use a smaller dtype (model.bfloat16()), or "
        "freeze parameters (requires_grad_(False)), which need no gradients"
    )


def available_bytes() -> int:
    """Host memory that this process can still get: what is free, within its cgroup's limit."""
    free = _meminfo_bytes("MemAvailable")
    limit, used = _cgroup_bytes("memory.max"), _cgroup_bytes("memory.current")
    if limit is not None and used is not None:
        free = min(free, limit - used + (_cgroup_stat("inactive_file") or 0))
    return free


def _meminfo_bytes(name: str) -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # not Linux
        return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    found = next(line for line in lines if line.startswith(f"{name}:"))
    return int(found.split()[1]) * 1024


def _cgroup_bytes(name: str) -> int | None:
    try:
        text = Path("/sys/fs/cgroup", name).read_text().strip()
    except OSError:
        return None
    return None if text == "max" else int(text)


def _cgroup_stat(name: str) -> int | None:
    try:
        lines = Path("/sys/fs/cgroup/memory.stat").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.split()[0] == name), None)
