"""The autograd nodes that connect a program to the user's graph: one per captured graph, and gates.

The node's forward runs the forward schedule, its backward runs the backward schedule. The
parameters are inputs of the gates, which return their gradients after the node's backward:

    loss <- node <- gate <- parameters
            node <- other inputs of the graph

Autograd then accumulates the gradients and runs hooks as usual. All parameters share one gate; if
hooks are registered, each parameter has its own gate, so that hooks run in the plain model's order:
from the parameter that is used last to the one that is used first.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from megacompile import compat, notices
from megacompile.ir.buckets import ParamId
from megacompile.runtime.model.program import Program


class Gate(torch.autograd.Function):
    """Connects the parameters in `places` to a captured graph, whose `Call` computes their
    gradients."""

    @staticmethod
    def forward(
        ctx: Any, call: Any, places: Sequence[ParamId], token: torch.Tensor, *params: torch.Tensor
    ) -> torch.Tensor:
        ctx.call, ctx.places = call, places
        ctx.set_materialize_grads(False)
        return torch.empty_like(token)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, None, gradients[0], *ctx.call.gradients_for(ctx.places)


def accumulate_nodes(token: torch.Tensor) -> list[object]:
    """The AccumulateGrad nodes that a token's gates lead to, in the order of the gates."""
    found: list[object] = []
    gate: Any = token.grad_fn
    while gate is not None:
        (before, _), *ends = gate.next_functions
        found[:0] = [node for node, _ in ends]
        gate = before
    return found


class CapturedNode(torch.autograd.Function):
    """A captured graph, run by a `Call`. `positions` are those of the inputs that require grad;
    parameters are inputs of the gates instead."""

    @staticmethod
    def forward(
        ctx: Any,
        call: Any,
        token: torch.Tensor | None,
        positions: Sequence[int],
        *trained: torch.Tensor,
    ) -> Any:
        outputs = call.forward(recorded=True)
        ctx.call = call
        ctx.positions = positions
        ctx.device = None if token is None else token.device
        ctx.set_materialize_grads(False)
        computed, differentiable = call.program.computed, call.program.differentiable
        if len(differentiable) < len(computed):
            each = zip(computed, outputs, strict=True)
            ctx.mark_non_differentiable(*(t for k, t in each if k not in differentiable))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        found = ctx.call.backward(ctx, gradients)
        token = None if ctx.device is None else torch.empty(0, device=ctx.device)
        return None, token, None, *map(found.get, ctx.positions)


def warn_of_hooks(
    program: Program, outputs: Mapping[int, weakref.ref[torch.Tensor]], tangents: Collection[int]
) -> None:
    """Warn of an output with a hook, or `retain_grad()`, from which the graph computes others that
    get a gradient (`tangents`).

    Autograd sees a captured graph as one node: the hook receives only the gradient from outside of
    the graph. `torch.compile` behaves the same way.
    """
    for k, reference in outputs.items():
        tensor = reference()
        if tensor is None or not (compat.gradient_hooks(tensor) or tensor.retains_grad):
            continue
        (returned,) = program.capture.module.graph.output_node().args
        nodes = returned if isinstance(returned, (list, tuple)) else [returned]
        start = nodes[k] if k < len(nodes) else None  # the rest are new values of changed inputs
        todo = [start] if isinstance(start, fx.Node) else []
        following: set[object] = set()
        while todo:
            new = todo.pop().users.keys() - following
            following |= new
            todo += new
        name = program.capture.name
        inside = {j for j in outputs if j < len(nodes) and nodes[j] in following}
        if not inside.isdisjoint(tangents) and notices.is_new(f"hooks of {name}", program.plans):
            notices.warn(
                f"megacompile: {name}: output {k} has a hook, or retains its gradient, and other "
                "outputs are computed from it: gradients through those do not reach the hook, and "
                "its changes do not reach them (numbers differ from the plain model's; shown "
                "once); call torch._dynamo.graph_break() after the line that computes it"
            )
