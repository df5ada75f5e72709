"""Predict when each op of a schedule runs: a discrete-event simulation of its three streams.

An op starts when its stream has come to it and everything it waits for is done: the edges that
`megacompile.verify` checks and the runtime keeps. Copies take their bytes over the bandwidth, which
is shared while both directions run. A compute takes the larger of its matrix products over the
matmul rate and its memory traffic over the memory bandwidth, where elementwise operations are
counted as fused: only what enters and leaves a stage, and what matrix products read and write,
goes through device memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from megacompile import ops
from megacompile.hardware import Hardware
from megacompile.hazards import producer
from megacompile.ir import Code, Schedule, Stream, Template, TensorMeta, tensors_bytes


@dataclass(frozen=True, slots=True)
class Event:
    """One op in the predicted timeline."""

    graph: str
    label: str
    stream: Stream
    start_s: float
    stop_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """The predicted run of a schedule's graphs, one after the other."""

    events: tuple[Event, ...]
    total_s: float

    def busy_s(self, stream: Stream) -> float:
        """Seconds in which a stream has work."""
        return sum(e.stop_s - e.start_s for e in self.events if e.stream is stream)

    @property
    def bound(self) -> Stream:
        """The busiest stream: what the total can at best be brought down to."""
        return max(Stream, key=self.busy_s)

    def __str__(self) -> str:
        lines = [f"{self.total_s * 1e3:.1f} ms predicted, bound by {self.bound.value}"]
        for stream in Stream:
            busy = self.busy_s(stream)
            lines.append(f"{stream.value:8} {busy * 1e3:9.1f} ms busy, {busy / self.total_s:4.0%}")
        return "\n".join(lines)


def simulate(schedule: Schedule, hardware: Hardware) -> Timeline:
    """Predict a step's forward and backward on `hardware`. Times are in seconds."""
    events: list[Event] = []
    now = 0.0
    for name, graph in schedule.graphs.items():
        found, now = _Run(name, graph, hardware, now).events()
        events += found
    return Timeline(tuple(events), now)


@dataclass(slots=True)
class _Op:
    node: fx.Node
    stream: Stream
    waits: frozenset[fx.Node]
    left: float  # bytes of a copy, seconds of a compute
    start_s: float = -1.0


class _Run:
    """One graph, from a point in time at which every stream is idle."""

    def __init__(self, name: str, graph: fx.Graph, hardware: Hardware, now_s: float) -> None:
        self.name = name
        self.hardware = hardware
        self.now_s = now_s
        self.queues: dict[Stream, list[_Op]] = {stream: [] for stream in Stream}
        for node in ops.nodes_of(graph):
            stream = ops.stream_of(node)
            waits = frozenset(
                p
                for p in map(producer, node.all_input_nodes)
                if ops.op_of(p) is not None and node.target is not ops.park
            )
            self.queues[stream].append(_Op(node, stream, waits, self._work(node)))

    def _work(self, node: fx.Node) -> float:
        if ops.stream_of(node) is not Stream.COMPUTE:
            return float(_copied_bytes(node))
        return compute_s(node, self.hardware)

    def events(self) -> tuple[list[Event], float]:
        """Run to the end; gives the events and the time then."""
        done: set[fx.Node] = set()
        events: list[Event] = []
        while any(self.queues.values()):
            running = [q[0] for q in self.queues.values() if q and q[0].waits <= done]
            assert running, "a schedule whose ops wait for each other"
            rates = {op.stream: self._rate(op, running) for op in running}
            for op in running:
                op.start_s = self.now_s if op.start_s < 0 else op.start_s
            step = min(op.left / rates[op.stream] for op in running)
            self.now_s += step
            for op in running:
                op.left -= step * rates[op.stream]
                if op.left <= 1e-9 * rates[op.stream]:
                    done.add(op.node)
                    self.queues[op.stream].pop(0)
                    name = ops.label(op.node)
                    events.append(Event(self.name, name, op.stream, op.start_s, self.now_s))
        return events, self.now_s

    def _rate(self, op: _Op, running: Iterable[_Op]) -> float:
        """Bytes a second of a copy; a compute's work is in seconds."""
        if op.stream is Stream.COMPUTE:
            return 1.0
        alone = sum(other.stream is not Stream.COMPUTE for other in running) == 1
        hardware = self.hardware
        if op.stream is Stream.H2D:
            return 1e9 * (hardware.h2d_gb_s if alone else hardware.h2d_both_gb_s)
        return 1e9 * (hardware.d2h_gb_s if alone else hardware.d2h_both_gb_s)


def _copied_bytes(node: fx.Node) -> int:
    if node.target is ops.prefetch:
        return int(ops.arguments(node)[0].size_bytes)
    return tensors_bytes(ops.arguments(node)[1].meta.get("value"))


_FREE_OF_COST = (
    ops.begin,
    ops.hold,
    ops.save_rng,
    ops.free,
    ops.park,
    ops.alloc_grad,
    ops.alloc_state,
)


def compute_s(node: fx.Node, hardware: Hardware) -> float:
    """Seconds that a compute node takes."""
    if node.target in _FREE_OF_COST:
        return 0.0
    if node.target in (ops.forward, ops.recompute, ops.backward):
        stage = ops.arguments(node)[0]
        code = Code.RECOMPUTE if node.target is ops.recompute else Code.BACKWARD
        if node.target is ops.forward:
            code = Code.FORWARD_SAVING if ops.arguments(node)[3] else Code.FORWARD
        flops, traffic_bytes = work_of(stage.traced, code)
    else:  # snapshot, assign, add_grad: read and write
        flops, traffic_bytes = 0, 3 * tensors_bytes(node.meta.get("value"))
    by_rate = flops / (hardware.matmul_tflop_s * 1e12)
    by_memory = traffic_bytes / (hardware.memory_gb_s * 1e9)
    return max(by_rate, by_memory) + hardware.launch_s


@cache
def work_of(template: Template, code: Code) -> tuple[int, int]:
    """(operations of matrix products and attention, bytes through device memory) of a piece."""
    graph = template.graphs[code].graph
    flops = 0
    traffic = sum(_bytes(node) for node in graph.find_nodes(op="placeholder"))
    traffic += sum(_bytes(node) for node in graph.output_node().all_input_nodes)
    for node in graph.nodes:
        packet = getattr(node.target, "overloadpacket", None)
        if node.op != "call_function" or packet not in flop_registry:
            continue
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        flops += int(flop_registry[packet](*args, **kwargs, out_val=node.meta["val"]))
        traffic += _bytes(node) + sum(_bytes(source) for source in node.all_input_nodes)
    return flops, traffic


def _bytes(node: fx.Node) -> int:
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else [value]
    return sum(TensorMeta.of(v).size_bytes for v in values if isinstance(v, torch.Tensor))
