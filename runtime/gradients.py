"""Where gradients go: the host buckets, and `p.grad` as views of them.

`p.grad is None` means that the next backward writes; otherwise it accumulates. Copies to the host
are asynchronous, so `p.grad` is set once, when `backward()` ends, behind the last of them.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from megacompile import compat
from megacompile.errors import ModelError
from megacompile.ir import Stream
from megacompile.runtime.host import HostBucket
from megacompile.runtime.in_backward import consume, consumed
from megacompile.runtime.served import Served, served
from megacompile.runtime.streams import Streams

Place = tuple[int, int]  # (bucket key, parameter's index in it)


class Gradients:
    """The gradients of a model's parameters, by bucket and position."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self.buckets: dict[int, HostBucket] = {}
        self._places: dict[int, Place] = {}  # id(parameter) -> place
        self._written: set[Place] = set()  # by the backward() that runs now
        self._wanted: set[Place] = set()  # of the schedule that runs now
        self._attempted: set[Place] = set()  # those of them that it is the first to write
        self._sent: set[int] = set()  # the buckets that it has sent to the host
        self._so_far: set[Place] = set()  # had a gradient when the schedule that runs now began
        self._foreign: set[Place] = set()  # p.grad is a tensor of the user's
        self._received: set[Place] = set()  # from eager code, in the backward() that runs now
        self._running: Callable[[], object] = _nothing  # alive while a backward() runs
        self._aside: dict[Place, torch.Tensor] = {}  # those that autograd gets, so far
        self._returned: frozenset[Place] = frozenset()  # those that autograd will get
        self._handed: set[Place] = set()  # all of those in the backward() that runs now
        self._dropped: frozenset[Place] = frozenset()
        self._consumed: set[Place] = set()  # by updates in the backward() that runs now
        self._norms: dict[int, Norms] = {}  # by bucket, of this backward()
        self._copies: dict[int, torch.cuda.Event | None] = {}  # by bucket: its way to the host

    def bind(self, buckets: Mapping[int, HostBucket]) -> None:
        """Use these buckets from now on."""
        self.buckets = dict(buckets)
        self._places = {
            id(param): (key, i)
            for key, bucket in self.buckets.items()
            for i, param in enumerate(bucket.params)
        }

    def place(self, param: torch.Tensor) -> Place | None:
        """A parameter's bucket and index; None for one that is not ours."""
        return self._places.get(id(param))

    def start(self, wanted: Mapping[int, Sequence[int]]) -> bool:
        """Prepare room for gradients; True if there are some already to accumulate into.

        Called in a backward, before its schedule runs.
        """
        self._begin()
        for key, params in wanted.items():
            bucket = self.buckets[key]
            bucket.settle()
            bucket.withdraw()
            if not self.all_dropped(key, params):
                self._norms.pop(key, None)
            for i in params:
                self._open(bucket.params[i].grad)
            if not bucket.grads.keys() >= set(params) or self._held_by_user(key, bucket):
                self._renew(key, bucket)
        places = {(key, i) for key, params in wanted.items() for i in params}
        places -= self._returned | self._dropped
        self._part(places)
        self._so_far = {place for place in places if self._has_gradient(*place)}
        self._wanted, self._attempted = places, places - self._written
        self._sent.clear()
        self._written.update(places)
        return bool(self._so_far)

    def _part(self, places: Iterable[Place]) -> None:
        """Give a `p.grad` that lies in the room of another one's memory of its own."""
        there = [(place, self._param(place).grad) for place in places]
        there = [(place, gradient) for place, gradient in there if not _is_gone(gradient)]
        if not there:  # as behind zero_grad()
            return
        rooms = {g.data_ptr(): (k, i) for k, b in self.buckets.items() for i, g in b.grads.items()}
        for place, gradient in there:
            if gradient is None or gradient.layout is not torch.strided:
                continue
            if gradient.numel() and rooms.get(gradient.data_ptr(), place) != place:
                gradient.data = gradient.detach().clone()

    def start_update(self, wanted: Mapping[int, Sequence[int]]) -> bool:
        """The same where the backward updates: it takes the gradients that there are, and keeps
        none on the host."""
        self._begin()
        places = {(key, i) for key, params in wanted.items() for i in params}
        self._consumed |= places
        have = {key for key, i in places if not _is_gone(self.buckets[key].params[i].grad)}
        if have:
            self.start({key: wanted[key] for key in have})
            self._written -= places
        self._so_far = {p for p in places if not _is_gone(self._param(p).grad)}
        return bool(self._so_far)

    def _param(self, place: Place) -> nn.Parameter:
        return self.buckets[place[0]].params[place[1]]

    @staticmethod
    def _open(gradient: torch.Tensor | None) -> None:
        """Make a served gradient a plain one: it is about to change."""
        who = served(gradient)
        if gradient is not None and who is not None:
            who.open(gradient)

    def norms_room(self, key: int, indices: Sequence[int]) -> torch.Tensor:
        """Where the norms of these gradients go: (2, len(indices)) float32, L2 and largest."""
        pin = self.streams.device.type == "cuda"
        room = torch.empty(2, len(indices), dtype=torch.float32, pin_memory=pin)
        self._norms[key] = Norms(tuple(indices), room)
        return room

    def norms_copied(self, key: int, queue: torch.cuda.Stream | None) -> None:
        """The norms of a bucket are on their way to their room."""
        if queue is not None:
            self._norms[key].copied = queue.record_event()

    def copied(self, key: int, event: torch.cuda.Event | None) -> None:
        """The gradients of a bucket are on their way to the host; `event` is behind them."""
        self._copies[key] = event
        self._sent.add(key)

    def so_far(self, key: int, index: int) -> torch.Tensor | None:
        """The host gradient to accumulate into; None where there is none yet."""
        return self.buckets[key].grads[index] if (key, index) in self._so_far else None

    def take(self, key: int) -> dict[int, torch.Tensor]:
        """Take a bucket's gradients out of `p.grad`: by the parameter's index."""
        bucket = self.buckets[key]
        taken = {}
        for i, param in enumerate(bucket.params):
            gradient = param.grad
            if gradient is None or consumed(gradient):
                continue
            self._open(gradient)
            taken[i] = gradient.detach()
            param.grad = None
        return taken

    @staticmethod
    def put(bucket: HostBucket, taken: Mapping[int, torch.Tensor]) -> None:
        """Put them into a bucket that lies elsewhere."""
        if taken:
            bucket.make_grads()
        for i, gradient in taken.items():
            if i in bucket.grads:
                bucket.params[i].grad = bucket.grads[i].copy_(gradient).detach()
            else:  # frozen since
                bucket.params[i].grad = gradient.to(bucket.values[i].device)

    @contextmanager
    def aside(
        self, returned: Iterable[Place], dropped: Iterable[Place]
    ) -> Iterator[dict[Place, torch.Tensor]]:
        """For its duration, some gradients do not go to `p.grad`: autograd gets them, or nobody."""
        self._returned, self._dropped = frozenset(returned), frozenset(dropped)
        self._begin()
        for place in self._returned & self._received:
            self._refuse_hooks(place, compat.post_accumulate_hooks)
        self._handed |= self._returned
        try:
            yield self._aside
            if self._aside:
                self.streams.synchronize(Stream.D2H)
        finally:
            self._aside, self._returned, self._dropped = {}, frozenset(), frozenset()

    def repeat(self) -> None:
        """The schedule that runs now starts again: what it has sent to the host is not sent twice.

        Those places are dropped from now on, so that what accumulates is not added again.
        """
        done = {place for place in self._wanted if place[0] in self._sent}
        self._written -= self._attempted - done
        self._dropped |= done

    def drops(self, key: int, index: int) -> bool:
        """Does nobody want a gradient?"""
        return (key, index) in self._dropped

    def all_dropped(self, key: int, indices: Iterable[int]) -> bool:
        """Does nobody want any of these?"""
        return all((key, i) in self._dropped for i in indices)

    def to_param(self, key: int, index: int) -> bool:
        """Does a gradient go to `p.grad`, and nowhere else?"""
        return (key, index) not in self._returned | self._dropped

    def room(self, key: int, index: int) -> torch.Tensor:
        """Where a gradient goes."""
        place = (key, index)
        if place in self._returned:
            return self._aside.setdefault(place, torch.empty_like(self.buckets[key].values[index]))
        return self.buckets[key].grads[index]

    def receive(self, param: nn.Parameter, gradient: torch.Tensor) -> None:
        """Accumulate a gradient that eager code produced on the device.

        Raises:
            ModelError: the parameter has hooks that would miss a part of the gradient.
        """
        self._begin()
        gradient = gradient.to(param.device)
        place = self._places[id(param)]
        self._refuse_hooks(place, compat.gradient_hooks)
        if place in self._handed:
            self._refuse_hooks(place, compat.post_accumulate_hooks)
        with torch.no_grad():
            if place in self._written:
                self.streams.synchronize(Stream.D2H)
                self._norms.pop(place[0], None)
                self.buckets[place[0]].grads[place[1]].add_(gradient)
                return
            if param.grad is None:
                param.grad = gradient.clone(memory_format=torch.preserve_format)
            else:
                param.grad.add_(gradient)
        self._received.add(place)

    def _refuse_hooks(self, place: Place, hooks: Callable[[nn.Parameter], object]) -> None:
        """A hook wants the whole gradient, but captured graphs and eager code each have a part."""
        bucket = self.buckets[place[0]]
        if hooks(bucket.params[place[1]]):
            raise ModelError(
                f"parameter {bucket.layout.params[place[1]].name!r} has a hook and is used in code "
                "that was not captured, so the hook would see a part of its gradient; change "
                "p.grad after backward() instead, or keep that code out of the model"
            )

    def _begin(self) -> None:
        """Note a new call of `backward()`; what a failed one left is void.

        A `backward()` inside of another one (a reentrant checkpoint) belongs to that one: only
        autograd holds `finish`, so it lives as long as the `backward()` that it was queued in.
        """
        if self._running() is not None:
            return
        self._written.clear()
        self._foreign.clear()
        self._received.clear()
        self._handed.clear()
        self._norms.clear()
        self._copies.clear()
        self._consumed.clear()

        def finish() -> None:
            self._finish()

        self._running = weakref.ref(finish)
        compat.when_backward_ends(finish)

    def _has_gradient(self, key: int, index: int) -> bool:
        if (key, index) in self._written:
            return True
        bucket = self.buckets[key]
        gradient = bucket.params[index].grad
        if gradient is None or consumed(gradient):
            return False
        if gradient.layout is not torch.strided:
            bucket.params[index].grad = gradient = gradient.to_dense()
        if gradient.data_ptr() != bucket.grads[index].data_ptr():
            self._foreign.add((key, index))
            with torch.no_grad():
                bucket.grads[index].copy_(gradient)
        return True

    def _held_by_user(self, key: int, bucket: HostBucket) -> bool:
        """Does somebody still hold a gradient that `zero_grad()` took out of `p.grad`?"""
        return any(
            _is_gone(param.grad)
            and (key, i) not in self._written
            and i in bucket.grads
            and compat.storage_users(bucket.grads[i]) > 1
            for i, param in enumerate(bucket.params)
        )

    def _renew(self, key: int, bucket: HostBucket) -> None:
        """New memory for a bucket's gradients; what is in use moves along."""
        old = bucket.grads
        bucket.make_grads()
        for i, before in old.items():
            gradient = bucket.params[i].grad
            if consumed(gradient):
                gradient = None
            if gradient is not None and gradient.data_ptr() != before.data_ptr():
                gradient = None  # not ours
            if gradient is not None or (key, i) in self._written:
                if i not in bucket.grads:  # it was frozen since
                    bucket.grads[i] = before
                    continue
                self.streams.synchronize(Stream.D2H)
                bucket.grads[i].copy_(before)
            if gradient is not None:
                gradient.data = bucket.grads[i]  # p.grad stays the tensor that it is

    def _finish(self) -> None:
        """Set `p.grad`, now that `backward()` ends.

        Whoever reads one finds the copy to the host done: it is waited for here, but for buckets
        that were handed over, whose gradients are guarded and wait when somebody looks at them.
        """
        lazy = self._lazy()
        if self._written or not self._consumed:
            self._await(self._copies.keys() - lazy)
        self._running = _nothing
        for key, i in self._consumed:
            consume(self.buckets[key].params[i], self.buckets[key].layout.params[i].name)
        for key, i in sorted(self._written):
            param, gradient = self.buckets[key].params[i], self.buckets[key].grads[i]
            if param.grad is None or consumed(param.grad):
                param.grad = gradient.detach()
            elif (key, i) in self._foreign:
                with torch.no_grad():
                    param.grad.copy_(gradient)
        self._serve(lazy)
        done = sorted(self._written | self._received)
        self._written.clear()
        self._received.clear()
        for key, i in done:
            param = self.buckets[key].params[i]
            for hook in compat.post_accumulate_hooks(param):
                hook(param)

    def _lazy(self) -> set[int]:
        """The buckets whose gradients may still be on their way when `backward()` returns."""
        return {
            key
            for key in self._norms.keys() & self._copies.keys()
            if self.buckets[key].offered is not None
            and all(
                self.buckets[key].params[i].grad is None
                and (key, i) in self._written - self._received
                and not compat.post_accumulate_hooks(self.buckets[key].params[i])
                for i in self._norms[key].indices
            )
        }

    def _await(self, keys: Iterable[int]) -> None:
        """Wait on the host for the copies of some buckets' gradients."""
        for key in keys:
            event = self._copies[key]
            if event is None:
                continue
            if self.buckets[key].resident is None:
                event.synchronize()
            else:  # who reads them does so on the compute stream
                torch.cuda.current_stream(self.streams.device).wait_event(event)

    def _serve(self, lazy: set[int]) -> None:
        """Let the gradients whose norms were taken on the device answer for them."""
        for key, norms in self._norms.items():
            bucket = self.buckets[key]
            settle = bucket.settle
            if key in lazy:
                settle = functools.partial(_settle, self._copies[key], bucket)
            for k, i in enumerate(norms.indices):
                gradient = bucket.params[i].grad
                if gradient is None or (key, i) in self._foreign:
                    continue
                if compat.storage_users(gradient) > 2 and key not in lazy:
                    continue  # who holds another name for it may change it unseen
                if (key, i) in self._written and type(gradient) is torch.Tensor:
                    of_it = functools.partial(norms.get, k)
                    Served(gradient, settle, of_it, bucket.layout.params[i].name)
        self._norms.clear()


class Norms:
    """The norms of a bucket's gradients, on their way to the host.

    Args:
        indices: of the parameters.
        room: (2, len(indices)) float32: L2 norms and largest absolute values.
    """

    def __init__(self, indices: tuple[int, ...], room: torch.Tensor) -> None:
        self.indices = indices
        self.copied: torch.cuda.Event | None = None  # behind the copy
        self._room = room
        self._values: list[list[float]] = []

    def get(self, k: int) -> tuple[float, float]:
        """Those of the k-th gradient."""
        if not self._values:
            if self.copied is not None:
                self.copied.synchronize()
            self._values = self._room.tolist()
        return self._values[0][k], self._values[1][k]


def _settle(copied: torch.cuda.Event | None, bucket: HostBucket) -> None:
    """Wait until a bucket's gradients are on the host, and nothing in the background uses them."""
    if copied is not None:
        copied.synchronize()
    bucket.settle()


def _is_gone(gradient: torch.Tensor | None) -> bool:
    """Is there nothing to accumulate into?"""
    return gradient is None or consumed(gradient)


def _nothing() -> None:
    """What a weak reference gives when nothing is left."""
