"""A bucket: its parameters, gradients and states in flat buffers, one per kind.

Host buffers are exact-size and page-locked; a resident bucket's buffers are on the device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch

from megacompile import compat, notices
from megacompile.ir.buckets import Bucket, Param, mirrored
from megacompile.ir.plan import Tier
from megacompile.runtime.device.background import Background
from megacompile.runtime.device.buffers import DeviceBuffer, DiskBuffer, HostBudget, HostBuffer
from megacompile.runtime.disk import Disk, Way
from megacompile.runtime.optim.blockwise import absmax_numel
from megacompile.runtime.optim.rule import State
from megacompile.runtime.params.guards import guard_of, release, unguarded
from megacompile.runtime.params.pending import Fill, Pending

_STRIDE = torch.Tensor.stride
StateDtype = torch.dtype | str  # or "int8"
StateDtypes = Mapping[str, Mapping[int, StateDtype]]  # of states, by name and parameter index
OWN_USERS = 3  # users of a parameter's memory: the bucket, the parameter, its proxy


class HostBucket:
    """A bucket's memory: parameters, gradients (once they exist) and optimizer states.

    `layout` describes the streamed buffer. If it is a copy in `compute_dtype`, the parameters (the
    masters) have separate memory, and `pending` keeps it in sync with them.

    If several ranks share the parameters, this is one rank's part: `layout` describes its rows, and
    `whole` the full parameters. The parameters are DTensors then.
    """

    def __init__(
        self,
        whole: Bucket,  # names, shapes, strides and dtypes of the streamed parameters
        # the user's parameters, which become views of this bucket's memory; for a packed
        # parameter, its frozen component tensors
        params: Sequence[torch.nn.Parameter],
        *,
        pin: bool,  # page-lock memory that is copied to and from the device
        rank: int = 0,  # this process among the ranks that share the bucket
        grad_dtype: torch.dtype | None = None,  # default: each parameter's
        pin_masters: bool = False,  # page-lock parameters that are not streamed themselves
        resident: torch.device | None = None,  # the device that holds the whole bucket
        disk: Disk | None = None,  # holds the states of a streamed bucket; None: host memory
        weights_on_disk: bool = False,  # `disk` holds the parameters too, without masters
        # leave the memory untouched: the caller fills it, points parameters to it, calls `filled`
        empty: bool = False,
        # the device and the thread that copies the values in the background if possible (`Fill`)
        filling: tuple[torch.device, Background] | None = None,
        budget: HostBudget | None = None,  # allocates its host buffers. Default: no limit
    ) -> None:
        self._budget = budget or HostBudget()
        self.resident = resident
        self.disk = None if resident is not None else disk
        self.whole = whole
        self.layout = layout = whole.shard(rank)
        same = all(at.dtype == p.dtype for at, p in zip(layout.params, params, strict=True))
        if not same or resident is not None or weights_on_disk or whole.ranks > 1:
            filling = None
        self._empty = empty or filling is not None
        self.params = tuple(params)
        self.pin = pin
        self.pin_masters = pin_masters
        self.grad_dtype = grad_dtype
        self.on_disk: DiskBuffer | None = None  # the parameters' buffer, if on the disk
        if weights_on_disk and self.disk is not None:
            self.on_disk = DiskBuffer(layout.size_bytes, self.disk)
        self._buffer = self.on_disk or self.new_buffer(layout.size_bytes, pin=pin)  # streamed
        # (size_bytes,) uint8: of this rank's part
        self.flat = self._buffer.bytes(layout.size_bytes)
        self.streamed = [self._buffer.tensor(place) for place in layout.params]
        self._memory: dict[str, torch.Tensor] = {}  # flat, uint8: of "masters" and "gradients"
        # the parameters' memory: the streamed one, if it holds them
        self._masters, self.values = self._buffer, self.streamed
        self.has_copy = not same
        if self.has_copy:
            self._make_masters()
        self.homes = [value.data_ptr() for value in self.values]
        self._strides = [value.stride() for value in self.values]
        self.grads: dict[int, torch.Tensor] = {}
        self.states = StateMemory(self)
        self.pending = Pending(self)
        for param in self.params:
            release(param)
        self._empty = empty
        if filling is not None:
            self._take_later(*filling)
        elif not empty:
            self._take()
            self._settle_in()

    @property
    def tier(self) -> Tier:
        """The memory that its parameters are in."""
        if self.resident is not None:
            return Tier.DEVICE
        return Tier.HOST if self.on_disk is None else Tier.DISK

    def _make_masters(self) -> None:
        """Allocate the parameters apart from their streamed copies. Packed parameters have no
        masters: they are streamed themselves."""
        whole = [i for i, place in enumerate(self.layout.params) if not place.packed]
        dtypes = {i: self.params[i].dtype for i in whole}
        new = functools.partial(self.new_buffer, pin=self.pin_masters)
        masters, self._memory["masters"], self._masters = self.like(dtypes, new)
        self.values = [masters.get(i, value) for i, value in enumerate(self.streamed)]

    def _take(self) -> None:
        """Copy the parameters into the bucket's memory and point them to it."""
        if self.on_disk is not None:
            self._write(self.on_disk)
        for param, value in zip(self.params, self.values, strict=True):
            if self.on_disk is None:
                value.copy_(compat.local(param).detach())
            compat.set_local(param, value)

    def _take_later(self, device: torch.device, thread: Background) -> None:
        """The same, with values copied later; users of the parameters wait for them."""
        assert isinstance(self._buffer, HostBuffer)
        self._settle_in()
        settle = self._buffer.settle if self.pin else lambda: None  # pageable: at the first write
        fill = Fill(self.params, self.values, settle, device, shared=not self._buffer.private)
        self.pending.start(fill, range(len(self.params)), ())
        with unguarded():
            for param, value in zip(self.params, self.values, strict=True):
                param.data = value
        thread.submit(fill.run)
        if any(guard_of(param) is None for param in self.params):  # a subclass
            self.pending.wait()

    def _write(self, place: DiskBuffer) -> None:
        """Write the parameters to the disk in one request; page faults take ten times as long."""
        assert self.disk is not None and not self.has_copy
        memory = self._budget.make(
            len(place), f"{self.layout.name}, on its way to a disk,", pin=False
        )
        for param, at in zip(self.params, self.layout.params, strict=True):
            memory.tensor(at).copy_(compat.local(param).detach())
        whole = functools.partial(memory.bytes, len(place))
        what = f"the parameters of {self.layout.name!r}"
        request = self.disk.request(Way.WRITE, [place.span(whole)], what)
        request.begin()
        request.wait()

    def _settle_in(self) -> None:
        for param in self.params:
            if self.grad_dtype is not None and param.requires_grad:
                param.grad_dtype = self.grad_dtype
        self.pending.refresh()

    def filled(self) -> None:
        """Record that an empty bucket's parameters now use its memory and have values."""
        self._empty = False
        self._settle_in()
        for buffer, pin in ((self._buffer, self.pin), (self._masters, self.pin_masters)):
            if pin and isinstance(buffer, HostBuffer):
                buffer.lock()

    def new_buffer(self, size_bytes: int, *, pin: bool) -> HostBuffer | DeviceBuffer:
        """Allocate memory on the bucket's side (host or device). Raises HostMemoryError: too little
        memory, or the budget is exceeded."""
        if self.resident is not None:
            return DeviceBuffer(self.resident)
        return self._budget.make(size_bytes, self.layout.name, pin=pin, touch=not self._empty)

    def state_buffer(self, size_bytes: int, *, pin: bool) -> HostBuffer | DeviceBuffer:
        """Allocate memory for states, wherever the bucket keeps them."""
        if self.disk is None:
            return self.new_buffer(size_bytes, pin=pin)
        return DiskBuffer(size_bytes, self.disk)

    def note_changes(self, updated: Iterable[int]) -> None:
        indices = list(updated)
        torch.autograd.graph.increment_version(list(map(self.params.__getitem__, indices)))
        if self.has_copy:
            self.pending.mark_fresh(indices)

    def aliased(self, index: int) -> bool:
        own = OWN_USERS - compat.is_sharded(self.params[index])  # its local tensor is the bucket's
        return compat.storage_users(self.values[index]) > own

    def replaced(self) -> list[int]:
        """The indices of parameters whose storage the user replaced; fast if there are none,
        because every call checks it."""
        parts, homes, strides = compat.locals_of(self.params), self.homes, self._strides
        addresses, now = list(map(torch.Tensor.data_ptr, parts)), list(map(_STRIDE, parts))
        if addresses == homes and now == strides:
            return []
        return [i for i, at in enumerate(addresses) if at != homes[i] or now[i] != strides[i]]

    def left_to_others(self) -> bool:
        """True if a parameter's former memory is still referenced (by a backup of `p.data`)."""
        return any(
            self.values[i].data_ptr() == self.homes[i]
            and compat.storage_users(self.values[i]) > OWN_USERS - 1  # without the parameter
            for i in self.replaced()
        )

    def adopt(self) -> bool:
        """Adopt storages that the user replaced; False if the bucket must be made again: they no
        longer fit, or torch has moved the bucket's own tensors to shared memory."""
        for i in self.replaced():
            param, value = self.params[i], self.values[i]
            theirs = compat.local(param).detach()
            if value.data_ptr() != self.homes[i]:
                notices.warn_once(
                    "moved to shared memory",
                    f"megacompile: parameter {self.layout.params[i].name!r} (and maybe others) was "
                    "moved to shared memory, by share_memory() or by sending it to another "
                    "process. megacompile has moved it back: other processes keep the old values, "
                    "and what they write has no effect here. Send state_dict() again for new "
                    "values (shown once)",
                    notices.Whose.RANK,
                )
                return False
            if theirs.shape != value.shape or theirs.dtype != value.dtype:
                return False
            compat.set_local(param, value)
            with torch.no_grad():  # a pending backward sees the new version
                param.copy_(compat.like(param, theirs))
        return True

    def make_grads(self) -> None:
        """Allocate the gradients' memory: once, and again if the user still holds the last ones."""
        new = functools.partial(self.new_buffer, pin=self.pin)
        self.grads, self._memory["gradients"], _ = self.like(self.grad_dtypes(), new)

    def make_grad(self, index: int) -> torch.Tensor:
        """Allocate memory for one gradient of a resident bucket."""
        like = self.values[index]
        self.grads[index] = torch.empty_like(like, dtype=self.grad_dtype or like.dtype)
        return self.grads[index]

    def keep_grads(self, gradients: Mapping[int, torch.Tensor]) -> None:
        """Adopt gradients of a resident bucket, by index: without a copy if their storage is not
        shared, otherwise as copies."""
        dtype, values, strides = self.grad_dtype, self.values, self._strides
        copied: dict[int, torch.Tensor] = {}
        for i, gradient in gradients.items():
            if (
                gradient.dtype == (dtype or values[i].dtype)
                and gradient.stride() == strides[i]
                and compat.is_alone(gradient)
            ):
                self.grads[i] = gradient.detach()  # one more reference, so other holders copy it
            else:
                copied[i] = gradient
        if copied:
            compat.FOREACH_COPY(list(map(self.make_grad, copied)), list(copied.values()))

    def grad_dtypes(self) -> dict[int, torch.dtype]:
        """The dtypes of the trained parameters' gradients, by index."""
        trained = [i for i, param in enumerate(self.params) if param.requires_grad]
        return {i: self.grad_dtype or self.params[i].dtype for i in trained}

    def bytes_like(self, dtypes: Mapping[int, torch.dtype]) -> int:
        """Bytes of memory shaped like some of the parameters: index -> dtype."""
        return _places(self.layout, dtypes)[1]

    def like(
        self, dtypes: Mapping[int, torch.dtype], new: Callable[[int], HostBuffer | DeviceBuffer]
    ) -> tuple[dict[int, torch.Tensor], torch.Tensor, HostBuffer | DeviceBuffer]:
        """Allocate a buffer with `new` for tensors shaped like some of the parameters. Returns
        them by index, the buffer's memory (flat, uint8), and the buffer."""
        places, end = _places(self.layout, dtypes)
        buffer = new(end)
        tensors = {i: buffer.tensor(place) for i, place in places.items()}
        return tensors, buffer.bytes(end), buffer

    def span(self, first: torch.Tensor, numel: int) -> torch.Tensor:
        """`numel` elements of this bucket's memory, starting at a tensor in it: (numel,)."""
        found = self._slice(first, numel)
        assert found is not None, "a span that leaves the memory of its bucket"
        return found

    def holds(self, tensor: torch.Tensor) -> bool:
        """True if a dense tensor is in this bucket's current memory."""
        return self._slice(tensor, tensor.numel()) is not None

    def _slice(self, first: torch.Tensor, numel: int) -> torch.Tensor | None:
        start, size = first.data_ptr(), numel * first.itemsize
        for memory in (self.flat, *self._memory.values(), *self.states.memory()):
            offset = start - memory.data_ptr()
            if 0 <= offset and offset + size <= memory.numel():
                return memory[offset : offset + size].view(first.dtype)
        return None


