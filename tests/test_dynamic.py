"""Sizes that change from call to call: one program for all of them, and the plain model's bits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from math import prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacompile import compat, schedules
from megacompile.errors import BackwardError
from megacompile.passes.stages import templates
from tests import inside
from tests.draws import drawn
from tests.zoo import differences, equal, twins

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

    def __init__(self, blocks: int = 2) -> None:
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


def made(**options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    return twins(Model(), **options)


def trained(model: nn.Module, calls: Iterable[tuple[Any, ...]]) -> list[Tensor]:
    """Losses and logits of a training loop; the last gradients stay."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(0)
    found = []
    for args in calls:
        optimizer.zero_grad()
        loss, logits = model(*args)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found += [loss.detach(), logits.detach()]
    return found


def assert_same(plain: nn.Module, streamed: nn.Module, calls: list[tuple[Any, ...]]) -> None:
    pairs = zip(trained(plain, calls), trained(streamed, calls), strict=True)
    assert [equal(mine, theirs) for mine, theirs in pairs] == [True] * 2 * len(calls)
    assert differences(plain, streamed) == []


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The stages that are traced, by name."""
    names: list[str] = []
    trace: Callable[..., Any] = templates._Tracer.template

    def noted(self: Any, index: int) -> Any:
        names.append(self.stage.name)
        return trace(self, index)

    monkeypatch.setattr(templates._Tracer, "template", noted)
    yield names


def captures(model: nn.Module) -> int:
    return len(inside.streamed(model).graphs)


def test_any_number_of_lengths_takes_two_captures(traced: list[str]) -> None:
    plain, streamed = made()
    assert_same(plain, streamed, [(tokens(2, n),) for n in (8, 12)])
    before = list(traced)
    plain.zero_grad()
    streamed.zero_grad()
    assert_same(plain, streamed, [(tokens(2, n),) for n in (9, 31, 7, 40, 64, 33, 3)])
    assert captures(streamed) == 2
    assert len(inside.programs(streamed)) == 2
    assert traced == before  # nothing was traced, though memory was planned anew


def test_lengths_and_batches_take_three_captures() -> None:
    plain, streamed = made()
    sizes = [(2, 8), (2, 12), (3, 5), (4, 9), (5, 20), (2, 8), (7, 3)]
    assert_same(plain, streamed, [(tokens(*size),) for size in sizes])
    assert captures(streamed) == 3


def test_one_row_and_one_token_are_sizes_of_their_own() -> None:
    plain, streamed = made()
    sizes = [(2, 8), (3, 12), (1, 9), (1, 10), (4, 2), (1, 8)]
    assert_same(plain, streamed, [(tokens(*size),) for size in sizes])


def test_sizes_of_another_model_of_the_class_do_not_count() -> None:
    models = []
    for rows, length in ((2, 8), (3, 12)):
        plain, streamed = made()
        assert_same(plain, streamed, [(tokens(rows, length),)])
        assert [schedule.symbols for schedule in schedules(streamed)] == [None]
        models.append(streamed)


def test_memory_is_planned_for_the_largest_call() -> None:
    _, streamed = made()
    lengths = []
    for n in (8, 12, 9, 100, 50, 101, 130):
        trained(streamed, [(tokens(2, n),)])
        symbols = schedules(streamed)[-1].symbols
        lengths.append(None if symbols is None else list(symbols.planned.values()))
    assert lengths == [None, [12], [12], [112], [112], [112], [160]]
    assert "i64[2, 160]" in str(schedules(streamed)[-1])


def test_a_long_batch_of_few_rows_needs_no_more_than_a_short_one_of_many() -> None:
    _, streamed = made()
    for size in ((2, 8), (3, 9), (16, 16), (4, 60)):
        trained(streamed, [(tokens(*size),)])
    symbols = schedules(streamed)[-1].symbols
    assert symbols is not None
    assert list(symbols.planned.values()) == [16, 16]


def test_a_backward_belongs_to_the_plan_of_its_forward() -> None:
    plain, streamed = made(activations="recompute")
    found = []
    for model in (plain, streamed):
        torch.manual_seed(0)
        losses = [model(tokens(2, n))[0] for n in (8, 12, 90, 9)]  # the third is planned for anew
        for loss in losses[::-1]:
            loss.backward()
        found.append(torch.stack(losses).detach())
    assert equal(*found)


def test_gradients_accumulate_over_lengths() -> None:
    plain, streamed = made()
    for model in (plain, streamed):
        torch.manual_seed(0)
        for n in (8, 12, 20, 9):
            (model(tokens(2, n))[0] / 4).backward()
    assert differences(plain, streamed) == []


@pytest.mark.parametrize("activations", drawn(["recompute", "offload"], ["keep", "selective"]))
def test_whatever_is_kept(activations: str) -> None:
    plain, streamed = made(activations=activations)
    assert_same(plain, streamed, [(tokens(2, n),) for n in (8, 12, 30, 5)])
    assert captures(streamed) == 2


def test_evaluation_has_one_program_for_all_lengths() -> None:
    plain, streamed = made()
    with torch.no_grad():
        for n in (8, 12, 9, 30, 5, 6, 7, 10, 11, 13, 14, 15, 16):
            pairs = zip(plain.eval()(tokens(3, n)), streamed.eval()(tokens(3, n)), strict=True)
            assert all(equal(mine, theirs) for mine, theirs in pairs)
    assert len(inside.programs(streamed)) == 2


def test_a_temperature_and_a_counter_build_nothing(traced: list[str]) -> None:
    plain, streamed = made()
    x = tokens(2, 8)
    calls = [(x, 1.0, 0), (x, 0.5, 1), (x, 0.25, 2), (x, 0.2, 3)]
    assert_same(plain, streamed, calls)
    before = list(traced), captures(streamed), len(inside.programs(streamed))
    plain.zero_grad()
    streamed.zero_grad()
    assert_same(plain, streamed, [(x, 0.1 * k, 3 + k) for k in range(1, 30)])
    assert (list(traced), captures(streamed), len(inside.programs(streamed))) == before


def test_a_mark_is_heard() -> None:
    _, streamed = made()
    for n in (8, 12, 9):
        x = tokens(2, n)
        torch._dynamo.mark_dynamic(x, 1)
        trained(streamed, [(x,)])
    assert captures(streamed) == 1
    assert len(inside.programs(streamed)) == 1


class Decoder(nn.Module):
    """One token that attends to a cache, as in generation with a cache that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, cache: Tensor) -> Tensor:  # (1, 1, width), (1, heads, n, width)
        for layer in self.layers:
            q = layer(x).view(1, 1, HEADS, -1).transpose(1, 2)
            k = torch.cat([cache, q], dim=2)
            y = F.scaled_dot_product_attention(q, k, k)
            x = x + y.transpose(1, 2).reshape(1, 1, -1)
        return x


