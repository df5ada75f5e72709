"""Where gradients go: the host buckets, and `p.grad` as views of them.

`p.grad is None` means that the next backward writes; otherwise it accumulates. Copies to the host
are asynchronous, so `p.grad` is set once, when `backward()` ends, behind the last of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from megacompile import compat
from megacompile.errors import ModelError
from megacompile.ir import Stream
from megacompile.runtime.host import HostBucket
from megacompile.runtime.streams import Streams

Place = tuple[int, int]  # (bucket key, parameter's index in it)


class Gradients:
    """The gradients of a model's parameters, by bucket and position."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self.buckets: dict[int, HostBucket] = {}
        self._places: dict[int, Place] = {}  # id(parameter) -> place
        self._written: set[Place] = set()  # by the backward() that runs now
        self._so_far: set[Place] = set()  # had a gradient when the schedule that runs now began
        self._foreign: set[Place] = set()  # p.grad is a tensor of the user's
        self._backward = -1

    def bind(self, buckets: Mapping[int, HostBucket]) -> None:
        """Use these buckets from now on."""
        self.buckets = dict(buckets)
        self._places = {
            id(param): (key, i)
            for key, bucket in self.buckets.items()
            for i, param in enumerate(bucket.params)
        }

    def refuse_hooks(self) -> None:
        """Raise for hooks that would not run: gradients do not pass through a host parameter.

        Raises:
            ModelError: `register_hook` was called on a parameter.
        """
        for bucket in self.buckets.values():
            for place, param in zip(bucket.layout.params, bucket.params, strict=True):
                if compat.gradient_hooks(param):
                    raise ModelError(
                        f"parameter {place.name!r} has a hook of register_hook(), which a streamed "
                        "parameter's gradient does not pass; use "
                        "register_post_accumulate_grad_hook() and change p.grad in it"
                    )

    def start(self, wanted: Mapping[int, Sequence[int]]) -> bool:
        """Prepare room for gradients; True if there are some already to accumulate into.

        Called in a backward, before its schedule runs.
        """
        self.refuse_hooks()
        self._begin()
        for key in wanted:
            if not self.buckets[key].grads or self._held_by_user(key, self.buckets[key]):
                self._renew(key, self.buckets[key])
        places = [(key, i) for key, params in wanted.items() for i in params]
        self._so_far = {place for place in places if self._has_gradient(*place)}
        self._written.update(places)
        return bool(self._so_far)

    def so_far(self, key: int, index: int) -> torch.Tensor | None:
        """The host gradient to accumulate into; None where there is none yet."""
        return self.buckets[key].grads[index] if (key, index) in self._so_far else None

    def room(self, key: int, index: int) -> torch.Tensor:
        """Where a gradient goes."""
        return self.buckets[key].grads[index]

    def receive(self, param: nn.Parameter, gradient: torch.Tensor) -> None:
        """Accumulate a gradient that eager code produced on the device."""
        gradient = gradient.to(param.device)
        place = self._places[id(param)]
        with torch.no_grad():
            if self._backward == compat.backward_id() and place in self._written:
                self.streams.synchronize(Stream.D2H)
                self.buckets[place[0]].grads[place[1]].add_(gradient)
                return
            if param.grad is None:
                param.grad = gradient.clone(memory_format=torch.preserve_format)
            else:
                param.grad.add_(gradient)
        for hook in compat.post_accumulate_hooks(param):
            hook(param)

    def _begin(self) -> None:
        """Note a new call of `backward()`; what a failed one left is void."""
        now = compat.backward_id()
        if now == self._backward:
            return
        self._backward = now
        self._written.clear()
        self._foreign.clear()
        compat.when_backward_ends(self._finish)

    def _has_gradient(self, key: int, index: int) -> bool:
        if (key, index) in self._written:
            return True
        bucket = self.buckets[key]
        gradient = bucket.params[index].grad
        if gradient is None:
            return False
        if gradient.data_ptr() != bucket.grads[index].data_ptr():
            self._foreign.add((key, index))
            with torch.no_grad():
                bucket.grads[index].copy_(gradient)
        return True

    def _held_by_user(self, key: int, bucket: HostBucket) -> bool:
        """Does somebody still hold a gradient that `zero_grad()` took out of `p.grad`?"""
        return any(
            param.grad is None
            and (key, i) not in self._written
            and compat.storage_users(bucket.grads[i]) > 1
            for i, param in enumerate(bucket.params)
        )

    def _renew(self, key: int, bucket: HostBucket) -> None:
        """New memory for a bucket's gradients; what is in use moves along."""
        old = bucket.grads
        bucket.make_grads()
        for i, before in enumerate(old):
            param = bucket.params[i]
            mine = param.grad is not None and param.grad.data_ptr() == before.data_ptr()
            if mine or (key, i) in self._written:
                self.streams.synchronize(Stream.D2H)
                bucket.grads[i].copy_(before)
            if mine:
                param.grad = bucket.grads[i].detach()

    def _finish(self) -> None:
        """Set `p.grad`, now that `backward()` ends and the last copy is done."""
        self.streams.synchronize(Stream.D2H)
        self._backward = -1
        for key, i in sorted(self._written):
            param, gradient = self.buckets[key].params[i], self.buckets[key].grads[i]
            if param.grad is None:
                param.grad = gradient.detach()
            elif (key, i) in self._foreign:
                with torch.no_grad():
                    param.grad.copy_(gradient)
        done = sorted(self._written)
        self._written.clear()
        for key, i in done:
            param = self.buckets[key].params[i]
            for hook in compat.post_accumulate_hooks(param):
                hook(param)
