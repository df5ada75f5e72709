"""Whatever fails in a step, the next one works with the right numbers, or says why it cannot.

What `p.grad` is after a backward that failed:

- it was None: it is None still. (In plain PyTorch the layers that came before the failure have
  theirs.)
- it held a gradient: each parameter's is what it was, or has the new one added whole, as in plain
  PyTorch, where the layers that came before the failure have accumulated too. So, as there, a step
  that failed is repeated from `zero_grad()`.
"""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megacompile import megacompile
from megacompile.errors import AnomalyError, OptimizerError, OptionTypeError
from tests import inside, zoo
from tests.training import take_steps
from tests.watched import Countdown
from tests.zoo import WIDTH, Block, Stack, assert_same, batch, differences, equal, step


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
    for k in range(0, count, 9):
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
    take_steps(plain, optimizers[0], 12)
    take_steps(model, optimizers[1], 2)
    model.zero_grad()
    ops = ops_of(model)
    count = count_of(ops, model)
    for k in range(2, 12):
        error = ERRORS[k % 2]
        with pytest.raises(error), ops.failing((5 * k) % count, error("in an op")):
            take_steps(model, optimizers[1], 1, start=k)
        optimizers[1].zero_grad()
        take_steps(model, optimizers[1], 1, start=k)
    assert_same(plain, model)


def test_an_update_in_the_backward_that_fails_says_so() -> None:
    """Some layers are updated and some are not: the next backward does not just go on."""
    torch.manual_seed(0)
    model: Any = Stack(layers=2, block=Block)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    megacompile(model, device="cpu", lowering="eager", optimizer=optimizer)
    take_steps(model, optimizer, 1)
    before, states = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    ops = ops_of(model)
    count = count_of(ops, model)
    optimizer.step()
    optimizer.zero_grad()
    model.load_state_dict(before)
    with pytest.raises(Planted), ops.failing(count - 5, Planted()):
        step(model, batch(1))
    now = {  # in memory: who asks a parameter would be told
        place.name: value.clone()
        for bucket in inside.buckets(model).values()
        for place, value in zip(bucket.layout.params, bucket.values, strict=True)
    }
    changed = [name for name, value in now.items() if not equal(value, before[name])]
    assert 0 < len(changed) < len(before), "half updated"
    with pytest.raises(OptimizerError, match="Planted"):
        step(model, batch(1))
    model.load_state_dict(before)
    optimizer.load_state_dict(states)
    take_steps(model, optimizer, 2)  # goes on


# The user's code fails.


class Fails(nn.Module):
    """A layer that raises when it is told to."""

    fails = False

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise Planted("in the forward")
        return x + torch.tanh(self.linear(x))


def _raise(*args: Any) -> None:
    raise Planted("in a hook")


class _Telling:
    """The layer fails in this block."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def __enter__(self) -> None:
        self.layer.fails = True

    def __exit__(self, *_: object) -> None:
        self.layer.fails = False


PLACES: dict[str, Callable[[Any], AbstractContextManager[Any]]] = {
    "forward": _Telling,
    "module hook": lambda layer: layer.register_forward_hook(_raise),
    "gradient hook": lambda layer: layer.linear.weight.register_hook(_raise),
    "accumulate hook": lambda layer: layer.linear.weight.register_post_accumulate_grad_hook(_raise),
}


def test_code_of_the_user_may_fail() -> None:
    torch.manual_seed(0)
    plain, model = zoo.twins(Stack(layers=3, block=Fails))
    optimizers = [torch.optim.AdamW(each.parameters(), 0.01) for each in (plain, model)]
    done = 0
    for name, place in PLACES.items():
        take_steps(plain, optimizers[0], 3, start=done)
        take_steps(model, optimizers[1], 2, start=done)
        with place(model.layers[1]), pytest.raises(Planted):
            take_steps(model, optimizers[1], 1, start=done + 2)
        optimizers[1].zero_grad()
        take_steps(model, optimizers[1], 1, start=done + 2)
        assert not differences(plain, model), name
        done += 3


def test_a_loss_that_is_never_differentiated() -> None:
    plain, model = twins()
    step(model, batch(0))
    model(**batch(1))  # whatever comes behind it fails
    model.zero_grad()
    for each in (plain, model):
        step(each, batch(2))
    assert_same(plain, model)


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
