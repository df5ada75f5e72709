"""What ops cost: seconds of computes, bytes of copies.

A piece of a template takes the sum over its kernels (`megacompile.cost.kernels`). Its analysis is
made once and kept with its graph, so that many schedules of one model can be simulated quickly.
"""

from __future__ import annotations

from torch import fx

from megacompile.cost.hardware import Hardware
from megacompile.cost.kernels import Analysis, Work, analyse
from megacompile.ir import ops
from megacompile.ir.stages import Code, Template
from megacompile.ir.stream import Stream
from megacompile.ir.tensors import tensors_bytes

_EMPTY = Analysis((), 0, ())


def analysis_of(template: Template, code: Code, *, fused: bool = True) -> Analysis:
    """The analysis of a piece of a template, made once and kept with its graph."""
    module = template.graphs.get(code)
    if module is None:
        return _EMPTY
    kept: dict[bool, tuple[fx.Graph, Analysis]] = module.meta.setdefault("megacompile_cost", {})
    found = kept.get(fused)
    if found is None or found[0] is not module.graph:  # `meta` is copied along with a module
        found = kept[fused] = module.graph, analyse(module.graph, fused=fused)
    return found[1]


def work_of(template: Template, code: Code, *, fused: bool = True) -> Work:
    """Operations, bytes and kernels of a piece of a template."""
    return analysis_of(template, code, fused=fused).work


def compute_s(template: Template, code: Code, hardware: Hardware, *, fused: bool = True) -> float:
    """Seconds that a piece of a template takes alone."""
    return analysis_of(template, code, fused=fused).seconds(hardware)


def code_of(node: fx.Node) -> Code:
    """Which piece of its template a compute node runs."""
    if node.target is ops.forward:
        return Code.FORWARD_SAVING if node.args[3] else Code.FORWARD
    return Code.RECOMPUTE if node.target is ops.recompute else Code.BACKWARD


def copied_bytes(node: fx.Node) -> int:
    """Bytes of a copy: of the bucket, of what is fetched, of what is offloaded."""
    if node.target is ops.prefetch:
        return int(ops.arguments(node)[0].size_bytes)
    if ops.stream_of(node) is Stream.H2D and "value" in node.meta:
        return tensors_bytes(node.meta["value"])
    taken: dict[fx.Node, None] = {}
    fx.map_arg(node.args, lambda n: taken.setdefault(n))
    return sum(tensors_bytes(source.meta.get("value")) for source in taken)


def copies_of(node: fx.Node) -> int:
    """How many copies an op issues: a bucket's parameters are one, its gradients one each."""
    if node.target is ops.prefetch:
        return 1
    if node.target is ops.fetch_state:
        return 2 * len(ops.arguments(node)[0].params)
    values = [source.meta.get("value") for source in node.all_input_nodes]
    return max([len(value) for value in values if isinstance(value, tuple)], default=1)


_MOVES = {  # op -> how often it moves the bytes of its value through device memory
    ops.snapshot: 2,
    ops.assign: 2,
    ops.add_grad: 3,
}


def node_s(node: fx.Node, hardware: Hardware, *, fused: bool = True) -> float:
    """Seconds that a compute node takes alone."""
    if node.target in (ops.forward, ops.recompute, ops.backward):
        return compute_s(ops.arguments(node)[0].traced, code_of(node), hardware, fused=fused)
    if node.target is ops.norm_grad:  # two norms
        moved = 2 * tensors_bytes(_meta(node.args[1]))
    elif node.target is ops.update:  # states and new parameters, read and written; gradients
        moved = 2 * tensors_bytes(_meta(node)) + tensors_bytes(_meta(node.args[2]))
    elif node.target in _MOVES and callable(node.target):
        moved = _MOVES[node.target] * tensors_bytes(_meta(node))
    else:
        return 0.0
    return moved / (hardware.memory_gb_s * 1e9) + hardware.launch_s


def _meta(node: object) -> object:
    return node.meta.get("value") if isinstance(node, fx.Node) else None
