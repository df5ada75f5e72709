"""Optimizer states that are on a disk, while they are in host memory.

A step takes them from the disk to a buffer of page-locked memory, changes them there, and brings
them back. There are a few sets of buffers, and each serves one bucket at a time, from its read to
the end of its write. Sets are given in the order of the updates, by one thread, before a read
begins: so the first update that is not made has a set, and no thread of the disk waits for one.
Each schedule says how many sets it needs.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch

from megacompile.errors import DiskError, OptimizerError
from megacompile.ir.ops import Part
from megacompile.runtime.device.background import Background
from megacompile.runtime.device.buffers import HostBuffer
from megacompile.runtime.device.disk_buffers import Disk, DiskBuffer
from megacompile.runtime.device.host_budget import HostBudget
from megacompile.runtime.device.streams import Host
from megacompile.runtime.disk.transfers import Request
from megacompile.runtime.optim.rule import State
from megacompile.runtime.params.bucket import HostBucket
from megacompile.runtime.params.pending import InFlight


class Staged:
    """The states of one bucket, in a buffer that has a place for each of theirs on the disk.

    Args:
        host: the bucket.
        buffers: where they are on the disk.
    """

    def __init__(self, host: HostBucket, buffers: Sequence[DiskBuffer]) -> None:
        self.host = host
        self.buffers = tuple(buffers)
        self.memory: HostBuffer | None = None  # for all of them, when it has one
        self._places = list(itertools.accumulate(map(len, buffers), initial=0))  # in it
        self.begun = threading.Event()  # it has a set, or never will
        self.read: Request | None = None
        self.written: Written | None = None
        self.given_up = False
        self.error: BaseException | None = None  # there is no memory for it
        self._starts = [buffer.bytes(len(buffer)).data_ptr() for buffer in buffers]

    def flat(self) -> list[Callable[[], torch.Tensor]]:
        """The memory of each buffer, flat."""
        return [functools.partial(self._flat, i) for i in range(len(self.buffers))]

    def _flat(self, i: int) -> torch.Tensor:
        assert self.memory is not None, "states that are not in memory"
        return self.memory.bytes(self._places[-1])[self._places[i] : self._places[i + 1]]

    def busy(self) -> bool:
        """True if it is still being read."""
        return not self.begun.is_set() or (self.read is not None and self.read.busy())

    def settle(self) -> None:
        """Wait until it is there.

        Raises:
            HostMemoryError: there is no memory for it.
            DiskError: the read has failed.
            OptimizerError: the run that it was for has.
        """
        self.begun.wait()
        if self.error is not None:
            raise self.error
        if self.given_up:
            raise OptimizerError("the step that these states were read for has failed")
        if self.read is not None:
            self.read.wait()

    def tensor(self, state: torch.Tensor) -> torch.Tensor:
        """The copy in memory of a tensor that is on the disk; any other as it is."""
        address = state.data_ptr()
        for i, (start, buffer) in enumerate(zip(self._starts, self.buffers, strict=True)):
            at = address - start
            if state.numel() and 0 <= at < len(buffer):
                assert self.memory is not None, "states that are not in memory"
                whole = torch.empty(0, dtype=state.dtype)
                storage = torch.frombuffer(self.memory, dtype=torch.uint8).untyped_storage()
                place = (self._places[i] + at) // state.itemsize
                return whole.set_(storage, place, state.shape, state.stride())
        return state

    def states(self, states: Sequence[State | None]) -> tuple[State | None, ...]:
        """The copies of states."""
        return tuple(
            None
            if state is None
            else (self.tensor(state[0]), self.tensor(state[1]))
            if isinstance(state, tuple)
            else self.tensor(state)
            for state in states
        )


@dataclass(frozen=True, slots=True)
class Writing:
    """New values on their way to a disk, after what makes them."""

    request: Request
    name: str  # of the bucket
    first: InFlight | None  # what makes them; None: that is done
    fresh: dict[int, torch.Tensor] = field(default_factory=dict)

    def done(self) -> bool:
        return self.request.done() and (self.first is None or self.first.done())

    def wait(self) -> None:
        if self.first is not None:
            try:
                self.first.wait()
            except OptimizerError:
                self.request.finish()  # it fails too: then all of this is over
                raise
        try:
            self.request.wait()
        except DiskError as error:
            raise OptimizerError(self._torn(error)) from error

    def _torn(self, error: DiskError) -> str:
        """The error text where the write has failed."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Written(Writing):
    """New states on their way to a disk: an `InFlight`."""

    def event(self, part: Part) -> torch.cuda.Event | None:
        """That of the copies to the host, of the parameters."""
        if self.first is None or part is not Part.WEIGHTS:
            return None
        return self.first.event(part)

    def ahead(self, part: Part) -> Host | None:
        """The parameters are there when they are made."""
        return UpdatedParams(self.first) if part is Part.WEIGHTS else None

    def _torn(self, error: DiskError) -> str:
        return (
            f"optimizer.step(): the new states of {self.name!r} did not reach the disk whole "
            f"({error}); its parameters are updated and its states are torn: load a checkpoint"
        )


@dataclass(frozen=True, slots=True)
class UpdatedParams:
    """New parameters, whose states may be on their way for longer: a `Host`."""

    work: InFlight | None

    def busy(self) -> bool:
        return self.work is not None and not self.work.done()

    def settle(self) -> None:
        if self.work is not None:
            self.work.wait()


