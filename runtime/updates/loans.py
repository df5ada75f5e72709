"""Buffers of page-locked memory that are lent, each to one use of a bucket that is on a disk.

Buffers are lent in the order in which they are asked for, by one thread, which waits for the last
write of the bucket first. So no thread of the disk waits for one, and a holder of a buffer does not
wait for one that is lent later.
"""

from __future__ import annotations

import functools
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
from megacompile.runtime.device.streams import Host
from megacompile.runtime.disk.transfers import Request
from megacompile.runtime.params.bucket import HostBucket

Parts = Sequence[tuple[int, int]]  # bytes of a bucket: from, to


class Loan:
    """A buffer that is lent, or will be: a `Host`.

    Args:
        host: the bucket.
        after: the last writes of it.
        gaps: bytes that are not written before they go to the disk: they become zeros.
        tells: it is for a prefetch; the thread that waits for it issues the ops, and is no update
            that is in flight itself. Given up, it is for no one: the run was cut off.
    """

    def __init__(
        self, host: HostBucket, behind: Sequence[Host], gaps: Parts, *, tells: bool
    ) -> None:
        self.host = host
        self.tells = tells
        self.behind = tuple(behind)
        self.gaps = gaps
        self.memory: HostBuffer | None = None  # when it is lent
        self.begun = threading.Event()  # it is lent, or never will be
        self.read: Request | None = None
        self.error: BaseException | None = None  # of what it is after, or of its memory
        self.write: Request | None = None  # which it is free after
        self.given_up = self.over = False
        self._start, self._size = host.flat.data_ptr(), len(place_of(host))

    def flat(self) -> torch.Tensor:
        """The bucket in the buffer, which may be larger: flat, uint8."""
        assert self.memory is not None, "a buffer that is not lent"
        return self.memory.bytes(self._size)

    def busy(self) -> bool:
        """True if it is still being read."""
        return not self.begun.is_set() or (self.read is not None and self.read.busy())

    def settle(self) -> None:
        """Wait until the parameters are there.

        Raises:
            OptimizerError: the update before, or its write, has failed.
            HostMemoryError: there is no memory for it.
            DiskError: the read has failed.
        """
        self.begun.wait()
        if self.error is not None:
            if self.tells:
                self.host.pending.settle()  # it fails as well: who is told here is told once
            raise self.error
        if self.given_up and not self.tells:
            raise OptimizerError("the run that these parameters were read for has failed")
        if self.read is not None and not self.given_up:
            self.read.wait()

    def tensor(self, value: torch.Tensor) -> torch.Tensor:
        """The copy in memory of a parameter that is on the disk; any other tensor as it is."""
        at = value.data_ptr() - self._start
        if self.memory is None or not value.numel() or not 0 <= at < self._size:
            return value
        whole = torch.empty(0, dtype=value.dtype)
        storage = torch.frombuffer(self.memory, dtype=torch.uint8).untyped_storage()
        return whole.set_(storage, at // value.itemsize, value.shape, value.stride())


class Loans:
    """The buffers of one kind.

    Args:
        device: that copies to and from them; they are page-locked for a GPU.
        name: of the thread that lends.
        budget: makes them.
    """

    def __init__(self, device: torch.device, name: str, budget: HostBudget) -> None:
        self.device = device
        self.budget = budget
        self.count = self.size_bytes = 0
        self._reserved = (0, 0)  # how many have memory, and how much each
        self._free: deque[tuple[HostBuffer | None, torch.cuda.Event | None]] = deque()
        self._waiting: deque[Loan] = deque()
        self._live: dict[int, Loan] = {}
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

    def lend(self, loan: Loan) -> None:
        """Lend one, when it is this one's turn."""
        self._live[id(loan)] = loan
        self._thread.submit(functools.partial(self._enqueue, loan))

    def give_back(self, loan: Loan, event: torch.cuda.Event | None = None) -> None:
        """It is not used any more, after an event."""
        self._thread.submit(functools.partial(self._take_back, loan, event))

    def give_up(self) -> None:
        """A run has failed: what it has asked for, and will not write, is not needed."""
        left = [loan for loan in list(self._live.values()) if loan.write is None]
        if not left:
            return
        for loan in left:
            loan.host.pending.finish()  # copies from the device may be under way
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # and copies to it
        over = threading.Event()
        self._thread.submit(functools.partial(self._give_up, left, over))
        over.wait()

    # By the thread alone, which no Ctrl-C cuts off.

    def _enqueue(self, loan: Loan) -> None:
        self._waiting.append(loan)
        self._lend()

    def _take_back(self, loan: Loan, event: torch.cuda.Event | None) -> None:
        if loan.over:
            return
        loan.over = True
        self._live.pop(id(loan), None)
        memory, loan.memory = loan.memory, None  # the holder of the loan must not keep it
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

    def _give_up(self, left: Sequence[Loan], over: threading.Event) -> None:
        for loan in left:
            loan.given_up = True
            if loan in self._waiting:
                self._waiting.remove(loan)
                loan.begun.set()
                if loan.read is not None:
                    loan.read.call_off()
            elif loan.read is not None and loan.memory is not None:
                loan.read.finish()
            self._take_back(loan, None)
        over.set()

    def _lend(self) -> None:
        while self._waiting and self._free:
            loan = self._waiting[0]
            try:
                for work in loan.behind:
                    work.settle()
                loan.memory = self._take(loan.host)
                for begin, end in loan.gaps:
                    loan.flat()[begin:end].zero_()
            except BaseException as error:
                loan.error = error
            loan.behind = ()
            self._waiting.popleft()
            if loan.read is not None and loan.error is None:
                loan.read.begin()
            loan.begun.set()

    def _reserve(self) -> None:
        for at in range(len(self._free)):
            if self._free[at][0] is None:
                self._free[at] = (self._new(self.size_bytes, "parameters that lie on a disk"), None)

    def _take(self, host: HostBucket) -> HostBuffer:
        """A free one: if there is any that no copy reads, that."""
        size = len(place_of(host))
        events = [event for _, event in list(self._free)]  # `require` adds to its end
        at = next((i for i, event in enumerate(events) if event and event.query()), 0)
        at = next((i for i, event in enumerate(events) if event is None), at)
        memory, event = self._free[at]
        if event is not None:
            event.synchronize()
        if memory is None or len(memory) < size:
            memory = None
            self._free[at] = (None, None)
            what = f"{host.layout.name!r}, which lies on a disk,"
            memory = self._new(max(size, self.size_bytes), what)
        del self._free[at]
        return memory

    def _new(self, size_bytes: int, what: str) -> HostBuffer:
        pin = self.device.type == "cuda"
        with torch.cuda.device(self.device) if pin else nullcontext():
            return self.budget.make(size_bytes, f"a buffer for {what}", pin=pin)


def place_of(host: HostBucket) -> DiskBuffer:
    """The place of a bucket on the disk."""
    assert host.on_disk is not None, "a bucket that lies in host memory"
    return host.on_disk
