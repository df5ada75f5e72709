"""Moves data from host memory to a disk: optimizer states, saved tensors, parameters.

Reads are issued in the order of their uses, a few uses ahead. A use waits for its read, a write for
the use, and reads of the next step for the write (see `insert_tokens`). A read waits until a buffer
is free, so the number of buffers limits the reads in flight. Buffers are leased in the order of the
ops (`megacompile.runtime.updates.staging`), and the holder of one never waits for a later lease.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

import torch
from torch import fx

from megacompile.ir import ops
from megacompile.ir.buckets import Bucket
from megacompile.ir.edges import take
from megacompile.ir.ops import Part
from megacompile.ir.schedule import Schedule
from megacompile.ir.stream import Stream
from megacompile.ir.tensors import TensorMeta, tensors_bytes
from megacompile.passes.edit import body_of, copied, set_saved_values, trained_bytes, wait_for
from megacompile.text import format_bytes, numbered

AHEAD = 2  # states and parameters are read this many uses ahead
STATE_SETS = 4  # minimum: one updated, one written, two read ahead
SAVED_SETS = 3  # per direction: one copied, two written or read ahead
WEIGHT_SETS = 3  # for prefetches: one copied to the device, two read ahead
NEW_SETS = 4  # for updates: one updated, one written, two read ahead
LANDING_SETS = 3  # for updates on the device: one arriving, two written


def _places(graph: fx.Graph, uses: Sequence[fx.Node], ahead: int) -> list[fx.Node]:
    """The nodes before which to read, for each use."""
    body = body_of(graph)
    return [uses[k - ahead] if k >= ahead else body for k in range(len(uses))]


def _reason(what: str, read: int, written: int, sets: int, largest: int) -> str:
    """A plan's reason; sizes are bytes of a step, and of the largest of `sets` buffers."""
    return (
        f"{what} are on a disk: each step reads {format_bytes(read)} there and writes "
        f"{format_bytes(written)}, through {sets} sets of buffers ({format_bytes(sets * largest)} "
        "of host memory)"
    )


# Optimizer states.


def insert_disk(
    schedule: Schedule,
    *,
    state_bytes: Callable[[int], float],
    set_bytes: Callable[[Bucket, Sequence[int]], int] | None = None,
    ahead: int = AHEAD,
) -> Schedule:
    """Read and write the optimizer states of the buckets in `plan.on_disk`.

        before: 2FETCH_STATE 2B 2UPDATE 2OFFLOAD_STATE
        after:  2READ_STATE 1READ_STATE 2FETCH_STATE 2B 2UPDATE 2OFFLOAD_STATE 2WRITE_STATE

        before: 1UPDATE 2UPDATE          (of `optimizer.step()`)
        after:  1READ_STATE 2READ_STATE 1UPDATE 1WRITE_STATE 2UPDATE 2WRITE_STATE

    `state_bytes` maps the bytes of a streamed element to those of its states, for the cost model;
    `set_bytes` returns those of a buffer for all states of a bucket's trained parameters. A read is
    inserted `ahead` uses before its own.
    """
    trained = schedule.gradient_params if schedule.backward is not None or schedule.rest else {}
    streamed = frozenset(trained) - schedule.plan.resident
    keys = schedule.plan.on_disk
    if not keys:
        return schedule
    new = schedule.copy()
    for name in ("backward", "update"):
        if name in new.graphs:
            _insert_states(new, new.graphs[name], name, state_bytes, ahead)
    in_use = max(states_in_use(graph, keys) for graph in new.graphs.values())
    sets = min(len(keys), max(STATE_SETS, 1 + in_use))
    stored = [bucket for bucket in new.buckets if bucket.key in keys]
    sizes = [trained_bytes(new, bucket, state_bytes).size_bytes for bucket in stored]
    what = f"the optimizer states of {len(keys)} of {len(streamed)} streamed buckets"
    reason = _reason(what, sum(sizes), sum(sizes), sets, max(sizes))
    largest = 0
    if set_bytes is not None:
        largest = max(set_bytes(bucket, trained[bucket.key]) for bucket in stored)
    plan = replace(
        new.plan, state_sets=sets, state_set_bytes=largest, reasons=(*new.plan.reasons, reason)
    )
    return replace(new, plan=plan)


