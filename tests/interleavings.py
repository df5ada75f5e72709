"""Brute force for the tests of `verify`: every order in which a device may run a small graph.

A state is how far each stream has come. What a slot holds follows from the position in h2d, what is
freed or changed from that in compute, what the host has from that in d2h. So the steps out of all
states that can be reached are the steps of all interleavings.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from torch import fx

from megacompile.ir import ops
from megacompile.ir.stream import Stream
from megacompile.ir.values import memory, producer, reads
from tests.schedules import arguments

_RELEASES = (ops.free, ops.defer_free)
_WRITERS: dict[object, object] = {  # what reads host memory -> what writes it
    ops.fetch_grad: ops.offload_grad,
    ops.fetch_state: ops.offload_state,
    ops.prefetch: ops.offload_state,
}


def released(value: fx.Node) -> list[fx.Node]:
    """The frees of a name. `after=` is no release."""
    return [n for n in value.users if n.target in _RELEASES and n.args[0] is value]


class Interleavings:
    """The interleavings of one graph's streams."""

    def __init__(self, graph: fx.Graph) -> None:
        self.queues = {s: [n for n in ops.nodes_of(graph) if ops.stream_of(n) is s] for s in Stream}
        self.place = {n: (s, i) for s, queue in self.queues.items() for i, n in enumerate(queue)}
        self.issued = {n: i for i, n in enumerate(graph.nodes)}
        self.begin = ops.nodes_of(graph, ops.begin)[0]
        self.names: dict[fx.Node, list[fx.Node]] = {}
        for each in graph.nodes:
            self.names.setdefault(memory(each), []).append(each)

    def corrupted(self) -> set[str]:
        """What some interleaving gets wrong, as "label reads value"."""
        start = dict.fromkeys(Stream, 0)
        found: set[str] = set()
        seen = {tuple(start.values())}
        states = deque([start])
        while states:
            state = states.popleft()
            for stream in Stream:
                following = {**state, stream: state[stream] + 1}
                key = tuple(following.values())
                if state[stream] == len(self.queues[stream]):
                    continue
                op = self.queues[stream][state[stream]]
                if not all(self.done(n, state) for n in self.awaited(op)):
                    continue
                found |= set(self.wrong(op, state))
                if key not in seen:
                    seen.add(key)
                    states.append(following)
        return found

    def awaited(self, op: fx.Node) -> Iterator[fx.Node]:
        if op.target is ops.defer_free:
            return
        for value in op.all_input_nodes:
            source = producer(value)
            if source.op != "placeholder" and self.issued[source] < self.issued[op]:
                yield source

    def done(self, op: fx.Node, state: dict[Stream, int]) -> bool:
        stream, index = self.place[op]
        return index < state[stream]

    def gone(self, free: fx.Node, state: dict[Stream, int]) -> bool:
        """Has a name been given up? One that is deferred is kept until `after` is done."""
        kept: Any = free.kwargs.get("after", ()) if free.target is ops.defer_free else ()
        return self.done(free, state) and all(self.done(producer(n), state) for n in kept)

    def wrong(self, op: fx.Node, state: dict[Stream, int]) -> Iterator[str]:
        if op.target is ops.prefetch and not self.done(self.begin, state):
            yield f"{ops.label(op)} before begin"
        if op.target in _WRITERS:
            for offload in self.queues[Stream.D2H]:
                same = offload.target is _WRITERS[op.target]
                same = same and arguments(offload)[0] == arguments(op)[0]
                if same and self.done(offload, state):
                    yield f"{ops.label(op)} reads what {ops.label(offload)} wrote"
        for value in op.all_input_nodes:
            if self.issued[value] > self.issued[op]:
                yield f"{ops.label(op)} takes {value.name} before it is made"
            elif value in reads(op) and op.target not in _RELEASES:
                yield from self.wrong_read(op, value, state)
        for value in op.all_input_nodes:
            frees = [user for user in released(value) if user is not op]
            if any(self.issued[free] < self.issued[op] for free in frees):
                yield f"{ops.label(op)} takes {value.name}, deleted"

    def wrong_read(self, op: fx.Node, value: fx.Node, state: dict[Stream, int]) -> Iterator[str]:
        label = ops.label(op)
        if value.target in (ops.prefetch, ops.reuse):
            filled = self.queues[Stream.H2D][: state[Stream.H2D]]
            prefetches = [n for n in filled if n.target is ops.prefetch]
            into = [n for n in prefetches if arguments(n)[1].index == arguments(value)[1].index]
            holds = into[-1] if into else None
            if holds is not (value if value.target is ops.prefetch else None):
                yield f"{label} reads {ops.label(value)}, overwritten"
        names = self.names[memory(value)]
        owners = [name for name in names if name.target is not ops.assign]
        frees = [released(name) for name in owners]
        if all(any(self.gone(free, state) for free in each) for each in frees):
            yield f"{label} reads {value.name}, freed"
        for name in names:
            later = name.target is ops.assign and self.issued[name] > self.issued[value]
            if later and op.target is not ops.assign and self.done(name, state):
                yield f"{label} reads {value.name}, changed"
