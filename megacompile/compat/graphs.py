"""FX graphs: nodes and modules made in a fraction of the time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx, nn
from torch.fx._lazy_graph_module import _LazyGraphModule

_ARGS: Any = fx.Node.args  # set without a look at the graph's table of targets
_KWARGS: Any = fx.Node.kwargs


def graph_module(root: nn.Module, graph: fx.Graph) -> fx.GraphModule:  # torch 2.11 to 2.15
    """As `fx.GraphModule(root, graph)`; its Python is written on the first call or look."""
    module: fx.GraphModule = _LazyGraphModule(root, graph)
    return module


def write_powers() -> None:  # torch 2.11 to 2.15
    """Makes FX write the base of a power in brackets, from now on and for good.

    It writes `-1 ** x` for a base of -1, which Python reads as `-(1 ** x)`. So numbers of a graph
    whose Python runs are wrong, with `torch.compile(backend="eager")` too.
    """
    fx.graph.magic_methods["pow"] = "({}) ** {}"


def new_node(
    graph: fx.Graph,
    op: str,
    target: Callable[..., Any] | str,
    name: str,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> fx.Node:  # torch 2.11 to 2.15
    """As `graph.create_node(op, target, args, kwargs, name)`, for a graph that no module has hooks
    on, and arguments that are no symbols.

    A name with a digit is no keyword and no builtin: where it is free, it is taken as it is.
    """
    names = graph._graph_namespace
    plain = name.isascii() and name.isidentifier() and not name.replace("_", "").isalpha()
    if not plain or name in names._used_names:
        node = graph.create_node(op, target, name=name)
        _ARGS.fset(node, args)
        if kwargs:
            _KWARGS.fset(node, kwargs)
        return node
    names._used_names.add(name)
    return _added(graph, op, target, name, args, kwargs)


def copy_node(
    graph: fx.Graph, node: fx.Node, given: Callable[[fx.Node], Any]
) -> fx.Node:  # torch 2.11 to 2.15
    """As `graph.node_copy(node, given)`, for a graph as in `new_node`."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), given)
    made = new_node(graph, node.op, node.target, node.name, args, kwargs)
    made.meta.update(node.meta)
    if node.type is not None:
        made.type = node.type
    return made


def copy_graph(graph: fx.Graph) -> fx.Graph:  # torch 2.11 to 2.15
    """A copy with nodes of its own and the same names."""
    copied = fx.Graph()
    nodes: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        args = fx.map_arg(node.args, nodes.__getitem__)
        kwargs = fx.map_arg(node.kwargs, nodes.__getitem__) if node.kwargs else None
        new = _added(copied, node.op, node.target, node.name, args, kwargs)
        new.meta.update(node.meta)
        nodes[node] = new
    copied._graph_namespace._used_names.update(node.name for node in nodes)
    return copied


def _added(
    graph: fx.Graph,
    op: str,
    target: Callable[..., Any] | str,
    name: str,
    args: Any,
    kwargs: Any,
) -> fx.Node:
    """A node of exactly this name, where the graph inserts now."""
    node = fx.Node(graph, name, op, target, args, kwargs or {})
    graph._graph_namespace._obj_to_name[node] = name
    graph._insert(node)
    graph._find_nodes_lookup_table.insert(node)
    graph._len += 1
    return node
