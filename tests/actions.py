"""Schedules from their printed actions and back: strings in, strings out, for the tests of passes.

    parse("0F 1F | 1B 0RECOMPUTE 0B")   a schedule that prints so; "|" parts its graphs
    text(schedule)                      what it prints
    waits(graph), frees(graph)          with what each action waits for; with where values die

Stages are stubs that compute nothing: each takes the output of the one before, reads the bucket of
its own number unless `reads` says otherwise, and saves one tensor. Values have the names that the
passes give them: y1_0 and the saved s1_0 of 1F, d1_0 (for y0_0) and g1_1 (for bucket 1) of 1B.
"""

from __future__ import annotations

import operator
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import fx

from megacompile.ir import ops
from megacompile.ir.buckets import Bucket, Param, Slot
from megacompile.ir.schedule import Schedule
from megacompile.ir.stages import ArgRef, Code, ParamRef, SavedRef, Stage, Template
from megacompile.ir.tensors import TensorMeta
from megacompile.ir.values import producer

ACTIVATION = TensorMeta((4, 8), torch.float32, (8, 1), requires_grad=True)
WEIGHT = TensorMeta((8, 8), torch.float32, (8, 1), requires_grad=True)

_ALONE = {"BEGIN": "start", "DRAIN": "drained"}  # the names of their nodes
_COMPUTES = {"F": "forward", "B": "backward", "RNG": "save_rng"}
_QUIET = (ops.free, ops.defer_free, ops.alloc_grad, ops.alloc_state)
_TOKEN = re.compile(r"(?P<label>[\d.]*)(?P<suffix>[A-Z_]+)(?:@(?P<slot>\?|\d+))?")


@dataclass(frozen=True, kw_only=True)
class Stubs:
    """What is special about the stages of a schedule."""

    reads: Mapping[int, str] = field(default_factory=dict)  # stage -> labels of its buckets: "2 0"
    blind: Collection[int] = ()  # stages whose recompute and backward read no parameter
    unsaved: Collection[int] = ()  # stages that save nothing
    saved: int = 1  # tensors that the others save
    random: Collection[int] = ()  # stages that draw random numbers
    frozen: Collection[int] = ()  # stages without a backward
    changes: Collection[int] = ()  # stages that change an input of their own in place
    ranks: int = 1  # that share each bucket
    replicas: int = 1  # that have the same part of it
    sizes: Mapping[str, int] = field(default_factory=dict)  # bucket -> bytes, else those of WEIGHT
    dtype: torch.dtype = WEIGHT.dtype  # of parameters


def parse(line: str, **stubs: Any) -> Schedule:
    """The schedule that prints as `line`; a compute gets the latest prefetch of each bucket."""
    forward_line, separator, backward_line = line.partition("|")
    stages = _stages(forward_line, Stubs(**stubs))
    again = set(re.findall(r"(\d+)RECOMPUTE", backward_line))
    kept = {i for i in re.findall(r"(\d+)B\b", backward_line) if i not in again}
    forward = _Reader(stages, kept=kept)
    for token in forward_line.split():
        forward.read(token)
    saved_values = forward.saved_values if separator else []
    forward.graph.output(((forward.last,), tuple(saved_values)))
    backward = _Reader(stages, kept=kept)
    if separator:
        backward.start(forward, needed=[*again, *kept])
        for token in backward_line.split():
            backward.read(token)
        backward.graph.output(((backward.last,), (), ()))
    return Schedule(
        name="model",
        forward=forward.graph,
        backward=backward.graph if separator else None,
        stages=stages,
        saved_values=tuple(node.name for node in saved_values),
        tangents=(0,),
        gradients=("x",) if separator else (),
    )


def waits(graph: fx.Graph) -> str:
    """The actions, each with its `after=` edges: "2PREFETCH@0(after=0F)"."""
    shown = [n for n in ops.nodes_of(graph) if n.target not in _QUIET]
    return " ".join(ops.label(n) + _after(n) for n in shown)


def frees(graph: fx.Graph) -> str:
    """The actions and where each value dies: "3F -y2_0"; deferred, "~new2(after=...)"."""
    words = []
    for node in ops.nodes_of(graph):
        if node.target is ops.free:
            words.append(f"-{ops.arguments(node)[0].name}{_after(node)}")
        elif node.target is ops.defer_free:
            words.append(f"~{ops.arguments(node)[0].name}{_after(node)}")
        elif node.target is not ops.begin:
            words.append(ops.label(node))
    return " ".join(words)


