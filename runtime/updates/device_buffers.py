"""Device buffers for the parameters and optimizer states of a bucket that the device updates.

Both device updates use them: in the backward (`in_backward`), and in `optimizer.step()` from
tensors that the backward left on the device (`on_device`).
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from megacompile.errors import OptimizerError
from megacompile.runtime.device.background import Completion, fulfil
from megacompile.runtime.optim.kernels.entry import update_bucket
from megacompile.runtime.optim.rule import OptimizerRule, State, Update
from megacompile.runtime.params.host_bucket import HostBucket
from megacompile.runtime.params.work import InFlight
from megacompile.runtime.updates.parameter import ParamUpdate, flat, laid_out_as

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


@dataclass(frozen=True, slots=True, eq=False)
class WriteBack:
    """New parameters and states of a bucket in flight to the host."""

    host: HostBucket
    work: InFlight

    def stays(self, buffers: UpdateBuffers) -> None:
        """Offer the buffers to the next forward in `work.fresh`, unless an alias may be written
        later."""
        if not any(map(self.host.aliased, buffers)):
            self.work.fresh.update({i: buffer.streamed for i, buffer in buffers.items()})


def make_buffers(
    host: HostBucket, sources: Sources, device: torch.device, *, masters: bool
) -> UpdateBuffers:
    """Allocate device memory for states like `sources`, and with `masters` for the parameters.

    The dtype of the host's parameters (masters) may differ from that of the streamed ones.
    """
    buffers: UpdateBuffers = {}
    for i, states in sources.items():
        value, streamed = host.values[i], host.layout.params[i].dtype
        numel = value.numel()
        cast = masters and value.dtype != streamed

        def empty(
            dtype: torch.dtype, count: int = numel, device: torch.device = device
        ) -> torch.Tensor:
            return torch.empty(count, dtype=dtype, device=device)

        buffers[i] = UpdateBuffer(
            new=empty(value.dtype) if masters else None,
            copy=empty(streamed) if cast else None,
            states=tuple(_like(state, empty) for state in states),
        )
    return buffers


def buffers_in_place(host: HostBucket, sources: Sources) -> UpdateBuffers:
    """The parameters and states of a resident bucket, in place."""
    return {
        i: UpdateBuffer(
            new=flat(host.values[i]),
            copy=flat(host.streamed[i]) if host.has_copy else None,
            states=tuple(flat(s) if isinstance(s, torch.Tensor) else s for s in states),
        )
        for i, states in sources.items()
    }


def fetch(host: HostBucket, buffers: UpdateBuffers, sources: Sources, *, masters: bool) -> None:
    """Copy states, and with `masters` the parameters, to the device."""
    for i, buffer in buffers.items():
        if masters:
            buffer.value.copy_(flat(host.values[i]), non_blocking=True)
        for on_device, on_host in _pairs(buffer, sources[i]):
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
    updates: dict[OptimizerRule, list[Update]] = {}
    for i, buffer in buffers.items():
        step = steps[i]
        assert step.rule is not None
        like = host.values[i] if weights is None else weights[i]
        if buffer.new is None:
            assert weights is not None
            buffer.new = torch.empty_like(flat(like))
        updates.setdefault(step.rule, []).append(
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
    for rule, of_rule in updates.items():
        update_bucket(rule, [u for u in of_rule if u.param.numel()])


def write_back(
    host: HostBucket,
    buffers: UpdateBuffers,
    sources: Sources,
    visible: Sequence[torch.Tensor],
    queue: torch.cuda.Stream | None,
    place: Place | None = None,
) -> WriteBack | None:
    """Copy new parameters and states to the host; parameters first, because they are needed next.

    Args:
        visible: the user-visible states, guarded until the copies are done.
        queue: the copy stream; None on the CPU, where the copies are synchronous.
        place: returns the destination of parameters on a disk.
    """
    write = None
    try:
        for on_device, on_host in params_back(host, buffers, place):
            on_host.copy_(on_device, non_blocking=True)
        params = None if queue is None else queue.record_event()
        for on_device, on_host in states_back(buffers, sources):
            on_host.copy_(on_device, non_blocking=True)
        if queue is not None and params is not None:
            copied = InFlight(queue.record_event(), weights=Completion(params))
            write = WriteBack(host, copied)
            host.pending.wait()  # earlier work in flight
            host.pending.start(write.work, list(buffers), visible)
    except BaseException:  # Ctrl-C: copies in flight are not recorded
        if queue is not None:
            queue.synchronize()
        raise
    host.note_changes(buffers)
    return write


def params_back(
    host: HostBucket, buffers: UpdateBuffers, place: Place | None = None
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """New parameters on the device and their destinations, flat."""
    for i, buffer in buffers.items():
        yield buffer.value, flat(host.values[i] if place is None else place(host.values[i]))
        if host.has_copy:
            yield buffer.streamed, flat(host.streamed[i])


def states_back(
    buffers: UpdateBuffers, sources: Sources
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """New states on the device and their destinations, flat."""
    for i, buffer in buffers.items():
        yield from _pairs(buffer, sources[i])


def _pairs(
    buffer: UpdateBuffer, states: Sequence[State | None]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """A parameter's states on the device and on the host, flat."""
    for on_device, on_host in zip(buffer.states, states, strict=True):
        yield from zip(_parts(on_device), _parts(on_host), strict=True)


