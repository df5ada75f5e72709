"""The facts about a schedule's ops that are known before they run: for traces and predictions."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any

from torch import fx

from megacompile.cost.memory import DeviceMemory, MemoryKind, device_memory
from megacompile.ir import ops
from megacompile.ir.buckets import Bucket
from megacompile.ir.schedule import Schedule
from megacompile.ir.stages import Stage
from megacompile.tracing.timeline import OpInfo


def describe(schedule: Schedule, graph_name: str) -> tuple[OpInfo, ...]:
    """The ops of a graph that run, in program order: all but `begin`, `free` and `defer_free`."""
    held = Held(device_memory(schedule))
    nodes = ops.nodes_that(schedule.graphs[graph_name], lambda op: op.issues)
    return tuple(_info(node, held.next(graph_name, ops.label(node))) for node in nodes)


def _info(node: fx.Node, memory_bytes: int | None) -> OpInfo:
    op = ops.op_of(node)
    assert op is not None
    subject: Any = node.args[0] if node.args else None
    module = subject.name if isinstance(subject, Bucket | Stage) else ""
    label, size = ops.label(node), ops.copied_bytes(node)
    return OpInfo(label, op.name, op.stream.value, module, size, memory_bytes)


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
