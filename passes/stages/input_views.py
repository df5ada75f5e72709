"""Outputs of a captured graph that are views of its inputs.

    before: v = scale[:2]; scale.mul_(0.9); return v
    after:  0F ASSIGN, and the output is `scale`; the call recreates the view

A stage's code returns new values of mutated inputs, and views of these: the user would get copies,
which do not follow the input. So if an input is changed, or no gradient flows through the view, the
output is a view of the input's memory. (AOTAutograd also regenerates output aliases from their
bases.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import fx

from megacompile import compat
from megacompile.ir import ops
from megacompile.ir.capture import Capture, InputView, TensorInput
from megacompile.passes.capture.interpret import Interpreter, number_of
from megacompile.passes.capture.propagate import Values


def views_of_inputs(capture: Capture, values: Values) -> dict[fx.Node, tuple[fx.Node, InputView]]:
    """Output node -> the viewed input and the view's layout."""
    tensors = [node for node, item in capture.bound.items() if isinstance(item, TensorInput)]
    holders = {key: node for node in tensors for key in values.storages[node]}
    changed = frozenset().union(*values.mutates.values())
    wanted: dict[fx.Node, fx.Node] = {}
    for node in ops.returned(capture.module.graph):
        if not isinstance(node, fx.Node) or not values.is_tensor(node):
            continue
        keys = values.storages[node] & holders.keys()
        if values.origin(node) in tensors or len(keys) != 1:
            continue
        if values.of[node].requires_grad and changed.isdisjoint(keys):
            continue  # its gradient is part of the input's, in graph order
        wanted[node] = holders[next(iter(keys))]
    return dict(_laid_out(capture, values, wanted)) if wanted else {}


def _laid_out(
    capture: Capture, values: Values, wanted: dict[fx.Node, fx.Node]
) -> Iterator[tuple[fx.Node, tuple[fx.Node, InputView]]]:
    """Run the nodes that create the views on fake tensors with real in-place changes: for an input
    with gaps, functionalization returns a new value without gaps."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {n: graph.node_copy(n) for n in capture.bound}

    def copied(node: fx.Node) -> fx.Node:
        node = values.origin(node)
        if node not in env:
            for source in node.all_input_nodes:
                copied(source)
            env[node] = graph.node_copy(node, copied)
        return env[node]

    made = {node: copied(node) for node in wanted}
    graph.output(tuple(made.values()))
    alone = replace(capture, module=compat.graph_module(capture.module, graph))
    interpreter = Interpreter(alone, type(values)())
    with capture.ambient.apply(), compat.keeping_nesting(), interpreter.fakes, torch.no_grad():
        interpreter.constants = interpreter.fake_constants()
        try:
            interpreter.run(*map(interpreter.fake_input, capture.inputs))
        except compat.UNTRACEABLE:
            return  # these stay stage results
        for node, source in wanted.items():
            value, base = (interpreter.env[n] for n in (made[node], env[source]))
            # sizes, strides and offset describe such a view completely
            plain = value.dtype == base.dtype and not value.is_conj() and not value.is_neg()
            if compat.storage_key(value) == compat.storage_key(base) and plain:
                shape, stride = (
                    tuple(map(number_of, sizes)) for sizes in (value.shape, value.stride())
                )
                offset = number_of(value.storage_offset())
                view = InputView(shape, stride, offset, values.meta(node).requires_grad)
                yield node, (source, view)
