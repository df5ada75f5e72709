"""Put what `torch.vmap` wrote into a captured graph into one node.

    before: begin(4); a = add_batch_dim(x, 0, 1); b = a * w; y = remove_batch_dim(b, 1, 4, 0); end()
    after:  y = vmap_0(x, w)

The values in between have a hidden dimension and live in a nesting that is counted in global state:
a stage must hold all of them or none. What is traced of the node has no vmap any more.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

from torch import fx

from megacompile import compat
from megacompile.ir.capture import Capture
from megacompile.passes.capture.inline import inline_checkpoints


def fold_vmaps(capture: Capture) -> Capture:
    """The capture with a call of a module for each vmap; itself where it has none."""
    own = inline_checkpoints(capture)
    if not own.module.graph.find_nodes(op="call_function", target=compat.VMAP_BEGIN):
        return capture
    compat.VMAP_LOAD()
    own = own.fresh()
    module, graph = own.module, own.module.graph
    for node in graph.find_nodes(op="call_function", target=compat.VMAP_LOAD):
        graph.erase_node(node)
    for i, region in enumerate(_regions(graph)):
        _fold(module, region, f"vmap_{i}")
    module.recompile()
    return own


def _regions(graph: fx.Graph) -> list[list[fx.Node]]:
    """The nodes of each outermost vmap, from its begin to its end."""
    regions: list[list[fx.Node]] = []
    depth = 0
    for node in graph.nodes:
        if node.target is compat.VMAP_BEGIN:
            if not depth:
                regions.append([])
            depth += 1
        if depth and node.op != "get_attr":
            regions[-1].append(node)
        if node.target is compat.VMAP_END:
            depth -= 1
    return regions


def _fold(module: fx.GraphModule, region: Sequence[fx.Node], name: str) -> None:
    """Replace a region by a call of a module that has it."""
    inside = set(region)
    inputs = list(dict.fromkeys(n for r in region for n in r.all_input_nodes if n not in inside))
    outputs = [node for node in region if any(user not in inside for user in node.users)]
    body = fx.Graph()
    env = {node: body.placeholder(f"x{i}") for i, node in enumerate(inputs)}
    for node in region:
        env[node] = body.node_copy(node, lambda n: env[n])
    body.output(tuple(env[node] for node in outputs))
    module.add_submodule(name, compat.graph_module(module, body))
    graph = module.graph
    with graph.inserting_before(region[0]):
        for node in inputs:
            if node.op == "get_attr":  # a constant that the vmap is the first to use
                region[0].prepend(node)
        call = graph.call_module(name, tuple(inputs))
        call.meta = _place_of(region)
        for i, node in enumerate(outputs):
            item = graph.call_function(operator.getitem, (call, i))
            item.meta = dict(node.meta)
            node.replace_all_uses_with(item, delete_user_cb=lambda user: user not in inside)
    for node in reversed(region):
        graph.erase_node(node)


def _place_of(region: Sequence[fx.Node]) -> dict[str, object]:
    """The meta of the first node that says in which module it ran."""
    placed = (node.meta for node in region if compat.module_calls(node))
    return dict(next(placed, region[0].meta))
