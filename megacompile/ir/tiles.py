"""Pieces of a traced graph, some of which run in tiles of tokens.

    before: h = mm(x, w1); g = gelu(h); y = mm(g, w2)         h, g: all tokens by the inner width
    after:  y = piece(x, w1, w2)                              a tile at a time

A `Piece` stands in the graph as the function that it is. It takes what the piece reads and returns
a tuple of what others read of it. A tensor that has tokens is cut along its `Axis`; one that has
none (a weight) comes whole. Results that have tokens are put together again, and sums over tokens
are added up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from torch import Tensor, fx

from megacompile.ir.tensors import TensorMeta, dense


@dataclass(frozen=True, slots=True)
class Axis:
    """The place of the tokens in a tensor: dimension `dim`, of size outer * tokens * inner."""

    dim: int
    outer: int = 1
    inner: int = 1

    def size(self, tokens: int) -> int:
        """Size of the dimension, with so many tokens."""
        return self.outer * tokens * self.inner

    def shape(self, shape: tuple[int, ...], tokens: int) -> tuple[int, ...]:
        """The shape of a tensor with so many tokens."""
        return (*shape[: self.dim], self.size(tokens), *shape[self.dim + 1 :])

    def cut(self, tensor: Tensor, start: int, length: int) -> Tensor:
        """`length` tokens from `start` on, in dense memory with its dimensions in the same order: a
        view, unless other dimensions are outside of that of the tokens."""
        part: Tensor = self.part(tensor, start, length).flatten(self.dim, self.dim + 2)
        if 0 in part.stride():  # it is broadcast
            return part
        return dense(part, part.stride(), part.shape)

    def part(self, tensor: Tensor, start: int, length: int) -> Tensor:
        """The same as a view with dimensions (outer, length, inner) in the place of `dim`."""
        tokens = tensor.shape[self.dim] // (self.outer * self.inner)
        whole: Tensor = tensor.unflatten(self.dim, (self.outer, tokens, self.inner))
        return whole.narrow(self.dim + 1, start, length)

    def write(self, tensor: Tensor, start: int, length: int, tile: Tensor) -> None:
        """Put a tile where it belongs in the whole."""
        whole = tile.unflatten(self.dim, (self.outer, length, self.inner))
        self.part(tensor, start, length).copy_(whole)


class Result(Enum):
    """The use of a result of a tile."""

    CUT = "cut"  # it is a part of the whole
    SUM = "sum"  # it is added to those of other tiles
    PRODUCT = "product"  # it is two matrices, whose product is added to those of other tiles


@dataclass(frozen=True, eq=False)
class Tile:
    """The graph of a piece for one number of tokens: (inputs, cut) -> parts of results.

    A result of the kind PRODUCT is two values of it, next to one another.
    """

    tokens: int
    module: fx.GraphModule = field(repr=False)


@dataclass(frozen=True, eq=False)
class Piece:
    """A part of a graph that runs as one, whole or tile by tile.

    Args:
        index: among the pieces of its graph, in the order in which they run.
        tokens: along the axis that is cut; 1 where the piece is whole.
        tiles: of one or two sizes; the last one may be smaller than the others.
        inputs: the axis along which each input is cut; None: it comes whole.
        results: the kind of each result, and the axis of those that are CUT.
        metas: of the results, whole.
    """

    index: int
    tokens: int
    tiles: tuple[Tile, ...]
    inputs: tuple[Axis | None, ...]
    results: tuple[tuple[Result, Axis | None], ...]
    metas: tuple[TensorMeta, ...]

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
        """A name in a graph; `megacompile.passes.stages.lower` has what runs."""
        raise NotImplementedError(f"{self.__name__} has no code of its own")


def pieces_of(graph: fx.Graph) -> list[tuple[fx.Node, Piece]]:
    """The pieces of a graph that was cut into them, with their nodes, in order; else none."""
    return [(node, node.target) for node in graph.nodes if isinstance(node.target, Piece)]
