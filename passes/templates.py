"""Trace each stage to functional ATen graphs, once for all stages that have the same code.

    stage (torch level)  ->  FORWARD | FORWARD_SAVING | RECOMPUTE | BACKWARD

Forward and backward are traced together, with `torch.autograd.grad` inside the traced function,
and split by AOTAutograd's min-cut partitioner (Zheng et al., "Min-cut optimal recomputation",
2022). Parameters are never saved, nor views or casts of them: the backward binds them to whatever
slot they are in then.

Stages are visited from last to first, because what a backward takes depends on the later stages:
a *tangent* for each output whose gradient exists, and a *carry* for each input or parameter that a
later stage used too. Carries enter the traced graph as gradients of the inputs themselves, so that
sums run in the order in which autograd adds them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from megacompile import compat, ops
from megacompile.errors import UnsupportedGraphError
from megacompile.ir import (
    Ambient,
    ArgRef,
    Code,
    ParamRef,
    SavedRef,
    Schedule,
    Stage,
    Template,
    TensorMeta,
)
from megacompile.options import Lowering
from megacompile.passes.canonical import graph_key
from megacompile.passes.edit import calls_by_stage
from megacompile.passes.narrow import narrow_heads

TemplateCache = MutableMapping[Hashable, Template]
_VIEWS = {"t", "view", "transpose", "permute", "expand", "reshape", "unsqueeze", "squeeze"}
_VIEWS |= {"slice", "select", "alias", "detach", "_unsafe_view", "_to_copy", "convert_element_type"}
_VIEWS |= {"clone"}  # of a view that is not contiguous


def trace_templates(
    schedule: Schedule, *, ambient: Ambient, cache: TemplateCache, lowering: Lowering
) -> Schedule:
    """Give every stage its template. `schedule.tangents` are the outputs that get a gradient.

    Raises:
        UnsupportedGraphError: a stage cannot be traced.
    """
    walk = _Walk(schedule)
    stages: list[Stage] = []
    for stage in reversed(schedule.stages):
        takes = walk.takes(stage)
        template = _template(stage, takes, ambient, cache, lowering)
        walk.gives(stage, template)
        stages.append(replace(stage, template=template))
    return _with_stages(schedule, tuple(reversed(stages)))


@dataclass(frozen=True, slots=True)
class _Takes:
    """What a stage's backward takes: which gradients, and what they look like."""

    tangents: tuple[int, ...] = ()  # results of the stage
    carries: tuple[int, ...] = ()  # primals of the stage
    metas: tuple[TensorMeta, ...] = ()  # of the tangents, then of the carries


class _Walk:
    """Which values have a gradient, while stages are visited from last to first."""

    def __init__(self, schedule: Schedule) -> None:
        self.calls = calls_by_stage(schedule.forward, ops.forward)
        outputs, _ = ops.returned(schedule.forward)
        # forward node or (bucket key, parameter) -> meta of its gradient so far
        self.gradients: dict[Any, TensorMeta] = {
            outputs[k]: _as_gradient(outputs[k].meta["value"]) for k in schedule.tangents
        }

    def takes(self, stage: Stage) -> _Takes:
        """The results that have a gradient, and the primals that have one already."""
        call = self.calls[stage.index]
        results = {k: item for k, item in ops.items(call) if item in self.gradients}
        if not results:
            return _Takes()
        tangents = tuple(sorted(results))
        sources = {i: self._source(stage, call, i) for i in range(len(stage.primals))}
        carries = tuple(
            i
            for i, source in sources.items()
            if stage.metas[i].requires_grad and source in self.gradients
        )
        given = [*(results[k] for k in tangents), *(sources[i] for i in carries)]
        return _Takes(tangents, carries, tuple(self.gradients[source] for source in given))

    def gives(self, stage: Stage, template: Template) -> None:
        """Note the gradients that the stage's backward returns."""
        call = self.calls[stage.index]
        for primal, meta in zip(template.gradients, template.gradient_metas, strict=True):
            self.gradients[self._source(stage, call, primal)] = meta

    def _source(self, stage: Stage, call: fx.Node, primal: int) -> Any:
        ref = stage.primals[primal]
        if isinstance(ref, ArgRef):
            return call.args[2][ref.index]  # type: ignore[index]
        return stage.buckets[ref.bucket].key, ref.param


def _as_gradient(meta: TensorMeta) -> TensorMeta:
    return replace(meta, requires_grad=False)