def states_in_use(graph: fx.Graph, keys: Collection[int]) -> int:
    """The maximum number of streamed buckets whose states are in use at once, in program order,
    from the first op that touches them to the op that changes them. Each needs its own buffers:
    while the host waits for one bucket's states, it must not depend on a write that it has not
    issued yet."""
    used: set[int] = set()
    most = 0
    for node in ops.nodes_that(
        graph, lambda op: op.stored is None and Part.STATES in (*op.reads, *op.writes)
    ):
        key = ops.bucket_of(node).key
        if key not in keys:
            continue
        used.add(key)
        most = max(most, len(used))
        if Part.STATES in ops.effects(node).writes:
            used.discard(key)
    return most


def _insert_states(
    schedule: Schedule,
    graph: fx.Graph,
    name: str,
    state_bytes: Callable[[int], float],
    ahead: int,
) -> None:
    touching = [
        node
        for node in ops.nodes_that(graph, lambda op: Part.STATES in (*op.reads, *op.writes))
        if ops.bucket_of(node).key in schedule.plan.on_disk
    ]
    readers = [node for node in touching if Part.STATES in ops.effects(node).reads]
    writers = [node for node in touching if Part.STATES in ops.effects(node).writes]
    places = _places(graph, list(map(_first_of, readers)), ahead)
    for reader, place in zip(readers, places, strict=True):
        bucket = ops.bucket_of(reader)
        after = (take(graph, bucket, Part.STATES),) if name == "update" else None
        with graph.inserting_before(place):
            read = ops.call(graph, ops.read_state, bucket, name=f"rs{bucket.suffix}", after=after)
        wait_for(reader, read)
        read.meta["value"] = trained_bytes(schedule, bucket, state_bytes)
    for writer in writers:
        write = _insert_write(graph, ops.write_state, writer, "ws")
        write.meta["value"] = trained_bytes(schedule, ops.bucket_of(writer), state_bytes)


def _first_of(use: fx.Node) -> fx.Node:
    """The op before which to read: the allocation of the fetch's buffer, or the use itself."""
    buffers = [arg for arg in use.all_input_nodes if ops.effects(arg).gives in _BUFFERS]
    return buffers[0] if buffers else use


_BUFFERS = (ops.Value.STATE_BUFFER, ops.Value.SAVED_BUFFER)


def _insert_write(
    graph: fx.Graph, op: Callable[..., object], writer: fx.Node, prefix: str
) -> fx.Node:
    """Insert a write of `writer`'s result directly after it."""
    bucket = ops.bucket_of(writer)
    with graph.inserting_after(writer):
        return ops.call(graph, op, bucket, name=f"{prefix}{bucket.suffix}", after=(writer,))


# Saved tensors.


def insert_disk_saved(schedule: Schedule) -> Schedule:
    """Keep saved values of the stages in `plan.saved_on_disk` on a disk until their backward.

        before: 0F 1OFFLOAD_SAVED 1F
                1FETCH_SAVED 2B 1RECOMPUTE 1B
        after:  0F 1OFFLOAD_SAVED 1WRITE_SAVED 1F
                2READ_SAVED 1READ_SAVED 2FETCH_SAVED 3B 1FETCH_SAVED 2RECOMPUTE 2B 1RECOMPUTE 1B

    A value is written as soon as it is on the host; the write frees its buffer. `SAVED_SETS - 1`
    fetches ahead it is read into another buffer, which its fetch frees. There are `SAVED_SETS`
    buffers per direction: an offload waits until a write returns one, and a read until a fetch
    does. The first stages are chosen because their values wait the longest.
    """
    stages = schedule.plan.saved_on_disk
    if schedule.backward is None or not stages:
        return schedule
    new, graph = copied(schedule)
    names = _write_saved(new.forward, stages)
    if not names:
        return new
    _read_saved(graph, names)
    new = set_saved_values(new, [names.get(name, name) for name in new.saved_values])
    sizes = [tensors_bytes(n.meta.get("value")) for n in ops.nodes_of(new.forward, ops.write_saved)]
    what, total = f"saved tensors of {numbered('stage', 0, max(stages))}", sum(sizes)
    reasons = (*new.plan.reasons, _reason(what, total, total, 2 * SAVED_SETS, max(sizes)))
    return replace(new, plan=replace(new.plan, saved_sets=SAVED_SETS, reasons=reasons))


