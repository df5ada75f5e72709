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
from collections.abc import Container, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import fx

from megacompile import compat, notices
from megacompile.ir.buckets import ParamId
from megacompile.ir.capture import Capture
from megacompile.runtime.model.program import Program
from megacompile.runtime.params.accumulators import Users, users_of
from megacompile.runtime.params.proxies import Link


class Recorded(Protocol):
    """A call of a program, held by autograd: see `call.Call`."""

    program: Program

    def forward(self, *, recorded: bool = False) -> list[torch.Tensor]:
        """Run the forward schedule; returns the computed outputs, each once."""

    def backward(
        self, node: object, given: Sequence[torch.Tensor | None]
    ) -> dict[int, torch.Tensor]:
        """Run the backward schedule; returns the gradients of the inputs, by position."""

    def gradients_for(self, places: Sequence[ParamId]) -> list[torch.Tensor | None]:
        """The gradients that a gate returns."""


def users(call: compat.BackwardCall) -> Users:
    """The autograd nodes that use parameters in a backward, found once."""
    if call.users is None:
        call.users = users_of(call, Graph, Gate, Link)
    found: Users = call.users
    return found


class Gate(torch.autograd.Function):
    """Connects parameters to a captured graph, whose call computes their gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        call: Recorded,
        places: Sequence[ParamId],
        token: torch.Tensor,
        *params: torch.Tensor,
    ) -> torch.Tensor:
        ctx.call, ctx.places = call, places
        ctx.set_materialize_grads(False)
        return torch.empty_like(token)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, None, gradients[0], *ctx.call.gradients_for(ctx.places)


def nodes_behind(token: torch.Tensor) -> list[object]:
    """The AccumulateGrad nodes that a token's gates lead to, in the order of the gates."""
    found: list[object] = []
    gate: Any = token.grad_fn
    while gate is not None:
        (before, _), *ends = gate.next_functions
        found += [node for node, _ in reversed(ends)]
        gate = before
    return found[::-1]


class Graph(torch.autograd.Function):
    """A captured graph.

    Args:
        positions: positions of the inputs that require grad; parameters are inputs of the gates
            instead.
    """

    @staticmethod
    def forward(
        ctx: Any,
        call: Recorded,
        token: torch.Tensor | None,
        inputs: Sequence[int],
        *trained: torch.Tensor,
    ) -> Any:
        outputs = call.forward(recorded=True)
        ctx.call = call
        ctx.positions = inputs
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


# Outputs with hooks from which a graph computes other outputs.
#
# Autograd sees a captured graph as one node. A hook on one of its outputs, or `retain_grad()`,
# receives only the gradient from outside of the graph: the part through other outputs stays inside.
# `torch.compile` behaves the same way; megacompile warns.

Watched = Mapping[int, "weakref.ref[torch.Tensor]"]  # by output position


def watched(outputs: Mapping[int, torch.Tensor]) -> Watched:
    """The outputs that `hooked_inside` checks in the backward; empty for a single output.

    Args:
        outputs: the outputs that require grad, by position.
    """
    return {k: weakref.ref(tensor) for k, tensor in outputs.items()} if len(outputs) > 1 else {}


def hooked_inside(outputs: Watched, capture: Capture, tangents: Container[int]) -> int | None:
    """The first output with a hook that also has a gradient through other outputs, or None.

    Args:
        tangents: the outputs that get a gradient.
    """
    for k, reference in outputs.items():
        tensor = reference()
        if tensor is None or not (compat.gradient_hooks(tensor) or tensor.retains_grad):
            continue
        if any(other in tangents for other in _made_of(k, outputs, capture)):
            return k
    return None


def say_hooked(name: str, k: int) -> None:
    """Warn of an output that is hooked."""
    notices.warn(
        f"megacompile: {name}: output {k} has a hook, or retains its gradient, and other outputs "
        "are computed from it: gradients through those do not reach the hook, and its changes do "
        "not reach them (numbers differ from the plain model's; shown once); call "
        "torch._dynamo.graph_break() after the line that computes it"
    )


def _made_of(k: int, outputs: Watched, capture: Capture) -> list[int]:
    """The positions of the outputs computed from another output."""
    (returned,) = capture.module.graph.output_node().args
    nodes = returned if isinstance(returned, (list, tuple)) else [returned]
    start = nodes[k] if k < len(nodes) else None  # the rest are new values of changed inputs
    todo = [start] if isinstance(start, fx.Node) else []
    found: set[object] = set()
    while todo:
        node = todo.pop()
        new = [user for user in node.users if user.op != "output" and user not in found]
        found.update(new)
        todo += new
    return [other for other in outputs if other < len(nodes) and nodes[other] in found]
