"""Keys that are equal for equivalent constants, functions and graphs.

Each layer may have its own configuration object, and Dynamo generates a new function for each use
of an `autograd.Function` that it does not inline. Compared by identity, no two layers would be
equal.
"""

from __future__ import annotations

import dataclasses
import enum
import types
from collections.abc import Hashable
from typing import Any

import torch
from torch import fx

PLAIN = frozenset(
    map(type, (0, 0.0, False, 0j, "", None, ..., torch.int8, torch.strided, torch.device("cpu")))
) | {torch.memory_format}


def constant_key(value: Any) -> Hashable:
    """A key for constants: plain values, enum members, and immutable containers of them (tuples,
    named tuples and frozen dataclasses).

    Raises:
        TypeError: the value is none of these.
    """
    kind = type(value)
    if kind is float:
        return kind, value.hex()  # -0.0 differs from 0.0, and nan equals itself
    if kind in PLAIN or isinstance(value, enum.Enum):
        return kind, value
    if isinstance(value, tuple):
        return kind, tuple(map(constant_key, value))
    if dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        parts = (getattr(value, field.name) for field in dataclasses.fields(kind))
        return kind, tuple(map(constant_key, parts))
    raise TypeError(f"{kind.__name__} is no constant")


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Object:
    """An object compared by identity."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Object) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def function_key(function: Any) -> Hashable:
    """A key for functions with the same code and the same closure; other objects are compared by
    identity."""
    if type(function) is not types.FunctionType or not function.__closure__:
        return function  # type: ignore[no-any-return]
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    try:
        inside = [cell.cell_contents for cell in function.__closure__]
    except ValueError:  # a cell is empty
        return function
    around = (function.__globals__, *defaults, *inside)
    return function.__code__, tuple(map(_Object, around))


def graph_key(module: fx.GraphModule) -> Hashable:
    """A key for graph modules that compute the same function of their inputs.

    Sharing by shape alone is a trap: layers of equal shape may differ in an attribute (a sliding
    window, a scale). The key is therefore the graph itself, with names replaced by positions.
    """
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
        return ("float", value.hex())  # -0.0 differs from 0.0, and 1.0 from 1
    if isinstance(value, Hashable):
        return (type(value).__name__, value)
    return ("object", id(value))
