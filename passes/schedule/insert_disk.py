"""Moves data from host memory to a disk: optimizer states, saved tensors, parameters.

Reads are issued in the order of their uses, a few uses ahead. A use waits for its read, a write for
the use, and reads of the next step for the write (see `insert_tokens`). A read waits until a buffer
is free, so the number of buffers limits the reads in flight. Buffers are leased in the order of the
ops (`megacompile.runtime.updates.staging`), and the holder of one never waits for a later lease.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from torch import fx

from megacompile.ir import ops
from megacompile.ir.buckets import Bucket
from megacompile.ir.edges import take
from megacompile.ir.ops import Part
from megacompile.ir.schedule import Schedule
from megacompile.passes.edit import body_of, copied, set_saved_values, trained_bytes, wait_for
from megacompile.text import format_bytes, numbered

AHEAD = 2  # states and parameters are read this many uses ahead
STATE_SETS = 4  # minimum: one updated, one written, two read ahead
SAVED_SETS = 3  # per direction: one copied, two written or read ahead
WEIGHT_SETS = 3  # for prefetches: one copied to the device, two read ahead
NEW_SETS = 4  # for updates: one updated, one written, two read ahead
LANDING_SETS = 3  # for updates on the device: one arriving, two written


def _places(graph: fx.Graph, uses: Sequence[fx.Node], ahead: int) -> list[fx.Node]:
    """For each use, the node before which its read is inserted."""
    body = body_of(graph)
    return [uses[k - ahead] if k >= ahead else body for k in range(len(uses))]


def insert_disk(
    schedule: Schedule,
    *,
    state_bytes: Callable[[int], float],
    set_bytes: Callable[[Bucket, Sequence[int]], int] | None = None,
) -> Schedule:
    """Read and write the optimizer states of the buckets in `plan.on_disk`.

        before: 2FETCH_STATE 2B 2UPDATE 2OFFLOAD_STATE
        after:  2READ_STATE 1READ_STATE 2FETCH_STATE 2B 2UPDATE 2OFFLOAD_STATE 2WRITE_STATE

        before: 1UPDATE 2UPDATE          (of `optimizer.step()`)
        after:  1READ_STATE 2READ_STATE 1UPDATE 1WRITE_STATE 2UPDATE 2WRITE_STATE

    `state_bytes` maps the bytes of a streamed element to those of its states, for the cost model;
    `set_bytes` returns those of a buffer for all states of a bucket's trained parameters. A read is
    inserted `AHEAD` uses early.
    """
    trained = schedule.gradient_params if schedule.backward is not None or schedule.rest else {}
    streamed = frozenset(trained) - schedule.plan.resident
    keys = schedule.plan.on_disk
    if not keys:
        return schedule
    new = schedule.copy()
    for name in new.graphs:
        if name != "forward":
            _insert_states(new, name, state_bytes)
    in_use = max(states_in_use(graph, keys) for graph in new.graphs.values())
    sets = min(len(keys), max(STATE_SETS, 1 + in_use))
    stored = [bucket for bucket in new.buckets if bucket.key in keys]
    many = f"{len(keys)} of {len(streamed)} streamed buckets"
    reason = f"the optimizer states of {many} are on a disk"
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
    for node in _touching(graph, keys, Part.STATES):
        used.add(ops.bucket_of(node).key)
        most = max(most, len(used))
        if Part.STATES in ops.effects(node).writes:
            used.discard(ops.bucket_of(node).key)
    return most


def _touching(graph: fx.Graph, keys: Collection[int], part: Part) -> list[fx.Node]:
    """The ops that use this part of these buckets, except reads and writes of a disk."""
    nodes = ops.nodes_that(graph, lambda op: not op.on_disk and part in (*op.reads, *op.writes))
    return [node for node in nodes if ops.bucket_of(node).key in keys]


def _insert_states(schedule: Schedule, name: str, state_bytes: Callable[[int], float]) -> None:
    graph = schedule.graphs[name]
    touching = _touching(graph, schedule.plan.on_disk, Part.STATES)
    readers = [node for node in touching if Part.STATES in ops.effects(node).reads]
    places = _places(graph, list(map(_first_of, readers)), AHEAD)
    for reader, place in zip(readers, places, strict=True):
        bucket = ops.bucket_of(reader)
        after = (take(graph, bucket, Part.STATES),) if name == "update" else None
        read = _insert_read(ops.read_state, reader, place, f"rs{bucket.suffix}", after)
        read.meta["value"] = trained_bytes(schedule, bucket, state_bytes)
    for node in touching:
        if Part.STATES in ops.effects(node).writes:
            write = _insert_write(ops.write_state, node, "ws")
            write.meta["value"] = trained_bytes(schedule, ops.bucket_of(node), state_bytes)


def _first_of(use: fx.Node) -> fx.Node:
    """The op before which to read: the allocation of the fetch's buffer, or the use itself."""
    buffers = [arg for arg in use.all_input_nodes if ops.effects(arg).gives in _BUFFERS]
    return buffers[0] if buffers else use


