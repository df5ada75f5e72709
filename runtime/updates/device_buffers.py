"""A bucket's parameters and optimizer states on the device, for an update there.

Both updates on the device use it: the one in the backward (`in_backward`) and the one that
`optimizer.step()` makes of what the backward left there (`on_device`).
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
from megacompile.runtime.optim.kernels.bucket import update_bucket
from megacompile.runtime.optim.rule import OptimizerRule, State, Update
from megacompile.runtime.params.bucket import HostBucket
from megacompile.runtime.params.work import InFlight
from megacompile.runtime.updates.parameter import ParamUpdate, flat, laid_out_as

Place = Callable[[torch.Tensor], torch.Tensor]  # the copy in memory of what is on a disk
Sources = Mapping[int, tuple[State | None, ...]]  # parameter's index -> its states on the host


@dataclass(slots=True)
class UpdateBuffer:
    """One parameter's new value and states on the device, flat."""

    new: torch.Tensor | None
    """(numel,) of the parameter's dtype on the host; None: the update makes it, from weights that
    are on the device anyway."""
    copy: torch.Tensor | None  # (numel,) of the streamed dtype, where that is another
    states: tuple[State | None, ...]  # in the rule's order

    @property
    def value(self) -> torch.Tensor:
        """The parameter on the device, once it is there."""
        assert self.new is not None
        return self.new

    @property
    def streamed(self) -> torch.Tensor:
        """The parameters for the next forward: (numel,) of the streamed dtype."""
        return self.value if self.copy is None else self.copy


UpdateBuffers = dict[int, UpdateBuffer]  # by the parameter's index in its bucket


@dataclass(frozen=True, slots=True, eq=False)
class Landing:
    """New parameters and states of a bucket on their way to the host."""

    host: HostBucket
    work: InFlight

    def stays(self, buffers: UpdateBuffers) -> None:
        """The buffers are there until `work.fresh` is cleared, unless there may be writes after
        them."""
        if not any(map(self.host.aliased, buffers)):
            self.work.fresh.update({i: buffer.streamed for i, buffer in buffers.items()})


def make_buffers(
    host: HostBucket, sources: Sources, device: torch.device, *, masters: bool
) -> UpdateBuffers:
    """Memory on the device for states like `sources`.

    With `masters` for the parameters too: those on the host may have another dtype than what is
    streamed.
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
    """The parameters and states of a bucket that lives on the device, as they are there."""
    return {
        i: UpdateBuffer(
            new=flat(host.values[i]),
            copy=flat(host.streamed[i]) if host.has_copy else None,
            states=tuple(flat(s) if isinstance(s, torch.Tensor) else s for s in states),
        )
        for i, states in sources.items()
    }


def fetch(host: HostBucket, buffers: UpdateBuffers, sources: Sources, *, masters: bool) -> None:
    """States, and with `masters` the parameters, to the device."""
    for i, buffer in buffers.items():
        if masters:
            buffer.value.copy_(flat(host.values[i]), non_blocking=True)
        for there, here in _pairs(buffer, sources[i]):
            there.copy_(here, non_blocking=True)


def update(
    host: HostBucket,
    buffers: UpdateBuffers,
    steps: Mapping[int, ParamUpdate],
    gradients: Mapping[int, torch.Tensor],
    weights: Sequence[torch.Tensor] | None,
) -> None:
    """The step, in place in the buffers. Where those have no parameters, it takes `weights`, and
    new ones are made here: no earlier than they are needed."""
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
) -> Landing | None:
    """New parameters and states to the host; the parameters first, which are wanted next.

    Args:
        visible: the states that the user can see; they are guarded until the copies are done.
        queue: the stream that copies; None on the CPU, where nothing is under way afterwards.
        place: where parameters go that are on a disk.
    """
    landing = None
    try:
        for there, here in params_back(host, buffers, place):
            here.copy_(there, non_blocking=True)
        params = None if queue is None else queue.record_event()
        for there, here in states_back(buffers, sources):
            here.copy_(there, non_blocking=True)
        if queue is not None and params is not None:
            copied = InFlight(queue.record_event(), weights=Completion(params))
            landing = Landing(host, copied)
            host.pending.wait()  # for what was in flight before
            host.pending.start(landing.work, list(buffers), visible)
    except BaseException:  # Ctrl-C: the copies that are under way are not recorded
        if queue is not None:
            queue.synchronize()
        raise
    note_changes(host, buffers)
    return landing


def params_back(
    host: HostBucket, buffers: UpdateBuffers, place: Place | None = None
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """New parameters on the device, and where they go, flat."""
    for i, buffer in buffers.items():
        yield buffer.value, flat(host.values[i] if place is None else place(host.values[i]))
        if host.has_copy:
            yield buffer.streamed, flat(host.streamed[i])


def states_back(
    buffers: UpdateBuffers, sources: Sources
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """New states on the device, and where they go, flat."""
    for i, buffer in buffers.items():
        yield from _pairs(buffer, sources[i])


def note_changes(host: HostBucket, updated: Iterable[int]) -> None:
    """Parameters have other values from now on."""
    indices = list(updated)
    torch.autograd.graph.increment_version([host.params[i] for i in indices])
    host.copy.mark_fresh(indices)


def _pairs(
    buffer: UpdateBuffer, states: Sequence[State | None]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """A parameter's states on the device and on the host, flat."""
    for there, here in zip(buffer.states, states, strict=True):
        yield from zip(_parts(there), _parts(here), strict=True)


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


