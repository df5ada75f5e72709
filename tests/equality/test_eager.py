"""Calls that are not captured, in `megacompile.eager(model)`."""

from __future__ import annotations

import copy
import threading
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import megacompile
from megacompile.errors import ModelError
from tests.equality.nets import Applies
from tests.inside import programs, streamed
from tests.zoo import WIDTH as LAYER_WIDTH
from tests.zoo import Stack, assert_same, equal, twins

WIDTH, WORDS = 8, 17
TOKENS = torch.arange(4)[None]


class Net(nn.Module):
    """A language model of a few layers; what a layer adds depends on how many tokens there are."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.score(self.encode(tokens))

    def encode(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embed(tokens)
        for layer in self.layers:
            x = x + F.dropout(torch.tanh(layer(x.mean(1, keepdim=True))), 0.5, self.training)
        return x

    def score(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(x)
        return scores

    def sample(self) -> list[int]:
        """As `generate()`: a method that calls the model."""
        tokens = torch.tensor([[1, 2]])
        for _ in range(12):
            tokens = torch.cat([tokens, self(tokens)[:, -1:].argmax(-1)], 1)
        drawn: list[int] = tokens[0].tolist()
        return drawn


def nets() -> tuple[Net, Net]:
    """A plain model, and the same megacompiled."""
    torch.manual_seed(0)
    return twins(Net().eval(), progress=False)


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


def test_sampling_in_a_block_makes_no_schedule_and_leaves_training_as_it_is() -> None:
    """Also of a model that was never called. Gradients in a block are those of the plain model."""
    plain, model = nets()
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, plain))
    for step in range(3):
        with torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("error")
            with megacompile.eager(model):
                assert model.sample() == plain.sample()
        assert len(megacompile.schedules(model)) == min(step, 1)
        assert equal(train(model, ours), train(plain, theirs))
        assert_same(plain, model)
    with megacompile.eager(model):
        assert equal(train(model, ours), train(plain, theirs))
    for net in (model, plain):  # one loss of two calls, one of them in a block
        with megacompile.eager(model):
            first = net(TOKENS)
        (first.sum() + net(torch.arange(5)[None]).square().sum()).backward()
    assert_same(plain, model)


def test_modules_and_methods_in_a_block() -> None:
    plain, model = nets()
    with torch.no_grad(), megacompile.eager(model.layers):  # a module stands for the model
        hidden = model.encode(TOKENS)
        assert torch.equal(hidden, plain.encode(TOKENS))
        assert torch.equal(model.score(hidden), plain.score(hidden))
        assert torch.equal(model.forward(TOKENS), plain(TOKENS))
        assert torch.equal(model.layers[2](hidden), plain.layers[2](hidden))
        twin = copy.deepcopy(model)
        assert torch.equal(twin(TOKENS), plain(TOKENS))
    assert streamed(model).captures.graphs == []
    for other in (twin, nn.Linear(2, 2)):
        with pytest.raises(ModelError):
            megacompile.eager(other).__enter__()


def test_blocks_are_nested_end_with_an_exception_and_are_of_one_thread() -> None:
    plain, model = nets()
    graphs = streamed(model).captures.graphs
    outputs: list[Tensor] = []
    with torch.no_grad():
        with megacompile.eager(model):
            with megacompile.eager(model):
                model(TOKENS)
            with pytest.raises(IndexError):
                model(TOKENS + WORDS)
            with pytest.raises(ZeroDivisionError), megacompile.eager(model):
                raise ZeroDivisionError
            model(TOKENS)
            assert graphs == []
            thread = threading.Thread(target=lambda: outputs.append(model(TOKENS).detach()))
            thread.start()
            thread.join()
            captured = len(graphs)
            assert captured
            assert torch.equal(model(TOKENS), plain(TOKENS))
        assert torch.equal(outputs[0], plain(TOKENS))
        assert len(graphs) == captured
        model(torch.arange(5)[None])
        assert len(graphs) > captured


def test_a_block_within_the_forward_is_refused() -> None:
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


def test_calls_that_make_programs_one_after_the_other_are_tried_less_and_less() -> None:
    """Where shapes are new in each call without gradients, as of a cache that grows."""

    def forward(m: Any, x: Tensor) -> Tensor:
        for layer in m.layers:
            x = layer(x)
            torch._dynamo.graph_break()
        return x

    plain, model = twins(Applies(forward, layers=Stack(layers=6).layers), dynamic=False)
    made = ""
    with torch.no_grad(), pytest.warns(UserWarning, match="24 schedules"):
        for rows in range(2, 11):
            before = len(programs(model))
            x = torch.ones(rows, LAYER_WIDTH)
            assert equal(model(x), plain(x))
            made += "x" if len(programs(model)) > before else "."
    assert made == "xxxx.x..x"
