"""Turn the traced graphs that a schedule runs into code.

`EAGER` runs the operators of the ATen graph, bitwise equal to the plain model. `INDUCTOR` compiles
it with TorchInductor, once for all stages that share a template.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from megacompile.beside import compile_pool
from megacompile.ir import ops
from megacompile.ir.schedule import Schedule
from megacompile.ir.stages import Code, LoweredFn, Template
from megacompile.ir.tensors import TensorMeta
from megacompile.ir.tiles import pieces_of
from megacompile.options import Lowering
from megacompile.passes.stages.direct import direct
from megacompile.passes.stages.floats import compiled, fixed_inputs
from megacompile.passes.stages.layout import with_strides
from megacompile.passes.stages.lower_pieces import lower_pieces

Progress = Callable[[Iterable[tuple[Template, Code]], int], Iterable[tuple[Template, Code]]]


def lower(schedule: Schedule, *, lowering: Lowering, progress: Progress) -> Schedule:
    """The same schedule; its templates' `code` holds everything that its nodes run.

    With Inductor, processes beside this one compile graphs too, where there are any: the largest
    first, and this one begins with the smallest.
    """
    wanted = [
        (template, code)
        for template, code in dict.fromkeys(_runs(schedule))
        if code not in template.code
    ]
    if lowering is Lowering.EAGER:
        return _lowered(schedule, wanted, progress, lambda module: _lower(module, lowering))
    wanted.sort(key=lambda item: len(item[0].graphs[item[1]].graph.nodes))

    def graphs() -> list[compile_pool.Graph]:
        modules = [template.graphs[code] for template, code in reversed(wanted)]
        parts = dict.fromkeys(part for module in modules for part in _parts(module))
        pairs = [(part, fixed_inputs(part)) for part in parts]
        return [(part, inputs) for part, inputs in pairs if inputs is not None]

    with compile_pool.compiling(graphs) as take:

        def function(module: fx.GraphModule) -> LoweredFn:
            for part in _parts(module):
                take(part)
            return _lower(module, lowering)

        return _lowered(schedule, wanted, progress, function)


def _lowered(
    schedule: Schedule,
    wanted: Sequence[tuple[Template, Code]],
    progress: Progress,
    function: Callable[[fx.GraphModule], LoweredFn],
) -> Schedule:
    for template, code in progress(wanted, len(wanted)):
        template.code[code] = function(template.graphs[code])
    return schedule


def _runs(schedule: Schedule) -> Iterable[tuple[Template, Code]]:
    for graph in schedule.graphs.values():
        for node in ops.nodes_that(graph, lambda op: op.code is not None):
            yield ops.arguments(node)[0].traced, ops.code_of(node)


def _parts(module: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """The graphs that are compiled for a template's graph: it, or those of its tiles."""
    pieces = pieces_of(module.graph)
    if not pieces:
        yield module
    for _, piece in pieces:
        for tile in piece.tiles:
            yield tile.module


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
        return with_strides(compiled(module), _metas(module))
    forward: Callable[..., Sequence[torch.Tensor | None]] = module.forward
    return forward


def _metas(module: fx.GraphModule) -> list[TensorMeta | None]:
    """Of what a graph gives; None for what is no tensor."""
    results: Any = module.graph.output_node().args[0]
    values = [r.meta.get("val") if isinstance(r, fx.Node) else r for r in results]
    return [TensorMeta.of(v) if isinstance(v, torch.Tensor) else None for v in values]
