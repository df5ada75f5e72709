"""A bucket: its parameters, gradients and states, in flat buffers, one for each kind.

On the host they are exact-size and page-locked; those of a resident bucket are on the device. What
is under way on them is in `pending`, where the states are in `states`, and what must be done for a
streamed copy in another dtype in `copy`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from weakref import ref

import torch

from megacompile import compat, notices
from megacompile.ir.buckets import Bucket, Param, mirrored
from megacompile.runtime.device.buffers import DeviceBuffer, HostBuffer
from megacompile.runtime.device.disk_buffers import Disk, DiskBuffer
from megacompile.runtime.device.host_budget import HostBudget
from megacompile.runtime.params.fill import Fill, Filling
from megacompile.runtime.params.guards import guard_of, release, unguarded
from megacompile.runtime.params.pending import OWN_USERS, Copied, Pending, StreamedCopy
from megacompile.runtime.params.state_memory import NewStates, StateMemory


class HostBucket:
    """A bucket on the host: parameters, gradients once there are any, optimizer states.

    `layout` is what is streamed. Where that is a copy in `compute_dtype`, the parameters (the
    masters) are in memory of their own, and `refresh` brings the copy up to date.

    Where several ranks share the parameters, this is one rank's part: `layout` is of its rows, and
    `whole` of what they have together. The parameters are DTensors then.

    Args:
        whole: names, shapes, strides and dtypes of the parameters as they are streamed.
        params: what the user holds; they become views of this bucket's memory. Of a packed one,
            the tensors that it is made of: they are frozen.
        pin: page-lock what is copied to and from the device.
        rank: this process's, among those that share the bucket.
        grad_dtype: of the gradients. Default: each parameter's own.
        pin_masters: page-lock parameters that are not streamed themselves.
        resident: the device that all of it is on, if any.
        disk: where the states of a streamed bucket are, if not in host memory.
        weights_on_disk: its parameters are there too. They are what is streamed: no copy.
        empty: on the host, with memory that was not touched. The code that fills it lets the
            parameters have it, and calls `filled`.
        filling: lets the values come in the background, where they can (see `fill`).
        budget: makes its buffers on the host. Default: one without a limit.
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
        self.on_disk: DiskBuffer | None = None  # where the parameters are, if on the disk
        if weights_on_disk and self.disk is not None:
            self.on_disk = self.disk.buffer(layout.size_bytes)
        buffer = self._streamed_lie_in = self._new_streamed()
        self.flat = buffer.bytes(layout.size_bytes)  # (size_bytes,) uint8: of this rank's part
        self.streamed = [buffer.tensor(place) for place in layout.params]
        self._memory: list[torch.Tensor] = []  # flat, uint8: of masters and gradients
        self._grad_memory: torch.Tensor | None = None  # that of them which holds the gradients
        self._buffer = buffer
        # the parameters' own memory
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
        """The buffer of what is streamed."""
        return self.on_disk or self.new_buffer(self.layout.size_bytes, pin=self.pin)

    def _take(self) -> None:
        """Give the parameters, with their values, the bucket's memory."""
        if self.on_disk is not None:
            self._write(self.on_disk)
        for param, value in zip(self.params, self.values, strict=True):
            if self.on_disk is None:
                value.copy_(compat.local(param).detach())
            set_storage(param, value)

    def _take_later(self, filling: Filling) -> None:
        """The same, and the values come after that. They are waited for from here on."""
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
        if any(guard_of(param) is None for param in self.params):  # of a class of its own
            self.pending.wait()

    def _write(self, place: DiskBuffer) -> None:
        """Bring the parameters to the disk. Page faults would take ten times as long."""
        assert self.disk is not None and not self.has_copy
        memory = self._budget.make(
            len(place), f"{self.layout.name}, on its way to a disk,", pin=False
        )
        for param, at in zip(self.params, self._places, strict=True):
            memory.tensor(at).copy_(compat.local(param).detach())
        whole = functools.partial(memory.bytes, len(place))
        request = self.disk.write([place], [whole], f"the parameters of {self.layout.name!r}")
        if request is not None:
            request.begin()
            request.wait()

    def _settle_in(self) -> None:
        """The parameters are in their places."""
        for param in self.params:
            if self.grad_dtype is not None and param.requires_grad:
                param.grad_dtype = self.grad_dtype
        self.refresh()

    def filled(self) -> None:
        """The parameters of a bucket that was made empty have its memory, and values."""
        self._empty = False
        self._settle_in()
        for buffer, pin in ((self._buffer, self.pin), (self._values_lie_in, self.pin_masters)):
            if pin and isinstance(buffer, HostBuffer):
                buffer.lock()

    def new_buffer(self, size_bytes: int, *, pin: bool) -> HostBuffer | DeviceBuffer:
        """Memory where the bucket is.

        Raises:
            HostMemoryError: there is too little of it, or it is over the budget.
        """
        if self.resident is not None:
            return DeviceBuffer(self.resident)
        return self._budget.make(size_bytes, self.layout.name, pin=pin, touch=not self._empty)

    def state_buffer(self, size_bytes: int, *, pin: bool) -> HostBuffer | DeviceBuffer:
        """Memory where the states are."""
        if self.disk is not None:
            return self.disk.buffer(size_bytes)
        return self.new_buffer(size_bytes, pin=pin)

    def _masters(
        self, buffer: HostBuffer | DeviceBuffer
    ) -> tuple[HostBuffer | DeviceBuffer, Sequence[Param], list[torch.Tensor]]:
        """The place of the parameters: the buffer (that of what is streamed, if it is theirs too),
        their places in it, and they. Packed ones have no masters: they are what is streamed."""
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
        """Bring the streamed copy up to date with what the user changed."""
        self.copy.refresh(idle=self.pending.in_flight is None)

    def aliased(self, index: int) -> bool:
        """True if a parameter's memory is held under another name."""
        return self._copied.aliased(index)

    # What the user replaced.

    def replaced(self) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Parameters whose storage the user replaced, and their places here."""
        return [(self.params[i], self.values[i]) for i in self._replaced()]

    def is_replaced(self) -> bool:
        """Did the user replace some? The quick look, for every call."""
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
        """True if memory that a parameter has left is still held, as a backup of `p.data`."""
        own = OWN_USERS - 1  # all but the parameter
        return any(
            self.values[i].data_ptr() == self.homes[i]
            and compat.storage_users(self.values[i]) > own
            for i in self._replaced()
        )

    def adopt(self, *, moved: bool = True) -> bool:
        """Take over storage that the user replaced; False where the layout no longer fits.

        Args:
            moved: also where torch has moved it to memory that processes share, which moves our
                own tensors too. Code that made other ones of them then needs new ones.
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
            with torch.no_grad():  # by its name, so that a pending backward sees a new version
                param.copy_(compat.like(param, theirs))
        return True

    def _return_home(self, index: int) -> torch.Tensor:
        """New tensors in a parameter's old place, from which it was moved."""
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
        """Get memory for the gradients: the first time, or when the user still holds the last."""
        dtypes = self._grad_dtypes()
        self._memory = [memory for memory in self._memory if memory is not self._grad_memory]
        made = self._like(dtypes, functools.partial(self.new_buffer, pin=self.pin))
        self.grads, self._grad_memory = made.tensors, made.whole
        self._memory.append(made.whole)

    def make_grad(self, index: int) -> torch.Tensor:
        """Get memory for one gradient of a bucket that lives on the device."""
        like = self.values[index]
        self.grads[index] = torch.empty_like(like, dtype=self.grad_dtype or like.dtype)
        return self.grads[index]

    def keep_grads(self, gradients: Mapping[int, torch.Tensor]) -> None:
        """Takes gradients for a bucket that lives on the device, by index: in their own memory
        where that is not shared, else as copies."""
        dtype, values, strides = self.grad_dtype, self.values, self._strides
        copies: list[torch.Tensor] = []
        copied: list[torch.Tensor] = []
        for i, gradient in gradients.items():
            if (
                gradient.dtype == (dtype or values[i].dtype)
                and gradient.stride() == strides[i]
                and compat.is_alone(gradient)
            ):
                self.grads[i] = gradient.detach()  # one name more: who else has it copies
                continue
            copies.append(self.make_grad(i))
            copied.append(gradient)
        if copies:
            compat.FOREACH_COPY(copies, copied)

    def grads_bytes(self) -> int:
        """Bytes of memory for the gradients, where they are on the host."""
        return self.bytes_like(self._grad_dtypes())

    def _grad_dtypes(self) -> dict[int, torch.dtype]:
        trained = [i for i, param in enumerate(self.params) if param.requires_grad]
        return {i: self.grad_dtype or self.params[i].dtype for i in trained}

    def bytes_like(self, dtypes: Mapping[int, torch.dtype]) -> int:
        """Bytes of memory like some of the parameters: dtypes by index."""
        return _places(self.layout, dtypes)[1]

    def states_like(self, dtypes: Mapping[int, torch.dtype], *, pin: bool) -> NewStates:
        """New memory for states like some of the parameters: dtypes by index."""
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
        """`numel` elements of this bucket's memory, from the first of a tensor in it: (numel,)."""
        found = self._slice(first, numel)
        assert found is not None, "a span that leaves the memory of its bucket"
        return found

    def holds(self, tensor: torch.Tensor) -> bool:
        """True if a dense tensor is in memory that this bucket has now."""
        return self._slice(tensor, tensor.numel()) is not None

    def _slice(self, first: torch.Tensor, numel: int) -> torch.Tensor | None:
        start, size = first.data_ptr(), numel * first.itemsize
        for memory in (self.flat, *self._memory, *self.states.memory()):
            offset = start - memory.data_ptr()
            if 0 <= offset and offset + size <= memory.numel():
                return memory[offset : offset + size].view(first.dtype)
        return None


