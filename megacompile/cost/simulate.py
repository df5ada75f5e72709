"""Predict when each op of a schedule runs: a discrete-event simulation of its streams and the CPU.

An op starts when its stream has come to it and everything it waits for is done: the edges that
`megacompile.verify` checks and the runtime keeps, and between steps those of the runtime itself:

    a forward's prefetch waits until its bucket is updated: by the CPU, or by the last backward
    a backward begins when the forward's prefetches are done, because the forward returns then
    the CPU's update and the next forward begin when the gradients are on the host
    a forward's drain waits for the copies of what was deferred before it

Copies take their bytes over the bandwidth, which is less while both directions run. The CPU's
update and the copies share host memory: where they want more than it has, each gets a fair share.
A device that helps takes the last of the CPU's updates over the link (see `updates.workers`).
Computes take what `megacompile.cost.ops` says. Times are in seconds.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from megacompile.cost.hardware import Hardware
from megacompile.cost.memory import DeviceMemory, device_memory
from megacompile.cost.ops import code_of, copies_of, node_s, work_of
from megacompile.cost.optimizer import OptimizerCost, host_updates, updates
from megacompile.ir import ops
from megacompile.ir.buckets import Bucket
from megacompile.ir.ops import Part
from megacompile.ir.schedule import Schedule
from megacompile.ir.stages import Code, Stage
from megacompile.ir.stream import Stream
from megacompile.ir.values import producer
from megacompile.text import format_bytes

__all__ = ["Event", "Lane", "Timeline", "node_s", "simulate", "work_of"]


class Lane(enum.Enum):
    """The streams of a schedule, and who updates host memory."""

    COMPUTE = "compute"
    H2D = "h2d"
    D2H = "d2h"
    HOST = "host"
    DEVICE = "device"  # which helps the host, in chunks over the link


@dataclass(frozen=True, slots=True)
class Event:
    """One op in the predicted timeline."""

    graph: str  # "forward", "backward" or "update"
    label: str
    stream: Lane
    start_s: float
    stop_s: float
    step: int = 0


@dataclass(frozen=True, slots=True)
class Timeline:
    """The predicted run of one or more steps."""

    events: tuple[Event, ...]  # of every step, in the order in which they end
    total_s: float  # from the start to the end of everything
    step_s: float  # from the end of the step before the last one to the end of the last
    start_s: float  # where that period starts
    critical_s: Mapping[Lane, float]  # of that period: what the end of the step waited for
    memory: DeviceMemory = field(repr=False)

    @property
    def stop_s(self) -> float:
        """Where the last step's period ends."""
        return self.start_s + self.step_s

    def busy_s(self, stream: Lane | Stream) -> float:
        """Seconds of the last step's period in which a stream has work."""
        lane = Lane(stream.value)
        spans = ((e.start_s, e.stop_s) for e in self.events if e.stream is lane)
        return sum(
            max(0.0, min(stop, self.stop_s) - max(start, self.start_s)) for start, stop in spans
        )

    @property
    def bound(self) -> Lane:
        """What the step waits for most of its time."""
        return max(Lane, key=lambda lane: self.critical_s.get(lane, 0.0))

    def device_bytes(self) -> list[tuple[float, int]]:
        """Device memory over the last step: (time, bytes) where its computes start."""
        last = max((e.step for e in self.events), default=0)
        starts: dict[tuple[str, str], list[float]] = {}
        for event in self.events:
            if event.step == last:
                starts.setdefault((event.graph, event.label), []).append(event.start_s)
        found = []
        for moment in self.memory.moments:
            if times := starts.get((moment.graph, moment.label)):
                found.append((times.pop(0), moment.total_bytes))
        return sorted(found)

    def __str__(self) -> str:
        lines = [
            f"{self.step_s * 1e3:.1f} ms predicted, bound by {self.bound.value}, "
            f"{format_bytes(self.memory.peak.total_bytes)} of device memory"
        ]
        for lane in Lane:
            busy, critical = self.busy_s(lane), self.critical_s.get(lane, 0.0)
            if busy or lane not in (Lane.HOST, Lane.DEVICE):
                share = (busy / self.step_s, critical / self.step_s) if self.step_s else (0.0, 0.0)
                lines.append(
                    f"{lane.value:8} {busy * 1e3:9.1f} ms busy, {share[0]:4.0%}; "
                    f"waited for {share[1]:4.0%}"
                )
        return "\n".join(lines)


