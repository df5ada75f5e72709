"""The values of a schedule's graphs: their producers, memory, readers and lifetimes.

Three users of lifetimes have separate implementations: `passes/schedule/free` chooses where memory
is freed, `verify/memory_checks` proves it from the graph alone, and `cost/memory` replays the frees
of a step, because values also share memory inside stages, which only the stages' code shows.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import sympy
from torch import fx

from megacompile import compat
from megacompile.ir import ops
from megacompile.ir.buckets import Bucket
from megacompile.ir.ops import Value, effects
from megacompile.ir.schedule import Schedule
from megacompile.ir.stages import ArgRef, SavedRef
from megacompile.ir.tensors import TensorMeta

T = TypeVar("T")


def producer(node: fx.Node) -> fx.Node:
    """The op that returns a value: the item of a tuple comes from the op that returns the tuple."""
    while node.op == "call_function" and node.target is operator.getitem:
        source: Any = node.args[0]
        node = source
    return node


def owns(value: fx.Node) -> bool:
    """True if a value is in memory of the compute stream's allocator."""
    op = effects(producer(value))
    return op.owns and (op.count is None or value.target is operator.getitem)


def memory(node: fx.Node) -> fx.Node:
    """The value that owns a node's memory, because some ops change an argument in place and return
    it."""
    seen = {node}  # stops at cycles of values
    while (at := effects(node).fills) is not None:
        source = node.args[at]
        if not isinstance(source, fx.Node) or source in seen:
            break
        seen.add(source)
        node = source
    return node


