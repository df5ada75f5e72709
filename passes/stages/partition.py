"""Cut a captured graph into stages and write the forward schedule that runs them one by one.

    before: the captured torch-level graph          after: 0F 1F 2F 3F

A stage is stateless: parameters, buffers and activations are all inputs. An in-place change becomes
a new value that later stages read; a changed model input (a BatchNorm statistic) is written back
with `assign`. Grad mode, autocast regions and kernel choices (`sdpa_kernel`) that span stages are
entered again in each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import fx

from megacompile import compat
from megacompile.errors import UnsupportedGraphError
from megacompile.ir import ops
from megacompile.ir.buckets import Bucket, Unit
from megacompile.ir.capture import (
    Capture,
    ConstantInput,
    InputView,
    ParamInput,
)
from megacompile.ir.plan import Plan
from megacompile.ir.schedule import Schedule
from megacompile.ir.stages import ArgRef, ParamRef, Stage
from megacompile.ir.tensors import Meta, Number, TensorMeta, symbols_in
from megacompile.ir.values import input_of
from megacompile.passes.capture.propagate import Interpreter, Values, number_of
from megacompile.passes.edit import add_item, written
from megacompile.passes.stages.segments import Segment, compute_nodes, cut, is_autocast


def partition(
    capture: Capture, *, values: Values, units: Sequence[Unit], whole: bool = False
) -> Schedule:
    """The schedule with only stages: no weights, no backward.

    Args:
        values: of the captured graph.
        whole: one stage for the whole graph.

    Raises:
        UnsupportedGraphError: the graph changes a parameter in place, returns one, or has an
            untraceable operator.
    """
    nodes = compute_nodes(capture, values)
    segments = cut(capture, nodes, values, units)
    if whole and segments:
        segments = [Segment(0, len(nodes), None)]
    builder = _Builder(capture, values, nodes, segments, units)
    return builder.schedule([builder.part(i) for i in range(len(segments))])


# A stage, and the captured nodes of its args, its outputs and its mutated args.
_Part = tuple[Stage, list[fx.Node], list[fx.Node], list[fx.Node]]


class _Region(NamedTuple):
    """The state before a position of the node list."""

    grad: bool
    autocast: tuple[fx.Node, ...]  # the calls that opened regions
    kernels: tuple[fx.Node, ...]  # the last calls that chose kernels


@dataclass
class _Builder:
    capture: Capture
    values: Values
    nodes: list[fx.Node]
    segments: list[Segment]
    units: Sequence[Unit]

    def __post_init__(self) -> None:
        self.position = {node: p for p, node in enumerate(self.nodes)}
        self.inputs = self.capture.bound
        items = self.inputs.items()
        self.params = {n: item for n, item in items if isinstance(item, ParamInput)}
        self.returned = ops.returned(self.capture.module.graph)
        self._symbols = self.capture.symbols
        self.regions = list(_regions(self.capture, self.nodes))
        self.views = views_of_inputs(self.capture, self.values)
        held = {key: item for n, item in self.params.items() for key in self.values.storages[n]}
        for node in self.nodes:
            for key in self.values.mutates[node] & held.keys():
                name = held[key].info.name
                raise UnsupportedGraphError(f"parameter {name!r} is changed in place by {node}")

    def part(self, index: int) -> _Part:
        segment = self.segments[index]
        body = self.nodes[segment.start : segment.stop]
        found = dict.fromkeys(source for node in body for source in node.all_input_nodes)
        inside = set(body)
        outside = [n for n in found if n not in inside and not self.values.is_known(n)]
        given = [n for n in outside if n.op != "get_attr" and not is_autocast(n)]
        params = [n for n in given if n in self.params]  # in order of use
        args = [n for n in given if n not in self.params]
        outputs = [
            node
            for node in body
            if self.values.is_tensor(node)
            and any(self.position.get(user, math.inf) >= segment.stop for user in node.users)
        ]
        for node in self.values.wrappers.intersection(outputs):
            raise UnsupportedGraphError(f"{node} is quantized, and more than one layer uses it")
        changed_keys = {key for node in body for key in self.values.mutates[node]}
        changed = [n for n in args if self.values.storages[n] & changed_keys]
        args += self._numbers(body, [*params, *args])
        buckets = tuple(dict.fromkeys(self.params[n].bucket for n in params))
        items = {n: (buckets.index(self.params[n].bucket), self.params[n]) for n in params}
        params.sort(key=lambda n: (items[n][0], items[n][1].info.offset_bytes))
        stage = Stage(
            index=index,
            name=(
                "+".join(bucket.name for bucket in buckets) or self.capture.name
                if segment.unit is None
                else self.units[segment.unit].bucket.name
            ),
            module=self._module(segment, [*params, *args], outputs),
            buckets=buckets,
            primals=(
                *(ParamRef(items[n][0], items[n][1].param) for n in params),
                *map(ArgRef, range(len(args))),
            ),
            metas=tuple(self._input_meta(n, segment.start) for n in [*params, *args]),
            outputs=tuple(self._meta(n, segment.stop) for n in outputs),
            mutated=tuple(len(params) + args.index(n) for n in changed),
        )
        return stage, args, outputs, changed

    def _numbers(self, body: Sequence[fx.Node], inputs: Sequence[fx.Node]) -> list[fx.Node]:
        """The number inputs in a segment's expressions, and in those of numbers that it reads."""
        if self.values.symbols is None:
            return []
        read = [source for node in body for source in node.all_input_nodes]
        used = symbols_in([self.values.of.get(node) for node in (*body, *inputs, *read)])
        return [node for symbol, node in self._symbols.items() if symbol in used]

    def _meta(self, node: fx.Node, at: int) -> TensorMeta:
        """The meta of a value before position `at` of the node list."""
        meta = self.values.meta(node)
        change = self.values.requires_grad_after.get(node)
        changed = change is not None and self.position[change] < at
        return replace(meta, requires_grad=True) if changed else meta

    def _input_meta(self, node: fx.Node, at: int) -> Meta:
        item = self.inputs.get(node)
        return item if isinstance(item, Number) else self._meta(node, at)

    def _module(
        self, segment: Segment, inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]
    ) -> fx.GraphModule:
        """The torch-level code of a segment, with every tensor from outside as a placeholder."""
        graph = fx.Graph()
        env: dict[fx.Node, Any] = {n: graph.placeholder(f"p{i}") for i, n in enumerate(inputs)}
        numbers = {symbol: env[node] for symbol, node in self._symbols.items() if node in env}

        def value(node: fx.Node) -> Any:
            if node not in env:
                if node.op == "get_attr":
                    env[node] = graph.get_attr(str(node.target))
                elif self.values.is_number(node):
                    env[node] = number(node)
                else:
                    return self.values.of[node]
            return env[node]

        def number(node: fx.Node) -> Any:
            """A number from another segment; a float repeats its operations, to round alike."""
            found = self.values.of[node]
            if isinstance(found, Number) and not found.expression.is_integer:
                return graph.node_copy(node, value)
            return written(graph, found, numbers)

        default = self.capture.ambient.grad_enabled
        first, last = self.regions[segment.start], self.regions[segment.stop]
        for enter in first.autocast:
            env[enter] = graph.node_copy(enter)
        if first.grad != default:
            graph.call_function(compat.SET_GRAD_ENABLED, (first.grad,))
        for choice in first.kernels:  # undone at the end of the trace
            _copied(graph, choice)
        for node in self.nodes[segment.start : segment.stop]:
            if node in env:  # an autocast region entered again
                continue
            if node.op == "call_method" and self.values.is_constant(node):
                if not isinstance(fx.map_arg(node.args[0], value), fx.Node):
                    continue  # FX would print `2.bit_length()`, which is not valid Python
            args, kwargs = fx.map_arg((node.args, node.kwargs), value)
            made = env[node] = graph.create_node(node.op, node.target)
            compat.set_args(made, args)  # `create_node` would search each for symbols
            if kwargs:
                compat.set_kwargs(made, kwargs)
        result = tuple(env[node] for node in outputs)
        if last.grad != default:
            graph.call_function(compat.SET_GRAD_ENABLED, (default,))
        for enter in reversed(last.autocast):
            graph.call_function(compat.EXIT_AUTOCAST, (env[enter],))
        graph.output(result)
        return compat.graph_module(self.capture.module, graph)

    def schedule(self, parts: Sequence[_Part]) -> Schedule:
        graph = fx.Graph()
        env: dict[fx.Node, fx.Node] = {}
        last_change = {n: i for i, part in enumerate(parts) for n in part[-1] if n in self.inputs}
        stages = _label_buckets([stage for stage, *_ in parts])
        for i, (node, item) in enumerate(self.inputs.items()):
            if not isinstance(item, (ParamInput, ConstantInput)):
                env[node] = input_of(graph, i, f"x{i}")
                env[node].meta["value"] = self._input_meta(node, 0)
        sources = dict(env)
        for stage, (_, given, results, changed) in zip(stages, parts, strict=True):
            args = tuple(env[n] for n in given)
            call = ops.call(graph, ops.forward, stage, (), args, False, name=f"f{stage.index}")
            stop = self.segments[stage.index].stop
            call.meta["value"] = tuple(self._meta(n, stop) for n in [*results, *changed])
            for k, node in enumerate([*results, *changed]):
                env[node] = add_item(graph, call, k, f"y{stage.index}_{k}")
            for node in changed:
                if last_change.get(node) == stage.index:
                    # batch norm's kernel writes statistics without a version bump
                    targets = {change.target for change in self._changes(node)}
                    counted = () if targets - {*compat.COUNT_NO_VERSION} else (False,)
                    ops.call(graph, ops.assign, sources[node], env[node], *counted, after=())
        recorded = [node for node in last_change if self._is_recorded(node)]
        new_values = [env[node] for node in recorded]
        env |= {node: sources[node] for node in recorded}  # such an output is the input itself
        outputs: Any = fx.map_arg(self.returned, lambda n: self._result(n, env, sources))
        graph.output(((*outputs, *new_values), ()))
        return Schedule(
            self.capture.name,
            graph,
            None,
            tuple(stages),
            symbols=self.values.symbols,
            plan=Plan(reasons=tuple(self.values.reasons)),
            recorded=tuple(sources[node].name for node in recorded),
            views=tuple(self._views()),
            input_views=tuple(
                (k, self.views[node][1])
                for k, node in enumerate(self.returned)
                if node in self.views
            ),
        )

    def _views(self) -> Iterator[tuple[int, str]]:
        """The outputs that are views of trained parameters, and the parameters' names."""
        trained = {n: item.info.name for n, item in self.params.items() if item.requires_grad}
        named = {key: trained[n] for n in trained for key in self.values.storages[n]}
        for k, node in enumerate(self.returned):
            if isinstance(node, fx.Node):
                yield from ((k, named[key]) for key in self.values.storages[node] & named.keys())

    def _changes(self, node: fx.Node) -> list[fx.Node]:
        keys = self.values.storages[node]
        return [n for n in self.nodes if self.values.mutates[n] & keys]

    def _is_recorded(self, node: fx.Node) -> bool:
        """True if autograd records an in-place change of an input."""
        if not self._meta(node, len(self.nodes)).requires_grad:
            return False
        changes = self._changes(node)
        grad = self.capture.ambient.grad_enabled
        return grad and any(self.regions[self.position[n]].grad for n in changes)

    def _result(
        self, node: fx.Node, env: dict[fx.Node, fx.Node], sources: dict[fx.Node, fx.Node]
    ) -> Any:
        if self.values.is_number(node):
            return self.values.of[node]
        origin = self.values.origin(node)
        if origin in sources:  # the input itself, even after an in-place change
            unseen = not self._meta(node, len(self.nodes)).requires_grad
            if unseen or env[origin] is sources[origin]:
                return sources[origin]
        if node in self.views:  # the call recreates the view
            return sources[self.views[node][0]]
        return env[node] if node in env else self.values.of[node]


