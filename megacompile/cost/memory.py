"""Device memory of a schedule over a step, by kind.

Device memory is allocated and freed in program order, when ops are issued, because the allocator
reuses blocks along the compute stream, independent of copies. So the peak does not depend on time.
It is found by walking the graphs and adding each compute's internal memory.

The user is assumed to drop outputs that the backward does not need, as in `loss = model(...).loss`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from megacompile.cost.ops import analysis_of
from megacompile.cost.optimizer import OptimizerCost, chunks_bytes
from megacompile.ir import ops
from megacompile.ir.buckets import Bucket, largest_shard
from megacompile.ir.ops import Op, Part, Value
from megacompile.ir.ops.op import value_bytes
from megacompile.ir.schedule import Schedule
from megacompile.ir.stages import ArgRef, Stage
from megacompile.ir.values import elsewhere, left_by_backward, memory


class MemoryKind(enum.Enum):
    """Uses of memory."""

    SLOTS = "slots"
    INPUTS = "inputs and buffers"
    ACTIVATIONS = "activations"  # passed between stages
    SAVED = "saved tensors"
    GRADIENTS = "gradients"
    STATES = "optimizer states"
    WORKSPACE = "workspace"  # inside a compute, including its results
    PARAMETERS = "parameters"
    MASTERS = "masters"
    STAGED = "buffers"  # host buffers for states and parameters on a disk

    __hash__ = object.__hash__  # members are singletons; Enum would hash the name in Python


@dataclass(frozen=True, slots=True)
class MemoryMoment:
    """Device memory while one op runs."""

    graph: str
    label: str
    live_bytes: Mapping[MemoryKind, int]

    @property
    def total_bytes(self) -> int:
        return sum(self.live_bytes.values())


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Device memory over a step, in program order."""

    moments: tuple[MemoryMoment, ...]  # at each compute or allocation
    end: Mapping[MemoryKind, int] = field(default_factory=dict)  # after the step

    @property
    def peak(self) -> MemoryMoment:
        empty = MemoryMoment("forward", "", {})
        return max(self.moments, key=lambda moment: moment.total_bytes, default=empty)


def device_memory(
    schedules: Schedule | Sequence[Schedule],
    *,
    optimizer: OptimizerCost | None = None,
    fused: bool = True,
    gradients_stay: bool = False,
) -> DeviceMemory:
    """Walk a step of schedules whose forwards run in sequence.

    Slots are shared by the schedules. Memory that a backward or an update passes to `defer_free` is
    live until a forward's `drain` or, without one, until the next `defer_free`. Chunks of updates
    that the device makes for the host are live in forwards. Resident buckets are always live. Their
    gradients are live from the backward that keeps them, or always, with `gradients_stay` or if
    backwards add to earlier gradients.
    """
    each = [schedules] if isinstance(schedules, Schedule) else list(schedules)
    replay = _Replay(fused, optimizer or OptimizerCost(states=0))
    replay.begin(each, gradients_stay=gradients_stay)
    kept = [replay.forward(schedule) for schedule in each]
    replay.live[MemoryKind.STATES] -= replay.in_chunks  # last step's; `help_host` adds its own
    for schedule, saved_values in zip(reversed(each), reversed(kept), strict=True):
        if schedule.backward is not None:
            replay.backward(schedule, saved_values)
    for schedule in each:
        if schedule.update is not None:
            replay.update(schedule)
    return DeviceMemory(tuple(replay.moments), replay.live)


def accumulated(schedule: Schedule, *, reads: bool = False) -> list[Bucket]:
    """Buckets with gradients that a backward adds to or (unless `reads`) leaves for later."""
    if schedule.backward is None:
        return []

    def touches(op: Op) -> bool:
        return Part.GRADIENTS in (op.reads if reads else (*op.reads, *op.writes))

    return [ops.arguments(node)[0] for node in ops.nodes_that(schedule.backward, touches)]


@dataclass(slots=True)
class _Block:
    """Memory that one or more values share."""

    kind: MemoryKind
    size_bytes: int
    owned: bool = True  # by the schedule; else it belongs to the user or to a slot
    names: int = 0  # live values that share it


