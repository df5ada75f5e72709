"""Whatever fails in a step, the next one works with the right numbers, or says why it cannot.

What `p.grad` is after a backward that failed:

- it was None: it is None still. (In plain PyTorch the layers that came before the failure have
  theirs.)
- it held a gradient: each parameter's is what it was, or has the new one added whole, as in plain
  PyTorch, where the layers that came before the failure have accumulated too. So, as there, a step
  that failed is repeated from `zero_grad()`.
"""

from __future__ import annotations

import gc
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megacompile import megacompile
from megacompile.errors import AnomalyError, OptionTypeError
from tests import inside, zoo
from tests.training import take_steps
from tests.watched import Countdown
from tests.zoo import WIDTH, Block, Stack, assert_same, batch, equal, step


class Planted(Exception):
    """What the tests let fail."""


ERRORS = (Planted, KeyboardInterrupt)


def twins(**options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    return zoo.twins(Stack(layers=2, block=lambda: Block(dropout=0.2)), **options)


def ops_of(model: Any) -> Countdown:
    """The ops that the model issues, of which one is to fail."""
    return Countdown(type(inside.machine(model).streams).issue)


def count_of(ops: Countdown, model: Any) -> int:
    """How many a step issues."""
    with ops.failing():
        step(model, batch(9))
    return ops.calls


# An op fails, each in turn.


@pytest.mark.parametrize("adding", [False, True], ids=["first", "accumulating"])
def test_any_op_may_fail(adding: bool) -> None:
    """In the forward and in the backward; then the step is repeated."""
    plain, model = twins()
    for each in (plain, model):  # traced, for both kinds of backward
        step(each, batch(0))
        step(each, batch(1))
    after = {n: p.grad.clone() for n, p in plain.named_parameters()}
    plain.zero_grad()
    step(plain, batch(0))
    before = {n: p.grad.clone() if adding else None for n, p in plain.named_parameters()}
    step(plain, batch(1))
    model.zero_grad()
    ops, partly = ops_of(model), 0
    count = count_of(ops, model)
    for k in range(count):
        model.zero_grad()
        if adding:
            step(model, batch(0))
        error = ERRORS[k % 2]
        with pytest.raises(error), ops.failing(k, error("in an op")):
            step(model, batch(1))
        added = 0
        for name, param in model.named_parameters():
            if param.grad is None or not equal(param.grad, before[name]):
                assert adding or param.grad is None, (k, name)
                assert param.grad is None or equal(param.grad, after[name]), (k, name)
                added += param.grad is not None
        partly += 0 < added < len(after)
        model.zero_grad()
        step(model, batch(0))
        step(model, batch(1))
        assert_same(plain, model)
    assert count > 20 and bool(partly) == adding, "some failed half way"


def test_a_failed_step_leaves_no_tensors() -> None:
    _, model = twins()
    ops = ops_of(model)
    count = count_of(ops, model)
    model.zero_grad()
    step(model, batch(0))
    before = _tensors()
    for k in range(0, count, 13):
        model.zero_grad()
        with pytest.raises(Planted), ops.failing(k, Planted()):
            step(model, batch(0))
    model.zero_grad()
    step(model, batch(0))
    assert _tensors() <= before


def _tensors() -> int:
    gc.collect()
    return sum(issubclass(type(item), Tensor) for item in gc.get_objects())


def test_training_goes_on_behind_a_failed_step() -> None:
    """Updates of the last step may be in flight when an op fails."""
    plain, model = twins()
    optimizers = [torch.optim.AdamW(each.parameters(), 0.01) for each in (plain, model)]
    take_steps(plain, optimizers[0], 7)
    take_steps(model, optimizers[1], 2)
    model.zero_grad()
    ops = ops_of(model)
    count = count_of(ops, model)
    for k in range(2, 7):
        error = ERRORS[k % 2]
        with pytest.raises(error), ops.failing((11 * k) % count, error("in an op")):
            take_steps(model, optimizers[1], 1, start=k)
        optimizers[1].zero_grad()
        take_steps(model, optimizers[1], 1, start=k)
    assert_same(plain, model)


# The user's code fails.


# NaN and inf.


class Root(nn.Module):
    """Its gain's gradient is inf at 0, its input's NaN where the input is so."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.linear(x) * self.gain.sqrt()
        return out


def rooted(gain: float, **options: Any) -> Any:
    torch.manual_seed(0)
    model: Any = Stack(layers=3, block=Root)
    set_gain(model, gain)
    return megacompile(model, device="cpu", lowering="eager", **options)


def set_gain(model: Any, gain: float) -> None:
    with torch.no_grad():
        model.layers[1].gain[:3] = gain


def test_an_anomaly_is_named_and_leaves_the_next_step_right() -> None:
    """inf of the stage, NaN of the forward, NaN from outside; finite gradients pass."""
    torch.manual_seed(0)
    plain: Any = Stack(layers=3, block=Root)
    model = rooted(0.0, detect_anomaly=True)
    with pytest.raises(AnomalyError, match="layers.1.gain"):
        step(model, batch())
    assert all(p.grad is None for p in model.parameters())
    set_gain(model, math.nan)
    with pytest.raises(AnomalyError, match="nan"):
        step(model, batch())
    set_gain(model, 1.0)
    with pytest.raises(AnomalyError, match="nan"):
        (model(**batch()) * torch.nan).backward()
    for each in (plain, model):
        each.zero_grad()
        step(each, batch())
    assert_same(plain, model)


def test_torchs_own_mode_is_heard_and_says_nan_alone() -> None:
    model = rooted(0.0)
    step(model, batch())
    assert torch.isinf(model.layers[1].gain.grad[:3]).all(), "nobody looks without it"
    with torch.autograd.set_detect_anomaly(True):
        step(model, batch())
        set_gain(model, math.nan)
        with pytest.raises(AnomalyError, match="nan"):
            step(model, batch())
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        step(model, batch())
    with pytest.raises(OptionTypeError, match="detect_anomaly"):
        rooted(1.0, detect_anomaly=1)
