"""A schedule as text: the Python that runs, the step x stream table.

The code is what the executor runs, not a rendering of it: one function a graph, one line an op,
with the stream, the printed name and the bytes or shapes as a comment. `getitem` nodes vanish
(their op's line unpacks), `free` becomes `del`, and a `free` that waits for readers on other
streams becomes `wait(...)` and `del`.

    def run_forward(inputs):
        x, = inputs
        inputs.clear()
        begin_ = begin()                                      # compute  BEGIN
        w0 = prefetch(bucket_0, slot_0, after=(begin_,))      # h2d      0PREFETCH@0  445 MiB
        y0, = forward(stage_0, (w0,), (x,), False)            # compute  0F           bf16[16, 1024]
        return (y0,), (x,)

A variable has the name of its FX node, with "_" behind it where an op or object has that name.
"""

from __future__ import annotations

import builtins
import itertools
import keyword
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import fx

from megacompile.ir import ops, values
from megacompile.ir.buckets import Bucket, Slot
from megacompile.ir.schedule import Schedule
from megacompile.ir.stages import Stage
from megacompile.ir.stream import Stream
from megacompile.ir.tensors import TensorMeta, tensors_bytes
from megacompile.text import format_bytes, printable

_WIDTH = 80  # of a line of code, before its comment


_SHAPES = 3  # more tensors than this are counted, not listed


_RUNS = {"run_forward", "run_backward", "run_update"}
_RESERVED = {op.name for op in ops.OPS.values()} | {"wait", "inputs"} | _RUNS


class _Line(NamedTuple):
    """A line of code and its comment's columns."""

    code: str
    stream: str = ""
    label: str = ""
    detail: str = ""


def code(schedule: Schedule) -> str:
    """The schedule as executable Python; it runs with `names(schedule)`, the ops and `wait`."""
    functions = [graph_code(schedule, name) for name in schedule.graphs]
    header = map(printable, _header(schedule))  # names from outside stay within their comments
    return "\n\n".join(["\n".join(header), *functions])


def graph_code(schedule: Schedule, graph_name: str) -> str:
    """One of the schedule's graphs as the function `run_<graph_name>(inputs)`.

    `inputs` is a list of what the placeholders stand for; the function empties it, so that nobody
    else keeps them alive.
    """
    graph = schedule.graphs[graph_name]
    variables = _variables(schedule, graph)
    lines = [_Line(text) for text in _unpacking(graph, variables)]
    last_use = {n: max(n.users, key=_positions(graph).__getitem__) for n in _whole_tuples(graph)}
    for frees, run in itertools.groupby(ops.nodes_of(graph), key=_frees_at_once):
        for nodes in [list(run)] if frees else [[node] for node in run]:
            lines += _del(nodes, variables) if frees else _call(nodes[0], variables)
            done = [variables[n] for n, user in last_use.items() if user in nodes]
            lines += [_Line(f"del {', '.join(done)}")] if done else []  # the tuple, not its items
    returned = _text(graph.output_node().args[0], variables)
    lines.append(_Line(f"return {_bare(returned)}"))
    return "\n".join([f"def run_{graph_name}(inputs):", *_layout(lines)]) + "\n"


def names(schedule: Schedule) -> dict[str, object]:
    """The stages, buckets and slots that the code refers to, by the names it uses."""
    objects: list[Stage | Bucket | Slot] = [*schedule.stages, *schedule.buckets, *schedule.slots]
    if schedule.update is not None:  # it may be an update of buckets that no stage here reads
        updates = ops.nodes_that(schedule.update, lambda op: op.once)
        objects += [ops.arguments(node)[0] for node in updates]
    return {repr(item): item for item in objects}


# The header.


def _header(schedule: Schedule) -> Iterator[str]:
    slots = sum(slot.size_bytes for slot in schedule.slots)
    buckets = sum(bucket.size_bytes for bucket in schedule.buckets)
    yield (
        f"# schedule {schedule.name!r}: {len(schedule.stages)} stages, "
        f"{len(schedule.buckets)} buckets of {format_bytes(buckets)}, "
        f"{len(schedule.slots)} slots of {format_bytes(slots)}"
    )
    made = ", ".join(f"{record.name} {record.time_s:.3f} s" for record in schedule.history)
    yield f"# passes: {made or 'none'}"
    for _, run in itertools.groupby(schedule.stages, key=_kind):
        yield f"# {_stages_line(list(run))}"
    for slot in schedule.slots:
        held = [bucket for index, bucket in schedule.held if index == slot.index]
        kept = "".join(f", holds {bucket!r} for the backward" for bucket in held)
        yield f"# {slot!r}: {format_bytes(slot.size_bytes)}{kept}"
    for reason in schedule.plan.reasons:
        yield f"# plan: {reason}"


def _kind(stage: Stage) -> object:
    """Neighbours of one template and equal bucket sizes share a line of the header."""
    alone = stage.index if stage.template is None else None
    return alone, id(stage.template), tuple(b.size_bytes for b in stage.buckets)


def _stages_line(run: list[Stage]) -> str:
    first, last = run[0], run[-1]
    many = len(run) > 1
    which = f"stage_{first.index}" + (f" to stage_{last.index}" if many else "")
    where = f"{first.name!r}" + (f" to {last.name!r}" if many else "")
    read = " + ".join(format_bytes(b.size_bytes) for b in first.buckets) or "nothing"
    text = f"{which}: {where} reads {read}{' each' if many else ''}"
    if first.template is None:
        return f"{text}, not traced"
    random = ", random" if first.template.random else ""
    saved = format_bytes(first.template.saved_bytes)
    if first.template.saved_fraction < 1:
        saved += f" as a fraction of {first.template.saved_fraction:g}"
    return f"{text}, template {first.template.index} (saves {saved}{random})"


