"""Split a stage's joint graph into its template: forward, recompute, backward.

    (primals, tangents, partial gradients) -> (results, gradients)
    FORWARD_SAVING: primals -> results, saved
    BACKWARD: saved, tangents, partial gradients -> gradients

AOTAutograd's min-cut partitioner (Zheng et al., "Min-cut optimal recomputation", 2022) chooses
between saving and recomputing. By default it makes the fastest split. A saved_fraction below 1 is
its memory budget, between recomputing everything (0) and the fastest split (1): a knapsack chooses
among cheap recomputes. Parameters, and views or casts of them, are never saved: the backward binds
them to their current slot. Random numbers that the backward needs are always saved: drawn again,
they would differ.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from megacompile import compat
from megacompile.ir import ops
from megacompile.ir.head import narrow_heads
from megacompile.ir.stages import ArgRef, Code, ParamRef, SavedRef, Stage, Template
from megacompile.ir.tensors import Symbols, TensorMeta, planned_of
from megacompile.ir.tiles import pieces_of
from megacompile.passes.edit import SAME_VALUES, extracted, needed_for
from megacompile.passes.stages import numbers
from megacompile.passes.stages.tile import tile
from megacompile.passes.stages.tokenwise import Tokens, find_tokenwise

_LEAST = 1e-6  # a saved_fraction of 0 would save only the inputs, despite the marks


@dataclass(frozen=True, slots=True)
class BackwardInputs:
    """The gradient inputs of a stage's backward, and their metas."""

    tangents: tuple[int, ...] = ()  # results of the stage
    partial_gradients: tuple[int, ...] = ()  # primals of the stage
    metas: tuple[TensorMeta, ...] = ()  # of the tangents, then of the partial gradients


def as_gradient(meta: TensorMeta) -> TensorMeta:
    """The meta of an output's gradient: the output's, but contiguous if elements of the output
    overlap (after `expand()` or `unfold()`)."""
    return replace(meta.contiguous() if meta.overlaps_itself else meta, requires_grad=False)


def split(
    stage: Stage,
    joint: fx.GraphModule,
    takes: BackwardInputs,
    gradients: tuple[int, ...],
    *,
    index: int,
    saved_fraction: float = 1.0,
    tiles: int = 1,
) -> Template:
    """The template of a traced stage.

    Args:
        joint: (primals, tangents, partial gradients) -> (outputs, new values, gradients).
        gradients: the primals whose gradients the joint graph returns.
        saved_fraction: the share of saved tensors, from 0 (inputs and random numbers) to 1 (the
            fastest forward and backward). A stage that draws random numbers uses 1 if the
            partitioner would draw them again.
        tiles: the number of tiles of its tokenwise pieces, which recompute their values instead of
            saving them. Without such a piece the template has `tiles == 1`.
    """
    planned = planned_of(stage.metas)
    tokens = None if planned or tiles == 1 else tokens_of(stage, tiles)
    forward, backward = joint, None
    if takes.tangents:
        forward, backward = _parted(stage, joint, saved_fraction, tokens)
    saved, graphs, recompute_primals = _codes(stage, forward, backward)
    returned = () if backward is None else ops.returned(backward.graph)
    gradient_metas = tuple(as_gradient(TensorMeta.of(node.meta["val"])) for node in returned)
    refs = {node.name: SavedRef(i) for i, node in enumerate(saved)}
    inputs = backward.graph.find_nodes(op="placeholder") if backward is not None else ()
    names = [str(node.target) for node in inputs]
    if planned:
        graphs = {code: numbers.sized(graph, planned) for code, graph in graphs.items()}
    if tokens is not None:  # codes that share a graph still share it
        each = dict.fromkeys(graphs.values())
        cut = {graph: tile(graph, tokens, tiles, _parameters(stage)) for graph in each}
        graphs = {code: cut[graph] for code, graph in graphs.items()}
    pieces = [piece for graph in graphs.values() for _, piece in pieces_of(graph.graph)]
    values = (node.meta.get("val") for node in joint.graph.nodes)
    fakes = compat.fakes_in(values) if planned else None
    changes = any(meta.symbolic for meta in takes.metas)
    strides = tuple(m.symbolic.stride if m.symbolic else m.stride for m in takes.metas)
    return Template(
        index=index,
        primals=stage.metas,
        outputs=stage.outputs,
        mutated=stage.mutated,
        saved=tuple(TensorMeta.of(n.meta["val"]) for n in saved),
        tangents=takes.tangents,
        partial_gradients=takes.partial_gradients,
        backward_inputs=tuple(
            refs[name] if name in refs else int(name.removeprefix("primals_")) - 1
            for name in names
            if name in refs or not name.startswith("tangents_")
        ),
        gradients=gradients,
        tangent_metas=takes.metas,
        gradient_metas=gradient_metas,
        recompute_primals=recompute_primals,
        random=bool(_random(forward)),
        graphs=graphs,
        joint=joint,
        saved_fraction=saved_fraction,
        tiles=tiles if any(not piece.is_whole for piece in pieces) else 1,
        symbols=None if fakes is None else Symbols(planned, fakes),
        tangent_strides=compat.as_function(strides, list(planned)) if changes else None,
        kept=frozenset() if backward is None else _kept(stage, joint, saved),
    )


