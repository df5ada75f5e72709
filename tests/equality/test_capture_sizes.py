"""Sizes that change from call to call: one program for all of them, and the plain model's bits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacompile import schedules
from tests import inside
from tests.equality import nets
from tests.equality.nets import Applies, assert_alike, in_a_row, train, trained, with_adamw
from tests.zoo import twins

VOCABULARY = 50
WIDTH = 16
HEADS = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        heads = self.qkv(x).view(rows, length, 3, HEADS, width // HEADS)
        q, k, v = heads.transpose(1, 3).unbind(2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(rows, length, width))
        return x + F.dropout(self.down(F.gelu(self.up(x))), 0.1, self.training)


class Model(nn.Module):
    def __init__(self, blocks: int = 1) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(256, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor, temperature: float = 1.0, step: int = 0) -> tuple[Tensor, Tensor]:
        h = self.embed(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            h = block(h)
        logits = self.head(h) * temperature + step
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten()), logits


def evaluated(model: Any, x: Tensor) -> Any:
    return model.eval()(x)


def tokens(rows: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rows + length)
    return torch.randint(VOCABULARY, (rows, length), generator=generator)


class Loop:
    """A training loop of a model and its twin, compared after each step."""

    def __init__(self, model: nn.Module | None = None, **options: Any) -> None:
        torch.manual_seed(0)
        self.models = _, self.model = twins(Model() if model is None else model, **options)
        self.pairs = with_adamw(self.models)

    def step(self, *args: Any) -> None:
        train(self.pairs, lambda model, _: model(*args)[0], [0])

    @property
    def made(self) -> tuple[int, int, set[int]]:
        """How many graphs and programs, and the ids of the code that was traced."""
        codes = [s.traced.code for schedule in schedules(self.model) for s in schedule.stages]
        graphs, programs = inside.graphs(self.model), inside.programs(self.model)
        return len(graphs), len(programs), set(map(id, codes))

    @property
    def planned(self) -> list[int | float] | None:
        symbols = schedules(self.model)[-1].symbols
        return None if symbols is None else list(symbols.planned.values())


def test_any_number_of_lengths_takes_two_captures() -> None:
    """Memory is planned for the largest call, untraced; another number of rows: one more."""
    loop = Loop(Model(2))
    made = []
    for length, planned in {8: None, 12: [12], 9: [12], 100: [128], 130: [192], 3: [192]}.items():
        loop.step(tokens(2, length))
        assert loop.planned == planned, length
        made.append(loop.made)
    assert made[-1] == made[1], "though memory was planned anew"
    assert made[1][:2] == (2, 2)
    assert "i64[2, 192]" in str(schedules(loop.model)[-1])
    for rows, length in ((3, 5), (5, 20), (7, 3), (9, 20)):
        loop.step(tokens(rows, length))
    assert loop.made[0] == 3 and prod(loop.planned or []) >= 9 * 20
    loop.step(tokens(1, 9))  # a size of its own


@pytest.mark.parametrize("activations", ["recompute", "offload"])
def test_a_backward_belongs_to_the_plan_of_its_forward(activations: str) -> None:
    """Gradients of several lengths are accumulated, in another order; one is planned for anew."""
    loop = Loop(activations=activations)

    def use(model: Any) -> Any:
        losses = [model(tokens(2, n))[0] / 4 for n in (8, 12, 90, 9)]
        for loss in losses[::-1]:
            loss.backward()
        return losses

    assert_alike(loop.models, use, times=2)
    loop.step(tokens(2, 30))
    assert loop.made[0] == 2


def test_what_builds_nothing() -> None:
    """A temperature and a counter that have changed; another length, marked, or in evaluation."""
    loop, x = Loop(), tokens(2, 8)
    for temperature, count in ((1.0, 0), (0.5, 1), (0.25, 2), (0.2, 3)):
        loop.step(x, temperature, count)
    before = loop.made
    for k in range(1, 4):
        loop.step(x, 0.1 * k, 3 + k)
    assert loop.made == before
    loop = Loop()
    for n in (8, 12, 9):
        x = tokens(2, n)
        torch._dynamo.mark_dynamic(x, 1)
        loop.step(x)
    assert loop.made[:2] == (1, 1)
    loop = Loop()
    with torch.no_grad():
        for n in (8, 12, 30, 5):
            assert_alike(loop.models, functools.partial(evaluated, x=tokens(3, n)))
    assert loop.made[1] == 2


def of_layer(layer: nn.Module, function: Callable[[Tensor], Any]) -> Any:
    """A layer, and a function of what it gives."""
    return Applies(lambda m, x: function(m.layer(x)), layer=layer)


def linear(function: Callable[[Tensor], Any]) -> Any:
    return of_layer(nn.Linear(WIDTH, WIDTH), function)


def decoded(m: Any, cache: Tensor) -> Tensor:  # (1, heads, n, width)
    """One token that attends to a cache, as in generation with a cache that grows."""
    x = torch.arange(float(WIDTH)).view(1, 1, WIDTH).sin()
    for layer in (m.first, m.last):
        q = layer(x).view(1, 1, HEADS, -1).transpose(1, 2)
        k = torch.cat([cache, q], dim=2)
        y = F.scaled_dot_product_attention(q, k, k)
        x = x + y.transpose(1, 2).reshape(1, 1, -1)
    return x.square().sum()


def shifted(m: Any, x: Tensor) -> Tensor:
    """What encoder-decoders do with labels: they write to whole rows but one column."""
    ids = (x.abs() * 100).long() % 16
    shifted = ids.new_zeros(ids.shape)
    shifted[:, 1:] = ids[:, :-1].clone()
    shifted[:, 0] = 2
    return m.embed(shifted).square().sum()


def numbered(m: Any, x: Tensor) -> tuple[Tensor, int, tuple[int, int]]:
    y = m.first(x)
    torch._dynamo.graph_break()
    return m.last(y)[: x.shape[0] // 2].sum(), x.shape[0] * 3, (x.shape[0], 7)


def unet(m: Any, x: Tensor) -> Tensor:
    """Down, and up again to the size that there was."""
    wide = m.first(x).relu()
    low = m.down(wide).tanh()
    scaled = F.interpolate(low, scale_factor=2)
    out: Tensor = m.last(torch.cat([wide, scaled], 1))
    return out.square().mean()


def summed(layer: nn.Module, *functions: Callable[[Tensor], Tensor]) -> Any:
    return of_layer(layer, lambda x: sum(f(x).square().mean() for f in functions))


def up(**named: object) -> Callable[[Tensor], Tensor]:
    return lambda x: F.interpolate(x, **named)  # type: ignore[arg-type]


def spaced(x: Tensor) -> Tensor:
    n = x.shape[-1]
    return x * torch.linspace(0.5, n - 0.5, n) + torch.linspace(-1, 1, steps=n, dtype=x.dtype)


def last(x: Tensor) -> Tensor:
    return F.interpolate(x.to(memory_format=torch.channels_last), scale_factor=2, mode="bilinear")


def pooled(x: Tensor) -> Tensor:
    """A norm whose backward gives other strides than its fake kernel says."""
    normed = F.layer_norm(x, (WIDTH,)).transpose(1, 2)
    return F.adaptive_avg_pool1d(normed, 1).square().sum()


Shapes = Sequence[tuple[int, ...]]
ROWS = [(n, WIDTH) for n in (4, 6, 20, 5, 30, 10, 11)]
MODELS: dict[str, tuple[Callable[[], nn.Module], Shapes, int]] = {  # and how many programs
    "a growing cache": (
        lambda: in_a_row(decoded, width=WIDTH),
        [(1, HEADS, n, 4) for n in (8, 9, 10, 11, 30)],
        2,
    ),
    "a condition": (lambda: linear(lambda x: (x * 2 if x.shape[0] > 10 else x).sum()), ROWS, 3),
    "strides of kernels": (lambda: linear(pooled), [(n, 6, WIDTH) for n in (3, 2, 4, 5)], 2),
    "a write": (
        lambda: Applies(shifted, embed=nn.Embedding(16, WIDTH)),
        [(2, 4), (3, 5), (3, 6), (2, 7), (4, 8)],
        2,
    ),
    "numbers": (lambda: in_a_row(numbered, width=WIDTH), ROWS[:4], 4),
    "down and up": (
        lambda: Applies(
            unet,
            first=nn.Conv2d(3, 4, 3, padding=1),
            down=nn.Conv2d(4, 4, 3, stride=2, padding=1),
            last=nn.Conv2d(8, 3, 3, padding=1),
        ),
        [(2, 3, *size) for size in ((8, 8), (12, 16), (20, 12), (10, 10))],
        2,
    ),
    "one dimension": (
        lambda: summed(
            nn.Conv1d(4, 4, 3, padding=1),
            up(scale_factor=2),
            up(scale_factor=1.5, mode="linear", align_corners=True),
            up(scale_factor=3, mode="nearest-exact"),
            lambda x: F.max_pool1d(x, 3, stride=2),
            nn.MaxPool1d(2, return_indices=False),
            spaced,
            F.hardshrink,
            F.softshrink,
        ),
        [(2, 4, n) for n in (8, 12, 17, 20)],
        3 if torch.__version__.startswith("2.11.") else 2,  # there Dynamo captures it once more
    ),
    "two dimensions": (
        lambda: summed(
            nn.Conv2d(4, 4, 3, padding=1),
            up(scale_factor=(0.3, 0.7)),  # no products of these are exact
            up(scale_factor=0.5, mode="area"),
            up(scale_factor=1.5, mode="bilinear", recompute_scale_factor=True),
            up(scale_factor=0.5, mode="bicubic", antialias=True),
            up(size=(5, 7), mode="bicubic"),
            last,
        ),
        [(2, 4, 8, 8), (2, 4, 12, 16), (2, 4, 17, 12), (2, 4, 24, 20)],
        2,
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_code_that_asks_for_sizes(name: str) -> None:
    make, shapes, programs = MODELS[name]
    torch.manual_seed(0)
    models = twins(make())
    for shape in shapes:
        x = torch.linspace(-1, 1, prod(shape)).sin().view(shape)
        assert_alike(models, trained(x), name=str(shape))
    assert len(inside.programs(models[1])) == programs


def test_captures_of_others_are_left_alone() -> None:
    """Ours replace torch's functions in calls of our models only."""
    twins(nn.Linear(WIDTH, WIDTH))[1](torch.ones(2, WIDTH))
    targets: list[str] = []

    def backend(module: Any, examples: Any) -> Any:
        targets.extend(str(node.target) for node in module.graph.nodes)
        return module

    def pooled(x: Tensor) -> Tensor:
        return spaced(F.max_pool1d(x, 2))

    compiled: Any = torch.compile(pooled, backend=backend, dynamic=True)
    compiled(torch.ones(2, 4, 8))
    assert any("linspace" in target for target in targets)
    assert not any("megacompile" in target or "indices" in target for target in targets)


