"""Sends saved tensors that wait on the host on to a disk.

    before: 0F 1OFFLOAD_SAVED 1F
            1FETCH_SAVED 2B 1RECOMPUTE 1B
    after:  0F 1OFFLOAD_SAVED 1WRITE_SAVED 1F
            2READ_SAVED 1READ_SAVED 2FETCH_SAVED 3B 1FETCH_SAVED 2RECOMPUTE 2B 1RECOMPUTE 1B

A value is written as soon as it is on the host; then its buffer is free. It is read into another
one, `sets - 1` fetches ahead of its own, and that is free after the fetch. There are `sets`
buffers each way: an offload waits for the write that returns one, and a read for the fetch.

The values of the first stages go: they wait the longest, and are wanted back last.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from megacompile.ir import ops
from megacompile.ir.schedule import Schedule
from megacompile.ir.tensors import tensors_bytes
from megacompile.passes.edit import set_saved_values
from megacompile.text import format_bytes, numbered

SAVED_SETS = 3  # each way: one is copied, and two are written, or read ahead


def insert_disk_saved(schedule: Schedule, *, count: int | None = None) -> Schedule:
    """The schedule in which saved values of stages that offload them wait on a disk.

    Args:
        count: those of so many of the first stages; None: of all.
    """
    offload = schedule.plan.offload
    stages = frozenset(index for index in offload if count is None or index < count)
    if schedule.backward is None or not stages:
        return schedule
    new = schedule.copy()
    assert new.backward is not None
    names = _write(new.forward, stages)
    if not names:
        return new
    _read(new.backward, names)
    new = set_saved_values(new, [names.get(name, name) for name in new.saved_values])
    plan = replace(new.plan, saved_on_disk=stages, saved_sets=SAVED_SETS)
    return replace(new, plan=replace(plan, reasons=(*plan.reasons, _reason(new, stages))))


def _write(graph: fx.Graph, stages: frozenset[int]) -> dict[str, str]:
    """Returns the names of the copies on the disk, by those of the copies on the host."""
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


def _read(graph: fx.Graph, names: dict[str, str]) -> None:
    """Read ahead of each fetch of one of these."""
    each = ops.nodes_of(graph, ops.fetch_saved)
    fetches = [fetch for fetch in each if ops.arguments(fetch)[1].name in names]
    places = [_begin_of(fetch) for fetch in fetches]
    body = next(node for node in graph.nodes if node.op != "placeholder")
    ahead = SAVED_SETS - 1
    for k, fetch in enumerate(fetches):
        stage, on_host, buffer = ops.arguments(fetch)
        with graph.inserting_before(on_host):
            on_disk = graph.placeholder(names[on_host.name])
        after = (fetches[k - SAVED_SETS],) if k >= SAVED_SETS else None
        with graph.inserting_before(places[k - ahead] if k >= ahead else body):
            read = ops.call(
                graph, ops.read_saved, stage, on_disk, name=f"{on_host.name}_read", after=after
            )
        on_disk.meta["value"] = read.meta["value"] = on_host.meta.get("value")
        buffer.args = (stage, on_disk)
        fetch.args = (stage, read, buffer)
        graph.erase_node(on_host)


def _begin_of(fetch: fx.Node) -> fx.Node:
    """The allocation of what is fetched into."""
    buffer = fetch.args[2]
    assert isinstance(buffer, fx.Node)
    return buffer


def _reason(schedule: Schedule, stages: frozenset[int]) -> str:
    writes = ops.nodes_of(schedule.forward, ops.write_saved)
    sizes = [tensors_bytes(node.meta.get("value")) for node in writes]
    return (
        f"saved tensors of {numbered('stage', 0, max(stages))} go on from the host to a disk: "
        f"each step writes {format_bytes(sum(sizes))} there and reads it back, by way of "
        f"{2 * SAVED_SETS} buffers ({format_bytes(2 * SAVED_SETS * max(sizes))} of host memory)"
    )
