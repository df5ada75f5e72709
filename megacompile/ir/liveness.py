"""Lifetimes: values that share memory, values that outlive their graph, and the last use of each
value.

`owns` and `memory` of `megacompile.ir.values` determine which value owns which memory. Three users
have separate implementations: `passes/schedule/free` chooses where the compute stream frees memory
without a wait; `verify/memory_checks` proves from the graph alone that frees come after readers in
every interleaving; `cost/memory` replays the frees over all graphs of a step, because values also
share memory inside stages, which only the stages' code shows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import TypeVar

from torch import fx

from megacompile.ir.ops import effects
from megacompile.ir.values import memory

T = TypeVar("T")


def sharing(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """The nodes that alias the same memory, in program order, by the value that allocated it."""
    found: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        found[memory(node)].append(node)
    return found


def outliving(graph: fx.Graph) -> set[fx.Node]:
    """The values whose memory outlives a graph, because it returns them or an alias."""
    returned = set(graph.output_node().all_input_nodes)
    filled = {memory(node) for node in returned if effects(node).fills is not None}
    return returned.union(node for node in graph.nodes if filled and memory(node) in filled)


def endings(steps: Sequence[Collection[T]]) -> list[set[T]]:
    """The values that each step uses last.

    Args:
        steps: the values that each step uses or defines.
    """
    last = {value: i for i, used in enumerate(steps) for value in used}
    return [{value for value in used if last[value] == i} for i, used in enumerate(steps)]