def _places(layout: Bucket, dtypes: Mapping[int, torch.dtype]) -> tuple[dict[int, Param], int]:
    """Places for tensors like some of a bucket's parameters, and the bytes of a buffer for them."""
    offsets, end = mirrored(layout, {i: dtype.itemsize for i, dtype in dtypes.items()})
    places = {
        i: replace(layout.params[i], dtype=dtype, offset_bytes=offsets[i])
        for i, dtype in dtypes.items()
    }
    return places, end


def set_storage(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Sets a tensor, or this rank's part of it, to `value`."""
    if compat.is_sharded(tensor):
        compat.set_local(tensor, value)
    else:
        tensor.data = value


def _owners(bucket: ref[HostBucket]) -> list[object]:
    """The optimizers that have states of a bucket."""
    alive = bucket()
    return [] if alive is None else alive.states.owners()


def _nothing() -> None:
    """Pageable memory gets its pages when it is written."""


def _say_moved(name: str) -> None:
    notices.warn_once(
        "moved to shared memory",
        f"megacompile: parameter {name!r} (and maybe others) was moved to memory that processes "
        "share, by share_memory() or by sending it to another process. megacompile has taken the "
        "values back into memory of its own: other processes keep what they were until now, and "
        "what they write there is not seen here. Send state_dict() again when they shall know "
        "newer ones (said once)",
        notices.Whose.RANK,
    )
