"""Errors in a step: the next one works with the right numbers, or says why it cannot.

A step that failed is repeated from `zero_grad()`, as in plain PyTorch: `test_training.py` draws
where ops, hooks and steps fail.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import math
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Muon

from megacompile import updates
from megacompile.errors import AnomalyError, OptionError
from tests import inside, zoo
from tests.equality.nets import Applies
from tests.interrupts import traced
from tests.stateful.late import AtCall
from tests.stateful.side import Planted
from tests.zoo import WIDTH, Block, Stack, assert_same, batch, step


def test_a_failed_step_leaves_no_tensors() -> None:
    _, model = zoo.twins(Stack(layers=2, block=lambda: Block(dropout=0.2)))
    model.zero_grad()
    step(model, batch(0))
    before = _tensors()
    for k in range(1, 40, 13):
        model.zero_grad()
        with pytest.raises(Planted), traced(AtCall("issue", k, Planted("in an op"))):
            step(model, batch(0))
    model.zero_grad()
    step(model, batch(0))
    assert _tensors() <= before


def _tensors() -> int:
    gc.collect()
    return sum(issubclass(type(item), Tensor) for item in gc.get_objects())


def root() -> nn.Module:
    """Its gain's gradient is inf at 0, its input's NaN where the input is so."""
    named = {"linear": nn.Linear(WIDTH, WIDTH), "gain": nn.Parameter(torch.ones(WIDTH))}
    return Applies(lambda model, x: x + model.linear(x) * model.gain.sqrt(), **named)


def set_gain(model: Any, gain: float) -> None:
    with torch.no_grad():
        model.layers[1].gain[:3] = gain


def test_an_anomaly_is_named_and_leaves_the_next_step_right() -> None:
    """torch's own mode is heard, for NaN alone. What is named: tests/messages/test_stages.py."""
    torch.manual_seed(0)
    start: Any = Stack(layers=3, block=root)
    plain, model = zoo.twins(copy.deepcopy(start), detect_anomaly=True)
    set_gain(model, 0.0)
    with pytest.raises(AnomalyError, match="layers.1.gain"):
        step(model, batch())
    assert all(p.grad is None for p in model.parameters())
    set_gain(model, 1.0)
    for each in (plain, model):
        each.zero_grad()
        step(each, batch())
    assert_same(plain, model)
    _, model = zoo.twins(start)
    for gain, check_nan in ((0.0, True), (math.nan, False), (math.nan, True)):
        set_gain(model, gain)
        raises = check_nan and gain is math.nan
        said = pytest.raises(AnomalyError, match="NaN") if raises else contextlib.nullcontext()
        with torch.autograd.set_detect_anomaly(True, check_nan=check_nan), said:
            step(model, batch())
    with pytest.raises(OptionError):
        zoo.twins(start, detect_anomaly=1)


def test_an_lr_that_is_a_tensor_may_change_after_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where threads run torch.optim's own step on copies: it waits for them."""
    power = torch.optim._muon._zeropower_via_newtonschulz

    def slow(*args: Any) -> Tensor:
        time.sleep(0.1)
        return power(*args)

    monkeypatch.setattr(torch.optim._muon, "_zeropower_via_newtonschulz", slow)
    plain, model = zoo.twins(nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(2))))
    for each in (plain, model):
        lr: Any = torch.tensor(0.02)  # Muon takes it, its types do not
        optimizer = Muon(each.parameters(), lr=lr)
        for i in range(3):
            if each is model and i:
                monkeypatch.setattr(inside.streamed(model).updates.parts, "cuda", True)
            optimizer.zero_grad()
            each(torch.ones(2, 4)).square().sum().backward()
            optimizer.step()
            lr.fill_(0.1 * i)
    assert_same(plain, model)
    assert {*updates(model).values()} == {"torch.optim on the device"}
