"""Predicted timelines: aligned with a measured one, or of whole steps."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from megacompile.cost.hardware import Hardware
from megacompile.cost.memory import DeviceMemory, MemoryKind, device_memory
from megacompile.cost.optimizer import OptimizerCost
from megacompile.cost.simulate import Event, Prediction, simulate
from megacompile.ir import ops
from megacompile.ir.schedule import Schedule
from megacompile.views.timeline import OpInfo, Run, Span, Timeline, in_order


def predicted(
    measured: Timeline,
    hardware: Hardware,
    optimizers: Mapping[str, OptimizerCost] | None = None,  # by model
) -> Timeline:
    """Predict each measured run, starting at its measured start. Updates of a model without an
    optimizer are not predicted."""
    steps: dict[int, tuple[Prediction, DeviceMemory]] = {}  # by id of the schedule
    alike: dict[tuple[int, str], list[Span]] = {}  # spans of one run of each graph, starting at 0
    spans: list[Span] = []
    for i, run in enumerate(measured.runs):
        if not (ran := measured.of_run(i)):
            continue
        assert run.schedule is not None, "a timeline that was read from a file"
        key = id(run.schedule)
        if key not in steps:
            optimizer = (optimizers or {}).get(run.model)
            memory = device_memory(run.schedule, optimizer=optimizer)
            steps[key] = simulate(run.schedule, hardware, optimizer=optimizer), memory
        step, memory = steps[key]
        if (key, run.graph) not in alike:
            events = [event for event in step.events if event.graph == run.graph]
            start_s = min((event.start_s for event in events), default=0.0)
            infos = describe(run.schedule, run.graph)
            alike[key, run.graph] = list(_spans(infos, events, memory, run.model, later_s=-start_s))
        start_s = min(span.start_s for span in ran)
        spans += (
            replace(span, start_s=start_s + span.start_s, stop_s=start_s + span.stop_s, run=i)
            for span in alike[key, run.graph]
        )
    return Timeline(tuple(in_order(spans)), measured.runs, hardware.name, measured.order)


def predicted_steps(
    schedule: Schedule,
    hardware: Hardware,
    optimizer: OptimizerCost | None,
    *,
    model: str = "",
    steps: int = 3,
) -> Timeline:
    """Predict consecutive whole steps, including updates, as a trace would show them.

    Unlike `predicted`, this needs no measured start times.
    """
    graphs = [name for name in schedule.graphs if name != "update" or optimizer is not None]
    runs = tuple(Run(model, graph, schedule) for _ in range(steps) for graph in graphs)
    simulated = simulate(schedule, hardware, optimizer=optimizer, steps=steps)
    memory = device_memory(schedule, optimizer=optimizer)
    infos = {graph: describe(schedule, graph) for graph in graphs}
    spans: list[Span] = []
    for run, (step, graph) in enumerate((step, graph) for step in range(steps) for graph in graphs):
        events = [e for e in simulated.events if (e.step, e.graph) == (step, graph)]
        spans += _spans(infos[graph], events, memory, model, run=run)
    return Timeline(tuple(in_order(spans)), runs, hardware.name, (model,))


def _spans(
    infos: Sequence[OpInfo],
    events: Sequence[Event],
    memory: DeviceMemory,
    model: str,
    *,
    run: int = -1,
    later_s: float = 0.0,
) -> Iterator[Span]:
    """The spans of a run of one graph, without `begin` and frees.

    Args:
        infos: of the graph's ops.
        events: of the graph.
        later_s: added to their times.
    """
    held = Held(memory)
    left: defaultdict[str, deque[OpInfo]] = defaultdict(deque)
    for info in infos:
        left[info.name].append(info)
    for event in events:
        if left[event.label]:
            info = replace(left[event.label].popleft(), lane=event.stream.value)
            size = held.next(event.graph, event.label)
            yield Span(info, event.start_s + later_s, event.stop_s + later_s, model, run, size)


# Static facts about a schedule's ops, for traces and predictions.


def describe(schedule: Schedule, graph_name: str) -> tuple[OpInfo, ...]:
    """The ops of a graph in program order, except `begin`, `free` and `defer_free`."""
    held = Held(device_memory(schedule))
    nodes = ops.nodes_that(schedule.graphs[graph_name], lambda op: op.issues)
    return tuple(OpInfo.of(node, held.next(graph_name, ops.label(node))) for node in nodes)


class Held:
    """Device memory at the start of each op, without its workspace; queried in program order."""

    def __init__(self, memory: DeviceMemory) -> None:
        self._sizes: defaultdict[tuple[str, str], deque[int]] = defaultdict(deque)
        for moment in memory.moments:
            inside = moment.live_bytes.get(MemoryKind.WORKSPACE, 0)
            self._sizes[moment.graph, moment.label].append(moment.total_bytes - inside)

    def next(self, graph: str, label: str) -> int | None:
        """Bytes at the next op with this printed name; None if it does not change memory."""
        sizes = self._sizes[graph, label]
        return sizes.popleft() if sizes else None
