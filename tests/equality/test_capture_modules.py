"""Modules that nobody listed: captured or not, they train as in the plain model, in every bit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.equality.calls import assert_alike, total, trained
from tests.equality.nets import Applies, in_a_row
from tests.zoo import WIDTH, equal, twins

MODULES: dict[str, Callable[[], nn.Module]] = {}


def unusual(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    MODULES[make.__name__.removeprefix("_")] = make
    return make


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


@unusual
def _odd_parameters() -> nn.Module:
    """Complex, integer, boolean, scalar and empty ones."""

    def run(m: Any, x: Tensor) -> Tensor:
        y = torch.cat([x[..., m.order], m.empty.expand(*x.shape[:2], 0)], -1)
        mixed = (y.to(torch.cfloat) @ m.complex).abs() * m.mask * m.scalar
        out: Tensor = m.layer(mixed)
        return out

    return Applies(
        run,
        layer=linear(),
        complex=nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.cfloat)),
        order=nn.Parameter(torch.arange(WIDTH).flip(0), requires_grad=False),
        mask=nn.Parameter(torch.ones(WIDTH, dtype=torch.bool), requires_grad=False),
        scalar=nn.Parameter(torch.tensor(1.5)),
        empty=nn.Parameter(torch.empty(0)),
    )


@unusual
def _writes_through_views() -> nn.Module:
    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def write(m: Any) -> None:
        m.layer.bias[0] = 3
        m.layer.weight[1:3].mul_(2)
        m.layer.weight.view(-1)[3:7] = 0
        first, second = m.layer.weight.chunk(2)
        first.copy_(second)
        m.last = m.layer.weight.detach()[0] * 1  # a buffer that is replaced, not changed

    def run(m: Any, x: Tensor) -> Tensor:
        write(m)
        out: Tensor = m.layer(x)
        return out

    return Applies(run, layer=linear(), last=torch.zeros(WIDTH))


@unusual
def _forces() -> nn.Module:
    """A gradient inside of the forward, also where the caller has it off."""

    def run(m: Any, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            (force,) = torch.autograd.grad(m.energy(x).square().sum(), x)
        out: Tensor = m.head(force)
        return out

    return Applies(run, energy=linear(), head=linear())


@pytest.mark.filterwarnings("ignore:megacompile")  # some are not captured, and say so
@pytest.mark.parametrize("name", MODULES)
def test_unusual_modules(name: str) -> None:
    torch.manual_seed(0)
    models = twins(MODULES[name]())
    x = torch.randn(2, 5, WIDTH)

    def steps(model: Any) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        seen = [trained(x)(model)]
        optimizer.step()
        return [*seen, trained(x)(model)]

    assert_alike(models, steps, times=2)
    assert all(type(p) is nn.Parameter for p in models[1].parameters())
    with torch.no_grad():
        assert_alike(models, lambda m: m.eval()(x))


# --- recurrent layers, whatever Dynamo is told of them

LAYERS: dict[str, Callable[[], nn.RNNBase]] = {
    "LSTM": lambda: nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.2, batch_first=True),
    "both ways": lambda: nn.LSTM(WIDTH, WIDTH // 2, bidirectional=True, batch_first=True),
}


def between(m: Any, x: Tensor, lengths: Tensor | None = None) -> Tensor:
    """A recurrent layer between two that are captured; packed where it gets lengths."""
    hidden = m.first(x)
    if lengths is None:
        hidden, _ = m.layer(hidden)
    else:
        packed = pack_padded_sequence(hidden, lengths, batch_first=True, enforce_sorted=False)
        hidden, _ = pad_packed_sequence(m.layer(packed)[0], batch_first=True)
    result: Tensor = m.last(hidden).square().mean()
    return result


@pytest.mark.filterwarnings("ignore:megacompile. .* runs in eager mode")
@pytest.mark.parametrize("name", LAYERS)
def test_recurrent_layers(name: str) -> None:
    """They are not captured, though the user has set Dynamo's own option for them; behind a call
    the layer is itself."""
    models = plain, streamed = twins(in_a_row(between, width=WIDTH, layer=LAYERS[name]()))
    x = torch.randn(2, 5, WIDTH)

    def use(model: Any, lengths: Any) -> Tensor:
        loss: Tensor = model(x, lengths)
        total(loss).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        return loss

    with torch._dynamo.config.patch(allow_rnn=True):
        for lengths in (None, torch.tensor([5, 3]), torch.tensor([2, 4])):
            assert_alike(models, functools.partial(use, lengths=lengths))
        with torch.no_grad():
            assert_alike(models, lambda m: m.eval()(x))
            assert equal(streamed.layer(x)[0], plain.layer(x)[0])
        weights = streamed.layer.all_weights[0]
        assert [*map(id, weights)] == [*map(id, [*streamed.layer.parameters()][: len(weights)])]
