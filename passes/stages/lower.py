"""Lower the traced graphs of a schedule to code.

`EAGER` runs the operators of the ATen graph, bitwise equal to the plain model. `INDUCTOR` compiles
it with TorchInductor, once for all stages that share a template. A graph of pieces becomes the code
of its pieces and loops over tiles.
"""

from __future__ import annotations

import functools
import math
import re
import time
import types
from collections.abc import Callable, Iterator, Sequence
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
from megacompile.ir.tiles import Piece, Result, Tile, pieces_of
from megacompile.options import Lowering
from megacompile.passes.stages.numbers import compiled, prepared
from megacompile.progress import bar

Wanted = tuple[Template, Code]
Function = Callable[..., Sequence[Any]]


def lower(
    schedule: Schedule,
    *,
    lowering: Lowering,
    progress: bool | None,
    to_come: CodeToCome,
    waits: bool,
) -> Schedule:
    """Fill the templates' `code` with everything that the schedule runs; returns the schedule.

    With Inductor, this process compiles the largest graph, because it has more kernel workers than
    a helper process. Then it goes up from the smallest, while helpers, if there are any, come down
    from the second-largest. Without `waits`, stages run uncompiled until helper processes have
    compiled them (`to_come`). `progress`: show a bar; None: on a terminal.
    """
    graphs = schedule.graphs.values()
    nodes = (n for graph in graphs for n in ops.nodes_that(graph, lambda op: op.code is not None))
    runs = dict.fromkeys((ops.arguments(n)[0].traced, ops.code_of(n)) for n in nodes)
    wanted = [(template, code) for template, code in runs if code not in template.code]
    if lowering is Lowering.EAGER:
        for template, code in wanted:
            template.code[code] = _lowered(template.graphs[code], direct)
        return schedule
    wanted.sort(key=lambda item: len(item[0].graphs[item[1]].graph.nodes))
    wanted = to_come.without(wanted, waits=waits)
    others = functools.partial(_graphs, wanted[:-1])  # this process takes the largest
    wanted = [*wanted[-1:], *wanted[:-1]]
    submitted = compile_pool.submit(others, to_come.device, count=len(wanted))
    show = progress if wanted else False  # a bar would flicker
    with submitted as jobs, bar("compiling stages", len(wanted), show) as step:
        for template, code in wanted:
            template.code[code] = _compiled(template.graphs[code], jobs)
            step(1)
    return schedule


