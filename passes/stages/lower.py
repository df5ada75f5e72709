"""Turn the traced graphs that a schedule runs into code.

`EAGER` runs the operators of the ATen graph, bitwise equal to the plain model. `INDUCTOR` compiles
it with TorchInductor, once for all stages that share a template. A graph of pieces becomes the
code of each, and loops over tiles.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from megacompile import compat, log
from megacompile.beside import compile_pool
from megacompile.ir import ops
from megacompile.ir.head import sum_dtype
from megacompile.ir.schedule import Schedule
from megacompile.ir.stages import Code, LoweredFn, Template
from megacompile.ir.tensors import TensorMeta, dense, is_dense
from megacompile.ir.tiles import Axis, Piece, Result, Tile, pieces_of
from megacompile.options import Lowering
from megacompile.passes.stages.direct import direct
from megacompile.passes.stages.floats import compiled, prepared

Wanted = tuple[Template, Code]
Progress = Callable[[Iterable[Wanted], int], Iterable[Wanted]]
Function = Callable[..., Sequence[Any]]


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


# Graphs of pieces, and results that have the strides which what takes them was traced for.


def lower_pieces(module: fx.GraphModule, lower: Callable[[fx.GraphModule], Function]) -> Function:
    """The function of a graph of pieces.

    Each value is freed where nothing reads it any more, as the graph's Python says.

    Args:
        lower: makes a function of the graph of a tile.
    """
    graph = compat.copy_graph(module.graph)
    for node, piece in pieces_of(graph):
        node.target = _of_piece(piece, lower)
    graph.eliminate_dead_code()
    function: Function = compat.graph_module(module, graph).forward
    return function


def _of_piece(piece: Piece, lower: Callable[[fx.GraphModule], Function]) -> Function:
    functions = {tile: lower(tile.module) for tile in piece.tiles}
    function: Function = _loop(piece, functions)
    if piece.is_whole:
        function = with_strides(functions[piece.tiles[0]], piece.metas)

    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(function(*inputs))

    run.__name__ = piece.__name__
    return run


def _loop(piece: Piece, functions: dict[Tile, Function]) -> Function:
    """The code that runs tile after tile.

    Results that are cut are written where they belong in the whole, so they are in memory once and
    a tile more.
    """

    def run(*inputs: Tensor) -> list[Tensor]:
        results = [
            _begin(*kind, meta) for kind, meta in zip(piece.results, piece.metas, strict=True)
        ]
        for start, tile in piece.spans():
            pairs = zip(inputs, piece.inputs, strict=True)
            cut = [_cut(value, axis, start, tile.tokens) for value, axis in pairs]
            made = iter(functions[tile](*cut))
            del cut
            for result, (kind, axis) in zip(results, piece.results, strict=True):
                _put(result, kind, axis, start, tile.tokens, made)
            del made  # or this tile's values would live while the next one is computed
        for k, meta in enumerate(piece.metas):
            results[k] = results[k].to(meta.dtype)
        return results

    return run


def _begin(kind: Result, axis: Axis | None, meta: TensorMeta) -> Tensor:
    """Memory for a result."""
    if kind is Result.CUT:
        return meta.empty()
    return torch.empty(meta.shape, dtype=sum_dtype(meta.dtype), device=meta.device)


def _cut(value: Tensor, axis: Axis | None, start: int, length: int) -> Tensor:
    return value if axis is None else axis.cut(value, start, length)


def _put(
    result: Tensor, kind: Result, axis: Axis | None, start: int, length: int, made: Iterator[Tensor]
) -> None:
    """Write a tile's part of a result, or add it."""
    if kind is Result.PRODUCT:
        compat.add_product(result, next(made), next(made), first=start == 0)
    elif kind is Result.SUM:
        result.copy_(next(made)) if start == 0 else result.add_(next(made))
    else:
        assert axis is not None
        axis.write(result, start, length, next(made))


def with_strides(
    function: Callable[..., Sequence[Any]],
    metas: Sequence[TensorMeta | None],
    *,
    settled: bool = False,
) -> Callable[..., list[Any]]:
    """The function, whose results have the strides of these metas.

    Inductor keeps the order of strides alone where a result is a view of what it has padded, such
    as a matrix product whose sides are no multiples of 8. A result that was traced as a view with
    gaps is left as it is.

    Args:
        settled: it gives the same strides in each call, if sizes are no symbols: those that are
            right in the first call are not looked at again.
    """
    wanted = {k: meta for k, meta in enumerate(metas) if meta and is_dense(meta, meta.stride)}
    settled = settled and all(meta.symbolic is None for meta in wanted.values())

    def run(*inputs: Any) -> list[Any]:
        results = list(function(*inputs))
        for k, meta in list(wanted.items()):
            if results[k].stride() != meta.stride:
                results[k] = dense(results[k], meta.stride, meta.shape)
            elif settled:
                wanted.pop(k, None)  # another thread may be in it too
        return results

    return run
