"""The gradients of a model's parameters: their places in the buckets, holders, and readers.

A captured graph returns a gradient to autograd before its copy to the host ends, and may add it on
the device to the current `p.grad`. Both are correct only if nothing reads the gradient before
`backward()` returns: neither hooks on the parameter or its AccumulateGrad node, nor other users of
the parameter in the same backward (a penalty, a tied head outside of the model).
"""

from __future__ import annotations

import operator
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import nn

from megacompile import compat
from megacompile.ir.buckets import ParamId
from megacompile.ir.stream import Stream
from megacompile.runtime.device.ranks import Ranks
from megacompile.runtime.device.streams import Streams
from megacompile.runtime.params.backward_pass import BackwardPass, is_in_bucket, same_memory
from megacompile.runtime.params.gradient_guards import (
    is_taken,
    is_unsummed,
    lazy_of,
    leave_unsummed,
)
from megacompile.runtime.params.guards import unguarded
from megacompile.runtime.params.host_bucket import HostBucket

_TRAINED, _GRADIENT = attrgetter("requires_grad"), attrgetter("grad")
_NO_GRADIENT = frozenset((type(None),))


class Accumulators:
    """The AccumulateGrad nodes of some parameters. Every step needs all of them, so they are
    queried together; `Gradients` keeps them until the buckets change."""

    def __init__(self, params: Sequence[nn.Parameter], nodes: Sequence[Any] = ()) -> None:
        self.params = params
        self.ids = frozenset(map(id, params))
        self.nodes: list[Any] = list(nodes or map(compat.accumulator_of, params))
        # before and after each node, alternating; the dicts are live
        self.hooks = [hooks for node in self.nodes for hooks in compat.hooks_of(node)]

    def hooked_before(self) -> bool:
        """True if a hook will see one of their gradients before it is accumulated."""
        return any(self.hooks[::2]) or any(map(compat.gradient_hooks, self.params))

    def hooked(self) -> bool:
        """True if a hook of any kind will see one of their gradients."""
        with unguarded():
            hooked = any(self.hooks) or any(map(compat.gradient_hooks, self.params))
            return hooked or any(map(compat.post_accumulate_hooks, self.params))

    def all_run(self) -> bool:
        """True if the running backward accumulates into all of these nodes."""
        return all(map(_TRAINED, self.params)) and compat.accumulates_into(self.nodes) is True

    def without_gradients(self) -> bool:
        return _NO_GRADIENT.issuperset(map(type, map(_GRADIENT, self.params)))