def test_what_cannot_be_traced_with_symbols_is_traced_for_each_size() -> None:
    torch.manual_seed(0)
    models = twins(linear(lambda x: nets.asks_in_backward(x)))
    for rows in (4, 6, 5, 6):
        assert_alike(models, trained(torch.ones(rows, WIDTH)))
    assert len(inside.programs(models[1])) == 3


def one_of_the_heads(m: Any, x: Tensor, task: int) -> Tensor:
    """A head for each task; which one is a local across a graph break. One head is frozen."""
    weight = m.heads[task]
    torch._dynamo.graph_break()
    return (m.first(x).tanh() @ weight).square().mean()


def test_each_parameter_that_is_an_argument_is_itself() -> None:
    """A program is bound to its parameters, though their sizes are symbols to Dynamo."""
    heads = nn.ParameterList([torch.randn(WIDTH, size) for size in (2, 3, 2, 3)])
    heads[2].requires_grad_(False)
    models = twins(in_a_row(one_of_the_heads, count=1, width=WIDTH, heads=heads))
    for rows in (2, 3, 5):
        for task in range(4):
            x = torch.randn(rows, WIDTH)
            assert_alike(models, trained(x, task), name=f"{rows} {task}")


def unlike(m: Any, x: Tensor) -> list[Tensor]:
    """Equal operations of tensors whose metas are equal: a conjugate and not; a view made under
    `no_grad` of what requires grad, and of what does not."""
    first, second = torch.complex(x, x + 1), torch.complex(x + 2, x)
    first, same = first.conj().resolve_conj(), second.resolve_conj()
    h = m.layers[1](m.layers[0](x).tanh()).tanh()
    same.mul_(2)  # and so `second`, which another stage reads
    h = m.layers[3](m.layers[2](h).tanh() * second.real)
    with torch.no_grad():
        view = h.view(-1)
    return [h.sum() + (first * second).real.sum(), second, same, x.view(-1) * 2, view * 2]


def test_equal_operations_of_unlike_tensors_are_told_apart() -> None:
    def use(model: Any, x: Tensor) -> list[Any]:
        found = model(x)
        found[0].backward()
        return [*found, *(value.requires_grad for value in found)]

    layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
    models = twins(Applies(unlike, layers=layers))
    for rows in (3, 5, 7):
        assert_alike(models, functools.partial(use, x=torch.randn(rows, 4)))
