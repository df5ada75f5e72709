"""Errors in a step: the next one works with the right numbers, or says why it cannot.

After a backward that failed, a `p.grad` that was None is None still; one that held a gradient is
what it was, or has the new one added whole. So a step that failed is repeated from `zero_grad()`,
as in plain PyTorch. What an optimizer cannot go on from is refused when the step begins, and
nothing has changed. Each case is tried where torch.optim's own step makes the update, where a rule
of ours does, on residents, and in the backward.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import math
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Adam, AdamW, Muon, Optimizer

from megacompile import megacompile, updates
from megacompile.errors import AnomalyError, OptimizerError, OptionError
from tests import inside, zoo
from tests.interrupts import Countdown
from tests.training import groups, take_steps
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
    with ops.failing():
        step(model, batch(9))
    return ops.calls


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


def test_a_hook_that_fails_leaves_the_gradients_that_there_were() -> None:
    def fail(param: Tensor) -> None:
        raise Planted

    for each in twins():
        step(each, batch(0))
        for param in each.parameters():
            param.register_post_accumulate_grad_hook(fail)
        with pytest.raises(Planted):
            step(each, batch(1))
        assert all(param.grad is not None for param in each.parameters())


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


class Root(nn.Module):
    """Its gain's gradient is inf at 0, its input's NaN where the input is so."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x) * self.gain.sqrt()


def set_gain(model: Any, gain: float) -> None:
    with torch.no_grad():
        model.layers[1].gain[:3] = gain


def test_an_anomaly_is_named_and_leaves_the_next_step_right() -> None:
    """inf and NaN of stages, and NaN from outside; torch's own mode is heard, for NaN alone."""
    torch.manual_seed(0)
    start: Any = Stack(layers=3, block=Root)
    plain, model = zoo.twins(copy.deepcopy(start), detect_anomaly=True)
    set_gain(model, 0.0)
    with pytest.raises(AnomalyError, match="layers.1.gain"):
        step(model, batch())
    assert all(p.grad is None for p in model.parameters())
    set_gain(model, math.nan)
    with pytest.raises(AnomalyError, match="NaN"):
        step(model, batch())
    set_gain(model, 1.0)
    with pytest.raises(AnomalyError, match="NaN"):
        (model(**batch()) * torch.nan).backward()
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


NAME = "layers.2.up.weight"  # in a bucket that is neither the first nor the last

Make = Callable[[nn.Module], Optimizer]
Bad = Callable[[Optimizer, Tensor], None]

WAYS: dict[str, dict[str, Any]] = {
    "torch.optim": {},
    "rule": {"state_dtype": torch.bfloat16},
    "resident": {"state_dtype": torch.bfloat16, "resident": "all"},
    "backward": {},
}

MAKES: dict[str, Make] = {
    "adamw": lambda m: AdamW(groups(m)[::-1], lr=1e-2),
    "adam, amsgrad": lambda m: Adam(groups(m)[::-1], lr=1e-2, amsgrad=True),
    "sgd": lambda m: SGD(groups(m)[::-1], lr=1e-2, momentum=0.9),
    "adafactor": lambda m: Adafactor(groups(m)[::-1], lr=1e-2),
}


def option(name: str, value: Any) -> Bad:
    def set_it(optimizer: Optimizer, _: Tensor) -> None:
        optimizer.param_groups[-1][name] = value

    return set_it


def without(name: str) -> Bad:
    def delete(optimizer: Optimizer, param: Tensor) -> None:
        del optimizer.state[param][name]

    return delete


def state(name: str, change: Callable[[Tensor], Any], *, load: bool = False) -> Bad:
    def put(optimizer: Optimizer, param: Tensor) -> None:
        if not load:
            optimizer.state[param][name] = change(optimizer.state[param][name] + 0)
            return
        states = copy.deepcopy(optimizer.state_dict())
        params = [p for group in optimizer.param_groups for p in group["params"]]
        number = next(i for i, p in enumerate(params) if p is param)
        states["state"][number][name] = change(states["state"][number][name])
        optimizer.load_state_dict(states)

    return put