@dataclass(eq=False)
class Gradients:
    """The gradients of a model's parameters, by bucket and index. Owned by the machine."""

    streams: Streams
    exact: bool  # accumulate bitwise in autograd's order, even if it takes more memory
    ranks: Ranks | None  # that share the parameters
    buckets: dict[int, HostBucket] = field(default_factory=dict)
    places: dict[int, ParamId] = field(default_factory=dict)  # id(parameter) -> place
    # the nodes of each graph's parameters, and of single ones. Both share a parameter's node, so
    # that any graph detects a new one
    _ends: dict[tuple[ParamId, ...], Accumulators] = field(default_factory=dict)
    _nodes: dict[ParamId, Any] = field(default_factory=dict)
    # running backwards, by autograd's number; any of them may accumulate first
    passes: dict[int, BackwardPass] = field(default_factory=dict)
    _followed: bool = False  # True if a parameter got a new AccumulateGrad node

    def bind(self, buckets: Mapping[int, HostBucket]) -> None:
        self.buckets = dict(buckets)
        self._forget_nodes()  # a parameter that moved to another device has a new one
        self._followed = False
        self.places = {
            id(param): (key, i)
            for key, bucket in self.buckets.items()
            for i, param in enumerate(bucket.params)
        }

    def param(self, place: ParamId) -> nn.Parameter:
        return self.buckets[place[0]].params[place[1]]

    def ends(self, places: tuple[ParamId, ...]) -> Accumulators:
        found = self._ends.get(places)
        if found is None:
            params = list(map(self.param, places))
            nodes = list(map(self._nodes.setdefault, places, map(compat.accumulator_of, params)))
            found = self._ends[places] = Accumulators(params, nodes)
        return found

    def _forget_nodes(self) -> None:
        self._ends.clear()
        self._nodes.clear()

    def follow(self, places: tuple[ParamId, ...], nodes: Sequence[object]) -> bool:
        """Record the AccumulateGrad nodes of parameters; True if any is new, because the data
        temporarily had another dtype or was replaced in place (`p.set_()`)."""
        if all(map(operator.is_, self.ends(places).nodes, nodes)):
            return False
        self._forget_nodes()
        self._followed = True
        return True

    def outdated(self) -> bool:
        """True if proxies lead to outdated AccumulateGrad nodes: a hook that waits for a gradient
        would be called for both nodes. Without a hook, a call detects new nodes by its gates
        (`follow`), and checking before the next call is early enough."""
        ends = self._ends.values()
        params = chain.from_iterable(map(attrgetter("params"), ends))
        if self._followed or not any(map(compat.post_accumulate_hooks, params)):
            return self._followed
        return any(
            param.requires_grad
            and compat.post_accumulate_hooks(param)
            and compat.accumulator_of(param) is not node
            for each in ends
            for param, node in zip(each.params, each.nodes, strict=True)
        )

    def backward_pass(self) -> BackwardPass:
        """The `backward()` call that runs in this thread."""
        number = compat.backward_id()
        if number not in self.passes:
            found = self.passes[number] = BackwardPass(self.streams, self.buckets, self.ranks)

            def finish() -> None:
                del self.passes[number]
                found.finish()

            # a failing call drops `finish` without calling it
            weakref.finalize(finish, _give_up, self.passes, number, found).atexit = False
            compat.when_backward_ends(finish)
        return self.passes[number]

    def is_busy(self, place: ParamId) -> bool:
        """True if a running `backward()` has returned this gradient to autograd."""
        # a copy, because threads start and end backwards meanwhile
        records = [backward.records.get(place) for backward in tuple(self.passes.values())]
        return any(record is not None and record.memory is not None for record in records)

    def prepare(
        self, wanted: Mapping[int, Sequence[int]], backward: BackwardPass, *, fresh: bool = False
    ) -> None:
        """Allocate memory for gradients, by bucket key and parameter index, except in resident
        buckets, and make each `p.grad` a plain tensor. `fresh`: no parameter has a gradient."""
        for key, params in wanted.items():
            bucket = self.buckets[key]
            bucket.pending.settle()
            backward.norms.pop(key, None)
            for i in () if fresh else params:
                open_lazy(bucket.params[i].grad)
            if bucket.resident is not None:
                self._forget(key, bucket)
            elif not bucket.grads.keys() >= set(params) or self._held_by_user(key, bucket):
                self._renew(key, bucket)
        if not fresh:
            self._separate([(key, i) for key, params in wanted.items() for i in params])

    def bring_in(self, place: ParamId) -> bool:
        """Copy a user's gradient into its place in the bucket; False if there is none."""
        (key, i), gradient = place, self.param(place).grad
        if not is_there(gradient):
            return False
        bucket = self.buckets[key]
        if not is_in_bucket(bucket, i):
            memory = bucket.grads[i] if bucket.resident is None else bucket.make_grad(i)
            with torch.no_grad():
                memory.copy_(compat.local(gradient).to_dense())
        return True

    def forget(self) -> None:
        """Free gradients on the device that `p.grad` no longer references, after `zero_grad()`."""
        for key, bucket in self.buckets.items():
            if bucket.resident is not None and bucket.grads:
                self._forget(key, bucket)

    def _forget(self, key: int, bucket: HostBucket) -> None:
        if not self.passes and _NO_GRADIENT.issuperset(map(type, map(_GRADIENT, bucket.params))):
            bucket.grads.clear()
            return
        for i in [i for i in bucket.grads if not self.is_busy((key, i))]:
            if not is_there(bucket.params[i].grad) or not is_in_bucket(bucket, i):
                del bucket.grads[i]

    def on_device(self) -> bool:
        return any(
            is_there(param.grad)
            for bucket in self.buckets.values()
            if bucket.resident is not None
            for param in bucket.params
        )

    def _separate(self, places: Iterable[ParamId]) -> None:
        """Move a `p.grad` that uses another parameter's place to its own memory."""
        there = [(at, grad) for at in places if is_there(grad := self.param(at).grad)]
        if not there:  # as after zero_grad()
            return
        buffers = {
            g.data_ptr(): (k, i) for k, b in self.buckets.items() for i, g in b.grads.items()
        }
        for place, gradient in there:
            mine = compat.local(gradient)
            if gradient.layout is torch.strided and mine.numel():
                if buffers.get(mine.data_ptr(), place) != place:
                    compat.set_local(gradient, mine.detach().clone())

    def take(self, key: int) -> dict[int, tuple[torch.Tensor, bool]]:
        """Take a bucket's gradients out of `p.grad`, by parameter index, with True if unsummed."""
        taken = {}
        for i, param in enumerate(self.buckets[key].params):
            gradient = param.grad
            if is_there(gradient):
                open_lazy(gradient)
                taken[i] = compat.local(gradient).detach(), is_unsummed(gradient)
                param.grad = None
        return taken

    @staticmethod
    def put(bucket: HostBucket, taken: Mapping[int, tuple[torch.Tensor, bool]]) -> None:
        """Put taken gradients into a bucket that has moved."""
        if taken and bucket.resident is None:
            bucket.make_grads()
        for i, (gradient, lacks) in taken.items():
            param = bucket.params[i]
            if bucket.resident is not None and param.requires_grad:
                bucket.make_grad(i)
            if i in bucket.grads:
                param.grad = compat.like(param, bucket.grads[i].copy_(gradient).detach())
            else:  # frozen since
                param.grad = compat.like(param, gradient.to(bucket.values[i].device))
            if lacks:
                leave_unsummed(param, bucket.layout.params[i].name)

    def _held_by_user(self, key: int, bucket: HostBucket) -> bool:
        """True if a gradient removed by `zero_grad()` is still referenced."""
        for i, memory in bucket.grads.items():
            if compat.storage_users(memory) > 1 and not is_there(bucket.params[i].grad):
                if not self.is_busy((key, i)):
                    return True
        return False

    def _renew(self, key: int, bucket: HostBucket) -> None:
        old = bucket.grads
        bucket.make_grads()
        for i, before in old.items():
            gradient = bucket.params[i].grad
            if is_there(gradient) and same_memory(gradient, before):
                if i not in bucket.grads:  # it was frozen since
                    bucket.grads[i] = before
                    continue
                self.streams.synchronize(Stream.D2H)
                bucket.grads[i].copy_(before)
                compat.set_local(gradient, bucket.grads[i])  # p.grad stays the same tensor object
            elif self.is_busy((key, i)):  # autograd holds its memory
                bucket.grads[i] = before


