"""Run tokenwise operations in tiles, so that their values exist for one tile at a time.

    before: h = mm(x, w1); g = gelu(h); y = mm(g, w2); d = sum(g, [0])
    after:  y, d = tiles_1(x, w1, w2)        4 tiles of 4096 tokens

The resulting graph calls only pieces (`megacompile.ir.tiles`). Each piece has its own graph for its
tile size: the same operators, with tile sizes instead of whole sizes. This graph is run on fake
tensors, and a node stays whole if its result for a tile is not a tile of its whole result.

Weight gradients are products over tokens. They are accumulated in float32, tile by tile, and
rounded once. A matrix kernel may round differently for fewer rows, so results are equal up to
rounding, not bitwise.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from megacompile import compat
from megacompile.ir import ops
from megacompile.ir.head import sum_dtype
from megacompile.ir.tensors import TensorMeta, is_dense
from megacompile.ir.tiles import Axis, Piece, Result, Tile
from megacompile.passes.edit import NotComputedError, computed
from megacompile.passes.stages.pieces import Members, divide
from megacompile.passes.stages.tokenwise import Act, Tokens, find_tokenwise, name_of

_SIZES = {"view": 1, "_unsafe_view": 1, "reshape": 1, "expand": 1, "full": 0, "zeros": 0, "ones": 0}


def tile(
    module: fx.GraphModule, tokens: Tokens, tiles: int, whole: frozenset[str]
) -> fx.GraphModule:
    """Cut an ATen graph, whose sizes are plain numbers, into pieces, tiled where possible; the same
    graph if nothing can be tiled. `whole`: names of placeholders without tokens (parameters)."""
    length = -(-tokens.count // max(1, min(tiles, tokens.count)))
    rest = tokens.count % length  # tokens of the last tile, if it is smaller
    lengths = (length, rest) if rest else (length,)
    rejected: set[fx.Node] = set()
    while True:
        members = divide(module.graph, find_tokenwise(module.graph, tokens, whole, rejected))
        if not any(each.in_tiles for each in members):
            return module
        try:
            return _Writer(module, members, lengths, tokens.count).write()
        except _NoPart as wrong:
            if wrong.args[0] in rejected:  # another attempt would not help
                return module
            rejected.add(wrong.args[0])


class _NoPart(Exception):
    """Raised with a node whose result for a tile is not the tile of its whole result."""


Read = tuple[fx.Node, Axis | None]


@dataclass
class _Writer:
    module: fx.GraphModule
    members: Sequence[Members]
    lengths: tuple[int, ...]
    tokens: int
    graph: fx.Graph = field(default_factory=fx.Graph)
    # value of the given graph -> value of the new graph, and its memory layout
    made: dict[fx.Node, fx.Node] = field(default_factory=dict)
    metas: dict[fx.Node, TensorMeta] = field(default_factory=dict)
    fakes: Any = field(default_factory=compat.fake_mode)

    def write(self) -> fx.GraphModule:
        for node in self.module.graph.find_nodes(op="placeholder"):
            self.made[node] = self.graph.node_copy(node)
            self.metas[node] = TensorMeta.of(node.meta["val"])
        outputs = ops.returned(self.module.graph)
        returned = {node for node in outputs if isinstance(node, fx.Node)}
        for members in self.members:
            read = returned.union(*(each.reads for each in self.members if each is not members))
            wanted = [n for n in members.nodes if n in read and n not in members.again]
            self._piece(members, wanted)
        rest = [n for n in returned if n not in self.made]
        if rest:  # views of inputs, or constants
            self._piece(Members(in_tiles=False), rest)
        self.graph.output(tuple(self.made[n] if isinstance(n, fx.Node) else n for n in outputs))
        return compat.graph_module(self.module, self.graph)

    def _piece(self, members: Members, wanted: Sequence[fx.Node]) -> None:
        lengths: tuple[int | None, ...] = self.lengths if members.in_tiles else (None,)
        parts = [_Part(self, members, wanted, length) for length in lengths]
        reads = list(parts[0].reads)
        piece = Piece(
            index=sum(isinstance(node.target, Piece) for node in self.graph.nodes),
            tokens=self.tokens if members.in_tiles else 1,
            tiles=tuple(Tile(part.length or 1, part.module) for part in parts),
            inputs=tuple(axis for _, axis in reads),
            results=tuple(_result(members.nodes.get(node)) for node in wanted),
            metas=tuple(_laid_out(node, members) for node in wanted),
        )
        call = self.graph.call_function(piece, tuple(self.made[node] for node, _ in reads))
        call.meta["val"] = tuple(node.meta["val"] for node in wanted)
        for k, node in enumerate(wanted):
            item = self.graph.call_function(operator.getitem, (call, k))
            item.meta = dict(node.meta)
            self.made[node], self.metas[node] = item, piece.metas[k]


class _Part:
    """The graph of a piece for one tile size; `length` None: for all tokens."""

    def __init__(
        self, writer: _Writer, members: Members, wanted: Sequence[fx.Node], length: int | None
    ) -> None:
        self.writer = writer
        self.members = members
        self.length = length
        self.graph = fx.Graph()
        self.made: dict[fx.Node, fx.Node] = {}
        self.reads: dict[Read, fx.Node] = {}
        self.fills: dict[Read, fx.Node] = {}  # constants, and views of tensors without tokens
        with writer.fakes:
            for node, act in members.nodes.items():
                if _result(act)[0] is not Result.PRODUCT:
                    self.made[node] = self._copy(node, act)
            returned = [value for node in wanted for value in self._returned(node)]
        self.graph.output(tuple(returned))
        self.module = compat.graph_module(writer.module, self.graph)

    def _returned(self, node: fx.Node) -> list[fx.Node]:
        act = self.members.nodes.get(node)
        if _result(act)[0] is Result.PRODUCT:
            assert act is not None
            return [self._value(n, act.cuts.get(n)) for n in node.all_input_nodes[:2]]
        return [self.made[node] if node in self.made else self._value(node, None)]

    def _value(self, node: fx.Node, cut: Axis | None) -> fx.Node:
        """A value in this piece: computed here, or read whole or as a tile."""
        act = self.members.nodes.get(node)
        if node in self.made and (act is None or act.items or cut == act.axis):
            return self.made[node]
        if node in self.writer.made:
            if (node, cut) not in self.reads:
                self.reads[node, cut] = self._placeholder(node, cut)
            return self.reads[node, cut]
        if (node, cut) not in self.fills:
            filled = None if cut is None else Act({}, ((Result.CUT, cut),))
            self.fills[node, cut] = self._copy(node, filled)
        return self.fills[node, cut]

    def _placeholder(self, node: fx.Node, cut: Axis | None) -> fx.Node:
        value = self.writer.metas[node].empty()
        if cut is not None and self.length is not None:
            value = cut.cut(value, 0, self.length)
        last = next(reversed(self.reads.values()), None)
        where = self.graph.inserting_after(last) if last else self.graph.inserting_before()
        with where:
            made = self.graph.placeholder(f"{node.name}_{len(self.reads)}")
        made.meta["val"] = value.detach()
        return made

    def _copy(self, node: fx.Node, act: Act | None) -> fx.Node:
        cuts = act.cuts if act is not None else {}
        made = self.graph.node_copy(node, lambda n: self._value(n, cuts.get(n)))
        if self.length is None or act is None:
            made.meta["val"] = compat.tree_map(_whole, node.meta["val"])
            return made
        self._resize(made, act, self.length)
        try:
            made.meta["val"] = value = computed(made)
        except NotComputedError as error:
            raise _NoPart(node) from error
        for given, found, (kind, axis) in zip(
            _each(node.meta["val"]), _each(value), act.results, strict=True
        ):
            if not isinstance(given, torch.Tensor):  # an unneeded gradient
                continue
            shape = tuple(given.shape)
            shape = shape if axis is None else axis.shape(shape, self.length)
            if tuple(found.shape) != shape or (given.dtype != found.dtype and kind is Result.CUT):
                raise _NoPart(node)
        return made

    @staticmethod
    def _resize(made: fx.Node, act: Act, length: int) -> None:
        """Replace the sizes in views and constants by the tile's. Keep half-precision sums in
        float32, because they are accumulated."""
        name, axis, at = name_of(made), act.axis, _SIZES.get(name_of(made))
        if axis is not None and at is not None and len(made.args) > at:
            sizes: Any = made.args[at]
            if isinstance(sizes, (list, tuple)) and sizes[axis.dim] != -1:
                made.update_arg(at, list(axis.shape(tuple(sizes), length)))
        if act.results[0][0] is Result.SUM and name == "sum" and not made.kwargs.get("dtype"):
            dtype = made.args[0].meta["val"].dtype  # type: ignore[union-attr]
            if dtype.is_floating_point:
                made.update_kwarg("dtype", sum_dtype(dtype))


def _each(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (tuple, list)) else (value,)


def _whole(value: Any) -> Any:
    """The value of a node for all tokens, in this fake mode."""
    return TensorMeta.of(value.detach()).empty() if isinstance(value, torch.Tensor) else value


def _result(act: Act | None) -> tuple[Result, Axis | None]:
    """The kind and the cut axis of a node's only result; in a whole piece, no axis."""
    return (Result.CUT, None) if act is None or act.items else act.results[0]


def _laid_out(node: fx.Node, members: Members) -> TensorMeta:
    """The layout of a result: unchanged, or without gaps for a strided view assembled from tiles.
    The memory order of dimensions is kept, because attention's results follow it."""
    meta = replace(TensorMeta.of(node.meta["val"]), requires_grad=False)
    if not members.in_tiles or is_dense(meta, meta.stride):
        return meta
    order = list(reversed(range(len(meta.shape))))
    if 0 not in meta.stride:  # it is not broadcast
        order.sort(key=lambda d: (meta.stride[d], meta.shape[d]))
    return replace(meta, stride=compat.dense_strides(meta.shape, order))
