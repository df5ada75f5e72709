"""The cost of ops: seconds of computes, bytes of copies.

The time of a template's code is the sum over its kernels (`megacompile.cost.fusion`). The analysis
is cached with the graph, so that many schedules of one model can be simulated quickly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from torch import fx

from megacompile.cost.aten import bytes_of, is_grouped, is_view, name_of, tensors_of
from megacompile.cost.fusion import Analysis, Kernel, KernelBound, Returned, analyse
from megacompile.cost.hardware import Hardware
from megacompile.ir import ops
from megacompile.ir.head import sum_dtype
from megacompile.ir.schedule import Schedule
from megacompile.ir.stages import Code, ParamRef, Stage, Template
from megacompile.ir.tensors import TensorMeta
from megacompile.ir.tiles import Piece, Result, Tile, pieces_of
from megacompile.ir.values import endings


def analysis_of(template: Template, code: Code, *, fused: bool = True) -> Analysis:
    """The analysis of a template's code, cached with its graph."""
    module = template.graphs.get(code)
    if module is None:
        return Analysis((), 0, ())
    kept: dict[bool, tuple[fx.Graph, Analysis]] = module.meta.setdefault("megacompile_cost", {})
    found = kept.get(fused)
    if found is None or found[0] is not module.graph:  # copies of a module share `meta`
        count = analyse_pieces if pieces_of(module.graph) else analyse
        found = kept[fused] = module.graph, count(module.graph, fused=fused)
    return found[1]


def node_s(node: fx.Node, hardware: Hardware, *, fused: bool = True) -> float:
    """Seconds that a compute node takes alone."""
    op = ops.effects(node)
    if op.code is not None:
        template = ops.arguments(node)[0].traced
        return analysis_of(template, ops.code_of(node), fused=fused).seconds(hardware)
    if op.moves is None:
        return 0.0
    return op.moves(node) / (hardware.memory_gb_s * 1e9) + hardware.launch_s


def computes_s(schedule: Schedule, hardware: Hardware, *, fused: bool = True) -> float:
    """Seconds of all computes of a step, which do not depend on the places of buckets: its
    templates, and updates and other computes in the backward."""
    runs: Counter[tuple[Template, Code]] = Counter()
    others_s = 0.0
    for graph in schedule.graphs.values():
        for node in ops.nodes_that(
            graph, lambda op: op.code or op.moves and not ops.leaves_compute(op)
        ):
            if ops.effects(node).code is not None:
                runs[ops.arguments(node)[0].traced, ops.code_of(node)] += 1
            elif schedule.update is None:
                others_s += node_s(node, hardware, fused=fused)
    each = ((analysis_of(*run, fused=fused), count) for run, count in runs.items())
    return others_s + sum(count * analysis.seconds(hardware) for analysis, count in each)


# Graphs of pieces: the kernels of the pieces, tile by tile, and their memory. A tile's results are
# copied into the whole result; a product over tokens is added to a sum, which is read and written
# for each tile.


def analyse_pieces(graph: fx.Graph, *, fused: bool = True) -> Analysis:
    """Count the kernels of a graph of pieces, whose nodes have fake tensors as `meta["val"]`."""
    found = {
        tile: analyse(tile.module.graph, fused=fused)
        for _, piece in pieces_of(graph)
        for tile in piece.tiles
    }
    kernels = [kernel for _, piece in pieces_of(graph) for kernel in _kernels(piece, found)]
    return Analysis(tuple(kernels), _peak_bytes(graph, found), tuple(_returned(graph)))


def _kernels(piece: Piece, found: dict[Tile, Analysis]) -> Iterator[Kernel]:
    if piece.is_whole:
        yield from found[piece.tiles[0]].kernels
        return
    for start, tile in piece.spans():
        yield from found[tile].kernels
        yield from _joined(piece, tile, first=start == 0)
    for (kind, _), meta in zip(piece.results, piece.metas, strict=True):
        if kind is not Result.CUT and _sum_bytes(meta) > meta.size_bytes:
            moved = _sum_bytes(meta) + meta.size_bytes
            yield Kernel(KernelBound.MEMORY, 0, moved, itemsize=4)