def _kept(
    stage: Stage, joint: fx.GraphModule, saved: Sequence[fx.Node]
) -> frozenset[int | SavedRef]:
    """The primals and saved tensors whose memory autograd would keep: the traced backward reads
    them or views of them. The partitioner may save a primal instead and recompute the value that
    autograd keeps."""
    nodes = (node for node in joint.graph.nodes if compat.is_of_backward(node))
    read = {_root(source).name for node in nodes for source in node.all_input_nodes}
    names = [f"primals_{i}" for i in range(1, len(stage.primals) + 1)]
    others = set(names) - read
    primals = [i for i, name in enumerate(names) if name in read]
    refs = [SavedRef(i) for i, node in enumerate(saved) if _root(node).name not in others]
    return frozenset((*primals, *refs))


def _root(node: fx.Node) -> fx.Node:
    """The base of a view of any depth; any other value unchanged."""
    while node.op == "call_function":
        source = node.all_input_nodes[0] if node.all_input_nodes else node
        maker = source if node.target is operator.getitem else node
        if not compat.returns_views(maker.target):
            break
        node = source
    return node


def _codes(
    stage: Stage, forward: fx.GraphModule, backward: fx.GraphModule | None
) -> tuple[list[fx.Node], dict[Code, fx.GraphModule], tuple[int, ...]]:
    """The values that the forward saves, the graphs, and the primals that a recompute reads."""
    results = stage.result_count
    returned = list(ops.returned(forward.graph))
    saved = [
        node
        for node in returned[results:]
        if node.op != "placeholder" and not compat.is_number(node.meta.get("val"))
    ]
    saving = _extract(forward, [*returned[:results], *saved])
    random = bool(_random(forward))  # one graph for all, which draws the same numbers
    graphs = {Code.FORWARD: saving if random else _extract(forward, returned[:results])}
    if backward is None:
        return saved, graphs, ()
    graphs |= {Code.FORWARD_SAVING: saving, Code.BACKWARD: backward}
    if random:
        return saved, graphs | {Code.RECOMPUTE: saving}, tuple(range(len(stage.primals)))
    needed = needed_for(saved)
    placeholders = forward.graph.find_nodes(op="placeholder")
    primals = tuple(i for i, node in enumerate(placeholders) if node in needed)
    return saved, graphs | {Code.RECOMPUTE: _extract(forward, saved, primals)}, primals


def tokens_of(stage: Stage, tiles: int) -> Tokens | None:
    """The dimension along which a stage's activations are cut: the first if it divides evenly,
    otherwise the largest. None if nothing can be cut."""
    args = [
        meta
        for ref, meta in zip(stage.primals, stage.metas, strict=True)
        if isinstance(ref, ArgRef) and isinstance(meta, TensorMeta) and meta.dtype.is_floating_point
    ]
    each = [meta for meta in (*args, *stage.outputs) if len(meta.shape) > 1]
    shape = max((meta.shape for meta in each), key=math.prod, default=())
    leading = range(len(shape) - 1)
    if not leading:
        return None
    dim = 0 if shape[0] % tiles == 0 else max(leading, key=lambda d: shape[d])
    return Tokens(shape, dim) if shape[dim] > 1 else None