class CodeToCome:
    """Code that helper processes compile while stages run their ATen graphs.

    All code of a schedule is switched at once, between a backward and the next forward: a recompute
    must draw the same random numbers as its forward. Calls before that load it, a few graphs each.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._batches: list[tuple[compile_pool.Jobs, list[Wanted]]] = []
        self._loaded: dict[Wanted, LoweredFn] = {}
        self._uncompiled: dict[int, Template] = {}  # by the id of its code, shared by copies
        self._failed: set[int] = set()  # templates that stay uncompiled

    def __bool__(self) -> bool:
        return bool(self._batches)

    def without(self, wanted: Sequence[Wanted], *, waits: bool) -> list[Wanted]:
        """Allow stages to run uncompiled if possible; returns the graphs to compile at once.

        A template that draws random numbers runs all of its code either compiled or uncompiled.
        """
        now: list[Wanted] = []
        later: list[Wanted] = []
        for template, code in wanted:
            is_uncompiled = id(template.code) in self._uncompiled
            must_wait = waits or (template.random and template.code)
            must_wait = must_wait or not _runs_uncompiled(template)
            (now if must_wait and not is_uncompiled else later).append((template, code))
        if not later:
            return now
        jobs = compile_pool.submit(functools.partial(_graphs, later), self.device)
        if not jobs.futures and not any(id(t.code) in self._uncompiled for t, _ in later):
            return list(wanted)
        self._batches.append((jobs, later))  # first: Ctrl-C below loses no code
        for template, code in later:
            self._uncompiled[id(template.code)] = template
            template.code[code] = _lowered(template.graphs[code], uncompiled)
        text = "%d graphs compile in the background; training runs them uncompiled until then"
        log.logger("compile").info(text, len(later))
        return now

    def is_ready(self) -> bool:
        """True if all compilable code of a schedule is compiled."""
        return bool(self._batches) and all(jobs.done() for jobs, _ in self._batches)

    def load(self, patience_s: float = math.inf) -> bool:
        """Load code within a time limit, waiting for unfinished compilation; True if all is loaded.
        A template with a graph that cannot be compiled stays uncompiled."""
        end_s = time.monotonic() + patience_s
        for jobs, wanted in self._batches:
            while wanted:
                if time.monotonic() >= end_s:
                    return False
                template, code = wanted[-1]
                try:
                    self._loaded[template, code] = _compiled(template.graphs[code], jobs)
                except Exception as error:  # from Inductor
                    log.logger("compile").warning("a stage stays uncompiled: %s", error)
                    self._failed.add(id(template.code))
                wanted.pop()  # not before: Ctrl-C leaves it for the next call
        return True

    def use(self) -> None:
        """Switch to the loaded code. No backward may be pending."""
        for (template, code), function in self._loaded.items():
            if id(template.code) not in self._failed:
                template.code[code] = function
        self._batches.clear()
        self._loaded.clear()
        for key in self._uncompiled.keys() - self._failed:
            del self._uncompiled[key]


def _graphs(wanted: Sequence[Wanted]) -> Iterator[compile_pool.GraphToCompile]:
    """The graphs that Inductor compiles for a template, with inputs, largest first."""
    modules = [template.graphs[code] for template, code in reversed(wanted)]
    for part in dict.fromkeys(part for module in modules for part in _parts(module)):
        if any(node.op == "call_function" for node in part.graph.nodes):
            graph, values, _ = prepared(part)
            yield compile_pool.GraphToCompile(part, graph, values)


def _compiled(module: fx.GraphModule, jobs: compile_pool.Jobs) -> LoweredFn:
    """Lower a template's graph, unless a process compiles a part of it: then wait for that."""
    for part in _parts(module):
        jobs.take(part)
    return _lowered(module, _function)


def _parts(module: fx.GraphModule) -> list[fx.GraphModule]:
    """The graphs to compile for a template's graph: itself, or its tiles' graphs."""
    pieces = pieces_of(module.graph)
    return [tile.module for _, piece in pieces for tile in piece.tiles] or [module]


def _lowered(
    module: fx.GraphModule, function_of: Callable[[fx.GraphModule], Function]
) -> LoweredFn:
    pieces = pieces_of(module.graph)
    function = lower_pieces(module, function_of) if pieces else function_of(module)
    return lambda inputs: function(*inputs)


def _function(module: fx.GraphModule) -> Function:
    if any(node.op == "call_function" for node in module.graph.nodes):
        return with_strides(compiled(module), _metas(module), settled=True)
    forward: Function = module.forward
    return forward


_OPERATOR = re.compile(r"torch\.ops((?:\.\w+)+)(?=\()")  # an operator call in torch.fx's code


def direct(module: fx.GraphModule) -> Function:
    """The eager code of an ATen graph: torch.fx's Python, which calls kernels directly.

        before: t = torch.ops.aten.t.default(w)      after: t = kernel_aten_t_default(w)

    Lookups of operators, and their Python wrappers, take a sixth of the time of a small layer.
    """
    code = module.graph.python_code("self")
    namespace = dict(code.globals)

    def name(call: re.Match[str]) -> str:
        made = f"kernel{call.group(1).replace('.', '_')}"
        function = functools.reduce(getattr, call.group(1).split(".")[1:], torch.ops)
        namespace[made] = compat.kernel_of(function)
        return made

    exec(compile(_OPERATOR.sub(name, code.src), "<megacompile stage>", "exec"), namespace)
    function: Function = types.MethodType(namespace["forward"], module)
    return function


def uncompiled(module: fx.GraphModule) -> Function:
    """The code that runs until Inductor's is ready; results have the strides of Inductor's code.

    Strides of kernels' results may differ from the traced ones, so views become reshapes, which may
    copy.
    """
    graph = compat.copy_graph(module.graph)
    for node in graph.nodes:
        sizes = isinstance(node.args[1], (list, tuple)) if len(node.args) > 1 else False
        if sizes and compat.operator_name(node.target) in ("view", "_unsafe_view"):
            node.target = torch.ops.aten.reshape.default
    return with_strides(direct(compat.graph_module(module, graph)), _metas(module))


