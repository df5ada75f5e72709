"""The order that a graph proves.

[Note: happens-before] Each stream that is in order runs its ops in program order; two ops of one
that is not (`Stream.in_order`) are ordered by edges alone. An op waits for every node among its
arguments and in its `after=`; an item of a tuple stands for the op that returns the tuple. Nothing
else orders anything: two ops are ordered if a path of such edges joins them, and race if none does.
The host issues ops in program order too, so an edge that points backward (a value that is used
before it is made) orders nothing. How graphs are joined is in `megacompile.verify.cycle`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from megacompile.ir import ops
from megacompile.ir.stream import Stream
from megacompile.ir.values import producer


@dataclass(frozen=True, slots=True)
class Step:
    """An op or a placeholder, and what comes directly before it."""

    node: fx.Node
    stream: Stream | None  # whose op before this one is done; None: of no stream that is in order
    waits: tuple[fx.Node, ...]  # ops and placeholders


class Order:
    """The happens-before order of one graph.

    Each node has the set of the nodes before it, as the bits of an integer: an 80-layer schedule
    takes milliseconds.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.position = {node: i for i, node in enumerate(graph.nodes)}
        self.calls = tuple((node, ops.effects(node)) for node in ops.nodes_of(graph))
        self.steps = _steps(graph, self.position)
        self._before: dict[fx.Node, int] = {}
        last: dict[Stream, int] = {}  # what is done when the stream's next op begins
        for step in self.steps:
            before = 0 if step.stream is None else last.get(step.stream, 0)
            for earlier in step.waits:
                before |= self._before[earlier] | 1 << self.position[earlier]
            self._before[step.node] = before
            if step.stream is not None:
                last[step.stream] = before | 1 << self.position[step.node]

    def before(self, first: fx.Node, second: fx.Node) -> bool:
        """True if `first` is done when `second` starts, whatever the streams do."""
        return bool(self._before[producer(second)] >> self.position[producer(first)] & 1)

    def issued_before(self, first: fx.Node, second: fx.Node) -> bool:
        """Is `first` earlier in the program? That orders nothing on the device."""
        return self.position[first] < self.position[second]


def _steps(graph: fx.Graph, position: dict[fx.Node, int]) -> list[Step]:
    """[Note: happens-before] of a graph, in program order; items are merged into their ops."""
    found = []
    for node in graph.nodes:
        if node.op == "output" or producer(node) is not node:
            continue
        op = ops.op_of(node)
        stream = op.stream if op is not None and op.stream.in_order else None
        waits = _awaited(node, position) if op is not None and op.waits else ()
        found.append(Step(node, stream, waits))
    return found


def _awaited(node: fx.Node, position: dict[fx.Node, int]) -> tuple[fx.Node, ...]:
    sources = map(producer, (v for v in node.all_input_nodes if position[v] < position[node]))
    return tuple(source for source in sources if position[source] < position[node])
