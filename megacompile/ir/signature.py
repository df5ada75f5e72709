"""The meaning of the inputs and outputs of a schedule's graphs: by explicit ids, never by names.

A forward's placeholder has the position of the captured graph's input; a backward's tangent has the
position of its output. Tokens are in `megacompile.ir.edges`; every other placeholder is a value of
the previous graph with the same name.
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


def inputs(forward: fx.Graph) -> dict[str, int]:
    """Placeholder name -> position of the captured graph's input."""
    nodes = forward.find_nodes(op="placeholder")
    return {node.name: node.meta["input"] for node in nodes if "input" in node.meta}


def tangents(backward: fx.Graph) -> dict[int, str]:
    """The names of the placeholders for outputs' gradients, by the output."""
    nodes = backward.find_nodes(op="placeholder")
    return {node.meta["tangent"]: node.name for node in nodes if "tangent" in node.meta}


def elsewhere(forward: fx.Graph) -> dict[str, str]:
    """The saved values offloaded to the host or a disk, by the name of the copy."""
    found: dict[str, str] = {}
    for node in ops.nodes_that(forward, lambda op: op.to_backward):  # disk copies after host copies
        value: Any = node.args[1]
        found[node.name] = found.get(value.name, value.name)
    return found


def on_disk(forward: fx.Graph) -> frozenset[str]:
    """The names of the copies on a disk."""
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
    """The outputs that will get a gradient: only a scalar loss, if there is one; otherwise all that
    can.

    A guess before the first backward; a different backward corrects it.
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
