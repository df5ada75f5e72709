"""Predicts when each op of a schedule runs by simulating its streams and the resources they share.

An op starts when the previous op of its stream and everything that it waits for are done: the edges
that `megacompile.verify` checks and the runtime keeps, within and between graphs. The rates of
copies and updates depend on what else runs (`megacompile.cost.queues`). Times are in seconds.

Four waits have no edge, because they come from the host, which issues the ops:

    a forward returns when its prefetches are done; then the next graph begins
    a backward returns when gradients are on the host; then `optimizer.step()` begins
    a forward's drain waits for the copies that deferred frees wait for
    a read of states from a disk waits for a free set of buffers
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import fx

from megacompile.cost.hardware import Hardware
from megacompile.cost.ops import node_s
from megacompile.cost.optimizer import OptimizerCost, UpdateCost, updates
from megacompile.cost.queues import COMPUTE, D2H, DEVICE, H2D, HOST, READ, STREAMS, Queues, Work
from megacompile.ir import ops
from megacompile.ir.buckets import Bucket, largest_shard
from megacompile.ir.edges import Handed, handed, stands_for, waits_for, written
from megacompile.ir.ops import Part
from megacompile.ir.schedule import Schedule
from megacompile.ir.stream import Stream
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
    drains: bool = False  # waits for the copies that deferred frees wait for
    helped: float = 0.0  # its amount on the device
    to_host: bool = False  # new parameters and states return to the host
    of_replicas: bool = False  # a collective between replicas
    fresh: bool = False  # its data are still on the device
    reads_weights: int | None = None  # key of the bucket that it copies to the device
    stages: bool = False  # copies states between a disk and a set of buffers


class _Graph:
    """One graph of a schedule as items. `sizes` has the costs of updates in `optimizer.step()`, by
    the bucket's key."""

    def __init__(self, schedule: Schedule, name: str, sizes: dict[int, UpdateCost]) -> None:
        self.name, self.schedule = name, schedule
        self.sizes = sizes
        self.items: list[_Item] = []
        self.gives: dict[Handed, int] = {}  # value that a later graph may take -> its item
        self.deferred: list[int] = []  # copies that the next drain waits for
        self.awaited: list[Handed] = []  # the same, of earlier graphs
        self.fresh: set[int] = set()  # buckets whose new weights stay on the device until a drain
        self._position: dict[fx.Node, int] = {}
        for node in schedule.graphs[name].nodes:
            if ops.op_of(node) is not None:
                self._add(node)
        # the queue that must be empty before the graph returns; new parameters of updates in the
        # backward reach the host while the next forward begins
        updates = any(item.to_host for item in self.items)
        self.returns_after = H2D if name == "forward" else None if updates else D2H
        # later graphs wait for a forward's values on a disk; its others are ready when it returns,
        # or ordered by the stream of their copies
        for what, node in handed(schedule, name).items():
            if name != "forward" or ops.effects(node).gives is ops.Value.SAVED_ON_DISK:
                self.gives[what] = self._position[node]

    def _add(self, node: fx.Node) -> None:
        op = ops.effects(node)
        if op.helps:  # the device may help with these updates
            for update in node.all_input_nodes:
                size = self.sizes.get(ops.arguments(update)[0].key)
                self.items[self._position[update]].helped = size.helped_bytes if size else 0.0
            return
        if not op.waits:
            self._defer(node)
            return
        queue = _QUEUES[op.stream]
        waits, takes = self._waits(node, queue)
        if op.frees is not None and not waits:
            return
        item = _Item(node, ops.label(node), queue, waits, takes, op.begins, drains=op.drains)
        item.of_replicas = op.of_replicas
        item.stages = op.on_disk and Part.STATES in (*op.reads, *op.writes)
        item.to_host = len(op.writes) == 2 and queue == D2H
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

    def _defer(self, node: fx.Node) -> None:
        """Record a deferred free: no stream waits for its `after`, but the next drain does."""
        for source in node.all_input_nodes:
            if source is node.args[0]:
                continue
            if source.op == "placeholder":
                self.awaited.append(stands_for(self.schedule, source))
                continue
            copy = producer(source)
            self.deferred.append(self._position[copy])
            self.fresh |= {key for key, part in written(copy) if part is Part.WEIGHTS}


