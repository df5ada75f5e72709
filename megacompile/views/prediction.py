"""The cost model's timeline, laid over what was measured. For traces.

What is taken of a prediction is a list of (op's printed name, stream, start, end) a graph.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from megacompile.cost.hardware import Hardware
from megacompile.cost.memory import DeviceMemory, MemoryKind, device_memory
from megacompile.cost.optimizer import OptimizerCost
from megacompile.cost.simulate import simulate
from megacompile.ir import ops
from megacompile.ir.schedule import Schedule
from megacompile.views.timeline import OpInfo, Run, Span, Timeline, in_order


class Predicted(NamedTuple):
    """One op in the cost model's timeline of a graph."""

    name: str
    lane: str
    start_s: float
    stop_s: float
    memory_bytes: int | None = None  # of the device; where it changes


def predict(
    schedule: Schedule, hardware: Hardware, optimizer: OptimizerCost | None = None
) -> dict[str, list[Predicted]]:
    """By graph, with times from the graph's start; nothing of the update without an optimizer."""
    found: dict[str, list[Predicted]] = {name: [] for name in schedule.graphs}
    simulated = simulate(schedule, hardware, optimizer=optimizer)
    held = Held(simulated.memory)
    for event in simulated.events:
        size = held.next(event.graph, event.label)
        found[event.graph].append(
            Predicted(event.label, event.stream.value, event.start_s, event.stop_s, size)
        )
    for name, events in found.items():
        start = min((event.start_s for event in events), default=0.0)
        found[name] = [
            event._replace(start_s=event.start_s - start, stop_s=event.stop_s - start)
            for event in events
        ]
    return found


def predicted(
    measured: Timeline,
    hardware: Hardware,
    optimizers: Mapping[str, OptimizerCost] | None = None,  # by model
) -> Timeline:
    """The prediction of each run that was measured, from where the measured one begins."""
    known: dict[int, dict[str, list[Predicted]]] = {}
    described: dict[tuple[int, str], tuple[OpInfo, ...]] = {}  # a whole step is walked for each
    spans: list[Span] = []
    for i, run in enumerate(measured.runs):
        if not (ran := measured.of_run(i)):
            continue
        assert run.schedule is not None, "a timeline that was read from a file"
        key = id(run.schedule)
        if key not in known:
            known[key] = predict(run.schedule, hardware, (optimizers or {}).get(run.model))
        start = min(span.start_s for span in ran)
        infos: defaultdict[str, deque[OpInfo]] = defaultdict(deque)
        if (key, run.graph) not in described:
            described[key, run.graph] = describe(run.schedule, run.graph)
        for info in described[key, run.graph]:
            infos[info.name].append(info)
        for event in sorted(known[key][run.graph], key=lambda event: event.start_s):
            if infos[event.name]:  # `begin` and frees are not drawn
                info = replace(infos[event.name].popleft(), lane=event.lane)
                times = (start + event.start_s, start + event.stop_s)
                spans.append(Span(info, *times, run.model, i, event.memory_bytes))
    return Timeline(tuple(in_order(spans)), measured.runs, hardware.name, measured.order)


def predicted_steps(
    schedule: Schedule,
    hardware: Hardware,
    optimizer: OptimizerCost | None,
    *,
    model: str = "",
    steps: int = 3,
) -> Timeline:
    """Whole steps, one after the other, updates included: what a trace would have of them.

    `predicted` begins every graph where it was measured to begin; here nothing is measured.
    """
    graphs = [name for name in schedule.graphs if name != "update" or optimizer is not None]
    names = {graph: {i.name: i for i in describe(schedule, graph)} for graph in graphs}
    runs = tuple(Run(model, graph, schedule) for _ in range(steps) for graph in graphs)
    spans = []
    simulated = simulate(schedule, hardware, optimizer=optimizer, steps=steps)
    held = {step: Held(simulated.memory) for step in range(steps)}
    for event in simulated.events:
        if event.label not in names[event.graph]:  # `begin` and frees are left out
            continue
        info = replace(names[event.graph][event.label], lane=event.stream.value)
        run = len(graphs) * event.step + graphs.index(event.graph)
        size = held[event.step].next(event.graph, event.label)
        spans.append(Span(info, event.start_s, event.stop_s, model, run, size))
    return Timeline(tuple(in_order(spans)), runs, hardware.name, (model,))


# The facts about a schedule's ops that are known before they run: for traces and predictions.


def describe(schedule: Schedule, graph_name: str) -> tuple[OpInfo, ...]:
    """The ops of a graph that run, in program order: all but `begin`, `free` and `defer_free`."""
    held = Held(device_memory(schedule))
    nodes = ops.nodes_that(schedule.graphs[graph_name], lambda op: op.issues)
    return tuple(OpInfo.of(node, held.next(graph_name, ops.label(node))) for node in nodes)


class Held:
    """Device memory when each op begins, without its workspace, asked for in program order."""

    def __init__(self, memory: DeviceMemory) -> None:
        self._sizes: defaultdict[tuple[str, str], deque[int]] = defaultdict(deque)
        for moment in memory.moments:
            inside = moment.live_bytes.get(MemoryKind.WORKSPACE, 0)
            self._sizes[moment.graph, moment.label].append(moment.total_bytes - inside)

    def next(self, graph: str, label: str) -> int | None:
        """In bytes, of the next op of this printed name; None where memory does not change."""
        sizes = self._sizes[graph, label]
        return sizes.popleft() if sizes else None
