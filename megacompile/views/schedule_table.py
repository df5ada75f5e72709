"""Prints tables of a schedule: steps by streams, the time of each pass, differences of two
schedules.

The table of steps has steps down and streams across. Differences are a unified diff:

    --- GPT: 6 stages by lower
    +++ GPT: 6 stages by lower
    # lookahead: 2 -> 1
    # slots: 4 of 27 MiB -> 3 of 20.3 MiB
     forward
    -  0 token      | 0PREFETCH@0 0.1PREFETCH@1 1PREFETCH@2 2PREFETCH@3 0F
    +  0 token      | 0PREFETCH@0 0.1PREFETCH@1 1PREFETCH@2 0F

A line shows a compute of a stage and the ops issued since the previous one, so copies are in the
line of the next compute. Ops after the last compute have their own line. An update has one line per
bucket, labeled with the first stage that reads it. Waits are shown within the same graph; with
`code=True` tokens are compared too.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import fx

from megacompile.ir import ops, values
from megacompile.ir.ops import Show
from megacompile.ir.schedule import Schedule
from megacompile.ir.stages import Stage
from megacompile.ir.stream import Stream
from megacompile.text import columns, format_bytes, printable
from megacompile.views import python

_COPIES_AND_COMPUTE = (Stream.H2D, Stream.COMPUTE, Stream.D2H)
_ORDER = (
    *(Stream.READ, Stream.H2D, Stream.COMM, Stream.COMPUTE, Stream.D2H),
    *(Stream.HOST, Stream.DEVICE, Stream.WRITE),
)
_ALWAYS = dict.fromkeys(("forward", "backward"), _COPIES_AND_COMPUTE)  # shown even if unused


def table(schedule: Schedule, marks: Mapping[fx.Node, str] | None = None) -> str:
    """A table with steps down and streams across; a copy is in the row of the next compute.

    Rows follow the order of issue. Each update on the host has its own row, although only gradients
    order them. The table of an update graph has only the streams that it uses.

    `marks` appends "<-- text" to the row of a node, which is then shown even if it is quiet.
    """
    blocks = [_block(name, graph, marks or {}) for name, graph in schedule.graphs.items()]
    return "\n\n".join(blocks)


def _block(name: str, graph: fx.Graph, marks: Mapping[fx.Node, str]) -> str:
    """The table of one graph; ops issued before a step are in its row."""
    steps = (Show.STEP, Show.CELL)
    shown = (node for node in graph.nodes if node in marks or ops.effects(node).show in steps)
    rows: list[dict[Stream, list[str]]] = []
    notes: list[str] = [""]
    for row in _until(shown, lambda n: ops.effects(n).show is Show.STEP or n.op == "output"):
        labels: dict[Stream, list[str]] = {stream: [] for stream in Stream}
        for node in row:
            labels[ops.stream_of(node)].append(ops.label(node))
        rows.append(labels)
        notes.append("".join(f"  <-- {printable(marks[node])}" for node in row if node in marks))
    used = {stream for row in rows for stream, labels in row.items() if labels}
    order = [stream for stream in _ORDER if stream in used or stream in _ALWAYS.get(name, ())]
    cells = [[stream.value for stream in order]]
    cells += [[" ".join(row[stream]) for stream in order] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(order))]
    lines = [name]
    for step, (cell_row, note) in enumerate(zip(cells, notes, strict=True)):
        left = "step" if step == 0 else f"{step - 1:>4}"
        padded = (f"{cell:<{width}}" for cell, width in zip(cell_row, widths, strict=True))
        lines.append(f"{left} | {' | '.join(padded)}{note}".rstrip(" |"))
    return "\n".join(lines)


def _until(nodes: Iterable[fx.Node], ends: Callable[[fx.Node], bool]) -> Iterator[list[fx.Node]]:
    """Split nodes after each one that `ends` a row; the last row may lack one."""
    row: list[fx.Node] = []
    for node in nodes:
        row.append(node)
        if ends(node):
            yield row
            row = []
    if row:
        yield row


# --- passes


def passes(schedule: Schedule) -> str:
    """A table of each pass's time and its nodes before and after.

    The column "actions" shows whether the pass changed the issued ops: "+9" for nine more, "=" for
    the same ones.
    """
    if not schedule.history:
        return f"{printable(schedule.name)}: made by hand, no pass has run"
    rows = [["pass", "ms", "nodes", "actions"]]
    before = 0  # the captured graph's, then the schedule's
    for record in schedule.history:
        more = len(record.after.split()) - len(record.before.split())
        change = "=" if record.before == record.after else f"{more:+d}" if more else "changed"
        nodes = f"{before} -> {record.nodes}"
        rows.append([record.name, f"{record.time_s * 1e3:.1f}", nodes, change])
        before = record.nodes
    rows.append(["all", f"{sum(r.time_s for r in schedule.history) * 1e3:.1f}", "", ""])
    return columns(rows)


# --- the differences of two schedules


def diff(before: Schedule, after: Schedule, *, code: bool = False, lines: int = 2) -> str:
    """A unified diff of two schedules; "" if they do the same.

    Args:
        code: compare the Python that runs instead of the actions.
        lines: unchanged lines around each change.
    """
    old, new = _named(before), _named(after)
    form = _code if code else _actions
    found = list(difflib.unified_diff(form(before), form(after), old, new, lineterm="", n=lines))
    head = [f"# {printable(text)}" for text in differences(before, after)]
    if not found:
        found = [f"--- {old}", f"+++ {new}"] if head else []
    return "\n".join([*found[:2], *head, *found[2:]])


def differences(before: Schedule, after: Schedule) -> list[str]:
    """The options and inputs in which two schedules differ: "lookahead: 2 -> 1"."""
    made_with: dict[str, Callable[[Schedule], object]] = {
        "stages": lambda s: len(s.stages),
        "passes": lambda s: ", ".join(record.name for record in s.history) or "none",
        "kept, not recomputed": lambda s: ", ".join(map(str, sorted(s.plan.keep))) or "none",
        "plan": lambda s: "; ".join(s.plan.reasons) or "none",
        "slots": lambda s: (
            f"{len(s.slots)} of {format_bytes(sum(slot.size_bytes for slot in s.slots))}"
        ),
        "left in the slots by the forward": lambda s: (
            ", ".join(f"{bucket.label}@{slot}" for slot, bucket in s.reused) or "none"
        ),
        "lookahead": lookahead,
        "updates": _updates,
    }
    pairs = {name: (of(before), of(after)) for name, of in made_with.items()}
    return [f"{name}: {old} -> {new}" for name, (old, new) in pairs.items() if old != new]


def lookahead(schedule: Schedule) -> int:
    """The most computes that a forward issues between a prefetch and its first reader."""
    graph = schedule.forward
    count, at = 0, {}
    for node in ops.nodes_of(graph):
        at[node] = count
        count += _computes(node)
    farthest = 0
    for node in ops.nodes_that(graph, lambda op: op.fills_slot):
        readers = [at[user] for user in node.users if _computes(user)]
        if readers:
            farthest = max(farthest, min(readers) - at[node])
    return farthest


def _named(schedule: Schedule) -> str:
    made_by = schedule.history[-1].name if schedule.history else "hand"
    return f"{printable(schedule.name)}: {len(schedule.stages)} stages by {made_by}"


def _updates(schedule: Schedule) -> str:
    """Counts of updates by place: "3 on the host, 1 on the device", or "none"."""
    count: Counter[str] = Counter()
    for name, graph in schedule.graphs.items():
        for node in ops.nodes_that(graph, lambda op: op.is_update):
            place = "on the host" if ops.stream_of(node) is Stream.HOST else "on the device"
            count["in the backward" if name == "backward" else place] += 1
    return ", ".join(f"{many} {where}" for where, many in count.items()) or "none"


def _actions(schedule: Schedule) -> list[str]:
    stage_names = {stage.index: printable(stage.name) for stage in schedule.stages}
    width = max(map(len, stage_names.values()), default=0)
    first = schedule.first_readers()
    lines = []
    for name, graph in schedule.graphs.items():
        lines.append(name)
        rows: list[tuple[Stage | None, list[fx.Node]]]
        if name == "update":
            groups = itertools.groupby(_shown(graph), key=values.bucket_of)
            rows = [(first.get(b.key) if b else None, list(nodes)) for b, nodes in groups]
        else:
            until = _until(_shown(graph), _computes)
            rows = [(ops.arguments(r[-1])[0] if _computes(r[-1]) else None, r) for r in until]
        for stage, nodes in rows:
            left = " " * (4 + width)
            if stage is not None:
                left = f"{stage.index:>3} {stage_names[stage.index]:<{width}}"
            lines.append(f"{left} | {' '.join(map(_action, nodes))}")
    return lines


def _computes(node: fx.Node) -> bool:
    return ops.effects(node).code is not None


def _shown(graph: fx.Graph) -> Iterator[fx.Node]:
    return (n for n in ops.nodes_of(graph) if ops.effects(n).show is not Show.QUIET)


def _action(node: fx.Node) -> str:
    """The label and its waits other than arguments: "2PREFETCH@0(after=0F)"."""
    after: Any = node.kwargs.get("after", ())
    sources = [values.producer(n) for n in after]
    waits = [ops.label(n) for n in sources if ops.effects(n).issues]
    return ops.label(node) + (f"(after={','.join(waits)})" if waits else "")


def _code(schedule: Schedule) -> list[str]:
    """The code's lines with unaligned comments, because one long line would shift all of them."""
    lines = "\n".join(python.graph_code(schedule, name) for name in schedule.graphs).splitlines()
    return [re.sub(r"(?<=\S) {2,}", "  ", line) for line in lines]
