"""Read the parameters of buckets from a disk ahead of their prefetches, and write new ones back.

    before: 1PREFETCH 0F 2PREFETCH 1F
    after:  1READ_WEIGHTS 2READ_WEIGHTS 1PREFETCH 0F 2PREFETCH 1F

    before: 2B 2UPDATE 2OFFLOAD_STATE                (of a backward)
    after:  2B 2UPDATE 2OFFLOAD_STATE 2WRITE_WEIGHTS

    before: 1UPDATE 2UPDATE                          (of `optimizer.step()`)
    after:  1READ_TRAINED 2READ_TRAINED 1UPDATE 1WRITE_WEIGHTS 2UPDATE 2WRITE_WEIGHTS

A read comes `ahead` prefetches, or updates, before its own. Each prefetch has a read of its own,
and names it; one that is left out, because the bucket is in its slot still, needs none. So this
comes after `slots`. Where the device updates, the new parameters are left in a buffer without a
read, since they are all written. Reads of the next step are after the write (see `tokens`).

Buffers are lent in the order of the ops (`megacompile.runtime.updates.leases`): those of
prefetches go back after the copy, those of updates after the write. No holder of a buffer waits
for one that is lent later, so one of each kind would do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import fx

from megacompile.ir import ops
from megacompile.ir.buckets import Bucket
from megacompile.ir.ops import Part
from megacompile.ir.schedule import Schedule
from megacompile.ir.stream import Stream
from megacompile.ir.tensors import TensorMeta
from megacompile.ir.tokens import take
from megacompile.text import format_bytes

AHEAD = 2
WEIGHT_SETS = 3  # for prefetches: one is copied to the device, and two are read ahead
NEW_SETS = 4  # for updates: one is updated, one is written, and two are read ahead
LANDING_SETS = 3  # for updates on the device: one lands, and two are written


def insert_disk_weights(
    schedule: Schedule, *, stored: frozenset[int] | None = None, ahead: int = AHEAD
) -> Schedule:
    """The schedule whose streamed buckets have their parameters on a disk.

    Args:
        stored: keys of those that do; those of other buckets are ignored. None: all of them.
        ahead: how many prefetches, or updates, ahead of its own a read comes.
    """
    keys = frozenset(bucket.key for bucket in schedule.buckets) - schedule.plan.resident
    keys = keys if stored is None else keys & stored
    new = replace(schedule.copy(), plan=replace(schedule.plan, weights_on_disk=keys))
    if not keys:
        return new
    changed: set[int] = set()
    for name, graph in new.graphs.items():
        _insert_reads(new, graph, ahead)
        changed |= _insert_writes(new, graph)
        if name == "update":
            _insert_reads_of_updates(new, graph, ahead)
    on_host = new.update is not None or bool(new.rest)
    new_sets = (NEW_SETS if on_host else LANDING_SETS) if changed else 0
    plan = replace(new.plan, weight_sets=WEIGHT_SETS, new_weight_sets=new_sets)
    plan = replace(plan, reasons=(*plan.reasons, _reason(new, plan.weight_sets + new_sets)))
    return replace(new, plan=plan)


def _insert_reads(schedule: Schedule, graph: fx.Graph, ahead: int) -> None:
    fetches = [
        node
        for node in ops.nodes_that(graph, lambda op: op.fills_slot)
        if ops.bucket_of(node).key in schedule.plan.weights_on_disk
    ]
    if not fetches:
        return
    body = next(node for node in graph.nodes if node.op != "placeholder")
    first: dict[int, fx.Node] = {}  # read of a bucket in this graph, which waits for its last write
    for k, fetch in enumerate(fetches):
        bucket = ops.bucket_of(fetch)
        after = (first[bucket.key],) if bucket.key in first else None
        name = f"r{fetch.name}"
        with graph.inserting_before(fetches[k - ahead] if k >= ahead else body):
            read = ops.call(graph, ops.read_weights, bucket, name=name, after=after)
        first.setdefault(bucket.key, read)
        _wait_for(fetch, read)


def _insert_reads_of_updates(schedule: Schedule, graph: fx.Graph, ahead: int) -> None:
    updates = [node for node in _writers(schedule, graph) if _is_on_host(node)]
    places = list(updates)
    for k, update in enumerate(updates):
        bucket = ops.bucket_of(update)
        after = (take(graph, bucket, Part.WEIGHTS),)
        with graph.inserting_before(places[max(0, k - ahead)]):
            read = ops.call(graph, ops.read_trained, bucket, name=f"rt{bucket.suffix}", after=after)
        read.meta["value"] = _meta(schedule, bucket)
        _wait_for(update, read)


def _insert_writes(schedule: Schedule, graph: fx.Graph) -> set[int]:
    """Returns the keys of the buckets that are written."""
    written = set()
    for writer in list(_writers(schedule, graph)):
        bucket = ops.bucket_of(writer)
        with graph.inserting_after(writer):
            write = ops.call(
                graph, ops.write_weights, bucket, name=f"ww{bucket.suffix}", after=(writer,)
            )
        write.meta["value"] = _meta(schedule, bucket)
        written.add(bucket.key)
    return written


def _writers(schedule: Schedule, graph: fx.Graph) -> Iterator[fx.Node]:
    """The ops that change parameters which are on a disk."""
    for node in ops.nodes_that(graph, lambda op: Part.WEIGHTS in op.writes):
        on_disk = ops.bucket_of(node).key in schedule.plan.weights_on_disk
        if on_disk and ops.stream_of(node) is not Stream.WRITE:
            yield node


def _is_on_host(writer: fx.Node) -> bool:
    return Part.WEIGHTS in ops.effects(writer).reads


def _wait_for(node: fx.Node, read: fx.Node) -> None:
    named = node.kwargs.get("after", ())
    node.kwargs = {**node.kwargs, "after": (*named, read)}  # type: ignore[misc]


def _meta(schedule: Schedule, bucket: Bucket) -> TensorMeta:
    """The parameters that an update changes, as bytes."""
    trained = schedule.gradient_params[bucket.key]
    size = sum(bucket.params[i].size_bytes for i in trained)
    return TensorMeta((size,), torch.uint8, (1,))


def _reason(schedule: Schedule, sets: int) -> str:
    buckets = [b for b in schedule.buckets if b.key in schedule.plan.weights_on_disk]
    whole, largest = sum(b.size_bytes for b in buckets), max(b.size_bytes for b in buckets)
    nodes = [node for graph in schedule.graphs.values() for node in ops.nodes_of(graph)]
    reads = (ops.read_weights, ops.read_trained)
    read = sum(ops.stored_bytes(node) for node in nodes if node.target in reads)
    written = sum(ops.stored_bytes(node) for node in nodes if node.target is ops.write_weights)
    return (
        f"the parameters of {len(buckets)} buckets ({format_bytes(whole)}) lie on a disk: each "
        f"step reads {format_bytes(read)} there and writes {format_bytes(written)}, by way of "
        f"{sets} buffers ({format_bytes(sets * largest)} of host memory)"
    )
