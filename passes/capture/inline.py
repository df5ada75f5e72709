"""Put the bodies of activation checkpoints in the place of their calls.

    before: x = checkpoint(body, x, weight)[0]        after: x = linear(x, weight)

What is kept and what is recomputed is for `plan` to decide, for every stage alike. The numbers of a
model do not depend on its checkpoints.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from megacompile import compat
from megacompile.ir.capture import Capture


def inline_checkpoints(capture: Capture) -> Capture:
    """The capture without checkpoints; itself where it has none."""
    if not any(_is_checkpoint(node) for node in capture.module.graph.nodes):
        return capture
    graph = fx.Graph()
    graph.output(_copy(capture.module, graph, None, ""))
    return replace(capture, module=compat.graph_module(capture.module, graph))


def _is_checkpoint(node: fx.Node) -> bool:
    return node.target is compat.CHECKPOINT and node.kwargs.keys() <= compat.CHECKPOINT_OPTIONS


def _copy(body: fx.GraphModule, graph: fx.Graph, inputs: Sequence[Any] | None, path: str) -> Any:
    """Copy a body's nodes to `graph`, with `inputs` for its placeholders; returns its output."""
    env: dict[fx.Node, Any] = {}
    given = iter(inputs or ())
    for node in body.graph.nodes:
        source: Any = node.args[0] if node.args else None
        if node.op == "output":
            return fx.map_arg(source, lambda n: env[n])
        if node.op == "placeholder" and inputs is not None:
            env[node] = next(given)
        elif _is_checkpoint(node):
            name = str(source.target)
            args = [fx.map_arg(arg, lambda n: env[n]) for arg in node.args[1:]]
            env[node] = _copy(getattr(body, name), graph, args, f"{path}{name}.")
        elif node.target is operator.getitem and isinstance(env.get(source), tuple):
            env[node] = env[source][node.args[1]]
        elif node.op != "get_attr" or not all(map(_is_checkpoint, node.users)):
            env[node] = graph.node_copy(node, lambda n: env[n])
            if node.op == "get_attr":
                env[node].target = f"{path}{node.target}"
    raise AssertionError("no output")
