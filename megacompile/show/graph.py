"""A schedule as a graph for other programs: networkx, and the DOT language of Graphviz.

Nodes are ops. An edge leads from the op that comes first, with the `kind`

    data      the second takes a value that the first returns, perhaps in the graph before
    after     the second waits for the first to be done with a slot or with memory
    stream    the second comes next on the first's stream, where that keeps an order
    boundary  from the last op of the forward to the first of the backward
    token     the second waits for what the first, of another graph or run, writes to a bucket
    names     the second names the first and does not wait for it (`defer_free`, `help_host`)

Tokens go around: from an update to the next forward, from a backward to its update, and with
accumulation from a backward to the next one. Without them there are no circles. Tokens and names
are no order within a run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import networkx as nx
from torch import fx

from megacompile.ir import ops, values
from megacompile.ir.buckets import Bucket, Slot
from megacompile.ir.schedule import Schedule
from megacompile.ir.stages import Stage
from megacompile.ir.stream import Stream
from megacompile.ir.tokens import Place, Token, given, token_of

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
    (index, -1 for an op of no stage), `module` (the unit's path or ""), `slot` (index or -1) and
    `bytes` (that a copy moves). The attributes are strings and ints, for any file format.
    """
    found = nx.MultiDiGraph(name=schedule.name)
    writer = writers(schedule)
    stages = {bucket.key: stage for stage in reversed(schedule.stages) for bucket in stage.buckets}
    for name, graph in schedule.graphs.items():
        for position, node in enumerate(ops.nodes_of(graph)):
            found.add_node(_key(name, node), **_attributes(node, name, position, stages))
    for name, graph in schedule.graphs.items():
        for first, second, kind in _edges(graph):
            found.add_edge(_key(name, first), _key(name, second), kind, kind=kind)
        for source, node in _handed_over(schedule, name):
            found.add_edge(source, _key(name, node), "data", kind="data")
        for node, token in _tokens(graph):
            if token.place in writer:
                kind = "token" if ops.effects(node).waits else "names"
                found.add_edge(_key(*writer[token.place]), _key(name, node), kind, kind=kind)
    if schedule.backward is not None:
        ends = (ops.nodes_of(schedule.forward)[-1:], ops.nodes_of(schedule.backward)[:1])
        for last, first in zip(*ends, strict=False):
            pair = _key("forward", last), _key("backward", first)
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
        waits = ops.effects(node).waits
        after: Any = node.kwargs.get("after", ())
        for kind, taken in (("data", values.reads(node)), ("after", after)):
            for source in map(values.producer, taken):
                if ops.op_of(source) is not None:
                    yield source, node, kind if waits else "names"
        stream = ops.stream_of(node)
        if stream in last and stream.in_order:
            yield last[stream], node, "stream"
        last[stream] = node


def _handed_over(schedule: Schedule, name: str) -> Iterator[tuple[str, fx.Node]]:
    """The readers of a value of the graph before: the backward takes saved values, the update what
    is left."""
    handed = {"backward": ("forward", schedule.saved_values), "update": ("backward", schedule.left)}
    before, value_names = handed.get(name, ("", ()))
    if not value_names:
        return
    made = {node.name: values.producer(node) for node in schedule.graphs[before].nodes}
    for node in ops.nodes_of(schedule.graphs[name]):
        for value in values.reads(node):
            if value.op == "placeholder" and value.name in value_names:
                source = made[value.name]
                if ops.op_of(source) is not None:
                    yield _key(before, source), node


def _tokens(graph: fx.Graph) -> Iterator[tuple[fx.Node, Token]]:
    for node in ops.nodes_of(graph):
        after: Any = node.kwargs.get("after", ())
        for value in after:
            if (token := token_of(value)) is not None:
                yield node, token


# The op that a token stands for, as far as one schedule tells.

Writer = tuple[str, fx.Node]  # the name of a graph, and its op


def writers(schedule: Schedule) -> Mapping[Place, Writer]:
    """By the part of a bucket: the graph that writes it, and its last op that does.

    A part has one such graph: the backward writes gradients, and the update, or a backward that
    updates, writes weights and states. What a schedule does not write, another one may.
    """
    found: dict[Place, Writer] = {}
    for name in ("backward", "update"):
        if name in schedule.graphs:
            graph = schedule.graphs[name]
            found |= {place: (name, node) for place, node in given(graph).items()}
    return found