class _Replay:
    """The walk, with the live blocks."""

    def __init__(self, fused: bool, cost: OptimizerCost) -> None:
        self.fused, self.cost = fused, cost
        self.live = dict.fromkeys(MemoryKind, 0)
        self.blocks: dict[fx.Node, _Block] = {}
        self.moments: list[MemoryMoment] = []
        self.before: dict[MemoryKind, int] = {}  # live until their deferred free
        self.in_chunks = 0  # device memory that the next `help_host` allocates
        self.kept: dict[int, int] = {}  # gradients of residents, by bucket

    def begin(self, schedules: Sequence[Schedule], *, gradients_stay: bool) -> None:
        """Count the memory that is live before the first forward; a slot or a resident bucket that
        several schedules read counts once."""
        slots: dict[int, int] = {}
        resident: dict[int, int] = {}
        keys = {key for schedule in schedules for key in schedule.plan.resident}
        for schedule in schedules:
            for slot in schedule.slots:
                slots[slot.index] = max(slot.size_bytes, slots.get(slot.index, 0))
            trained = schedule.gradient_params if schedule.backward is not None else {}
            for bucket in schedule.buckets:
                if bucket.key in keys:
                    params = trained.get(bucket.key, ())
                    size = int(self.cost.resident_bytes(bucket, params, gradients=False))
                    resident[bucket.key] = max(size, resident.get(bucket.key, 0))
            for bucket in accumulated(schedule, reads=not gradients_stay):
                if bucket.key in schedule.plan.resident:
                    self._keep(schedule, bucket)
            self._defer_from_before(schedule)
        self.live[MemoryKind.SLOTS] = sum(slots.values())
        self.live[MemoryKind.PARAMETERS] = sum(resident.values())
        self.in_chunks = max((chunks_bytes(each, self.cost) for each in schedules), default=0)
        self.live[MemoryKind.STATES] += self.in_chunks

    def _keep(self, schedule: Schedule, bucket: Bucket) -> int:
        """Count gradients of a resident bucket as live from now on; returns the new bytes."""
        mine = largest_shard(bucket)
        params = [mine.params[i] for i in schedule.gradient_params[bucket.key]]
        size = int(sum(p.numel * self.cost.grad_of(p.dtype.itemsize) for p in params))
        more = max(0, size - self.kept.get(bucket.key, 0))
        self.kept[bucket.key] = self.kept.get(bucket.key, 0) + more
        self.live[MemoryKind.GRADIENTS] += more
        return more

    def _defer_from_before(self, schedule: Schedule) -> None:
        """Add the memory whose free the previous step deferred."""
        for name, graph in schedule.graphs.items():
            for node in ops.nodes_that(graph, lambda op: op.frees is not None and not op.waits):
                value = node.args[0]
                assert isinstance(value, fx.Node)
                size = max(map(value_bytes, (value, memory(value))))
                if name == "update":
                    size += self._copy_bytes(schedule, value)
                kind = _KINDS.get(ops.effects(value).gives, MemoryKind.GRADIENTS)
                self.live[kind] += size
                self.before[kind] = self.before.get(kind, 0) + size

    def forward(self, schedule: Schedule) -> dict[str, _Block]:
        """Walk a forward; returns the saved values by name, each with one more name."""
        for node in schedule.forward.find_nodes(op="placeholder"):
            size = value_bytes(node)
            self._name(node, _Block(MemoryKind.INPUTS, size, owned=False))
            self.live[MemoryKind.INPUTS] += size
        self._walk("forward", schedule)
        outputs, saved_values = ops.returned(schedule.forward)
        backward = schedule.backward
        inputs = () if backward is None else backward.find_nodes(op="placeholder")
        saved = {n.name: self.blocks[n] for n in saved_values if n in self.blocks}
        kept = {n.name: saved[n.name] for n in inputs if n.name in saved}
        for block in kept.values():
            block.names += 1
        ends = [n for n in (*outputs, *saved_values) if isinstance(n, fx.Node)]
        for node in dict.fromkeys(ends):
            self._drop(node)
        return kept

    def backward(self, schedule: Schedule, saved_values: dict[str, _Block]) -> None:
        """Walk a backward that takes the saved values."""
        assert schedule.backward is not None
        waiting = elsewhere(schedule.forward)
        for node in schedule.backward.find_nodes(op="placeholder"):
            if node.name in saved_values:
                self.blocks[node] = saved_values[node.name]
            elif node.name not in waiting:
                self._name(node, _Block(MemoryKind.GRADIENTS, value_bytes(node)))
        self._walk("backward", schedule)

    def update(self, schedule: Schedule) -> None:
        """Walk an update of the values that its backward left, all of whose frees are deferred."""
        assert schedule.update is not None
        for node, source in left_by_backward(schedule).items():
            self.blocks[node] = self.blocks[source]
        for node in ops.nodes_that(schedule.update, lambda op: op.fills is not None):
            self.live[MemoryKind.STATES] += self._copy_bytes(schedule, node)
        self._walk("update", schedule)

    def _copy_bytes(self, schedule: Schedule, updated: fx.Node) -> int:
        """Bytes of the new streamed parameters that an update makes from the masters."""
        if self.cost.master_bytes is None or ops.effects(updated).fills is None:
            return 0
        bucket = largest_shard(ops.arguments(updated)[0])
        params = (bucket.params[i] for i in schedule.gradient_params[bucket.key])
        return sum(param.size_bytes for param in params)

    def _walk(self, name: str, schedule: Schedule) -> None:
        for node in schedule.graphs[name].nodes:
            if node.op != "call_function":
                continue
            op = ops.effects(node)
            if op.code is not None:
                self._compute(name, node)
            elif op.frees is not None and op.waits:
                self._drop(node.args[op.frees])
            elif op.frees is not None:
                self._drain()
                self.blocks.pop(node.args[op.frees], None)  # the block stays live
            elif op.drains:
                self._drain()
            elif op.helps:
                self.live[MemoryKind.STATES] += self.in_chunks
                self.in_chunks = 0
            elif op.keeps is not None:
                self._give(name, schedule, node)
            elif op.owns:
                self._make(name, node)

    def _give(self, name: str, schedule: Schedule, node: fx.Node) -> None:
        """A bucket takes over its gradients' memory. Gradients of another dtype, or with an
        existing buffer, are copied instead."""
        bucket, value, *_ = ops.arguments(node)
        new_bytes = self._keep(schedule, bucket)
        block = self.blocks.get(value)
        if block is not None and block.owned and new_bytes == block.size_bytes:
            block.owned = False
            self.live[block.kind] -= block.size_bytes
        self._moment(name, node, 0)

    def _compute(self, name: str, node: fx.Node) -> None:
        stage: Stage = ops.arguments(node)[0]
        analysis = analysis_of(stage.traced, ops.code_of(node), fused=self.fused)
        peak = analysis.peak_bytes
        if not analysis.kernels:
            peak = sum(value_bytes(item) for _, item in ops.items(node))
        self._moment(name, node, peak)
        shared: dict[int, _Block] = {}  # by the memory of results
        for k, item in ops.items(node):
            kind = _kind_of(node, stage, k)
            places = (at for at in _places(node, stage, k) if at < len(analysis.returned))
            each = [analysis.returned[at] for at in places]
            if len(each) > 1:  # a bundle, which has its own memory
                sizes = {one.memory: one.size_bytes for one in each if one is not None}
                block = _Block(kind, sum(sizes.values()))
            elif not each or each[0] is None:
                block = _Block(kind, value_bytes(item))
            elif each[0].memory < 0:
                block = self._input_block(node, stage, -1 - each[0].memory)
            else:
                new = _Block(kind, each[0].size_bytes)
                block = shared.setdefault(each[0].memory, new)
            self._name(item, block)

    def _input_block(self, call: fx.Node, stage: Stage, position: int) -> _Block:
        """The block of an input that a stage returns."""
        primal = position
        if call.target is ops.recompute and position < len(stage.traced.recompute_primals):
            primal = stage.traced.recompute_primals[position]
        ref = stage.primals[primal] if primal < len(stage.primals) else None
        if isinstance(ref, ArgRef) and call.target is not ops.backward:
            source = ops.arguments(call)[2][ref.index]
            if isinstance(source, fx.Node) and source in self.blocks:
                return self.blocks[source]
        return _Block(MemoryKind.SLOTS, 0, owned=False)

    def _make(self, name: str, node: fx.Node) -> None:
        place = memory(node)
        if place is node or place not in self.blocks:
            kind = _KINDS.get(ops.effects(node).gives, MemoryKind.GRADIENTS)
            block = _Block(kind, value_bytes(node))
        else:  # it owns the part beyond the buffer that it fills
            block = self.blocks[place]
            more = max(0, value_bytes(node) - block.size_bytes)
            block.size_bytes += more
            self.live[block.kind] += more
        self._name(node, block)
        self._moment(name, node, 0)

    def _name(self, node: fx.Node, block: _Block) -> None:
        if block.names == 0 and block.owned:
            self.live[block.kind] += block.size_bytes
        block.names += 1
        self.blocks[node] = block

    def _drop(self, node: Any) -> None:
        block = self.blocks.pop(node, None)
        if block is None:
            return
        block.names -= 1
        if block.names == 0 and block.owned:
            self.live[block.kind] -= block.size_bytes

    def _drain(self) -> None:
        """Free the memory that the previous step deferred."""
        for kind, size in self.before.items():
            self.live[kind] -= size
        self.before.clear()

    def _moment(self, name: str, node: fx.Node, workspace_bytes: int) -> None:
        live = {**self.live, MemoryKind.WORKSPACE: workspace_bytes}
        self.moments.append(MemoryMoment(name, ops.label(node), live))


