"""Sizes that change from call to call: one program for all of them, and the plain model's bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacompile import schedules
from megacompile.errors import BackwardError
from tests import inside
from tests.equality.nets import Applies, in_a_row
from tests.zoo import assert_same, differences, equal, twins

VOCABULARY = 50
WIDTH = 16
HEADS = 4


class Block(nn.Module):
    """Attention and an MLP, with a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        heads = self.qkv(self.norm(x)).view(rows, length, 3, HEADS, width // HEADS)
        q, k, v = heads.transpose(1, 3).unbind(2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(rows, length, width))
        return x + F.dropout(self.down(F.gelu(self.up(x))), 0.1, self.training)


class Model(nn.Module):
    """A language model: (loss, logits)."""

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


def tokens(rows: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rows + length)
    return torch.randint(VOCABULARY, (rows, length), generator=generator)


class Loop:
    """A training loop of a model and its twin, compared after each step."""

    def __init__(self, model: nn.Module | None = None, **options: Any) -> None:
        torch.manual_seed(0)
        self.plain, self.model = twins(Model() if model is None else model, **options)
        self.optimizers = [
            torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (self.plain, self.model)
        ]

    def step(self, *args: Any) -> None:
        found = []
        for model, optimizer in zip((self.plain, self.model), self.optimizers, strict=True):
            optimizer.zero_grad()
            torch.manual_seed(0)
            loss, logits = model(*args)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            found.append((loss.detach(), logits.detach()))
        assert all(map(equal, *found))
        assert_same(self.plain, self.model)

    @property
    def graphs(self) -> int:
        return len(inside.streamed(self.model).graphs)

    @property
    def programs(self) -> int:
        return len(inside.programs(self.model))

    @property
    def traced(self) -> dict[int, Any]:
        """The code of what was traced, by its id."""
        made = schedules(self.model)
        codes = [stage.traced.code for schedule in made for stage in schedule.stages]
        return {id(code): code for code in codes}

    @property
    def planned(self) -> list[int | float] | None:
        """The sizes that memory is planned for."""
        symbols = schedules(self.model)[-1].symbols
        return None if symbols is None else list(symbols.planned.values())


def test_any_number_of_lengths_takes_two_captures() -> None:
    """Memory is planned for the largest call, and nothing is traced for that. Another number of
    rows is one capture more."""
    loop = Loop(Model(2))
    lengths = {8: None, 12: [12], 9: [12], 100: [128], 50: [128], 130: [192], 3: [192]}
    traced = []
    for length, planned in lengths.items():
        loop.step(tokens(2, length))
        assert loop.planned == planned, length
        traced.append(loop.traced)
    assert loop.graphs == loop.programs == 2
    assert traced[-1].keys() == traced[1].keys(), "though memory was planned anew"
    assert "i64[2, 192]" in str(schedules(loop.model)[-1])
    for rows, length in ((3, 5), (5, 20), (2, 8), (7, 3)):
        loop.step(tokens(rows, length))
    assert loop.graphs == 3
    loop.step(tokens(1, 9))  # a size of its own


def test_a_long_batch_of_few_rows_needs_no_more_than_a_short_one_of_many() -> None:
    loop = Loop()
    for size in ((2, 8), (3, 9), (16, 16), (4, 60)):
        loop.step(tokens(*size))
    assert loop.planned == [16, 16]


@pytest.mark.parametrize("activations", ["recompute", "offload"])
def test_a_backward_belongs_to_the_plan_of_its_forward(activations: str) -> None:
    """Gradients of several lengths are accumulated, in another order; one is planned for anew."""
    loop = Loop(activations=activations)
    for _ in range(2):
        found = []
        for model in (loop.plain, loop.model):
            torch.manual_seed(0)
            losses = [model(tokens(2, n))[0] / 4 for n in (8, 12, 90, 9)]
            for loss in losses[::-1]:
                loss.backward()
            found.append(torch.stack(losses).detach())
        assert equal(*found)
        assert_same(loop.plain, loop.model)
    loop.step(tokens(2, 30))
    assert loop.graphs == 2


def test_evaluation_has_one_program_for_all_lengths() -> None:
    loop = Loop()
    with torch.no_grad():
        for n in (8, 12, 9, 30, 5):
            found = [model.eval()(tokens(3, n)) for model in (loop.plain, loop.model)]
            assert all(map(equal, *found))
    assert loop.programs == 2


def test_a_temperature_and_a_counter_build_nothing() -> None:
    loop, x = Loop(), tokens(2, 8)
    for temperature, count in ((1.0, 0), (0.5, 1), (0.25, 2), (0.2, 3)):
        loop.step(x, temperature, count)
    before = loop.graphs, loop.programs, loop.traced
    for k in range(1, 5):
        loop.step(x, 0.1 * k, 3 + k)
    assert (loop.graphs, loop.programs) == before[:2]
    assert loop.traced.keys() == before[2].keys()


def test_a_mark_is_heard() -> None:
    loop = Loop()
    for n in (8, 12, 9):
        x = tokens(2, n)
        torch._dynamo.mark_dynamic(x, 1)
        loop.step(x)
    assert loop.graphs == loop.programs == 1


# --- code that does something with sizes


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
    found: Tensor = m.embed(shifted).square().sum()
    return found


def numbered(m: Any, x: Tensor) -> tuple[Tensor, int, tuple[int, int]]:
    """Gives numbers, too."""
    y = m.first(x)
    torch._dynamo.graph_break()
    return m.last(y)[: x.shape[0] // 2].sum(), x.shape[0] * 3, (x.shape[0], 7)


def unet(up: Callable[[Tensor, Tensor], Tensor]) -> Any:
    """Down, and up again to the size that there was."""

    def forward(m: Any, x: Tensor) -> Tensor:
        wide = m.first(x).relu()
        low = m.down(wide).tanh()
        out: Tensor = m.last(torch.cat([wide, up(low, wide)], 1))
        return out.square().mean()

    first, last = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)
    return Applies(forward, first=first, down=nn.Conv2d(4, 4, 3, stride=2, padding=1), last=last)


def turned(low: Tensor, wide: Tensor) -> Tensor:
    theta = low.mean((2, 3))[:, :3, None].transpose(1, 2) * torch.ones(2, 1)
    grid = F.affine_grid(theta, list(wide.shape), align_corners=False)
    return F.grid_sample(low, grid, align_corners=False)


def by_scale(low: Tensor, wide: Tensor) -> Tensor:
    return F.interpolate(low, scale_factor=2)


def summed(layer: nn.Module, *functions: Callable[[Tensor], Tensor]) -> Any:
    """The means of what several functions make."""
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
IMAGES = [(2, 3, *size) for size in ((8, 8), (12, 16), (16, 20), (20, 12), (10, 10))]
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
    "by a scale": (lambda: unet(by_scale), IMAGES, 2),
    "an affine grid": (lambda: unet(turned), IMAGES, 2),
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
    plain, model = twins(make())
    for shape in shapes:
        x = torch.linspace(-1, 1, prod(shape)).sin().view(shape)
        found: list[list[Any]] = []
        for each in (plain, model):
            given = each(x)
            loss, *others = given if isinstance(given, tuple) else (given,)
            loss.backward()
            found.append([loss.detach(), *others])
        (mine, *numbers), (theirs, *given) = found
        assert equal(mine, theirs) and numbers == given, shape
    assert differences(plain, model) == []
    assert len(inside.programs(model)) == programs


# --- where sizes are no symbols


@torch.library.custom_op("megacompile_tests::sized_gradient", mutates_args=())
def sized_gradient(x: Tensor) -> Tensor:
    return x * 2


@sized_gradient.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty((int(x.shape[0]), *x.shape[1:]))  # it asks for the size


@torch.library.custom_op("megacompile_tests::asks_in_backward", mutates_args=())
def asks_in_backward(x: Tensor) -> Tensor:
    return x * 2


asks_in_backward.register_fake(torch.empty_like)
asks_in_backward.register_autograd(lambda _, gradient: sized_gradient(gradient))


def test_what_cannot_be_traced_with_symbols_is_traced_for_each_size() -> None:
    torch.manual_seed(0)
    plain, model = twins(linear(lambda x: asks_in_backward(x)))
    for rows in (4, 6, 5, 6):
        for each in (plain, model):
            each(torch.ones(rows, WIDTH)).square().sum().backward()
        assert_same(plain, model)
    assert len(inside.programs(model)) == 3


def two(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Two losses; the backward of the second asks whether it has more than 60 numbers."""
    y = m.first(x)
    return y.square().sum(), torch.var(y, correction=60)


@pytest.mark.filterwarnings("ignore:var..:UserWarning")
def test_a_backward_that_came_later_has_code_for_other_sizes() -> None:
    """It is built for what is planned; the next forward is one that its code is right for."""
    plain, streamed = twins(in_a_row(two, count=1))

    def second(model: nn.Module, rows: int) -> None:
        model.zero_grad()
        model(torch.arange(4.0 * rows).view(rows, 4).sin())[1].backward()

    for rows in (18, 20, 5):
        streamed(torch.ones(rows, 4))[0].backward()
    with pytest.raises(BackwardError, match="dynamic=False"):
        second(streamed, 5)
    second(streamed, 5)
    for rows in (20, 17, 30):
        for model in (plain, streamed):
            second(model, rows)
        assert_same(plain, streamed)
    _, fixed = twins(in_a_row(two, count=1), dynamic=False)
    for rows in (18, 20, 5):
        fixed(torch.ones(rows, 4))[0].backward()
        second(fixed, rows)
    assert {schedule.symbols for schedule in schedules(fixed)} == {None}


# --- parameters that are arguments


def one_of_the_heads(m: Any, x: Tensor, task: int) -> Tensor:
    """A head for each task; which one is a local across a graph break. One head is frozen."""
    weight = m.heads[task]
    torch._dynamo.graph_break()
    loss: Tensor = (m.first(x).tanh() @ weight).square().mean()
    return loss


def dense(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return F.linear(x, weight, bias).tanh()


def by_a_helper(m: Any, x: Tensor, task: int) -> Tensor:
    """Layers of several shapes, which a helper is given the parameters of."""
    for layer in m.layers:
        x = dense(x, layer.weight, layer.bias)
    return x.square().mean()


@pytest.mark.parametrize(("forward", "dynamic"), [(one_of_the_heads, None), (by_a_helper, True)])
def test_each_parameter_that_is_an_argument_is_itself(
    forward: Callable[..., Tensor], dynamic: bool | None
) -> None:
    """A program is bound to its parameters, though their sizes are symbols to Dynamo."""
    heads = nn.ParameterList([torch.randn(WIDTH, size) for size in (2, 3, 2, 3)])
    heads[2].requires_grad_(False)
    sizes = (WIDTH, 8, WIDTH, 8, WIDTH)
    layers = nn.ModuleList(map(nn.Linear, sizes[:-1], sizes[1:]))
    made = in_a_row(forward, count=1, width=WIDTH, heads=heads, layers=layers)
    plain, model = twins(made, dynamic=dynamic)
    for rows in (2, 3, 5):
        for task in (0, 1, 2, 3):
            x = torch.randn(rows, WIDTH)
            losses = [each(x, task) for each in (plain, model)]
            for loss in losses:
                loss.backward()
            assert equal(*(loss.detach() for loss in losses)), (rows, task)
    assert_same(plain, model)