class _Owned:
    """The states of one optimizer."""

    def __init__(self) -> None:
        self.by_name: dict[str, dict[int, State]] = {}
        self.buffers: list[ref[HostBuffer]] = []
        self.memory: list[torch.Tensor] = []  # flat, uint8: states not in 8 bits
        self.blank: set[tuple[str, int]] = set()  # (name, index): zero and untouched


class StateMemory:
    """The states of one bucket. Owned by the bucket until its states move. References the bucket
    and the optimizers weakly; an optimizer's states are freed with it."""

    def __init__(self, home: HostBucket) -> None:
        self._reference = ref(home)
        self._owned: WeakKeyDictionary[Any, _Owned] = WeakKeyDictionary()

    @property
    def _home(self) -> HostBucket:
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

    def make(self, owner: object, wanted: StateDtypes, *, pin: bool) -> None:
        """Allocate an optimizer's zero states for the parameters that have none of that dtype yet.
        In 8 bits: codes, and the absolute maximum of each block. `pin` page-locks them."""
        by_name = self.of(owner)
        for name, dtypes in wanted.items():
            there = by_name.setdefault(name, {})
            missing: dict[int, StateDtype] = {
                i: dtype
                for i, dtype in dtypes.items()
                if (have := there.get(i)) is None
                or ("int8" if isinstance(have, tuple) else have.dtype) != dtype
            }
            if not missing:
                continue
            owned, (wide, narrow) = self._owned[owner], _by_width(missing)
            if wide:
                new = functools.partial(self._home.state_buffer, pin=pin)
                tensors, whole, buffer = self._home.like(wide, new)
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


def _places(layout: Bucket, dtypes: Mapping[int, torch.dtype]) -> tuple[dict[int, Param], int]:
    """Offsets of tensors shaped like some of a bucket's parameters, and their buffer's bytes."""
    offsets, end = mirrored(layout, {i: dtype.itemsize for i, dtype in dtypes.items()})
    places = {
        i: replace(layout.params[i], dtype=dtype, offset_bytes=offsets[i])
        for i, dtype in dtypes.items()
    }
    return places, end
