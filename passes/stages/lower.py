"""Turn the traced graphs that a schedule runs into code.

`EAGER` runs the operators of the ATen graph, bitwise equal to the plain model. `INDUCTOR` compiles
it with TorchInductor, once for all stages that share a template.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from megacompile import compat, log
from megacompile.beside import compile_pool
from megacompile.ir import ops
from megacompile.ir.schedule import Schedule
from megacompile.ir.stages import Code, LoweredFn, Template
from megacompile.ir.tensors import TensorMeta
from megacompile.ir.tiles import pieces_of
from megacompile.options import Lowering
from megacompile.passes.stages.direct import direct
from megacompile.passes.stages.floats import compiled, prepared
from megacompile.passes.stages.lower_pieces import lower_pieces
from megacompile.passes.stages.strides import with_strides

Wanted = tuple[Template, Code]
Progress = Callable[[Iterable[Wanted], int], Iterable[Wanted]]
Function = Callable[..., Sequence[torch.Tensor | None]]


def lower(
    schedule: Schedule,
    *,
    lowering: Lowering,
    progress: Progress,
    to_come: CodeToCome | None = None,
    waits: bool = True,
) -> Schedule:
    """The same schedule; its templates' `code` holds everything that its nodes run.

    With Inductor, processes next to this one compile graphs too, where there are any: the largest
    first. This one, which has more workers for kernels than each of them, takes the largest of all,
    and then the smallest that are left.

    Args:
        to_come: code that is being compiled.
        waits: else stages run uncompiled until their code is there, if processes can compile it.
    """
    wanted = [item for item in dict.fromkeys(_runs(schedule)) if item[1] not in item[0].code]
    if lowering is Lowering.EAGER:
        for template, code in progress(wanted, len(wanted)):
            template.code[code] = _lowered(template.graphs[code], direct)
        return schedule
    wanted.sort(key=lambda item: len(item[0].graphs[item[1]].graph.nodes))
    if to_come is None:
        to_come = CodeToCome(torch.device("cpu"))
    wanted = to_come.without(wanted, waits=waits)
    graphs = functools.partial(_graphs, wanted[:-1])  # the largest is for this process
    wanted = [*wanted[-1:], *wanted[:-1]]
    with compile_pool.compiling(graphs, len(wanted), to_come.device) as take:
        for template, code in progress(wanted, len(wanted)):
            template.code[code] = _compiled(template.graphs[code], take)
    return schedule


class CodeToCome:
    """Code that processes next to this one compile while stages run their ATen graphs.

    What belongs to a schedule is used at once, between a backward and the next forward: a recompute
    must draw the random numbers that its forward has drawn. It is loaded before, a few graphs in
    each call.

    Args:
        device: that it is compiled for.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._batches: list[tuple[compile_pool.Jobs | None, list[Wanted]]] = []
        self._loaded: dict[Wanted, LoweredFn] = {}
        self._uncompiled: dict[int, Template] = {}  # by the id of its code, which copies share
        self._failed: set[int] = set()  # those that stay so

    def __bool__(self) -> bool:
        return bool(self._batches)

    def without(self, wanted: Sequence[Wanted], *, waits: bool) -> list[Wanted]:
        """Allows stages to run uncompiled, and returns what is to be compiled at once.

        A template that draws random numbers runs all of its code in one way.
        """
        now: list[Wanted] = []
        later: list[Wanted] = []
        for template, code in wanted:
            is_uncompiled = id(template.code) in self._uncompiled
            must_wait = waits or (template.random and template.code)
            must_wait = must_wait or not _runs_uncompiled(template)
            (now if must_wait and not is_uncompiled else later).append((template, code))
        jobs = (
            compile_pool.submit(functools.partial(_graphs, later), self.device) if later else None
        )
        if jobs is None and not any(id(t.code) in self._uncompiled for t, _ in later):
            return list(wanted)
        for template, code in later:
            template.code[code] = _lowered(template.graphs[code], _uncompiled)
            self._uncompiled[id(template.code)] = template
        self._batches.append((jobs, later))
        if later:
            text = (
                "%d graphs are compiled beside the training, which runs them uncompiled meanwhile"
            )
            log.logger("compile").info(text, len(later))
        return now

    def is_ready(self) -> bool:
        """True if a schedule's code is compiled, as far as it can be."""
        return bool(self._batches) and all(jobs is None or jobs.done() for jobs, _ in self._batches)

    def load(self, patience_s: float = math.inf) -> bool:
        """Load code for so long; is all of it loaded? It waits for what is not compiled yet. A
        template of which a graph cannot be compiled keeps the code that it has."""
        end_s = time.monotonic() + patience_s
        for jobs, wanted in self._batches:
            while wanted:
                if time.monotonic() >= end_s:
                    return False
                template, code = wanted.pop()
                take = _take_nothing if jobs is None else jobs.take
                try:
                    self._loaded[template, code] = _compiled(template.graphs[code], take)
                except Exception as error:  # of Inductor's
                    log.logger("compile").warning("a stage stays uncompiled: %s", error)
                    self._failed.add(id(template.code))
        return True

    def use(self) -> None:
        """Uses the loaded code from now on. No backward may be to come."""
        for (template, code), function in self._loaded.items():
            if id(template.code) not in self._failed:
                template.code[code] = function
        self._batches.clear()
        self._loaded.clear()
        for key in self._uncompiled.keys() - self._failed:
            del self._uncompiled[key]


