"""A schedule as a graph for other programs: networkx, and the DOT language of Graphviz.

Nodes are ops, edges what orders them, with the `kind`

    data     the one takes a value that the other gives
    after    the one waits for the other to be done with a slot or with memory
    stream   the one comes next on the other's stream

and `boundary` between the last op of the forward and the first of the backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import networkx as nx
from torch import fx

from megacompile.ir import ops, values
from megacompile.ir.buckets import Bucket, Slot
from megacompile.ir.schedule import Schedule
from megacompile.ir.stages import Stage
from megacompile.ir.stream import Stream

_COLOURS = {Stream.H2D: "#D6ECFA", Stream.COMPUTE: "#D5F0E4", Stream.D2H: "#F9DECB"}
_STYLES = {
    "data": "",
    "after": ' [style=dashed, color="#D55E00"]',
    "stream": ' [style=dotted, color="#888888"]',
    "boundary": ' [style=bold, color="#888888"]',
}


def to_networkx(schedule: Schedule) -> nx.MultiDiGraph:
    """Ops as nodes, by "<graph>.<name of the FX node>".

    A node has `label` (as printed), `op`, `graph`, `stream`, `position` (in the program), `stage`
    (index, -1 for an op of no stage), `module` (the unit's path or ""), `slot` (index or -1) and
    `bytes` (that a copy moves). The attributes are strings and ints, for any file format.
    """
    found = nx.MultiDiGraph(name=schedule.name)
    stages = {bucket.key: stage for stage in reversed(schedule.stages) for bucket in stage.buckets}
    ends: list[str] = []
    for name, graph in schedule.graphs.items():
        nodes = ops.nodes_of(graph)
        for position, node in enumerate(nodes):
            found.add_node(_key(name, node), **_attributes(node, name, position, stages))
        for first, second, kind in _edges(graph):
            if not found.has_edge(_key(name, first), _key(name, second), kind):
                found.add_edge(_key(name, first), _key(name, second), kind, kind=kind)
        if nodes and ends:
            found.add_edge(ends[-1], _key(name, nodes[0]), "boundary", kind="boundary")
        ends += [_key(name, node) for node in nodes[-1:]]
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
                (key, data)
                for key, data in graph.nodes(data=True)
                if data["graph"] == name and data["stream"] == stream.value
            ]
            if not inside:
                continue
            lines.append(f"  subgraph {_quoted(f'cluster_{name}_{stream.value}')} {{")
            lines.append(f"    label={_quoted(f'{name}: {stream.value}')};")
            lines.append(f'    node [fillcolor="{_COLOURS[stream]}"];')
            lines += [f"    {_quoted(k)} [label={_quoted(d['label'])}];" for k, d in inside]
            lines.append("  }")
    for first, second, data in graph.edges(data=True):
        lines.append(f"  {_quoted(first)} -> {_quoted(second)}{_STYLES[data['kind']]};")
    return "\n".join([*lines, "}", ""])


def _key(graph_name: str, node: fx.Node) -> str:
    return f"{graph_name}.{node.name}"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _attributes(
    node: fx.Node, graph_name: str, position: int, stages: dict[int, Stage]
) -> dict[str, Any]:
    op = ops.op_of(node)
    assert op is not None
    args = ops.arguments(node)
    subject = args[0] if args else None
    stage = subject if isinstance(subject, Stage) else None
    if isinstance(subject, Bucket):
        stage = stages.get(subject.key)
    slots = [arg.index for arg in args if isinstance(arg, Slot)]
    return {
        "label": ops.label(node),
        "op": op.name,
        "graph": graph_name,
        "stream": op.stream.value,
        "position": position,
        "stage": -1 if stage is None else stage.index,
        "module": subject.name if isinstance(subject, Bucket | Stage) else "",
        "slot": slots[0] if slots else -1,
        "bytes": ops.copied_bytes(node),
    }


def _edges(graph: fx.Graph) -> Iterator[tuple[fx.Node, fx.Node, str]]:
    last: dict[Stream, fx.Node] = {}
    for node in ops.nodes_of(graph):
        for value in values.reads(node):
            source = values.producer(value)
            if ops.op_of(source) is not None:
                yield source, node, "data"
        after: Any = node.kwargs.get("after", ())
        for value in after:
            source = values.producer(value)
            if ops.op_of(source) is not None:
                yield source, node, "after"
        stream = ops.stream_of(node)
        if stream in last:
            yield last[stream], node, "stream"
        last[stream] = node