def _parts(state: State | None) -> tuple[torch.Tensor, ...]:
    """The flat tensors of a state."""
    if state is None:
        return ()
    return state if isinstance(state, tuple) else (flat(state),)


def _like(state: State | None, empty: Any) -> State | None:
    if isinstance(state, tuple):
        codes, absmax = state
        return empty(codes.dtype, codes.numel()), empty(absmax.dtype, absmax.numel())
    return None if state is None else empty(state.dtype)


# Work on threads after `optimizer.step()` has returned: host updates, and copies of device results
# to the host.
#
# [Note: small chunks] The device-to-host copy engine is first in, first out across all streams: a
# `loss.item()` waits for all copies issued before it. So a thread issues the copies in chunks,
# three at a time. It sleeps until one completes instead of spinning, because host updates need the
# core.

Timed = Callable[[str, Callable[[], None]], None]  # (lane, work): runs work and records its times


def untimed(lane: str, work: Callable[[], None]) -> None:
    """Run work without recording its times."""
    del lane
    work()


def fulfil_update(future: Future[None], name: str, work: Callable[[], None]) -> None:
    """Run `work`, which updates the bucket `name` or copies its new values to the host.

    The future's error is an `OptimizerError`.
    """
    fulfil(future, functools.partial(_update, name, work))


def _update(name: str, work: Callable[[], None]) -> None:
    try:
        work()
    except BaseException as error:
        raise OptimizerError(
            f"optimizer.step(): the update of {name!r} failed in the background with "
            f"{type(error).__name__}: {error}; its parameters and states are half updated: "
            "load a checkpoint"
        ) from error


_COPY_BYTES = 64 * 2**20  # per chunk; about a millisecond of the link


def copy_in_chunks(
    pairs: Iterable[tuple[torch.Tensor, torch.Tensor]],
    queue: torch.cuda.Stream,
    after: torch.cuda.Event,
) -> None:
    """Copy flat tensors to page-locked host memory and wait for completion.

    Args:
        pairs: (device, host) tensors.
        queue: the copy stream.
        after: work that must complete first.
    """
    under_way: deque[torch.cuda.Event] = deque()
    with torch.cuda.stream(queue), torch.no_grad():
        queue.wait_event(after)  # read after write
        for on_device, on_host in pairs:
            numel = _COPY_BYTES // on_device.itemsize
            for source, target in zip(on_device.split(numel), on_host.split(numel), strict=True):
                target.copy_(source, non_blocking=True)
                under_way.append(_event(queue))
                if len(under_way) > 2:
                    under_way.popleft().synchronize()
        _event(queue).synchronize()


def _event(queue: torch.cuda.Stream) -> torch.cuda.Event:
    event: Any = torch.cuda.Event(blocking=True)
    event.record(queue)
    return event  # type: ignore[no-any-return]


# Device memory that copies to the host still read: `defer_free` keeps it, `drain` frees it. Without
# a forward that drains it, it is freed when other memory is deferred.


@dataclass(frozen=True, slots=True)
class Deferred:
    """Device memory that a copy to the host may still read."""

    value: Any
    copied: torch.cuda.Event
    owner: torch.cuda.Stream  # the memory's stream in the caching allocator
    forget: Callable[[], None] = lambda: None  # called when it is freed


class DeferredFrees:
    """Keeps memory until the copies from it are done or awaited."""

    def __init__(self) -> None:
        self._entries: list[Deferred] = []

    def add(self, entry: Deferred) -> None:
        """Keep memory, and free entries whose copies are done."""
        waiting = [entry]
        for earlier in reversed(self._entries):
            if earlier.copied.query():
                earlier.forget()
            else:
                waiting.insert(0, earlier)
        self._entries = waiting

    def take(self) -> list[Deferred]:
        """Take all entries: the caller waits for the copies and frees the memory."""
        taken, self._entries = self._entries, []
        return taken
