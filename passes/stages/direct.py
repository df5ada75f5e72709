"""Eager code of a stage: its ATen graph as Python that calls kernels directly.

    before: t = torch.ops.aten.t.default(w)      after: t = kernel_aten_t_default(w)
            v = torch.ops.aten.view.default(x, [2, 8]); y = torch.ops.aten.view.default(v, [16])
                                                        y = kernel_aten_view_default(x, [16])

Small models spend their time between kernels. The omitted work changes no number: operator lookups,
their Python wrappers, views that do not change shape and strides, and views of views.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from megacompile import compat
from megacompile.passes.edit import value_of

_OPERATOR = re.compile(r"torch\.ops((?:\.\w+)+)(?=\()")  # an operator call in torch.fx's code
_RESHAPES = {"view", "_unsafe_view"}
_IDLE = _RESHAPES | {"expand", "alias", "detach"}  # if they change nothing


def direct(
    module: fx.GraphModule, *, any_strides: bool = False
) -> Callable[..., Sequence[torch.Tensor | None]]:
    """The function of an ATen graph, which is not changed.

    Args:
        any_strides: kernels may return other strides than traced, so a view may be a copy.
    """
    graph = without_idle_views(module.graph)
    for node in graph.nodes if any_strides else ():
        if _reshapes(node):
            node.target = torch.ops.aten.reshape.default
    written = graph.python_code("self")
    namespace = dict(written.globals)

    def name(call: re.Match[str]) -> str:
        function: Any = torch.ops
        for part in call.group(1).split(".")[1:]:
            function = getattr(function, part)
        made = f"kernel{call.group(1).replace('.', '_')}"
        namespace[made] = compat.kernel_of(function)
        return made

    source = _OPERATOR.sub(name, written.src)
    exec(compile(source, "<megacompile stage>", "exec"), namespace)
    function: Callable[..., Any] = types.MethodType(namespace["forward"], module)
    return function


def without_idle_views(graph: fx.Graph) -> fx.Graph:
    """A copy of an ATen graph without no-op views."""
    new = fx.Graph()
    nodes: dict[fx.Node, fx.Node] = {}
    returned = graph.output_node().all_input_nodes
    for node in graph.nodes:
        source = node.args[0] if node.args else None
        name = compat.operator_name(node.target) if node.op == "call_function" else ""
        if name in _IDLE and isinstance(source, fx.Node) and node not in returned:
            if _alike(node, source):
                nodes[node] = nodes[source]
                continue
        made = nodes[node] = new.node_copy(node, nodes.__getitem__)
        if _reshapes(made):
            _from_its_base(made)
    for node in reversed(new.nodes):
        if not node.users and _reshapes(node):
            new.erase_node(node)
    return new


def _reshapes(node: fx.Node) -> bool:
    """True for a view with other sizes, but not for a dtype view."""
    sizes = isinstance(node.args[1], (list, tuple)) if len(node.args) > 1 else False
    return sizes and compat.operator_name(node.target) in _RESHAPES


def _alike(node: fx.Node, source: fx.Node) -> bool:
    """True if a view has the sizes and strides of its base, for all symbol values."""
    view, of = value_of(node), value_of(source)
    if not (isinstance(view, torch.Tensor) and isinstance(of, torch.Tensor)):
        return False
    sizes = (*view.shape, *of.shape, *view.stride(), *of.stride())
    if not all(type(size) is int for size in sizes):
        return False
    return view.shape == of.shape and view.stride() == of.stride() and view.dtype == of.dtype


def _from_its_base(node: fx.Node) -> None:
    """Replace a view of a view by a view of its base.

    Valid because neither view merges non-adjacent dimensions.
    """
    between: Any = node.args[0]
    if _reshapes(between):
        node.args = (between.args[0], node.args[1])
