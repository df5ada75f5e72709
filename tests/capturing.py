"""Captures a module with Dynamo on the CPU and binds its parameters to units, without a runtime.

What `megacompile.runtime` does with proxies and host buckets, on plain parameters: enough to give a
pass a real graph. `run_stages` then runs what `partition` made of it, stage by stage, in torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from megacompile import ops
from megacompile.ir import (
    Ambient,
    ArgRef,
    Capture,
    ConstantInput,
    GraphInput,
    ParamInput,
    Schedule,
    Stage,
    TensorInput,
    TensorMeta,
    Unit,
)
from megacompile.options import Lowering
from megacompile.passes.partition import partition
from megacompile.passes.templates import TemplateCache, trace_templates
from megacompile.passes.units import UNIT_LIMIT_BYTES, find_units

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Captured:
    """A captured graph, what it was called with, and the units of its model."""

    model: nn.Module
    capture: Capture
    units: tuple[Unit, ...]
    inputs: tuple[Any, ...]  # of the captured graph

    def partition(self) -> Schedule:
        return partition(self.capture, self.units)

    def param(self, stage: Stage, primal: int) -> nn.Parameter:
        """The parameter that a primal of a stage is."""
        ref = stage.primals[primal]
        assert not isinstance(ref, ArgRef)
        return self.model.get_parameter(stage.buckets[ref.bucket].params[ref.param].name)


def capture(
    model: nn.Module,
    *args: Any,
    limit_bytes: int = UNIT_LIMIT_BYTES,
    dynamic: bool | None = None,
    **kwargs: Any,
) -> Captured:
    """The first graph that Dynamo captures of `model(*args, **kwargs)`; nothing is computed."""
    found: list[tuple[fx.GraphModule, tuple[Any, ...], Ambient]] = []

    def backend(module: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        del examples

        def run(*inputs: Any) -> Any:
            found.append((module, inputs, Ambient.current(CPU)))
            return module(*inputs)

        return run

    def call(*args: Any, **kwargs: Any) -> Any:  # Dynamo skips frames of torch.nn itself
        return model(*args, **kwargs)

    torch.compiler.reset()
    torch.compile(call, backend=backend, dynamic=dynamic)(*args, **kwargs)
    module, inputs, ambient = found[0]
    units = find_units(model, limit_bytes=limit_bytes)
    places = {
        id(model.get_parameter(param.name)): (unit.bucket, i)
        for unit in units
        for i, param in enumerate(unit.bucket.params)
    }
    bound = tuple(_bind(value, places) for value in inputs)
    return Captured(
        model, Capture(type(model).__name__, module, bound, CPU, ambient), units, inputs
    )


def _bind(value: Any, places: dict[int, Any]) -> GraphInput:
    if id(value) in places:
        return ParamInput(*places[id(value)], value.requires_grad)
    if isinstance(value, Tensor):
        return TensorInput(TensorMeta.of(value))
    assert isinstance(value, (int, float, bool)), value
    return ConstantInput(value)
