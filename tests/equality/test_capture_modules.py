"""Modules that nobody listed: captured or not, they train as in the plain model, in every bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from megacompile import compat
from tests import zoo
from tests.zoo import WIDTH, assert_same, equal, twins

Make = Callable[[], tuple[nn.Module, tuple[Any, ...]]]  # gives the inputs too
MODULES: dict[str, Make] = {}


def unusual(make: Make) -> Make:
    MODULES[make.__name__.removeprefix("_")] = make
    return make


def sequence(length: int = 5) -> Tensor:
    return torch.randn(2, length, WIDTH, generator=torch.Generator().manual_seed(7))


class Wrapped(nn.Module):
    """Modules by name, and a function of the inputs that uses them."""

    def __init__(self, function: Callable[..., Any], **modules: Any) -> None:
        super().__init__()
        self.function = function
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


@unusual
def _gru_cell() -> tuple[nn.Module, tuple[Any, ...]]:
    def steps(m: Any, x: Tensor) -> Tensor:
        h = torch.zeros(x.shape[0], WIDTH)
        for t in range(x.shape[1]):
            h = m.cell(x[:, t], h)
        return h

    return Wrapped(steps, cell=nn.GRUCell(WIDTH, WIDTH)), (sequence(),)


@unusual
def _transformer_encoder() -> tuple[nn.Module, tuple[Any, ...]]:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.2, batch_first=True)
    return nn.TransformerEncoder(layer, 2), (sequence(),)


@unusual
def _attention_weights() -> tuple[nn.Module, tuple[Any, ...]]:
    attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.1, batch_first=True)
    return Wrapped(lambda m, x: m.a(x, x, x), a=attention), (sequence(),)


@unusual
def _residual_conv_net() -> tuple[nn.Module, tuple[Any, ...]]:
    def block(m: Any, x: Tensor) -> Tensor:
        y: Tensor = m.norm(m.conv(x))
        y += x  # in place on a saved tensor
        out: Tensor = m.relu(y)
        return out

    blocks = [
        Wrapped(
            block,
            conv=nn.Conv2d(4, 4, 3, padding=1),
            norm=nn.BatchNorm2d(4),
            relu=nn.ReLU(inplace=True),
        )
        for _ in range(2)
    ]
    tail = [nn.ConvTranspose2d(4, 2, 3, stride=2), nn.AdaptiveAvgPool2d(2), nn.Flatten()]
    return nn.Sequential(*blocks, *tail), (torch.randn(2, 4, 6, 6),)


@unusual
def _skips_across_layers() -> tuple[nn.Module, tuple[Any, ...]]:
    def unet(m: Any, x: Tensor) -> Tensor:
        kept = []
        for layer in m.down:
            x = torch.relu(layer(x))
            kept.append(x)
        for layer in m.up:
            x = torch.tanh(layer(torch.cat([x, kept.pop()], -1)))
        return x

    down = nn.ModuleList(linear() for _ in range(3))
    up = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(3))
    return Wrapped(unet, down=down, up=up), (sequence(),)


@unusual
def _parametrized() -> tuple[nn.Module, tuple[Any, ...]]:
    wrap = torch.nn.utils.parametrizations
    layers = [wrap.weight_norm(linear()), nn.Tanh(), wrap.spectral_norm(linear())]
    return nn.Sequential(*layers), (sequence(),)


@unusual
def _experts_by_data() -> tuple[nn.Module, tuple[Any, ...]]:
    def route(m: Any, x: Tensor) -> Tensor:
        weights, chosen = m.gate(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for i, expert in enumerate(m.experts):
            rows, places = torch.where(chosen == i)
            if rows.numel():
                out.index_add_(0, rows, expert(x[rows]) * weights[rows, places, None])
        return out

    experts = nn.ModuleList(linear() for _ in range(3))
    return Wrapped(route, gate=nn.Linear(WIDTH, 3), experts=experts), (sequence()[0],)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return (x @ w).square()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors
        y = 2 * (x @ w) * g
        return y @ w.t(), x.flatten(0, -2).t() @ y.flatten(0, -2)


@unusual
def _custom_function() -> tuple[nn.Module, tuple[Any, ...]]:
    square: Any = Square.apply
    return Wrapped(lambda m, x: square(x, m.layer.weight), layer=linear()), (sequence(),)


@unusual
def _checkpointed() -> tuple[nn.Module, tuple[Any, ...]]:
    def run(m: Any, x: Tensor) -> Tensor:
        for layer in m.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x

    layers = nn.ModuleList(zoo.Block(dropout=0.2) for _ in range(3))
    return Wrapped(run, layers=layers), (sequence(),)


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

    model = Wrapped(run, layer=linear())
    model.register_buffer("count", torch.zeros((), dtype=torch.long))
    model.register_buffer("mean", torch.zeros(WIDTH))
    model.register_buffer("last", torch.zeros(WIDTH))
    return model, (sequence(),)


@unusual
def _odd_parameters() -> tuple[nn.Module, tuple[Any, ...]]:
    """Complex, integer, boolean, scalar and empty ones."""

    def run(m: Any, x: Tensor) -> Tensor:
        y = torch.cat([x[..., m.order], m.empty.expand(*x.shape[:2], 0)], -1)
        mixed = (y.to(torch.cfloat) @ m.complex).abs() * m.mask * m.scalar
        out: Tensor = m.layer(mixed)
        return out

    return Wrapped(
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
    return Wrapped(lambda m, n, k: m.layer(torch.ones(n, WIDTH)) * k, layer=linear()), (3, 2.5)


@unusual
def _returns_parameters() -> tuple[nn.Module, tuple[Any, ...]]:
    def run(m: Any, x: Tensor) -> Any:
        return m.layer(x), m.one, {"view": m.two.t(), "n": 3, "text": "text", "none": None}

    one, two = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(3, 2))
    return Wrapped(run, layer=linear(), one=one, two=two), (sequence(),)


@unusual
def _no_grad_inside() -> tuple[nn.Module, tuple[Any, ...]]:
    def run(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = m.first(x)
        out: Tensor = m.second(x)
        return out

    return Wrapped(run, first=linear(), second=linear()), (sequence(),)


@unusual
def _teacher_that_follows() -> tuple[nn.Module, tuple[Any, ...]]:
    """Parameters change in place in the forward."""

    def run(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = m.teacher(x)
            for mine, theirs in zip(m.teacher.parameters(), m.student.parameters(), strict=True):
                mine.mul_(0.9).add_(theirs, alpha=0.1)
        loss: Tensor = (m.student(x) - target).square()
        return loss

    return Wrapped(run, student=linear(), teacher=linear().requires_grad_(False)), (sequence(),)


@unusual
def _codebook_through_data() -> tuple[nn.Module, tuple[Any, ...]]:
    def run(m: Any, x: Tensor) -> Tensor:
        m.codes.weight.data.mul_(0.9).add_(m.layer.weight.data[:4], alpha=0.1)
        m.codes.weight.data = m.codes.weight.data * 2
        out: Tensor = m.layer(x) @ m.codes.weight.t()
        return out

    return Wrapped(run, layer=linear(), codes=nn.Embedding(4, WIDTH)), (sequence(),)


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

    return Wrapped(run, layer=linear()), (sequence(),)


@unusual
def _forces() -> tuple[nn.Module, tuple[Any, ...]]:
    """A gradient inside of the forward, also where the caller has it off."""

    def run(m: Any, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            (force,) = torch.autograd.grad(m.energy(x).square().sum(), x)
        out: Tensor = m.head(force)
        return out

    return Wrapped(run, energy=linear(), head=linear()), (sequence(),)


@unusual
def _transforms_of_functions() -> tuple[nn.Module, tuple[Any, ...]]:
    def run(m: Any, x: Tensor) -> Tensor:
        rows = torch.vmap(lambda row: m.first(row).tanh())(x)
        out: Tensor = m.second(rows) + torch.func.grad(lambda r: m.first(r).square().sum())(x)
        return out

    return Wrapped(run, first=linear(), second=linear()), (sequence(),)


def total(output: Any) -> Tensor:
    """A scalar of everything in an output that requires grad."""
    found = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
    return torch.stack([(t.abs() * (k + 1)).mean() for k, t in enumerate(found)]).sum()


# Bitwise equal on some processors and not on others, on which the last bit of gradients differs.
ROUNDS = {"gru_cell"}
if torch.__version__ < "2.12":  # its Dynamo writes add_(..., alpha=) as a product and a sum
    ROUNDS |= {"running_state", "teacher_that_follows", "codebook_through_data"}


def assert_close(plain: nn.Module, streamed: nn.Module) -> None:
    for mine, theirs in zip(streamed.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.detach(), theirs.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:megacompile")  # some are not captured, and say so
@pytest.mark.parametrize("name", MODULES)
def test_unusual_modules(name: str) -> None:
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
    if name in ROUNDS:
        assert_close(plain, streamed)
        return
    assert_same(plain, streamed)
    assert all(type(p) is nn.Parameter for p in streamed.parameters())
    if name != "transformer_encoder":  # plain, it takes a fused path without grad
        with torch.no_grad():
            found = [tree_leaves(each.eval()(*inputs)) for each in (plain, streamed)]
        for mine, theirs in zip(*found, strict=True):
            assert equal(mine, theirs) if isinstance(mine, Tensor) else mine == theirs
        assert_same(plain, streamed)


# --- recurrent layers, whatever Dynamo is told of them

LAYERS: dict[str, Callable[[], nn.RNNBase]] = {
    "LSTM": lambda: nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.2, batch_first=True),
    "GRU": lambda: nn.GRU(WIDTH, WIDTH, batch_first=True),
    "RNN": lambda: nn.RNN(WIDTH, WIDTH, bias=False, batch_first=True),
    "both ways": lambda: nn.LSTM(WIDTH, WIDTH // 2, bidirectional=True, batch_first=True),
    "projected": lambda: nn.LSTM(WIDTH, 2 * WIDTH, proj_size=WIDTH, batch_first=True),
}


class Recurrent(nn.Module):
    """A recurrent layer between two that are captured; packed where it gets lengths."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layer = layer
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        hidden = self.first(x)
        if lengths is None:
            hidden, _ = self.layer(hidden)
        else:
            packed = pack_padded_sequence(hidden, lengths, batch_first=True, enforce_sorted=False)
            hidden, _ = pad_packed_sequence(self.layer(packed)[0], batch_first=True)
        result: Tensor = self.last(hidden).square().mean()
        return result


@pytest.mark.filterwarnings("ignore:megacompile. .* runs in eager mode")
@pytest.mark.parametrize("name", LAYERS)
def test_recurrent_layers(name: str) -> None:
    """They are not captured, though the user has set Dynamo's own option for them; behind a call
    the layer is itself."""
    before = compat.dynamo_options()
    compat.set_dynamo_options({"allow_rnn": True})
    try:
        torch.manual_seed(0)
        plain, streamed = twins(Recurrent(LAYERS[name]()))
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
