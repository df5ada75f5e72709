"""Finds traced graphs that must not run on zeros: those that could look up an index that does not
exist.

    gather(x, 1, index)             index is 0: there is an element 0
    gather(x, 1, sum(mask) - 1)     is -1 on zeros

On the CPU that raises. On CUDA it ends the process's use of the device, so it must not be tried.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx

from megacompile import compat

_INDICES = ("index", "indices", "target")  # what the schemas of ATen call them
_CHANCES = ("bernoulli", "bernoulli_", "multinomial", "_assert_async")  # check what they are given
_SAME_VALUES = {"t", "view", "transpose", "permute", "expand", "reshape", "unsqueeze", "squeeze"}
_SAME_VALUES |= {"slice", "select", "alias", "detach", "_unsafe_view", "_to_copy", "clone"}
_SAME_VALUES |= {"constant_pad_nd"}  # with the index that a loss ignores


def computes_indices(graph: fx.Graph) -> bool:
    """True if an ATen graph uses an index, or a probability, that it computes from its inputs."""
    given = set(graph.find_nodes(op="placeholder"))
    computed: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if any(source in computed for source in _checked(node)):
            return True
        sources = node.all_input_nodes
        if any(source in computed for source in sources):
            computed.add(node)
        elif any(source in given for source in sources):
            (given if _name(node) in _SAME_VALUES else computed).add(node)
    return False


def _checked(node: fx.Node) -> Iterator[Any]:
    """The arguments of an operator whose values it checks."""
    if _name(node) in _CHANCES:
        yield from node.all_input_nodes[:1]
    for name, value in compat.arguments_of(node):
        if name in _INDICES:
            yield from value if isinstance(value, (list, tuple)) else (value,)


def _name(node: fx.Node) -> str:
    return compat.operator_name(node.target)
