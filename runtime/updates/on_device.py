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
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from weakref import ref

import torch
from torch.optim import Optimizer

from megacompile import compat
from megacompile.ir.stream import Stream
from megacompile.runtime.device.background import Background
from megacompile.runtime.device.streams import Handle, Streams
from megacompile.runtime.params.guards import is_shared
from megacompile.runtime.params.host_bucket import HostBucket
from megacompile.runtime.params.state_memory import StateMemory
from megacompile.runtime.params.work import InFlight
from megacompile.runtime.updates.device_buffers import (
    Sources,
    Timed,
    UpdateBuffers,
    copy_in_chunks,
    fetch,
    fulfil_update,
    make_buffers,
    params_back,
    states_back,
)
from megacompile.runtime.updates.parameter import ParamUpdate


@dataclass(frozen=True, slots=True)
class DeviceUpdate:
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
            and all(s.intact and _same(s.in_order(), self.sources[s.index]) for s in steps)
            and self.versions == _versions(self.host, self.buffers.value, self.visible)
        )

    def drop(self) -> None:
        """Wait for the copies of the offer, whose memory is free afterwards."""
        self.streams.synchronize(Stream.H2D)
        self.streams.synchronize(Stream.D2H)

    def bring_back(
        self, updated: torch.cuda.Event | None, thread: Background, timed: Timed
    ) -> InFlight | None:
        """Copy the new values to the host.

        Args:
            updated: recorded after the update.
            thread: issues the copies.
            timed: runs the copies and records their times.

        Returns:
            The work in flight; None on the CPU, where the copies are already done.
        """
        host, buffers = self.host, self.buffers.value
        queue = self.streams.copies(Stream.D2H)
        flying = None
        if queue is None or updated is None:  # the CPU
            timed(Stream.D2H.value, functools.partial(_copy, self._back(buffers)))
        else:
            copy = functools.partial(copy_in_chunks, self._back(buffers), queue, updated)
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

    def _back(self, buffers: UpdateBuffers) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        yield from params_back(self.host, buffers)
        yield from states_back(buffers, self.sources)


@dataclass(frozen=True, slots=True)
class _Learned:
    """An optimizer's states for a bucket."""

    sources: Sources
    visible: tuple[torch.Tensor, ...]  # the user-visible states
    owner: ref[Optimizer]
    memory: ref[StateMemory]  # the states' memory

    def of(self, host: HostBucket) -> bool:
        """True if these are still this bucket's states in place, and the optimizer is alive."""
        return self.memory() is host.states and self.owner() is not None


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

    def alloc(self, host: HostBucket, trained: Sequence[int], *, masters: bool) -> UpdateBuffers:
        """Allocate memory for a bucket's parameters and states; empty if the states are unknown."""
        learned = self._of(host)
        if learned is None or learned.sources.keys() != set(trained):
            return {}
        host.states.lock(learned.owner())
        return make_buffers(host, learned.sources, self.streams.device, masters=masters)

    def fetch(self, host: HostBucket, buffers: UpdateBuffers, *, masters: bool) -> UpdateBuffers:
        """Copy parameters and states to the device."""
        learned = self._of(host)
        if learned is not None:
            fetch(host, buffers, learned.sources, masters=masters)
        return buffers

    def keep(self, host: HostBucket, gradients: Handle, buffers: Handle) -> bool:
        """Offer a bucket to the next step; returns False if the step could not use it."""
        learned = self._of(host)
        if not buffers.value or learned is None:
            return False
        sources, visible = learned.sources, learned.visible
        if any(map(host.aliased, buffers.value)) or any(map(is_shared, visible)):
            return False  # aliases may bypass the guards
        versions = _versions(host, buffers.value, visible)
        left = DeviceUpdate(self.streams, gradients, buffers, sources, visible, host, versions)
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
        """The known states of a bucket; outdated ones are dropped."""
        learned = self._learned.get(host.layout.key)
        if learned is not None and not learned.of(host):
            del self._learned[host.layout.key]
            return None
        return learned


def _copy(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for on_device, on_host in pairs:
        on_host.copy_(on_device)


def _versions(
    host: HostBucket, params: Iterable[int], states: Iterable[torch.Tensor]
) -> tuple[int, ...]:
    return (
        *(compat.version(host.params[i]) for i in params),
        *(compat.version(state) for state in states),
    )


def _same(states: Sequence[object], others: Sequence[object]) -> bool:
    """True if they are identical tensors, or pairs of tensors."""
    return len(states) == len(others) and all(
        a is b or (isinstance(a, tuple) and isinstance(b, tuple) and all(map(_is, a, b)))
        for a, b in zip(states, others, strict=True)
    )


def _is(a: object, b: object) -> bool:
    return a is b
