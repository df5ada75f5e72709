"""Converts special inputs of a captured graph to plain tensors.

`unpack` replaces wrapper subclasses (torchao's weights) by their components:

    before: w -> linear(x, w)
    after:  w_0, w_1 -> linear(x, as_Int8Tensor(w_0, w_1))

The plain tensors become inputs, and each use gets its own wrapper over them, right before it and in
the same stage. Tracing sees through the wrapper: the class's computation becomes part of the stage.

`rebase_overlaps` makes inputs that share memory, one of which is changed in place, views of one
base (AOTAutograd calls such a base synthetic):

    before: x0, x1 -> x1[x1 == 3] = 0; embed(x0)
    after:  x0, x1, x2 -> as_strided(x2, x1's)[...] = 0; embed(as_strided(x2, x0's))

`x2` is their common memory, flat. Each use has its own view, so that a change in one stage does not
force all later ones into that stage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from megacompile import compat
from megacompile.errors import UnsupportedGraphError
from megacompile.ir.capture import Capture, GraphInput, Overlap, PackedInput, TensorInput
from megacompile.ir.tensors import TensorMeta

# In the meta of a node that represents an input in one use: the input's name.
WRAPPED = "megacompile.wrapped"  # a wrapper
VIEW_OF_BASE = "megacompile.view_of_base"  # a view of a base


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
        _made_for_each_use(node, WRAPPED, item.wrapping, parts)
        if node.users:
            raise UnsupportedGraphError(f"packed parameter {node.name!r} is an output")
        graph.erase_node(node)
        inputs += item.parts
    return replace(own, inputs=tuple(inputs))


def rebase_overlaps(capture: Capture) -> Capture:
    """The capture with a base, after the other inputs, for each of its overlaps.

    Raises:
        UnsupportedGraphError: inputs cannot be views of one base.
    """
    if not capture.overlaps:
        return capture
    own = capture.fresh()
    graph = own.module.graph
    placeholders = graph.find_nodes(op="placeholder")
    inputs = list(capture.inputs)
    for k, overlap in enumerate(capture.overlaps):
        _check(overlap, placeholders)
        with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
            base = graph.placeholder(f"megacompile_base_{k}")
        first = _meta(capture, overlap.members[0][0])
        meta = TensorMeta((overlap.numel,), first.dtype, (1,), device=first.device)
        inputs.append(TensorInput(meta))
        for position, offset in overlap.members:
            meta = _meta(capture, position)
            view = (base, meta.shape, meta.stride, offset)
            _made_for_each_use(placeholders[position], VIEW_OF_BASE, torch.as_strided, view)
    return replace(own, inputs=tuple(inputs), overlaps=())


def _made_for_each_use(
    node: fx.Node, mark: str, target: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    """Insert a separate call before each use of an input, except outputs, in the same stage."""
    for user in list(node.users):
        if user.op == "output":
            continue
        with node.graph.inserting_before(user):
            made = node.graph.call_function(target, args)
        made.meta[mark] = node.name
        if "nn_module_stack" in user.meta:
            made.meta["nn_module_stack"] = user.meta["nn_module_stack"]
        user.replace_input_with(node, made)


def _meta(capture: Capture, position: int) -> TensorMeta:
    item = capture.inputs[position]
    assert isinstance(item, TensorInput)
    return item.meta


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
