"""Captures a module with Dynamo on the CPU and binds its parameters to units, without a runtime.

What `megacompile.runtime` does with proxies and host buckets, on plain parameters: enough to give
a pass a real graph. `Captured.passes` are those after `partition`, in the order of
`megacompile.api`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from megacompile.ir.buckets import Unit
from megacompile.ir.capture import (
    Ambient,
    Capture,
    ConstantInput,
    GraphInput,
    ParamInput,
    TensorInput,
)
from megacompile.ir.plan import Choice, Places
from megacompile.ir.schedule import Schedule
from megacompile.ir.tensors import TensorMeta
from megacompile.options import Lowering
from megacompile.passes.schedule.assign_slots import assign_slots
from megacompile.passes.schedule.device_update import insert_device_update
from megacompile.passes.schedule.differentiate import differentiate
from megacompile.passes.schedule.free import insert_free
from megacompile.passes.schedule.insert_collectives import (
    delay_reduced,
    insert_all_gather,
    insert_all_reduce,
    insert_reduce_scatter,
)
from megacompile.passes.schedule.insert_disk import insert_disk, insert_disk_saved
from megacompile.passes.schedule.insert_tokens import insert_tokens
from megacompile.passes.schedule.make_plan import make_plan
from megacompile.passes.schedule.norms import insert_norms
from megacompile.passes.schedule.offload_grad import offload_gradients
from megacompile.passes.schedule.offload_saved import offload_saved_tensors
from megacompile.passes.schedule.prefetch import insert_prefetch
from megacompile.passes.schedule.recompute import insert_recompute, insert_reruns
from megacompile.passes.schedule.split import split_stages
from megacompile.passes.schedule.update_graph import insert_update_graph
from megacompile.passes.schedule.update_in_backward import insert_updates
from megacompile.passes.stages.partition import partition
from megacompile.passes.stages.templates import TemplateCache, trace_templates
from megacompile.passes.stages.units import UNIT_LIMIT_BYTES, find_units
from megacompile.passes.stages.writes import find_writes, has_own_backwards

CPU = torch.device("cpu")
Pass = Callable[[Schedule], Schedule]


class Layer(nn.Module):
    """A saved value layer."""

    def __init__(self, width: int = 4, *, scale: float = 1.0, dropout: float = 0.0) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.scale = scale
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:  # (..., width) -> (..., width)
        hidden = F.dropout(F.gelu(self.up(x)), self.dropout)
        out: Tensor = x + self.scale * self.down(hidden)
        return out


class Net(nn.Module):
    """`embed`, `layers` and `head`, called as `function(net, *inputs)`."""

    def __init__(self, function: Callable[..., Any], *, depth: int = 3, **layer: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(4, 4)
        self.layers = nn.ModuleList(Layer(**layer) for _ in range(depth))
        self.head = nn.Linear(4, 4)
        self.function = function

    def forward(self, *inputs: Any) -> Any:
        return self.function(self, *inputs)

    def chain(self, x: Tensor) -> Tensor:
        """One after the other, and a scalar loss."""
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        loss: Tensor = self.head(x).square().mean()
        return loss

    def checkpointed(self, x: Tensor) -> Tensor:
        """The same, with an activation checkpoint around each layer."""
        x = self.embed(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        loss: Tensor = self.head(x).square().mean()
        return loss


class Counting(nn.Module):
    """A layer with a buffer that it changes and whose old value its backward needs."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.get_buffer("scale")
        out: Tensor = self.fc(x) * scale.clone()
        scale.add_(1)
        return out.tanh()


@dataclass(frozen=True)
class Captured:
    """A captured graph, what it was called with, and the units of its model."""

    model: nn.Module
    capture: Capture
    units: tuple[Unit, ...]
    inputs: tuple[Any, ...]  # of the captured graph

    def partition(self) -> Schedule:
        stages = partition(self.capture, self.units)
        if not has_own_backwards(stages):
            return stages
        lowering = Lowering.EAGER
        return find_writes(stages, ambient=self.capture.ambient, cache={}, lowering=lowering)

    def templates(self, cache: TemplateCache | None = None, *, output: int = 0) -> Schedule:
        """The stages with their templates; output `output` gets a gradient, if it can."""
        return self._trace(cache)(self.with_tangent(output))

    def with_tangent(self, output: int = 0) -> Schedule:
        """The stages; output `output` gets a gradient, if it can."""
        schedule = self.partition()
        meta = result(schedule, output).meta["value"]
        able = self.capture.ambient.grad_enabled and meta.requires_grad
        return replace(schedule, tangents=(output,) if able else ())

    def passes(self, *, cache: TemplateCache | None = None, **options: Any) -> dict[str, Pass]:
        """The passes that follow `partition`, in order."""
        return {"templates": self._trace(cache), **after_templates(cache=cache, **options)}

    def build(self, until: str = "tokens", **options: Any) -> Schedule:
        """The schedule after the pass called `until`."""
        schedule = self.with_tangent()
        for name, function in self.passes(**options).items():
            schedule = function(schedule)
            if name == until:
                return schedule
        raise KeyError(until)

    def _trace(self, cache: TemplateCache | None) -> Pass:
        return functools.partial(
            trace_templates,
            ambient=self.capture.ambient,
            cache={} if cache is None else cache,
            lowering=Lowering.EAGER,
        )


