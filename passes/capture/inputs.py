"""Replaces wrapper subclasses (torchao's weights) by their components.

    before: w -> linear(x, w)
    after:  w_0, w_1 -> linear(x, as_Int8Tensor(w_0, w_1))

The plain tensors become inputs, and each use gets its own wrapper over them, right before it and in
the same stage. Tracing sees through the wrapper: the class's computation becomes part of the stage.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from megacompile.errors import UnsupportedGraphError
from megacompile.ir.capture import Capture, GraphInput, PackedInput, Wrapping

WRAPPED = "megacompile.wrapped"  # in the meta of a wrapper: the name of the input that it replaces


def unpack(capture: Capture) -> Capture:
    """The capture without packed inputs; the same capture if it has none.

    Raises:
        UnsupportedGraphError: the graph returns one.
    """
    if not any(isinstance(item, PackedInput) for item in capture.inputs):
        return capture
    own = capture.fresh()
    graph = own.module.graph
    inputs: list[GraphInput] = []
    for node, item in own.bound.items():
        if not isinstance(item, PackedInput):
            inputs.append(item)
            continue
        with graph.inserting_before(node):
            parts = tuple(graph.placeholder(f"{node.name}_{k}") for k in range(len(item.parts)))
        for user in list(node.users):
            _wrap_for(user, node, item.wrapping, parts)
        graph.erase_node(node)
        inputs += item.parts
    return replace(own, inputs=tuple(inputs))


def _wrap_for(user: fx.Node, node: fx.Node, wrapping: Wrapping, parts: tuple[fx.Node, ...]) -> None:
    """Give one use of an input its own wrapper, in the same stage."""
    if user.op == "output":
        raise UnsupportedGraphError(f"packed parameter {node.name!r} is an output")
    with node.graph.inserting_before(user):
        made = node.graph.call_function(wrapping, parts)
    made.meta[WRAPPED] = node.name
    if "nn_module_stack" in user.meta:
        made.meta["nn_module_stack"] = user.meta["nn_module_stack"]
    user.replace_input_with(node, made)
