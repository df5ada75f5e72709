"""The cost of ops: seconds of computes, bytes of copies.

A piece of a template takes the sum over its kernels (`megacompile.cost.fusion`). Its analysis is
made once and kept with its graph, so that many schedules of one model can be simulated quickly.
"""

from __future__ import annotations

from collections import Counter

from torch import fx

from megacompile.cost.fusion import analyse
from megacompile.cost.hardware import Hardware
from megacompile.cost.kernels import Analysis, KernelWork
from megacompile.cost.pieces import analyse_pieces
from megacompile.ir import ops
from megacompile.ir.schedule import Schedule
from megacompile.ir.stages import Code, Template
from megacompile.ir.tiles import pieces_of

_EMPTY = Analysis((), 0, ())


def analysis_of(template: Template, code: Code, *, fused: bool = True) -> Analysis:
    """The analysis of a piece of a template, made once and kept with its graph."""
    module = template.graphs.get(code)
    if module is None:
        return _EMPTY
    kept: dict[bool, tuple[fx.Graph, Analysis]] = module.meta.setdefault("megacompile_cost", {})
    found = kept.get(fused)
    if found is None or found[0] is not module.graph:  # `meta` is copied along with a module
        count = analyse_pieces if pieces_of(module.graph) else analyse
        found = kept[fused] = module.graph, count(module.graph, fused=fused)
    return found[1]


def work_of(template: Template, code: Code, *, fused: bool = True) -> KernelWork:
    """Operations, bytes and kernels of a piece of a template."""
    return analysis_of(template, code, fused=fused).work


def compute_s(template: Template, code: Code, hardware: Hardware, *, fused: bool = True) -> float:
    """Seconds that a piece of a template takes alone."""
    return analysis_of(template, code, fused=fused).seconds(hardware)


def copies_of(node: fx.Node) -> int:
    """Number of copies that an op issues: a bucket's parameters are one, its gradients one each."""
    copies = ops.effects(node).copies
    return 1 if copies is None else copies(node)


def node_s(node: fx.Node, hardware: Hardware, *, fused: bool = True) -> float:
    """Seconds that a compute node takes alone."""
    op = ops.effects(node)
    if op.code is not None:
        return compute_s(ops.arguments(node)[0].traced, ops.code_of(node), hardware, fused=fused)
    if op.traffic is None:
        return 0.0
    return op.traffic(node) / (hardware.memory_gb_s * 1e9) + hardware.launch_s


def computes_s(schedule: Schedule, hardware: Hardware, *, fused: bool = True) -> float:
    """Seconds that what a step computes takes, wherever its buckets are: the templates, one after
    another as they run, and updates in the backward with what else there is."""
    runs: Counter[tuple[Template, Code]] = Counter()
    others_s = 0.0
    for graph in schedule.graphs.values():
        for node in ops.nodes_that(graph, lambda op: op.code or op.traffic):
            if ops.effects(node).code is not None:
                runs[ops.arguments(node)[0].traced, ops.code_of(node)] += 1
            elif schedule.update is None:
                others_s += node_s(node, hardware, fused=fused)
    return others_s + sum(n * compute_s(*run, hardware, fused=fused) for run, n in runs.items())
