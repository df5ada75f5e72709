"""Modules that nobody listed: captured or not, they train as in the plain model, in every bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils._pytree import tree_leaves

from megacompile import compat
from tests import zoo
from tests.equality.nets import Applies, in_a_row
from tests.zoo import WIDTH, assert_same, equal, twins

Make = Callable[[], tuple[nn.Module, tuple[Any, ...]]]  # gives the inputs too
MODULES: dict[str, Make] = {}


def unusual(make: Make) -> Make:
    MODULES[make.__name__.removeprefix("_")] = make
    return make


def sequence(length: int = 5) -> Tensor:
    return torch.randn(2, length, WIDTH, generator=torch.Generator().manual_seed(7))


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


@unusual
def _running_state() -> tuple[nn.Module, tuple[Any, ...]]:
    def run(m: Any, x: Tensor) -> Tensor:
        y = m.layer(x)
        if m.training:
            m.count += 1
            m.mean.mul_(0.9).add_(y.detach().mean((0, 1)), alpha=0.1)
            m.last = y.detach()[0, 0]  # replaced, not changed
        out: Tensor = y - m.mean / m.count
        return out

    buffers = {"count": torch.zeros((), dtype=torch.long), "mean": torch.zeros(WIDTH)}
    return Applies(run, layer=linear(), **buffers, last=torch.zeros(WIDTH)), (sequence(),)


@unusual
def _odd_parameters() -> tuple[nn.Module, tuple[Any, ...]]:
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
    ), (sequence(),)


@unusual
def _no_tensor_inputs() -> tuple[nn.Module, tuple[Any, ...]]:
    return Applies(lambda m, n, k: m.layer(torch.ones(n, WIDTH)) * k, layer=linear()), (3, 2.5)


@unusual
def _returns_parameters() -> tuple[nn.Module, tuple[Any, ...]]:
    def run(m: Any, x: Tensor) -> Any:
        return m.layer(x), m.one, {"view": m.two.t(), "n": 3, "text": "text", "none": None}

    one, two = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(3, 2))
    return Applies(run, layer=linear(), one=one, two=two), (sequence(),)


@unusual
def _writes_through_views() -> tuple[nn.Module, tuple[Any, ...]]:
    @torch.no_grad()
    def write(m: Any) -> None:
        m.layer.bias[0] = 3
        m.layer.weight[1:3].mul_(2)
        m.layer.weight.view(-1)[3:7] = 0
        first, second = m.layer.weight.chunk(2)
        first.copy_(second)

    eager = torch._dynamo.disable(write)

    def run(m: Any, x: Tensor) -> Tensor:
        eager(m)
        out: Tensor = m.layer(x)
        return out

    return Applies(run, layer=linear()), (sequence(),)


@unusual
def _forces() -> tuple[nn.Module, tuple[Any, ...]]:
    """A gradient inside of the forward, also where the caller has it off."""

    def run(m: Any, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            (force,) = torch.autograd.grad(m.energy(x).square().sum(), x)
        out: Tensor = m.head(force)
        return out

    return Applies(run, energy=linear(), head=linear()), (sequence(),)


@unusual
def _transforms_of_functions() -> tuple[nn.Module, tuple[Any, ...]]:
    def run(m: Any, x: Tensor) -> Tensor:
        rows = torch.vmap(lambda row: m.first(row).tanh())(x)
        out: Tensor = m.second(rows) + torch.func.grad(lambda r: m.first(r).square().sum())(x)
        return out

    return Applies(run, first=linear(), second=linear()), (sequence(),)


def total(output: Any) -> Tensor:
    """A scalar of everything in an output that requires grad."""
    found = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
    return torch.stack([(t.abs() * (k + 1)).mean() for k, t in enumerate(found)]).sum()


@pytest.mark.filterwarnings("ignore:megacompile")  # some are not captured, and say so
@pytest.mark.parametrize("name", MODULES)
def test_unusual_modules(name: str) -> None:
    # 2.11's Dynamo writes add_(..., alpha=) as a product and a sum
    rounds = torch.__version__ < "2.12" and name == "running_state"
    torch.manual_seed(0)
    model, inputs = MODULES[name]()
    plain, streamed = twins(model)
    for each in (plain, streamed):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.05)
        for seed in range(2):
            torch.manual_seed(seed)
            total(each(*inputs)).backward()
            optimizer.step()
            torch.manual_seed(seed)
            total(each(*inputs)).backward()
    if rounds:
        zoo.assert_close(plain, streamed)
        return
    assert_same(plain, streamed)
    assert all(type(p) is nn.Parameter for p in streamed.parameters())
    with torch.no_grad():
        found = [tree_leaves(each.eval()(*inputs)) for each in (plain, streamed)]
    for mine, theirs in zip(*found, strict=True):
        assert equal(mine, theirs) if isinstance(mine, Tensor) else mine == theirs
    assert_same(plain, streamed)


# --- recurrent layers, whatever Dynamo is told of them

LAYERS: dict[str, Callable[[], nn.RNNBase]] = {
    "LSTM": lambda: nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.2, batch_first=True),
    "RNN": lambda: nn.RNN(WIDTH, WIDTH, bias=False, batch_first=True),
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
    before = compat.dynamo_options()
    compat.set_dynamo_options({"allow_rnn": True})
    try:
        plain, streamed = twins(in_a_row(between, width=WIDTH, layer=LAYERS[name]()))
        x = torch.randn(2, 5, WIDTH)
        for lengths in (None, torch.tensor([5, 3]), torch.tensor([2, 4])):
            losses = []
            for model in (plain, streamed):
                torch.manual_seed(0)
                losses.append(model(x, lengths))
                losses[-1].backward()
                torch.optim.SGD(model.parameters(), lr=0.1).step()
            assert equal(*(loss.detach() for loss in losses))
            assert_same(plain, streamed)
        plain.eval(), streamed.eval()
        with torch.no_grad():
            assert equal(plain(x), streamed(x))
            assert equal(streamed.layer(x)[0], plain.layer(x)[0])
        assert [*map(id, streamed.layer.all_weights[0])] == [
            *map(id, [*streamed.layer.parameters()][: len(streamed.layer.all_weights[0])])
        ]
    finally:
        compat.set_dynamo_options(before)
