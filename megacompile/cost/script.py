"""Turns the graphs of a schedule into work on queues, with the waits of each op.

An op waits for its arguments. A value from an earlier graph is a placeholder: a token
(`megacompile.ir.tokens`), a value that a backward left for the update (`schedule.left`), or a saved
value that a forward wrote to a disk. A placeholder without a value yet is ignored.

Four waits have no edge, because they come from the host, which issues the ops:

    a forward returns when its prefetches are done; then the next graph begins
    a backward returns when gradients are on the host; then `optimizer.step()` begins
    a forward's drain waits for the copies that deferred frees wait for
    a read of states from a disk waits for a free set of buffers

None of this depends on the machine, unlike the amount of work of each op.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from megacompile.cost.hardware import Hardware
from megacompile.cost.ops import copies_of, node_s
from megacompile.cost.optimizer import OptimizerCost, UpdateCost, updates
from megacompile.cost.queues import COMPUTE, D2H, H2D, HOST, READ, STREAMS, Queues, Work
from megacompile.ir import ops
from megacompile.ir.buckets import Bucket, largest_shard
from megacompile.ir.edges import Handed, handed, stands_for, waits_for
from megacompile.ir.ops import Part
from megacompile.ir.schedule import Schedule
from megacompile.ir.signature import on_disk
from megacompile.ir.stages import Code
from megacompile.ir.stream import Stream
from megacompile.ir.tokens import written
from megacompile.ir.values import producer

_QUEUES = {stream: STREAMS.index(stream) for stream in STREAMS}


@dataclass(slots=True)
class _Item:
    """An op of a graph, independent of the step and the machine."""

    node: fx.Node
    label: str
    queue: int
    waits: list[int] = field(default_factory=list)  # indices in the graph's items
    takes: list[Handed] = field(default_factory=list)  # values of earlier graphs
    begins: bool = False  # waits for what the previous graph left running
    since: int = -1  # index of its first half, or -1
    drains: bool = False  # waits for the copies that deferred frees wait for
    helped: float = 0.0  # its amount on the device
    half: int | None = None  # index of its half of the copy
    of_replicas: bool = False  # a collective between replicas
    fresh: bool = False  # its data are still on the device
    reads_weights: int | None = None  # key of the bucket that it copies to the device
    stages: bool = False  # copies states between a disk and a set of buffers


class _Graph:
    """One graph of a schedule as items.

    Args:
        sizes: the cost of a bucket's update in `optimizer.step()`, by the bucket's key.
    """

    def __init__(self, schedule: Schedule, name: str, sizes: dict[int, UpdateCost]) -> None:
        self.name, self.schedule = name, schedule
        self.sizes = sizes
        self.items: list[_Item] = []
        self.gives: dict[Handed, int] = {}  # value that a later graph may take -> its item
        self.deferred: list[int] = []  # copies that the next drain waits for
        self.awaited: list[Handed] = []  # the same, of earlier graphs
        self.fresh: set[int] = set()  # buckets whose new weights stay on the device until then
        self._position: dict[fx.Node, int] = {}
        self._lands: dict[Handed, int] = {}
        self._stored = on_disk(schedule.forward)  # names of saved values
        graph = schedule.graphs[name]
        for node in graph.nodes:
            if ops.op_of(node) is not None:
                self._add(node)
        self._give()

    @property
    def returns_behind(self) -> int:
        """The queue that must be empty before the graph returns; -1: none.

        New parameters of updates in the backward reach the host while the next forward begins.
        """
        if self.name == "forward":
            return H2D
        return -1 if self._lands else D2H

    def keep_fresh(self, keys: set[int]) -> None:
        """Make prefetches of a forward use weights that are still on the device.

        They were computed on the compute stream, before the forward begins.
        """
        plan = self.schedule.plan
        on_device = keys - plan.weights_on_disk
        for item in self.items:
            if item.reads_weights in on_device:
                item.takes = []
                item.fresh = item.reads_weights not in plan.device_update

    def amounts(self, hardware: Hardware, *, fused: bool) -> list[float]:
        """The amount of work of each item on a machine."""
        of = _Amounts(self.schedule, self.name, hardware, fused=fused, sizes=self.sizes)
        return [
            0.0
            if item.fresh
            else of.whole(item.node, item.queue)
            if item.half is None
            else of.halves(item.node)[item.half]
            for item in self.items
        ]

    def _give(self) -> None:
        """Record the values that later graphs wait for. For a forward these are values written to a
        disk; all others are ready when it returns, or ordered by the stream of their copies."""
        for what, node in handed(self.schedule, self.name).items():
            if self.name == "forward" and what[1] not in self._stored:
                continue
            at = self._position[node]
            if ops.stream_of(node) is Stream.D2H:  # one of its halves
                at = self._lands.get(what, at)
            self.gives[what] = at

    def _add(self, node: fx.Node) -> None:
        op = ops.effects(node)
        if op.helps:
            self._help(node)
            return
        if not op.waits:
            self._defer(node)
            return
        queue = _QUEUES[op.stream]
        waits, takes = self._waits(node, queue)
        if op.frees is not None and not waits:
            return
        label = ops.label(node)
        item = _Item(node, label, queue, waits, takes, begins=op.begins, drains=op.drains)
        if len(op.writes) == 2 and queue == D2H:
            first, second = written(node)
            self._lands[first], self._lands[second] = len(self.items), len(self.items) + 1
            self._add_half(node, item)
        else:
            item.of_replicas = op.of_replicas
            item.stages = op.stored is not None and Part.STATES in (*op.reads, *op.writes)
            if Part.WEIGHTS in op.reads and queue == H2D:
                item.reads_weights = ops.arguments(node)[0].key
        self._position[node] = len(self.items)
        self.items.append(item)

    def _waits(self, node: fx.Node, queue: int) -> tuple[list[int], list[Handed]]:
        """The ops on other queues that a node waits for, in this graph and in earlier ones."""
        waits: list[int] = []
        takes: list[Handed] = []
        for source in waits_for(node):
            position = self._position.get(producer(source))
            if source.op == "placeholder":
                takes.append(stands_for(self.schedule, source))
            elif position is not None and self.items[position].queue != queue:
                waits.append(position)
        return waits, takes

    def _add_half(self, node: fx.Node, item: _Item) -> None:
        """Add the first half of a copy; `item` becomes the second. New parameters reach the host
        before the states."""
        item.since, item.half = len(self.items), 1
        self.items.append(_Item(node, "", item.queue, item.waits, item.takes, half=0))
        item.waits, item.takes = [], []

    def _help(self, node: fx.Node) -> None:
        """Allow the device to help with these updates."""
        for update in node.all_input_nodes:
            size = self.sizes.get(ops.arguments(update)[0].key)
            self.items[self._position[update]].helped = 0.0 if size is None else size.helped_bytes

    def _defer(self, node: fx.Node) -> None:
        """Record a deferred free: no stream waits for its `after`, but the next drain does."""
        value = node.args[0]
        for source in node.all_input_nodes:
            if source is value:
                continue
            if source.op == "placeholder":
                self.awaited.append(stands_for(self.schedule, source))
                continue
            copy = producer(source)
            self.deferred.append(self._position[copy])
            self.fresh |= {key for key, part in written(copy) if part is Part.WEIGHTS}


# The amount of work of each op on a machine. Setup time counts as the bytes that could have been
# copied in that time.


class _Amounts:
    """The amounts of one graph of a schedule.

    Args:
        name: of the graph.
        fused: elementwise operations are fused (lowering "inductor").
        sizes: the cost of a bucket's update in `optimizer.step()`, by the bucket's key.
    """

    def __init__(
        self,
        schedule: Schedule,
        name: str,
        hardware: Hardware,
        *,
        fused: bool,
        sizes: Mapping[int, UpdateCost],
    ) -> None:
        self.schedule, self.name = schedule, name
        self.hardware, self.fused = hardware, fused
        self.sizes = sizes
        self.trained = schedule.gradient_params if schedule.backward is not None else {}
        self._seconds: dict[tuple[int, Code], float] = {}

    def whole(self, node: fx.Node, queue: int) -> float:
        """Seconds of a compute, bytes of other ops."""
        op = ops.effects(node)
        if self.name == "update" and op.is_update:
            return self._update(ops.arguments(node)[0], queue)
        if op.stored is not None:
            return op.stored(node)
        if op.gathered is not None:
            return self._of_replicas(node) if op.of_replicas else self._exchanged(node)
        if queue != COMPUTE:
            return self._copy(self._moved_bytes(node), copies_of(node))
        if op.code is None:
            return node_s(node, self.hardware, fused=self.fused)
        key = id(ops.arguments(node)[0].template), ops.code_of(node)
        if key not in self._seconds:
            self._seconds[key] = node_s(node, self.hardware, fused=self.fused)
        return self._seconds[key]

    def halves(self, node: fx.Node) -> list[float]:
        """Bytes of the copies of new parameters and of states, in this order."""
        bucket: Bucket = ops.arguments(node)[0]
        params = self._param_bytes(bucket)
        if self.name == "update":
            update = self.sizes.get(bucket.key)
            whole = 0.0 if update is None else (update.size_bytes - update.grad_bytes) / 2
            return [min(params, whole), max(0.0, whole - params)]
        count, whole = len(bucket.params), ops.copied_bytes(node)
        return [self._copy(params, count), self._copy(whole - params, 2 * count)]

    def _update(self, bucket: Bucket, queue: int) -> float:
        """Amount of an update, from the bytes that the optimizer reads and writes on its device."""
        update, hardware = self.sizes.get(bucket.key), self.hardware
        if update is None:
            return 0.0
        if queue != HOST:
            return update.size_bytes / (hardware.memory_gb_s * 1e9)
        return max(update.size_bytes, update.arithmetic_s * hardware.update_gb_s * 1e9)

    def _moved_bytes(self, node: fx.Node) -> int:
        """Bytes that a copy has to move, without those that the device already has or keeps."""
        op, size, subject = ops.effects(node), ops.copied_bytes(node), ops.arguments(node)[0]
        if not isinstance(subject, Bucket):
            return size
        plan = self.schedule.plan
        if Part.WEIGHTS in op.reads and subject.key in plan.device_update | plan.resident:
            return 0  # the device has them already
        if Part.GRADIENTS in (*op.reads, *op.writes) and subject.key in plan.resident:
            return 0
        if Part.STATES in op.reads and not ops.arguments(node)[2]:  # masters
            return size - self._param_bytes(subject)  # parameters are on the device already
        return size

    def _copy(self, size_bytes: float, copies: int) -> float:
        """Bytes of copies, plus the equivalent of their setup time."""
        return size_bytes + copies * self.hardware.copy_s * self.hardware.h2d_gb_s * 1e9

    def _exchanged(self, node: fx.Node) -> float:
        """Bytes that a rank receives in a collective, plus the equivalent of its setup time."""
        op = ops.effects(node)
        ranks: int = ops.arguments(node)[0].ranks
        assert op.gathered is not None
        rate, start_s = self.hardware.interconnect_gb_s * 1e9, self.hardware.collective_s
        start = start_s * rate if rate != math.inf else 0.0
        return op.gathered(node) * (ranks - 1) / ranks + start

    def _of_replicas(self, node: fx.Node) -> float:
        """Bytes that a rank receives in a sum of its shard over replicas, which is a reduce-scatter
        and an all-gather, plus the equivalent of its setup time."""
        op, hardware = ops.effects(node), self.hardware
        bucket: Bucket = ops.arguments(node)[0]
        assert op.gathered is not None
        received = 2 * (bucket.replicas - 1) / bucket.replicas * op.gathered(node) / bucket.ranks
        return received + hardware.collective_s * hardware.replicas_gb_s * 1e9

    def _param_bytes(self, bucket: Bucket) -> int:
        mine = largest_shard(bucket)
        return sum(mine.params[i].size_bytes for i in self.trained.get(bucket.key, ()))


class Script:
    """The work of a step's graphs, independent of the machine.

    Args:
        schedules: of one step; their forwards run in order, then their backwards in reverse, then
            their updates.
        optimizer: its costs; None: no updates.
        fused: elementwise operations are fused (lowering "inductor").
    """

    def __init__(
        self, schedules: Sequence[Schedule], optimizer: OptimizerCost | None, *, fused: bool
    ) -> None:
        def graphs(name: str, each: Sequence[Schedule]) -> list[_Graph]:
            return [_Graph(s, name, sizes[id(s)]) for s in each if name in s.graphs]

        sizes: dict[int, dict[int, UpdateCost]] = {id(schedule): {} for schedule in schedules}
        if optimizer is not None:
            for schedule in schedules:
                sizes[id(schedule)] = {u.bucket.key: u for u in updates(schedule, optimizer)}
        forwards = graphs("forward", schedules)
        self.schedules, self.optimizer, self.fused = schedules, optimizer, fused
        self.graphs = [*forwards, *graphs("backward", schedules[::-1])]
        self.graphs += graphs("update", schedules) if optimizer is not None else []
        fresh = {key for graph in self.graphs for key in graph.fresh}
        for graph in forwards:
            graph.keep_fresh(fresh)
        self.sets = max((schedule.plan.state_sets for schedule in schedules), default=0)


class Steps:
    """Adds the work of steps on a machine to queues."""

    def __init__(self, script: Script, hardware: Hardware) -> None:
        self.graphs = [(g, g.amounts(hardware, fused=script.fused)) for g in script.graphs]
        self.sets = script.sets
        self.given: dict[Handed, int] = {}  # value of an earlier graph -> the work that makes it
        self.returned: list[int] = []  # work that is done when the previous graph returns
        self.deferred: list[int] = []  # the copies that the next drain waits for
        self.read: list[int] = []  # reads of states from a disk, in order
        self.written: list[int] = []  # writes of states to a disk

    def add(self, queues: Queues, step: int) -> int:
        """Add a step; returns the work that ends it, after the last compute and with gradients on
        the host."""
        last_compute: list[int] = []
        for graph, amounts in self.graphs:
            first = len(queues.works)
            issued = [*self.returned, *last_compute] if graph.name == "update" else []
            for item, amount in zip(graph.items, amounts, strict=True):
                queues.add(self._work(graph, item, amount, first, issued, step))
            added = range(first, len(queues.works))
            self._stage(queues, graph, first)
            self.given |= {what: first + at for what, at in graph.gives.items()}
            self.deferred += [first + at for at in graph.deferred]
            self.deferred += [self.given[what] for what in graph.awaited if what in self.given]
            if graph.name != "update":
                behind = [i for i in added if queues.works[i].queue == graph.returns_behind]
                computes = [i for i in added if queues.works[i].queue == COMPUTE]
                self.returned = behind[-1:]
                last_compute = computes[-1:] or last_compute
        end = Work("update", "", COMPUTE, 0.0, list(self.returned), step)
        return queues.add(end)

    def _stage(self, queues: Queues, graph: _Graph, first: int) -> None:
        """A read of states begins after its graph, and after a write has freed a set of buffers."""
        before = len(self.read)
        for at, item in enumerate(graph.items, first):
            if item.stages:
                (self.read if item.queue == READ else self.written).append(at)
        for k in range(before, len(self.read)):
            waits = queues.works[self.read[k]].waits
            waits += self.returned
            if 0 <= k - self.sets < len(self.written):
                waits.append(self.written[k - self.sets])

    def _work(
        self,
        graph: _Graph,
        item: _Item,
        amount: float,
        first: int,
        issued: list[int],
        step: int,
    ) -> Work:
        waits = [first + wait for wait in item.waits]
        waits += [self.given[what] for what in item.takes if what in self.given]
        waits += issued
        if item.begins:
            waits += self.returned
        if item.drains:
            waits += self.deferred
            self.deferred = []
        since = first + item.since if item.since >= 0 else -1
        return Work(
            *(graph.name, item.label, item.queue, amount, waits, step, since, item.helped),
            of_replicas=item.of_replicas,
        )