def _label_buckets(stages: Sequence[Stage]) -> list[Stage]:
    """Give each bucket the index of the first stage that reads it."""
    labelled: dict[int, Bucket] = {}
    for stage in stages:
        fresh = [b for b in stage.buckets if b.key not in labelled]
        for k, bucket in enumerate(fresh):
            suffix = f".{k}" if k else ""
            labelled[bucket.key] = replace(bucket, label=f"{stage.index}{suffix}")
    return [
        replace(stage, buckets=tuple(labelled[b.key] for b in stage.buckets)) for stage in stages
    ]


def _regions(capture: Capture, nodes: Sequence[fx.Node]) -> Iterator[_Region]:
    grad = capture.ambient.grad_enabled
    opened: list[fx.Node] = []
    kernels: dict[Any, fx.Node] = {}
    yield _Region(grad, (), ())
    for node in nodes:
        name = getattr(node.target, "__name__", "")
        if name == "_set_grad_enabled":
            grad = bool(node.args[0])
        elif is_autocast(node):
            opened.append(node)
        elif name == "_exit_autocast":
            opened.remove(node.args[0])  # type: ignore[arg-type]
        elif node.target in compat.CHOOSES_KERNELS:
            kernels[node.target] = node
        yield _Region(grad, tuple(opened), tuple(kernels.values()))


