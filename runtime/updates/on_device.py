"""Updates of buckets on the device: in the backward (`in_backward`), and in `optimizer.step()` from
tensors that a backward left there (`schedule.left`).

These tensors are valid only while the host's copies are unchanged. Parameters and states are
guarded (see `guards`), and the first access to one makes the step fall back to the host. So does a
change in place that bypasses the guards, for example by C++ code: `fits` detects it.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch.optim import Optimizer

from megacompile import compat
from megacompile.ir.stream import Stream
from megacompile.runtime.device.background import Background, Completion
from megacompile.runtime.device.streams import Handle, Streams
from megacompile.runtime.optim.rule import OptimizerRule, State, Update, map_state
from megacompile.runtime.params.guards import any_shared
from megacompile.runtime.params.host_bucket import HostBucket, StateMemory
from megacompile.runtime.params.pending import InFlight
from megacompile.runtime.updates.bucket_update import update_bucket
from megacompile.runtime.updates.update import (
    ParamUpdate,
    Timed,
    flat,
    fulfil_update,
    laid_out_as,
)

Pairs = Iterator[tuple[torch.Tensor, torch.Tensor]]  # (device, host), both flat
Place = Callable[[torch.Tensor], torch.Tensor]  # disk tensor -> its in-memory copy
Sources = Mapping[int, tuple[State | None, ...]]  # parameter index -> its states on the host


@dataclass(slots=True)
class UpdateBuffer:
    """One parameter's new value and states on the device, flat."""

    new: torch.Tensor | None
    """(numel,) in the host parameter's dtype; None: the update reads the streamed weights and
    allocates it."""
    copy: torch.Tensor | None  # (numel,) in the streamed dtype, if different
    states: tuple[State | None, ...]  # in the rule's order

    @property
    def value(self) -> torch.Tensor:
        """The parameter on the device, once it exists."""
        assert self.new is not None
        return self.new

    @property
    def streamed(self) -> torch.Tensor:
        """The parameters for the next forward: (numel,) in the streamed dtype."""
        return self.value if self.copy is None else self.copy


UpdateBuffers = dict[int, UpdateBuffer]  # by parameter index in the bucket


def make_buffers(
    host: HostBucket, sources: Sources, device: torch.device, *, masters: bool
) -> UpdateBuffers:
    """Allocate device memory for states like `sources`, and with `masters` for the parameters. The
    dtype of the host's parameters (masters) may differ from that of the streamed ones."""

    def like(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(tensor.numel(), dtype=dtype or tensor.dtype, device=device)

    buffers: UpdateBuffers = {}
    for i, states in sources.items():
        value, streamed = host.values[i], host.layout.params[i].dtype
        buffers[i] = UpdateBuffer(
            new=like(value) if masters else None,
            copy=like(value, streamed) if masters and value.dtype != streamed else None,
            states=tuple(map_state(like, state) for state in states),
        )
    return buffers


def fetch(host: HostBucket, buffers: UpdateBuffers, sources: Sources, *, masters: bool) -> None:
    """Copy the known states, and with `masters` the parameters, to the device."""
    known = {i: buffers[i] for i in sources.keys() & buffers.keys()}
    for i, buffer in known.items() if masters else ():
        buffer.value.copy_(flat(host.values[i]), non_blocking=True)
    for on_device, on_host in states_back(known, sources):
        on_device.copy_(on_host, non_blocking=True)


def update(
    host: HostBucket,
    buffers: UpdateBuffers,
    steps: Mapping[int, ParamUpdate],
    gradients: Mapping[int, torch.Tensor],
    weights: Sequence[torch.Tensor] | None,
) -> None:
    """Run the step in place in the buffers. If the buffers have no parameters, it reads `weights`
    and allocates the new parameters here, as late as possible."""
    rule: OptimizerRule | None = None  # one for all: they have one optimizer
    updates: list[Update] = []
    for i, buffer in buffers.items():
        step = steps[i]
        rule = step.rule
        like = host.values[i] if weights is None else weights[i]
        if buffer.new is None:
            assert weights is not None
            buffer.new = torch.empty_like(flat(like))
        updates.append(
            Update(
                param=buffer.value if weights is None else flat(weights[i]),
                grad=flat(laid_out_as(gradients[i], like)),
                states=buffer.states,
                hyper=step.hyper,
                out=None if weights is None else buffer.new,
                copy=buffer.copy,
                seed=step.seed,
            )
        )
    if rule is not None:
        update_bucket(rule, [u for u in updates if u.param.numel()])


def write_back(
    host: HostBucket,
    buffers: UpdateBuffers,
    sources: Sources,
    visible: Sequence[torch.Tensor],
    queue: torch.cuda.Stream | None,
    place: Place | None = None,
) -> InFlight | None:
    """Copy new parameters and states to the host; parameters first, because they are needed next.
    The user-visible states are guarded until the copies are done. `queue` is the copy stream; None
    on the CPU, where the copies are synchronous."""
    copied = None
    try:
        for on_device, on_host in params_back(host, buffers, place):
            on_host.copy_(on_device, non_blocking=True)
        params = None if queue is None else queue.record_event()
        for on_device, on_host in states_back(buffers, sources):
            on_host.copy_(on_device, non_blocking=True)
        if queue is not None and params is not None:
            copied = InFlight(queue.record_event(), weights=Completion(params))
            copied.may_lend = not any(map(host.aliased, buffers))
            host.pending.wait()  # earlier work in flight
            host.pending.start(copied, list(buffers), visible)
    except BaseException:  # Ctrl-C: copies in flight are not recorded
        if queue is not None:
            queue.synchronize()
        raise
    host.note_changes(buffers)
    return copied


def params_back(host: HostBucket, buffers: UpdateBuffers, place: Place | None = None) -> Pairs:
    for i, buffer in buffers.items():
        yield buffer.value, flat(host.values[i] if place is None else place(host.values[i]))
        if host.has_copy:
            yield buffer.streamed, flat(host.streamed[i])


def states_back(buffers: UpdateBuffers, sources: Sources) -> Pairs:
    """New states on the device and their destinations."""
    for i, buffer in buffers.items():
        for on_device, on_host in zip(buffer.states, sources[i], strict=True):
            yield from zip(_parts(on_device), _parts(on_host), strict=True)


def _parts(state: State | None) -> tuple[torch.Tensor, ...]:
    """The flat tensors of a state."""
    if state is None:
        return ()
    return state if isinstance(state, tuple) else (flat(state),)


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
        """Copy the new values to the host in a thread, after the event `updated`. Returns the work
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
    sources: Sources
    visible: tuple[torch.Tensor, ...]  # the user-visible states
    owner: ref[Optimizer]
    memory: ref[StateMemory]  # the states' memory


class DeviceUpdates:
    """The updates of `optimizer.step()` on the device, for the ops. The first step of an optimizer
    runs on the host, because its states are unknown before it."""

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
    return tuple(map(compat.version, [*(host.params[i] for i in params), *states]))


def _ids(states: Iterable[object]) -> list[int]:
    """The identities of states' tensors; a state may be a pair of tensors."""
    return [id(t) for state in states for t in (state if isinstance(state, tuple) else (state,))]
