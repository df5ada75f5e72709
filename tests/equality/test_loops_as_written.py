"""A training loop as people write it: whatever it does, it does to the plain model too.

The same model serves all cases of a table: its values are put back. It is captured once for each
test. Every loss, gradient, parameter and buffer is compared in every bit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from megacompile import megacompile
from tests import zoo
from tests.zoo import assert_same, batch, equal, step, twins

Loop = Callable[[Any, list[Tensor]], None]  # what a loop sees goes into the list


class Both:
    """A plain model and a streamed one, which begin each loop with the same values."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        self.start = copy.deepcopy(model.state_dict())
        self.plain, self.streamed = twins(model, **options)

    def run(self, loop: Loop, name: str = "") -> None:
        seen: list[list[Tensor]] = [[], []]
        for model, values in zip((self.plain, self.streamed), seen, strict=True):
            model.load_state_dict(self.start)
            model.zero_grad()
            model.requires_grad_(True)
            torch.manual_seed(0)
            loop(model, values)
        assert len(seen[0]) == len(seen[1]), name
        for mine, theirs in zip(*seen, strict=True):
            assert equal(mine, theirs), name
        assert_same(self.plain, self.streamed)


# --- optimizers, clipping, accumulation


def training(
    *,
    accumulate: int = 1,
    clip_value: float | None = None,
    set_to_none: bool = True,
    optimizer: Callable[..., Any] = torch.optim.AdamW,
) -> Loop:
    def loop(model: nn.Module, seen: list[Tensor]) -> None:
        stepper = optimizer(model.parameters(), lr=0.01)
        for i in range(3):
            for micro in range(accumulate):
                seen.append(step(model, batch(10 * i + micro), seed=i))
            if clip_value is not None:
                nn.utils.clip_grad_value_(model.parameters(), clip_value)
            stepper.step()
            stepper.zero_grad(set_to_none=set_to_none)

    return loop


def grad_scaler(model: Any, seen: list[Tensor]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for _ in range(2):
        scaler.scale(model(**batch())).backward()
        scaler.unscale_(optimizer)
        seen.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def states_moved(model: Any, seen: list[Tensor]) -> None:
    """Into another optimizer, which goes on."""
    first = torch.optim.AdamW(model.parameters(), lr=0.01)
    step(model, batch())
    first.step()
    second = torch.optim.AdamW(model.parameters(), lr=0.01)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    step(model, batch(1))
    second.step()


def short_batch(model: Any, seen: list[Tensor]) -> None:
    rows = TensorDataset(batch(1, size=10)["x"], batch(2, size=10)["x"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in DataLoader(rows, batch_size=4):
        seen.append(step(model, {"x": x, "y": y}))
        optimizer.step()
        optimizer.zero_grad()


def random_numbers(model: Any, seen: list[Tensor]) -> None:
    """What is drawn behind a step goes on where the forward has left off."""
    for i in range(2):
        seen += [step(model, batch(i)), torch.rand(4)]


LOOPS: dict[str, Loop] = {
    "random numbers": random_numbers,
    "accumulate and clip values": training(accumulate=2, clip_value=0.01, set_to_none=False),
    "adam, not foreach": training(optimizer=lambda p, lr: torch.optim.Adam(p, lr, foreach=False)),
    "adamw, fused": training(optimizer=lambda p, lr: torch.optim.AdamW(p, lr, fused=True)),
    "grad scaler": grad_scaler,
    "states moved": states_moved,
    "short batch": short_batch,
}


def test_loops() -> None:
    both = Both(zoo.dropout()[0], activations="recompute")
    for name, loop in LOOPS.items():
        both.run(loop, name)


@pytest.mark.parametrize("name", ["frozen", "scaled", "shared", "data_dependent"])
def test_models(name: str) -> None:
    """Those that no other table has."""
    both = Both(zoo.ZOO[name]()[0])
    both.run(training(accumulate=2, clip_value=0.01, set_to_none=False), name)
    given = {n: p.grad is not None for n, p in both.plain.named_parameters()}
    assert given == {n: p.grad is not None for n, p in both.streamed.named_parameters()}


# --- gradients


def frozen_and_thawed(model: Any, seen: list[Tensor]) -> None:
    for requires in (False, True, False, True):
        model.layers[1].requires_grad_(requires)
        seen.append(step(model, batch()))


def all_frozen(model: Any, seen: list[Tensor]) -> None:
    model.requires_grad_(False)
    x = batch()["x"].requires_grad_()
    model(x, batch()["y"]).backward()
    assert x.grad is not None
    seen.append(x.grad)
    model.requires_grad_(True)


def some_none(model: Any, seen: list[Tensor]) -> None:
    step(model, batch())
    model.layers[1].zero_grad()
    model.layers[0].up.weight.grad = None
    step(model, batch(1))


def weighted(model: Any, seen: list[Tensor]) -> None:
    model(**batch()).backward(torch.tensor(0.25))


def data_replaced(model: Any, seen: list[Tensor]) -> None:
    """Between a forward and its backward, which has the old memory."""
    loss = model(**batch())
    weight = model.layers[1].up.weight
    weight.data = weight.data * 2
    loss.backward()
    seen.append(step(model, batch(1)))


GRADIENTS: dict[str, Loop] = {
    "weighted": weighted,
    "some set to none": some_none,
    "frozen and thawed": frozen_and_thawed,
    "all frozen": all_frozen,
    "data replaced": data_replaced,
}


def test_gradients() -> None:
    both = Both(zoo.stack()[0])
    for name, loop in GRADIENTS.items():
        both.run(loop, name)


def test_hooks_that_were_there_before() -> None:
    models = [zoo.stack()[0] for _ in range(2)]
    seen: list[Tensor] = []
    for model in models:
        model.layers[1].up.weight.register_hook(lambda gradient: gradient.clamp(-0.001, 0.001))
        model.head.bias.register_hook(lambda gradient: seen.append(gradient.sum()))
    megacompile(models[1], device="cpu", lowering="eager")
    for model in models:
        step(model, batch())
        step(model, batch())
    assert_same(*models)
    assert len(seen) == 4 and equal(torch.stack(seen[:2]), torch.stack(seen[2:]))
