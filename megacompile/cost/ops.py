"""The cost of ops: seconds of computes, bytes of copies.

The time of a template's code is the sum over its kernels (`megacompile.cost.fusion`). The analysis
is cached with the graph, so that many schedules of one model can be simulated quickly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import fx

from megacompile.cost.aten import bytes_of, tensors_of
from megacompile.cost.fusion import analyse
from megacompile.cost.hardware import Hardware
from megacompile.cost.roofline import Analysis, Kernel, KernelBound, KernelWork, Returned
from megacompile.ir import ops
from megacompile.ir.head import sum_dtype
from megacompile.ir.liveness import endings
from megacompile.ir.schedule import Schedule
from megacompile.ir.stages import Code, Template
from megacompile.ir.tensors import TensorMeta
from megacompile.ir.tiles import Piece, Result, Tile, pieces_of

_EMPTY = Analysis((), 0, ())


def analysis_of(template: Template, code: Code, *, fused: bool = True) -> Analysis:
    """The analysis of a template's code, cached with its graph."""
    module = template.graphs.get(code)
    if module is None:
        return _EMPTY
    kept: dict[bool, tuple[fx.Graph, Analysis]] = module.meta.setdefault("megacompile_cost", {})
    found = kept.get(fused)
    if found is None or found[0] is not module.graph:  # copies of a module share `meta`
        count = analyse_pieces if pieces_of(module.graph) else analyse
        found = kept[fused] = module.graph, count(module.graph, fused=fused)
    return found[1]


def work_of(template: Template, code: Code, *, fused: bool = True) -> KernelWork:
    """Operations, bytes and kernels of a template's code."""
    return analysis_of(template, code, fused=fused).work


def compute_s(template: Template, code: Code, hardware: Hardware, *, fused: bool = True) -> float:
    """Seconds that a template's code takes alone."""
    return analysis_of(template, code, fused=fused).seconds(hardware)


def copies_of(node: fx.Node) -> int:
    """Number of copies that an op issues: one for a bucket's parameters, one for each gradient."""
    copies = ops.effects(node).copies
    return 1 if copies is None else copies(node)


def node_s(node: fx.Node, hardware: Hardware, *, fused: bool = True) -> float:
    """Seconds that a compute node takes alone."""
    op = ops.effects(node)
    if op.code is not None:
        return compute_s(ops.arguments(node)[0].traced, ops.code_of(node), hardware, fused=fused)
    if op.traffic is None:
        return 0.0
    return op.traffic(node) / (hardware.memory_gb_s * 1e9) + hardware.launch_s


def computes_s(schedule: Schedule, hardware: Hardware, *, fused: bool = True) -> float:
    """Seconds of all computes of a step, which do not depend on the places of buckets: its
    templates, and updates and other computes in the backward."""
    runs: Counter[tuple[Template, Code]] = Counter()
    others_s = 0.0
    for graph in schedule.graphs.values():
        for node in ops.nodes_that(graph, lambda op: op.code or op.traffic):
            if ops.effects(node).code is not None:
                runs[ops.arguments(node)[0].traced, ops.code_of(node)] += 1
            elif schedule.update is None:
                others_s += node_s(node, hardware, fused=fused)
    return others_s + sum(n * compute_s(*run, hardware, fused=fused) for run, n in runs.items())


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
            yield Kernel(f"{piece.__name__}_rounded", KernelBound.MEMORY, 0, moved, itemsize=4)


def _joined(piece: Piece, tile: Tile, *, first: bool) -> Iterator[Kernel]:
    """Kernels of the loop over tiles: copies into the whole result, and sums."""
    made = iter(ops.returned(tile.module.graph))
    for (kind, _), meta in zip(piece.results, piece.metas, strict=True):
        name = f"{piece.__name__}_{kind.value}"
        if kind is Result.PRODUCT:
            (a,), (b,) = tensors_of(next(made)), tensors_of(next(made))
            moved = bytes_of([a, b]) + (1 if first else 2) * _sum_bytes(meta)
            flops = 2 * a.shape[0] * a.shape[1] * b.shape[1]
            yield Kernel(name, KernelBound.PRODUCT, flops, moved, a.dtype.itemsize)
            continue
        size = bytes_of(tensors_of(next(made)))
        moved = 2 * size if first or kind is Result.CUT else 3 * size
        yield Kernel(name, KernelBound.MEMORY, 0, moved, itemsize=4)


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