def _copied(graph: fx.Graph, node: fx.Node) -> fx.Node:
    return graph.node_copy(node, lambda source: _copied(graph, source))


def views_of_inputs(capture: Capture, values: Values) -> dict[fx.Node, tuple[fx.Node, InputView]]:
    """Output node -> the viewed input and the view's layout.

        before: v = scale[:2]; scale.mul_(0.9); return v
        after:  0F ASSIGN, and the output is `scale`; the call recreates the view

    A stage's code returns new values of mutated inputs, and its views are views of these. The user
    would get copies, which do not follow the input. So if an input is changed, or no gradient flows
    through the view, the output is a view of the input's memory.
    """
    tensors = [node for node, item in capture.bound.items() if isinstance(item, TensorMeta)]
    holders = {key: node for node in tensors for key in values.storages[node]}
    changed = frozenset().union(*values.mutates.values())
    wanted: dict[fx.Node, fx.Node] = {}
    for node in ops.returned(capture.module.graph):
        if not isinstance(node, fx.Node) or not values.is_tensor(node):
            continue
        keys = values.storages[node] & holders.keys()
        if values.origin(node) in tensors or len(keys) != 1:
            continue
        if values.of[node].requires_grad and changed.isdisjoint(keys):
            continue  # its gradient is added to the input's, in graph order
        wanted[node] = holders[next(iter(keys))]
    return dict(_laid_out(capture, values, wanted)) if wanted else {}


