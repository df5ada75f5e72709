"""Turn a graph of pieces into code: each piece's graph, and the loop over its tiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from megacompile import compat
from megacompile.ir.head import sum_dtype
from megacompile.ir.tensors import TensorMeta
from megacompile.ir.tiles import Axis, Piece, Result, Tile, pieces_of
from megacompile.passes.stages.strides import with_strides

Function = Callable[..., Sequence[Any]]


def lower_pieces(module: fx.GraphModule, lower: Callable[[fx.GraphModule], Function]) -> Function:
    """The function of a graph of pieces.

    Each value is freed where nothing reads it any more, as the graph's Python says.

    Args:
        lower: makes a function of the graph of a tile.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for node, piece in pieces_of(graph):
        node.target = _function(piece, lower)
    graph.eliminate_dead_code()
    function: Function = compat.graph_module(module, graph).forward
    return function


def _function(piece: Piece, lower: Callable[[fx.GraphModule], Function]) -> Function:
    functions = {tile: lower(tile.module) for tile in piece.tiles}
    function: Function = _loop(piece, functions)
    if piece.is_whole:
        function = with_strides(functions[piece.tiles[0]], piece.metas)

    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(function(*inputs))

    run.__name__ = piece.__name__
    return run


def _loop(piece: Piece, functions: dict[Tile, Function]) -> Function:
    """The code that runs tile after tile.

    Results that are cut are written where they belong in the whole, so they are in memory once and
    a tile more.
    """

    def run(*inputs: Tensor) -> list[Tensor]:
        results = [
            _begin(*kind, meta) for kind, meta in zip(piece.results, piece.metas, strict=True)
        ]
        for start, tile in piece.spans():
            pairs = zip(inputs, piece.inputs, strict=True)
            cut = [_cut(value, axis, start, tile.tokens) for value, axis in pairs]
            made = iter(functions[tile](*cut))
            del cut
            for result, (kind, axis) in zip(results, piece.results, strict=True):
                _put(result, kind, axis, start, tile.tokens, made)
            del made  # or this tile's values would live while the next one is computed
        for k, meta in enumerate(piece.metas):
            results[k] = results[k].to(meta.dtype)
        return results

    return run


def _begin(kind: Result, axis: Axis | None, meta: TensorMeta) -> Tensor:
    """Memory for a result."""
    if kind is Result.CUT:
        return meta.empty()
    return torch.empty(meta.shape, dtype=sum_dtype(meta.dtype), device=meta.device)


def _cut(value: Tensor, axis: Axis | None, start: int, length: int) -> Tensor:
    return value if axis is None else axis.cut(value, start, length)


def _put(
    result: Tensor, kind: Result, axis: Axis | None, start: int, length: int, made: Iterator[Tensor]
) -> None:
    """Write a tile's part of a result, or add it."""
    if kind is Result.PRODUCT:
        compat.add_product(result, next(made), next(made), first=start == 0)
    elif kind is Result.SUM:
        result.copy_(next(made)) if start == 0 else result.add_(next(made))
    else:
        assert axis is not None
        axis.write(result, start, length, next(made))
