"""`optimizer.step()` in other loops: closures, several optimizers, a scaler, hooks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from megacompile.runtime.params.guards import GuardedParameter
from megacompile.runtime.updates.update import UpdatePath
from tests import zoo
from tests.inside import ways
from tests.training import (
    NAME,
    STEPS,
    adamw,
    data,
    gradients,
    net,
    sgd,
    train,
)
from tests.zoo import assert_same, twins


@pytest.mark.parametrize("keyword", [False, True])
def test_closures(keyword: bool) -> None:
    plain, streamed = twins(net())
    found: list[list[float]] = []
    for model in (plain, streamed):
        (optimizer,) = sgd(model, momentum=0.9)
        losses: list[float] = []

        def closure(model: nn.Module = model, optimizer: Optimizer = optimizer) -> float:
            optimizer.zero_grad()
            loss = model(**data(3))
            loss.backward()
            return float(loss.detach())

        step: Any = optimizer.step
        for _ in range(4):
            losses.append(step(closure=closure) if keyword else step(closure))
        found.append(losses)
    assert found[0] == found[1] and len(set(found[0])) == 4
    assert_same(plain, streamed)


def test_two_optimizers_over_halves() -> None:
    plain, streamed = twins(net())
    for model in (plain, streamed):
        params = list(model.parameters())
        half = len(params) // 2
        train(model, [AdamW(params[:half], lr=1e-2), SGD(params[half:], lr=0.1, momentum=0.9)])
    assert_same(plain, streamed)


def test_one_of_two_optimizers_over_one_bucket() -> None:
    plain, streamed = twins(net())
    for model in (plain, streamed):
        params = list(model.parameters())
        first, second = AdamW(params[::2], lr=1e-2), AdamW(params[1::2], lr=1e-3)
        for i in range(6):
            gradients(model, i)
            (first if i % 3 else second).step()
            model.zero_grad()
    assert_same(plain, streamed)


def test_grad_scaler() -> None:
    plain, streamed = twins(net())
    for model in (plain, streamed):
        (optimizer,) = adamw(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=3)
        for i in range(STEPS):
            optimizer.zero_grad()
            scaler.scale(model(**data(i)) * 4).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
        assert 1.0 < scaler.get_scale() < 2.0**127, "some steps were skipped"
        assert 0 < optimizer.state[model.get_parameter(NAME)]["step"] < STEPS
    zoo_differences = [d for d in zoo.differences(plain, streamed) if not d.endswith(".grad")]
    assert zoo_differences == []


def test_a_group_added_later() -> None:
    plain, streamed = twins(net())
    for model in (plain, streamed):
        optimizer = AdamW(model.layers.parameters(), lr=1e-2)
        train(model, [optimizer], 3)
        optimizer.add_param_group({"params": list(model.head.parameters()), "lr": 1e-3})
        train(model, [optimizer], 3, start=3)
    assert_same(plain, streamed)


def test_gradients_that_the_user_set() -> None:
    plain, streamed = twins(net())
    for model in (plain, streamed):
        (optimizer,) = adamw(model)
        for i in range(4):
            optimizer.zero_grad()
            gradients(model, i)
            param = model.get_parameter(NAME)
            param.grad = param.grad * 2 if i % 2 else torch.full_like(param, 0.1)
            model.spare.weight.grad = torch.ones(2, 2)
            model.head.bias.grad = None
            optimizer.step()
    assert_same(plain, streamed)


def test_hooks_of_the_user_see_the_gradients() -> None:
    plain, streamed = twins(net())
    seen: list[list[int]] = []
    for model in (plain, streamed):
        (optimizer,) = adamw(model)
        counts: list[int] = []

        def count(*_: Any, model: nn.Module = model, counts: list[int] = counts) -> None:
            counts.append(sum(p.grad is not None for p in model.parameters()))

        optimizer.register_step_pre_hook(count)
        optimizer.register_step_post_hook(count)
        train(model, [optimizer], 3)
        seen.append(counts)
    assert seen[0][-1] > 0
    assert seen[0] == seen[1]
    assert_same(plain, streamed)


def test_optimizers_of_other_models_are_left_alone() -> None:
    _, streamed = twins(net())
    train(streamed, adamw(streamed), 1)
    other, twin = net(), net()
    train(other, adamw(other), 3)
    train(twin, adamw(twin), 3)
    assert ways(streamed) == {UpdatePath.STOCK}
    assert_same(other, twin)
    assert not any(isinstance(p, GuardedParameter) for p in other.parameters())
