"""Makes Python floats that change from call to call numbers.

    before: x0 (a tensor) -> t = x0.item(); y * t        after: x0 (a number) -> y * x0

Dynamo gives a graph a float as a tensor without dimensions, whose value is asked for.
"""

from __future__ import annotations

from torch import fx

from megacompile.ir.capture import Capture, ConstantInput, NumberInput


def take_numbers(capture: Capture) -> Capture:
    """The capture whose numbers are taken as they are; itself where none comes as a tensor."""
    if not any(_items(capture)):
        return capture
    own = capture.fresh()
    for node, source in _items(own):
        node.replace_all_uses_with(source)
        own.module.graph.erase_node(node)
    own.module.recompile()
    return own


def _items(capture: Capture) -> list[tuple[fx.Node, fx.Node]]:
    """The nodes that ask for the value of a number, and the number's input."""
    placeholders = capture.module.graph.find_nodes(op="placeholder")
    return [
        (user, node)
        for node, item in zip(placeholders, capture.inputs, strict=True)
        if isinstance(item, (NumberInput, ConstantInput))
        for user in list(node.users)
        if user.op == "call_method" and user.target == "item"
    ]
