"""Run tokenwise operations in tiles, so that their values exist for one tile at a time.

    before: h = mm(x, w1); g = gelu(h); y = mm(g, w2); d = sum(g, [0])
    after:  y, d = tiles_1(x, w1, w2)        4 tiles of 4096 tokens

The resulting graph calls only pieces (`megacompile.ir.tiles`), in sequence, alternately whole and
in tiles:

    norm mm | attention | mm add norm mm gelu mm add
    tiles     whole       tiles

Tiled pieces are maximal: a node joins the first piece that has all its inputs. It moves to a later
piece if it needs a whole value (attention reads all tokens) or a sum over tokens. Views of weights
are repeated in each piece that reads them. Values from an earlier piece that are cheap to recompute
from values in memory (a norm) are recomputed; otherwise they would have to be kept for all tokens.

Each piece has its own graph for its tile size: the same operators, with tile sizes instead of whole
sizes. This graph is run on fake tensors, and a node stays whole if its result for a tile is not a
tile of its whole result.

Weight gradients are products over tokens. They are accumulated in float32, tile by tile, and
rounded once. A matrix kernel may round differently for fewer rows, so results are equal up to
rounding, not bitwise.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from megacompile import compat
from megacompile.cost.aten import name_of
from megacompile.ir import ops
from megacompile.ir.head import sum_dtype
from megacompile.ir.tensors import TensorMeta, is_dense
from megacompile.ir.tiles import Axis, Piece, Result, Tile
from megacompile.passes.edit import NotComputedError, computed
from megacompile.passes.stages.tokenwise import (
    Act,
    Tokens,
    find_tokenwise,
    is_fill,
    is_view,
)

_PRODUCTS = {"mm", "bmm", "addmm", "_scaled_mm"}
_AGAIN = 16  # maximum number of recomputed nodes per value
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


@dataclass(slots=True)
class Members:
    """The nodes of a piece."""

    in_tiles: bool
    # in execution order, each with its action on tokens; None in a whole piece
    nodes: dict[fx.Node, Act | None] = field(default_factory=dict)
    again: set[fx.Node] = field(default_factory=set)  # recomputed: an earlier piece has them too
    reads: set[fx.Node] = field(default_factory=set)  # of earlier pieces, and inputs of the graph


def divide(graph: fx.Graph, acts: dict[fx.Node, Act]) -> list[Members]:
    """The pieces of a graph, in order; a single whole one if tiles do not pay off.

    Removes nodes outside of tiled pieces from `acts`.
    """
    while True:
        division = _Division(graph, acts)
        # values that only whole pieces read fuse with their readers and are not materialized
        whole = division.without_products() or list(filter(division.is_read_whole, acts))
        if not whole:
            return division.pieces()
        for node in whole:
            del acts[node]


class _Division:
    """The phase of each node: nodes of even phases run whole, those of odd phases in tiles."""

    def __init__(self, graph: fx.Graph, acts: dict[fx.Node, Act]) -> None:
        self.acts = acts
        self.graph = graph
        self.free: set[fx.Node] = set()  # repeated in each piece that reads them
        self.phases: dict[fx.Node, int] = {}
        for node in graph.nodes:
            if node.op not in ("call_function", "get_attr"):
                continue
            if self._is_free(node):
                self.free.add(node)
            else:
                self.phases[node] = self._first_phase(node)
        self._delay()

    def _is_free(self, node: fx.Node) -> bool:
        if is_fill(node):
            return True
        if any(node in act.cuts for u in node.users if (act := self.acts.get(u))):
            return False
        if node.op == "get_attr":
            return True
        sources = node.all_input_nodes
        known = all(s in self.free or s.op == "placeholder" for s in sources)
        return is_view(node) and node not in self.acts and known and bool(sources)

    def _first_phase(self, node: fx.Node) -> int:
        act = self.acts.get(node)
        least = 0 if act is None else 1
        for source in node.all_input_nodes:
            before = self.phases.get(source)
            if before is None:  # an input, or free
                continue
            if act is None:
                phase = before + before % 2
            elif before % 2 == 0:
                phase = before + 1
            else:
                phase = before if self.stays(node, source) else before + 2
            least = max(least, phase)
        return least

    def stays(self, node: fx.Node, source: fx.Node) -> bool:
        """True if a node can read a tokenwise value within the same tile."""
        act, given = self.acts[node], self.acts[source]
        if given.items:  # an item of a tuple
            return True
        return given.results[0][0] is Result.CUT and act.cuts.get(source) == given.axis

    def _delay(self) -> None:
        """Move whole nodes as late as possible, because they use memory until they are read."""
        for node in reversed(list(self.phases)):
            if node in self.acts or _is_item(node):
                continue
            items = [user for user in node.users if _is_item(user)]
            users = [user for one in (node, *items) for user in self._users(one, items)]
            if any(user.op == "output" for user in users):
                continue
            phases = [self.phases[user] for user in users]
            latest = min((at - 1 if at % 2 else at for at in phases), default=0)
            for one in (node, *items):
                self.phases[one] = max(latest, self.phases[one])

    def _users(self, node: fx.Node, items: Iterable[fx.Node]) -> Iterator[fx.Node]:
        """The readers of a value, looking through views that are repeated in each piece."""
        for user in node.users:
            if user in self.free:
                yield from self._users(user, items)
            elif user not in items:
                yield user

    def without_products(self) -> list[fx.Node]:
        """The nodes of tiled pieces without a matrix product; if they run whole, they can fuse with
        other nodes."""
        lonely: dict[int, list[fx.Node]] = {}
        for node, phase in self.phases.items():
            if node in self.acts:
                lonely.setdefault(phase, []).append(node)
        return [n for nodes in lonely.values() if not any(map(is_product, nodes)) for n in nodes]

    def is_read_whole(self, node: fx.Node) -> bool:
        """True if only whole pieces read a value, and it is no smaller than its input."""
        sources, acts = node.all_input_nodes, self.acts
        is_pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
        if node not in self.phases or not is_pointwise or len(sources) != 1:
            return False
        made, given = node.meta["val"], sources[0].meta["val"]
        if sources[0] not in acts or made.nbytes < given.nbytes:
            return False
        return not any(user in acts or user.op == "output" for user in node.users)

    def pieces(self) -> list[Members]:
        made = []
        for phase in sorted(set(self.phases.values())):
            members = Members(phase % 2 == 1)
            made.append(members)
            again: dict[fx.Node, None] = {}
            own = [node for node, at in self.phases.items() if at == phase]
            for node in own if members.in_tiles else ():
                for source in node.all_input_nodes:
                    again |= dict.fromkeys(self._again(node, source, phase))
            members.again = set(again)
            chosen = {*own, *again}
            for node in self.graph.nodes:
                if node in chosen:
                    act = self.acts.get(node)
                    members.nodes[node] = act if members.in_tiles else None
                    members.reads |= self._read(node, chosen)
        return made

    def _read(self, node: fx.Node, own: set[fx.Node]) -> set[fx.Node]:
        """The values from outside of its piece that a node reads, through repeated views or not."""
        found: set[fx.Node] = set()
        for source in node.all_input_nodes:
            if source in self.free:
                found |= self._read(source, own)
            elif source not in own or not self._is_at_hand(node, source):
                found.add(source)
        return found

    def _is_at_hand(self, node: fx.Node, source: fx.Node) -> bool:
        """True if a node can read its piece's part of a value, which may be only a tile."""
        acts = self.acts
        return node not in acts or source not in acts or self.stays(node, source)

    def _again(self, node: fx.Node, source: fx.Node, phase: int) -> list[fx.Node]:
        """The nodes that a later piece recomputes for a value; empty if it reads the value."""
        before = self.phases.get(source)
        if before is None or before % 2 == 0 or before == phase or not self.stays(node, source):
            return []
        cone: dict[fx.Node, None] = {}
        stack = [source]
        while stack:
            one = stack.pop()
            if one in cone or one in self.free or one.op == "placeholder":
                continue
            at = self.phases[one]
            if at % 2 == 0 and at < phase:
                continue  # already in memory
            act = self.acts.get(one)
            sums = act is not None and any(kind is not Result.CUT for kind, _ in act.results)
            if act is None or sums or is_product(one) or len(cone) == _AGAIN:
                return []
            cone[one] = None
            if any(s in self.phases and not self._is_at_hand(one, s) for s in one.all_input_nodes):
                return []
            stack += one.all_input_nodes
        return list(cone)


def _is_item(node: fx.Node) -> bool:
    return node.target is operator.getitem and not isinstance(
        node.all_input_nodes[0].meta.get("val"), torch.Tensor
    )


def is_product(node: fx.Node) -> bool:
    """True for a matrix product that a tile can compute."""
    return name_of(node) in _PRODUCTS
