"""Captures a module with Dynamo on the CPU and binds its parameters to units, without a runtime.

What `megacompile.runtime` does with proxies and host buckets, on plain parameters: enough to give
a pass a real graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from megacompile.ir import ops
from megacompile.ir.buckets import Unit
from megacompile.ir.capture import (
    Ambient,
    Capture,
    ConstantInput,
    GraphInput,
    ParamInput,
    TensorInput,
)
from megacompile.ir.schedule import Schedule
from megacompile.ir.tensors import TensorMeta
from megacompile.options import Lowering
from megacompile.passes.schedule.differentiate import differentiate
from megacompile.passes.stages.partition import partition
from megacompile.passes.stages.templates import trace_templates
from megacompile.passes.stages.units import UNIT_LIMIT_BYTES, find_units
from megacompile.passes.stages.writes import find_writes, has_own_backwards
from tests.planned import passed

CPU = torch.device("cpu")


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
        return x + self.scale * self.down(hidden)


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
        return self.head(x).square().mean()

    def checkpointed(self, x: Tensor) -> Tensor:
        """The same, with an activation checkpoint around each layer."""
        x = self.embed(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.head(x).square().mean()


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

    def differentiated(self) -> Schedule:
        """Forward and backward; the first output gets a gradient, if it can."""
        ambient, cache = self.capture.ambient, dict[Any, Any]()
        given: dict[str, Any] = {"ambient": ambient, "cache": cache, "lowering": Lowering.EAGER}
        schedule = partition(self.capture, self.units)
        if has_own_backwards(schedule):
            schedule = find_writes(schedule, **given)
        output: Any = ops.returned(schedule.forward)[0][0]
        able = ambient.grad_enabled and output.meta["value"].requires_grad
        schedule = trace_templates(replace(schedule, tangents=(0,) if able else ()), **given)
        return differentiate(schedule)

    def build(self, **options: Any) -> Schedule:
        """The schedule behind every pass but `lower`; `options` are those of `passed`."""
        return passed(self.differentiated(), **options)


def capture(
    model: nn.Module,
    *args: Any,
    limit_bytes: int = UNIT_LIMIT_BYTES,
    ranks: int = 1,
    replicas: int = 1,
    **kwargs: Any,
) -> Captured:
    """The first graph that Dynamo captures of `model(*args, **kwargs)`; nothing is computed."""

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
