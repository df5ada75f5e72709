"""Dynamo's description of a graph's inputs: which are symbols, and which sizes follow from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

_MARKS = ("_dynamo_", "_specialize_on")  # of what mark_dynamic and its like leave on a tensor


@dataclass(frozen=True, slots=True)
class DescribedInput:  # torch 2.11 to 2.15
    """Dynamo's description of one input of a captured graph, in our own symbols."""

    number: sympy.Symbol | None = None  # the input is a number
    in_tensor: bool = False  # which comes as a tensor without dimensions
    shape: tuple[Any, ...] = ()  # of a tensor with symbols: expressions and ints
    stride: tuple[Any, ...] = ()


def described_inputs(module: fx.GraphModule) -> list[DescribedInput] | None:  # torch 2.11 to 2.15
    """The inputs of a graph that Dynamo captured with symbols; None where it has none to keep."""
    placeholders = module.graph.find_nodes(op="placeholder")
    examples = [node.meta.get("example_value", node.meta.get("val")) for node in placeholders]
    floats = [_is_float(node) for node in placeholders]
    dims = {
        symbol
        for value in examples
        if isinstance(value, torch.Tensor)
        for n in (*value.shape, *value.stride())
        if isinstance(n, torch.SymInt)
        for symbol in n.node.expr.free_symbols
    }
    own: dict[Any, sympy.Symbol] = {}
    found: list[DescribedInput] = []
    for value, is_float in zip(examples, floats, strict=True):
        name = f"n{sum(item.number is not None for item in found)}"
        if is_float:
            found.append(DescribedInput(sympy.Symbol(name, real=True), in_tensor=True))
        elif isinstance(value, torch.SymInt) and value.node.expr.is_symbol:
            symbol = value.node.expr
            sized = {"positive": True} if symbol in dims else {}
            own[symbol] = sympy.Symbol(name, integer=True, **sized)
            found.append(DescribedInput(own[symbol]))
        elif isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return None
        else:
            found.append(DescribedInput())
    if not any(item.number is not None for item in found) or not dims <= own.keys():
        return None
    return [
        DescribedInput(shape=_own(value.shape, own), stride=_own(value.stride(), own))
        if isinstance(value, torch.Tensor) and not item.in_tensor
        else item
        for item, value in zip(found, examples, strict=True)
    ]


def _is_float(node: fx.Node) -> bool:
    """True if an input is a Python float, which Dynamo makes a tensor of and the graph takes as a
    number."""
    given = node.meta.get("grapharg")
    passed = bool(getattr(given, "pass_arg_as_tensor", False))
    return passed and all(user.op == "call_method" and user.target == "item" for user in node.users)


def _own(sizes: Sequence[Any], own: Mapping[Any, sympy.Symbol]) -> tuple[Any, ...]:
    return tuple(
        n.node.expr.xreplace(own) if isinstance(n, torch.SymInt) else int(n) for n in sizes
    )


def keep_dynamic_marks(
    source: torch.Tensor, copy: torch.Tensor
) -> torch.Tensor:  # torch 2.11 to 2.15
    """The copy, with what `torch._dynamo.mark_dynamic` and its like have said of the source."""
    if copy is not source:
        for name, value in source.__dict__.items():
            if name.startswith(_MARKS):
                setattr(copy, name, value)
    return copy
