"""FX graphs: nodes and modules made in a fraction of the time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx, nn
from torch.fx._lazy_graph_module import _LazyGraphModule


def graph_module(root: nn.Module, graph: fx.Graph) -> fx.GraphModule:  # torch 2.11 to 2.15
    """As `fx.GraphModule(root, graph)`; its Python is written when somebody calls it or looks."""
    module: fx.GraphModule = _LazyGraphModule(root, graph)
    return module


def new_node(
    graph: fx.Graph, op: str, target: Callable[..., Any] | str, name: str
) -> fx.Node:  # torch 2.11 to 2.15
    """As `graph.create_node(op, target, name=name)`, for a graph that no module has hooks on.

    A name with a digit is no keyword and no builtin: where it is free, it is taken as it is.
    """
    names = graph._graph_namespace
    plain = name.isascii() and name.isidentifier() and not name.replace("_", "").isalpha()
    if not plain or name in names._used_names:
        return graph.create_node(op, target, name=name)
    names._used_names.add(name)
    node = fx.Node(graph, name, op, target, (), {})
    names._obj_to_name[node] = name
    graph._insert(node)
    graph._find_nodes_lookup_table.insert(node)
    graph._len += 1
    return node