def test_a_growing_cache_has_one_program() -> None:
    plain, streamed = twins(Decoder().eval())
    with torch.no_grad():
        for n in (8, 9, 10, 11, 30):
            x = torch.arange(WIDTH, dtype=torch.float32).view(1, 1, WIDTH).sin()
            cache = torch.arange(n * WIDTH, dtype=torch.float32).view(1, HEADS, n, -1).cos()
            assert equal(plain(x, cache), streamed(x, cache))
    assert len(inside.programs(streamed)) == 2


class Halves(nn.Module):
    """Code that asks for a size."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return (x * 2 if x.shape[0] > 10 else x).sum()


def test_code_that_asks_for_a_size() -> None:
    plain, streamed = twins(Halves())
    for rows in (4, 6, 20, 5, 30, 10, 11):
        x = torch.arange(rows * WIDTH, dtype=torch.float32).reshape(rows, WIDTH)
        assert equal(plain(x), streamed(x))


def assert_two_captures(model: nn.Module, inputs: Iterable[Tensor]) -> None:
    """Train a twin of the model on losses of these inputs, with the same bits."""
    plain, streamed = twins(model)
    for x in inputs:
        losses = [each(x) for each in (plain, streamed)]
        for loss in losses:
            loss.backward()
        assert equal(*losses)
    assert differences(plain, streamed) == []
    assert captures(streamed) == 2


class Pooled(nn.Module):
    """A norm whose backward gives other strides than its fake kernel says."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.pool = nn.AdaptiveAvgPool1d(1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.pool(self.norm(self.first(x)).transpose(1, 2)).square().sum()
        return found


def test_strides_are_those_of_kernels() -> None:
    sizes = [(rows, 6, WIDTH) for rows in (3, 2, 4, 5)]
    assert_two_captures(Pooled(), [torch.linspace(-1, 1, prod(n)).view(n) for n in sizes])