_BUFFERS = (ops.Value.STATE_BUFFER, ops.Value.SAVED_BUFFER)


def _insert_read(
    op: Callable[..., object],
    use: fx.Node,
    place: fx.Node,
    name: str,
    after: tuple[fx.Node, ...] | None,
) -> fx.Node:
    """Insert a read for `use`, which waits for it, before `place`."""
    with use.graph.inserting_before(place):
        read = ops.call(use.graph, op, ops.bucket_of(use), name=name, after=after)
    wait_for(use, read)
    return read


def _insert_write(op: Callable[..., object], writer: fx.Node, prefix: str) -> fx.Node:
    graph, bucket = writer.graph, ops.bucket_of(writer)
    with graph.inserting_after(writer):
        return ops.call(graph, op, bucket, name=f"{prefix}{bucket.suffix}", after=(writer,))


def insert_disk_saved(schedule: Schedule) -> Schedule:
    """Keep saved values of the stages in `plan.saved_on_disk` on a disk until their backward.

        before: 0F 1OFFLOAD_SAVED 1F
                1FETCH_SAVED 2B 1RECOMPUTE 1B
        after:  0F 1OFFLOAD_SAVED 1WRITE_SAVED 1F
                2READ_SAVED 1READ_SAVED 2FETCH_SAVED 3B 1FETCH_SAVED 2RECOMPUTE 2B 1RECOMPUTE 1B

    A value is written as soon as it is on the host; the write frees its buffer. It is read
    `SAVED_SETS - 1` fetches ahead, into another buffer, which its fetch frees. There are
    `SAVED_SETS` buffers per direction: an offload waits until a write returns one, a read until a
    fetch does. The first stages are chosen because their values wait the longest.
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
    reason = f"saved tensors of {numbered('stage', 0, max(stages))} are on a disk"
    reasons = (*new.plan.reasons, reason)
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


def insert_disk_weights(schedule: Schedule) -> Schedule:
    """Read and write the parameters of the buckets in `plan.weights_on_disk`, `AHEAD` prefetches or
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
    changed = False
    for name, graph in new.graphs.items():
        touching = _touching(graph, new.plan.weights_on_disk, Part.WEIGHTS)
        fetches = [node for node in touching if ops.effects(node).fills_slot]
        first: dict[int, fx.Node] = {}  # read of a bucket; it waits for the last write
        for fetch, place in zip(fetches, _places(graph, fetches, AHEAD), strict=True):
            key = ops.bucket_of(fetch).key
            after = (first[key],) if key in first else None
            read = _insert_read(ops.read_weights, fetch, place, f"r{fetch.name}", after)
            first.setdefault(key, read)
        writers = [node for node in touching if Part.WEIGHTS in ops.effects(node).writes]
        for writer in writers:
            write = _insert_write(ops.write_weights, writer, "ww")
            write.meta["value"] = trained_bytes(new, ops.bucket_of(writer), float)
            changed = True
        updates = [n for n in writers if Part.WEIGHTS in ops.effects(n).reads]  # on the host
        for k, update in enumerate(updates if name == "update" else ()):
            bucket, place = ops.bucket_of(update), updates[max(0, k - AHEAD)]
            after = (take(graph, bucket, Part.WEIGHTS),)
            read = _insert_read(ops.read_trained, update, place, f"rt{bucket.suffix}", after)
            read.meta["value"] = trained_bytes(new, bucket, float)
    on_host = new.update is not None or bool(new.rest)
    new_sets = (NEW_SETS if on_host else LANDING_SETS) if changed else 0
    plan = replace(new.plan, weight_sets=WEIGHT_SETS, new_weight_sets=new_sets)
    buckets = [b for b in new.buckets if b.key in plan.weights_on_disk]
    size = format_bytes(sum(bucket.size_bytes for bucket in buckets))
    reason = f"the parameters of {len(buckets)} buckets ({size}) are on a disk"
    return replace(new, plan=replace(plan, reasons=(*plan.reasons, reason)))
