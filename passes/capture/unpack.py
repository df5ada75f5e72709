"""Take wrapper subclasses (torchao's weights) apart where they enter a captured graph.

    before: w -> linear(x, w)
    after:  w_0, w_1 -> linear(x, as_Int8Tensor(w_0, w_1))

The plain tensors come in, and each use has a wrapper of its own over them, right before it and
in the same stage. Tracing looks through it: what the class computes becomes part of the stage.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from megacompile import compat
from megacompile.errors import UnsupportedGraphError
from megacompile.ir.capture import Capture, GraphInput, PackedInput
from megacompile.passes.capture.inline import inline_checkpoints

WRAPPED = "megacompile.wrapped"  # in a wrapper's meta


def unpack(capture: Capture) -> Capture:
    """The capture without packed inputs; itself where it has none.

    Raises:
        UnsupportedGraphError: the graph returns one.
    """
    if not any(isinstance(item, PackedInput) for item in capture.inputs):
        return capture
    capture = inline_checkpoints(capture)  # a use within a checkpoint is one of its stage
    graph = fx.Graph()
    graph.output(graph.graph_copy(capture.module.graph, {}))
    inputs: list[GraphInput] = []
    placeholders = graph.find_nodes(op="placeholder")
    for node, item in zip(placeholders, capture.inputs, strict=True):
        if isinstance(item, PackedInput):
            _take_apart(graph, node, item)
            inputs += item.parts
        else:
            inputs.append(item)
    return replace(capture, module=compat.graph_module(capture.module, graph), inputs=tuple(inputs))


def _take_apart(graph: fx.Graph, node: fx.Node, item: PackedInput) -> None:
    with graph.inserting_before(node):
        parts = tuple(graph.placeholder(f"{node.name}_{k}") for k in range(len(item.parts)))
    for user in list(node.users):
        if user.op == "output":
            raise UnsupportedGraphError(f"packed parameter {node.name!r} is an output")
        with graph.inserting_before(user):
            wrapper = graph.call_function(item.wrapping, parts)
        wrapper.meta[WRAPPED] = node.name
        if "nn_module_stack" in user.meta:
            wrapper.meta["nn_module_stack"] = user.meta["nn_module_stack"]
        user.replace_input_with(node, wrapper)
    graph.erase_node(node)
