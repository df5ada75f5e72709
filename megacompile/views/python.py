"""Prints a schedule: as the Python code that runs, as a table of steps by streams, and its
difference from another one.

The executor runs exactly this code. `free` becomes `del`, with a `wait(...)` for readers on other
streams.

    def run_forward(inputs):
        # x bf16[16]
        # weights_0: the last 0UPDATE
        x, weights_0 = inputs
        inputs.clear()
        start = begin()                                            # compute  BEGIN
        w0 = prefetch(bucket_0, slot_0, after=(weights_0, start))  # h2d      0PREFETCH@0  445 MiB
        y0, = forward(stage_0, (w0,), (x,), False)                 # compute  0F           bf16[16]
        # outputs, saved values
        return (y0,), (x,)

The comment on a token names the op that it stands for (see `megacompile.ir.edges`). A variable has
the name of its FX node, with "_" appended if an op or object has that name.
"""

from __future__ import annotations

import builtins
import difflib
import itertools
import keyword
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import fx

from megacompile.ir import ops, values
from megacompile.ir.buckets import Bucket, Slot
from megacompile.ir.edges import makers, tokens_of
from megacompile.ir.ops import Show
from megacompile.ir.schedule import Schedule
from megacompile.ir.stages import Stage
from megacompile.ir.stream import Stream
from megacompile.ir.tensors import TensorMeta, parts_of, tensors_bytes
from megacompile.text import columns, format_bytes, printable

_WIDTH = 80  # of a line of code, before its comment
_SHAPES = 3  # more tensors than this are counted, not listed
_RETURNS = {
    "forward": "outputs, saved values",
    "backward": "gradients of inputs, values left for the update, tokens",
    "update": "tokens",
}
_RUNS = {f"run_{name}" for name in _RETURNS}
_RESERVED = {op.name for op in ops.OPS.values()} | {"wait", "inputs"} | _RUNS


class _CodeLine(NamedTuple):
    """A line of code, and the columns of its comment."""

    code: str
    stream: str = ""
    label: str = ""
    detail: str = ""


def code(schedule: Schedule) -> str:
    """The schedule as executable Python; it needs `names(schedule)`, the ops and `wait`."""
    functions = [graph_code(schedule, name) for name in schedule.graphs]
    comments = map(printable, header(schedule))  # user-given names cannot break out of the comments
    return "\n\n".join(["\n".join(comments), *functions])


def graph_code(schedule: Schedule, graph_name: str) -> str:
    """One of the schedule's graphs as the function `run_<graph_name>(inputs)`. `inputs` is a list
    of the placeholders' values; the function empties it, so that it keeps none of them alive."""
    graph = schedule.graphs[graph_name]
    variables = _variables(schedule, graph)
    lines = [_CodeLine(text) for text in _unpacking(schedule, graph, variables)]
    freed_bytes: dict[fx.Node, tuple[fx.Node, int]] = {}  # by memory: the free of its last name
    for node in ops.nodes_that(graph, lambda op: op.frees is not None):
        (value,) = values.reads(node)
        freed_bytes[values.memory(value)] = node, tensors_bytes(value.meta.get("value"))
    # tuples that are unpacked and also named as a whole, as in `after=(forward_3,)`: they would
    # keep every item alive, so each is deleted after its last use
    tuples = ops.nodes_that(graph, lambda op: op.count)
    whole = [n for n in tuples if any(ops.items(n)) and _is_named(n)]
    position = {node: i for i, node in enumerate(graph.nodes)}
    last_use = {n: max(n.users, key=position.__getitem__) for n in whole}
    for key, run in itertools.groupby(ops.nodes_of(graph), key=_group):
        nodes = list(run)
        if isinstance(key, fx.Node):
            lines += _call(key, variables)
        else:
            size = sum(size for node, size in freed_bytes.values() if node in nodes)
            lines += _free(nodes, key, variables, format_bytes(size) if size else "")
        done = [variables[n] for n, user in last_use.items() if user in nodes]
        lines += [_CodeLine(f"del {', '.join(done)}")] if done else []
    returned = _text(graph.output_node().args[0], variables)
    if returned.startswith("((") and len("    return ") + len(returned[1:-1]) <= _WIDTH:
        returned = returned[1:-1]  # a pair on one line needs no parentheses
    lines += [_CodeLine(f"# {_RETURNS[graph_name]}"), _CodeLine(f"return {returned}")]
    return "\n".join([f"def run_{graph_name}(inputs):", *_layout(lines)]) + "\n"


