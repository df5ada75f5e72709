"""Divide a traced graph into pieces that run in sequence, alternately whole and in tiles.

    norm mm | attention | mm add norm mm gelu mm add
    tiles     whole       tiles

Tiled pieces are maximal: a node joins the first piece that has all its inputs. It moves to a later
piece if it needs a whole value (attention reads all tokens) or a sum over tokens. Views of weights
are repeated in each piece that reads them. Values from an earlier piece that are cheap to recompute
from values in memory (a norm) are recomputed; otherwise they would have to be kept for all tokens.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import fx

from megacompile import compat
from megacompile.ir.tiles import Result
from megacompile.passes.stages.tokenwise import Act, is_fill, is_view

PRODUCTS = {"mm", "bmm", "addmm", "_scaled_mm"}
_AGAIN = 16  # maximum number of recomputed nodes per value


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
    return compat.operator_name(node.target) in PRODUCTS