def _with_stages(schedule: Schedule, stages: tuple[Stage, ...]) -> Schedule:
    """The schedule with other stage objects, in its graphs too."""
    new = replace(schedule.copy(), stages=stages)
    for graph in new.graphs.values():
        for node in graph.nodes:
            if node.args and isinstance(node.args[0], Stage):
                node.args = (stages[node.args[0].index], *node.args[1:])
    return new


def _template(
    stage: Stage,
    takes: _Takes,
    ambient: Ambient,
    cache: TemplateCache,
    lowering: Lowering,
) -> Template:
    params = sum(isinstance(ref, ParamRef) for ref in stage.primals)
    code = graph_key(stage.module)
    key = (code, stage.metas, params, stage.mutated, takes, lowering, ambient)
    if key not in cache:
        try:
            tracer = _Tracer(stage, params, takes, ambient, lowering)
            cache[key] = tracer.template(len(cache))
        except compat.UNTRACEABLE as error:
            raise UnsupportedGraphError(f"stage {stage.name!r}: {error}") from error
    return cache[key]


class _Tracer:
    """Traces one stage."""

    def __init__(
        self,
        stage: Stage,
        params: int,
        takes: _Takes,
        ambient: Ambient,
        lowering: Lowering,
    ) -> None:
        self.stage = stage
        self.params = params
        self.tangents = takes.tangents
        self.carries = takes.carries
        self.tangent_metas = takes.metas
        self.ambient = ambient
        self.lowering = lowering
        self.results = len(stage.outputs) + len(stage.mutated)
        self.gradients: tuple[int, ...] = ()

    def template(self, index: int) -> Template:
        joint = self._trace()
        if not self.tangents:
            return self._make(index, joint, None)
        _forbid_saving_parameters(joint, self.params)
        forward, backward = compat.split_joint(
            joint, outputs=self.results, static_primals=range(self.params)
        )
        return self._make(index, forward, backward)

    def _trace(self) -> fx.GraphModule:
        """The joint graph: (primals, tangents, carries) -> (outputs, new values, gradients)."""
        eager = self.lowering is Lowering.EAGER
        decompositions = (
            compat.eager_decompositions() if eager else compat.inductor_decompositions()
        )
        with self.ambient.apply(), _real_tensors(self.stage) if eager else compat.fake_mode():
            primals = [meta.zeros() for meta in self.stage.metas]
            tangents = [meta.zeros() for meta in self.tangent_metas]
            return compat.trace(self._functional, primals, tangents, decompositions)

    def _functional(self, primals: list[torch.Tensor], tangents: list[torch.Tensor]) -> Any:
        with compat.functional_mode():
            wrapped = [compat.to_functional(p) for p in primals]
            results, gradients = self._joint(wrapped, [compat.to_functional(t) for t in tangents])
            return [compat.from_functional(t) for t in (*results, *gradients)]

    def _joint(
        self, primals: list[torch.Tensor], tangents: list[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        inputs = list(primals)
        for i in self.stage.mutated:  # a value of its own, so that the old one stays readable
            inputs[i] = primals[i].clone()
        held = {compat.storage_key(p) for p in primals[: self.params]}
        outputs = list(self.stage.module(*inputs))
        for k, (tensor, meta) in enumerate(zip(outputs, self.stage.outputs, strict=True)):
            if compat.storage_key(tensor) in held:  # no view of a slot may leave the stage
                outputs[k] = tensor.clone()
            elif tensor.stride() != meta.stride:  # [Note: strides that lie]
                outputs[k] = meta.empty().detach().copy_(tensor)
        results = [*outputs, *(inputs[i] for i in self.stage.mutated)]
        if not tangents:
            return results, []
        ends = [results[k] for k in self.tangents] + [primals[k] for k in self.carries]
        sources = [i for i, p in enumerate(primals) if p.requires_grad]
        with self.ambient.apply(autocast=False):
            found = torch.autograd.grad(
                ends, [primals[i] for i in sources], tangents, allow_unused=True
            )
        pairs = [(i, g) for i, g in zip(sources, found, strict=True) if g is not None]
        self.gradients = tuple(i for i, _ in pairs)
        return results, [g for _, g in pairs]

    def _make(
        self, index: int, forward: fx.GraphModule, backward: fx.GraphModule | None
    ) -> Template:
        returned = list(ops.returned(forward.graph))
        saved = [n for n in returned[self.results :] if n.op != "placeholder"]
        random = any(compat.is_random(n) for n in forward.graph.nodes)
        saving = _extract(forward, [*returned[: self.results], *saved])
        graphs = {Code.FORWARD: saving}
        if not random:  # a random stage must draw the same numbers in each: one graph for all
            graphs[Code.FORWARD] = _extract(forward, returned[: self.results])
        recompute_primals: tuple[int, ...] = ()
        backward_inputs: tuple[int | SavedRef, ...] = ()
        if backward is not None:
            graphs[Code.FORWARD_SAVING] = saving
            graphs[Code.BACKWARD] = backward
            if random:
                recompute_primals = tuple(range(len(self.stage.primals)))
                graphs[Code.RECOMPUTE] = saving
            else:
                recompute_primals = _primals_of(forward, saved)
                graphs[Code.RECOMPUTE] = _extract(forward, saved, recompute_primals)
            names = {node.name: SavedRef(i) for i, node in enumerate(saved)}
            backward_inputs = _backward_inputs(backward, names)
        return Template(
            index=index,
            primals=self.stage.metas,
            outputs=self.stage.outputs,
            mutated=self.stage.mutated,
            saved=tuple(TensorMeta.of(n.meta["val"]) for n in saved),
            tangents=self.tangents,
            carries=self.carries,
            backward_inputs=backward_inputs,
            gradients=self.gradients,
            tangent_metas=self.tangent_metas,
            gradient_metas=() if backward is None else _output_metas(backward),
            recompute_primals=recompute_primals,
            random=random,
            graphs=graphs,
        )


def _output_metas(module: fx.GraphModule) -> tuple[TensorMeta, ...]:
    returned = ops.returned(module.graph)
    return tuple(_as_gradient(TensorMeta.of(node.meta["val"])) for node in returned)


@contextlib.contextmanager
def _real_tensors(stage: Stage) -> Iterator[None]:
    """Trace on real tensors, leaving the random generators as they were.

    [Note: strides that lie]
    Some operators give other strides than their fake kernels say (attention's backward, a
    functionalized BatchNorm), and strides choose the matrix kernels, hence the rounding. For code
    that is to be bitwise equal to the plain model, a stage is traced by running it once on zeros.
    """
    devices = sorted({m.device for m in stage.metas if m.device.type == "cuda"}, key=str)
    with torch.random.fork_rng(devices):
        yield


def _forbid_saving_parameters(joint: fx.GraphModule, params: int) -> None:
    """Mark views and casts of parameters, and what follows of that kind, as never saved."""
    placeholders = joint.graph.find_nodes(op="placeholder")
    bound = set(placeholders[:params])
    for node in joint.graph.nodes:
        if node.op == "call_function" and _is_view(node.target):
            if node.all_input_nodes and set(node.all_input_nodes) <= bound:
                bound.add(node)
                compat.mark_must_recompute(node)


def _is_view(target: Callable[..., Any] | str) -> bool:
    name = str(getattr(target, "_opname", "")) or str(getattr(target, "__name__", ""))
    return name in _VIEWS


def _needed(outputs: Iterable[Any]) -> set[fx.Node]:
    """The nodes that `outputs` are computed from, themselves included."""
    needed: set[fx.Node] = set()
    stack = [n for n in outputs if isinstance(n, fx.Node)]
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack.extend(node.all_input_nodes)
    return needed


def _primals_of(module: fx.GraphModule, outputs: Iterable[Any]) -> tuple[int, ...]:
    needed = _needed(outputs)
    placeholders = module.graph.find_nodes(op="placeholder")
    return tuple(i for i, node in enumerate(placeholders) if node in needed)


def _extract(
    module: fx.GraphModule, outputs: Sequence[Any], primals: Sequence[int] | None = None
) -> fx.GraphModule:
    """The part of a graph that computes `outputs`, with all placeholders or those of `primals`."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    needed = _needed(outputs)
    placeholders = module.graph.find_nodes(op="placeholder")
    needed |= set(placeholders if primals is None else [placeholders[i] for i in primals])
    for node in module.graph.nodes:
        if node in needed:
            env[node] = graph.node_copy(node, lambda n: env[n])
    graph.output(tuple(env[n] if isinstance(n, fx.Node) else n for n in outputs))
    narrow_heads(graph)
    return fx.GraphModule(module, graph)


def _backward_inputs(
    backward: fx.GraphModule, saved: dict[str, SavedRef]
) -> tuple[int | SavedRef, ...]:
    inputs: list[int | SavedRef] = []
    for node in backward.graph.find_nodes(op="placeholder"):
        name = str(node.target)
        if name in saved:
            inputs.append(saved[name])
        elif name.startswith("primals_"):
            inputs.append(int(name.removeprefix("primals_")) - 1)
        else:
            assert name.startswith("tangents_"), f"unknown backward input {name}"
    return tuple(inputs)