def tensor_lr(optimizer: Optimizer, _: Tensor) -> None:
    optimizer.param_groups[-1].update(lr=torch.tensor(0.1), foreach=True)


# name: (optimizer, what is done)
BAD: dict[str, tuple[str, Bad]] = {
    "lr is text": ("adamw", option("lr", "0.1")),
    "momentum is text": ("sgd", option("momentum", "0.9")),
    "one beta": ("adamw", option("betas", (0.9,))),
    "beta above 1": ("adamw", option("betas", (0.9, 1.5))),
    "no eps": ("adamw", lambda o, _: o.param_groups[1].pop("eps")),
    "amsgrad later": ("adamw", option("amsgrad", True)),
    "one element": ("adamw", state("exp_avg_sq", lambda t: t[:1, :1])),
    "flat": ("sgd", state("momentum_buffer", torch.flatten)),
    "loaded": ("adamw", state("exp_avg", lambda t: t[:8], load=True)),
    "max": ("adam, amsgrad", state("max_exp_avg_sq", lambda t: t[0])),
    "a list": ("adamw", state("exp_avg", lambda t: t.tolist())),
    "whole numbers": ("adamw", state("exp_avg", lambda t: t.long())),
    "no exp_avg_sq": ("adamw", without("exp_avg_sq")),
    "two steps": ("adamw", state("step", lambda t: t.expand(2).clone())),
}
STOCK: dict[str, tuple[str, Bad]] = {
    "float64": ("adamw", state("exp_avg", lambda t: t.double())),
    "adafactor, no step": ("adafactor", without("step")),
    "tensor lr": ("adamw", tensor_lr),
}


def net() -> Any:
    model, _ = zoo.stack()
    return model


def snapshot(model: Any, optimizer: Optimizer) -> list[Any]:
    """Copies of all parameters and states; the states of the bad parameter are left out."""
    bad = model.get_parameter(NAME)
    found: list[Any] = [p.detach().clone() for p in model.parameters()]
    for param in model.parameters():
        if param is not bad and param in optimizer.state:
            found += [v + 0 for v in optimizer.state[param].values() if isinstance(v, Tensor)]
    return found


@pytest.mark.parametrize("way", WAYS)
def test_refused_before_anything_changes(way: str) -> None:
    """One bad thing after the other; behind each a checkpoint is loaded, and all goes on."""
    tries = BAD | (STOCK if way == "torch.optim" else {})
    kinds = list(MAKES) if way == "torch.optim" else ["adamw", "adam, amsgrad", "sgd"]
    model = net()
    start = copy.deepcopy(model.state_dict())
    if way != "backward":
        megacompile(model, device="cpu", lowering="eager", **WAYS[way])
    for kind in kinds:
        if way == "backward":
            model = net()
            optimizer = MAKES[kind](model)
            megacompile(model, device="cpu", lowering="eager", optimizer=optimizer)
        else:
            model.load_state_dict(start)
            optimizer = MAKES[kind](model)
        take_steps(model, optimizer, 2)
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        take_steps(model, optimizer, 2, start=2)
        wanted = snapshot(model, optimizer)
        for name, (of, bad) in tries.items():
            if of != kind:
                continue
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(copy.deepcopy(saved[1]))
            bad(optimizer, model.get_parameter(NAME))
            before = snapshot(model, optimizer)
            model.zero_grad()
            with pytest.raises(OptimizerError):
                zoo.step(model, zoo.batch(2))
                assert way != "backward", f"{name}: the update was made"
                optimizer.step()
            buckets = inside.buckets(model).values()
            assert all(bucket.pending.in_flight is None for bucket in buckets)
            after = snapshot(model, optimizer)
            assert all(zoo.equal(a, b) for a, b in zip(before, after, strict=True)), name
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(copy.deepcopy(saved[1]))
        take_steps(model, optimizer, 2, start=2)
        found = snapshot(model, optimizer)
        assert all(zoo.equal(a, b) for a, b in zip(wanted, found, strict=True)), kind


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
