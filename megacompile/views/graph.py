"""A schedule as a graph of networkx.

Nodes are ops. An edge goes from the earlier op to the later one and has a `kind`:

    data      the second takes a value that the first returns, perhaps in an earlier graph
    after     the second waits for the first to be done with a slot or with memory
    stream    the second is the next op on the first's in-order stream
    boundary  from the last op of the forward to the first of the backward
    token     the second waits for what the first, of another graph or run, writes to a bucket
    names     the second names the first and does not wait for it (`defer_free`, `help_host`)

Tokens form cycles: from an update to the next forward, from a backward to its update, and with
accumulation from a backward to the next one. Without them the graph is acyclic. Tokens and names do
not order ops within a run.
"""

from __future__ import annotations

from collections.abc import Iterator

import networkx as nx
from torch import fx

from megacompile.ir import ops
from megacompile.ir.buckets import Bucket, Slot
from megacompile.ir.edges import Maker, makers, stands_for
from megacompile.ir.schedule import Schedule
from megacompile.ir.stages import Stage
from megacompile.ir.stream import Stream
from megacompile.ir.values import producer, reads
from megacompile.views.timeline import OpInfo


def to_networkx(schedule: Schedule) -> nx.MultiDiGraph:
    """Ops as nodes, by "<graph>.<name of the FX node>".

    A node has `label` (as printed), `op`, `graph`, `stream`, `position` (in the program), `stage`
    (index, or -1), `module` (the unit's path or ""), `slot` (index or -1) and `bytes` (that a copy
    or a collective moves). The attributes are strings and ints, which any file format supports.
    """
    found = nx.MultiDiGraph(name=schedule.name)
    stages = {b.key: stage for stage in reversed(schedule.stages) for b in stage.buckets}
    maker = makers(schedule)
    for name, graph in schedule.graphs.items():
        for position, node in enumerate(ops.nodes_of(graph)):
            info, args = OpInfo.of(node), ops.arguments(node)
            subject = args[0] if args else None
            stage = stages.get(subject.key) if isinstance(subject, Bucket) else subject
            found.add_node(
                f"{name}.{node.name}",
                label=info.name,
                op=info.kind,
                graph=name,
                stream=info.lane,
                position=position,
                stage=stage.index if isinstance(stage, Stage) else -1,
                module=info.module,
                slot=next((arg.index for arg in args if isinstance(arg, Slot)), -1),
                bytes=info.size_bytes,
            )
    for name, graph in schedule.graphs.items():
        for first, second, kind in _edges(graph):
            source: Maker | None = name, first
            if first.op == "placeholder":
                source = maker.get(stands_for(schedule, first))
                kind = "token" if kind == "after" else kind
            if source is not None and ops.op_of(source[1]) is not None:
                pair = f"{source[0]}.{source[1].name}", f"{name}.{second.name}"
                found.add_edge(*pair, kind, kind=kind)
    if schedule.backward is not None:
        ends = (ops.nodes_of(schedule.forward)[-1:], ops.nodes_of(schedule.backward)[:1])
        for last, first in zip(*ends, strict=False):
            pair = f"forward.{last.name}", f"backward.{first.name}"
            found.add_edge(*pair, "boundary", kind="boundary")
    return found


def _edges(graph: fx.Graph) -> Iterator[tuple[fx.Node, fx.Node, str]]:
    """(first, second, kind) of each edge of a graph, in program order of the second ops. The first
    may be a placeholder for a value of an earlier graph."""
    last: dict[Stream, fx.Node] = {}
    for node in ops.nodes_of(graph):
        op, after = ops.effects(node), node.kwargs.get("after", ())
        for source in map(producer, reads(node)):
            yield source, node, "data" if op.waits or source.op == "placeholder" else "names"
        for source in map(producer, after):  # type: ignore[arg-type]
            yield source, node, "after" if op.waits else "names"
        if op.stream.in_order:
            if op.stream in last:
                yield last[op.stream], node, "stream"
            last[op.stream] = node
