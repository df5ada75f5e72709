"""Prefetches each bucket `lookahead` stages before its use, and assigns a slot to each prefetch.

    before: 0F 1F 2F 3F      after: BEGIN 0PREFETCH 1PREFETCH 0F 2PREFETCH 1F 3PREFETCH 2F 3F

A recompute and the backward after it are one use. Only buckets that the code reads are fetched,
once for consecutive uses; resident ones are used in place.

Ranks that share a bucket fetch it together, but may keep different stages. So the backward of a
kept stage fetches what its recompute would read, and a bucket that waits in its slot for its update
does so on every rank, even where it is resident.

`assign_slots` adds the `after=` edges that keep a slot from being filled too early.

    before: 2PREFETCH@? 1F        after: 2PREFETCH@0(after=0F) 1F

A slot may be refilled once the last compute that reads it has been issued. A prefetch takes the
free slot whose bucket is needed last or never again (Belady, 1966); large buckets prefer a slot
that is already large. At the boundary, buckets that the forward left in their slots are not fetched
again if `reuse` allows:

    forward ends ... 2F 3F        backward begins 3REUSE@0 2REUSE@2 1REUSE@1 3B 2RECOMPUTE 2B

Without a backward, the buckets of `plan.stay` have their own slots, after the others. The first
forward fetches them, and with `reuse` the next ones take them: `0REUSE@3 1PREFETCH@0 0F ...`
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from megacompile import compat
from megacompile.ir import ops
from megacompile.ir.buckets import Bucket, Slot
from megacompile.ir.schedule import Schedule
from megacompile.ir.stages import Code, Stage
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
    """The buckets whose parameters a compute reads, or that an update needs in a slot."""
    if node.target is ops.update_in_place:
        return (ops.arguments(node)[0],) if node.meta.get("gathered") else ()
    if node.target is ops.update:
        bucket, _, _, state = ops.arguments(node)
        masters = ops.arguments(state)[2]
        return () if masters else (bucket,)
    stage: Stage = ops.arguments(node)[0]
    if node.target is not ops.backward:
        return stage.buckets_of[Code.RECOMPUTE if node.target is ops.recompute else Code.FORWARD]
    if stage.traced.saved and any(bucket.ranks > 1 for bucket in stage.buckets):
        return stage.buckets_read((*stage.traced.backward_primals, *stage.traced.recompute_primals))
    return stage.buckets_of[Code.BACKWARD]


def _insert(
    graph: fx.Graph, all_uses: Sequence[Use], lookahead: int, resident: Collection[int]
) -> None:
    body = body_of(graph)
    in_place: dict[int, fx.Node] = {}  # bucket key -> weights of a resident bucket
    with graph.inserting_before(body):
        ops.call(graph, ops.begin, name="start")
        for bucket in dict.fromkeys(bucket for use in all_uses for bucket in use.buckets):
            if bucket.key in resident and bucket.ranks == 1:  # else its part is gathered in a slot
                name = f"w{bucket.suffix}"
                in_place[bucket.key] = ops.call(graph, ops.resident, bucket, name=name)
    weights: dict[int, fx.Node] = {}  # bucket key -> prefetch, for the previous use
    counts = Counter[int]()
    for i, use in enumerate(all_uses):
        at_hand, weights = {**weights, **in_place}, {}
        where = first_node(all_uses[max(0, i - lookahead)])
        for bucket in use.buckets:
            if bucket.key not in at_hand:
                counts[bucket.key] += 1
                count = counts[bucket.key]
                name = f"w{bucket.suffix}" + (f"_{count}" if count > 1 else "")
                with graph.inserting_before(where):
                    node = ops.call(graph, ops.prefetch, bucket, None, name=name, after=())
                at_hand[bucket.key] = node
            weights[bucket.key] = at_hand[bucket.key]
        for node in use.nodes:
            read = {bucket.key: weights[bucket.key] for bucket in buckets_read(node)}
            first, _, *others = ops.arguments(node)
            if node.target is ops.update_in_place:
                if read:
                    compat.set_kwargs(node, {"after": tuple(read.values())})
            elif node.target is ops.update:
                compat.set_args(node, (first, read.get(first.key), *others))
            else:
                taken = tuple(read.get(bucket.key) for bucket in first.buckets)
                compat.set_args(node, (first, taken, *others))


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


def assign_slots(schedule: Schedule, *, slots: int, reuse: bool) -> Schedule:
    """Assign `slots` slots, or more if one stage reads many buckets.

    With `reuse` the backward takes buckets that the forward left in the slots; without a backward,
    the forward takes those that the previous one left. Only valid if nothing else used the slots in
    between and no parameter changed.
    """
    new = schedule.copy()
    attempts = (_attempt(new, count, reuse) for count in itertools.count(slots))
    attempt = next(found for found in attempts if found is not None)
    sizes = attempt[-1].sizes
    new_slots = tuple(Slot(i, sizes.get(i, 0)) for i in range(max(sizes, default=-1) + 1))
    for places in attempt:
        for node, earlier in places.reused.items():
            node.replace_all_uses_with(earlier)
            node.graph.erase_node(node)
        for node, (place, after, is_held) in places.chosen.items():
            node.update_arg(1, new_slots[place])  # type: ignore[arg-type]
            start = ops.nodes_of(node.graph, ops.begin)[:1]
            compat.set_kwargs(node, {"after": after or tuple(start)})
            if is_held:
                node.target = ops.reuse
    held = sorted(attempt[0].holds.items())
    if new.backward is None:
        held = [(slot, bucket) for slot, bucket in held if bucket.key in new.plan.stay]
    return replace(new, slots=new_slots, reused=tuple(held))


@dataclass
class _SlotChoice:
    """The choice of a slot for each prefetch of one graph."""

    holds: dict[int, Bucket]  # slot -> bucket at the current op
    sizes: dict[int, int]  # of used slots, in bytes
    # prefetch -> its slot, `after`, true if its bucket is there already
    chosen: dict[fx.Node, tuple[int, tuple[fx.Node, ...], bool]] = field(default_factory=dict)
    # -> the earlier prefetch whose bucket is still in its slot
    reused: dict[fx.Node, fx.Node] = field(default_factory=dict)


def _attempt(schedule: Schedule, count: int, reuse: bool) -> list[_SlotChoice] | None:
    """The choice for every graph, or None if `count` slots are too few."""
    stay: dict[int, Bucket] = {}  # slots after the first `count`, with the buckets that stay there
    if schedule.backward is None:
        fetched = {ops.bucket_of(node).key for node in ops.nodes_of(schedule.forward, ops.prefetch)}
        first = 0 if fetched <= schedule.plan.stay else count
        buckets = (b for b in schedule.buckets if b.key in schedule.plan.stay)
        stay = dict(enumerate(buckets, first))
    forward = _place(schedule.forward, count, stay if reuse else {}, {}, stay)
    if forward is None:
        return None
    if schedule.backward is None:
        return [forward]
    held = forward.holds if reuse else {}
    backward = _place(schedule.backward, count, held, forward.sizes)
    return None if backward is None else [forward, backward]


def _place(
    graph: fx.Graph,
    count: int,
    initial: Mapping[int, Bucket],
    sizes: Mapping[int, int],
    own: Mapping[int, Bucket] | None = None,  # slots with a permanent bucket
) -> _SlotChoice | None:
    at = {bucket.key: slot for slot, bucket in (own or {}).items()}
    position = {node: p for p, node in enumerate(graph.nodes)}
    fetches = ops.nodes_of(graph, ops.prefetch)
    keys = [ops.bucket_of(n).key for n in fetches]
    readers = {n: sorted(n.users, key=lambda user: position[user]) for n in fetches}
    places = _SlotChoice(dict(initial), dict(sizes))
    typical = statistics.median_low([ops.bucket_of(n).size_bytes for n in fetches] or [0])
    occupant: dict[int, fx.Node] = {}
    for k, node in enumerate(fetches):
        wanted = ops.bucket_of(node)
        earlier = next((n for n in occupant.values() if ops.bucket_of(n).key == wanted.key), None)
        if earlier is not None:
            places.reused[node] = earlier
            readers[earlier] = sorted([*readers[earlier], *readers[node]], key=position.__getitem__)
            continue
        after: tuple[fx.Node, ...] = ()
        ready = [i for i, b in places.holds.items() if b.key == wanted.key and i not in occupant]
        if ready:
            slot = ready[0]
        elif wanted.key in at:
            slot = at[wanted.key]
        else:
            free = [
                i  # its last reader is issued before `node`
                for i in range(count)
                if i not in occupant
                or all(position[reader] < position[node] for reader in readers[occupant[i]])
            ]
            if not free:
                return None
            upcoming = keys[k + 1 :]
            next_use = {key: at for at, key in reversed(list(enumerate(upcoming)))}
            never = len(upcoming)
            slot = max(
                free,
                key=lambda i: (
                    next_use.get(places.holds[i].key, never) if i in places.holds else never + 1,
                    wanted.size_bytes <= max(typical, places.sizes.get(i, 0)),
                    -position[occupant[i]] if i in occupant else 1,
                ),
            )
            previous = occupant.get(slot)
            if previous is not None and readers[previous]:
                last = readers[previous][-1]  # naming one result keeps only that one alive
                after = (min((item for _, item in ops.items(last)), default=last),)
        places.chosen[node] = slot, after, bool(ready)
        places.holds[slot] = wanted
        places.sizes[slot] = max(wanted.size_bytes, places.sizes.get(slot, 0))
        occupant[slot] = node
    return places
