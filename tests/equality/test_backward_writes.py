"""What a backward changes in place is changed: by hooks, and by `autograd.Function`s."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from megacompile import megacompile
from tests.equality.nets import assert_alike

WIDTH = 4


class Layer(nn.Module):
    """(rows, WIDTH) -> (rows, WIDTH); the subclasses' backwards write."""

    amax: Tensor
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("amax", torch.zeros(()))
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.linear(x) * (1 + self.amax)
        if hidden.requires_grad:
            hidden.register_hook(self.hook)
        return hidden.tanh()

    def hook(self, grad: Tensor) -> Tensor | None:
        raise NotImplementedError


class ReadsBack(Layer):
    """Its gradients depend on what the backward before has left."""

    def hook(self, grad: Tensor) -> Tensor:
        scaled = grad / (1 + self.amax + self.seen.max())
        self.seen.copy_(self.seen.roll(1))
        self.seen[0].copy_(grad.abs().amax())
        self.amax.copy_(self.seen.max())
        return scaled


class Fills(Layer):
    """What it writes depends on nothing: it is written in the backward all the same."""

    def hook(self, grad: Tensor) -> None:
        self.amax.fill_(0.5)


class Both(Layer):
    """Forward and backward change one buffer."""

    def forward(self, x: Tensor) -> Tensor:
        self.amax.add_(1)
        return super().forward(x) * (self.amax + 0.5)

    def hook(self, grad: Tensor) -> Tensor:
        self.amax.mul_(0.5)
        return grad * self.amax


class PartOfABuffer(Layer):
    """Through a view that the forward has made."""

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.linear(x) * (1 + self.seen.sum())
        first = self.seen[0]

        def hook(grad: Tensor) -> Tensor:
            first.copy_(grad.abs().amax())
            return grad / (1 + self.seen.sum())

        hidden.register_hook(hook)
        return hidden.tanh()


class Attribute(Layer):
    """Notes in a tensor that is no buffer, which a function has closed over."""

    def __init__(self) -> None:
        super().__init__()
        kept = torch.zeros(())
        self.kept: Callable[[], Tensor] = lambda: kept

    def hook(self, grad: Tensor) -> None:
        self.kept().copy_(grad.abs().amax())


class FunctionLayer(Layer):
    def forward(self, x: Tensor) -> Tensor:
        kind: Any = Changes
        y: Tensor = kind.apply(self.linear(x).tanh(), self.amax, self.seen)
        return y * (1 + self.amax)


class Changes(torch.autograd.Function):
    """Keeps tensors, one by itself and one saved, and changes both."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, amax: Tensor, seen: Tensor) -> Tensor:
        ctx.amax = amax
        ctx.save_for_backward(seen)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (seen,) = ctx.saved_tensors
        seen[0].add_(1)
        ctx.amax.copy_(grad.abs().amax() * seen.sum())
        return grad * 2 / seen.sum(), None, None


@torch.library.custom_op("megacompile_tests::note", mutates_args={"amax"})
def note(grad: Tensor, amax: Tensor) -> Tensor:
    amax.copy_(grad.abs().amax())
    return grad * 2


@note.register_fake
def _(grad: Tensor, amax: Tensor) -> Tensor:
    return torch.empty_like(grad)


class Operator(Layer):
    def hook(self, grad: Tensor) -> Tensor:
        return note(grad, self.amax)


LAYERS = [*(ReadsBack, Fills, Both, PartOfABuffer), *(Attribute, FunctionLayer, Operator)]


class Reads(Layer):
    def hook(self, grad: Tensor) -> Tensor:
        return grad * (2 + self.amax)


class Net(nn.Module):
    """Layers of these kinds."""

    def __init__(self, *kinds: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind() for kind in kinds)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().sum()


def inputs(seed: int, rows: int = 3) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))


def pair(make: Callable[[], nn.Module], **options: Any) -> tuple[Any, Any]:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(make())
    return models[0], megacompile(models[1], lowering="eager", progress=False, **options)


def steps(model: Any, *, micro: int = 1) -> list[Tensor]:
    optimizer = AdamW(model.parameters(), lr=1e-2)
    seen = []
    for step in range(3):
        for k in range(micro):
            loss = model(inputs(step + 10 * k))
            loss.backward()
            seen.append(loss.detach())
        seen += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    kept = [module.kept().clone() for module in model.modules() if isinstance(module, Attribute)]
    return seen + kept


@pytest.mark.parametrize("layer", LAYERS)
def test_a_backward_that_writes_runs_in_eager_mode(layer: type[Layer]) -> None:
    with pytest.warns(UserWarning, match="eager mode"):
        assert_alike(pair(lambda: Net(layer, layer)), lambda model: steps(model, micro=2))


class ChangesWhatALayerGave(Net):
    """A hook of the last layer changes what the first one gave."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        given = x.detach() * 1
        x = self.layers[2](self.layers[1](x))

        def hook(grad: Tensor) -> Tensor:
            given.mul_(2)
            return grad * given

        x.register_hook(hook)
        return x.square().sum()


def test_what_another_layer_gave() -> None:
    def use(model: Any) -> None:
        model(inputs(0)).backward()

    with pytest.warns(UserWarning, match="eager mode"):
        assert_alike(pair(lambda: ChangesWhatALayerGave(Reads, Reads, Reads)), use)