def names(schedule: Schedule) -> dict[str, object]:
    """The stages, buckets and slots that the code refers to, by name."""
    objects: list[Stage | Bucket | Slot] = [*schedule.stages, *schedule.buckets, *schedule.slots]
    if schedule.update is not None:  # it may update buckets that no stage reads
        updates = ops.nodes_that(schedule.update, lambda op: op.is_update)
        objects += [ops.arguments(node)[0] for node in updates]
    found: dict[str, object] = {repr(item): item for item in objects}
    for item in objects:
        same = isinstance(item, Bucket) and isinstance(found[repr(item)], Bucket)
        assert not same or item == found[repr(item)], f"two buckets are called {item!r}"
    return found


def _variables(schedule: Schedule, graph: fx.Graph) -> dict[fx.Node, str]:
    """A variable for each node: its name, made unique among ops and objects."""
    taken = _RESERVED | set(names(schedule)) | set(keyword.kwlist) | set(dir(builtins)) | {"_"}
    node_names = {node.name for node in graph.nodes}
    variables = {}
    for node in graph.nodes:
        name = node.name
        while name in taken or (name != node.name and name in node_names):
            name += "_"
        variables[node] = name
    return variables


def _is_named(node: fx.Node) -> bool:
    taken = {item for _, item in ops.items(node)}
    return any(user not in taken for user in node.users)


def _unpacking(
    schedule: Schedule, graph: fx.Graph, variables: Mapping[fx.Node, str]
) -> Iterator[str]:
    tokens = tokens_of(graph)
    placeholders, of_tokens = graph.find_nodes(op="placeholder"), set(tokens.values())
    if placeholders:
        maker = makers(schedule)
        given = [node for node in placeholders if node not in of_tokens]
        yield from _comment(f"{variables[n]} {_shapes(n.meta.get('value'))}" for n in given)
        known = {node: maker[place][1] for place, node in tokens.items() if place in maker}
        said = [f"{variables[n]}: the last {ops.label(made)}" for n, made in known.items()]
        if others := [variables[node] for node in tokens.values() if node not in known]:
            said.append(f"{', '.join(others)}: written by other schedules, if at all")
        yield from _comment(said)
        yield _targets([variables[node] for node in placeholders]) + " = inputs"
    yield "inputs.clear()"


def _comment(parts: Iterable[str]) -> Iterator[str]:
    """Comment lines that wrap only between parts."""
    glued = "; ".join(part.strip().replace(" ", "\0") for part in parts)
    yield from (f"# {line.replace(chr(0), ' ')}" for line in textwrap.wrap(glued, _WIDTH - 2))


def _call(node: fx.Node, variables: Mapping[fx.Node, str]) -> Iterator[_CodeLine]:
    op = ops.op_of(node)
    assert op is not None
    args = [_text(arg, variables) for arg in node.args]
    args += [f"{key}={_text(arg, variables)}" for key, arg in node.kwargs.items() if arg != ()]
    text = f"{op.name}({', '.join(args)})"
    taken = dict(ops.items(node))
    if taken:
        declared = 0 if op.count is None else op.count(node.args)
        count = max(declared, max(taken) + 1)
        targets = [variables[taken[i]] if i in taken else "_" for i in range(count)]
        text = f"{_targets(targets)} = {text}"
    if _is_named(node):
        text = f"{variables[node]} = {text}"
    yield _CodeLine(text, op.stream.value, ops.label(node), _detail(node))
    if op.frees is not None:
        yield _delete([node], variables)
    if taken and "_" in targets:
        yield _CodeLine("del _", op.stream.value)


def _group(node: fx.Node) -> fx.Node | tuple[fx.Node, ...]:
    """The node; for a `free`, the ops that it waits for: equal neighbors share a `del`."""
    op = ops.effects(node)
    after: Any = node.kwargs.get("after", ())
    return tuple(after) if op.frees is not None and op.waits else node


