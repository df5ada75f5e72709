"""Assigns a slot to every prefetch, with the `after=` edges that keep it from being filled too
early.

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
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import fx

from megacompile import compat
from megacompile.ir import ops
from megacompile.ir.buckets import Bucket, Slot
from megacompile.ir.schedule import Schedule


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
        for node, place in places.chosen.items():
            after = places.after[node] or (next(iter(ops.nodes_of(node.graph, ops.begin))),)
            node.update_arg(1, new_slots[place])  # type: ignore[arg-type]
            compat.set_kwargs(node, {"after": after})
            if node in places.held:
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
    chosen: dict[fx.Node, int] = field(default_factory=dict)
    after: dict[fx.Node, tuple[fx.Node, ...]] = field(default_factory=dict)
    held: set[fx.Node] = field(default_factory=set)  # prefetches whose bucket is in its slot
    # -> the earlier prefetch whose bucket is still in its slot
    reused: dict[fx.Node, fx.Node] = field(default_factory=dict)


def _attempt(schedule: Schedule, count: int, reuse: bool) -> list[_SlotChoice] | None:
    """The choice for every graph, or None if `count` slots are too few."""
    stay = _own_slots(schedule, count)
    forward = _place(schedule.forward, count, stay if reuse else {}, {}, stay)
    if forward is None:
        return None
    if schedule.backward is None:
        return [forward]
    held = forward.holds if reuse else {}
    backward = _place(schedule.backward, count, held, forward.sizes)
    return None if backward is None else [forward, backward]


def _own_slots(schedule: Schedule, count: int) -> dict[int, Bucket]:
    """The slots after the first `count`, with the buckets that stay there."""
    stay = [b for b in schedule.buckets if b.key in schedule.plan.stay]
    if schedule.backward is not None:
        return {}
    fetched = {ops.bucket_of(node).key for node in ops.nodes_of(schedule.forward, ops.prefetch)}
    first = 0 if fetched <= schedule.plan.stay else count
    return dict(enumerate(stay, first))


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
            places.held.add(node)
            slot = ready[0]
        elif wanted.key in at:
            slot = at[wanted.key]
        else:
            free = [
                i  # the last reader of its bucket is issued before
                for i in range(count)
                if i not in occupant
                or all(position[reader] < position[node] for reader in readers[occupant[i]])
            ]
            if not free:
                return None
            upcoming = keys[k + 1 :]
            slot = max(
                free,
                key=lambda i: (
                    _next_use(places.holds.get(i), upcoming),
                    wanted.size_bytes <= max(typical, places.sizes.get(i, 0)),
                    -position[occupant[i]] if i in occupant else 1,
                ),
            )
            previous = occupant.get(slot)
            if previous is not None and readers[previous]:
                last = readers[previous][-1]  # one result, so that not all are kept alive
                after = (min((item for _, item in ops.items(last)), default=last),)
        places.chosen[node] = slot
        places.after[node] = after
        places.holds[slot] = wanted
        places.sizes[slot] = max(wanted.size_bytes, places.sizes.get(slot, 0))
        occupant[slot] = node
    return places


def _next_use(bucket: Bucket | None, upcoming: list[int]) -> int:
    """Number of prefetches until a bucket is needed again; large if never."""
    if bucket is None:
        return len(upcoming) + 1
    return upcoming.index(bucket.key) if bucket.key in upcoming else len(upcoming)
