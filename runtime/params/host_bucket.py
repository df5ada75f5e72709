"""A bucket: its parameters, gradients and states in flat buffers, one per kind.

Host buffers are exact-size and page-locked; a resident bucket's buffers are on the device.
`pending` tracks work in flight, `states` the optimizer states' memory, and `copy` a streamed copy
in another dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from weakref import ref

import torch

from megacompile import compat, notices
from megacompile.ir.buckets import Bucket, Param, mirrored
from megacompile.runtime.device.buffers import DeviceBuffer, DiskBuffer, HostBuffer
from megacompile.runtime.device.pool import HostBudget
from megacompile.runtime.disk.transfers import Disk, Way
from megacompile.runtime.params.fill import Fill, Filling
from megacompile.runtime.params.guards import guard_of, release, unguarded
from megacompile.runtime.params.pending import OWN_USERS, Copied, Pending, StreamedCopy
from megacompile.runtime.params.state_memory import NewStates, StateMemory


class HostBucket:
    """A bucket's memory: parameters, gradients (once they exist) and optimizer states.

    `layout` describes the streamed buffer. If it is a copy in `compute_dtype`, the parameters (the
    masters) have separate memory, and `refresh` updates the copy.

    If several ranks share the parameters, this is one rank's part: `layout` describes its rows, and
    `whole` the full parameters. The parameters are DTensors then.

    Args:
        whole: names, shapes, strides and dtypes of the streamed parameters.
        params: the user's parameters; they become views of this bucket's memory. For a packed
            parameter, its component tensors, which are frozen.
        pin: page-lock memory that is copied to and from the device.
        rank: this process among the ranks that share the bucket.
        grad_dtype: dtype of the gradients. Default: each parameter's.
        pin_masters: page-lock parameters that are not streamed themselves.
        resident: the device that holds the whole bucket, if any.
        disk: the disk with the states of a streamed bucket; None: host memory.
        weights_on_disk: the parameters are on the disk too. They are streamed themselves, without a
            copy.
        empty: allocate untouched host memory. The code that fills it points the parameters to it
            and calls `filled`.
        filling: copies the values in the background if possible (see `fill`).
        budget: allocates its host buffers. Default: one without a limit.
    """

    def __init__(
        self,
        whole: Bucket,
        params: Sequence[torch.nn.Parameter],
        *,
        pin: bool,
        rank: int = 0,
        grad_dtype: torch.dtype | None = None,
        pin_masters: bool = False,
        resident: torch.device | None = None,
        disk: Disk | None = None,
        weights_on_disk: bool = False,
        empty: bool = False,
        filling: Filling | None = None,
        budget: HostBudget | None = None,
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
            self.on_disk = DiskBuffer(layout.size_bytes, self.disk.file)
        buffer = self._streamed_lie_in = self._new_streamed()
        self.flat = buffer.bytes(layout.size_bytes)  # (size_bytes,) uint8: of this rank's part
        self.streamed = [buffer.tensor(place) for place in layout.params]
        self._memory: list[torch.Tensor] = []  # flat, uint8: of masters and gradients
        self._grad_memory: torch.Tensor | None = None  # the one with the gradients
        self._buffer = buffer
        # the parameters' memory
        self._values_lie_in, self._places, self.values = self._masters(buffer)
        self.homes = [value.data_ptr() for value in self.values]
        self._strides = [value.stride() for value in self.values]
        self.grads: dict[int, torch.Tensor] = {}
        self.states = StateMemory(self)
        self._copied = Copied(self.params, self.values, self.streamed)
        self.has_copy = self._copied.has_copy
        self.copy = StreamedCopy(self._copied)
        self.pending = Pending(self.params, self.copy, functools.partial(_owners, ref(self)))
        for param in self.params:
            release(param)
        self._empty = empty
        if filling is not None:
            self._take_later(filling)
        elif not empty:
            self._take()
            self._settle_in()

    def _new_streamed(self) -> HostBuffer | DeviceBuffer | DiskBuffer:
        """The streamed buffer."""
        return self.on_disk or self.new_buffer(self.layout.size_bytes, pin=self.pin)

    def _take(self) -> None:
        """Copy the parameters into the bucket's memory and point them to it."""
        if self.on_disk is not None:
            self._write(self.on_disk)
        for param, value in zip(self.params, self.values, strict=True):
            if self.on_disk is None:
                value.copy_(compat.local(param).detach())
            set_storage(param, value)

    def _take_later(self, filling: Filling) -> None:
        """The same, with values copied later; users of the parameters wait for them."""
        buffer = self._streamed_lie_in
        assert isinstance(buffer, HostBuffer)
        self._settle_in()
        settle = buffer.settle if self.pin else _nothing
        fill = Fill(self.params, self.values, settle, filling.device)
        self.pending.start(fill, range(len(self.params)), ())
        with unguarded():
            for param, value in zip(self.params, self.values, strict=True):
                param.data = value
        fill.begin(filling.thread)
        if any(guard_of(param) is None for param in self.params):  # a subclass
            self.pending.wait()

    def _write(self, place: DiskBuffer) -> None:
        """Write the parameters to the disk. Writing through page faults would take ten times as
        long."""
        assert self.disk is not None and not self.has_copy
        memory = self._budget.make(
            len(place), f"{self.layout.name}, on its way to a disk,", pin=False
        )
        for param, at in zip(self.params, self._places, strict=True):
            memory.tensor(at).copy_(compat.local(param).detach())
        whole = functools.partial(memory.bytes, len(place))
        what = f"the parameters of {self.layout.name!r}"
        request = self.disk.request(Way.WRITE, [place.span(whole)], what)
        request.begin()
        request.wait()

    def _settle_in(self) -> None:
        """Record that the parameters are in place."""
        for param in self.params:
            if self.grad_dtype is not None and param.requires_grad:
                param.grad_dtype = self.grad_dtype
        self.refresh()

    def filled(self) -> None:
        """Record that an empty bucket's parameters now use its memory and have values."""
        self._empty = False
        self._settle_in()
        for buffer, pin in ((self._buffer, self.pin), (self._values_lie_in, self.pin_masters)):
            if pin and isinstance(buffer, HostBuffer):
                buffer.lock()

    def new_buffer(self, size_bytes: int, *, pin: bool) -> HostBuffer | DeviceBuffer:
        """Allocate memory on the bucket's side (host or device).

        Raises:
            HostMemoryError: too little memory, or the budget is exceeded.
        """
        if self.resident is not None:
            return DeviceBuffer(self.resident)
        return self._budget.make(size_bytes, self.layout.name, pin=pin, touch=not self._empty)

    def state_buffer(self, size_bytes: int, *, pin: bool) -> HostBuffer | DeviceBuffer:
        """Allocate memory for states, wherever the bucket keeps them."""
        if self.disk is not None:
            return DiskBuffer(size_bytes, self.disk.file)
        return self.new_buffer(size_bytes, pin=pin)

    def _masters(
        self, buffer: HostBuffer | DeviceBuffer
    ) -> tuple[HostBuffer | DeviceBuffer, Sequence[Param], list[torch.Tensor]]:
        """The parameters' buffer (the streamed one, if it holds them), their offsets in it, and the
        parameters. Packed parameters have no masters: they are streamed themselves."""
        named = zip(self.layout.params, self.params, strict=True)
        if all(place.dtype == param.dtype for place, param in named):
            return buffer, self.layout.params, self.streamed
        whole = [i for i, place in enumerate(self.layout.params) if not place.packed]
        masters, end = _places(self.layout, {i: self.params[i].dtype for i in whole})
        buffer = self.new_buffer(end, pin=self.pin_masters)
        self._memory.append(buffer.bytes(end))
        places, values = list(self.layout.params), list(self.streamed)
        for i, place in masters.items():
            places[i], values[i] = place, buffer.tensor(place)
        return buffer, places, values

    def refresh(self) -> None:
        """Update the streamed copy with the user's changes."""
        self.copy.refresh(idle=self.pending.in_flight is None)

    def note_changes(self, updated: Iterable[int]) -> None:
        """Record that parameters, by index, have new values."""
        indices = list(updated)
        torch.autograd.graph.increment_version([self.params[i] for i in indices])
        if self.has_copy:
            self.copy.mark_fresh(indices)

    def aliased(self, index: int) -> bool:
        """True if a parameter's memory has an alias."""
        return self._copied.aliased(index)

    # Storages that the user replaced.

    def replaced(self) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Parameters whose storage the user replaced, with their views in this bucket."""
        return [(self.params[i], self.values[i]) for i in self._replaced()]

    def is_replaced(self) -> bool:
        """True if the user replaced any: the quick check in every call."""
        parts = compat.locals_of(self.params)
        return (
            list(map(torch.Tensor.data_ptr, parts)) != self.homes
            or list(map(torch.Tensor.stride, parts)) != self._strides
        )

    def _replaced(self) -> list[int]:
        if not self.is_replaced():
            return []
        homes, strides = self.homes, self._strides
        return [
            i
            for i, part in enumerate(compat.locals_of(self.params))
            if part.data_ptr() != homes[i] or part.stride() != strides[i]
        ]

    def left_to_others(self) -> bool:
        """True if memory that a parameter left is still referenced (a backup of `p.data`)."""
        own = OWN_USERS - 1  # users other than the parameter
        return any(
            self.values[i].data_ptr() == self.homes[i]
            and compat.storage_users(self.values[i]) > own
            for i in self._replaced()
        )

    def adopt(self, *, moved: bool = True) -> bool:
        """Adopt storages that the user replaced; False if the layout no longer fits.

        Args:
            moved: also handle a storage that torch moved to shared memory, which moves the bucket's
                own tensors too. Tensors derived from them must then be recreated.
        """
        for i in self._replaced():
            param, value = self.params[i], self.values[i]
            theirs = compat.local(param).detach()
            if theirs.shape != value.shape or theirs.dtype != value.dtype:
                return False
            if value.data_ptr() != self.homes[i]:
                if not moved:
                    continue
                value = self._return_home(i)
            set_storage(param, value)
            with torch.no_grad():  # a pending backward sees the new version
                param.copy_(compat.like(param, theirs))
        return True

    def _return_home(self, index: int) -> torch.Tensor:
        """New tensors at the offset of a parameter that was moved away."""
        _say_moved(self.layout.params[index].name)
        packed = self.has_copy and self.layout.params[index].packed
        lies_in = self._streamed_lie_in if packed else self._values_lie_in
        value = lies_in.tensor(self._places[index])
        self.values[index] = value
        if packed:
            self.streamed[index] = value
        self.homes[index] = value.data_ptr()
        return value

    # Gradients.

    def make_grads(self) -> None:
        """Allocate memory for the gradients: the first time, or if the user still holds the last
        ones."""
        dtypes = self._grad_dtypes()
        self._memory = [memory for memory in self._memory if memory is not self._grad_memory]
        made = self._like(dtypes, functools.partial(self.new_buffer, pin=self.pin))
        self.grads, self._grad_memory = made.tensors, made.whole
        self._memory.append(made.whole)

    def make_grad(self, index: int) -> torch.Tensor:
        """Allocate memory for one gradient of a resident bucket."""
        like = self.values[index]
        self.grads[index] = torch.empty_like(like, dtype=self.grad_dtype or like.dtype)
        return self.grads[index]

    def keep_grads(self, gradients: Mapping[int, torch.Tensor]) -> None:
        """Adopt gradients of a resident bucket, by index: without a copy if their storage is not
        shared, otherwise as copies."""
        dtype, values, strides = self.grad_dtype, self.values, self._strides
        copies: list[torch.Tensor] = []
        copied: list[torch.Tensor] = []
        for i, gradient in gradients.items():
            if (
                gradient.dtype == (dtype or values[i].dtype)
                and gradient.stride() == strides[i]
                and compat.is_alone(gradient)
            ):
                self.grads[i] = gradient.detach()  # one more reference: other holders copy
                continue
            copies.append(self.make_grad(i))
            copied.append(gradient)
        if copies:
            compat.FOREACH_COPY(copies, copied)

    def grads_bytes(self) -> int:
        """Bytes of the gradients' memory, if on the host."""
        return self.bytes_like(self._grad_dtypes())

    def _grad_dtypes(self) -> dict[int, torch.dtype]:
        trained = [i for i, param in enumerate(self.params) if param.requires_grad]
        return {i: self.grad_dtype or self.params[i].dtype for i in trained}

    def bytes_like(self, dtypes: Mapping[int, torch.dtype]) -> int:
        """Bytes of memory shaped like some of the parameters: index -> dtype."""
        return _places(self.layout, dtypes)[1]

    def states_like(self, dtypes: Mapping[int, torch.dtype], *, pin: bool) -> NewStates:
        """Allocate states shaped like some of the parameters: index -> dtype."""
        return self._like(dtypes, functools.partial(self.state_buffer, pin=pin))

    def _like(
        self, dtypes: Mapping[int, torch.dtype], new: Callable[[int], HostBuffer | DeviceBuffer]
    ) -> NewStates:
        places, end = _places(self.layout, dtypes)
        buffer = new(end)
        whole = buffer.bytes(end)
        tensors = {i: buffer.tensor(place) for i, place in places.items()}
        return NewStates(tensors, whole, buffer)

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
        for memory in (self.flat, *self._memory, *self.states.memory()):
            offset = start - memory.data_ptr()
            if 0 <= offset and offset + size <= memory.numel():
                return memory[offset : offset + size].view(first.dtype)
        return None


