"""Memory of optimizer states: new zeros are taken as they are, old values are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim import AdamW

from tests import inside, zoo
from tests.zoo import assert_same, twins


def adamw(model: Any) -> AdamW:
    return AdamW(model.parameters(), lr=1e-2)


def test_new_memory_is_zeros_once() -> None:
    """Nobody writes to it: billions of zeros would be written twice, the first time by Linux."""
    streamed = zoo.stacks()[1]
    (bucket, *_) = inside.buckets(streamed).values()
    owner = adamw(streamed)
    states = bucket.states
    states.make(owner, "exp_avg", {0: torch.float32, 1: torch.float32}, pin=False)
    first, second = (states.of(owner)["exp_avg"][i] for i in (0, 1))
    assert isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor)
    assert not first.any() and not second.any()
    for state in (first, second):
        state.fill_(1.0)
    states.clear(owner, "exp_avg", 0)
    assert first.all()
    states.clear(owner, "exp_avg", 0)
    assert not first.any()
    states.filled(owner, "exp_avg", 1)
    states.clear(owner, "exp_avg", 1)
    assert not second.any()


@pytest.mark.parametrize("loaded", [False, True])
def test_states_that_are_dropped_begin_anew(loaded: bool) -> None:
    """The memory that they lay in is taken again."""
    model, inputs = zoo.stack()
    plain, streamed = twins(model)
    for each in (plain, streamed):
        optimizer = adamw(each)
        if loaded:
            other = adamw(each)
            zoo.step(each, inputs)
            other.step()
            optimizer.load_state_dict(other.state_dict())
        for _ in range(3):
            for _ in range(2):
                optimizer.zero_grad()
                zoo.step(each, inputs)
                optimizer.step()
            optimizer.state.clear()
    assert_same(plain, streamed)
