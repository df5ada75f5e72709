"""The autograd nodes that connect a program to the user's graph: one per captured graph, and gates;
and the tensors that must not change before their backward.

The node's forward runs the forward schedule, its backward runs the backward schedule. The
parameters are inputs of the gates, which return their gradients after the node's backward:

    loss <- node <- gate <- parameters
            node <- other inputs of the graph

Autograd then accumulates the gradients and runs hooks as usual. All parameters share one gate; if
hooks are registered, each parameter has its own gate, so that hooks run in the plain model's order:
from the parameter that is used last to the one that is used first.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import fx

from megacompile import compat, notices
from megacompile.ir.buckets import ParamId
from megacompile.runtime.model.program import Program


class Gate(torch.autograd.Function):
    """Connects the parameters in `places` to the `Call` that computes their gradients."""

    @staticmethod
    def forward(
        ctx: Any, call: Any, places: Sequence[ParamId], token: torch.Tensor, *params: torch.Tensor
    ) -> torch.Tensor:
        ctx.call, ctx.places = call, places
        ctx.set_materialize_grads(False)
        return torch.empty_like(token)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, None, gradients[0], *ctx.call.gradients_for(ctx.places)


def accumulate_nodes(token: torch.Tensor) -> list[object]:
    """The AccumulateGrad nodes that a token's gates lead to, in the order of the gates."""
    found: list[object] = []
    gate: Any = token.grad_fn
    while gate is not None:
        (before, _), *ends = gate.next_functions
        found[:0] = map(itemgetter(0), ends)
        gate = before
    return found


class CapturedNode(torch.autograd.Function):
    """A captured graph, run by a `Call`; `positions`: its inputs that require grad."""

    @staticmethod
    def forward(
        ctx: Any,
        call: Any,
        token: torch.Tensor | None,
        positions: Sequence[int],
        *trained: torch.Tensor,
    ) -> Any:
        outputs = call.forward(recorded=True)
        ctx.call = call
        ctx.positions = positions
        ctx.device = None if token is None else token.device
        ctx.set_materialize_grads(False)
        computed, differentiable = call.program.computed, call.program.differentiable
        if len(differentiable) < len(computed):
            each = zip(computed, outputs, strict=True)
            ctx.mark_non_differentiable(*(t for k, t in each if k not in differentiable))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        found = ctx.call.backward(ctx, gradients)
        token = None if ctx.device is None else torch.empty(0, device=ctx.device)
        return None, token, None, *map(found.get, ctx.positions)


def warn_of_hooks(
    program: Program, outputs: Mapping[int, weakref.ref[torch.Tensor]], tangents: Collection[int]
) -> None:
    """Warn of an output with a hook, or `retain_grad()`, from which the graph computes others that
    get a gradient (`tangents`).

    Autograd sees a captured graph as one node: the hook receives only the gradient from outside of
    the graph. `torch.compile` behaves the same way.
    """
    for k, reference in outputs.items():
        tensor = reference()
        if tensor is None or not (compat.gradient_hooks(tensor) or tensor.retains_grad):
            continue
        (returned,) = program.capture.module.graph.output_node().args
        nodes = returned if isinstance(returned, (list, tuple)) else [returned]
        start = nodes[k] if k < len(nodes) else None  # the rest are new values of changed inputs
        todo = [start] if isinstance(start, fx.Node) else []
        following: set[object] = set()
        while todo:
            new = todo.pop().users.keys() - following
            following |= new
            todo += new
        name = program.capture.name
        inside = {j for j in outputs if j < len(nodes) and nodes[j] in following}
        if not inside.isdisjoint(tangents) and notices.is_new(f"hooks of {name}", program.plans):
            notices.warn(
                f"megacompile: {name}: output {k} has a hook, or retains its gradient, and other "
                "outputs are computed from it: gradients through those do not reach the hook, and "
                "its changes do not reach them (numbers differ from the plain model's; shown "
                "once); call torch._dynamo.graph_break() after the line that computes it"
            )


# Saved values that alias other memory, which may change in place before the backward runs.
#
# A saved value may alias an input, an output, or a constant of a stage's code. The version counter
# of that tensor is recorded, as autograd does for saved tensors; a view made by compiled code has a
# separate one. Of inputs that the forward changes, the version from before the forward counts, so
# its own change is detected too. Another input may share their counter without sharing elements, as
# another view of one base: its version is taken at the end of the forward. Values that the plain
# model's backward would not keep (a mask of which only a copy is used, the inputs of a recompute)
# are copied if they are small.

SMALL_BYTES = 2**20  # negligible in a memory plan


class Source(NamedTuple):
    """A tensor that lives outside of a program, and its version at a forward."""

    what: str  # its name in errors
    tensor: torch.Tensor
    version: int
    names: frozenset[str]  # of the saved values in its memory


def shared(
    saved_values: dict[str, Any],
    inputs: Mapping[str, Any],  # of the forward
    changed: Iterable[str],  # the inputs that it changes in place
    constants: Mapping[str, torch.Tensor],  # in its code
    before: Iterable[int],  # versions of these inputs and the constants, before the forward
    outputs: Iterable[Any],
    # saved values that the plain model's backward would not keep, so changes to them are allowed
    borrowed: Collection[str] = (),
) -> list[Source]:
    """The sources that must not change between a forward and its backward.

    Saved values that alias other tensors become separate tensor objects: autograd sets an output's
    grad_fn, and the node holds the saved values.
    """
    saved, unchanged = _tensors(saved_values), _tensors(inputs)
    left, changing = _tensors(dict(enumerate(outputs))), {k: unchanged.pop(k) for k in changed}
    memories = dict(zip(saved, _memories(saved.values()), strict=True))
    every = {**unchanged, **changing, **constants, **left}
    places = _memories(every.values())
    met = {*memories.values()}.intersection(places)
    met.discard(0)  # tensors without elements
    if not met and not constants:
        return []
    touched = met.intersection(_memories(changing.values()))
    names_in: dict[int, set[str]] = {}  # names of saved values, by memory
    themselves = set(constants)  # and the inputs that are saved without a copy
    for name, memory in memories.items():
        if memory not in met:
            continue
        value = saved[name]
        if name in borrowed and memory not in touched and value.nbytes <= SMALL_BYTES:
            saved_values[name] = value.detach().clone()
            continue
        saved_values[name] = value.detach()
        if name in inputs:
            themselves.add(name)
        else:
            names_in.setdefault(memory, set()).add(name)
    found = [*versions(unchanged.values()), *before, *versions(left.values())]
    kept: list[Source] = []
    for (name, tensor), version, memory in zip(every.items(), found, places, strict=True):
        if names := {name} & themselves | names_in.get(memory, set()):
            what = f"input {name}" if name in inputs else "a constant"
            if name in left:
                what, tensor = "an output", tensor.detach()  # without its graph
            kept.append(Source(what, tensor, version, frozenset(names)))
    return kept


def _tensors(values: Mapping[Any, Any]) -> dict[Any, torch.Tensor]:
    return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}


def versions(tensors: Collection[torch.Tensor]) -> list[int]:
    """The version of each source; -1 in inference mode, which a backward refuses anyway."""
    if any(map(torch.Tensor.is_inference, tensors)):
        return [-1 if t.is_inference() else compat.version(t) for t in tensors]
    return list(map(compat.version, tensors))


def _memories(tensors: Iterable[torch.Tensor]) -> list[int]:
    """The addresses of all storages, quickly: there are hundreds, in every step."""
    return list(map(torch.UntypedStorage.data_ptr, map(torch.Tensor.untyped_storage, tensors)))