def simulate(
    schedule: Schedule | Sequence[Schedule],
    hardware: Hardware,
    *,
    optimizer: OptimizerCost | None = None,
    steps: int = 1,
    fused: bool = True,
) -> Timeline:
    """Predict `steps` steps on `hardware`.

    Args:
        schedule: or several, where the model was captured in several graphs: their forwards run
            in order, their backwards in the opposite one.
        optimizer: what updates between two steps; None: nothing.
        steps: one runs from idle to idle; with three, the last one's period is that of training.
        fused: elementwise operations are fused (lowering "inductor").
    """
    schedules = [schedule] if isinstance(schedule, Schedule) else list(schedule)
    run = _Run(hardware)
    script = _Script(schedules, hardware, optimizer, fused)
    ends = [script.add(run, step) for step in range(steps)]
    run.go()
    start = run.stop_s[ends[-2]] if steps > 1 else 0.0
    total = max(run.stop_s, default=0.0)
    stop = run.stop_s[ends[-1]] if steps > 1 else total
    last = ends[-1] if steps > 1 else max(range(len(run.ops)), key=run.stop_s.__getitem__)
    return Timeline(
        events=run.events(),
        total_s=total,
        step_s=stop - start,
        start_s=start,
        critical_s=run.critical(last, start),
        memory=device_memory(schedules, optimizer=optimizer, fused=fused),
    )


# The ops.

_LANES = {stream: list(Lane).index(Lane(stream.value)) for stream in Stream}
_COMPUTE, _H2D, _D2H, _HOST, _DEVICE = range(len(Lane))


@dataclass(slots=True)
class _Op:
    """An op of one step."""

    graph: str
    label: str
    lane: int
    work: float  # seconds of a compute, bytes of a copy or an update
    waits: list[int]  # ops of other lanes
    step: int
    since: int = -1  # the op that it is the second half of
    helped: float = 0.0  # work of an update where the device makes it; 0: it cannot