@dataclass(frozen=True, slots=True)
class _Amounts:
    """The amount of work of a graph's items on a machine. Setup time counts as the bytes that could
    have been copied in that time."""

    graph: _Graph
    hardware: Hardware
    fused: bool

    def of(self, item: _Item) -> float:
        """Seconds of a compute, bytes of other ops."""
        if item.fresh:
            return 0.0
        if item.to_host:
            return self._returned(item.node)
        node, op = item.node, ops.effects(item.node)
        if self.graph.name == "update" and op.is_update:
            return self._update(ops.arguments(node)[0], item.queue)
        if op.on_disk:
            return ops.moved_bytes(node)
        if op.stream is Stream.COMM:
            moved = ops.moved_bytes(node)
            return self._exchanged(ops.arguments(node)[0], moved, item.of_replicas)
        if item.queue != COMPUTE:
            return self._copy(self._moved_bytes(node), op.copies(node))
        return node_s(node, self.hardware, fused=self.fused)

    def _returned(self, node: fx.Node) -> float:
        """Bytes of the copy of a bucket's new parameters and states to the host."""
        bucket: Bucket = ops.arguments(node)[0]
        if self.graph.name == "update":
            update = self.graph.sizes.get(bucket.key)
            return 0.0 if update is None else (update.size_bytes - update.grad_bytes) / 2
        return self._copy(ops.moved_bytes(node), 3 * len(bucket.params))

    def _update(self, bucket: Bucket, queue: int) -> float:
        """Amount of an update, from the bytes that the optimizer reads and writes on its device."""
        update, hardware = self.graph.sizes.get(bucket.key), self.hardware
        if update is None:
            return 0.0
        if queue != HOST:
            return update.size_bytes / (hardware.memory_gb_s * 1e9)
        return max(update.size_bytes, update.arithmetic_s * hardware.update_gb_s * 1e9)

    def _moved_bytes(self, node: fx.Node) -> int:
        """Bytes that a copy has to move, without those that the device already has or keeps."""
        op, size, subject = ops.effects(node), ops.moved_bytes(node), ops.arguments(node)[0]
        if not isinstance(subject, Bucket):
            return size
        plan = self.graph.schedule.plan
        if Part.WEIGHTS in op.reads and subject.key in plan.device_update | plan.resident:
            return 0  # the device has them already
        if Part.GRADIENTS in (*op.reads, *op.writes) and subject.key in plan.resident:
            return 0
        if Part.STATES in op.reads and not ops.arguments(node)[2]:  # masters
            params = largest_shard(subject).params  # these are on the device already
            trained = self.graph.schedule.gradient_params.get(subject.key, ())
            return size - sum(params[i].size_bytes for i in trained)
        return size

    def _copy(self, size_bytes: float, copies: int) -> float:
        return size_bytes + copies * self.hardware.copy_s * self.hardware.h2d_gb_s * 1e9

    def _exchanged(self, bucket: Bucket, size_bytes: int, of_replicas: bool) -> float:
        """Bytes that a rank receives in a collective. A sum of its shard over replicas is a
        reduce-scatter and an all-gather."""
        hardware, ranks = self.hardware, bucket.ranks
        rate = hardware.replicas_gb_s if of_replicas else hardware.interconnect_gb_s
        start = 0.0 if rate == math.inf else hardware.collective_s * rate * 1e9
        if of_replicas:
            return 2 * (bucket.replicas - 1) / bucket.replicas * size_bytes / ranks + start
        return size_bytes * (ranks - 1) / ranks + start


class Script:
    """The work of a step's graphs, independent of the machine. Forwards of the schedules run in
    order, then their backwards in reverse, then their updates. Without an `optimizer` there are no
    updates. `fused`: elementwise operations are fused (lowering "inductor")."""

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
        self.fused = fused
        self.graphs = [*forwards, *graphs("backward", schedules[::-1])]
        self.graphs += graphs("update", schedules) if optimizer is not None else []
        fresh = {key for graph in self.graphs for key in graph.fresh}
        for graph in forwards:  # prefetches use weights that are still on the device
            plan = graph.schedule.plan
            for item in graph.items:
                if item.reads_weights in fresh - plan.weights_on_disk:
                    item.takes, item.fresh = [], item.reads_weights not in plan.device_update
        self.sets = max((schedule.plan.state_sets for schedule in schedules), default=0)


