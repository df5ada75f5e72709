"""Calls that are not captured: in `megacompile.eager(model)`, and by themselves."""

from __future__ import annotations

import contextlib
import copy
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import megacompile
from megacompile.errors import ModelError
from megacompile.runtime.model.eager import EverNew
from tests.inside import streamed

WIDTH, WORDS, LAYERS, LENGTH = 8, 17, 3, 16


class Cache:
    """Keys of all tokens so far; how many there are only a tensor says."""

    def __init__(self) -> None:
        self.n = torch.zeros(1, dtype=torch.int64)
        self.keys, self.values = (
            [torch.zeros(1, 1, LENGTH, WIDTH) for _ in range(LAYERS)] for _ in range(2)
        )


class Layer(nn.Module):
    """Attention, with its own place in a cache."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        steps = x.shape[1]
        q, k, v = self.qkv(x).view(1, steps, 3, 1, WIDTH).permute(2, 0, 3, 1, 4)
        if cache is not None:
            pos = int(cache.n[0].item())
            keys, values = cache.keys[self.index], cache.values[self.index]
            keys[:, :, pos : pos + steps], values[:, :, pos : pos + steps] = k, v
            k, v = keys[:, :, : pos + steps], values[:, :, : pos + steps]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=steps > 1)
        y = F.dropout(y.transpose(1, 2).reshape(1, steps, WIDTH), 0.5, self.training)
        out: Tensor = self.out(y)
        return x + out


class Net(nn.Module):
    """A language model of a few layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer(i) for i in range(LAYERS))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        return self.score(self.encode(tokens, cache))

    def encode(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        x: Tensor = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, cache)
        if cache is not None:
            cache.n += tokens.shape[1]
        return x

    def score(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(x)
        return scores

    def sample(self, steps: int = LENGTH - 2) -> list[int]:
        """As `generate()`: a method that calls the model."""
        cache, tokens, drawn = Cache(), torch.tensor([[1, 2]]), []
        for _ in range(steps):
            tokens = self(tokens, cache=cache)[:, -1:].argmax(-1)
            drawn.append(int(tokens))
        return drawn


def nets() -> tuple[Net, Net]:
    """A plain model, and the same megacompiled."""
    torch.manual_seed(0)
    plain = Net().eval()
    model = copy.deepcopy(plain)
    return plain, megacompile.megacompile(model, device="cpu", lowering="eager", progress=False)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    """One step with dropout; its loss."""
    torch.manual_seed(1)
    model.train()
    loss: Tensor = model(torch.arange(6)[None]).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    model.eval()
    return loss.detach()


def equal(model: nn.Module, plain: nn.Module) -> bool:
    return all(map(torch.equal, model.parameters(), plain.parameters()))


def test_sampling_in_a_block_makes_no_schedule_and_leaves_training_as_it_is() -> None:
    plain, model = nets()
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, plain))
    for step in range(3):
        assert torch.equal(train(model, ours), train(plain, theirs)) and equal(model, plain)
        if not step:
            made = len(megacompile.schedules(model))
        with torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("error")
            with megacompile.eager(model):
                assert model.sample() == plain.sample()
        assert len(megacompile.schedules(model)) == made, "neither the block nor a step made more"


def test_a_model_that_was_never_called_is_sampled_from() -> None:
    plain, model = nets()
    with torch.no_grad(), megacompile.eager(model):
        assert model.sample() == plain.sample()
        assert torch.equal(model(torch.arange(4)[None]), plain(torch.arange(4)[None]))
    assert streamed(model).graphs == []


def test_gradients_in_a_block_are_those_of_the_plain_model() -> None:
    plain, model = nets()
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, plain))
    for block in (contextlib.nullcontext(), megacompile.eager(model), contextlib.nullcontext()):
        with block:
            loss = train(model, ours)
        assert torch.equal(loss, train(plain, theirs)) and equal(model, plain)
    for net in (model, plain):  # one loss of two calls, one of them in a block
        with megacompile.eager(model):
            first = net(torch.arange(4)[None])
        (first.sum() + net(torch.arange(5)[None]).square().sum()).backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None and torch.equal(p.grad, q.grad)


