"""Models that one pass each is for, streamed next to plain: equal in every bit, call after call."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megacompile import schedules
from megacompile.errors import ModelError
from tests import capturing, zoo
from tests.equality.nets import Applies, in_a_row
from tests.zoo import WIDTH, Stack, assert_same, batch, equal, twins

pytestmark = pytest.mark.filterwarnings("ignore:megacompile. .* runs in eager mode")


def rows(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))


def annealed(*, inplace: bool = False) -> Any:
    """Rates of a function and of modules, as keywords and by position, and in place."""

    def forward(m: Any, x: Tensor, rate: float) -> Tensor:
        m.drop.p = rate
        x = m.drop(m.first(x))
        x = F.dropout(m.middle(x).tanh(), p=m.drop.p, training=m.training)
        x = F.dropout(m.last(x) * 2, m.drop.p, m.training, inplace)
        return x.square().mean()

    return in_a_row(forward, count=3, width=8, drop=nn.Dropout(0.1))


class Mix(nn.Module):
    """As the attention of an autoencoder: the stride of its batch of one is that of the sum's
    kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x.flatten(2).transpose(1, 2))
        return y.transpose(-1, -2).reshape(x.shape) + x


class Block(nn.Module):
    """The group norm goes by the strides that it gets, and the convolution by what that gives."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(4, 8), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(F.silu(self.norm(x)))
        return y + x


def pictures(m: Any, x: Tensor) -> Tensor:
    for layer in m.layers:
        x = layer(x)
    return x.square().sum()


# A layer whose weight acts on each row, by way of vmap.


class Mapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        mapped: Tensor = torch.vmap(lambda row, w: row * w.tanh() + 1, in_dims=(0, None))(
            x, self.weight
        )
        both: Tensor = torch.vmap(torch.vmap(torch.mul), in_dims=1, out_dims=1)(mapped, x)
        return self.linear(both + mapped)


def mapping(m: Any, x: Tensor) -> Tensor:
    """Some of its layers are under a checkpoint."""
    for i, layer in enumerate(m.layers):
        x = checkpoint(layer, x, use_reentrant=False) if i % 2 else layer(x)
    return x.square().sum()


@dataclass(frozen=True)
class Row:
    """A model, the calls that it is trained with, and its schedules and templates then."""

    model: Callable[[], nn.Module]
    calls: Callable[[], Iterable[tuple[Any, ...]]]
    schedules: int
    templates: int | None = None  # of the last schedule


RATES = [0.1, 0.11, 0.12, 0.0, 0.5, 1.0]
ROWS: dict[str, Row] = {
    "many dropout rates": Row(annealed, lambda: [(rows(6), p) for p in RATES], 2),
    "dropout in place": Row(
        lambda: annealed(inplace=True), lambda: [(rows(6), p) for p in (0.1, 0.2)], 2
    ),
    "strides": Row(
        lambda: Applies(pictures, layers=nn.ModuleList([Block(), Mix(), Block(), Block()])),
        lambda: [(rows(144).view(1, 8, 12, 12),)] * 2,
        1,
    ),
    "vmap": Row(
        lambda: Applies(mapping, layers=nn.ModuleList(Mapped() for _ in range(4))),
        lambda: [(rows(2),)] * 2,
        1,
        3,
    ),
    "layers of a function that is left whole": Row(
        capturing.Model, lambda: [(torch.linspace(-1, 1, 8).view(2, 4),)] * 2, 1, 3
    ),
}


def assert_call_same(plain: Any, streamed: Any, *args: Any, seed: int = 0) -> None:
    losses, drawn = [], []
    for each in (plain, streamed):
        torch.manual_seed(seed)
        losses.append(each(*args))
        if losses[-1].requires_grad:
            losses[-1].backward()
        drawn.append(torch.rand(1))  # the next number
    assert equal(*losses) and equal(*drawn)
    assert_same(plain, streamed)


@pytest.mark.parametrize("name", ROWS)
def test_streamed_is_plain(name: str) -> None:
    told = ROWS[name]
    torch.manual_seed(0)
    plain, streamed = twins(told.model(), progress=False)
    for seed, args in enumerate(told.calls()):
        assert_call_same(plain, streamed, *args, seed=seed)
    found = schedules(streamed)
    assert len(found) == told.schedules, "for all calls"
    assert told.templates in (None, len(found[-1].templates))
    plain.eval(), streamed.eval()
    with torch.no_grad():
        assert_call_same(plain, streamed, *next(iter(told.calls())))


def test_a_rate_that_is_none_is_refused_and_those_of_other_captures_are_left_alone() -> None:
    plain, model = twins(annealed(), progress=False)
    for each in (plain, model):
        for rate in (0.1, 0.2):
            each(rows(6), rate)
        for rate in (-0.1, 1.5):
            with pytest.raises(ValueError, match="dropout probability"):
                each(rows(6), rate)
    graphs: list[str] = []

    def backend(module: Any, examples: Any) -> Any:
        graphs.append(str(module.graph))
        return module

    compiled: Any = torch.compile(annealed(), backend=backend)
    for rate in (0.1, 0.2, 0.3):
        compiled(rows(6), rate)
    assert graphs and not any("megacompile" in graph for graph in graphs)


# Code that cannot be traced on zeros: what it computes from them is an index that there is not.


def _last(mask: Tensor) -> Tensor:
    return mask.sum(1) - 1


LOOK_UPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gather": lambda h, m: h.gather(1, _last(m)[:, None, None].expand(-1, 1, 8)),
    "cross_entropy": lambda h, m: F.cross_entropy(h[:, 0], _last(m)),
    "divided": lambda h, m: h * (7 // m.sum(1))[:, None, None],
    "inverse": lambda h, m: torch.linalg.inv(
        h.transpose(1, 2) @ h + torch.diag_embed(h[:, 0] ** 2)
    ),
}


@pytest.mark.filterwarnings("ignore:megacompile. Applies is not scheduled.*side effects")
def test_code_that_raises_on_zeros() -> None:
    for name, code in LOOK_UPS.items():

        def forward(m: Any, x: Tensor, mask: Tensor, code: Any = code) -> Tensor:
            return code(m.last(torch.tanh(m.first(x))), mask).square().sum()

        plain, streamed = twins(in_a_row(forward, width=8))
        for seed in range(2):
            mask = torch.randint(2, (3, 5), generator=torch.Generator().manual_seed(seed))
            mask[:, 0] = 1
            assert_call_same(plain, streamed, rows(15, seed).view(3, 5, 8), mask)
        if name == "gather":
            with pytest.raises(RuntimeError, match="index -1"):
                streamed(rows(15).view(3, 5, 8), torch.zeros(3, 5, dtype=torch.int64))


# `module.to(...)` and the like within a forward: parameters are converted as plain ones are.


class Router(nn.Module):
    """Converts a layer in its forward, as the router of Switch Transformers does."""

    def __init__(self, convert: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.layer: nn.Module = nn.Linear(WIDTH, WIDTH)
        self.layer.register_buffer("scale", torch.ones(()))
        self.convert = convert

    def forward(self, x: Tensor) -> Tensor:
        self.layer = self.convert(self.layer)
        return self.layer(x) * self.layer.get_buffer("scale")


class EagerConversion(Router):
    """Only the conversion is not captured."""

    def __init__(self, convert: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__(torch.compiler.disable(convert))


def routed(router: type[Router], convert: Callable[[nn.Module], nn.Module]) -> tuple[Any, Any]:
    torch.manual_seed(0)
    return twins(Stack(layers=2, block=lambda: router(convert)))


@pytest.mark.parametrize("router", [Router, EagerConversion])
def test_parameters_are_converted_as_plain_ones_are(router: type[Router]) -> None:
    """To what they are, also frozen ones; to another dtype is refused, changing nothing."""
    plain, streamed = routed(router, lambda layer: layer.to("cpu", torch.float32).float())
    params = list(streamed.parameters())
    for model in (plain, streamed):
        model.layers[1].requires_grad_(False)
    for _ in range(2):  # gradients add up
        zoo.assert_steps_same(plain, streamed, batch())
    for model in (plain, streamed):
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    zoo.assert_steps_same(plain, streamed, batch())
    assert all(a is b for a, b in zip(params, streamed.parameters(), strict=True))
    assert all(type(p) is nn.Parameter for p in copy.deepcopy(streamed).parameters())
    plain, streamed = routed(router, lambda layer: layer.double())
    with pytest.raises(ModelError, match="float64"):
        streamed(**batch())
    assert_same(plain, streamed)