# Work of `optimizer.step()` that threads do after it returns: an update by the host, or the copy of
# what the device has updated to the host.
#
# [Note: small chunks] The copy engine that brings states to the host is first in, first out for all
# streams: a `loss.item()` waits for everything that was issued before it. So a thread issues the
# copies in chunks, three at a time, and sleeps until one is done instead of spinning: the host's
# update needs the core.

Timed = Callable[[str, Callable[[], None]], None]  # (lane, work): does it, and notes when


def untimed(lane: str, work: Callable[[], None]) -> None:
    """Does it."""
    del lane
    work()


def fulfil_update(future: Future[None], name: str, work: Callable[[], None]) -> None:
    """Updates the bucket `name`, or brings its new values to the host, in a thread.

    The error of the future is an OptimizerError.
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


_COPY_BYTES = 64 * 2**20  # at a time; about a millisecond of the link


def copy_in_chunks(
    pairs: Iterable[tuple[torch.Tensor, torch.Tensor]],
    queue: torch.cuda.Stream,
    behind: torch.cuda.Event,
) -> None:
    """Copy (there, here) pairs of flat tensors to page-locked host memory, and wait for the end.

    Args:
        queue: the stream that copies.
        behind: what comes first.
    """
    under_way: deque[torch.cuda.Event] = deque()
    with torch.cuda.stream(queue), torch.no_grad():
        queue.wait_event(behind)
        for there, here in pairs:
            numel = _COPY_BYTES // there.itemsize
            for source, target in zip(there.split(numel), here.split(numel), strict=True):
                target.copy_(source, non_blocking=True)
                under_way.append(_event(queue))
                if len(under_way) > 2:
                    under_way.popleft().synchronize()
        _event(queue).synchronize()


def _event(queue: torch.cuda.Stream) -> torch.cuda.Event:
    event: Any = torch.cuda.Event(blocking=True)
    event.record(queue)
    return event  # type: ignore[no-any-return]


# Device memory that copies to the host still read: `defer_free` keeps it, `drain` returns it.
#
# What no forward drains, because there is none, goes when something else is deferred.


@dataclass(frozen=True, slots=True)
class Deferred:
    """Device memory that a copy to the host may still read."""

    value: Any
    copied: torch.cuda.Event
    owner: torch.cuda.Stream  # whose memory it is in the caching allocator
    forget: Callable[[], None] = lambda: None  # called when it goes


class DeferredFrees:
    """Memory that is kept until copies out of it are done, or are waited for."""

    def __init__(self) -> None:
        self._entries: list[Deferred] = []

    def add(self, entry: Deferred) -> None:
        """Keep it; what is copied by now goes."""
        waiting = [entry]
        for earlier in reversed(self._entries):
            if earlier.copied.query():
                earlier.forget()
            else:
                waiting.insert(0, earlier)
        self._entries = waiting

    def take(self) -> list[Deferred]:
        """All that there is: the caller waits for the copies, and lets it go."""
        taken, self._entries = self._entries, []
        return taken
