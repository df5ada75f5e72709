"""Joins a program to the user's autograd: one node for each captured graph, and gates behind it.

The node's forward runs the forward schedule, its backward the backward schedule. The parameters are
inputs of the gates, which hand over their gradients once the node's backward has run:

    loss <- node <- gate <- parameters
            node <- other inputs of the graph

Autograd then accumulates them and runs the hooks, as it does for any gradient. There is one gate
for all parameters, or one for each where hooks are registered: they run in the order in which the
plain model's would, from the parameter that is used last to the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from megacompile import compat
from megacompile.ir.symbols import has_numbers
from megacompile.runtime.model.autograd_nodes import Graph
from megacompile.runtime.model.call import Call
from megacompile.runtime.model.hooked_outputs import watched
from megacompile.runtime.model.program import Program


def run(program: Program, args: Sequence[Any]) -> list[Any]:
    """Call a program with a captured graph's inputs; returns the graph's outputs.

    What the graph changes in place is changed afterwards, for autograd too.
    """
    call = Call(program, args)
    if any(program.differentiable(k) for k in program.tensor_outputs()):
        with torch.enable_grad():  # the graph itself may do so
            trained = [k for k in program.other_tensors(args) if args[k].requires_grad]
            computed = compat.apply(
                Graph, call, call.gates(), trained, *map(args.__getitem__, trained)
            )
    else:
        computed = call.forward()
    by_position = dict(zip(program.tensor_outputs(), computed, strict=True))
    call.outputs = watched({k: t for k, t in by_position.items() if t.requires_grad})
    by_node = {program.outputs[k]: value for k, value in by_position.items()}
    inputs = call.inputs_by_name

    def value(node: Any) -> Any:
        if not isinstance(node, fx.Node):
            return program.number(node, args) if has_numbers(node) else node
        return inputs[node.name] if node.op == "placeholder" else by_node[node]

    for position, k in program.recorded:
        _record(args[position], by_node[program.outputs[k]])
    count = len(program.outputs) - len(program.recorded)
    outputs = [value(node) for node in program.outputs[:count]]
    for k, view in program.stages.input_views:
        shape, stride, offset = program.number((view.shape, view.stride, view.offset), args)
        outputs[k] = _view(outputs[k], shape, stride, offset, requires_grad=view.requires_grad)
    program.hand(outputs)
    return outputs


def _view(
    tensor: torch.Tensor,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    offset: int,
    *,
    requires_grad: bool,
) -> torch.Tensor:
    """A view of an input, `offset` elements after its first one."""
    base = tensor if requires_grad or not tensor.requires_grad else tensor.detach()
    with torch.enable_grad():  # what `no_grad` lets be made must not be changed in place without
        return base.as_strided(shape, stride, base.storage_offset() + offset)


def _record(tensor: torch.Tensor, new: torch.Tensor) -> None:
    """Tells autograd that a tensor, which holds its new value already, was changed in place.

    So gradients of later uses go through the graph that changed it. A leaf that requires grad has
    no history: it can only have been changed where autograd does not look (`detach()`).
    """
    if new.requires_grad and not (tensor.is_leaf and tensor.requires_grad):
        with torch.enable_grad():
            tensor.copy_(new)
