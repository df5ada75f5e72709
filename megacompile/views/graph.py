"""Exports a schedule as a graph: networkx, and the DOT language of Graphviz.

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

import networkx as nx

from megacompile.ir import ops
from megacompile.ir.buckets import Bucket, Slot
from megacompile.ir.edges import EdgeKind, Maker, edges, makers, stands_for
from megacompile.ir.schedule import Schedule
from megacompile.ir.stages import Stage
from megacompile.ir.stream import Stream
from megacompile.views.timeline import OpInfo

_COLOURS = {
    Stream.H2D: "#D6ECFA",
    Stream.COMPUTE: "#D5F0E4",
    Stream.D2H: "#F9DECB",
    Stream.HOST: "#F6F1C9",
    Stream.DEVICE: "#E7DDF3",
    Stream.READ: "#E9E9E9",
    Stream.WRITE: "#DADADA",
    Stream.COMM: "#D9E7E7",
}
_STYLES = {
    "data": "",
    "after": ' [style=dashed, color="#D55E00"]',
    "stream": ' [style=dotted, color="#888888"]',
    "boundary": ' [style=bold, color="#888888"]',
    "token": ' [style=dashed, color="#0072B2", constraint=false]',
    "names": ' [style=dotted, color="#CC79A7", constraint=false]',
}


def to_networkx(schedule: Schedule) -> nx.MultiDiGraph:
    """Ops as nodes, by "<graph>.<name of the FX node>".

    A node has `label` (as printed), `op`, `graph`, `stream`, `position` (in the program), `stage`
    (index, or -1), `module` (the unit's path or ""), `slot` (index or -1) and `bytes` (that a copy
    moves). The attributes are strings and ints, which any file format supports.
    """
    found = nx.MultiDiGraph(name=schedule.name)
    stages, maker = schedule.first_readers(), makers(schedule)
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
        for edge in edges(graph):
            kind = str(edge.kind)
            if edge.kind is not EdgeKind.STREAM and not ops.effects(edge.second).waits:
                kind = "names"
            source: Maker | None = name, edge.first
            if edge.first.op == "placeholder":
                source = maker.get(stands_for(schedule, edge.first))
                if edge.kind is EdgeKind.DATA:
                    kind = "data"
                elif kind == "after":
                    kind = "token"
            if source is not None and ops.op_of(source[1]) is not None:
                pair = f"{source[0]}.{source[1].name}", f"{name}.{edge.second.name}"
                found.add_edge(*pair, kind, kind=kind)
    if schedule.backward is not None:
        ends = (ops.nodes_of(schedule.forward)[-1:], ops.nodes_of(schedule.backward)[:1])
        for last, first in zip(*ends, strict=False):
            pair = f"forward.{last.name}", f"backward.{first.name}"
            found.add_edge(*pair, "boundary", kind="boundary")
    return found


def to_dot(schedule: Schedule) -> str:
    """DOT text with a cluster for each stream of each graph; `dot -Tsvg` draws it."""
    graph = to_networkx(schedule)
    lines = [
        f"digraph {_quoted(schedule.name)} {{",
        "  rankdir=LR;",
        '  node [shape=box, style="rounded,filled", fontname="Helvetica", fontsize=10];',
        '  edge [arrowsize=0.6, color="#444444"];',
    ]
    for name in schedule.graphs:
        for stream in Stream:
            inside = [
                (key, data["label"])
                for key, data in graph.nodes(data=True)
                if (data["graph"], data["stream"]) == (name, stream.value)
            ]
            if inside:
                lines.append(f"  subgraph {_quoted(f'cluster_{name}_{stream.value}')} {{")
                lines.append(f"    label={_quoted(f'{name}: {stream.value}')};")
                lines.append(f'    node [fillcolor="{_COLOURS[stream]}"];')
                lines += [f"    {_quoted(key)} [label={_quoted(label)}];" for key, label in inside]
                lines.append("  }")
    for first, second, data in graph.edges(data=True):
        lines.append(f"  {_quoted(first)} -> {_quoted(second)}{_STYLES[data['kind']]};")
    return "\n".join([*lines, "}", ""])


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