def _joined(piece: Piece, tile: Tile, *, first: bool) -> Iterator[Kernel]:
    """Kernels of the loop over tiles: copies into the whole result, and sums."""
    made = iter(ops.returned(tile.module.graph))
    for (kind, _), meta in zip(piece.results, piece.metas, strict=True):
        if kind is Result.PRODUCT:
            (a,), (b,) = tensors_of(next(made)), tensors_of(next(made))
            moved = bytes_of([a, b]) + (1 if first else 2) * _sum_bytes(meta)
            flops = 2 * a.shape[0] * a.shape[1] * b.shape[1]
            yield Kernel(KernelBound.PRODUCT, flops, moved, a.dtype.itemsize)
            continue
        size = bytes_of(tensors_of(next(made)))
        moved = 2 * size if first or kind is Result.CUT else 3 * size
        yield Kernel(KernelBound.MEMORY, 0, moved, itemsize=4)


def _sum_bytes(meta: TensorMeta) -> int:
    return meta.size_bytes // meta.dtype.itemsize * sum_dtype(meta.dtype).itemsize


def _peak_bytes(graph: fx.Graph, found: dict[Tile, Analysis]) -> int:
    """Peak memory: values passed between pieces, and the memory of a tile."""
    nodes = list(graph.nodes)
    live: dict[fx.Node, int] = {}
    peak = 0
    for node, ending in zip(nodes, endings([n.all_input_nodes for n in nodes]), strict=True):
        if isinstance(node.target, Piece):
            piece: Piece = node.target
            inside = max(found[tile].peak_bytes for tile in piece.tiles)
            if not piece.is_whole:
                pairs = zip(piece.results, piece.metas, strict=True)
                inside += sum(
                    meta.size_bytes if kind is Result.CUT else _sum_bytes(meta)
                    for (kind, _), meta in pairs
                )
            peak = max(peak, sum(live.values()) + inside)
        elif node.op == "call_function":  # an item
            live[node] = bytes_of(tensors_of(node))
            peak = max(peak, sum(live.values()))
        for source in ending:
            live.pop(source, None)
    return peak


def _returned(graph: fx.Graph) -> Iterator[Returned | None]:
    inputs = {node: i for i, node in enumerate(graph.find_nodes(op="placeholder"))}
    for k, node in enumerate(ops.returned(graph)):
        if not isinstance(node, fx.Node):
            yield None
            continue
        memory = -1 - inputs[node] if node in inputs else k
        yield Returned(memory, bytes_of(tensors_of(node)))


# A model's active parameters per token, without the experts that the token does not choose. A
# grouped product, (rows, k) by (experts, k, n), uses the share rows / (tokens * experts) of a
# parameter. Every other one counts fully, as in the usual 6 N T.

_CASTS = set("convert_element_type _to_copy clone".split())


def active_parameters(schedules: Iterable[Schedule], parameters: int, tokens: int) -> int:
    """The number of a model's parameters that are active for each of `tokens` per step; `schedules`
    are of all its captured graphs, which may not read all of its `parameters`."""
    shares: dict[tuple[int, int], tuple[int, float]] = {}  # (bucket, index) -> elements, share
    for schedule in schedules:
        for stage in schedule.stages:
            for ref, rows in _expert_reads(stage):
                bucket = stage.buckets[ref.bucket]
                param = bucket.params[ref.param]
                place = bucket.key, ref.param
                share = rows / (tokens * param.shape[0]) + shares.get(place, (0, 0.0))[1]
                shares[place] = param.numel, min(1.0, share)
    return parameters - round(sum(numel * (1.0 - share) for numel, share in shares.values()))


def _expert_reads(stage: Stage) -> Iterator[tuple[ParamRef, int]]:
    """The expert parameters that a stage reads, each with the number of rows."""
    graphs = stage.traced.graphs
    module = graphs.get(Code.FORWARD) or graphs.get(Code.FORWARD_SAVING)
    if module is None:
        return
    refs = dict(zip(module.graph.find_nodes(op="placeholder"), stage.primals, strict=False))
    for node in module.graph.nodes:
        if node.op == "call_function" and is_grouped(node):
            rows, weight = (n for n in node.args[:2] if isinstance(n, fx.Node))
            ref = refs.get(_source(weight))
            if isinstance(ref, ParamRef):
                yield ref, int(tensors_of(rows)[0].shape[0])


def _source(node: fx.Node) -> fx.Node:
    """The value that views and casts start from."""
    while node.op == "call_function" and (is_view(node) or name_of(node) in _CASTS):
        before = node.args[0]
        if not isinstance(before, fx.Node):
            break
        node = before
    return node
