"""Device updates from tensors that a backward leaves on the device for `optimizer.step()`
(`schedule.left`).

The host is the bottleneck of an overlapped step: AdamW moves 22 bytes of host memory per parameter.
Meanwhile the device updates the first buckets, from gradients on the device and states fetched
during the backward. The next forward reads the new parameters there.

These tensors are valid only while the host's copies are unchanged. Parameters and states are
guarded (see `guards`), and the first access to one makes the step fall back to the host. So does
any other change that `fits` detects.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch.optim import Optimizer

from megacompile import compat
from megacompile.ir.stream import Stream
from megacompile.runtime.device.background import Background
from megacompile.runtime.device.streams import Handle, Streams
from megacompile.runtime.params.guards import any_shared
from megacompile.runtime.params.host_bucket import HostBucket
from megacompile.runtime.params.state_memory import StateMemory
from megacompile.runtime.params.work import InFlight
from megacompile.runtime.updates.parameter import (
    Pairs,
    ParamUpdate,
    Sources,
    Timed,
    UpdateBuffers,
    fulfil_update,
    params_back,
    states_back,
)


@dataclass(frozen=True, slots=True)
class UpdateOffer:
    """An offer to `optimizer.step()`: one bucket's gradients, parameters and states on the
    device."""

    streams: Streams
    gradients: Handle  # (bucket key, parameter index -> gradient)
    buffers: Handle  # of `UpdateBuffers`
    sources: Sources  # the states on the host
    visible: Sequence[torch.Tensor]  # the user-visible states
    host: HostBucket
    versions: tuple[int, ...]  # of the parameters and states

    def fits(self, steps: Sequence[ParamUpdate]) -> bool:
        """True if the step's updates match the offer exactly, and nothing has changed since the
        backward."""
        return (
            {step.index for step in steps} == self.buffers.value.keys()
            and all(s.intact and _ids(s.in_order()) == _ids(self.sources[s.index]) for s in steps)
            and self.versions == _versions(self.host, self.buffers.value, self.visible)
        )

    def drop(self) -> None:
        """Wait for the copies of the offer, whose memory is free afterwards."""
        self.streams.synchronize(Stream.H2D)
        self.streams.synchronize(Stream.D2H)

    def bring_back(
        self, updated: torch.cuda.Event | None, thread: Background, timed: Timed
    ) -> InFlight | None:
        """Copy the new values to the host by a thread, after the event `updated`. Returns the work
        in flight; None on the CPU, where the copies are already done."""
        host, buffers = self.host, self.buffers.value
        queue = self.streams.copies(Stream.D2H)
        flying = None
        if queue is None or updated is None:  # the CPU
            timed(Stream.D2H.value, functools.partial(_copy, self._back(buffers)))
        else:
            copy = functools.partial(_copy_in_chunks, self._back(buffers), queue, updated)
            fresh = {i: buffer.streamed for i, buffer in buffers.items()}
            future: Future[None] = Future()
            flying = InFlight(future=future, fresh=fresh)
            try:
                # register with the bucket before it can start
                host.pending.start(flying, list(buffers), self.visible)
                work = functools.partial(timed, Stream.D2H.value, copy)
                thread.submit(functools.partial(fulfil_update, future, host.layout.name, work))
            except BaseException:
                if future.cancel():
                    timed(Stream.D2H.value, lambda: None)  # a trace waits for its completion
                    host.pending.wait()  # the next forward must not use the device tensors
                raise
        host.note_changes(buffers)
        return flying

    def _back(self, buffers: UpdateBuffers) -> Pairs:
        yield from params_back(self.host, buffers)
        yield from states_back(buffers, self.sources)


@dataclass(frozen=True, slots=True)
class _Learned:
    """An optimizer's states for a bucket."""

    sources: Sources
    visible: tuple[torch.Tensor, ...]  # the user-visible states
    owner: ref[Optimizer]
    memory: ref[StateMemory]  # the states' memory