# The functions.


def _variables(schedule: Schedule, graph: fx.Graph) -> dict[fx.Node, str]:
    """A variable for each node: its name, made different from every op and object."""
    taken = _RESERVED | set(names(schedule)) | set(keyword.kwlist) | set(dir(builtins)) | {"_"}
    node_names = {node.name for node in graph.nodes}
    variables = {}
    for node in graph.nodes:
        name = node.name
        while name in taken or (name != node.name and name in node_names):
            name += "_"
        variables[node] = name
    return variables


def _positions(graph: fx.Graph) -> dict[fx.Node, int]:
    return {node: i for i, node in enumerate(graph.nodes)}


def _whole_tuples(graph: fx.Graph) -> list[fx.Node]:
    """Ops that are taken apart and named as a whole too, as in `after=(forward_3,)`.

    Their tuple would keep every item alive, so it is deleted behind its last use.
    """
    tuples = ops.nodes_that(graph, lambda op: op.count)
    return [n for n in tuples if any(ops.items(n)) and _is_named(n)]


def _is_named(node: fx.Node) -> bool:
    taken = {item for _, item in ops.items(node)}
    return any(user not in taken for user in node.users)


def _unpacking(graph: fx.Graph, variables: Mapping[fx.Node, str]) -> Iterator[str]:
    placeholders = graph.find_nodes(op="placeholder")
    shapes = [f"{variables[n]} {_shapes(n.meta.get('value'))}".rstrip() for n in placeholders]
    if placeholders:
        glued = "; ".join(shape.replace(" ", "\0") for shape in shapes)
        yield from (f"# {line.replace(chr(0), ' ')}" for line in textwrap.wrap(glued, _WIDTH - 2))
        yield _targets([variables[node] for node in placeholders]) + " = inputs"
    yield "inputs.clear()"


def _call(node: fx.Node, variables: Mapping[fx.Node, str]) -> Iterator[_Line]:
    op = ops.op_of(node)
    assert op is not None
    if op.frees is not None and op.waits:
        after = _text(node.kwargs["after"], variables).replace(",)", ")")
        yield _Line(f"wait{after}", op.stream.value, "WAIT")
        yield from _del([node], variables)
        return
    args = [_text(arg, variables) for arg in node.args]
    args += [f"{key}={_text(arg, variables)}" for key, arg in node.kwargs.items() if arg != ()]
    text = f"{op.name}({', '.join(args)})"
    taken = dict(ops.items(node))
    dropped = False
    if taken:
        declared = 0 if op.count is None else op.count(node.args)
        count = max(declared, max(taken) + 1)
        targets = [variables[taken[i]] if i in taken else "_" for i in range(count)]
        text = f"{_targets(targets)} = {text}"
        dropped = "_" in targets
    if _is_named(node):
        text = f"{variables[node]} = {text}"
    yield _Line(text, op.stream.value, ops.label(node), _detail(node))
    if op.frees is not None:
        yield from _del([node], variables)
    if dropped:
        yield _Line("del _", op.stream.value)


def _frees_at_once(node: fx.Node) -> bool:
    """Does the node free a value without waiting? Such neighbours share a `del`."""
    op = ops.effects(node)
    return op.frees is not None and op.waits and not node.kwargs.get("after")


def _del(nodes: Sequence[fx.Node], variables: Mapping[fx.Node, str]) -> Iterator[_Line]:
    """`del` of what the nodes free; whoever reads it on another stream was waited for."""
    values = [value for node in nodes for value in node.all_input_nodes if value in node.args]
    size = sum(tensors_bytes(value.meta.get("value")) for value in values)
    text = _targets([variables[value] for value in values]).removesuffix(",")
    yield _Line(f"del {text}", Stream.COMPUTE.value, "FREE", format_bytes(size))


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


def _bare(text: str) -> str:
    """A returned pair without its outer parentheses, unless it is too long for a line."""
    pair = text.startswith("((") and len("    return ") + len(text[1:-1]) <= _WIDTH
    return text[1:-1] if pair else text


def _layout(lines: Iterable[_Line]) -> Iterator[str]:
    """Indent, wrap long lines, and put the comments into columns."""
    wrapped = [(_wrap(line.code), line) for line in lines]
    commented = [(text[0], line) for text, line in wrapped if line.stream]
    column = max((len(code) for code, _ in commented), default=0)
    label_width = max((len(line.label) for _, line in commented), default=0)
    for text, line in wrapped:
        comment = f"# {line.stream:<7}  {line.label:<{label_width}}  {line.detail}".rstrip()
        comment = printable(comment)
        yield f"{text[0]:<{column}}  {comment}" if line.stream else text[0]
        yield from text[1:]


def _wrap(text: str) -> list[str]:
    """Break at commas only; assignments are long because of a parenthesis that goes on."""
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
    """Bytes of what is a bucket's, shapes of other values."""
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
    """ "bf16[16, 1024], f32[]"; of more than three the count and bytes."""
    metas = list(_leaves(value))
    shown = ", ".join(str(meta) for meta in metas[:_SHAPES])
    if len(metas) <= _SHAPES:
        return shown
    return f"{shown}, ... {len(metas)} tensors, {format_bytes(tensors_bytes(value))}"


def _leaves(value: Any) -> Iterator[TensorMeta]:
    if isinstance(value, TensorMeta):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _leaves(item)