def _runs_uncompiled(template: Template) -> bool:
    """True if a template's graphs can run with the kernels' strides, in the planned memory: unless
    they read values by addresses."""
    modules = (part for graph in template.graphs.values() for part in _parts(graph))
    nodes = (node for module in modules for node in module.graph.nodes)
    return not any(
        compat.is_higher_order(node.target) or "as_strided" in compat.operator_name(node.target)
        for node in nodes
        if node.op == "call_function"
    )


def _metas(module: fx.GraphModule) -> list[TensorMeta | None]:
    """Metas of the results of a graph; None for results that are not tensors."""
    results: Any = module.graph.output_node().args[0]
    values = [r.meta.get("val") if isinstance(r, fx.Node) else r for r in results]
    return [TensorMeta.of(v) if isinstance(v, torch.Tensor) else None for v in values]


def lower_pieces(module: fx.GraphModule, lower: Callable[[fx.GraphModule], Function]) -> Function:
    """The function of a graph of pieces, which frees each value after its last use; `lower` lowers
    a tile's graph."""
    graph = compat.copy_graph(module.graph)
    for node, piece in pieces_of(graph):
        node.target = _of_piece(piece, lower)
    graph.eliminate_dead_code()
    function: Function = compat.graph_module(module, graph).forward
    return function


def _of_piece(piece: Piece, lower: Callable[[fx.GraphModule], Function]) -> Function:
    functions = {tile: lower(tile.module) for tile in piece.tiles}
    function = functools.partial(_loop, piece, functions)
    if piece.is_whole:
        function = with_strides(functions[piece.tiles[0]], piece.metas)  # type: ignore[assignment]

    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(function(*inputs))

    run.__name__ = piece.__name__
    return run


def _loop(piece: Piece, functions: dict[Tile, Function], *inputs: Tensor) -> list[Tensor]:
    """The loop over tiles. CUT results are written into the whole result, so their peak memory is
    the whole plus one tile."""
    results = [
        meta.empty()
        if kind is Result.CUT
        else torch.empty(meta.shape, dtype=sum_dtype(meta.dtype), device=meta.device)
        for (kind, _), meta in zip(piece.results, piece.metas, strict=True)
    ]
    for start, tile in piece.spans():
        pairs = zip(inputs, piece.inputs, strict=True)
        cut = [x if axis is None else axis.cut(x, start, tile.tokens) for x, axis in pairs]
        made = iter(functions[tile](*cut))
        del cut
        for result, (kind, axis) in zip(results, piece.results, strict=True):
            if kind is Result.PRODUCT:
                compat.add_product(result, next(made), next(made), first=start == 0)
            elif kind is Result.SUM:
                result.copy_(next(made)) if start == 0 else result.add_(next(made))
            else:
                assert axis is not None
                axis.write(result, start, tile.tokens, next(made))
        del made  # free this tile's values before the next tile
    for k, meta in enumerate(piece.metas):
        results[k] = results[k].to(meta.dtype)
    return results


def with_strides(
    function: Callable[..., Sequence[Any]],
    metas: Sequence[TensorMeta | None],
    *,
    settled: bool = False,
) -> Callable[..., list[Any]]:
    """Wrap a function so that its results have the strides of these metas.

    Inductor keeps only the order of strides if a result is a view of a padded tensor, such as a
    matrix product with sizes that are not multiples of 8. A result traced as a view with gaps is
    not changed. `settled`: strides are the same in each call, unless sizes are symbols, so results
    that are correct in the first call are not checked again.
    """
    wanted = {k: meta for k, meta in enumerate(metas) if meta and is_dense(meta, meta.stride)}
    settled = settled and all(meta.symbolic is None for meta in wanted.values())

    def run(*inputs: Any) -> list[Any]:
        results = list(function(*inputs))
        for k, meta in list(wanted.items()):
            if results[k].stride() != meta.stride:
                results[k] = dense(results[k], meta.stride, meta.shape)
            elif settled:
                wanted.pop(k, None)  # another thread may run it too
        return results

    return run
