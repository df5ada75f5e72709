"""Captured graphs without Dynamo: torch.fx traces a function, in milliseconds.

Tensors that the function makes by itself (`torch.arange(n)`) are nodes, as in what Dynamo captures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from megacompile.ir.buckets import Bucket
from megacompile.ir.capture import (
    Ambient,
    Capture,
    GraphInput,
    NumberInput,
    ParamInput,
    TensorInput,
)
from megacompile.ir.symbols import Number, SymbolicSizes
from megacompile.ir.tensors import TensorMeta

CPU = torch.device("cpu")
FACTORIES = {torch.arange, torch.ones, torch.zeros, torch.full, torch.rand, torch.tensor}


class _Making(TorchFunctionMode):
    """Lets calls that make tensors be nodes."""

    def __init__(self, tracer: fx.Tracer) -> None:
        self.tracer = tracer

    def __torch_function__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in FACTORIES:
            return self.tracer.create_proxy("call_function", func, args, dict(kwargs or {}))
        return func(*args, **(kwargs or {}))


def traced(function: Callable[..., Any], *inputs: GraphInput | Tensor | TensorMeta) -> Capture:
    """What a function of as many arguments does; a tensor stands for what it looks like."""
    tracer, root = fx.Tracer(), torch.nn.Module()
    tracer.root, tracer.graph = root, fx.Graph()
    tracer.tensor_attrs = {}
    given = [tracer.create_proxy("placeholder", f"x{k}", (), {}) for k in range(len(inputs))]
    with _Making(tracer):
        result = function(*given)
    tracer.create_node("output", "output", (tracer.create_arg(result),), {})
    module = fx.GraphModule(root, tracer.graph)
    return Capture("traced", module, tuple(map(_bound, inputs)), CPU, Ambient.current(CPU))


def _bound(item: Any) -> GraphInput:
    if isinstance(item, Tensor):
        item = TensorMeta.of(item)
    return TensorInput(item) if isinstance(item, TensorMeta) else item


def node(like: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A call that torch.fx would make instead of noting it, in the graph that `like` is of; of
    plain values, its result."""
    if isinstance(like, fx.Proxy):
        return like.tracer.create_proxy("call_function", function, args, kwargs)
    return function(*args, **kwargs)


def number(name: str, planned: int) -> NumberInput:
    """A number that changes from call to call."""
    return NumberInput(Number(symbol(name), planned))


def symbol(name: str) -> Any:
    return sympy.Symbol(name, integer=True, positive=True)


def sized(meta: TensorMeta, *shape: Any) -> TensorMeta:
    """The meta, with a shape of symbols and numbers that it is for the planned ones."""
    strides = [sympy.prod(shape[k + 1 :]) for k in range(len(shape))]
    return replace(meta, symbolic=SymbolicSizes(tuple(shape), tuple(strides)))


def of_params(capture: Capture) -> Capture:
    """The same, with parameters of one bucket for inputs."""
    metas = [item.meta for item in capture.inputs if isinstance(item, TensorInput)]
    bucket = Bucket.layout(0, "layer", [(f"p{k}", meta.empty()) for k, meta in enumerate(metas)])
    inputs = [ParamInput(bucket, k, meta.requires_grad) for k, meta in enumerate(metas)]
    return replace(capture, inputs=tuple(inputs))