_ALL = 2**20  # stages


def after_templates(
    *,
    keep_last: bool = True,
    activations: str = "auto",
    cache: TemplateCache | None = None,
    accumulate: bool = False,
    norms: bool = False,
    update: bool = False,
    masters: bool = False,
    reuse: bool = False,
    lookahead: int = 2,
    slots: int = 3,
    resident: frozenset[int] = frozenset(),
    device_update: float = 0.0,
    helps: bool = False,
    state_delay: int = 1,
    rerun: int = 0,
    saved_on_host: int = 0,
    disk_saved: bool = False,
    on_disk: frozenset[int] = frozenset(),
    rank: int = 0,
    defers: bool = False,
    delays: bool = False,
) -> dict[str, Pass]:
    """The passes that need nothing but a schedule whose stages have templates, in order.

    With `update` the gradients are not offloaded. `norms` sends their norms along, or alone.
    `device_update` is the share of the parameters that the step updates on the device; not of the
    buckets of `on_disk`, whose states lie on a disk. With
    `defers`, a later backward sums over replicas; with `delays`, the next stage computes during
    sums over ranks.
    """
    gradients: dict[str, Pass] = {
        "offload_grad": functools.partial(offload_gradients, accumulate=accumulate)
    }
    if update:
        insert = functools.partial(
            insert_updates,
            accumulate=accumulate,
            lookahead=lookahead,
            masters=masters,
            updated_bytes=lambda item_bytes: 10.0,
            state_bytes=lambda item_bytes: 8.0,
        )
        gradients = {"update": insert}
    gradients["all_reduce"] = functools.partial(insert_all_reduce, defers=defers)
    if norms:
        gradients["norms"] = insert_norms
    if not update:
        gradients["device_update"] = functools.partial(
            insert_device_update, state_bytes=lambda item_bytes: 10.0
        )
        gradients["update_graph"] = functools.partial(insert_update_graph, helps=helps)
    if on_disk:
        gradients["disk"] = functools.partial(insert_disk, state_bytes=lambda item_bytes: 8.0)
    return {
        "differentiate": differentiate,
        "plan": functools.partial(
            make_plan,
            choice=Choice(
                places=Places.of(resident, on_disk),
                device_update=device_update,
                state_delay=state_delay,
                rerun=rerun,
                saved_on_host=saved_on_host,
                saved_on_disk=_ALL if disk_saved else 0,
            ),
            saves=keep_last,
            activations=activations,
            lookahead=lookahead,
        ),
        "split": functools.partial(split_stages, cache={} if cache is None else cache),
        "recompute": insert_recompute,
        "rerun": insert_reruns,
        "offload_saved": functools.partial(offload_saved_tensors, lookahead=lookahead),
        **({"disk_saved": insert_disk_saved} if disk_saved else {}),
        "reduce_scatter": functools.partial(insert_reduce_scatter, rank=rank),
        **gradients,
        **({"delay_reduced": delay_reduced} if delays else {}),
        "prefetch": functools.partial(insert_prefetch, lookahead=lookahead),
        "slots": functools.partial(assign_slots, slots=slots, reuse=reuse),
        "all_gather": insert_all_gather,
        "free": insert_free,
        "tokens": insert_tokens,
    }


def capture(
    model: nn.Module,
    *args: Any,
    limit_bytes: int = UNIT_LIMIT_BYTES,
    ranks: int = 1,
    replicas: int = 1,
    **kwargs: Any,
) -> Captured:
    """The first graph that Dynamo captures of `model(*args, **kwargs)`; nothing is computed.

    Args:
        ranks: that share the model's buckets.
        replicas: that have the same part of them.
    """

    def backend(module: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        del examples

        def stop(*inputs: Any) -> Any:
            raise _Stop(module, inputs, Ambient.current(CPU))

        return stop

    def call(*args: Any, **kwargs: Any) -> Any:  # Dynamo skips frames of torch.nn itself
        return model(*args, **kwargs)

    torch.compiler.reset()
    try:
        torch.compile(call, backend=backend)(*args, **kwargs)
    except _Stop as stopped:
        module, inputs, ambient = stopped.args
    else:
        raise AssertionError(f"Dynamo captured nothing of {type(model).__name__}")
    units = find_units(model, limit_bytes=limit_bytes, ranks=ranks, replicas=replicas)
    places = {
        id(model.get_parameter(param.name)): (unit.bucket, i)
        for unit in units
        for i, param in enumerate(unit.bucket.params)
    }
    bound = tuple(_bind(value, places) for value in inputs)
    return Captured(
        model, Capture(type(model).__name__, module, bound, CPU, ambient), units, inputs
    )


class _Stop(Exception):
    """Carries what a captured graph was called with."""


def _bind(value: Any, places: dict[int, Any]) -> GraphInput:
    if id(value) in places:
        bucket, i = places[id(value)]
        return ParamInput(bucket, i, value.requires_grad)
    if isinstance(value, Tensor):
        return TensorInput(TensorMeta.of(value))
    assert isinstance(value, (int, float, bool)), value
    return ConstantInput(value)


def result(schedule: Schedule, output: int) -> fx.Node:
    """The node that gives an output of the captured graph."""
    outputs: Any = schedule.forward.output_node().args[0]
    node: fx.Node = outputs[0][output]
    return node