class DeviceUpdates:
    """Implements the ops of schedules with device updates.

    The first step of an optimizer runs on the host, because its states are unknown before it.
    """

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self.keys: set[int] = set()  # keys of buckets that any schedule updates on the device
        self._learned: dict[int, _Learned] = {}  # by bucket key
        self.flying: list[HostBucket] = []  # buckets with new values in flight to the host

    def learn(
        self,
        owner: Optimizer,
        host: HostBucket,
        steps: Iterable[ParamUpdate],
        visible: Iterable[torch.Tensor],
    ) -> None:
        """Record the states used by a rule-based update, unless they came from a disk."""
        key = host.layout.key
        if key in self.keys and host.disk is None:
            sources = {s.index: s.in_order() for s in steps}
            self._learned[key] = _Learned(sources, tuple(visible), ref(owner), ref(host.states))

    def sources(self, host: HostBucket, trained: Sequence[int]) -> Sources:
        """The states for an update of these parameters, page-locked; empty if they are unknown."""
        learned = self._of(host)
        if learned is None or learned.sources.keys() != set(trained):
            return {}
        host.states.lock(learned.owner())
        return learned.sources

    def keep(self, host: HostBucket, gradients: Handle, buffers: Handle) -> bool:
        """Offer a bucket to the next step; returns False if the step could not use it."""
        learned = self._of(host)
        if not buffers.value or learned is None:
            return False
        sources, visible = learned.sources, learned.visible
        if any(map(host.aliased, buffers.value)) or any_shared(visible):
            return False  # aliases may bypass the guards
        versions = _versions(host, buffers.value, visible)
        left = UpdateOffer(self.streams, gradients, buffers, sources, visible, host, versions)
        host.pending.offer(left, list(buffers.value), visible)
        return True

    def wait_for_copies(self) -> None:
        """Wait for copies in flight to the host, and free their sources."""
        flying, self.flying = self.flying, []
        for host in flying:
            if host.pending.in_flight is not None and host.pending.in_flight.fresh:
                host.pending.wait()

    def forget(self) -> None:
        """Forget all known states, when the buckets are dropped."""
        self._learned.clear()

    def _of(self, host: HostBucket) -> _Learned | None:
        """The known states of a bucket, if they are still in place and their optimizer is alive;
        outdated ones are dropped."""
        found = self._learned.get(host.layout.key)
        if found is None or (found.memory() is host.states and found.owner() is not None):
            return found
        del self._learned[host.layout.key]
        return None


def _copy(pairs: Pairs) -> None:
    for on_device, on_host in pairs:
        on_host.copy_(on_device)


_COPY_BYTES = 64 * 2**20  # per chunk; about a millisecond of the link


def _copy_in_chunks(pairs: Pairs, queue: torch.cuda.Stream, after: torch.cuda.Event) -> None:
    """Copy to page-locked host memory on the stream `queue`, after `after`, and wait.

    [Note: small chunks] The device-to-host copy engine is first in, first out across all streams: a
    `loss.item()` waits for all copies issued before it. So a thread issues the copies in chunks,
    three at a time. It sleeps until one completes instead of spinning, because host updates need
    the core.
    """
    under_way: deque[torch.cuda.Event] = deque()
    with torch.cuda.stream(queue), torch.no_grad():
        queue.wait_event(after)  # read after write
        for on_device, on_host in pairs:
            numel = _COPY_BYTES // on_device.itemsize
            for source, target in zip(on_device.split(numel), on_host.split(numel), strict=True):
                target.copy_(source, non_blocking=True)
                event: Any = torch.cuda.Event(blocking=True)
                event.record(queue)
                under_way.append(event)
                if len(under_way) > 2:
                    under_way.popleft().synchronize()
        for event in under_way:
            event.synchronize()


def _versions(
    host: HostBucket, params: Iterable[int], states: Iterable[torch.Tensor]
) -> tuple[int, ...]:
    return tuple(compat.versions([*(host.params[i] for i in params), *states]))


def _ids(states: Iterable[object]) -> list[int]:
    """The identities of states' tensors; a state may be a pair of tensors."""
    return [id(t) for state in states for t in (state if isinstance(state, tuple) else (state,))]


# Device memory that copies to the host still read: `defer_free` keeps it, `drain` frees it. Without
# a forward that drains it, it is freed when other memory is deferred.


@dataclass(frozen=True, slots=True)
class Deferred:
    """Device memory that a copy to the host may still read."""

    value: Any
    copied: torch.cuda.Event
    owner: torch.cuda.Stream  # the memory's stream in the caching allocator
    forget: Callable[[], None] = lambda: None  # called when it is freed

    def freed(self) -> bool:
        """True if the copy is done, after which nothing needs the memory."""
        done = bool(self.copied.query())
        if done:
            self.forget()
        return done


class DeferredFrees:
    """Keeps memory until the copies from it are done or awaited."""

    def __init__(self) -> None:
        self._entries: list[Deferred] = []

    def add(self, entry: Deferred) -> None:
        """Keep memory, and free entries whose copies are done."""
        self._entries = [*(each for each in self._entries if not each.freed()), entry]

    def take(self) -> list[Deferred]:
        """Take all entries: the caller waits for the copies and frees the memory."""
        taken, self._entries = self._entries, []
        return taken
