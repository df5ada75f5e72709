"""Wraps untraceable backwards of custom operators as operators.

    y = library::f(x, w, n)     ->  y = library::f(x, w, n)
    sizes = n.tolist() (no graph)   gx, gw = megacompile::library_f_backward([y], [gy], .., x, w, n)

`torch.library.register_autograd` accepts any Python as a backward. Python that reads data has no
graph: float32 experts read their token counts. The wrapper operator calls that Python at run time,
with the forward's inputs and outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from megacompile import compat

_LIBRARY = torch.library.Library("megacompile", "FRAGMENT")
_BACKWARDS: dict[Any, Any] = {}  # custom operator -> the operator for its backward


def with_whole_backwards(module: fx.GraphModule) -> fx.GraphModule | None:
    """The module with untraceable backwards of custom operators wrapped; None if it has none."""
    graph = compat.copy_graph(module.graph)
    calls = [
        (node, custom)
        for node in graph.nodes
        if node.op == "call_function" and (custom := compat.custom_operator(node.target))
    ]
    for node, custom in calls:
        node.target = _whole(custom)
    return compat.graph_module(module, graph) if calls else None


def _whole(custom: compat.CustomOperator) -> Callable[..., Any]:
    """A function that calls a custom operator and has one operator as its backward."""
    if custom.operator not in _BACKWARDS:
        _BACKWARDS[custom.operator] = _define(custom)

    def call(*args: Any, **kwargs: Any) -> Any:
        return _Call.apply(custom, *custom.arguments(args, kwargs))  # type: ignore[no-untyped-call]

    return call


class _Call(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, custom: compat.CustomOperator, *args: Any) -> Any:
        outputs = custom.call(args)
        ctx.custom, ctx.several = custom, isinstance(outputs, tuple)
        ctx.tensors = [i for i, arg in enumerate(args) if isinstance(arg, torch.Tensor)]
        ctx.rest = [None if isinstance(arg, torch.Tensor) else arg for arg in args]
        given = outputs if ctx.several else (outputs,)
        ctx.save_for_backward(*(args[i] for i in ctx.tensors), *given)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        args = list(ctx.rest)
        saved = list(ctx.saved_tensors)
        for i in ctx.tensors:
            args[i] = saved.pop(0)
        needs = list(ctx.needs_input_grad[1:])
        found = iter(_BACKWARDS[ctx.custom.operator](saved, list(grads), needs, *args))
        return None, *(next(found) if need else None for need in needs)


@dataclass
class _Context:
    """The `ctx` of an `autograd.Function`, for the user's functions."""

    needs_input_grad: tuple[bool, ...]
    saved_tensors: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def set_materialize_grads(self, value: bool) -> None:
        """Do nothing: all gradients are materialized in any case."""

    def mark_non_differentiable(self, *tensors: Any) -> None:
        """Check that non-differentiable outputs have a non-differentiable dtype."""


def _define(custom: compat.CustomOperator) -> Any:
    """The operator: (outputs, their gradients, which inputs need one, *inputs) -> gradients."""

    def run(outputs: Any, grads: Any, needs: Any, *args: Any) -> list[torch.Tensor]:
        placed = custom.placed(args)  # the marked outputs have no gradient
        ctx = _Context(tuple(custom.placed(needs)))
        custom.set_up(ctx, args, outputs)
        found = custom.backward(ctx, *grads)
        found = found if isinstance(found, tuple) else (found,)
        theirs = {compat.storage_key(t) for t in (*outputs, *grads, *args) if _is_tensor(t)}
        given = zip(found, placed, ctx.needs_input_grad, strict=True)
        return [_as_promised(grad, x, theirs) for grad, x, need in given if need]

    def shapes(outputs: Any, grads: Any, needs: Any, *args: Any) -> list[torch.Tensor]:
        return [torch.empty_like(x) for x, need in zip(args, needs, strict=True) if need]

    name = custom.operator.name().replace("::", "_").replace(".", "_") + "_backward"
    inputs = ", ".join(("Tensor[] outputs_", "Tensor[] grads_", "bool[] needs_", *custom.inputs))
    _LIBRARY.define(f"{name}({inputs}) -> Tensor[]")
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"megacompile::{name}", shapes, lib=_LIBRARY)
    return getattr(torch.ops.megacompile, name).default


def _as_promised(grad: Any, like: torch.Tensor, others: set[Any]) -> torch.Tensor:
    """The gradient in new memory, with the traced strides."""
    if grad is None:
        return torch.zeros_like(like)
    made = torch.empty_like(like)
    own = compat.storage_key(grad) not in others and grad.dtype == like.dtype
    return grad if own and grad.stride() == made.stride() else made.copy_(grad)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
