"""A schedule as a table: steps down, streams across."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import fx

from megacompile.ir import ops
from megacompile.ir.ops import Show
from megacompile.ir.schedule import Schedule
from megacompile.ir.stream import Stream
from megacompile.text import printable

_COPIES_AND_COMPUTE = (Stream.H2D, Stream.COMPUTE, Stream.D2H)
_ORDER = (
    *(Stream.READ, Stream.H2D, Stream.COMM, Stream.COMPUTE, Stream.D2H),
    *(Stream.HOST, Stream.DEVICE, Stream.WRITE),
)
_ALWAYS = dict.fromkeys(("forward", "backward"), _COPIES_AND_COMPUTE)  # whether used or not


def table(schedule: Schedule, marks: Mapping[fx.Node, str] | None = None) -> str:
    """Steps down, streams across: a copy stands in the row of the compute issued after it.

    A row is when ops are issued. Updates on the host have one each, though nothing orders them but
    their gradients. An update's table has the streams that it uses.

    `marks` appends "<-- text" to the row of a node, which then has a row even where it is quiet.
    """
    blocks = [_block(name, graph, marks or {}) for name, graph in schedule.graphs.items()]
    return "\n\n".join(blocks)


def _block(name: str, graph: fx.Graph, marks: Mapping[fx.Node, str]) -> str:
    """One graph: what is issued before a step stands in its row."""
    rows: list[dict[Stream, list[str]]] = []
    notes: list[list[str]] = []
    row: dict[Stream, list[str]] = {stream: [] for stream in Stream}
    marked: list[str] = []
    for node in graph.nodes:
        if node in marks:
            marked.append(marks[node])
        elif ops.effects(node).show not in (Show.STEP, Show.CELL):
            continue
        row[ops.stream_of(node)].append(ops.label(node))
        if ops.effects(node).show is Show.STEP or node.op == "output":
            rows.append(row)
            notes.append(marked)
            row, marked = {stream: [] for stream in Stream}, []
    if any(row.values()):
        rows.append(row)
        notes.append(marked)
    return "\n".join(_rows(name, rows, notes))


def _rows(name: str, rows: list[dict[Stream, list[str]]], notes: list[list[str]]) -> Iterator[str]:
    used = {stream for row in rows for stream, labels in row.items() if labels}
    order = [stream for stream in _ORDER if stream in used or stream in _ALWAYS.get(name, ())]
    cells = [[stream.value for stream in order]]
    cells += [[" ".join(row[stream]) for stream in order] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(order))]
    yield name
    for step, (row, marked) in enumerate(zip(cells, [[], *notes], strict=True)):
        left = "step" if step == 0 else f"{step - 1:>4}"
        columns = " | ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
        behind = "".join(f"  <-- {printable(mark)}" for mark in marked)
        yield f"{left} | {columns}{behind}".rstrip(" |")