def _laid_out(
    capture: Capture, values: Values, wanted: dict[fx.Node, fx.Node]
) -> Iterator[tuple[fx.Node, tuple[fx.Node, InputView]]]:
    """The layouts of the views in their inputs' memory. The nodes that create the views run on fake
    tensors, with real in-place changes: functionalization would replace an input whose memory has
    gaps by a new value without gaps."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {n: graph.node_copy(n) for n in capture.bound}

    def copied(node: fx.Node) -> fx.Node:
        node = values.origin(node)
        if node not in env:
            for source in node.all_input_nodes:
                copied(source)
            env[node] = graph.node_copy(node, copied)
        return env[node]

    made = {node: copied(node) for node in wanted}
    graph.output(tuple(made.values()))
    alone = replace(capture, module=compat.graph_module(capture.module, graph))
    interpreter = Interpreter(alone)
    with capture.ambient.apply(), compat.keeping_nesting(), interpreter.fakes, torch.no_grad():
        try:
            interpreter.run(*interpreter.fake_inputs())
        except compat.UNTRACEABLE:
            return  # these outputs stay results of stages
        for node, source in wanted.items():
            value, base = (interpreter.env[n] for n in (made[node], env[source]))
            # sizes, strides and offset describe such a view completely
            plain = value.dtype == base.dtype and not value.is_conj() and not value.is_neg()
            if compat.storage_key(value) == compat.storage_key(base) and plain:
                shape, stride = (
                    tuple(map(number_of, sizes)) for sizes in (value.shape, value.stride())
                )
                offset = number_of(value.storage_offset())
                view = InputView(shape, stride, offset, values.meta(node).requires_grad)
                yield node, (source, view)
