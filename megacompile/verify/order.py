"""The order that a graph proves.

[Note: happens-before] Each stream runs its ops in program order. An op waits for every node among
its arguments and in its `after=`; an item of a tuple stands for the op that gives the tuple.
Nothing else orders anything: two ops are ordered if a path of such edges joins them, and race if
none does. The host issues ops in program order too, so an edge that points backward (a value that
is used before it is made) orders nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import networkx as nx
from torch import fx

from megacompile.ir import ops
from megacompile.ir.stream import Stream
from megacompile.ir.values import producer


class Order:
    """The happens-before order of one graph.

    Each node has the set of the nodes before it, as the bits of an integer: an 80-layer schedule
    takes milliseconds.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.position = {node: i for i, node in enumerate(graph.nodes)}
        self.edges = _happens_before(graph, self.position)
        self._before: dict[fx.Node, int] = {}
        for node in nx.topological_sort(self.edges):
            before = 0
            for earlier in self.edges.predecessors(node):
                before |= self._before[earlier] | (1 << self.position[earlier])
            self._before[node] = before

    def before(self, first: fx.Node, second: fx.Node) -> bool:
        """Is `first` done when `second` starts, whatever the streams do?"""
        return bool(self._before[producer(second)] >> self.position[producer(first)] & 1)

    def issued_before(self, first: fx.Node, second: fx.Node) -> bool:
        """Is `first` earlier in the program? That orders nothing on the device."""
        return self.position[first] < self.position[second]


def _happens_before(graph: fx.Graph, position: dict[fx.Node, int]) -> nx.DiGraph:
    """[Note: happens-before] as a graph; items are merged into their ops."""
    edges = nx.DiGraph()
    last: dict[Stream, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "output" or producer(node) is not node:
            continue
        edges.add_node(node)
        edges.add_edges_from((earlier, node) for earlier in _awaited(node, position))
        stream = ops.stream_of(node)
        if stream in last:
            edges.add_edge(last[stream], node)
        last[stream] = node
    return edges


def _awaited(node: fx.Node, position: dict[fx.Node, int]) -> Iterator[fx.Node]:
    if not ops.effects(node).waits:
        return
    for value in node.all_input_nodes:
        if position[value] < position[node]:
            yield producer(value)
