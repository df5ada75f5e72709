"""Lifetimes: which values share memory, which outlive their graph, which step uses each one last.

`owns` and `memory` of `megacompile.ir.values` say which value has memory, and whose it is. Three
uses of this differ in kind, and stay where they are: `passes/schedule/free` chooses where the
compute stream gives memory back without a wait; `verify/memory_checks` proves from the graph alone
that frees come after readers in every interleaving; `cost/memory` replays the frees over all graphs
of a step, because values share memory inside of stages too, which only the code of these tells.
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
    """The nodes that name the same memory, in program order, by the value it was made for."""
    found: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        found[memory(node)].append(node)
    return found


def outliving(graph: fx.Graph) -> set[fx.Node]:
    """The values whose memory outlives a graph: it returns them, or what fills the same memory."""
    returned = set(graph.output_node().all_input_nodes)
    filled = {memory(node) for node in returned if effects(node).fills is not None}
    return returned.union(node for node in graph.nodes if filled and memory(node) in filled)


def endings(steps: Sequence[Collection[T]]) -> list[set[T]]:
    """The values that each step is the last to use.

    Args:
        steps: the values that each one uses, or makes.
    """
    last = {value: i for i, used in enumerate(steps) for value in used}
    return [{value for value in used if last[value] == i} for i, used in enumerate(steps)]
