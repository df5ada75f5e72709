"""The meaning of what a schedule's graphs take and return: by explicit ids, never by names.

A forward's placeholder has the position of the captured graph's input, a backward's that of the
output whose gradient it is. Tokens are in `megacompile.ir.tokens`; every other placeholder is a
value of the graph before, under the same name. One of a backward may be *live*: an input of the
model that a backward writes, with what is in its memory then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from megacompile.ir import ops
from megacompile.ir.ops import Value
from megacompile.ir.schedule import Schedule


def input_of(graph: fx.Graph, position: int, name: str) -> fx.Node:
    """A new placeholder for an input of the captured graph."""
    node = graph.placeholder(name)
    node.meta["input"] = position
    return node


def tangent_of(graph: fx.Graph, output: int, name: str) -> fx.Node:
    """A new placeholder for the gradient of an output of the captured graph."""
    node = graph.placeholder(name)
    node.meta["tangent"] = output
    return node


def live_of(graph: fx.Graph, name: str) -> fx.Node:
    """A new placeholder of a backward for an input that it changes in place."""
    node = graph.placeholder(name)
    node.meta["live"] = True
    return node


def is_live(node: fx.Node) -> bool:
    """True if it is a placeholder that stands for an input's memory, and not for a value."""
    return "live" in node.meta


def inputs(forward: fx.Graph) -> dict[str, int]:
    """The position of the captured graph's input that each placeholder stands for, by name."""
    nodes = forward.find_nodes(op="placeholder")
    return {node.name: node.meta["input"] for node in nodes if "input" in node.meta}


def tangents(backward: fx.Graph) -> dict[int, str]:
    """The names of the placeholders for outputs' gradients, by the output."""
    nodes = backward.find_nodes(op="placeholder")
    return {node.meta["tangent"]: node.name for node in nodes if "tangent" in node.meta}


def elsewhere(forward: fx.Graph) -> dict[str, str]:
    """The saved values that wait on the host or on a disk, by the name of the copy there."""
    found: dict[str, str] = {}
    for node in ops.nodes_that(forward, lambda op: op.to_backward):  # a disk's after the host's
        value: Any = node.args[1]
        found[node.name] = found.get(value.name, value.name)
    return found


def on_disk(forward: fx.Graph) -> frozenset[str]:
    """The names of those copies that are on a disk."""
    nodes = ops.nodes_that(forward, lambda op: op.gives is Value.SAVED_ON_DISK)
    return frozenset(node.name for node in nodes)


# Outputs of a captured graph that get a gradient.


def computed_outputs(outputs: Sequence[Any]) -> list[int]:
    """Positions of the outputs that stages compute, each value once."""
    first: dict[fx.Node, int] = {}
    for k, node in enumerate(outputs):
        if isinstance(node, fx.Node) and node.op != "placeholder":
            first.setdefault(node, k)
    return list(first.values())


def expected_tangents(stages: Schedule) -> tuple[int, ...]:
    """The outputs that will get a gradient: a scalar loss alone, or else all that can.

    A guess, made before the first backward; a backward that differs corrects it.
    """
    outputs, _ = ops.returned(stages.forward)
    able = able_tangents(stages)
    return tuple([k for k in able if outputs[k].meta["value"].shape == ()][:1] or able)


def able_tangents(stages: Schedule) -> tuple[int, ...]:
    """The outputs that can get a gradient."""
    outputs, _ = ops.returned(stages.forward)
    metas = {k: outputs[k].meta["value"] for k in computed_outputs(outputs)}
    return tuple(k for k, m in metas.items() if m.requires_grad and _is_differentiable(m.dtype))


def _is_differentiable(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex
