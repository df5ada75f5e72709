"""A hashable key of a stage's code: equal for stages that may share a template.

Sharing by shape alone is a trap: layers of equal shape may differ in an attribute (a sliding
window, a scale). The key is therefore the graph itself, with names replaced by positions.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import fx

from megacompile.ir.constants import function_key


def graph_key(module: fx.GraphModule) -> Hashable:
    """Equal for graph modules that compute the same function of their inputs."""
    position: dict[fx.Node, int] = {}
    rows: list[Hashable] = []
    for i, node in enumerate(module.graph.nodes):
        position[node] = i
        target = function_key(node.target)
        if node.op == "get_attr":
            target = _attribute_key(_fetch(module, str(node.target)))
        elif node.op == "call_module":
            target = _attribute_key(module.get_submodule(str(node.target)))
        elif node.op in ("placeholder", "output"):
            target = None
        rows.append((node.op, target, _freeze(node.args, position), _freeze(node.kwargs, position)))
    return tuple(rows)


def _fetch(module: fx.GraphModule, path: str) -> Any:
    value: Any = module
    for name in path.split("."):
        value = getattr(value, name)
    return value


def _attribute_key(value: Any) -> Hashable:
    if isinstance(value, fx.GraphModule):
        return ("graph", graph_key(value))
    return ("object", id(value))  # kept alive by the captured graph


def _freeze(value: Any, position: dict[fx.Node, int]) -> Hashable:
    if isinstance(value, fx.Node):
        return ("node", position[value])
    if isinstance(value, (tuple, list)):
        return (type(value).__name__, *(_freeze(item, position) for item in value))
    if isinstance(value, dict):
        return ("dict", *((key, _freeze(item, position)) for key, item in value.items()))
    if isinstance(value, slice):
        return ("slice", *(_freeze(v, position) for v in (value.start, value.stop, value.step)))
    if isinstance(value, torch.Tensor):
        return ("object", id(value))
    if isinstance(value, float):
        return ("float", value.hex())  # -0.0 is not 0.0, and 1.0 is not 1
    if isinstance(value, Hashable):
        return (type(value).__name__, value)
    return ("object", id(value))
