"""Turn the traced graphs that a schedule runs into code.

`EAGER` runs the operators of the ATen graph, bitwise equal to the plain model. `INDUCTOR` compiles
it with TorchInductor, once for all stages that share a template.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import fx

from megacompile.ir import ops
from megacompile.ir.schedule import Schedule
from megacompile.ir.stages import Code, LoweredFn, Template
from megacompile.options import Lowering
from megacompile.passes.stages.direct import direct
from megacompile.passes.stages.floats import compiled

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
    computes = any(node.op == "call_function" for node in module.graph.nodes)
    function: Callable[..., Sequence[torch.Tensor | None]] = module.forward
    if lowering is Lowering.EAGER:
        function = direct(module)
    elif computes:
        function = compiled(module)
    return lambda inputs: function(*inputs)