class Steps:
    """Adds the work of steps on a machine to queues."""

    def __init__(self, script: Script, hardware: Hardware) -> None:
        self.graphs = []
        for graph in script.graphs:
            amounts = _Amounts(graph, hardware, script.fused)
            self.graphs.append((graph, [amounts.of(item) for item in graph.items]))
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
            first, before = len(queues.works), len(self.read)
            issued = [*self.returned, *last_compute] if graph.name == "update" else []
            for item, amount in zip(graph.items, amounts, strict=True):
                waits = [*(first + wait for wait in item.waits), *issued]
                waits += [self.given[what] for what in item.takes if what in self.given]
                waits += self.returned if item.begins else []
                if item.drains:
                    waits += self.deferred
                    self.deferred = []
                place = graph.name, item.label, item.queue
                of_replicas = item.of_replicas
                work = Work(*place, amount, waits, step, item.helped, of_replicas)
                at = queues.add(work)
                if item.stages:
                    (self.read if item.queue == READ else self.written).append(at)
            # a read of states begins after its graph, and after a write has freed a set of buffers
            for k in range(before, len(self.read)):
                waits = queues.works[self.read[k]].waits
                waits += self.returned
                if 0 <= k - self.sets < len(self.written):
                    waits.append(self.written[k - self.sets])
            self.given |= {what: first + at for what, at in graph.gives.items()}
            self.deferred += [first + at for at in graph.deferred]
            self.deferred += [self.given[what] for what in graph.awaited if what in self.given]
            if graph.name != "update":
                added = [(i, queues.works[i].queue) for i in range(first, len(queues.works))]
                self.returned = [i for i, queue in added if queue == graph.returns_after][-1:]
                last_compute = [i for i, queue in added if queue == COMPUTE][-1:] or last_compute
        return queues.add(Work("update", "", COMPUTE, 0.0, list(self.returned), step))


@dataclass(frozen=True, slots=True)
class Event:
    """One op in the predicted timeline."""

    graph: str  # "forward", "backward" or "update"
    label: str
    stream: Stream
    start_s: float
    stop_s: float
    step: int = 0


@dataclass(frozen=True)
class Prediction:
    """The predicted run of one or more steps."""

    total_s: float  # from start to end
    step_s: float  # from the end of the second-to-last step to the end of the last
    start_s: float  # start of that period
    critical_s: Mapping[Stream, float]  # of that period, by the stream on the critical path
    _run: Queues = field(repr=False, compare=False)

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """Events of all steps, ordered by their ends."""
        run, found = self._run, []
        for i in sorted(range(len(run.works)), key=run.stop_s.__getitem__):
            work = run.works[i]
            if work.label:
                place = (work.graph, work.label, STREAMS[work.queue])
                found.append(Event(*place, run.start_s[i], run.stop_s[i], work.step))
        return tuple(found)

    @property
    def uses_host(self) -> bool:
        """True if the host or a helping device updates host memory; otherwise the host's update
        rate is irrelevant."""
        return any(work.queue in (HOST, DEVICE) for work in self._run.works)

    def busy_s(self, stream: Stream) -> float:
        """Busy seconds of a stream in the last step's period."""
        start_s, stop_s = self.start_s, self.start_s + self.step_s
        spans = ((e.start_s, e.stop_s) for e in self.events if e.stream is stream)
        return sum(max(0.0, min(stop, stop_s) - max(start, start_s)) for start, stop in spans)


def simulate(
    schedule: Schedule | Sequence[Schedule],
    hardware: Hardware,
    *,
    optimizer: OptimizerCost | None = None,
    steps: int = 1,
    fused: bool = True,
) -> Prediction:
    """Predict `steps` steps on `hardware`; of three, the period of the last is a training step.

    With several schedules, one for each captured graph of a model, forwards run in order, backwards
    in reverse. Without an `optimizer` there are no updates. `fused`: elementwise operations are
    fused (lowering "inductor").
    """
    schedules = [schedule] if isinstance(schedule, Schedule) else list(schedule)
    return simulate_script(Script(schedules, optimizer, fused=fused), hardware, steps=steps)


def simulate_script(script: Script, hardware: Hardware, *, steps: int = 1) -> Prediction:
    """Like `simulate`, with a script, which can be reused for all machines."""
    run, added = Queues(hardware), Steps(script, hardware)
    ends = [added.add(run, step) for step in range(steps)]
    run.go()
    start = run.stop_s[ends[-2]] if steps > 1 else 0.0
    total = max(run.stop_s, default=0.0)
    stop = run.stop_s[ends[-1]] if steps > 1 else total
    last = ends[-1] if steps > 1 else max(range(len(run.works)), key=run.stop_s.__getitem__)
    return Prediction(
        total_s=total,
        step_s=stop - start,
        start_s=start,
        critical_s=run.critical(last, start),
        _run=run,
    )