def test_modules_and_methods_in_a_block() -> None:
    plain, model = nets()
    tokens = torch.arange(4)[None]
    with torch.no_grad(), megacompile.eager(model.layers):  # a module stands for the model
        hidden = model.encode(tokens)
        assert torch.equal(hidden, plain.encode(tokens))
        assert torch.equal(model.score(hidden), plain.score(hidden))
        assert torch.equal(model.forward(tokens), plain(tokens))
        assert torch.equal(model.layers[2](hidden), plain.layers[2](hidden))
        twin = copy.deepcopy(model)
        assert torch.equal(twin(tokens), plain(tokens))
    assert streamed(model).graphs == []
    with pytest.raises(ModelError, match="Net"):
        megacompile.eager(twin).__enter__()


def test_blocks_are_nested_and_end_with_an_exception() -> None:
    _, model = nets()
    tokens = torch.arange(4)[None]
    graphs = streamed(model).graphs
    with torch.no_grad():
        with megacompile.eager(model):
            with megacompile.eager(model):
                model(tokens)
            with pytest.raises(IndexError):
                model(tokens + WORDS)
            with pytest.raises(ZeroDivisionError), megacompile.eager(model):
                raise ZeroDivisionError
            model(tokens)
            assert graphs == []
        model(tokens)
    assert graphs


def test_another_thread_is_captured_meanwhile() -> None:
    plain, model = nets()
    tokens = torch.arange(4)[None]
    outputs: list[Tensor] = []
    with torch.no_grad(), megacompile.eager(model):
        thread = threading.Thread(target=lambda: outputs.append(model(tokens).detach()))
        thread.start()
        thread.join()
        captured = len(streamed(model).graphs)
        assert captured
        assert torch.equal(model(tokens), plain(tokens))
    assert torch.equal(outputs[0], plain(tokens))
    assert len(streamed(model).graphs) == captured


def test_what_is_given_to_eager_is_checked() -> None:
    with pytest.raises(ModelError, match="Linear"):
        megacompile.eager(nn.Linear(2, 2)).__enter__()

    class Enters(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            with megacompile.eager(self):
                result: Tensor = self.linear(x)
            return result

    model = megacompile.megacompile(Enters(), device="cpu", lowering="eager", progress=False)
    with pytest.raises(ModelError, match="Enters"):
        model(torch.ones(1, 2))


@pytest.mark.thorough
def test_a_loop_that_keeps_making_schedules_goes_on_without() -> None:
    plain, model = nets()
    optimizer = torch.optim.AdamW(model.parameters())
    theirs = torch.optim.AdamW(plain.parameters())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = []
        for _ in range(2):
            with torch.inference_mode():
                assert model.sample() == plain.sample()
            made.append(len(megacompile.schedules(model)))
    said = [str(w.message) for w in caught if "megacompile.eager(model)" in str(w.message)]
    assert len(said) == 1
    assert made[-1] < 50, "a schedule for each layer and token would be more than 60"
    assert torch.equal(train(model, optimizer), train(plain, theirs)) and equal(model, plain)
    assert len(megacompile.schedules(model)) > made[-1], "calls with gradients are captured as ever"


def test_a_function_is_captured_again_when_its_calls_make_nothing_new() -> None:
    def function() -> None:
        """Stands for what is called."""

    calls = EverNew("Net")
    with pytest.warns(UserWarning, match="Net"):
        for _ in range(4):
            assert calls.is_due(function)
            calls.note(function, 6)

    def tried(made: int, calls_of_it: int) -> str:
        marks = []
        for _ in range(calls_of_it):
            due = calls.is_due(function)
            marks.append("x" if due else ".")
            if due:
                calls.note(function, made)
        return "".join(marks)

    assert tried(6, 13) == ".x..x....x..."
    assert tried(0, 20) == ".....x....x..x.xxxxx"
