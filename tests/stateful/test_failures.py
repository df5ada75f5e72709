"""Whatever fails in a step, the next one works with the right numbers, or says why it cannot.

What `p.grad` is after a backward that failed:

- it was None: it is None still. (In plain PyTorch the layers that came before the failure have
  theirs.)
- it held a gradient: each parameter's is what it was, or has the new one added whole, as in plain
  PyTorch, where the layers that came before the failure have accumulated too. So, as there, a step
  that failed is repeated from `zero_grad()`.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megacompile.errors import AnomalyError, OptionTypeError
from tests import inside, zoo
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
    """In the forward and in the backward; then the step is repeated, in every bit."""
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
        with pytest.raises(ERRORS[0]), ops.failing(k, ERRORS[0]("in an op")):
            step(model, batch(0))
    model.zero_grad()
    step(model, batch(0))
    assert _tensors() <= before


def _tensors() -> int:
    gc.collect()
    return sum(issubclass(type(item), Tensor) for item in gc.get_objects())


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


def set_gain(model: Any, gain: float) -> None:
    with torch.no_grad():
        model.layers[1].gain[:3] = gain


def test_an_anomaly_is_named_and_leaves_the_next_step_right() -> None:
    """inf of the stage, NaN of the forward, NaN from outside; finite gradients pass. torch's own
    mode is heard, and says NaN alone."""
    torch.manual_seed(0)
    start: Any = Stack(layers=3, block=Root)
    plain, model = zoo.twins(copy.deepcopy(start), detect_anomaly=True)
    set_gain(model, 0.0)
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
    _, model = zoo.twins(start)
    for gain, check_nan in ((0.0, True), (math.nan, False), (math.nan, True)):
        set_gain(model, gain)
        raises = check_nan and gain is math.nan
        said = pytest.raises(AnomalyError, match="nan") if raises else contextlib.nullcontext()
        with torch.autograd.set_detect_anomaly(True, check_nan=check_nan), said:
            step(model, batch())
    with pytest.raises(OptionTypeError):
        zoo.twins(start, detect_anomaly=1)
