"""Small correct schedules, written by hand, for the tests of checkers and printers.

No pass makes them, so a fault in a pass cannot hide a fault in a check. Stages are stubs: each
takes the output of the one before and one bucket of its own, and saves two tensors.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from megacompile.ir import ops
from megacompile.ir.buckets import Bucket, Param, Slot
from megacompile.ir.ops import Part
from megacompile.ir.plan import Places, Plan, Updater
from megacompile.ir.schedule import PassRecord, Schedule
from megacompile.ir.stages import SavedRef, Stage, Template
from megacompile.ir.tensors import TensorMeta
from megacompile.ir.tokens import take
from tests.actions import stage_of

ACTIVATION = TensorMeta((4, 8), torch.bfloat16, (8, 1))
WEIGHT = TensorMeta((8, 8), torch.bfloat16, (8, 1))
STATE = TensorMeta((1280,), torch.uint8, (1,))  # two moments and the parameters of a bucket
MOMENTS = TensorMeta((1024,), torch.uint8, (1,))
SAVED = 2  # tensors that a stage saves


@dataclass(frozen=True)
class Spec:
    """What a hand-made schedule has in it."""

    stages: int = 4
    slots: int = 2
    training: bool = True  # False: a forward alone, as under no_grad
    accumulate: bool = False  # gradients are added to those on the host
    shared: bool = False  # the last stage reads the first one's bucket too, like a tied embedding
    reuse: bool = False  # the backward takes what the forward leaves in the slots
    random: frozenset[int] = frozenset()  # stages that draw random numbers
    keep: frozenset[int] = frozenset()  # stages that are not recomputed
    changes: frozenset[int] = frozenset()  # stages that change an input in place, like BatchNorm
    norms: bool = False  # the norms of gradients go to the host with them
    update: bool = False  # the backward updates each bucket instead of offloading its gradients
    masters: bool = False  # updates take the parameters with the states, not from the slots
    offload: frozenset[int] = frozenset()  # stages whose saved values wait on the host
    late: bool = False  # with `shared`, the first stage reads its bucket, which gets no gradient
    device: frozenset[int] = frozenset()  # buckets that step() updates on the device
    resident: frozenset[int] = frozenset()  # buckets that live on the device
    helps: bool = False  # the device helps the host with its updates

    def __str__(self) -> str:
        """The parts that are not the default, for the ids of tests."""
        default = Spec()
        given = {k: v for k, v in vars(self).items() if v != getattr(default, k)}
        texts = {k: sorted(v) if isinstance(v, frozenset) else v for k, v in given.items()}
        return ",".join(f"{name}={text}" for name, text in texts.items()) or "plain"


EVERYTHING = Spec(
    stages=5,
    slots=3,
    accumulate=True,
    shared=True,
    reuse=True,
    random=frozenset({1}),
    keep=frozenset({2}),
    changes=frozenset({1, 3}),
)


def build(spec: Spec) -> Schedule:
    """The schedule of a spec; it has no hazards."""
    stages = _stages(spec)
    forward = _Forward(spec, stages)
    backward = _Backward(spec, stages, forward) if spec.training else None
    size = max(bucket.size_bytes for stage in stages for bucket in stage.buckets)
    steps = backward is not None and not spec.update
    return Schedule(
        name="model",
        forward=forward.graph,
        backward=None if backward is None else backward.graph,
        update=_update(spec, stages, backward) if backward is not None and steps else None,
        left=tuple(node.name for node in backward.left) if backward is not None else (),
        plan=Plan(Places.of(spec.resident).changed(spec.device, updater=Updater.DEVICE)),
        stages=stages,
        saved_values=tuple(node.name for node in forward.saved_values),
        tangents=(0,) if spec.training else (),
        gradients=("x",) if spec.training else (),
        slots=tuple(Slot(i, size) for i in range(spec.slots)),
        reused=tuple((i, ops.arguments(node)[0]) for i, node in forward.weights.held().items()),
        history=(PassRecord("slots", "", "", 0.001, len(forward.graph.nodes)),),
    )


def find(schedule: Schedule, graph: str, label: str, nth: int = 0) -> fx.Node:
    """The nth node of a graph with a printed name; a value goes by its own name."""
    nodes: Sequence[fx.Node] = list(schedule.graphs[graph].nodes)
    return [n for n in nodes if label in (ops.label(n), n.name)][nth]


def _stages(spec: Spec) -> tuple[Stage, ...]:
    params = (Param("weight", WEIGHT.shape, WEIGHT.stride, WEIGHT.dtype, 0),)
    buckets = [
        Bucket(i, f"layers.{i}", params, WEIGHT.size_bytes, str(i)) for i in range(spec.stages)
    ]
    templates: dict[object, Template] = {}
    stages = []
    for i in range(spec.stages):
        read = (buckets[i], buckets[0]) if spec.shared and i == spec.stages - 1 else (buckets[i],)
        first = spec.shared and i == 0
        kind = (
            *(len(read), first and not spec.late, i in spec.changes, i in spec.random),
            first and spec.late,
        )
        if kind not in templates:
            templates[kind] = _template(len(templates), *kind)
        stages.append(stage_of(i, f"layers.{i}", read, templates[kind]))
    return tuple(stages)


def _template(
    index: int, buckets: int, partial_gradients: bool, changes: bool, random: bool, late: bool
) -> Template:
    """Primals: a parameter a bucket, the activation, and the input that is changed in place."""
    args = 2 if changes else 1
    gradients = range(buckets if late else 0, buckets + 1)
    return Template(
        index=index,
        primals=(*[WEIGHT] * buckets, *[ACTIVATION] * args),
        outputs=(ACTIVATION,),
        mutated=(buckets + 1,) if changes else (),
        saved=(ACTIVATION,) * SAVED,
        tangents=(0,),
        partial_gradients=(0,) if partial_gradients else (),
        backward_inputs=(*range(buckets), *(SavedRef(i) for i in range(SAVED))),
        gradients=tuple(gradients),
        tangent_metas=(ACTIVATION,) * (2 if partial_gradients else 1),
        gradient_metas=(*[WEIGHT] * (len(gradients) - 1), ACTIVATION),
        recompute_primals=tuple(range(buckets + args)),
        random=random,
        graphs={},
    )


class _Weights:
    """Prefetches in turn over the slots, as early as their slot allows."""

    def __init__(
        self, graph: fx.Graph, spec: Spec, uses: Sequence[Stage], held: dict[int, fx.Node]
    ) -> None:
        self.graph, self.spec = graph, spec
        buckets = [bucket for stage in uses for bucket in stage.buckets]
        self.wanted = [bucket for bucket in buckets if bucket.key not in spec.resident]
        self.resident = {b.key: b for b in buckets if b.key in spec.resident}
        self.there: dict[int, fx.Node] = {}  # bucket key -> weights that are resident
        self.inherited = {ops.arguments(node)[0].key: node for node in held.values()}
        self.busy: dict[int, fx.Node | None] = {}  # slot -> what fills it, while it is read
        self.free: dict[int, fx.Node] = {}  # slot -> after whom it may be filled
        self.ready: list[fx.Node] = []  # filled and not taken yet
        self.last: dict[int, fx.Node] = {}  # slot -> what filled it last

    def start(self, begin: fx.Node) -> None:
        """Take what is resident and what is held, and fill the other slots."""
        for key, bucket in self.resident.items():
            self.there[key] = ops.call(self.graph, ops.resident, bucket)
        slots = {ops.arguments(node)[1].index for node in self.inherited.values()}
        self.free = {i: begin for i in range(self.spec.slots) if i not in slots}
        for i in slots:
            self.busy[i] = None
        self.fill()

    def fill(self) -> None:
        while self.wanted:
            bucket = self.wanted[0]
            if bucket.key in self.inherited:
                source = self.inherited.pop(bucket.key)
                node = ops.call(self.graph, ops.reuse, bucket, source.args[1])
            elif self.free:
                slot, after = next(iter(self.free.items()))
                del self.free[slot]
                place = Slot(slot, bucket.size_bytes)
                waits = (take(self.graph, bucket, Part.WEIGHTS), after)
                node = ops.call(self.graph, ops.prefetch, bucket, place, after=waits)
                self.last[slot] = node
            else:
                return
            self.wanted.pop(0)
            self.ready.append(node)

    def take(self, buckets: Sequence[Bucket]) -> tuple[fx.Node, ...]:
        return tuple(self.there.get(b.key) or self._next() for b in buckets)

    def _next(self) -> fx.Node:
        assert self.ready, "a stage reads more buckets than there are slots"
        return self.ready.pop(0)

    def give_back(self, weights: Sequence[fx.Node], reader: fx.Node) -> None:
        for node in weights:
            if node.target is ops.resident:
                continue
            self.free[ops.arguments(node)[1].index] = reader
        self.fill()

    def held(self) -> dict[int, fx.Node]:
        """The prefetches whose buckets are still in the slots, by slot."""
        return self.last if self.spec.reuse else {}


class _Forward:
    def __init__(self, spec: Spec, stages: Sequence[Stage]) -> None:
        self.graph = graph = fx.Graph()
        self.spec = spec
        self.saved_values: list[fx.Node] = []
        self.inputs: dict[int, list[fx.Node]] = {}  # of each stage, as its recompute takes them
        self.saved: dict[int, list[fx.Node]] = {}
        self.rng: dict[int, fx.Node] = {}
        self.on_host: dict[fx.Node, fx.Node] = {}  # value -> its offload
        x = _placeholder(graph, "x")
        states = {i: _placeholder(graph, f"state_{i}") for i in sorted(spec.changes)}
        self.weights = _Weights(graph, spec, stages, {})
        self.weights.start(ops.call(graph, ops.begin))
        for stage in stages:
            y = self._stage(stage, x, states.get(stage.index))
            if spec.update and stage.index == len(stages) // 2:
                ops.call(graph, ops.drain)
            snapshots = self.inputs.get(stage.index, [])[1:]
            for value in [*self.saved.get(stage.index - 1, []), x, *snapshots]:
                offload = self.on_host.get(value)
                if offload is not None:
                    ops.call(graph, ops.free, value, after=(offload,))
                elif value is x and x.op != "placeholder" and x not in self.saved_values:
                    ops.call(graph, ops.free, x)
            x = y
        for value in self.saved.get(stages[-1].index, []):
            if value in self.on_host:
                ops.call(graph, ops.free, value, after=(self.on_host[value],))
        graph.output(((x,), tuple(self.saved_values)))

    def _stage(self, stage: Stage, x: fx.Node, state: fx.Node | None) -> fx.Node:
        graph, spec, i = self.graph, self.spec, stage.index
        saving = spec.training and i in spec.keep
        if spec.training and not saving:
            self.inputs[i] = [x] if state is None else [x, ops.call(graph, ops.snapshot, state)]
            self._hand_on(stage, self.inputs[i])
            if stage.traced.random:
                self.rng[i] = ops.call(graph, ops.save_rng, stage)
                self.saved_values.append(self.rng[i])
        weights = self.weights.take(stage.buckets)
        args = (x,) if state is None else (x, state)
        values = _take(graph, ops.forward, (stage, weights, args, saving), f"y{i}")
        self.weights.give_back(weights, values[0])
        if state is not None:
            ops.call(graph, ops.assign, state, values[1])
            ops.call(graph, ops.free, values[1])
        if saving:
            self.saved[i] = values[-SAVED:]
            self._hand_on(stage, self.saved[i])
        return values[0]

    def _hand_on(self, stage: Stage, values: Sequence[fx.Node]) -> None:
        """Make values saved values, as they are or by way of the host."""
        for value in values:
            if stage.index in self.spec.offload and value.op != "placeholder":
                name = f"{value.name}_host"
                copied = ops.call(self.graph, ops.offload_saved, stage, value, name=name)
                copied.meta["value"] = ACTIVATION
                self.on_host[value] = copied
            self.saved_values.append(self.on_host.get(value, value))


class _Backward:
    def __init__(self, spec: Spec, stages: Sequence[Stage], forward: _Forward) -> None:
        self.graph = graph = fx.Graph()
        self.spec, self.forward, self.stages = spec, forward, stages
        self.brought: dict[int, list[fx.Node]] = {}  # stage -> copies on the host, and buffers
        self.values = {n: _placeholder(graph, n.name) for n in forward.saved_values}
        self.carried: dict[int, fx.Node] = {}  # bucket key -> gradients so far
        self.contributors = [bucket.key for stage in stages for bucket in stage.gradient_buckets]
        self.left: list[fx.Node] = []  # gradients and states, for the update
        self.left_states: dict[int, fx.Node] = {}
        self.waiting: list[tuple[Bucket, fx.Node]] = []  # gradients, for a late reader of weights
        self.later: list[tuple[fx.Node, fx.Node]] = []  # values to free, and who reads them
        gradient = _placeholder(graph, "t0")
        gradient.meta["tangent"] = 0
        order = list(reversed(stages))
        begin = ops.call(graph, ops.begin)
        self.weights = _Weights(graph, spec, order, forward.weights.held())
        self.weights.start(begin)
        self._fetch_back(order[0])
        for stage in order:
            gradient = self._stage(stage, gradient)
        self._free_later(ops.defer_free if spec.update else ops.free)
        graph.output(((gradient,), tuple(self.left), tuple(_writers(graph))))

    def _stage(self, stage: Stage, tangent: fx.Node) -> fx.Node:
        graph, i = self.graph, stage.index
        weights = self.weights.take(stage.buckets)
        if i > 0:
            self._fetch_back(self.stages[i - 1])
        buffers = self._fetch(stage) if self.spec.accumulate else {}
        states = self._fetch_states(stage)
        saved = self._saved(stage, weights)
        first = 1 if stage.traced.partial_gradients else 0
        partial_gradients = tuple(self.carried[b.key] for b in stage.buckets[:first])
        args = (None,) * len(stage.traced.primals[len(stage.buckets) :])
        given = (stage, weights, args, tuple(saved), (tangent,), partial_gradients)
        gradient, *groups = _take(graph, ops.backward, given, f"d{i}")
        if not self.spec.update:
            self.weights.give_back(weights, gradient)
        self._free_later()
        for node in (*saved, tangent, *partial_gradients, *self.values_of(i)):
            ops.call(graph, ops.free, node)
        readers = [gradient]
        for bucket, group in self.waiting if i == 0 else []:
            self._offload(bucket, group, after=(gradient,))
        given_weights = dict(zip(stage.buckets, weights, strict=True))
        for bucket, group in zip(stage.gradient_buckets, groups, strict=True):
            self.contributors.remove(bucket.key)
            if bucket.key in self.contributors:
                self.carried[bucket.key] = group
            elif self.spec.update and bucket.key in self.spec.resident:
                self._update_in_place(bucket, self._add(bucket, group, buffers))
            elif self.spec.update:
                total = self._add(bucket, group, buffers)
                given_one, state = given_weights[bucket], states[bucket.key]
                readers.append(self._update(bucket, given_one, total, state))
            elif self.spec.late and bucket.key == 0:
                self.waiting.append((bucket, self._add(bucket, group, buffers)))
            else:
                self._offload(bucket, self._add(bucket, group, buffers))
        if self.spec.update:
            self.weights.give_back(weights, readers[-1])
        return gradient

    def values_of(self, i: int) -> list[fx.Node]:
        """The saved values that nobody takes after the backward of stage i."""
        nodes = [*self.forward.inputs.get(i, []), self.forward.rng.get(i)]
        taken = [self.values[node] for node in nodes if node is not None]
        return [*taken, *self.brought.get(i, [])]

    def _fetch_back(self, stage: Stage) -> None:
        """Bring what a stage takes back from the host."""
        forward, i = self.forward, stage.index
        for value in [*forward.inputs.get(i, []), *forward.saved.get(i, [])]:
            if value not in forward.on_host:
                continue
            on_host = self.values[forward.on_host[value]]
            buffer = ops.call(self.graph, ops.alloc_saved, stage, on_host)
            self.values[value] = ops.call(self.graph, ops.fetch_saved, stage, on_host, buffer)
            for node in (buffer, self.values[value]):
                node.meta["value"] = ACTIVATION
            self.brought.setdefault(i, []).extend([on_host, buffer])

    def _saved(self, stage: Stage, weights: tuple[fx.Node, ...]) -> list[fx.Node]:
        i = stage.index
        if i in self.spec.keep:
            return [self.values[node] for node in self.forward.saved[i]]
        rng = self.forward.rng.get(i)
        state = None if rng is None else self.values[rng]
        args = tuple(self.values[node] for node in self.forward.inputs[i])
        return _take(self.graph, ops.recompute, (stage, weights, args, state), f"s{i}")

    def _fetch(self, stage: Stage) -> dict[int, tuple[fx.Node, fx.Node]]:
        buffers = {}
        for bucket in stage.gradient_buckets:
            if self.contributors.count(bucket.key) == 1:
                buffer = ops.call(self.graph, ops.alloc_grad, bucket)
                waits = (take(self.graph, bucket, Part.GRADIENTS),)
                fetched = ops.call(self.graph, ops.fetch_grad, bucket, buffer, after=waits)
                buffers[bucket.key] = buffer, fetched
        return buffers

    def _fetch_states(self, stage: Stage) -> dict[int, tuple[fx.Node, fx.Node]]:
        states, masters = {}, self.spec.masters or not self.spec.update
        for bucket in stage.gradient_buckets:
            streamed = bucket.key not in self.spec.resident
            wanted = (self.spec.update and streamed) or bucket.key in self.spec.device
            if wanted and self.contributors.count(bucket.key) == 1:
                buffer = ops.call(self.graph, ops.alloc_state, bucket, masters)
                given, waits = (bucket, buffer, masters), (take(self.graph, bucket, Part.STATES),)
                fetched = ops.call(self.graph, ops.fetch_state, *given, after=waits)
                self.left_states[bucket.key] = fetched
                buffer.meta["value"] = fetched.meta["value"] = STATE if masters else MOMENTS
                states[bucket.key] = buffer, fetched
        return states

    def _add(
        self, bucket: Bucket, group: fx.Node, buffers: dict[int, tuple[fx.Node, fx.Node]]
    ) -> fx.Node:
        """All gradients of a bucket: those on the host too, with `accumulate`."""
        if not self.spec.accumulate:
            return group
        buffer, fetched = buffers[bucket.key]
        total = ops.call(self.graph, ops.add_grad, bucket, fetched, group)
        left = bucket.key in self.spec.device  # then its memory lives on
        for node in (group,) if left else (buffer, fetched, group):
            ops.call(self.graph, ops.free, node)
        return total

    def _offload(
        self, bucket: Bucket, group: fx.Node, after: tuple[fx.Node, ...] | None = None
    ) -> None:
        norms = []
        if self.spec.norms and bucket.key not in self.spec.resident:
            norms = [ops.call(self.graph, ops.norm_grad, bucket, group)]
        if bucket.key in self.spec.resident:
            ops.call(self.graph, ops.keep_grad, bucket, group)
            ops.call(self.graph, ops.free, group)
            return
        offload = ops.call(self.graph, ops.offload_grad, bucket, group, *norms, after=after)
        left = bucket.key in self.spec.device
        self.left += [group, self.left_states[bucket.key]] if left else []
        self.later += [(value, offload) for value in ([] if left else [group]) + norms]

    def _update(
        self, bucket: Bucket, weights: fx.Node, gradients: fx.Node, states: tuple[fx.Node, fx.Node]
    ) -> fx.Node:
        """The update, whose results go to the host; gives the node."""
        graph = self.graph
        given = None if self.spec.masters else weights
        norms = []
        if self.spec.norms:
            norms = [ops.call(graph, ops.norm_grad, bucket, gradients, False)]
        updated = ops.call(graph, ops.update, bucket, given, gradients, states[1])
        updated.meta["value"] = STATE
        for node in (*states, gradients):
            ops.call(graph, ops.free, node)
        offload = ops.call(graph, ops.offload_state, bucket, updated, *norms)
        self.later += [(value, offload) for value in [updated, *norms]]
        return updated

    def _update_in_place(self, bucket: Bucket, gradients: fx.Node) -> None:
        """The update of a bucket that lives on the device."""
        norms = []
        if self.spec.norms:
            norms = [ops.call(self.graph, ops.norm_grad, bucket, gradients, False)]
        done = ops.call(self.graph, ops.update_in_place, bucket, gradients, *norms)
        done.meta["value"] = STATE
        for node in (gradients, *norms):
            ops.call(self.graph, ops.free, node)

    def _free_later(self, op: Callable[..., Any] = ops.free) -> None:
        """Free what was offloaded a stage ago: its copy has had time."""
        for value, reader in self.later:
            ops.call(self.graph, op, value, after=(reader,))
        self.later.clear()


def _writers(graph: fx.Graph) -> list[fx.Node]:
    """The ops that write to a bucket: one for each part of each."""
    return ops.nodes_that(graph, lambda op: op.writes)


def _update(spec: Spec, stages: Sequence[Stage], backward: _Backward) -> fx.Graph:
    """The step: what lies on the host, what is resident, what the backward has left."""
    graph = fx.Graph()
    graph.output(((),))
    left = {ops.arguments(state)[0].key: (g, state) for g, state in _pairs(backward.left)}
    buckets = {bucket.key: bucket for stage in stages for bucket in stage.buckets}
    on_host = []
    for key, bucket in sorted(buckets.items()):
        if key in left:
            continue
        op = ops.update_resident if key in spec.resident else ops.update_host
        waits = (take(graph, bucket, Part.GRADIENTS),)
        with graph.inserting_before(graph.output_node()):
            node = ops.call(graph, op, bucket, after=waits)
        on_host += [node] if op is ops.update_host else []
    if spec.helps and on_host:
        with graph.inserting_before(graph.output_node()):
            ops.call(graph, ops.help_host, tuple(on_host))
    for key, values in left.items():
        _update_on_device(graph, buckets[key], values)
    graph.output_node().args = ((tuple(_writers(graph)),),)
    return graph


def _pairs(nodes: Sequence[fx.Node]) -> list[tuple[fx.Node, fx.Node]]:
    return list(zip(nodes[::2], nodes[1::2], strict=True))


def _update_on_device(graph: fx.Graph, bucket: Bucket, left: tuple[fx.Node, fx.Node]) -> None:
    copied = take(graph, bucket, Part.GRADIENTS)
    with graph.inserting_before(copied):
        gradients, state = (_placeholder(graph, node.name) for node in left)
    for node, source in zip((gradients, state), left, strict=True):
        node.meta["value"] = source.meta.get("value", WEIGHT)
    with graph.inserting_before(graph.output_node()):
        updated = ops.call(graph, ops.update, bucket, None, gradients, state)
        updated.meta["value"] = STATE
        ops.call(graph, ops.free, state)
        offload = ops.call(graph, ops.offload_state, bucket, updated)
        ops.call(graph, ops.defer_free, updated, after=(offload,))
        ops.call(graph, ops.defer_free, gradients, after=(copied,))


def _placeholder(graph: fx.Graph, name: str) -> fx.Node:
    node = graph.placeholder(name)
    if not name.startswith("save_rng"):
        node.meta["value"] = ACTIVATION
    return node


def _take(
    graph: fx.Graph, op: Callable[..., Any], args: tuple[Any, ...], name: str
) -> list[fx.Node]:
    """Call an op that gives a tuple and take all of it."""
    stage: Stage = args[0]
    node = ops.call(graph, op, *args)
    saved = [ACTIVATION] * SAVED
    groups = [(WEIGHT,)] * len(stage.gradient_buckets)
    results = [ACTIVATION] * (1 + len(stage.mutated))
    metas: dict[object, list[Any]] = {
        ops.forward: results + (saved if args[3:] == (True,) else []),
        ops.recompute: saved,
        ops.backward: [ACTIVATION, *groups],
    }
    node.meta["value"] = tuple(metas[op])
    values = []
    for k, meta in enumerate(metas[op]):
        item = ops.call(graph, operator.getitem, node, k, name=f"{name}_{k}")
        item.meta["value"] = meta
        values.append(item)
    return values
