"""Turn the traced graphs that a schedule runs into code.

`EAGER` runs the operators of the ATen graph, bitwise equal to the plain model. `INDUCTOR` compiles
it with TorchInductor, once for all stages that share a template.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from megacompile.ir import ops
from megacompile.ir.schedule import Schedule
from megacompile.ir.stages import Code, LoweredFn, Template
from megacompile.ir.tensors import TensorMeta, is_dense
from megacompile.ir.tiles import pieces_of
from megacompile.options import Lowering
from megacompile.passes.stages.direct import direct
from megacompile.passes.stages.floats import compiled
from megacompile.passes.stages.lower_pieces import lower_pieces

Progress = Callable[[Iterable[tuple[Template, Code]], int], Iterable[tuple[Template, Code]]]


def lower(schedule: Schedule, *, lowering: Lowering, progress: Progress) -> Schedule:
    """The same schedule; its templates' `code` holds everything that its nodes run."""
    wanted = [
        (template, code)
        for template, code in dict.fromkeys(_runs(schedule))
        if code not in template.code
    ]
    for template, code in progress(wanted, len(wanted)):
        template.code[code] = _lower(template.graphs[code], lowering)
    return schedule


def _runs(schedule: Schedule) -> Iterable[tuple[Template, Code]]:
    for graph in schedule.graphs.values():
        for node in ops.nodes_that(graph, lambda op: op.code is not None):
            yield ops.arguments(node)[0].traced, ops.code_of(node)


def _lower(module: fx.GraphModule, lowering: Lowering) -> LoweredFn:
    if pieces_of(module.graph):
        function = lower_pieces(module, lambda part: _function(part, lowering))
    else:
        function = _function(module, lowering)
    return lambda inputs: function(*inputs)


def _function(
    module: fx.GraphModule, lowering: Lowering
) -> Callable[..., Sequence[torch.Tensor | None]]:
    """The code of a graph of ATen operators."""
    if lowering is Lowering.EAGER:
        return direct(module)
    if any(node.op == "call_function" for node in module.graph.nodes):
        return _with_strides(compiled(module), module)
    forward: Callable[..., Sequence[torch.Tensor | None]] = module.forward
    return forward


def _with_strides(
    function: Callable[..., Sequence[Any]], module: fx.GraphModule
) -> Callable[..., list[Any]]:
    """Give results the strides that they were traced with: what takes them was compiled for those.

    Inductor keeps the order of strides alone where a result is a view of what it has padded, such
    as a matrix product whose sides are no multiples of 8. A result that was traced as a view with
    gaps is left as it is.
    """
    results: Any = module.graph.output_node().args[0]
    metas = [
        TensorMeta.of(v) if isinstance(v := _value(r), torch.Tensor) else None for r in results
    ]
    dense = [meta if meta and is_dense(meta, meta.stride) else None for meta in metas]

    def run(*inputs: Any) -> list[Any]:
        pairs = zip(function(*inputs), dense, strict=True)
        return [
            value if meta is None or value.stride() == meta.stride else _laid_out(value, meta)
            for value, meta in pairs
        ]

    return run


def _value(result: Any) -> Any:
    return result.meta.get("val") if isinstance(result, fx.Node) else result


def _laid_out(tensor: torch.Tensor, meta: TensorMeta) -> torch.Tensor:
    """The tensor, or a copy of it, dense in the order of the strides of `meta`, of any size."""
    order = sorted(range(tensor.dim()), key=lambda d: (meta.stride[d], meta.shape[d]), reverse=True)
    expected = 1
    for d in reversed(order):
        if tensor.shape[d] != 1 and tensor.stride(d) != expected:
            return (
                tensor.permute(order).contiguous().permute([*map(order.index, range(len(order)))])
            )
        expected *= tensor.shape[d]
    return tensor
