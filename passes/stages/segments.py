"""Cut the captured graph's node list into contiguous segments, one per stage.

    embed | 0.norm 0.attn 0.add | 1.norm 1.attn 1.add | norm head loss

Every node that runs in a unit's module, or else uses a unit's parameter, belongs to that unit (and
to one call of it: a module called twice is two segments). Nodes in between join a neighbor:
preferably a non-layer, so that layers stay equal; otherwise the side with the smallest cut in live
bytes. Then inseparable segments are merged: non-tensor values, and memory that is changed in place
while views of it are used elsewhere, must not cross a cut.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import fx

from megacompile import compat
from megacompile.ir.buckets import Unit
from megacompile.ir.capture import Capture, ParamInput
from megacompile.ir.tensors import tensors_bytes
from megacompile.passes.capture.calls import WRAPPED
from megacompile.passes.capture.propagate import Values

Owner = tuple[int, str]  # (index of the unit, number of the call)


@dataclass(frozen=True, slots=True)
class Segment:
    """Nodes `start` to `stop` (exclusive) of the node list."""

    start: int
    stop: int
    unit: int | None  # None if it belongs to several units or none


def compute_nodes(capture: Capture, values: Values) -> list[fx.Node]:
    """The computing nodes in program order, with a tuple's items right after it."""
    ordered: list[fx.Node] = []
    placed: set[fx.Node] = set()

    def place(node: fx.Node) -> None:
        if node in placed:
            return
        placed.add(node)
        ordered.append(node)
        for user in node.users:
            if _is_item(user, values) and user.args[0] is node:
                place(user)

    for node in capture.module.graph.nodes:
        if node.op not in ("placeholder", "output", "get_attr"):
            place(node)
    return ordered


def cut(
    capture: Capture, nodes: Sequence[fx.Node], values: Values, units: Sequence[Unit]
) -> list[Segment]:
    """The segments of these `compute_nodes`, in order; every node belongs to one."""
    if not nodes:
        return []
    owners = _owners(capture, nodes, values, units)
    segments = _cut_between_owners(owners, _live_bytes(nodes, values), units)
    segments = _join_small(segments, units)
    return _merge_inseparable(capture.module.graph, nodes, values, segments)


def _is_item(node: fx.Node, values: Values) -> bool:
    """True if the node is an item of an operator's tuple; False for an index into a tensor."""
    if node.target is not operator.getitem or not isinstance(node.args[1], int):
        return False
    return isinstance(node.args[0], fx.Node) and not values.is_tensor(node.args[0])


def _owners(
    capture: Capture, nodes: Sequence[fx.Node], values: Values, units: Sequence[Unit]
) -> list[Owner | None]:
    unit_of_module = {m: i for i, unit in enumerate(units) for m in unit.modules}
    unit_of_bucket = {unit.bucket.key: i for i, unit in enumerate(units)}
    unit_of_param = {
        node: unit_of_bucket[item.bucket.key]
        for node, item in capture.bound.items()
        if isinstance(item, ParamInput)
    }
    roots = {m for unit in units for m in unit.roots}
    owners: dict[fx.Node, Owner | None] = {}
    for node in nodes:
        if _is_item(node, values):
            owners[node] = owners[node.all_input_nodes[0]]
            continue
        owner: Owner | None = None
        for module, call in compat.module_calls(node):
            if module in unit_of_module:  # a call below the root covers a part of the unit
                owner = (unit_of_module[module], call if module in roots else "")
                break
        used = [unit_of_param[n] for n in node.all_input_nodes if n in unit_of_param]
        if owner is None and used:
            owner = (max(used, key=lambda i: units[i].bucket.size_bytes), "")
        owners[node] = owner
    return list(owners.values())