def _take_nothing(part: fx.GraphModule) -> None:
    del part


def _graphs(wanted: Sequence[Wanted]) -> Iterator[compile_pool.GraphToCompile]:
    """Graphs that Inductor compiles for it, with the inputs: the largest first."""
    modules = [template.graphs[code] for template, code in reversed(wanted)]
    for part in dict.fromkeys(part for module in modules for part in _parts(module)):
        if any(node.op == "call_function" for node in part.graph.nodes):
            graph, values, _ = prepared(part)
            yield compile_pool.GraphToCompile(part, graph, values)


def _compiled(module: fx.GraphModule, take: compile_pool.Take) -> LoweredFn:
    """The code of a template's graph.

    Args:
        take: called before a graph is compiled here.
    """
    for part in _parts(module):
        take(part)
    return _lowered(module, _function)


def _runs(schedule: Schedule) -> Iterable[Wanted]:
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


def _lowered(
    module: fx.GraphModule, function_of: Callable[[fx.GraphModule], Function]
) -> LoweredFn:
    pieces = pieces_of(module.graph)
    function = lower_pieces(module, function_of) if pieces else function_of(module)
    return lambda inputs: function(*inputs)


def _function(module: fx.GraphModule) -> Function:
    """The code of a graph of ATen operators, by Inductor."""
    if any(node.op == "call_function" for node in module.graph.nodes):
        return with_strides(compiled(module), _metas(module), settled=True)
    forward: Function = module.forward
    return forward


def _uncompiled(module: fx.GraphModule) -> Function:
    """The code that runs until Inductor's is there: results have the strides that this will
    give."""
    return with_strides(direct(module, any_strides=True), _metas(module))


def _runs_uncompiled(template: Template) -> bool:
    """True if its graphs can run with the strides that kernels give, and in memory that is
    known."""
    modules = (part for graph in template.graphs.values() for part in _parts(graph))
    nodes = (node for module in modules for node in module.graph.nodes)
    return not any(
        compat.is_higher_order(node.target) or "as_strided" in compat.operator_name(node.target)
        for node in nodes
        if node.op == "call_function"
    )


def _metas(module: fx.GraphModule) -> list[TensorMeta | None]:
    """Metas of the results of a graph; None for what is no tensor."""
    results: Any = module.graph.output_node().args[0]
    values = [r.meta.get("val") if isinstance(r, fx.Node) else r for r in results]
    return [TensorMeta.of(v) if isinstance(v, torch.Tensor) else None for v in values]
