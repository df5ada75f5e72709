"""Outputs with hooks from which a graph computes other outputs.

Autograd sees a captured graph as one node. A hook on one of its outputs, or `retain_grad()`,
receives only the gradient from outside of the graph: the part through other outputs stays inside.
`torch.compile` behaves the same way; megacompile warns.
"""

from __future__ import annotations

import weakref
from collections.abc import Container, Mapping

import torch
from torch import fx

from megacompile import compat, notices
from megacompile.ir.capture import Capture

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
        "are computed from it: what comes through those does not reach the hook, and what the hook "
        "changes does not reach them (other numbers than the plain model's; said once); end the "
        "captured graph after the line that computes it: torch._dynamo.graph_break()"
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