def apply(function: Callable[[Schedule], Schedule], schedule: Schedule) -> Schedule:
    """`function(schedule)`, having checked that its input is as it was."""
    before = _everything(schedule)
    after = function(schedule)
    assert _everything(schedule) == before, "a pass changed its input"
    return after


def _after(node: fx.Node) -> str:
    nodes: Any = node.kwargs.get("after", ())
    labels = ", ".join(ops.label(producer(n)) for n in nodes)
    return f"(after={labels})" if labels else ""


def _everything(schedule: Schedule) -> list[object]:
    graphs = [
        (n.name, n.op, n.target, *(repr(x) for x in (n.args, n.kwargs, n.meta)))
        for graph in schedule.graphs.values()
        for n in graph.nodes
    ]
    names = {field.name for field in fields(schedule)} - {"forward", "backward", "update"}
    return [graphs, {name: getattr(schedule, name) for name in names}]


def _stages(line: str, stubs: Stubs) -> tuple[Stage, ...]:
    count = 1 + max(int(i) for i in re.findall(r"(\d+)F\b", line))
    labels = {i: stubs.reads.get(i, str(i)).split() for i in range(count)}
    buckets: dict[str, Bucket] = {}
    for name in [name for i in range(count) for name in labels[i]]:
        param = Param("weight", WEIGHT.shape, WEIGHT.stride, stubs.dtype, 0)
        size = stubs.sizes.get(name, param.numel * stubs.dtype.itemsize)
        buckets.setdefault(
            name,
            Bucket(
                *(len(buckets), f"unit {name}", (param,), size, name, stubs.ranks),
                replicas=stubs.replicas,
            ),
        )
    stages = []
    for i in range(count):
        later = {name for j in range(i + 1, count) for name in labels[j]}
        carried = [b for b, name in enumerate(labels[i]) if name in later]
        template = _template(i, len(labels[i]), carried, stubs)
        stages.append(stage_of(i, f"unit {i}", [buckets[name] for name in labels[i]], template))
    return tuple(stages)


def stage_of(index: int, name: str, buckets: Sequence[Bucket], template: Template) -> Stage:
    """A stage whose inputs are a parameter of each bucket, and then activations."""
    args = len(template.primals) - len(buckets)
    return Stage(
        index=index,
        name=name,
        module=fx.GraphModule(torch.nn.Module(), fx.Graph()),
        buckets=tuple(buckets),
        primals=(*(ParamRef(b, 0) for b in range(len(buckets))), *map(ArgRef, range(args))),
        metas=template.primals,
        outputs=template.outputs,
        mutated=template.mutated,
        template=template,
    )


def _template(index: int, params: int, carried: Sequence[int], stubs: Stubs) -> Template:
    saved = () if index in stubs.unsaved else (ACTIVATION,) * stubs.saved
    read = () if index in stubs.blind else tuple(range(params))
    changes = index in stubs.changes
    primals = (*[WEIGHT] * params, *[ACTIVATION] * (1 + changes))
    stub = fx.GraphModule(torch.nn.Module(), fx.Graph())
    return Template(
        index=index,
        primals=primals,
        outputs=(ACTIVATION,),
        mutated=(params + 1,) if changes else (),
        saved=saved,
        tangents=(0,),
        partial_gradients=tuple(carried),
        backward_inputs=(*read, *(SavedRef(i) for i in range(len(saved)))),
        gradients=() if index in stubs.frozen else tuple(range(params + 1)),
        tangent_metas=(ACTIVATION, *[WEIGHT] * len(carried)),
        gradient_metas=primals[: params + 1],
        recompute_primals=(*read, *range(params, params + 1 + changes)),
        random=index in stubs.random,
        graphs={} if index in stubs.frozen else {Code.BACKWARD: stub},
    )