def open_lazy(gradient: torch.Tensor | None) -> None:
    """Apply the factor of a lazy gradient, which is plain then."""
    who = lazy_of(gradient)
    if gradient is not None and who is not None:
        who.open(gradient)


def _give_up(passes: dict[int, BackwardPass], number: int, found: BackwardPass) -> None:
    """Called when a backward ends; without a `finish` call, it has failed."""
    if passes.get(number) is found:
        del passes[number]
        found.give_up()


def is_there(gradient: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    """True if a gradient exists to accumulate into; an update in the backward leaves none."""
    return gradient is not None and not is_taken(gradient)


class Users(NamedTuple):
    """The users of parameters in one backward, by the id of the parameter."""

    others: frozenset[int]  # with users other than captured graphs
    several: frozenset[int]  # used by several captured graphs, or by one that ran twice
    nodes: frozenset[object]  # all nodes that the backward reaches


def users_of(call: compat.BackwardCall, graph: type, gate: type, link: type) -> Users:
    """The users of parameters in a backward, by the function classes of captured graphs, gates and
    links.

    A gate's first edge leads to the next gate, the others to parameters, each once. An edge to a
    link, which connects a proxy to its parameter (`ctx.param`), counts as an edge to the parameter,
    except from captured graphs, whose gates have one too. An edge from a graph to a parameter
    belongs to a tensor input of the call.
    """
    end, joins = compat.ACCUMULATOR, compat.node_class(link)
    of_graph, of_gate = compat.node_class(graph), compat.node_class(gate)
    todo, others = list[Any](), set[int]()
    for root in call.roots:  # tensors and gradient edges
        todo.append(compat.accumulator_of(root) if isinstance(root, torch.Tensor) else root.node)
        if type(todo[-1]) is end:
            others.add(id(todo[-1].variable))
    gates = list[Sequence[Any]]()  # edges to parameters
    seen: set[object] = set()
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        following = node.next_functions
        if type(node) is of_gate:
            gates.append(following[1:])
            following = following[:1]
        is_graph, is_link = type(node) is of_graph, type(node) is joins
        for after, _ in following:
            kind = type(after)
            if kind is end:
                if not is_link:
                    others.add(id(after.variable))
            elif kind is joins:
                if not is_graph:
                    others.add(id(after.param))
            elif after is not None:
                todo.append(after)
    several: frozenset[int] = frozenset()
    if len(gates) > 1:
        uses = Counter(id(after.variable) for of in gates for after, _ in of if type(after) is end)
        several = frozenset(key for key, count in uses.items() if count > 1)
    return Users(frozenset(others), several, frozenset(seen))