def sharing(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """The nodes that alias the same memory, in program order, by the value that allocated it."""
    found: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        found[memory(node)].append(node)
    return found


def outliving(graph: fx.Graph) -> set[fx.Node]:
    """The values whose memory outlives a graph, because it returns them or an alias."""
    returned = set(graph.output_node().all_input_nodes)
    filled = {memory(node) for node in returned if effects(node).fills is not None}
    return returned.union(node for node in graph.nodes if filled and memory(node) in filled)


def endings(steps: Sequence[Collection[T]]) -> list[set[T]]:
    """For each step, those of its values that no later step uses or defines."""
    last = {value: i for i, used in enumerate(steps) for value in used}
    return [{value for value in used if last[value] == i} for i, used in enumerate(steps)]


def borrowed(schedule: Schedule) -> frozenset[str]:
    """The names of the forward's values that autograd would not keep for a backward: stage inputs
    and saved tensors from which this schedule's backward recomputes what autograd would keep."""
    found: set[str] = set()
    kept: set[str] = set()
    for call in ops.nodes_of(schedule.forward, ops.forward):
        stage, _, args, _ = ops.arguments(call)
        for i, ref in enumerate(stage.primals):
            if isinstance(ref, ArgRef) and args[ref.index] is not None:
                (kept if i in stage.traced.kept else found).add(args[ref.index].name)
        for k, item in ops.items(call):
            if k >= stage.result_count:
                own = SavedRef(k - stage.result_count) in stage.traced.kept
                (kept if own else found).add(item.name)
    return frozenset(found - kept)


def reads(node: fx.Node) -> list[fx.Node]:
    """The values that a node takes, without those that it only waits for (`after=`)."""
    found: dict[fx.Node, None] = {}
    fx.map_arg(node.args, lambda n: found.setdefault(n))
    return list(found)


def left_on_host(schedule: Schedule) -> list[TensorMeta]:
    """The tensors of fixed size that a forward offloads to the host, all live at once."""
    written = {ops.arguments(node)[1] for node in ops.nodes_of(schedule.forward, ops.write_saved)}
    left = [n for n in ops.nodes_of(schedule.forward, ops.offload_saved) if n not in written]
    metas = [node.meta.get("value") for node in left]
    return [m for m in metas if isinstance(m, TensorMeta) and m.symbolic is None]


def copied_away(forward: fx.Graph) -> dict[str, tuple[Value | None, str]]:
    """The forward's copies on the host or a disk, by name: their kind, and the copied value."""
    found: dict[str, tuple[Value | None, str]] = {}
    for node in ops.nodes_that(forward, lambda op: op.to_backward):  # disk copies after host copies
        value, kind = ops.arguments(node)[1], effects(node).gives
        found[node.name] = kind, found.get(value.name, (kind, value.name))[1]
    return found


def elsewhere(forward: fx.Graph) -> dict[str, str]:
    """The saved values offloaded to the host or a disk, by the name of the copy."""
    return {name: value for name, (_, value) in copied_away(forward).items()}


def fetched_from(copies: Mapping[str, tuple[Value | None, str]], value: fx.Node) -> str:
    """The name of the forward's value that the backward fetches from the host; of any other value,
    its own. The backward has a placeholder of the copy's name in `copied_away`."""
    on_host = taken(value, Value.SAVED_ON_HOST)
    if effects(value).gives is not Value.SAVED or on_host is None:
        return value.name
    on_disk = taken(on_host, Value.SAVED_ON_DISK)
    kind = Value.SAVED_ON_HOST if on_disk is None else Value.SAVED_ON_DISK
    copy = on_disk or on_host
    known, source = copies.get(copy.name, (None, ""))
    return source if copy.op == "placeholder" and known is kind else value.name


def left_of(schedule: Schedule) -> dict[int, tuple[fx.Node, fx.Node]]:
    """Bucket key -> values that the backward leaves for the update, in order: gradients, and
    parameters with states."""
    if schedule.backward is None or not schedule.left:
        return {}
    by_name = {node.name: node for node in schedule.backward.nodes}
    nodes = [by_name[name] for name in schedule.left]
    found = {}
    for gradients, state in zip(nodes[::2], nodes[1::2], strict=True):
        if (bucket := bucket_of(gradients)) is not None:
            found[bucket.key] = gradients, state
    return found


def left_by_backward(schedule: Schedule) -> dict[fx.Node, fx.Node]:
    """The update's placeholders -> the backward's nodes of the same names, which it leaves."""
    if schedule.update is None or schedule.backward is None or not schedule.left:
        return {}
    names = set(schedule.left)
    sources = {node.name: node for node in schedule.backward.nodes if node.name in names}
    inputs = schedule.update.find_nodes(op="placeholder")
    return {node: sources[node.name] for node in inputs if node.name in sources}


def taken(node: fx.Node, kind: Value) -> fx.Node | None:
    """The argument of a node that its op takes as this kind of value."""
    for takes in effects(node).takes:
        if takes.kind is kind and takes.at < len(node.args):
            value = node.args[takes.at]
            return value if isinstance(value, fx.Node) else None
    return None


def groups(call: fx.Node) -> Iterator[tuple[int, Bucket]]:
    """The buckets with gradients from a backward, with their positions in its result."""
    stage: Any = call.args[0]
    return enumerate(stage.gradient_buckets, stage.gradient_places.count(None))


def kind_of(value: fx.Node) -> Value | None:
    """The kind of a value, as its op returns it; of a backward's results, gradients of a bucket."""
    source = producer(value)
    if source is value:
        return effects(value).gives
    return Value.GRADIENTS if bucket_of(value) is not None else Value.RESULTS


def bucket_of(value: fx.Node) -> Bucket | None:
    """The bucket of a value, or None."""
    source = producer(value)
    if source is not value:
        index: Any = value.args[1]
        return dict(groups(source)).get(index) if source.target is ops.backward else None
    subject: Any = source.args[0] if source.args else None
    return subject if isinstance(subject, Bucket) else None


def label(value: fx.Node) -> str:
    """The printed name of the op that returns a value."""
    return ops.label(producer(value))


def named(value: fx.Node) -> str:
    """A value and its producer: "y3_0 of 3F"; only the name for an input of the graph."""
    return value.name if value.op == "placeholder" else f"{value.name} of {label(value)}"


def bytes_of(schedule: Schedule, symbols: Sequence[sympy.Symbol]) -> Callable[..., int]:
    """Bytes of the stages' outputs and saved tensors, as a function of the symbols' values: a
    measure to compare two sets of sizes, not the memory of a step."""
    terms: Counter[Any] = Counter()
    for stage in schedule.stages:
        for meta in (*stage.outputs, *stage.traced.saved):
            if isinstance(meta, TensorMeta) and meta.symbolic is not None:
                terms[sympy.prod(meta.symbolic.shape)] += meta.dtype.itemsize
    total = sympy.Add(*(size * count for size, count in terms.items()))
    function = compat.as_function((total,), symbols)
    return lambda *values: int(function(*values)[0])


# Inputs and outputs of graphs, by explicit ids: a forward's placeholder has the position of the
# captured graph's input, and a backward's tangent the position of its output. Tokens are in
# `megacompile.ir.edges`. Other placeholders are values of the previous graph with the same name.


def input_of(graph: fx.Graph, position: int, name: str) -> fx.Node:
    """A new placeholder for an input of the captured graph."""
    node = graph.placeholder(name)
    node.meta["input"] = position
    return node


def tangent_of(graph: fx.Graph, output: int, name: str) -> fx.Node:
    """A new placeholder for the gradient of an output of the captured graph."""
    node = graph.placeholder(name)
    node.meta["tangent"] = output
    return node


def inputs_of(forward: fx.Graph) -> dict[str, int]:
    """Placeholder name -> position of the captured graph's input."""
    nodes = forward.find_nodes(op="placeholder")
    return {node.name: node.meta["input"] for node in nodes if "input" in node.meta}


def tangents_of(backward: fx.Graph) -> dict[int, str]:
    """The names of the placeholders for outputs' gradients, by the output."""
    nodes = backward.find_nodes(op="placeholder")
    return {node.meta["tangent"]: node.name for node in nodes if "tangent" in node.meta}


def computed_outputs(outputs: Sequence[Any]) -> list[int]:
    """Positions of the outputs that stages compute, each value once."""
    first: dict[fx.Node, int] = {}
    for k, node in enumerate(outputs):
        if isinstance(node, fx.Node) and node.op != "placeholder":
            first.setdefault(node, k)
    return list(first.values())


def expected_tangents(stages: Schedule) -> tuple[int, ...]:
    """The outputs that will get a gradient: only a scalar loss, if there is one; otherwise all that
    can. A guess before the first backward; a different backward corrects it."""
    outputs, _ = ops.returned(stages.forward)
    metas = {k: outputs[k].meta["value"] for k in computed_outputs(outputs)}
    kinds = {k: m.dtype for k, m in metas.items() if m.requires_grad}
    able = [k for k, dtype in kinds.items() if dtype.is_floating_point or dtype.is_complex]
    return tuple([k for k in able if metas[k].shape == ()][:1] or able)
