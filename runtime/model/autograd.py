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

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from megacompile import compat
from megacompile.ir.buckets import ParamId
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
        positions, differentiable = call.program.tensor_outputs(), call.program.differentiable
        ctx.mark_non_differentiable(
            *(t for k, t in zip(positions, outputs, strict=True) if not differentiable(k))
        )
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        found = ctx.call.backward(ctx, gradients)
        token = None if ctx.device is None else torch.empty(0, device=ctx.device)
        return None, token, None, *map(found.get, ctx.positions)
