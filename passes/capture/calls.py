"""Rewrites calls that Dynamo captures, in the capture's graph: most cannot be cut into stages as
they are.

`inline_checkpoints` inlines the bodies of activation checkpoints, because `plan` decides for every
stage what to save and what to recompute. A model's results do not depend on its checkpoints.

    before: x = checkpoint(body, x, weight)[0]        after: x = linear(x, weight)

`unpack` replaces wrapper subclasses (torchao's weights) by their components. Each use gets its own
wrapper over them, right before it and in the same stage. Tracing sees through the wrapper: the
class's computation becomes part of the stage.

    before: w -> linear(x, w)       after: w_0, w_1 -> linear(x, as_Int8Tensor(w_0, w_1))

`fold_vmaps` folds the nodes of a `torch.vmap` into one node. Their values have a hidden dimension
and a nesting level in global state: a stage must contain all of them or none. Tracing the node
removes the vmap.

    before: begin(4); a = add_batch_dim(x, 0, 1); b = a * w; y = remove_batch_dim(b, 1, 4, 0); end()
    after:  y = vmap_0(x, w)

`take_numbers` turns Python floats that change from call to call into number inputs. Dynamo passes
such a float as a 0-d tensor and calls `item()` on it.

    before: x0 (a tensor) -> t = x0.item(); y * t        after: x0 (a number) -> y * x0

`take_grouped_products` replaces transformers' fallback for the experts' grouped matrix products by
torch's own operator, which an eager call of the model uses (see `megacompile.compat.kernels`).

    before: transformers.grouped_mm_fallback(x, weight, offs)
    after:  megacompile.grouped_mm(x, weight, offs)

`widen_losses` computes losses in float32, whatever `compute_dtype` is: a loss sums many small
numbers. `torch.autocast` does the same and, on a GPU, includes `log_softmax`.

    before: loss = cross_entropy(logits, y)
    after:  loss = cross_entropy(widened(logits), widened(y))
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from megacompile import compat
from megacompile.errors import UnsupportedGraphError
from megacompile.ir.capture import Capture, ConstantInput, GraphInput, PackedInput
from megacompile.ir.tensors import Number

WRAPPED = "megacompile.wrapped"  # in the meta of a wrapper


def inline_checkpoints(capture: Capture) -> Capture:
    """The capture without checkpoints, with a graph of its own for the next passes to change."""
    if not any(map(_is_checkpoint, capture.module.graph.nodes)):
        return capture.fresh()
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


def unpack(capture: Capture) -> Capture:
    """The capture without packed inputs. Raises UnsupportedGraphError if the graph returns one."""
    graph = capture.module.graph
    inputs: list[GraphInput] = []
    for node, item in capture.bound.items():
        if not isinstance(item, PackedInput):
            inputs.append(item)
            continue
        with graph.inserting_before(node):
            parts = tuple(graph.placeholder(f"{node.name}_{k}") for k in range(len(item.parts)))
        for user in list(node.users):  # each use gets its own wrapper, in the same stage
            if user.op == "output":
                raise UnsupportedGraphError(f"packed parameter {node.name!r} is an output")
            with graph.inserting_before(user):
                made = graph.call_function(item.wrapping, parts)
            made.meta[WRAPPED] = True
            if "nn_module_stack" in user.meta:
                made.meta["nn_module_stack"] = user.meta["nn_module_stack"]
            user.replace_input_with(node, made)
        graph.erase_node(node)
        inputs += item.parts
    return replace(capture, inputs=tuple(inputs))


def fold_vmaps(capture: Capture) -> Capture:
    """The capture with a module call for each vmap."""
    graph = capture.module.graph
    for node in graph.find_nodes(op="call_function", target=compat.VMAP_LOAD):
        compat.VMAP_LOAD()
        graph.erase_node(node)
    for i, region in enumerate(_regions(graph)):
        _fold(capture.module, region, f"vmap_{i}")
    return capture


def _regions(graph: fx.Graph) -> list[list[fx.Node]]:
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
    """Move a region into a module and replace it by a call."""
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
            if node.op == "get_attr":  # a constant first used in the vmap
                region[0].prepend(node)
        call = graph.call_module(name, tuple(inputs))
        # the call is in the modules of the first node that is in any
        call.meta = dict(next(filter(compat.module_calls, region), region[0]).meta)
        for i, node in enumerate(outputs):
            item = graph.call_function(operator.getitem, (call, i))
            item.meta = dict(node.meta)
            node.replace_all_uses_with(item, delete_user_cb=lambda user: user not in inside)
    for node in reversed(region):
        graph.erase_node(node)


def take_numbers(capture: Capture) -> Capture:
    """The capture with plain number inputs."""
    for node, item in capture.bound.items():
        for user in list(node.users) if isinstance(item, (Number, ConstantInput)) else ():
            if user.op == "call_method" and user.target == "item":
                user.replace_all_uses_with(node)
                capture.module.graph.erase_node(user)
    return capture


def take_grouped_products(capture: Capture, device: torch.device) -> Capture:
    """The capture with torch's grouped matrix products instead of transformers' fallback."""
    for node in capture.module.graph.nodes:
        if node.op == "call_function":
            node.target = compat.eager_grouped_mm(node.target, device) or node.target
    return capture


# Functions of torch.nn.functional, their callees, and methods, by name.
_LOSSES = {
    *("cross_entropy", "cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d"),
    *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "poisson_nll_loss"),
    *("gaussian_nll_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits"),
    *("cosine_embedding_loss", "hinge_embedding_loss", "margin_ranking_loss", "ctc_loss"),
    *("soft_margin_loss", "multi_margin_loss", "multilabel_margin_loss"),
    *("multilabel_soft_margin_loss", "triplet_margin_loss"),
}
_LOG_SOFTMAX = "log_softmax"


def widen_losses(capture: Capture, *, compute_dtype: torch.dtype) -> Capture:
    """The capture with losses whose inputs are never in `compute_dtype`."""
    names = _LOSSES | ({_LOG_SOFTMAX} if capture.device.type == "cuda" else set())
    graph = capture.module.graph
    for node in [n for n in graph.nodes if _is_loss(n, names)]:
        for given in dict.fromkeys(node.all_input_nodes):
            with graph.inserting_before(node):
                wide = graph.call_function(widened, (given, compute_dtype))
            wide.meta = {k: v for k, v in node.meta.items() if k != "example_value"}
            node.replace_input_with(given, wide)
    return capture


def widened(value: Any, dtype: torch.dtype) -> Any:
    """A tensor of this dtype in float32; other values unchanged."""
    return value.float() if getattr(value, "dtype", None) is dtype else value


def _is_loss(node: fx.Node, names: set[str]) -> bool:
    """True for a call of a loss of torch; `log_softmax` counts only without an explicit dtype."""
    method = isinstance(node.target, str)
    name = node.target if method else getattr(node.target, "__name__", "")
    if name not in names or node.op not in ("call_function", "call_method"):
        return False
    if name == _LOG_SOFTMAX:
        return node.kwargs.get("dtype") is None and len(node.args) <= 2
    module = getattr(node.target, "__module__", None) or "torch"
    return not method and module.split(".")[0] == "torch"
