"""Trace each stage to functional ATen graphs, once for all stages with the same code.

    stage (torch level)  ->  FORWARD | FORWARD_SAVING | RECOMPUTE | BACKWARD

Forward and backward are traced together, with `torch.autograd.grad` inside the traced function,
and split by `megacompile.passes.stages.joint`.

Stages are visited from last to first, because a backward's inputs depend on the later stages: a
*tangent* for each output whose gradient exists, and a *partial gradient* for each input or
parameter that a later stage used too. Partial gradients enter the traced graph as gradients of the
inputs themselves, so that sums follow autograd's order.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Hashable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from megacompile import compat
from megacompile.errors import UnsupportedGraphError
from megacompile.ir import ops
from megacompile.ir.capture import Ambient, graph_key
from megacompile.ir.schedule import Schedule
from megacompile.ir.stages import ArgRef, ParamRef, Stage, Template
from megacompile.ir.tensors import TensorMeta, Values, any_size, planned_of
from megacompile.options import Lowering
from megacompile.passes.edit import with_stages
from megacompile.passes.stages import numbers
from megacompile.passes.stages.joint import BackwardInputs, as_gradient, split
from megacompile.passes.stages.strides import computes_indices, lay_channels_last, real_tensors

TemplateCache = MutableMapping[Hashable, Template]


def trace_templates(
    schedule: Schedule, *, ambient: Ambient, cache: TemplateCache, lowering: Lowering
) -> Schedule:
    """Give every stage its template. `schedule.tangents` are the outputs that get a gradient.

    Raises:
        UnsupportedGraphError: a stage cannot be traced, or a hook or an `autograd.Function` changes
            a tensor in place in its backward.
    """
    calls = ops.calls_by_stage(schedule.forward, ops.forward)
    outputs, _ = ops.returned(schedule.forward)
    # forward node or (bucket key, parameter) -> meta of its gradient so far
    gradients: dict[Any, TensorMeta] = {
        outputs[k]: as_gradient(outputs[k].meta["value"]) for k in schedule.tangents
    }
    stages: list[Stage] = []
    for stage in reversed(schedule.stages):
        call = calls[stage.index]
        args = ops.arguments(call)[2]
        sources = [
            args[ref.index]
            if isinstance(ref, ArgRef)
            else (stage.buckets[ref.bucket].key, ref.param)
            for ref in stage.primals
        ]
        takes = _takes(stage, call, sources, gradients)
        template = _template(stage, takes, ambient, cache, lowering)
        for primal, meta in zip(template.gradients, template.gradient_metas, strict=True):
            gradients[sources[primal]] = meta
        stages.append(replace(stage, template=template))
    return with_stages(schedule, tuple(reversed(stages)))


def _takes(
    stage: Stage, call: fx.Node, sources: Sequence[Any], gradients: Mapping[Any, TensorMeta]
) -> BackwardInputs:
    """The results with a gradient, and the primals with a partial gradient."""
    results = {k: item for k, item in ops.items(call) if item in gradients}
    if not results:
        return BackwardInputs()
    tangents = tuple(sorted(results))
    partial_gradients = tuple(
        i
        for i, source in enumerate(sources)
        if stage.metas[i].requires_grad and source in gradients
    )
    given = [*(results[k] for k in tangents), *(sources[i] for i in partial_gradients)]
    metas = tuple(gradients[source] for source in given)
    return BackwardInputs(tangents, partial_gradients, metas)


def _template(
    stage: Stage, takes: BackwardInputs, ambient: Ambient, cache: TemplateCache, lowering: Lowering
) -> Template:
    params = sum(isinstance(ref, ParamRef) for ref in stage.primals)
    code = graph_key(stage.module)
    metas = tuple(any_size(meta) for meta in stage.metas)
    given = replace(takes, metas=tuple(any_size(meta) for meta in takes.metas))
    key = (code, metas, params, stage.mutated, given, lowering, ambient)
    planned = planned_of(stage.metas)
    for number in itertools.count():  # code with symbols may not be valid for all their values
        template = cache.get((key, number))
        if template is not None and template.holds(planned):
            return planned_for(template, planned, cache)
        if template is None:
            break
    try:
        tracer = _Tracer(stage, params, takes, ambient, lowering)
        cache[key, number] = tracer.template(next_index(cache))
    except (compat.UntraceableSymbols, *compat.UNTRACEABLE) as error:
        raise UnsupportedGraphError(f"stage {stage.name!r}: {error}") from error
    return cache[key, number]


def planned_for(template: Template, planned: Values, cache: TemplateCache) -> Template:
    """The template with these planned values of its symbols, and the same code."""
    if template.symbols is None or template.symbols.planned == planned:
        return template
    key = (template, tuple(planned.items()))
    if key not in cache:
        names = ("primals", "outputs", "saved", "tangent_metas", "gradient_metas")
        metas: dict[str, Any] = {
            name: numbers.at(getattr(template, name), planned) for name in names
        }
        cache[key] = replace(
            template,
            **metas,
            graphs={code: numbers.sized(graph, planned) for code, graph in template.graphs.items()},
            symbols=replace(template.symbols, planned=dict(planned)),
            traced=template.traced or template,
        )
    return cache[key]


def next_index(cache: TemplateCache) -> int:
    """An index that no template in the cache uses; some may have been evicted."""
    return 1 + max((template.index for template in cache.values()), default=-1)


@dataclass
class _Tracer:
    stage: Stage
    params: int  # number of primals that are parameters
    takes: BackwardInputs
    ambient: Ambient
    lowering: Lowering
    gradients: tuple[int, ...] = ()

    def template(self, index: int) -> Template:
        joint = self._trace_symbolic() if planned_of(self.stage.metas) else self._trace()
        return split(self.stage, joint, self.takes, self.gradients, index=index)

    def _trace_symbolic(self) -> fx.GraphModule:
        """The joint graph for all sizes.

        [Note: symbolic and bitwise] Fake tensors have the strides of fake kernels, and Python
        decompositions replace operators that C++ decomposes. So code that must be bitwise equal is
        also traced with the planned sizes, as without symbols, and the two graphs must be equal
        except for the symbols.
        """
        eager = self.lowering is Lowering.EAGER
        fakes = compat.SymbolicFakes(planned_of(self.stage.metas))
        with contextlib.ExitStack() as modes:
            modes.enter_context(fakes)
            if eager:
                modes.enter_context(real_tensors(self.stage))
                modes.enter_context(compat.real_strides())
                decompositions = compat.symbolic_decompositions()
            else:
                decompositions = compat.inductor_decompositions()
            joint = self._traced(contextlib.nullcontext(), decompositions)
            joint = numbers.compute_ints(joint, self.stage.metas)
            fakes.note_guards(lambda: f"the stage {self.stage.name}, with its backward")
        if not eager:
            numbers.check_floats(joint)
            return joint
        found = self.gradients
        plain = self._trace()
        plain.graph.eliminate_dead_code()
        difference = numbers.first_difference(joint, plain)
        if difference or found != self.gradients:
            raise compat.UntraceableSymbols(f"with symbols, {difference or 'gradients differ'}")
        return joint

    def _trace(self) -> fx.GraphModule:
        """(primals, tangents, partial gradients) -> (outputs, new values, gradients)."""
        if self.lowering is not Lowering.EAGER:
            joint = self._traced(compat.fake_mode(), compat.inductor_decompositions())
            return lay_channels_last(joint)
        decompositions = compat.eager_decompositions()
        if any(meta.device.type == "cuda" for meta in self.stage.metas):
            without_data = self._traced(compat.fake_mode(), decompositions)
            if computes_indices(without_data.graph):
                return without_data
        try:
            return self._traced(real_tensors(self.stage), decompositions)
        except (torch.OutOfMemoryError, *compat.UNTRACEABLE):
            raise
        except (RuntimeError, IndexError, ValueError, ArithmeticError):
            # zeros are not the user's data: -1 may become an index, and a zero matrix has no
            # inverse
            return self._traced(compat.fake_mode(), decompositions)

    def _traced(
        self,
        tensors: contextlib.AbstractContextManager[Any],
        decompositions: dict[Any, Callable[..., Any]],
    ) -> fx.GraphModule:
        with self.ambient.apply(), compat.keeping_nesting(), tensors:
            primals: list[Any] = [meta.zeros() for meta in self.stage.metas]
            tangents = [meta.zeros() for meta in self.takes.metas]

            def functional(primals: list[Any], tangents: list[torch.Tensor]) -> Any:
                with compat.functional_mode(native=self.lowering is not Lowering.EAGER):
                    wrapped = list(map(compat.to_functional, primals))
                    found = self._joint(wrapped, list(map(compat.to_functional, tangents)))
                    return list(map(compat.from_functional, found))

            return compat.trace(functional, primals, tangents, decompositions)

    def _joint(self, primals: list[Any], tangents: list[torch.Tensor]) -> list[torch.Tensor]:
        """The results, then the gradients."""
        inputs = list(primals)
        for i in self.stage.mutated:  # a new value, so that the old one stays readable
            inputs[i] = primals[i].clone()
        held = {compat.storage_key(p) for p in primals[: self.params]}
        outputs = list(compat.run(self.stage.module, inputs))
        for k, (tensor, meta) in enumerate(zip(outputs, self.stage.outputs, strict=True)):
            if compat.storage_key(tensor) in held:  # no view of a slot may leave the stage
                with torch.enable_grad():  # an unchanged parameter requires grad even under no_grad
                    outputs[k] = tensor.clone()
            elif not _has_strides(tensor, meta):  # [Note: fake strides]
                outputs[k] = meta.empty().detach().copy_(tensor)
        results = [*outputs, *(inputs[i] for i in self.stage.mutated)]
        if not tangents:
            return results
        before = [compat.from_functional(t) for t in (*inputs, *outputs)]
        ends = [results[k] for k in self.takes.tangents] + [
            primals[k] for k in self.takes.partial_gradients
        ]
        sources = [i for i, p in enumerate(self.stage.metas) if p.requires_grad]
        with self.ambient.apply(autocast=False), compat.in_backward():
            try:
                found = torch.autograd.grad(
                    ends, [primals[i] for i in sources], tangents, allow_unused=True
                )
            except RuntimeError as error:
                if "has been modified by an inplace operation" in str(error):
                    # plain torch raises it only in the backward
                    raise NotImplementedError(str(error).partition(" Hint:")[0]) from error
                raise
        pairs = [(i, g) for i, g in zip(sources, found, strict=True) if g is not None]
        self.gradients = tuple(i for i, _ in pairs)
        now = [compat.from_functional(t) for t in (*inputs, *outputs)]
        if any(value is not old for value, old in zip(now, before, strict=True)):
            raise UnsupportedGraphError(
                f"stage {self.stage.name!r}: a hook, or an autograd.Function, changes a tensor in "
                "place in the backward; change it after the backward"
            )
        return [*results, *(g for _, g in pairs)]


def _has_strides(tensor: torch.Tensor, meta: TensorMeta) -> bool:
    fakes = compat.symbols_now()
    if meta.symbolic is None or fakes is None:
        return bool(tensor.stride() == meta.stride)
    return all(map(fakes.equal, tensor.stride(), meta.symbolic.stride))