def _free(
    nodes: Sequence[fx.Node],
    after: tuple[fx.Node, ...],
    variables: Mapping[fx.Node, str],
    detail: str,
) -> Iterator[_CodeLine]:
    stream = Stream.COMPUTE.value
    if after:
        waited = _text(after, variables).replace(",)", ")")
        yield _CodeLine(f"wait{waited}", stream, "WAIT")
    yield _delete(nodes, variables)._replace(stream=stream, label="FREE", detail=detail)


def _delete(nodes: Sequence[fx.Node], variables: Mapping[fx.Node, str]) -> _CodeLine:
    """A `del` of the values that the nodes free."""
    freed = [variables[value] for node in nodes for value in values.reads(node)]
    return _CodeLine(f"del {_targets(freed).removesuffix(',')}")


def _targets(variables: list[str]) -> str:
    text = ", ".join(variables) + ("," if len(variables) == 1 else "")
    return f"({text})" if len(text) > _WIDTH // 2 else text


def _text(value: Any, variables: Mapping[fx.Node, str]) -> str:
    if isinstance(value, fx.Node):
        return variables[value]
    if isinstance(value, tuple | list):
        inside = [_text(item, variables) for item in value]
        return f"({', '.join(inside)}{',' if len(inside) == 1 else ''})"
    return repr(value)


def _layout(lines: Iterable[_CodeLine]) -> Iterator[str]:
    """Indent, wrap long lines, and align comments in columns."""
    wrapped = [(_wrap(line.code), line) for line in lines]
    column = max((len(text[0]) for text, line in wrapped if line.stream), default=0)
    label_width = max(len(line.label) for _, line in wrapped)
    for text, line in wrapped:
        comment = f"# {line.stream:<7}  {line.label:<{label_width}}  {line.detail}".rstrip()
        yield f"{text[0]:<{column}}  {printable(comment)}" if line.stream else text[0]
        yield from text[1:]


