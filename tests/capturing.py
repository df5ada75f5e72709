"""Captured graphs: of modules by Dynamo on the CPU, and of functions by torch.fx, in milliseconds.

There, tensors that the function makes by itself (`torch.arange(n)`) are nodes, too.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import sympy
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from megacompile.ir.capture import Ambient, Capture, GraphInput
from megacompile.ir.schedule import Schedule
from megacompile.ir.tensors import Number, SymbolicSizes, TensorMeta
from megacompile.plan.abstract import AbstractProgram, abstract_options, abstract_programs


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


def capture(model: nn.Module, *args: Any, **kwargs: Any) -> AbstractProgram:
    """The first graph that Dynamo captures of `model(*args, **kwargs)`; nothing is computed."""
    options = abstract_options(device="cpu", lowering="eager")
    return abstract_programs(model, args, kwargs, options=options)[0]


def differentiated(captured: AbstractProgram) -> Schedule:
    """Its forward and backward."""
    return captured.compiler.pipeline.differentiated(*captured.planned())


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


def traced(function: Callable[..., Any], *inputs: GraphInput | Tensor) -> Capture:
    """What a function of as many arguments does; a tensor stands for what it looks like."""
    tracer, root = fx.Tracer(), torch.nn.Module()
    tracer.root, tracer.graph = root, fx.Graph()
    tracer.tensor_attrs = {}
    given = [tracer.create_proxy("placeholder", f"x{k}", (), {}) for k in range(len(inputs))]
    with _Making(tracer):
        result = function(*given)
    tracer.create_node("output", "output", (tracer.create_arg(result),), {})
    module = fx.GraphModule(root, tracer.graph)
    bound = tuple(TensorMeta.of(item) if isinstance(item, Tensor) else item for item in inputs)
    return Capture("traced", module, bound, CPU, Ambient.current(CPU))


def node(like: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A call that torch.fx would make instead of noting it; of plain values, its result."""
    if isinstance(like, fx.Proxy):
        return like.tracer.create_proxy("call_function", function, args, kwargs)
    return function(*args, **kwargs)


def number(name: str, planned: int) -> Number:
    """A number that changes from call to call."""
    return Number(symbol(name), planned)


def symbol(name: str) -> Any:
    return sympy.Symbol(name, integer=True, positive=True)


def sized(meta: TensorMeta, *shape: Any) -> TensorMeta:
    """The meta, with a shape of symbols and numbers that it is for the planned ones."""
    strides = [sympy.prod(shape[k + 1 :]) for k in range(len(shape))]
    return replace(meta, symbolic=SymbolicSizes(tuple(shape), tuple(strides)))


class Rounding(enum.Enum):
    HALVES = 2
    QUARTERS = 4


class Kernel(NamedTuple):
    emulate: bool = True


@dataclass(frozen=True)
class Config:
    rounding: Rounding = Rounding.QUARTERS
    dtype: torch.dtype = torch.float32


@torch._dynamo.allow_in_graph
class Product(torch.autograd.Function):
    """`x @ weight`, with both rounded to fractions, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, kernel: Kernel, config: Config) -> Tensor:
        assert kernel.emulate
        ctx.save_for_backward(x, weight)
        ctx.config = config
        return _rounded(x, config) @ _rounded(weight, config)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        gradient = _rounded(gradient, ctx.config)
        of_x = gradient @ _rounded(weight, ctx.config).t()
        return of_x, _rounded(x, ctx.config).t() @ gradient, None, None


def _rounded(x: Tensor, config: Config) -> Tensor:
    return (x * config.rounding.value).round().to(config.dtype) / config.rounding.value


class Whole(nn.Linear):
    """A layer of that product, with objects of its own."""

    def __init__(self) -> None:
        super().__init__(4, 4, bias=False)
        self.kernel, self.config = Kernel(), Config()

    def forward(self, x: Tensor) -> Tensor:
        product: Tensor = Product.apply(x, self.weight.t(), self.kernel, self.config)  # type: ignore[no-untyped-call]
        return x + product


def of_products() -> Net:
    """Whose layers are four of these."""
    net = Net(Net.chain)
    net.layers = nn.ModuleList(Whole() for _ in range(4))
    return net