def _write_saved(graph: fx.Graph, stages: frozenset[int]) -> dict[str, str]:
    """Insert writes; returns name of the copy on the host -> name of the copy on the disk."""
    writes: list[fx.Node] = []
    names = {}
    for copy in ops.nodes_of(graph, ops.offload_saved):
        stage, value = ops.arguments(copy)
        if stage.index not in stages:
            continue
        if len(writes) >= SAVED_SETS:
            copy.kwargs = {"after": (writes[-SAVED_SETS],)}
        with graph.inserting_after(copy):
            write = ops.call(graph, ops.write_saved, stage, copy, name=f"{value.name}_disk")
        write.meta["value"] = copy.meta["value"]
        writes.append(write)
        names[copy.name] = write.name
    return names


def _read_saved(graph: fx.Graph, names: dict[str, str]) -> None:
    """Insert a read ahead of each fetch of these values."""
    each = ops.nodes_of(graph, ops.fetch_saved)
    fetches = [fetch for fetch in each if ops.arguments(fetch)[1].name in names]
    places = _places(graph, list(map(_first_of, fetches)), SAVED_SETS - 1)
    for k, (fetch, place) in enumerate(zip(fetches, places, strict=True)):
        stage, on_host, buffer = ops.arguments(fetch)
        with graph.inserting_before(on_host):
            on_disk = graph.placeholder(names[on_host.name])
        after = (fetches[k - SAVED_SETS],) if k >= SAVED_SETS else None
        with graph.inserting_before(place):
            read = ops.call(
                graph, ops.read_saved, stage, on_disk, name=f"{on_host.name}_read", after=after
            )
        on_disk.meta["value"] = read.meta["value"] = on_host.meta.get("value")
        buffer.args = (stage, on_disk)
        fetch.args = (stage, read, buffer)
        graph.erase_node(on_host)


# Parameters.


def insert_disk_weights(schedule: Schedule, *, ahead: int = AHEAD) -> Schedule:
    """Read and write the parameters of the buckets in `plan.weights_on_disk`, `ahead` prefetches or
    updates early.

        before: 1PREFETCH 0F 2PREFETCH 1F
        after:  1READ_WEIGHTS 2READ_WEIGHTS 1PREFETCH 0F 2PREFETCH 1F

        before: 2B 2UPDATE 2OFFLOAD_STATE                (of a backward)
        after:  2B 2UPDATE 2OFFLOAD_STATE 2WRITE_WEIGHTS

        before: 1UPDATE 2UPDATE                          (of `optimizer.step()`)
        after:  1READ_TRAINED 2READ_TRAINED 1UPDATE 1WRITE_WEIGHTS 2UPDATE 2WRITE_WEIGHTS

    A prefetch that `assign_slots` drops needs no read, so this pass runs after it. Updates on the
    device need none, because they write all new parameters into a buffer. A prefetch returns its
    buffer after the copy, an update after the write, so one buffer of each kind would be enough.
    """
    if not schedule.plan.weights_on_disk:
        return schedule
    new = schedule.copy()
    changed: set[int] = set()
    for name, graph in new.graphs.items():
        _insert_reads(new, graph, ahead)
        changed |= _insert_writes(new, graph)
        if name == "update":
            _insert_reads_of_updates(new, graph, ahead)
    on_host = new.update is not None or bool(new.rest)
    new_sets = (NEW_SETS if on_host else LANDING_SETS) if changed else 0
    plan = replace(new.plan, weight_sets=WEIGHT_SETS, new_weight_sets=new_sets)
    plan = replace(plan, reasons=(*plan.reasons, _weights_reason(new, plan.weight_sets + new_sets)))
    return replace(new, plan=plan)