class _Run:
    """Ops in the order of their lanes, and when they ran."""

    def __init__(self, hardware: Hardware) -> None:
        self.ops: list[_Op] = []
        self.start_s: list[float] = []
        self.stop_s: list[float] = []
        self.blocker: list[int] = []  # the op whose end let this one start, or -1
        self.rates = [_rates(hardware, lanes) for lanes in range(1 << len(Lane))]

    def add(self, op: _Op) -> int:
        self.ops.append(op)
        return len(self.ops) - 1

    def go(self) -> None:
        """Run everything."""
        count = len(self.ops)
        self.start_s, self.stop_s = [0.0] * count, [0.0] * count
        self.blocker = [-1] * count
        missing = [len(op.waits) for op in self.ops]
        readers: list[list[int]] = [[] for _ in range(count)]
        for i, op in enumerate(self.ops):
            for wait in op.waits:
                readers[wait].append(i)
        lanes = range(len(Lane))
        queues = [deque(i for i, op in enumerate(self.ops) if op.lane == k) for k in lanes]
        runs, left, running, now, done = [-1] * len(Lane), [0.0] * len(Lane), 0, 0.0, 0
        last_of = [-1] * len(Lane)
        while done < count:
            for k in lanes:
                if running >> k & 1:
                    continue
                i = self._helped(queues[_HOST]) if k == _DEVICE else next(iter(queues[k]), -1)
                if i < 0 or missing[i]:
                    continue
                running |= 1 << k
                runs[k] = i
                left[k] = self.ops[i].work
                if k == _DEVICE:
                    queues[_HOST].remove(i)
                    self.ops[i].lane, left[k] = k, self.ops[i].helped
                else:
                    queues[k].popleft()
                self.start_s[i] = now
                blockers = [*self.ops[i].waits, *([last_of[k]] if last_of[k] >= 0 else [])]
                self.blocker[i] = max(blockers, key=self.stop_s.__getitem__, default=-1)
            assert running, "a schedule whose ops wait for each other"
            rates = self.rates[running]
            active = [k for k in lanes if running >> k & 1]
            times = [left[k] / rates[k] if left[k] else 0.0 for k in active]
            step = min(times)
            now += step
            for k, time_s in zip(active, times, strict=True):
                if time_s > step * (1 + 1e-12):
                    left[k] -= step * rates[k]
                    continue
                i = runs[k]
                self.stop_s[i] = now
                running &= ~(1 << k)
                last_of[k] = i
                done += 1
                for reader in readers[i]:
                    missing[reader] -= 1

    def _helped(self, queue: Iterable[int]) -> int:
        """The last of the updates of one step that wait for the host, if the device can make it."""
        found = step = -1
        for i in queue:
            op = self.ops[i]
            if step not in (-1, op.step):
                break
            step = op.step
            if op.helped:
                found = i
        return found

    def events(self) -> tuple[Event, ...]:
        lanes = list(Lane)
        order = sorted(range(len(self.ops)), key=self.stop_s.__getitem__)
        found = []
        for i in order:
            op = self.ops[i]
            start = self.start_s[i if op.since < 0 else op.since]
            if op.label:
                lane = lanes[op.lane]
                found.append(Event(op.graph, op.label, lane, start, self.stop_s[i], op.step))
        return tuple(found)

    def critical(self, last: int, start_s: float) -> dict[Lane, float]:
        """Seconds by lane on the way back from an op to a time: who let whom start."""
        lanes = list(Lane)
        found = dict.fromkeys(Lane, 0.0)
        while last >= 0 and self.stop_s[last] > start_s:
            begin = max(self.start_s[last], start_s)
            found[lanes[self.ops[last].lane]] += self.stop_s[last] - begin
            last = self.blocker[last]
        return found


def _rates(hardware: Hardware, lanes: int) -> tuple[float, ...]:
    """Work a second of each lane while those in the mask run.

    The device's updates go both ways at once, and divide each way with what else goes there.
    """
    h2d, d2h, host, device = (lanes >> k & 1 for k in (_H2D, _D2H, _HOST, _DEVICE))
    down = hardware.h2d_both_gb_s if d2h or device else hardware.h2d_gb_s
    up = hardware.d2h_both_gb_s if h2d or device else hardware.d2h_gb_s
    down, up = down / max(1, h2d + device), up / max(1, d2h + device)
    host_gb_s = hardware.update_gb_s if host else 0.0
    wanted = [h2d * down, d2h * up, host_gb_s, device * 2 * min(down, up)]
    given = _shares(wanted, hardware.host_memory_gb_s) if host else wanted
    return (1.0, *(rate * 1e9 for rate in given))


def _shares(wanted: Sequence[float], total: float) -> list[float]:
    """Max-min fair: who wants less than an equal share gets it, the others divide the rest."""
    given = [0.0] * len(wanted)
    left = total
    order = sorted((k for k in range(len(wanted)) if wanted[k]), key=wanted.__getitem__)
    for position, k in enumerate(order):
        given[k] = min(wanted[k], left / (len(order) - position))
        left -= given[k]
    return given