def _places(layout: Bucket, dtypes: Mapping[int, torch.dtype]) -> tuple[dict[int, Param], int]:
    """Offsets for tensors shaped like some of a bucket's parameters, and the bytes of their
    buffer."""
    offsets, end = mirrored(layout, {i: dtype.itemsize for i, dtype in dtypes.items()})
    places = {
        i: replace(layout.params[i], dtype=dtype, offset_bytes=offsets[i])
        for i, dtype in dtypes.items()
    }
    return places, end


def set_storage(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Set a tensor, or this rank's part of it, to `value`."""
    if compat.is_sharded(tensor):
        compat.set_local(tensor, value)
    else:
        tensor.data = value


def _owners(bucket: ref[HostBucket]) -> list[object]:
    """The optimizers with states for a bucket."""
    alive = bucket()
    return [] if alive is None else alive.states.owners()


def _nothing() -> None:
    """Return at once: pageable memory gets its pages at the first write."""


def _say_moved(name: str) -> None:
    notices.warn_once(
        "moved to shared memory",
        f"megacompile: parameter {name!r} (and maybe others) was moved to shared memory, by "
        "share_memory() or by sending it to another process. megacompile has moved it back: "
        "other processes keep the old values, and what they write has no effect here. Send "
        "state_dict() again for new values (shown once)",
        notices.Whose.RANK,
    )
