"""Buffers of page-locked memory that are lent, each to one use of what a bucket has on a disk.

Buffers are lent in the order in which they are asked for, by one thread, which waits for the last
write of the bucket first. So no thread of the disk waits for one, and a holder of a buffer does not
wait for one that is lent later.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext

import torch

from megacompile.errors import OptimizerError
from megacompile.runtime.device.background import Background
from megacompile.runtime.device.buffers import HostBuffer
from megacompile.runtime.device.disk_buffers import DiskBuffer
from megacompile.runtime.device.host_budget import HostBudget
from megacompile.runtime.device.streams import Completion
from megacompile.runtime.disk.transfers import Request
from megacompile.runtime.optim.rule import State
from megacompile.runtime.params.bucket import HostBucket

Parts = Sequence[tuple[int, int]]  # bytes of a lease: from, to


class Lease:
    """A buffer that is lent, or will be: a `Completion`, which is done when the buffer is filled.

    It has a place for each of some places on the disk, one after the other.

    Args:
        host: the bucket.
        buffers: what it has on the disk.
        after: the last writes of it.
        gaps: bytes that are not written before they go to the disk: they become zeros.
        tells: it is for a prefetch; the thread that waits for it issues the ops, and is no update
            that is in flight itself. Given up, it is for no one: the run was cut off.
    """

    def __init__(
        self,
        host: HostBucket,
        buffers: Sequence[DiskBuffer],
        after: Sequence[Completion] = (),
        gaps: Parts = (),
        *,
        tells: bool = False,
    ) -> None:
        self.host = host
        self.buffers = tuple(buffers)
        self.tells = tells
        self.after = tuple(after)
        self.gaps = gaps
        self.memory: HostBuffer | None = None  # when it is lent
        self.begun = threading.Event()  # it is lent, or never will be
        self.read: Request | None = None
        self.error: BaseException | None = None  # of what it is after, or of its memory
        self.write: Request | None = None  # which it is free after
        self.given_up = self.over = False
        self._places = list(itertools.accumulate(map(len, buffers), initial=0))
        self._starts = [torch.frombuffer(b, dtype=torch.uint8).data_ptr() for b in buffers]

    @property
    def size_bytes(self) -> int:
        """The memory that it needs; a buffer may be larger."""
        return self._places[-1]

    def flat(self, i: int = 0) -> torch.Tensor:
        """The memory for a place on the disk: flat, uint8."""
        assert self.memory is not None, "a buffer that is not lent"
        return self.memory.bytes(self.size_bytes)[self._places[i] : self._places[i + 1]]

    def done(self) -> bool:
        """True if it is filled."""
        return self.begun.is_set() and (self.read is None or self.read.done())

    def wait(self) -> None:
        """Wait until it is filled.

        Raises:
            OptimizerError: the update before, or its write, has failed; or the run that it is for.
            HostMemoryError: there is no memory for it.
            DiskError: the read has failed.
        """
        self.begun.wait()
        if self.error is not None:
            if self.tells:
                self.host.pending.wait()  # it fails as well: who is told here is told once
            raise self.error
        if self.given_up and not self.tells:
            name = self.host.layout.name
            raise OptimizerError(f"the run that {name!r} was read from a disk for has failed")
        if self.read is not None and not self.given_up:
            self.read.wait()

    def tensor(self, value: torch.Tensor) -> torch.Tensor:
        """The copy in memory of a tensor that is on the disk; any other tensor as it is."""
        address = value.data_ptr()
        for i, (start, buffer) in enumerate(zip(self._starts, self.buffers, strict=True)):
            at = address - start
            if self.memory is not None and value.numel() and 0 <= at < len(buffer):
                whole = torch.empty(0, dtype=value.dtype)
                storage = torch.frombuffer(self.memory, dtype=torch.uint8).untyped_storage()
                place = (self._places[i] + at) // value.itemsize
                return whole.set_(storage, place, value.shape, value.stride())
        return value

    def states(self, states: Sequence[State | None]) -> tuple[State | None, ...]:
        """The same of states."""
        return tuple(map(self._state, states))

    def _state(self, state: State | None) -> State | None:
        if isinstance(state, tuple):
            return self.tensor(state[0]), self.tensor(state[1])
        return None if state is None else self.tensor(state)


class Leases:
    """The buffers of one kind.

    They are as large as the largest bucket needs from the start: to let one grow would take the
    memory of both, because what was in it may be in use yet.

    Args:
        device: that copies to and from them; they are page-locked for a GPU.
        name: of the thread that lends.
        what: names their purpose in errors.
        budget: makes them.
    """

    def __init__(self, device: torch.device, name: str, what: str, budget: HostBudget) -> None:
        self.device = device
        self.what = what
        self.budget = budget
        self.count = self.size_bytes = 0
        self.written_bytes = 0  # so far
        self._reserved = (0, 0)  # how many have memory, and how much each
        self._free: deque[tuple[HostBuffer | None, torch.cuda.Event | None]] = deque()
        self._waiting: deque[Lease] = deque()
        self._live: dict[int, Lease] = {}
        self._thread = Background(name)  # who alone lends

    def require(self, count: int, size_bytes: int = 0) -> None:
        """Have at least so many, as a schedule says, as large as the largest bucket needs."""
        if size_bytes < self.size_bytes:
            self._thread.submit(functools.partial(self._shrink, size_bytes))
        self.size_bytes = size_bytes or self.size_bytes
        while self.count < count:
            self._free.append((None, None))
            self.count += 1

    def reserve(self) -> None:
        """Take memory for all that has none, before a step changes anything.

        Raises:
            HostMemoryError: there is too little of it.
        """
        if (wanted := (self.count, self.size_bytes)) == self._reserved or not self.size_bytes:
            return
        self._thread.call(self._reserve)
        self._reserved = wanted

    def of(self, host: HostBucket) -> Lease | None:
        """The last lease of a bucket that is not written, or given back."""
        for lease in reversed(list(self._live.values())):
            written = lease.write is not None and lease.write.done()
            if lease.host is host and not lease.over and not written:
                return lease
        return None

    def lend(self, lease: Lease) -> None:
        """Lend one, when it is this one's turn."""
        self._live[id(lease)] = lease
        self._thread.submit(functools.partial(self._enqueue, lease))

    def write(self, lease: Lease, request: Request) -> None:
        """It goes back when a write of its content is over."""
        lease.write = request
        self.written_bytes += request.size_bytes
        request.when_done(functools.partial(self.give_back, lease))

    def give_back(self, lease: Lease, event: torch.cuda.Event | None = None) -> None:
        """It is not used any more, after an event."""
        self._thread.submit(functools.partial(self._take_back, lease, event))

    def give_up(self) -> None:
        """A run has failed: what it has asked for, and will not write, is not needed."""
        left = [lease for lease in list(self._live.values()) if lease.write is None]
        if not left:
            return
        for lease in left:
            lease.host.pending.finish()  # copies from the device may be under way
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # and copies to it
        over = threading.Event()
        self._thread.submit(functools.partial(self._give_up, left, over))
        over.wait()

    # By the thread alone, which no Ctrl-C cuts off.

    def _enqueue(self, lease: Lease) -> None:
        self._waiting.append(lease)
        self._lend()

    def _take_back(self, lease: Lease, event: torch.cuda.Event | None) -> None:
        if lease.over:
            return
        lease.over = True
        self._live.pop(id(lease), None)
        memory, lease.memory = lease.memory, None  # the holder of the lease must not keep it
        if memory is not None:
            self._free.append((memory, event))
            del memory
            self._shrink(self.size_bytes)
            self._lend()

    def _shrink(self, size_bytes: int) -> None:
        """Buffers that are larger than any bucket now are given up: larger ones have moved."""
        for at, (memory, event) in enumerate(list(self._free)):  # `require` adds to its end
            if memory is not None and len(memory) > size_bytes:
                if event is not None:
                    event.synchronize()
                self._free[at] = (None, None)

    def _give_up(self, left: Sequence[Lease], over: threading.Event) -> None:
        for lease in left:
            lease.given_up = True
            if lease in self._waiting:
                self._waiting.remove(lease)
                lease.begun.set()
                if lease.read is not None:
                    lease.read.call_off()
            elif lease.read is not None and lease.memory is not None:
                lease.read.finish()
            self._take_back(lease, None)
        over.set()

    def _lend(self) -> None:
        while self._waiting and self._free:
            lease = self._waiting[0]
            try:
                for work in lease.after:
                    work.wait()
                lease.memory = self._take(lease)
                for begin, end in lease.gaps:
                    lease.flat()[begin:end].zero_()
            except BaseException as error:
                lease.error = error
            lease.after = ()
            self._waiting.popleft()
            if lease.read is not None:
                lease.read.begin() if lease.error is None else lease.read.call_off()
            lease.begun.set()

    def _reserve(self) -> None:
        for at, (memory, event) in enumerate(list(self._free)):
            if memory is None or len(memory) < self.size_bytes:
                if event is not None:
                    event.synchronize()
                memory = None
                self._free[at] = (None, None)
                memory = self._new(self.size_bytes, f"{self.what} that lie on a disk")
                self._free[at] = (memory, None)

    def _take(self, lease: Lease) -> HostBuffer:
        """A free one: if there is any that no copy reads, that."""
        events = [event for _, event in list(self._free)]  # `require` adds to its end
        at = next((i for i, event in enumerate(events) if event and event.query()), 0)
        at = next((i for i, event in enumerate(events) if event is None), at)
        memory, event = self._free[at]
        if event is not None:
            event.synchronize()
        if memory is None or len(memory) < lease.size_bytes:
            memory = None
            self._free[at] = (None, None)
            what = f"the {self.what} of {lease.host.layout.name!r}, which lie on a disk,"
            memory = self._new(max(lease.size_bytes, self.size_bytes), what)
        del self._free[at]
        return memory

    def _new(self, size_bytes: int, what: str) -> HostBuffer:
        pin = self.device.type == "cuda"
        with torch.cuda.device(self.device) if pin else nullcontext():
            return self.budget.make(size_bytes, f"a buffer for {what}", pin=pin)