def _insert_reads(schedule: Schedule, graph: fx.Graph, ahead: int) -> None:
    fetches = [
        node
        for node in ops.nodes_that(graph, lambda op: op.fills_slot)
        if ops.bucket_of(node).key in schedule.plan.weights_on_disk
    ]
    first: dict[int, fx.Node] = {}  # read of a bucket in this graph; it waits for the last write
    for fetch, place in zip(fetches, _places(graph, fetches, ahead), strict=True):
        bucket = ops.bucket_of(fetch)
        after = (first[bucket.key],) if bucket.key in first else None
        name = f"r{fetch.name}"
        with graph.inserting_before(place):
            read = ops.call(graph, ops.read_weights, bucket, name=name, after=after)
        first.setdefault(bucket.key, read)
        wait_for(fetch, read)


def _insert_reads_of_updates(schedule: Schedule, graph: fx.Graph, ahead: int) -> None:
    writers = _writers(schedule, graph)
    updates = [node for node in writers if Part.WEIGHTS in ops.effects(node).reads]  # on the host
    for k, update in enumerate(updates):
        bucket = ops.bucket_of(update)
        after = (take(graph, bucket, Part.WEIGHTS),)
        with graph.inserting_before(updates[max(0, k - ahead)]):
            read = ops.call(graph, ops.read_trained, bucket, name=f"rt{bucket.suffix}", after=after)
        read.meta["value"] = _changed_bytes(schedule, bucket)
        wait_for(update, read)


def _insert_writes(schedule: Schedule, graph: fx.Graph) -> set[int]:
    """Insert writes; returns the keys of the written buckets."""
    writers = list(_writers(schedule, graph))
    for writer in writers:
        write = _insert_write(graph, ops.write_weights, writer, "ww")
        write.meta["value"] = _changed_bytes(schedule, ops.bucket_of(writer))
    return {ops.bucket_of(writer).key for writer in writers}


def _writers(schedule: Schedule, graph: fx.Graph) -> Iterator[fx.Node]:
    """The ops that change parameters on a disk."""
    for node in ops.nodes_that(graph, lambda op: Part.WEIGHTS in op.writes):
        on_disk = ops.bucket_of(node).key in schedule.plan.weights_on_disk
        if on_disk and ops.stream_of(node) is not Stream.WRITE:
            yield node


def _changed_bytes(schedule: Schedule, bucket: Bucket) -> TensorMeta:
    """Meta of the parameters that an update changes, as bytes."""
    trained = schedule.gradient_params[bucket.key]
    size = sum(bucket.params[i].size_bytes for i in trained)
    return TensorMeta((size,), torch.uint8, (1,))


def _weights_reason(schedule: Schedule, sets: int) -> str:
    buckets = [b for b in schedule.buckets if b.key in schedule.plan.weights_on_disk]
    sizes = [bucket.size_bytes for bucket in buckets]
    nodes = [node for graph in schedule.graphs.values() for node in ops.nodes_of(graph)]
    read, written = (
        sum(ops.stored_bytes(node) for node in nodes if node.target in targets)
        for targets in ((ops.read_weights, ops.read_trained), (ops.write_weights,))
    )
    what = f"the parameters of {len(buckets)} buckets ({format_bytes(sum(sizes))})"
    return _reason(what, read, written, sets, max(sizes))