class Staging:
    """The sets of buffers of one model.

    Args:
        disk: where states are.
        device: that copies to and from the buffers, which are page-locked for a GPU.
        budget: makes them.
    """

    def __init__(self, disk: Disk, device: torch.device, budget: HostBudget) -> None:
        self.disk = disk
        self.device = device
        self.budget = budget
        self.read_bytes = self.written_bytes = 0  # so far
        self._staged: dict[int, Staged] = {}  # by their ids: a write of the last may be ending
        self._waiting: deque[Staged] = deque()  # for a set, in the order of their updates
        self._sets: deque[HostBuffer | None] = deque()  # free ones
        self.sets = self.set_bytes = 0
        self._reserved = (0, 0)  # sets that have memory, and how much each
        self._thread = Background("megacompile-staging")  # who alone returns sets

    def require(self, count: int, size_bytes: int = 0) -> None:
        """Have at least so many sets of that size, as a schedule says (`Plan.state_sets`).

        They are as large as the largest bucket needs from the start: to let one grow would take the
        memory of both, because what was in it may be in use yet.
        """
        self.set_bytes = max(self.set_bytes, size_bytes)
        while self.sets < count:
            self.sets += 1
            self._sets.append(None)

    def reserve(self, hosts: Iterable[HostBucket]) -> None:
        """Have memory for all sets, before a step of these buckets changes anything: plans of an
        optimizer that was not known may have counted too little.

        Raises:
            HostMemoryError: there is too little of it.
        """
        sizes = {host.layout.name: _size(host.states.on_disk()) for host in hosts}
        name = max(sizes, key=lambda name: sizes[name], default="")
        self.set_bytes = max(self.set_bytes, sizes.get(name, 0))
        wanted = self.sets, self.set_bytes
        if not sizes.get(name) or wanted == self._reserved:
            return
        self._thread.call(functools.partial(self._reserve, name))
        self._reserved = wanted

    def of(self, host: HostBucket) -> Staged | None:
        """The states of a bucket that are in memory."""
        found = reversed(list(self._staged.values()))
        return next((staged for staged in found if staged.host is host), None)

    def read(self, host: HostBucket, what: str) -> Staged | None:
        """Bring a bucket's states to memory; None: none of them is on the disk.

        A child of a fork has them in memory of its own already.
        """
        buffers = host.states.on_disk()
        if not buffers or not all(buffer.ours for buffer in buffers):
            return None
        staged = Staged(host, buffers)
        staged.read = self.disk.read(buffers, staged.flat(), what)
        assert staged.read is not None
        self.read_bytes += staged.read.size_bytes
        self._staged[id(staged)] = staged
        self._waiting.append(staged)
        self._thread.submit(self._give_sets)
        return staged

    def write(
        self,
        staged: Staged,
        what: str,
        first: InFlight | None,
        before: Callable[[], None] = lambda: None,
    ) -> Written:
        """Bring new states to the disk: what is in flight then, whose request is to begin.

        Args:
            first: what makes them.
            before: waits for that.
        """

        def made() -> None:
            before()
            staged.settle()

        request = self.disk.write(staged.buffers, staged.flat(), what, before=made)
        assert request is not None
        self.written_bytes += request.size_bytes
        request.when_done(functools.partial(self._release, staged))
        name, fresh = staged.host.layout.name, {} if first is None else first.fresh
        staged.written = Written(request, name, first, fresh)
        return staged.written

    def give_up(self) -> None:
        """A run has failed: what it has read, and will not write, is not needed."""
        left = [staged for staged in list(self._staged.values()) if staged.written is None]
        if not left:
            return
        for staged in left:
            staged.host.pending.finish()  # copies from the device may be under way
        over = threading.Event()
        self._thread.submit(functools.partial(self._give_up, left, over))
        over.wait()

    def _give_up(self, left: Sequence[Staged], over: threading.Event) -> None:
        for staged in left:
            staged.given_up = True
            if staged in self._waiting:
                self._waiting.remove(staged)
                staged.begun.set()
                if staged.read is not None:
                    staged.read.call_off()
            elif staged.read is not None:
                staged.read.finish()
            self._release(staged)
        over.set()

    def _release(self, staged: Staged) -> None:
        self._staged.pop(id(staged), None)
        memory, staged.memory = staged.memory, None  # its holder must not keep it
        if memory is not None:
            self._sets.append(memory)
            self._thread.submit(self._give_sets)

    def _give_sets(self) -> None:
        """Starts the reads that wait, as far as there are sets."""
        while self._waiting and self._sets:
            staged, free = self._waiting.popleft(), self._sets.popleft()
            size = _size(staged.buffers)
            assert staged.read is not None
            try:
                if free is None or len(free) < size:
                    free = None
                    free = self._new(max(size, self.set_bytes), staged.host.layout.name)
            except BaseException as error:  # its waiter is told
                staged.error = error
                self._sets.append(None)
                staged.read.call_off()
            else:
                staged.memory = free
                staged.read.begin()
            staged.begun.set()

    def _reserve(self, name: str) -> None:
        for at in range(len(self._sets)):  # others may come back meanwhile, at its end
            free = self._sets[at]
            if free is None or len(free) < self.set_bytes:
                free = self._sets[at] = None
                self._sets[at] = self._new(self.set_bytes, name)

    def _new(self, size: int, name: str) -> HostBuffer:
        pin = self.device.type == "cuda"
        what = f"a buffer for the states of {name!r}, which lie on a disk,"
        with torch.cuda.device(self.device) if pin else nullcontext():
            return self.budget.make(size, what, pin=pin)


def _size(buffers: Iterable[DiskBuffer]) -> int:
    return sum(len(buffer) for buffer in buffers)
