"""Memory that a schedule holds on the device, by kind, over its program.

Device memory is given and taken back in program order, when ops are issued: the allocator's blocks
are reused along the compute stream, whatever the copies do. So the peak does not depend on time:
it is found by walking the graphs, with the memory that a compute needs inside of it on top.

What a forward returns to the user is dropped where the backward does not need it, as in
`loss = model(...).loss`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from megacompile.cost.kernels import Returned
from megacompile.cost.ops import analysis_of
from megacompile.cost.optimizer import OptimizerCost, chunks_bytes
from megacompile.ir import ops
from megacompile.ir.buckets import Bucket, largest_shard
from megacompile.ir.ops import Op, Part, Value
from megacompile.ir.ops.op import value_bytes
from megacompile.ir.schedule import Schedule
from megacompile.ir.signature import elsewhere
from megacompile.ir.stages import ArgRef, Stage
from megacompile.ir.values import left_by_backward, memory
from megacompile.text import format_bytes


class MemoryKind(enum.Enum):
    """Uses of memory."""

    SLOTS = "slots"
    INPUTS = "inputs and buffers"
    ACTIVATIONS = "activations"  # what stages give to each other
    SAVED = "saved tensors"
    GRADIENTS = "gradients"
    STATES = "optimizer states"
    WORKSPACE = "workspace"  # inside of a compute, its results included
    PARAMETERS = "parameters"
    MASTERS = "masters"
    STAGED = "buffers"  # that states and parameters from a disk come to

    __hash__ = object.__hash__  # a member is one object; Enum hashes its name, in Python


@dataclass(frozen=True, slots=True)
class MemoryMoment:
    """Device memory while one op runs."""

    graph: str
    label: str
    live_bytes: Mapping[MemoryKind, int]

    @property
    def total_bytes(self) -> int:
        return sum(self.live_bytes.values())

    def __str__(self) -> str:
        held = sorted(self.live_bytes.items(), key=lambda item: -item[1])
        parts = ", ".join(f"{kind.value} {format_bytes(size)}" for kind, size in held if size)
        return f"{format_bytes(self.total_bytes)} at {self.graph} {self.label}: {parts}"


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Device memory over a step, in program order."""

    moments: tuple[MemoryMoment, ...]  # where something is computed or allocated
    end: Mapping[MemoryKind, int] = field(
        default_factory=dict
    )  # what is left when the step is over

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
    """Walk a step of schedules that follow one another in the forward.

    Slots are shared. What a backward or an update defers is there until a forward drains it (where
    none does, until something is deferred again). Chunks of updates that the device makes for the
    host are there in forwards. Resident buckets are there all the time. Their gradients are there
    from where a backward keeps them on; all the time, where it adds to what others have left.

    Args:
        gradients_stay: they are there all the time, whatever the schedules do.
    """
    each = [schedules] if isinstance(schedules, Schedule) else list(schedules)
    cost = optimizer or OptimizerCost(states=0)
    replay = _Replay(fused, cost)
    slots: dict[int, int] = {}
    for schedule in each:
        for slot in schedule.slots:
            slots[slot.index] = max(slot.size_bytes, slots.get(slot.index, 0))
    replay.live[MemoryKind.SLOTS] = sum(slots.values())
    residents = {key for schedule in each for key in schedule.plan.resident}
    replay.live[MemoryKind.PARAMETERS] += _resident_bytes(each, residents, cost)
    replay.find_gradients(each, every=gradients_stay)
    in_chunks = max((chunks_bytes(schedule, cost) for schedule in each), default=0)
    replay.live[MemoryKind.STATES] += in_chunks
    for schedule in each:
        replay.defer_from_before(schedule)
    kept = [replay.forward(schedule) for schedule in each]
    replay.live[MemoryKind.STATES] -= in_chunks
    replay.in_chunks = in_chunks
    for schedule, saved_values in zip(reversed(each), reversed(kept), strict=True):
        if schedule.backward is not None:
            replay.backward(schedule, saved_values)
    for schedule in each:
        if schedule.update is not None:
            replay.update(schedule)
    return DeviceMemory(tuple(replay.moments), replay.live)


