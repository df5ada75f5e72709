"""Turn the traced graphs that a schedule runs into code.

`EAGER` runs the operators of the ATen graph, bitwise equal to the plain model. `INDUCTOR` compiles
it with TorchInductor, once for all stages that share a template.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from megacompile import log
from megacompile.beside import compile_pool
from megacompile.ir import ops
from megacompile.ir.schedule import Schedule
from megacompile.ir.stages import Code, LoweredFn, Template
from megacompile.ir.tensors import TensorMeta
from megacompile.ir.tiles import pieces_of
from megacompile.options import Lowering
from megacompile.passes.stages.direct import direct
from megacompile.passes.stages.floats import compiled, prepared
from megacompile.passes.stages.layout import with_strides
from megacompile.passes.stages.lower_pieces import lower_pieces

Wanted = Sequence[tuple[Template, Code]]
Progress = Callable[[Iterable[tuple[Template, Code]], int], Iterable[tuple[Template, Code]]]
Function = Callable[..., Sequence[torch.Tensor | None]]


def lower(schedule: Schedule, *, lowering: Lowering, progress: Progress) -> Schedule:
    """The same schedule; its templates' `code` holds everything that its nodes run.

    With Inductor, processes beside this one compile graphs too, where there are any: the largest
    first, and this one begins with the smallest.
    """
    wanted = _wanted(schedule)
    if lowering is Lowering.EAGER:
        _compile(wanted, lowering, lambda part: None, progress)
        return schedule
    with compile_pool.compiling(functools.partial(_graphs, wanted)) as take:
        _compile(wanted, lowering, take, progress)
    return schedule


class CodeToCome:
    """Code that processes beside this one compile while stages run their ATen graphs.

    All of it is taken at once, between a backward and the next forward: a recompute must draw the
    random numbers that its forward has drawn.
    """

    def __init__(self) -> None:
        self._batches: list[tuple[compile_pool.Jobs, Wanted]] = []

    def __bool__(self) -> bool:
        return bool(self._batches)

    def lower(self, schedule: Schedule, device: torch.device) -> bool:
        """As the pass does, with code that runs at once; False where none can come."""
        wanted = _wanted(schedule)
        graphs = functools.partial(_graphs, wanted)
        jobs = compile_pool.submit(graphs, device) if wanted else None
        if jobs is None:
            return False
        for template, code in wanted:
            template.code[code] = _lowered(template.graphs[code], _uncompiled)
        self._batches.append((jobs, wanted))
        return True

    def is_ready(self) -> bool:
        """Is all of it compiled, as far as it can be?"""
        return all(jobs.done() for jobs, _ in self._batches)

    def take(self) -> None:
        """Let it run from now on. What is not compiled yet is waited for."""
        while self._batches:
            jobs, wanted = self._batches.pop()
            try:
                _compile(wanted, Lowering.INDUCTOR, jobs.take, lambda work, total: work)
            except Exception as error:  # of Inductor's: training goes on without its code
                log.logger("compile").warning("stages stay uncompiled: %s", error)
            finally:
                jobs.withdraw()


def _wanted(schedule: Schedule) -> Wanted:
    """The code that a schedule runs and its templates do not have: the smallest first."""
    wanted = [item for item in dict.fromkeys(_runs(schedule)) if item[1] not in item[0].code]
    return sorted(wanted, key=lambda item: len(item[0].graphs[item[1]].graph.nodes))


def _graphs(wanted: Wanted) -> Iterator[compile_pool.Graph]:
    """What Inductor compiles for it, with the inputs: the largest first."""
    modules = [template.graphs[code] for template, code in reversed(wanted)]
    for part in dict.fromkeys(part for module in modules for part in _parts(module)):
        if any(node.op == "call_function" for node in part.graph.nodes):
            graph, values, _ = prepared(part)
            yield compile_pool.Graph(part, graph, values)


def _compile(
    wanted: Wanted, lowering: Lowering, take: compile_pool.Take, progress: Progress
) -> None:
    """Give templates their code.

    Args:
        take: called before a graph is compiled here.
    """
    made: dict[tuple[Template, Code], LoweredFn] = {}
    for template, code in progress(wanted, len(wanted)):
        module = template.graphs[code]
        for part in _parts(module):
            take(part)
        made[template, code] = _lowered(module, lambda part: _function(part, lowering))
    for (template, code), function in made.items():
        template.code[code] = function


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


def _lowered(module: fx.GraphModule, function_of: Callable[[fx.GraphModule], Function]) -> LoweredFn:
    pieces = pieces_of(module.graph)
    function = lower_pieces(module, function_of) if pieces else function_of(module)
    return lambda inputs: function(*inputs)


def _function(module: fx.GraphModule, lowering: Lowering) -> Function:
    """The code of a graph of ATen operators."""
    if lowering is Lowering.EAGER:
        return direct(module)
    if any(node.op == "call_function" for node in module.graph.nodes):
        return with_strides(compiled(module), _metas(module))
    forward: Function = module.forward
    return forward


def _uncompiled(module: fx.GraphModule) -> Function:
    """What runs until Inductor's code is there: results have the strides that this will give."""
    return with_strides(direct(module), _metas(module))


def _metas(module: fx.GraphModule) -> list[TensorMeta | None]:
    """Of what a graph gives; None for what is no tensor."""
    results: Any = module.graph.output_node().args[0]
    values = [r.meta.get("val") if isinstance(r, fx.Node) else r for r in results]
    return [TensorMeta.of(v) if isinstance(v, torch.Tensor) else None for v in values]
