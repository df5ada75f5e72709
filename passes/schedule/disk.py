"""Read the optimizer states of buckets from a disk ahead of their use, and write them back.

    before: 2FETCH_STATE 2B 2UPDATE 2OFFLOAD_STATE
    after:  2READ_STATE 1READ_STATE 2FETCH_STATE 2B 2UPDATE 2OFFLOAD_STATE 2WRITE_STATE

    before: 1UPDATE 2UPDATE          (of `optimizer.step()`)
    after:  1READ_STATE 2READ_STATE 1UPDATE 1WRITE_STATE 2UPDATE 2WRITE_STATE

The reads keep the order of their uses, and come `ahead` uses before their own. A use is after its
read, and a write is after the use. Reads of the next step are after the write (see `tokens`). A
read waits until a buffer is free, so there are as many of them on their way as there are buffers
(`megacompile.runtime.updates.staging`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import torch
from torch import fx

from megacompile.ir import ops
from megacompile.ir.buckets import Bucket, largest_shard
from megacompile.ir.ops import Part
from megacompile.ir.schedule import Schedule
from megacompile.ir.tensors import TensorMeta
from megacompile.ir.tokens import take
from megacompile.text import format_bytes

AHEAD = 2
STATE_SETS = 4  # at least: one is updated, one is written, and two are read ahead


def insert_disk(
    schedule: Schedule,
    *,
    on_disk: frozenset[int],
    state_bytes: Callable[[int], float],
    set_bytes: Callable[[Bucket, Sequence[int]], int] | None = None,
    ahead: int = AHEAD,
) -> Schedule:
    """The schedule in which some of the streamed buckets have their states on a disk.

    Args:
        on_disk: their keys; those of other buckets are ignored.
        state_bytes: of one element's states, by its bytes as streamed; for the cost model.
        set_bytes: of a buffer that all states of a bucket come to, with the trained parameters.
        ahead: how many uses of states ahead of its own a read comes.
    """
    trained = schedule.gradient_params if schedule.backward is not None or schedule.rest else {}
    streamed = frozenset(trained) - schedule.plan.resident
    keys = streamed & on_disk
    new = replace(schedule.copy(), plan=replace(schedule.plan, on_disk=keys))
    for name in ("backward", "update"):
        if name in new.graphs and keys:
            _insert(new, new.graphs[name], name, state_bytes, ahead)
    if not keys:
        return new
    in_use = max(states_in_use(graph, keys) for graph in new.graphs.values())
    sets = min(len(keys), max(STATE_SETS, 1 + in_use))
    sizes = [
        _meta(new, bucket, state_bytes).size_bytes for bucket in new.buckets if bucket.key in keys
    ]
    reason = (
        f"the optimizer states of {len(keys)} of {len(streamed)} streamed buckets lie on a disk: "
        "each step reads "
        f"{format_bytes(sum(sizes))} there and writes as much, by way of {sets} sets of buffers "
        f"({format_bytes(sets * max(sizes))} of host memory)"
    )
    largest = 0
    if set_bytes is not None:
        largest = max(set_bytes(b, trained[b.key]) for b in new.buckets if b.key in keys)
    plan = replace(
        new.plan, state_sets=sets, state_set_bytes=largest, reasons=(*new.plan.reasons, reason)
    )
    return replace(new, plan=plan)


def states_in_use(graph: fx.Graph, keys: Collection[int]) -> int:
    """The most of these streamed buckets whose states are in use at once, in program order: from
    the first op that touches them to the one that changes them, after which they would be written.

    Each needs buffers of its own: a host that waits for the states of one bucket must not wait for
    the write of another that it has not issued yet.
    """
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


def _insert(
    schedule: Schedule,
    graph: fx.Graph,
    name: str,
    state_bytes: Callable[[int], float],
    ahead: int,
) -> None:
    on_disk = schedule.plan.on_disk
    readers = [n for n in _touching(graph, reads=True) if ops.bucket_of(n).key in on_disk]
    writers = [n for n in _touching(graph, reads=False) if ops.bucket_of(n).key in on_disk]
    body = next(node for node in graph.nodes if node.op != "placeholder")
    places = [_begin_of(node) for node in readers]
    for k, reader in enumerate(readers):
        bucket = ops.bucket_of(reader)
        after: tuple[fx.Node, ...] = ()
        if name == "update":
            after = (take(graph, bucket, Part.STATES),)
        with graph.inserting_before(places[k - ahead] if k >= ahead else body):
            read = ops.call(
                graph, ops.read_state, bucket, name=f"rs{bucket.suffix}", after=after or None
            )
        named = reader.kwargs.get("after", ())
        reader.kwargs = {**reader.kwargs, "after": (*named, read)}  # type: ignore[misc]
        read.meta["value"] = _meta(schedule, bucket, state_bytes)
    for writer in writers:
        bucket = ops.bucket_of(writer)
        with graph.inserting_after(writer):
            write = ops.call(
                graph, ops.write_state, bucket, name=f"ws{bucket.suffix}", after=(writer,)
            )
        write.meta["value"] = _meta(schedule, bucket, state_bytes)


def _touching(graph: fx.Graph, *, reads: bool) -> list[fx.Node]:
    return ops.nodes_that(graph, lambda op: Part.STATES in (op.reads if reads else op.writes))


def _begin_of(reader: fx.Node) -> fx.Node:
    """The op ahead of which a read comes: the allocation of what is fetched into, or the reader."""
    buffer = reader.args[1] if len(reader.args) > 1 else None
    return buffer if isinstance(buffer, fx.Node) else reader


def _meta(schedule: Schedule, bucket: Bucket, state_bytes: Callable[[int], float]) -> TensorMeta:
    mine = largest_shard(bucket)
    params = [mine.params[i] for i in schedule.gradient_params[bucket.key]]
    size = sum(param.numel * state_bytes(param.dtype.itemsize) for param in params)
    return TensorMeta((int(size),), torch.uint8, (1,))