class _Script:
    """Adds the ops of a step to a run."""

    def __init__(
        self,
        schedules: Sequence[Schedule],
        hardware: Hardware,
        optimizer: OptimizerCost | None,
        fused: bool,
    ) -> None:
        self.hardware = hardware
        self.graphs = [_Graph(s, "forward", hardware, fused) for s in schedules]
        self.graphs += [
            _Graph(s, "backward", hardware, fused) for s in reversed(schedules) if s.backward
        ]
        deferred = {key for graph in self.graphs for key in graph.deferred}
        for graph in self.graphs:
            if graph.name == "forward":
                graph.take_deferred(deferred)
        self.updates = [
            (u, self._update_bytes(u.size_bytes, u.numel, optimizer.arithmetic_s))
            for s in schedules
            if optimizer is not None
            for u in host_updates(s, optimizer)
        ]
        self.on_device = [
            (u, s.plan.device_update)
            for s in schedules
            if optimizer is not None
            for u in updates(s, optimizer)
            if u.bucket.key in s.plan.resident | s.plan.device_update
        ]
        self.ready: dict[_Place, int] = {}  # the op of the last step that brings it up to date
        self.boundary: list[int] = []  # what the next graph's begin waits for
        self.deferred: list[int] = []  # the copies that the next drain waits for

    def _update_bytes(self, size_bytes: float, numel: int, arithmetic_s: float) -> float:
        return max(size_bytes, numel / 1e9 * arithmetic_s * self.hardware.update_gb_s * 1e9)

    def add(self, run: _Run, step: int) -> int:
        """Gives the op that ends the step: the last compute."""
        ready: dict[_Place, int] = {}
        last_compute = -1
        for graph in self.graphs:
            first = len(run.ops)
            drained = -1
            for item in graph.items:
                waits = [first + wait for wait in item.waits]
                if item.begins:
                    waits += self.boundary
                if item.reads in self.ready:
                    waits.append(self.ready[item.reads])
                if item.is_drain:
                    waits += self.deferred
                    self.deferred = []
                since = len(run.ops) - 1 if item.continues else -1
                op = _Op(graph.name, item.label, item.lane, item.work, waits, step, since)
                index = run.add(op)
                if item.lane == graph.drains:
                    drained = index
                if item.lane == _COMPUTE:
                    last_compute = index
                if item.lands is not None:
                    ready[item.lands] = index
                if item.deferred:
                    self.deferred.append(index)
            self.boundary = [drained] if drained >= 0 else []
        after = [*self.boundary, *([last_compute] if last_compute >= 0 else [])]
        for update, handed in self.on_device:
            key, label = update.bucket.key, f"{update.bucket.label}UPDATE"
            seconds = update.size_bytes / (self.hardware.memory_gb_s * 1e9)
            made = run.add(_Op("update", label, _COMPUTE, seconds, list(self.boundary), step))
            if key in handed:
                ready[Part.WEIGHTS, key] = made
                back = update.size_bytes - update.grad_bytes
                label = f"{update.bucket.label}OFFLOAD_STATE"
                op = _Op("update", label, _D2H, back / 2, [made], step)
                ready[Part.STATES, key] = run.add(op)
                self.deferred.append(ready[Part.STATES, key])
        for host, work in self.updates:
            key, label = host.bucket.key, f"{host.bucket.label}UPDATE"
            op = _Op("update", label, _HOST, work, after, step, helped=host.helped_bytes)
            ready[Part.WEIGHTS, key] = run.add(op)
        self.ready = ready
        end = _Op("update", "", _COMPUTE, 0.0, list(self.boundary), step)
        return run.add(end)


_Place = tuple[Part, int]  # of the bucket with that key


@dataclass(slots=True)
class _Item:
    """An op of a graph, before it belongs to a step."""

    label: str
    lane: int
    work: float
    waits: list[int]  # positions in the graph's items
    begins: bool = False  # waits for what the graph before it left running
    reads: _Place | None = None  # what of the last step's update it waits for
    lands: _Place | None = None  # what is up to date on the host after it
    continues: bool = False  # the second half of the item before
    deferred: bool = False  # what it copies is deferred until it is done
    is_drain: bool = False  # waits for the copies of what was deferred