def _resident_bytes(schedules: Sequence[Schedule], keys: Iterable[int], cost: OptimizerCost) -> int:
    """A bucket that several schedules read is there once."""
    largest = dict.fromkeys(keys, 0)
    for schedule in schedules:
        trained = schedule.gradient_params if schedule.backward is not None else {}
        for bucket in schedule.buckets:
            if bucket.key in largest:
                params = trained.get(bucket.key, ())
                size = cost.resident_bytes(bucket, params, gradients=False)
                largest[bucket.key] = max(int(size), largest[bucket.key])
    return sum(largest.values())


def accumulated(schedule: Schedule, *, reads: bool = False) -> list[Bucket]:
    """Those that a backward adds gradients to, or, unless `reads`, leaves them in."""
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
    owned: bool  # by the schedule; else by the user, or part of a slot
    names: int = 0  # values that still name it


@dataclass(slots=True)
class _Replay:
    """The walk: which blocks live."""

    fused: bool
    cost: OptimizerCost
    live: dict[MemoryKind, int] = field(default_factory=lambda: dict.fromkeys(MemoryKind, 0))
    blocks: dict[fx.Node, _Block] = field(default_factory=dict)
    moments: list[MemoryMoment] = field(default_factory=list)
    before: dict[MemoryKind, int] = field(default_factory=dict)  # deferred, and not taken back yet
    in_chunks: int = 0  # device memory that the next `help_host` takes
    kept: dict[int, int] = field(default_factory=dict)  # gradients of residents, by bucket

    def find_gradients(self, schedules: Sequence[Schedule], *, every: bool) -> None:
        """Gradients of resident buckets that a backward adds to are there before it.

        Args:
            every: those that one makes too.
        """
        for schedule in schedules:
            for bucket in accumulated(schedule, reads=not every):
                if bucket.key in schedule.plan.resident:
                    self._keep(schedule, bucket)

    def _keep(self, schedule: Schedule, bucket: Bucket) -> int:
        """Gradients of a resident bucket are there from now on; returns the bytes that are new."""
        mine = largest_shard(bucket)
        params = [mine.params[i] for i in schedule.gradient_params[bucket.key]]
        size = int(sum(p.numel * self.cost.grad_of(p.dtype.itemsize) for p in params))
        more = max(0, size - self.kept.get(bucket.key, 0))
        self.kept[bucket.key] = self.kept.get(bucket.key, 0) + more
        self.live[MemoryKind.GRADIENTS] += more
        return more

    def defer_from_before(self, schedule: Schedule) -> None:
        """Adds what the step before has deferred."""
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
        """Returns the saved values by name, each named once more."""
        for node in schedule.forward.find_nodes(op="placeholder"):
            size = value_bytes(node)
            self._name(node, _Block(MemoryKind.INPUTS, size, owned=False))
            self.live[MemoryKind.INPUTS] += size
        self._walk("forward", schedule)
        outputs, saved_values = ops.returned(schedule.forward)
        backward = schedule.backward
        inputs = () if backward is None else backward.find_nodes(op="placeholder")
        there = {n.name: self.blocks[n] for n in saved_values if n in self.blocks}
        kept = {n.name: there[n.name] for n in inputs if n.name in there}
        for block in kept.values():
            block.names += 1
        ends = [n for n in (*outputs, *saved_values) if isinstance(n, fx.Node)]
        for node in dict.fromkeys(ends):
            self._drop(node)
        return kept

    def backward(self, schedule: Schedule, saved_values: dict[str, _Block]) -> None:
        """Adds what is computed from the saved values."""
        assert schedule.backward is not None
        waiting = elsewhere(schedule.forward)
        for node in schedule.backward.find_nodes(op="placeholder"):
            if node.name in waiting:
                continue
            if node.name in saved_values:
                self.blocks[node] = saved_values[node.name]
            else:
                size = value_bytes(node)
                self._name(node, _Block(MemoryKind.GRADIENTS, size, owned=True))
                self.live[MemoryKind.GRADIENTS] += size
        self._walk("backward", schedule)

    def update(self, schedule: Schedule) -> None:
        """Adds what a step makes of what its backward has left; all of it is deferred."""
        assert schedule.update is not None
        for node, source in left_by_backward(schedule).items():
            self.blocks[source].names = 0  # the backward's names of it are gone
            self._name(node, self.blocks[source])
        for node in ops.nodes_that(schedule.update, lambda op: op.fills is not None):
            self.live[MemoryKind.STATES] += self._copy_bytes(schedule, node)
        self._walk("update", schedule)

    def _copy_bytes(self, schedule: Schedule, updated: fx.Node) -> int:
        """Bytes of new parameters as they are streamed, where an update makes them next to the
        masters."""
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
                self.blocks.pop(node.args[op.frees], None)  # it stays
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
        """A bucket keeps gradients in their memory. Those of another dtype, or that it has a place
        for, are copied."""
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
        blocks: dict[Any, _Block] = {}
        for k, item in ops.items(node):
            block = self._block_of(node, k, item, analysis.returned, blocks)
            if block.names == 0 and block.owned:
                self.live[block.kind] += block.size_bytes
            self._name(item, block)

    def _block_of(
        self,
        call: fx.Node,
        k: int,
        item: fx.Node,
        returned: Sequence[Returned | None],
        blocks: dict[Any, _Block],
    ) -> _Block:
        stage: Stage = ops.arguments(call)[0]
        kind = _kind_of(call, stage, k)
        key: Any = k
        each = [returned[place] for place in _places(call, stage, k) if place < len(returned)]
        if len(each) > 1:  # a bundle, in memory of its own
            sizes = {one.memory: one.size_bytes for one in each if one is not None}
            return _Block(kind, sum(sizes.values()), owned=True)
        found = each[0] if each else None
        if found is not None:
            if found.memory < 0:
                return self._input_block(call, stage, -1 - found.memory)
            key = ("memory", found.memory)
        if key not in blocks:
            size = value_bytes(item) if found is None else found.size_bytes
            blocks[key] = _Block(kind, size, owned=True)
        return blocks[key]

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
            block = _Block(kind, value_bytes(node), owned=True)
            self.live[kind] += block.size_bytes
        else:  # what is more than the buffer that it fills is its own
            block = self.blocks[place]
            more = max(0, value_bytes(node) - block.size_bytes)
            block.size_bytes += more
            self.live[block.kind] += more
        self._name(node, block)
        self._moment(name, node, 0)

    def _name(self, node: fx.Node, block: _Block) -> None:
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
        """Frees what the step before deferred."""
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
    """The places where the graph of a call returns its result k: several where that is a bundle of
    saved tensors, none where it is a group of gradients."""
    template, results = stage.traced, stage.result_count
    if call.target is ops.backward:
        of_args = [
            i for i, p in enumerate(template.gradients) if isinstance(stage.primals[p], ArgRef)
        ]
        written = k - len(of_args) - len(stage.gradient_buckets)
        if written >= 0:
            return (len(template.gradients) + written,)
        return (of_args[k],) if k < len(of_args) else ()
    again = call.target is ops.recompute
    if not again and k < results:
        return (k,)
    saved = k if again else k - results
    first = 0 if again and not template.random else results  # in the forward's graph: results first
    bundle = stage.bundles[saved] if stage.bundles else (saved,)
    return tuple(first + i for i in bundle)


def _kind_of(call: fx.Node, stage: Stage, k: int) -> MemoryKind:
    if call.target is ops.backward:
        return MemoryKind.GRADIENTS
    if call.target is ops.recompute:
        return MemoryKind.SAVED
    return MemoryKind.ACTIVATIONS if k < stage.result_count else MemoryKind.SAVED