def _wrap(text: str) -> list[str]:
    """Wrap only at commas, inside parentheses."""
    if text.startswith("#"):
        return [f"    {text}"]
    glued = text.replace(" = ", "\0=\0").replace("return ", "return\0").replace("del ", "del\0")
    wrapped = textwrap.wrap(
        glued,
        _WIDTH,
        initial_indent="    ",
        subsequent_indent="        ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace("\0", " ") for line in wrapped]


def _detail(node: fx.Node) -> str:
    """Bytes of a bucket's values, shapes of other values."""
    value = node.meta.get("value")
    subject: Any = node.args[0] if node.args else None
    if isinstance(subject, Bucket):
        group = node if value is not None else next(iter(values.reads(node)), None)
        size = 0 if group is None else tensors_bytes(group.meta.get("value"))
        return format_bytes(size or subject.size_bytes)
    if value is None:
        value = tuple(item.meta.get("value") for _, item in sorted(ops.items(node)))
    return _shapes(value)


def _shapes(value: Any) -> str:
    """ "bf16[16, 1024], f32[]"; for more than three also the count and bytes."""
    metas = [part for part in parts_of(value) if isinstance(part, TensorMeta)]
    shown = ", ".join(str(meta) for meta in metas[:_SHAPES])
    if len(metas) <= _SHAPES:
        return shown
    return f"{shown}, ... {len(metas)} tensors, {format_bytes(tensors_bytes(value))}"


# The header above a schedule's Python.


def header(schedule: Schedule) -> Iterator[str]:
    """The comment above the functions: stages, slots, passes and the reasons of the plan."""
    slots = sum(slot.size_bytes for slot in schedule.slots)
    buckets = sum(bucket.size_bytes for bucket in schedule.buckets)
    yield (
        f"# schedule {schedule.name!r}: {len(schedule.stages)} stages, "
        f"{len(schedule.buckets)} buckets of {format_bytes(buckets)}, "
        f"{len(schedule.slots)} slots of {format_bytes(slots)}"
    )
    made = ", ".join(f"{record.name} {record.time_s:.3f} s" for record in schedule.history)
    yield f"# passes: {made or 'none'}"
    for _, run in itertools.groupby(schedule.stages, key=_alike):
        yield f"# {_stages_line(list(run))}"
    for slot in schedule.slots:
        left = [bucket for index, bucket in schedule.reused if index == slot.index]
        there = "".join(f", the forward leaves {bucket!r} in it" for bucket in left)
        yield f"# {slot!r}: {format_bytes(slot.size_bytes)}{there}"
    yield from (f"# plan: {reason}" for reason in schedule.plan.reasons)


def _alike(stage: Stage) -> object:
    """Key of stages that share a line: one template and equal bucket sizes."""
    alone = stage.index if stage.template is None else None
    return alone, id(stage.template), tuple(b.size_bytes for b in stage.buckets)


def _stages_line(run: list[Stage]) -> str:
    first, last, template = run[0], run[-1], run[0].template
    read = " + ".join(format_bytes(b.size_bytes) for b in first.buckets) or "nothing"
    text = f"stage_{first.index}: {first.name!r} reads {read}"
    if len(run) > 1:
        ends = f"stage_{first.index} to stage_{last.index}: {first.name!r} to {last.name!r}"
        text = f"{ends} reads {read} each"
    if template is None:
        return f"{text}, not traced"
    fraction, tiles = template.saved_fraction, template.tiles
    saved = format_bytes(tensors_bytes(template.saved))
    saved += f" as a fraction of {fraction:g}" if fraction < 1 else ""
    saved += f", {tiles} tiles" if tiles > 1 else ""
    saved += ", random" if template.random else ""
    return f"{text}, template {template.index} (saves {saved})"


# The table, and the difference of two schedules.

_ORDER = (
    *(Stream.READ, Stream.H2D, Stream.COMM, Stream.COMPUTE, Stream.D2H),
    *(Stream.HOST, Stream.DEVICE, Stream.WRITE),
)
_ALWAYS = (Stream.H2D, Stream.COMPUTE, Stream.D2H)  # shown in a forward and backward even if unused


def table(schedule: Schedule, marks: Mapping[fx.Node, str] | None = None) -> str:
    """A table with steps down, in the order of issue, and streams across; a copy is in the row of
    the next compute. `marks` appends "<-- text" to the row of a node, which is then shown even if
    it is quiet."""
    blocks = [_block(name, graph, marks or {}) for name, graph in schedule.graphs.items()]
    return "\n\n".join(blocks)


def _block(name: str, graph: fx.Graph, marks: Mapping[fx.Node, str]) -> str:
    """The table of one graph; ops issued before a step are in its row."""
    rows: list[list[fx.Node]] = [[]]
    for node in graph.nodes:
        show = ops.effects(node).show
        if node in marks or show in (Show.STEP, Show.CELL):
            rows[-1].append(node)
        if show is Show.STEP or node.op == "output":
            rows.append([])
    rows = [row for row in rows if row]
    used = {ops.stream_of(node) for row in rows for node in row}
    used |= set() if name == "update" else set(_ALWAYS)
    order = [stream for stream in _ORDER if stream in used]
    cells = [["step", *(stream.value for stream in order)]]
    for step, row in enumerate(rows):
        labels = [[ops.label(node) for node in row if ops.stream_of(node) is s] for s in order]
        cells.append([f"{step:>4}", *(" ".join(each) for each in labels)])
    notes = ["".join(f"  <-- {printable(marks[n])}" for n in row if n in marks) for row in rows]
    lines = columns(cells, left=range(len(order) + 1), between=" | ").split("\n")
    width, each = max(map(len, lines)), zip(lines, ["", *notes], strict=True)
    return "\n".join([name, *(f"{line:<{width}}{note}".rstrip(" |") for line, note in each)])


def diff(before: Schedule, after: Schedule) -> str:
    """A unified diff of two schedules' Python, without the times of passes and with unaligned
    comments; "" if they are equal."""
    old, new = (
        [re.sub(r"(?<=\S) {2,}| \d+\.\d{3} s", "  ", line) for line in code(each).splitlines()]
        for each in (before, after)
    )
    names = (printable(before.name), printable(after.name))
    return "\n".join(difflib.unified_diff(old, new, *names, lineterm="", n=2))
