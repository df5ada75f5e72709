"""Pieces of a traced graph, some of which run in tiles of tokens.

    before: h = mm(x, w1); g = gelu(h); y = mm(g, w2)         h, g: all tokens by the inner width
    after:  y = piece(x, w1, w2)                              a tile at a time

A `Piece` appears in the graph as a callable. It takes the inputs of the piece and returns a tuple
of the results that others read. A tensor with tokens is cut along its `Axis`; a tensor without (a
weight) is passed whole. Results with tokens are concatenated, and sums over tokens are accumulated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from torch import Tensor, fx

from megacompile.ir.tensors import TensorMeta, dense


@dataclass(frozen=True, slots=True)
class Axis:
    """The token axis of a tensor: dimension `dim`, of size outer * tokens * inner."""

    dim: int
    outer: int = 1
    inner: int = 1

    def size(self, tokens: int) -> int:
        """Size of the dimension with this number of tokens."""
        return self.outer * tokens * self.inner

    def shape(self, shape: tuple[int, ...], tokens: int) -> tuple[int, ...]:
        """The shape of a tensor with this number of tokens."""
        return (*shape[: self.dim], self.size(tokens), *shape[self.dim + 1 :])

    def cut(self, tensor: Tensor, start: int, length: int) -> Tensor:
        """The `length` tokens from `start`, dense and in the same memory order: a copy if another
        dimension lies outside of the token dimension in memory, otherwise a view."""
        part: Tensor = self.part(tensor, start, length).flatten(self.dim, self.dim + 2)
        if 0 in part.stride():  # it is broadcast
            return part
        return dense(part, part.stride(), part.shape)

    def part(self, tensor: Tensor, start: int, length: int) -> Tensor:
        """The same tokens as a view, with `dim` split into (outer, length, inner)."""
        tokens = tensor.shape[self.dim] // (self.outer * self.inner)
        whole: Tensor = tensor.unflatten(self.dim, (self.outer, tokens, self.inner))
        return whole.narrow(self.dim + 1, start, length)

    def write(self, tensor: Tensor, start: int, length: int, tile: Tensor) -> None:
        """Write a tile into the whole tensor."""
        whole = tile.unflatten(self.dim, (self.outer, length, self.inner))
        self.part(tensor, start, length).copy_(whole)


class Result(Enum):
    """The kind of a tile's result."""

    CUT = "cut"  # a part of the whole
    SUM = "sum"  # summed over tiles
    PRODUCT = "product"  # two matrices, whose product is summed over tiles


@dataclass(frozen=True, eq=False)
class Tile:
    """The graph of a piece for one number of tokens: (inputs, cut) -> parts of results. A PRODUCT
    result is two consecutive values."""

    tokens: int
    module: fx.GraphModule = field(repr=False)


@dataclass(frozen=True, eq=False)
class Piece:
    """A part of a graph that runs as a unit, whole or tile by tile."""

    index: int  # in its graph's pieces, in execution order
    tokens: int  # along the cut axis; 1 if the piece is whole
    tiles: tuple[Tile, ...]  # for one or two sizes; the last tile may be smaller
    inputs: tuple[Axis | None, ...]  # the axis along which each is cut; None: passed whole
    results: tuple[tuple[Result, Axis | None], ...]  # the axis of CUT results
    metas: tuple[TensorMeta, ...]  # of the results, whole

    @property
    def is_whole(self) -> bool:
        """True if it runs once, over all tokens."""
        return len(self.tiles) == 1 and self.tiles[0].tokens == self.tokens

    @property
    def count(self) -> int:
        """Number of tiles that run."""
        return sum(1 for _ in self.spans())

    def spans(self) -> Iterator[tuple[int, Tile]]:
        """The start of each tile, and the tile."""
        first, start = self.tiles[0], 0
        while start < self.tokens:
            length = min(first.tokens, self.tokens - start)
            yield start, first if length == first.tokens else self.tiles[-1]
            start += length

    @property
    def __name__(self) -> str:
        return f"piece_{self.index}" if self.is_whole else f"tiles_{self.index}"

    def __call__(self, *_: Tensor) -> tuple[Tensor, ...]:
        """Raise: a piece only names code, which `megacompile.passes.stages.lower` creates."""
        raise NotImplementedError(f"{self.__name__} has no code of its own")


def pieces_of(graph: fx.Graph) -> list[tuple[fx.Node, Piece]]:
    """The pieces of a graph with their nodes, in order; empty for a graph without pieces."""
    return [(node, node.target) for node in graph.nodes if isinstance(node.target, Piece)]