class _Graph:
    """One graph of a schedule as items."""

    def __init__(self, schedule: Schedule, name: str, hardware: Hardware, fused: bool) -> None:
        self.name = name
        self.hardware = hardware
        self.fused = fused
        self.plan = schedule.plan
        self.trained = schedule.gradient_params if schedule.backward is not None else {}
        self.items: list[_Item] = []
        self.drains = _H2D if name == "forward" else _D2H
        self.deferred: set[int] = set()  # keys of buckets whose new parameters are there for now
        self._position: dict[fx.Node, int] = {}
        self._seconds: dict[tuple[int, Code], float] = {}
        graph = schedule.graphs[name]
        for node in graph.nodes:
            if not ops.effects(node).waits:
                self._defer(node)
            elif ops.op_of(node) is not None:
                self._add(node)
        if any(item.lands is not None for item in self.items):
            self.drains = -1  # new parameters land while the next forward begins

    def _add(self, node: fx.Node) -> None:
        lane = _LANES[ops.stream_of(node)]
        waits = []
        for source in node.all_input_nodes:
            position = self._position.get(producer(source))
            if position is not None and self.items[position].lane != lane:
                waits.append(position)
        op = ops.effects(node)
        if op.frees is not None and not waits:
            return
        label = ops.label(node)
        item = _Item(label, lane, 0.0, waits, begins=op.begins)
        item.is_drain = op.drains
        if lane == _COMPUTE:
            item.work = self._compute_s(node)
        elif len(op.writes) == 2:  # one part lands behind the other
            first, second = op.writes
            bucket = ops.arguments(node)[0]
            whole, params = ops.copied_bytes(node), self._param_bytes(node)
            item.work = self._copy(params, len(bucket.params))
            item.label, item.lands = "", (first, bucket.key)
            self.items.append(item)
            work = self._copy(whole - params, 2 * len(bucket.params))
            item = _Item(label, lane, work, [], lands=(second, bucket.key), continues=True)
        else:
            item.work = self._copy(self._moved_bytes(node), copies_of(node))
            for part in op.reads:
                if part is not Part.GRADIENTS:  # which no update changes
                    item.reads = part, ops.arguments(node)[0].key
        self._position[node] = len(self.items)
        self.items.append(item)

    def _defer(self, node: fx.Node) -> None:
        """No stream waits for `after` here, but the next drain does."""
        for source in node.all_input_nodes:
            position = self._position.get(producer(source))
            if position is not None and source is not node.args[0]:
                self.items[position].deferred = True
                self.deferred.add(ops.arguments(producer(source))[0].key)

    def take_deferred(self, keys: set[int]) -> None:
        """Prefetches of these buckets take what is still on the device."""
        for item in self.items:
            if item.reads is not None and item.reads[0] is Part.WEIGHTS and item.reads[1] in keys:
                item.reads, item.work = None, 0.0

    def _moved_bytes(self, node: fx.Node) -> int:
        """Those of a copy that are not on the device, or need not leave it."""
        op, size, subject = ops.effects(node), ops.copied_bytes(node), ops.arguments(node)[0]
        if not isinstance(subject, Bucket):
            return size
        if Part.WEIGHTS in op.reads and subject.key in self.plan.device_update:
            return 0  # the device made them, and has them still
        if Part.GRADIENTS in (*op.reads, *op.writes) and subject.key in self.plan.resident:
            return 0
        if Part.STATES in op.reads and not ops.arguments(node)[2]:  # masters
            return size - self._param_bytes(node)  # they are on the device already
        return size

    def _copy(self, size_bytes: float, copies: int) -> float:
        """Bytes, with those that could have been copied while copies were set up."""
        return size_bytes + copies * self.hardware.copy_s * self.hardware.h2d_gb_s * 1e9

    def _param_bytes(self, node: fx.Node) -> int:
        bucket = ops.arguments(node)[0]
        return sum(bucket.params[i].size_bytes for i in self.trained.get(bucket.key, ()))

    def _compute_s(self, node: fx.Node) -> float:
        if ops.effects(node).code is None:
            return node_s(node, self.hardware, fused=self.fused)
        stage: Stage = ops.arguments(node)[0]
        key = id(stage.template), code_of(node)
        if key not in self._seconds:
            self._seconds[key] = node_s(node, self.hardware, fused=self.fused)
        return self._seconds[key]