_KINDS: dict[Value | None, MemoryKind] = {
    **dict.fromkeys((Value.STATE_BUFFER, Value.STATES, Value.UPDATED), MemoryKind.STATES),
    **dict.fromkeys((Value.COPY, Value.SAVED_BUFFER, Value.SAVED), MemoryKind.ACTIVATIONS),
}


def _places(call: fx.Node, stage: Stage, k: int) -> tuple[int, ...]:
    """The positions at which a call's graph returns result k: several for a bundle of saved
    tensors, none for a group of gradients."""
    template, results = stage.traced, stage.result_count
    if call.target is ops.backward:
        of_args = [
            i for i, p in enumerate(template.gradients) if isinstance(stage.primals[p], ArgRef)
        ]
        return (of_args[k],) if k < len(of_args) else ()
    again = call.target is ops.recompute
    if not again and k < results:
        return (k,)
    saved = k if again else k - results
    first = 0 if again and not template.random else results  # saved tensors follow the results
    bundle = stage.bundles[saved] if stage.bundles else (saved,)
    return tuple(first + i for i in bundle)


def _kind_of(call: fx.Node, stage: Stage, k: int) -> MemoryKind:
    if call.target is ops.backward:
        return MemoryKind.GRADIENTS
    if call.target is ops.recompute:
        return MemoryKind.SAVED
    return MemoryKind.ACTIVATIONS if k < stage.result_count else MemoryKind.SAVED
