"""Packed parameters that need no other package: one of each way that quantized weights come in.

`Int8` wraps its data and their scales, as torchao's tensors do. `Packed` is a parameter whose data
are packed, beside a state object with more tensors, as bitsandbytes' are.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.zoo import Language


class Int8(Tensor):
    """Rows of int8 with a float32 scale each. It notes its device, as NF4Tensor does."""

    data8: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, data8: Tensor, scale: Tensor, dtype: torch.dtype, device: Any) -> Int8:
        self = Tensor._make_wrapper_subclass(cls, data8.shape, dtype=dtype, device=device)
        self.data8, self.scale = data8, scale
        return self

    def __init__(self, *args: Any) -> None:
        del args

    @classmethod
    def of(cls, weight: Tensor) -> Int8:
        scale = weight.detach().float().abs().amax(1, keepdim=True) / 127
        data8 = (weight.detach() / scale).round().to(torch.int8)
        return cls(data8, scale, weight.dtype, weight.device)

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return f"Int8({tuple(self.shape)})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["data8", "scale"], {"dtype": self.dtype, "device": self.device}

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: Any, size: Any, stride: Any
    ) -> Int8:
        return Int8(inner["data8"], inner["scale"], context["dtype"], context["device"])

    def dense(self) -> Tensor:
        return (self.data8 * self.scale).to(self.dtype)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = func.__name__.partition(".")[0]
        if name in ("detach", "clone", "alias", "_to_copy"):
            given = {k: v for k, v in (kwargs or {}).items() if k == "device"}
            parts = [func(part, **given) for part in (args[0].data8, args[0].scale)]
            return cls(*parts, args[0].dtype, parts[0].device)
        if name == "copy_":
            args[0].data8.copy_(args[1].data8)
            args[0].scale.copy_(args[1].scale)
            return args[0]
        dense = torch.utils._pytree.tree_map_only(cls, cls.dense, (args, kwargs or {}))
        return func(*dense[0], **dense[1])


@dataclass(eq=False)
class State:
    """What `Packed` has beside its data."""

    scale: Tensor
    table: Tensor
    shape: tuple[int, ...]


TABLE = torch.linspace(-1, 1, 16)


class Packed(nn.Parameter):
    """Two 4-bit indices into a table in each byte; all share the table."""

    state: State

    def __new__(cls, data: Tensor, state: State) -> Packed:
        self: Packed = torch.Tensor._make_subclass(cls, data, False)
        self.state = state
        return self

    @classmethod
    def of(cls, weight: Tensor) -> Packed:
        scale = weight.detach().float().abs().amax()
        near = (weight.detach().float() / scale)[..., None].sub(TABLE).abs().argmin(-1).flatten()
        data = (near[::2] * 16 + near[1::2]).to(torch.uint8)[:, None]
        return cls(data, State(scale, TABLE, tuple(weight.shape)))

    def __deepcopy__(self, memo: dict[int, Any]) -> Packed:
        return Packed(self.data.clone(), copy.deepcopy(self.state, memo))

    @property
    def scale(self) -> Tensor:
        return self.state.scale


class PackedProduct(torch.autograd.Function):
    """`x @ weight.T`, with the weight in full for no longer than it takes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, data: Tensor, state: State) -> Tensor:
        ctx.data, ctx.state = data, state
        return functional.linear(x, _dense(data, state).to(x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient @ _dense(ctx.data, ctx.state).to(gradient.dtype), None, None


def _dense(data: Tensor, state: State) -> Tensor:
    indices = torch.cat([data >> 4, data & 15], dim=1).flatten().long()
    return (state.table[indices] * state.scale).view(state.shape)


class PackedLinear(nn.Linear):
    """A linear layer over `Packed`."""

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.weight, Packed)
        assert self.weight.scale is self.weight.state.scale
        state = self.weight.state
        return PackedProduct.apply(x, self.weight, state)  # type: ignore[no-untyped-call]


class Adapted(nn.Module):
    """A frozen layer with a trained adapter beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 4, bias=False)
        self.up = nn.Linear(4, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Block(nn.Module):
    def __init__(self, width: int, breaks: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.first = Adapted(nn.Linear(width, 2 * width, bias=False))
        self.second = Adapted(nn.Linear(2 * width, width, bias=False))
        self.breaks = breaks

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        if self.breaks:
            torch._dynamo.graph_break()
        return x + self.second(functional.relu(self.first(y)))


class Model(Language):
    def __init__(self, width: int = 128, breaks: bool = False) -> None:
        super().__init__(50, width, (Block(width, breaks) for _ in range(3)))


Quantize = Callable[[nn.Linear], nn.Linear]


def wrapped(layer: nn.Linear) -> nn.Linear:
    layer.weight = nn.Parameter(Int8.of(layer.weight), requires_grad=False)
    return layer


def stateful(layer: nn.Linear) -> nn.Linear:
    made = PackedLinear(layer.in_features, layer.out_features, bias=False)
    made.weight = Packed.of(layer.weight)
    return made


OWN: dict[str, Quantize] = {"wrapper": wrapped, "state": stateful}


def model(quantize: Quantize, *, breaks: bool = False, dtype: torch.dtype = torch.float32) -> Model:
    """The model with quantized base layers; its adapters alone are trained."""
    torch.manual_seed(0)
    made = Model(breaks=breaks).to(dtype)
    for name, param in made.named_parameters():
        param.requires_grad_(".up." in name or ".down." in name)
    for layer in made.layers:
        for part in ("first", "second"):
            adapted = getattr(layer, part)
            adapted.base = quantize(adapted.base)
            adapted.base.weight.requires_grad_(False)
    return made


def trained(made: nn.Module, *, steps: int = 3) -> list[Tensor]:
    """Losses and adapters' gradients of some steps with AdamW, and the adapters behind them."""
    adapters = [p for p in made.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    found: list[Tensor] = []
    for _ in range(steps):
        loss = made(torch.randint(0, 50, (2, 8), generator=generator))
        loss.backward()
        found += [loss.detach().clone(), *(p.grad.clone() for p in adapters if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *(p.detach().clone() for p in adapters)]