def _live_bytes(nodes: Sequence[fx.Node], values: Values) -> list[float]:
    """Entry p: bytes of the values defined before position p and used at p or later; infinite
    before an item (it stays with its tuple) and after a wrapper (it stays with its use)."""
    position = {node: p for p, node in enumerate(nodes)}
    end = len(nodes)
    change = [0] * (end + 2)
    for node, p in position.items():
        last = max((position.get(user, end) for user in node.users), default=p)
        size = tensors_bytes(values.of[node])
        change[p + 1] += size
        change[last + 1] -= size
    bound = [_is_item(node, values) for node in nodes] + [False]
    for node, p in position.items():
        bound[p + 1] |= WRAPPED in node.meta
    return [
        math.inf if tied else live for tied, live in zip(bound, accumulate(change), strict=False)
    ]


def _cut_between_owners(
    owners: Sequence[Owner | None], live_bytes: Sequence[float], units: Sequence[Unit]
) -> list[Segment]:
    owned = [(p, owner) for p, owner in enumerate(owners) if owner is not None]
    if not owned:
        return [Segment(0, len(owners), None)]
    starts, segment_units = [0], [owned[0][1][0]]
    for (p, left), (q, right) in zip(owned, owned[1:], strict=False):
        if left == right:
            continue
        first, last = p + 1, q  # a cut before any node of first..last separates the two
        left_repeats, right_repeats = units[left[0]].repeated, units[right[0]].repeated
        if left_repeats and not right_repeats:
            where = first
        elif right_repeats and not left_repeats:
            where = last
        else:
            where = min(range(first, last + 1), key=lambda c: live_bytes[c])
        starts.append(where)
        segment_units.append(right[0])
    stops = [*starts[1:], len(owners)]
    return [Segment(*bounds) for bounds in zip(starts, stops, segment_units, strict=True)]


def _join_small(segments: Sequence[Segment], units: Sequence[Unit]) -> list[Segment]:
    """Join adjacent non-layers while their buckets do not exceed the largest one."""
    largest = max((unit.bucket.size_bytes for unit in units), default=0)
    joined: list[tuple[Segment, frozenset[int]]] = []
    for segment in segments:
        mine = frozenset() if segment.unit is None else frozenset({segment.unit})
        if joined:
            last, theirs = joined[-1]
            both = mine | theirs
            size = sum(units[i].bucket.size_bytes for i in both)
            if not any(units[i].repeated for i in both) and size <= largest:
                unit = segment.unit if mine == both else last.unit if theirs == both else None
                joined[-1] = (Segment(last.start, segment.stop, unit), both)
                continue
        joined.append((segment, mine))
    return [segment for segment, _ in joined]


def _merge_inseparable(
    graph: fx.Graph, nodes: Sequence[fx.Node], values: Values, segments: Sequence[Segment]
) -> list[Segment]:
    position = {node: p for p, node in enumerate(nodes)}
    segment_at = [i for i, s in enumerate(segments) for _ in range(s.start, s.stop)]
    spans = []  # first and last positions of nodes that belong together
    for node in nodes:  # values that are not tensors, except numbers: any stage can compute those
        if not (values.is_tensor(node) or values.is_known(node) or is_autocast(node)):
            last = max((position.get(user, 0) for user in node.users), default=0)
            if last > position[node]:
                spans.append((position[node], last))
    for key in {key for node in nodes for key in values.mutates[node]}:
        holders = [n for n in graph.nodes if key in values.storages[n] and n.op != "output"]
        uses = [position[user] for holder in holders for user in holder.users if user in position]
        made = [position[holder] for holder in holders if holder in position]
        crossing = [  # inputs of the graph, and values that another segment reads
            holder
            for holder in holders
            if holder not in position
            or {segment_at[position.get(user, -1)] for user in holder.users}
            - {segment_at[position[holder]]}
        ]
        if len(crossing) > 1:
            spans.append((min(made + uses), max(made + uses)))
    merged = list(segments)
    for first, last in spans:
        touched = [s for s in merged if s.start <= last and first < s.stop]
        if len(touched) > 1:
            at = merged.index(touched[0])
            merged[at : at + len(touched)] = [Segment(touched[0].start, touched[-1].stop, None)]
    return merged


def is_autocast(node: fx.Node) -> bool:
    """True if the node enters an autocast region, whose handle may cross segments."""
    return getattr(node.target, "__name__", "") == "_enter_autocast"
