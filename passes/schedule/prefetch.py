"""Prefetches each bucket `lookahead` stages before its use.

    before: 0F 1F 2F 3F      after: BEGIN 0PREFETCH 1PREFETCH 0F 2PREFETCH 1F 3PREFETCH 2F 3F

A recompute and the backward after it are one use. Only buckets that the code reads are fetched, and
once for two uses in a row; resident ones are used in place.

Ranks that share a bucket fetch it together, but may keep different stages. So the backward of a
kept stage fetches what its recompute would read, and a bucket that stays in its slot for its update
also does so in ranks where it is resident.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import fx

from megacompile import compat
from megacompile.ir import ops
from megacompile.ir.buckets import Bucket
from megacompile.ir.schedule import Schedule
from megacompile.ir.stages import Stage
from megacompile.passes.edit import body_of


@dataclass(frozen=True, slots=True)
class Use:
    """Consecutive computes of one stage, and the buckets that they read."""

    nodes: tuple[fx.Node, ...]
    buckets: tuple[Bucket, ...]


def insert_prefetch(schedule: Schedule, *, lookahead: int = 1) -> Schedule:
    """Give every compute its weights."""
    new = schedule.copy()
    for graph in (new.forward, new.backward):  # an update takes values that the backward left
        if graph is not None:
            _insert(graph, uses(graph), lookahead, schedule.plan.resident)
    return new


_COMPUTES = (ops.forward, ops.recompute, ops.rerun, ops.backward)
_UPDATES = (ops.update, ops.update_in_place)


def uses(graph: fx.Graph) -> list[Use]:
    """The computes of a graph in program order, grouped by stage.

    An update belongs to the use that it follows.
    """
    found: list[Use] = []
    for node in ops.nodes_of(graph, *_COMPUTES, *_UPDATES):
        before = found[-1] if found else Use((), ())
        recomputed = [n.args[0] for n in before.nodes[-1:] if n.target is ops.recompute]
        if node.target in _UPDATES or recomputed == [node.args[0]]:
            found.pop()
        else:
            before = Use((), ())
        buckets = tuple(dict.fromkeys((*before.buckets, *buckets_read(node))))
        found.append(Use((*before.nodes, node), buckets))
    return found


def last_readers(graph: fx.Graph) -> dict[int, fx.Node]:
    """The last compute of a backward that reads a bucket's weights, by the bucket's key."""
    computes = ops.nodes_of(graph, ops.recompute, ops.rerun, ops.backward)
    return {bucket.key: node for node in computes for bucket in buckets_read(node)}


def buckets_read(node: fx.Node) -> tuple[Bucket, ...]:
    """The buckets whose parameters a compute reads, or that an update needs in their slot."""
    if node.target is ops.update_in_place:
        return (ops.arguments(node)[0],) if node.meta.get("gathered") else ()
    if node.target is ops.update:
        bucket, _, _, state = ops.arguments(node)
        masters = ops.arguments(state)[2]
        return () if masters else (bucket,)
    stage: Stage = ops.arguments(node)[0]
    if node.target in (ops.forward, ops.rerun):
        return stage.forward_buckets
    if node.target is ops.recompute:
        return stage.recompute_buckets
    if stage.traced.saved and any(bucket.ranks > 1 for bucket in stage.buckets):
        return stage.buckets_read((*stage.traced.backward_primals, *stage.traced.recompute_primals))
    return stage.backward_buckets


def _insert(
    graph: fx.Graph, all_uses: Sequence[Use], lookahead: int, resident: Collection[int]
) -> None:
    body = body_of(graph)
    in_place: dict[int, fx.Node] = {}  # bucket key -> weights of a resident bucket
    with graph.inserting_before(body):
        ops.call(graph, ops.begin, name="start")
        for bucket in dict.fromkeys(bucket for use in all_uses for bucket in use.buckets):
            alone = bucket.ranks == 1  # else the resident part is gathered in a slot
            if bucket.key in resident and alone and bucket.key not in in_place:
                name = f"w{bucket.suffix}"
                in_place[bucket.key] = ops.call(graph, ops.resident, bucket, name=name)
    weights: list[dict[int, fx.Node]] = []  # bucket key -> prefetch, for each use
    counts = Counter[int]()
    for i, use in enumerate(all_uses):
        at_hand = {**(weights[-1] if weights else {}), **in_place}
        where = first_node(all_uses[max(0, i - lookahead)])
        weights.append({})
        for bucket in use.buckets:
            if bucket.key not in at_hand:
                counts[bucket.key] += 1
                count = counts[bucket.key]
                name = f"w{bucket.suffix}" + (f"_{count}" if count > 1 else "")
                with graph.inserting_before(where):
                    node = ops.call(graph, ops.prefetch, bucket, None, name=name, after=())
                at_hand[bucket.key] = node
            weights[i][bucket.key] = at_hand[bucket.key]
    for use, given in zip(all_uses, weights, strict=True):
        for node in use.nodes:
            if node.target is ops.update:
                (bucket, _, *others) = ops.arguments(node)
                taken_here = given[bucket.key] if buckets_read(node) else None
                compat.set_args(node, (bucket, taken_here, *others))
                continue
            if node.target is ops.update_in_place:
                for bucket in buckets_read(node):
                    compat.set_kwargs(node, {"after": (given[bucket.key],)})
                continue
            stage = ops.arguments(node)[0]
            read = {bucket.key for bucket in buckets_read(node)}
            taken = tuple(given[b.key] if b.key in read else None for b in stage.buckets)
            compat.set_args(node, (stage, taken, *node.args[2:]))


_PREPARES = (
    *(ops.save_rng, ops.alloc_saved, ops.read_saved, ops.fetch_saved),
    *(ops.alloc_grad, ops.fetch_grad),
    *(ops.alloc_state, ops.fetch_state),
)


def first_node(use: Use) -> fx.Node:
    """The op before which to issue copies for a use: before the ops that prepare it."""
    node = use.nodes[0]
    while node.prev.target in _PREPARES:
        node = node.prev
    return node
