"""What the backward leaves on the device for `optimizer.step()`: the `device_update` op.

The host is the slow part of an overlapped step: its memory moves 22 bytes a parameter for AdamW.
The device makes the update of the first buckets meanwhile, from gradients that it has and states
that were fetched during the backward; the next forward takes the new parameters where they are.

What was left there is right only while nothing on the host has changed since: the parameters and
states are guarded (see `guards`), and whoever opens one of them, to read or to write, makes the
step fall back to the host. So does anything that `fits` does not find as the backward left it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from weakref import ref

import torch
from torch.optim import Optimizer

from megacompile import compat
from megacompile.ir.stream import Stream
from megacompile.runtime.device.background import Background, fulfil
from megacompile.runtime.device.streams import Streams
from megacompile.runtime.optim.states import is_shared
from megacompile.runtime.params.bucket import HostBucket
from megacompile.runtime.updates.device_buffers import (
    Sources,
    UpdateBuffers,
    fetch,
    make_buffers,
    note_changes,
    params_back,
    states_back,
    update,
)
from megacompile.runtime.updates.flight import Flight, copy_in_chunks
from megacompile.runtime.updates.update import Step


@dataclass(frozen=True, slots=True)
class DeviceUpdate:
    """Gradients, parameters and states of one bucket on the device."""

    streams: Streams
    gradients: Mapping[int, torch.Tensor]  # by the parameter's index
    buffers: UpdateBuffers
    sources: Sources  # where the states came from
    visible: Sequence[torch.Tensor]  # the states that the user holds
    host: HostBucket
    versions: tuple[int, ...]  # of the parameters and states

    def fits(self, steps: Sequence[Step]) -> bool:
        """Are these the updates of exactly this, and is it all as the backward left it?"""
        return (
            {step.index for step in steps} == self.buffers.keys()
            and all(s.intact and _same(s.in_order(), self.sources[s.index]) for s in steps)
            and self.versions == _versions(self.host, self.buffers, self.visible)
        )

    def drop(self) -> None:
        """It will not be used: its memory may be given back when the copies are done."""
        self.streams.synchronize(Stream.H2D)
        self.streams.synchronize(Stream.D2H)

    def step(self, host: HostBucket, steps: Sequence[Step], thread: Background) -> None:
        """Make the update; `thread` brings the new values to the host."""
        by_index = {step.index: step for step in steps}

        def compute() -> None:
            update(host, self.buffers, by_index, self.gradients, None)

        def back() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            yield from params_back(host, self.buffers)
            yield from states_back(self.buffers, self.sources)

        with self.streams.run(), torch.no_grad():
            made = self.streams.issue(Stream.COMPUTE, (), compute)
        queue = self.streams.copies(Stream.D2H)
        if queue is None or made.event is None:  # the CPU
            for there, here in back():
                here.copy_(there)
        else:
            copy = functools.partial(copy_in_chunks, back(), queue, made.event)
            fresh = {i: buffer.streamed for i, buffer in self.buffers.items()}
            future: Future[None] = Future()
            try:
                # the bucket knows of it before anybody can begin it
                host.start(
                    Flight(future, host.layout.name, fresh), list(self.buffers), self.visible
                )
                thread.submit(functools.partial(fulfil, future, copy))
            except BaseException:
                if future.cancel():
                    host.settle()  # the next forward must not take what is on the device
                raise
        note_changes(host, self.buffers)


class DeviceUpdates:
    """Carries out the ops of schedules that have device updates.

    The first step of an optimizer runs on the host; from it is learned which states there are.
    """

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self.keys: set[int] = set()  # of the buckets that some schedule lets the device update
        self._learned: dict[int, tuple[Sources, tuple[torch.Tensor, ...]]] = {}
        self._owners: dict[int, ref[Optimizer]] = {}  # whose states they are
        self.flying: list[HostBucket] = []  # whose new values are on their way to the host

    def learn(
        self,
        owner: Optimizer,
        key: int,
        steps: Iterable[Step],
        visible: Iterable[torch.Tensor],
    ) -> None:
        """Note the states that an update by rule has used."""
        if key in self.keys:
            self._learned[key] = ({s.index: s.in_order() for s in steps}, tuple(visible))
            self._owners[key] = ref(owner)

    def alloc(self, host: HostBucket, trained: Sequence[int], *, masters: bool) -> UpdateBuffers:
        """Memory for a bucket's parameters and states; nothing where these are not known."""
        key = host.layout.key
        if key in self._owners and self._owners[key]() is None:  # it is gone, so nobody steps
            del self._owners[key], self._learned[key]
        sources = self._sources(host)
        if sources.keys() != set(trained):
            return {}
        host.lock_states(self._owners[key]())
        return make_buffers(host, sources, self.streams.device, masters=masters)

    def fetch(self, host: HostBucket, buffers: UpdateBuffers, *, masters: bool) -> UpdateBuffers:
        """Parameters and states to the device."""
        fetch(host, buffers, self._sources(host), masters=masters)
        return buffers

    def keep(
        self, host: HostBucket, gradients: Mapping[int, torch.Tensor], buffers: UpdateBuffers
    ) -> None:
        """Keep them for the next step."""
        if buffers:
            sources, visible = self._learned[host.layout.key]
            if any(map(host.aliased, buffers)) or any(map(is_shared, visible)):
                return  # somebody may write to them behind the guards
            versions = _versions(host, buffers, visible)
            handed = DeviceUpdate(
                self.streams, gradients, buffers, sources, visible, host, versions
            )
            host.offer(handed, list(buffers), visible)

    def land(self) -> None:
        """Wait until what is on its way to the host is there, and let go of it."""
        flying, self.flying = self.flying, []
        for host in flying:
            if isinstance(host.in_flight, Flight) and host.in_flight.fresh:
                host.settle()

    def _sources(self, host: HostBucket) -> Sources:
        return self._learned.get(host.layout.key, ({}, ()))[0]


def _versions(
    host: HostBucket, params: Iterable[int], states: Iterable[torch.Tensor]
) -> tuple[int, ...]:
    return (
        *(compat.version(host.params[i]) for i in params),
        *(compat.version(state) for state in states),
    )


def _same(states: Sequence[object], others: Sequence[object]) -> bool:
    """The very same tensors, or pairs of them?"""
    return len(states) == len(others) and all(
        a is b or (isinstance(a, tuple) and isinstance(b, tuple) and all(map(_is, a, b)))
        for a, b in zip(states, others, strict=True)
    )


def _is(a: object, b: object) -> bool:
    return a is b