class Shifted(nn.Module):
    """What encoder-decoders do with labels: they write to whole rows but one column."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        shifted = ids.new_zeros(ids.shape)
        shifted[:, 1:] = ids[:, :-1].clone()
        shifted[:, 0] = 2
        found: Tensor = self.embed(shifted).square().sum()
        return found


def test_writes_to_a_whole_dimension() -> None:
    sizes = [(2, 4), (3, 5), (3, 6), (2, 7), (4, 8)]
    assert_two_captures(Shifted(), [torch.arange(prod(n)).view(n) % 16 for n in sizes])


def test_what_cannot_be_traced_with_symbols_is_traced_for_each_size(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise compat.UntraceableSymbols("a reason")

    monkeypatch.setattr(compat, "real_strides", refuse)
    plain, streamed = made()
    with caplog.at_level("INFO", "megacompile.capture"):
        assert_same(plain, streamed, [(tokens(2, n),) for n in (8, 12, 9)])
    assert "each set of sizes gets its own code: " in caplog.text
    assert "a reason" in caplog.text
    assert [schedule.symbols for schedule in schedules(streamed)] == [None] * 3


class Two(nn.Module):
    """Two losses; the backward of the second asks whether it has more than 60 numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(x)
        return y.square().sum(), torch.var(y, correction=60)


@pytest.mark.filterwarnings("ignore:var..:UserWarning")
def test_a_backward_that_came_later_has_code_for_other_sizes() -> None:
    """It is built for what is planned; the next forward is one that its code is right for."""
    plain, streamed = twins(Two())

    def second(model: nn.Module, rows: int) -> None:
        model.zero_grad()
        model(torch.arange(4.0 * rows).view(rows, 4).sin())[1].backward()

    for rows in (18, 20, 5):
        streamed(torch.ones(rows, 4))[0].backward()
    with pytest.raises(BackwardError, match="no code for sizes of 5 together; .* dynamic=False"):
        second(streamed, 5)
    second(streamed, 5)
    for rows in (20, 17, 30):
        for model in (plain, streamed):
            second(model, rows)
        assert differences(plain, streamed) == []
    _, fixed = twins(Two(), dynamic=False)
    for rows in (18, 20, 5):
        fixed(torch.ones(rows, 4))[0].backward()
        second(fixed, rows)


class Sized(nn.Module):
    """Gives numbers, too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, int, tuple[int, int]]:
        y = self.linear(x)
        torch._dynamo.graph_break()
        return self.linear(y)[: x.shape[0] // 2].sum(), x.shape[0] * 3, (x.shape[0], 7)


def test_numbers_are_given_back() -> None:
    plain, streamed = twins(Sized())
    for rows in (4, 6, 20, 5):
        x = torch.arange(rows * WIDTH, dtype=torch.float32).reshape(rows, WIDTH)
        (mine, *numbers), (theirs, *given) = plain(x), streamed(x)
        assert equal(mine, theirs)
        assert given == numbers


# --- parameters that are arguments


class Tasks(nn.Module):
    """A head for each task; which one is a local across a graph break."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        sizes = (2, 3, 2, 3)
        self.heads = nn.ParameterList([torch.randn(WIDTH, size) for size in sizes])

    def forward(self, x: Tensor, task: int) -> Tensor:
        weight = self.heads[task]
        torch._dynamo.graph_break()
        loss: Tensor = (self.first(x).tanh() @ weight).square().mean()
        return loss


def dense(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return F.linear(x, weight, bias).tanh()


class Helper(nn.Module):
    """Layers of several shapes, which a helper is given the parameters of."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (WIDTH, 8, WIDTH, 8, WIDTH)
        self.layers = nn.ModuleList(map(nn.Linear, sizes[:-1], sizes[1:]))

    def forward(self, x: Tensor, task: int) -> Tensor:
        for layer in self.layers:
            x = dense(x, layer.weight, layer.bias)  # type: ignore[arg-type]
        return x.square().mean()


@pytest.mark.parametrize("dynamic", [None, True, False])
@pytest.mark.parametrize("kind", [Tasks, Helper])
def test_each_parameter_that_is_an_argument_is_itself(
    kind: type[nn.Module], dynamic: bool | None
) -> None:
    """A program is bound to its parameters, though their sizes are symbols to Dynamo."""
    torch.manual_seed(0)
    plain, model = twins(kind(), dynamic=dynamic)
    for rows in (2, 3, 5):
        for task in (0, 1, 2, 3):
            x = torch.randn(rows, WIDTH)
            mine, theirs = plain(x, task), model(x, task)
            mine.backward()
            theirs.backward()
            assert equal(mine.detach(), theirs.detach()), (rows, task)
    assert differences(plain, model) == []
    assert all(param.grad is not None for param in model.parameters())


def test_a_frozen_parameter_that_is_an_argument_has_no_gradient() -> None:
    torch.manual_seed(0)
    plain, model = twins(Tasks())
    for each in (plain, model):
        each.heads[2].requires_grad_(False)
        for task in (0, 1, 2, 3, 2):
            each(torch.ones(2, WIDTH), task).backward()
    assert differences(plain, model) == []
    assert model.heads[2].grad is None