class _Reader:
    """Writes one graph, an action at a time."""

    def __init__(self, stages: Sequence[Stage], *, kept: Collection[str]) -> None:
        self.graph = fx.Graph()
        self.stages = stages
        self.kept = kept  # the numbers of the stages that are not recomputed
        self.buckets = {b.label: b for stage in stages for b in stage.buckets}
        self.args: dict[str, fx.Node] = {}  # stage -> what its forward reads
        self.saved: dict[str, list[fx.Node]] = defaultdict(list)
        self.rng: dict[str, fx.Node] = {}
        self.weights: dict[str, fx.Node] = {}
        self.groups: dict[str, fx.Node] = {}  # bucket -> its gradients so far
        self.last: fx.Node | None = None  # the activation or gradient that the next compute takes

    @property
    def saved_values(self) -> list[fx.Node]:
        """What a forward hands to the backward."""
        saved = [node for nodes in self.saved.values() for node in nodes]
        return [*saved, *self.args.values(), *self.rng.values()]

    def start(self, forward: _Reader, needed: Collection[str]) -> None:
        for i in needed:
            self.saved[i] = [self._placeholder(node.name) for node in forward.saved[i]]
            if i not in self.kept:
                self.args[i] = self._placeholder(forward.args[i].name)
                if i in forward.rng:
                    self.rng[i] = self._placeholder(forward.rng[i].name)
        self.last = self._placeholder("t0")
        self.last.meta["tangent"] = 0

    def read(self, token: str) -> None:
        match = _TOKEN.fullmatch(token)
        assert match, f"unknown action {token!r}"
        label, suffix, slot = match["label"], match["suffix"], match["slot"]
        if suffix == "PREFETCH":
            self._prefetch(label, slot)
        elif suffix in _ALONE:
            ops.call(self.graph, getattr(ops, suffix.lower()), name=_ALONE[suffix])
        else:
            getattr(self, f"_{_COMPUTES.get(suffix, suffix.lower())}")(label)

    def _prefetch(self, label: str, slot: str | None) -> None:
        bucket = self.buckets[label]
        place = Slot(int(slot), bucket.size_bytes) if slot and slot != "?" else None
        name = f"w{_name(label)}"
        self.weights[label] = ops.call(self.graph, ops.prefetch, bucket, place, name=name, after=())

    def _save_rng(self, label: str) -> None:
        stage = self.stages[int(label)]
        self.rng[label] = ops.call(self.graph, ops.save_rng, stage, name=f"rng{label}")

    def _forward(self, label: str) -> None:
        self.args[label] = self.last or self._placeholder("x")
        stage = self.stages[int(label)]
        saving = label in self.kept
        states = [self._placeholder(f"state_{label}")] if stage.mutated else []
        given = (self._weights(stage), (self.args[label], *states), saving)
        results = (ACTIVATION,) * stage.result_count
        metas = (*results, *stage.traced.saved) if saving else results
        call = self._call(ops.forward, stage, *given, name=f"f{label}", metas=metas)
        self.last = self._item(call, 0, f"y{label}_0")
        for state in states:
            ops.call(self.graph, ops.assign, state, self._item(call, 1, f"y{label}_1"))
        for k in range(len(metas) - len(results)):
            self.saved[label].append(self._item(call, len(results) + k, f"s{label}_{k}"))

    def _recompute(self, label: str) -> None:
        stage = self.stages[int(label)]
        given = (self._weights(stage), (self.args[label],), self.rng.get(label))
        metas = stage.traced.saved
        call = self._call(ops.recompute, stage, *given, name=f"rc{label}", metas=metas)
        self.saved[label] = [self._item(call, k, f"s{label}_{k}_again") for k in range(len(metas))]

    def _backward(self, label: str) -> None:
        stage = self.stages[int(label)]
        partial_gradients = [
            self.groups[b.label] for b in stage.buckets_read(stage.traced.partial_gradients)
        ]
        given = (self._weights(stage), (None,), tuple(self.saved[label]), (self.last,))
        metas = (ACTIVATION, *[(WEIGHT,)] * len(stage.buckets))
        call = self._call(
            ops.backward, stage, *given, tuple(partial_gradients), name=f"b{label}", metas=metas
        )
        self.last = self._item(call, 0, f"d{label}_0")
        for k, bucket in enumerate(stage.buckets, start=1):
            name = f"g{_name(bucket.label)}_{label}"
            self.groups[bucket.label] = self._item(call, k, name)

    def _weights(self, stage: Stage) -> tuple[fx.Node | None, ...]:
        return tuple(self.weights.get(b.label) for b in stage.buckets) if self.weights else ()

    def _call(
        self, op: Callable[..., Any], *args: Any, name: str, metas: tuple[object, ...]
    ) -> fx.Node:
        node = ops.call(self.graph, op, *args, name=name)
        node.meta["value"] = metas
        return node

    def _item(self, call: fx.Node, index: int, name: str) -> fx.Node:
        node = self.graph.create_node("call_function", operator.getitem, (call, index), name=name)
        node.meta["value"] = call.meta["value"][index]
        return node

    def _placeholder(self, name: str) -> fx.Node:
        present = [n for n in self.graph.find_nodes(op="placeholder") if n.name == name]
        node: fx.Node = present[0] if present else self.graph.placeholder(name)
        node.meta["value"] = ACTIVATION
        return node


def _name(label: str) -> str:
    return label.replace(".", "_")
