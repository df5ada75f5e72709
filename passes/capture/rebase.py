"""Makes inputs that share memory views of one base, where the graph changes one of them in place.

    before: x0, x1 -> x1[x1 == 3] = 0; embed(x0)
    after:  x0, x1, x2 -> as_strided(x2, x1's)[...] = 0; embed(as_strided(x2, x0's))

`x2` is the memory that they share, flat. Each use has a view of its own, right before it and
in the same stage, so that a change in one stage does not tie all later ones to it. (AOTAutograd
calls such a base synthetic.)
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from megacompile import compat
from megacompile.errors import UnsupportedGraphError
from megacompile.ir.capture import Capture, Overlap, TensorInput
from megacompile.ir.tensors import TensorMeta

VIEW_OF_BASE = "megacompile.view_of_base"  # in a view's meta: the input that it stands for


def rebase_overlaps(capture: Capture) -> Capture:
    """The capture with a base, after the other inputs, for each of its overlaps.

    Raises:
        UnsupportedGraphError: inputs cannot be views of one base.
    """
    if not capture.overlaps:
        return capture
    graph = fx.Graph()
    graph.output(graph.graph_copy(capture.module.graph, {}))
    placeholders = graph.find_nodes(op="placeholder")
    inputs = list(capture.inputs)
    for k, overlap in enumerate(capture.overlaps):
        _check(overlap, placeholders)
        meta = _meta(capture, overlap)
        with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
            base = graph.placeholder(f"megacompile_base_{k}")
        inputs.append(TensorInput(meta))
        for position, offset in overlap.members:
            item = capture.inputs[position]
            assert isinstance(item, TensorInput)
            layout = (item.meta.shape, item.meta.stride, offset)
            _use_views(graph, placeholders[position], base, layout)
    module = compat.graph_module(capture.module, graph)
    return replace(capture, module=module, inputs=tuple(inputs), overlaps=())


def _meta(capture: Capture, overlap: Overlap) -> TensorMeta:
    item = capture.inputs[overlap.members[0][0]]
    assert isinstance(item, TensorInput)
    return TensorMeta((overlap.numel,), item.meta.dtype, (1,), device=item.meta.device)


def _check(overlap: Overlap, placeholders: list[fx.Node]) -> None:
    members = [placeholders[position] for position, _ in overlap.members]
    names = " and ".join(node.name for node in members)
    why = overlap.hindrance
    for user in (user for node in members for user in node.users):
        if user.op == "call_method" and compat.changes_metadata(str(user.target)):
            why = why or f"{user.target}() changes the shape of one"
    if why:
        raise UnsupportedGraphError(
            f"inputs {names} share memory and one is changed in place, but {why}; pass copies "
            "(.clone())"
        )


def _use_views(graph: fx.Graph, node: fx.Node, base: fx.Node, layout: tuple[Any, ...]) -> None:
    """Give each use of an input, but as an output, a view of the base."""
    for user in list(node.users):
        if user.op == "output":
            continue
        with graph.inserting_before(user):
            view = graph.call_function(torch.as_strided, (base, *layout))
        view.meta[VIEW_OF_BASE] = node.name
        if "nn_module_stack" in user.meta:
            view.meta["nn_module_stack"] = user.meta["nn_module_stack"]
        user.replace_input_with(node, view)