def _parameters(stage: Stage) -> frozenset[str]:
    refs = enumerate(stage.primals, start=1)
    return frozenset(f"primals_{i}" for i, ref in refs if isinstance(ref, ParamRef))


def _parted(
    stage: Stage, joint: fx.GraphModule, saved_fraction: float, tokens: Tokens | None = None
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """(forward returning results and saved tensors, backward)."""
    params = len(_parameters(stage))
    work = _extract(joint, ops.returned(joint.graph))  # the partitioner changes its argument
    _forbid_saving_parameters(work, stage)
    random = _random(work)
    if tokens is not None:
        saved_fraction = 1.0
        acts = find_tokenwise(work.graph, tokens, _parameters(stage))
        dependents: set[fx.Node] = set()  # of the backward
        for node in work.graph.nodes:
            is_tangent = node.op == "placeholder" and "tangents" in node.name
            if is_tangent or dependents.intersection(node.all_input_nodes):
                dependents.add(node)
        for node in acts.keys() - dependents:  # never saved, unless it is read outside of tiles
            if not any(user.op != "output" and user not in acts for user in node.users):
                compat.mark_recompute(node, must=True)
    changed = saved_fraction < 1 or tokens is not None
    if random and changed:
        saved_fraction = max(saved_fraction, _LEAST)
        for node in random.values():
            compat.mark_recompute(node, must=False)
    numbers.floats_as_tensors(work)
    forward, backward = compat.split_joint(
        work, outputs=stage.result_count, static_primals=range(params), memory_budget=saved_fraction
    )
    for part in (forward, backward):
        numbers.restore_floats(part)
    if changed and (_random(forward).keys() != random.keys() or _random(backward)):
        return _parted(stage, joint, 1.0)  # the partitioner would draw them again
    return forward, numbers.without_numbers(backward, joint)


def _random(module: fx.GraphModule) -> dict[str, fx.Node]:
    return {node.name: node for node in module.graph.nodes if compat.is_random(node)}


def _forbid_saving_parameters(joint: fx.GraphModule, stage: Stage) -> None:
    """Mark two kinds of values as never saved: views and casts of parameters, also of one another,
    and unpacked weights (values computed only from packed parameters)."""
    bound: set[fx.Node] = set()
    unpacked: set[fx.Node] = set()
    for node, ref in zip(joint.graph.find_nodes(op="placeholder"), stage.primals, strict=False):
        if isinstance(ref, ParamRef):
            packed = stage.buckets[ref.bucket].params[ref.param].packed
            (unpacked if packed else bound).add(node)
    bound |= unpacked
    constant: set[fx.Node] = set()
    for node in joint.graph.nodes:
        if node.op == "get_attr" or node.op == "call_function" and not node.all_input_nodes:
            constant.add(node)
        if node.op != "call_function" or not node.all_input_nodes or compat.is_random(node):
            continue
        sources = set(node.all_input_nodes)
        if sources <= constant:
            constant.add(node)
        if sources <= unpacked | constant and not sources <= constant:
            unpacked.add(node)
            compat.mark_recompute(node, must=True)
        elif compat.operator_name(node.target) in SAME_VALUES and sources <= bound:
            bound.add(node)
            compat.mark_recompute(node, must=True)


def _extract(
    module: fx.GraphModule, outputs: Sequence[Any], primals: Sequence[int] | None = None
) -> fx.GraphModule:
    """The subgraph that computes `outputs`, with all placeholders or only those of `primals`."""
    placeholders = module.graph.find_nodes(op="placeholder")
    given = placeholders if primals is None else [placeholders[i] for i in primals]
    graph = extracted(module.graph, outputs, given)
    narrow_heads(graph)
    return compat.graph_module(module, graph)
