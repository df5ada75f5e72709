"""Whatever fails in a step, the next one works with the right numbers, or says why it cannot.

What `p.grad` is after a backward that failed:

- it was None: it is None still. (In plain PyTorch the layers that came before the failure have
  theirs.)
- it held a gradient: each parameter's is what it was, or has the new one added whole, as in plain
  PyTorch, where the layers that came before the failure have accumulated too. So, as there, a step
  that failed is repeated from `zero_grad()`."""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megacompile import megacompile
from megacompile.errors import AnomalyError, OptimizerError, OptionTypeError
from megacompile.runtime.device.streams import Streams
from megacompile.runtime.params.guards import unguarded
from tests import zoo
from tests.training import take_steps
from tests.zoo import WIDTH, Block, Stack, assert_same, batch, equal, step


class Planted(Exception):
    """What the tests let fail."""


def twins(**options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    return zoo.twins(Stack(layers=2, block=lambda: Block(dropout=0.2)), **options)


class _Countdown:
    """Lets the nth op from now fail; counts them."""

    def __init__(self) -> None:
        self.issued = 0
        self.fails_at = -1
        self.error: BaseException = Planted()


@pytest.fixture
def countdown(monkeypatch: pytest.MonkeyPatch) -> _Countdown:
    state = _Countdown()
    plain = Streams.issue

    def issue(self: Streams, *args: Any, **kwargs: Any) -> Any:
        state.issued += 1
        if state.issued - 1 == state.fails_at:
            raise state.error
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(Streams, "issue", issue)
    return state


def ops_of_a_step(countdown: _Countdown, model: Any) -> int:
    countdown.issued, countdown.fails_at = 0, -1
    step(model, batch(9))
    return countdown.issued


ERRORS = [Planted("in an op"), KeyboardInterrupt()]


# --- an op fails, each in turn


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("adding", [False, True], ids=["first", "accumulating"])
def test_any_op_may_fail(countdown: _Countdown, error: BaseException, adding: bool) -> None:
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
    count = ops_of_a_step(countdown, model)
    partly = 0
    for k in range(count):
        model.zero_grad()
        countdown.fails_at = -1
        if adding:
            step(model, batch(0))
        countdown.issued, countdown.fails_at, countdown.error = 0, k, error
        with pytest.raises(type(error)):
            step(model, batch(1))
        countdown.fails_at = -1
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
    assert count > 20
    assert bool(partly) == adding, "some failed half way"


def test_a_failed_step_leaves_no_tensors(countdown: _Countdown) -> None:
    _, model = twins()
    count = ops_of_a_step(countdown, model)
    model.zero_grad()
    step(model, batch(0))
    before = tensors()
    for k in range(0, count, 3):
        model.zero_grad()
        countdown.issued, countdown.fails_at = 0, k
        with pytest.raises(Planted):
            step(model, batch(0))
    countdown.fails_at = -1
    model.zero_grad()
    step(model, batch(0))
    countdown.error.__traceback__ = None
    assert tensors() <= before


def tensors() -> int:
    gc.collect()
    return sum(isinstance(item, Tensor) for item in gc.get_objects())


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_training_goes_on_behind_a_failed_step(countdown: _Countdown, error: BaseException) -> None:
    """Updates of the last step may be in flight when an op fails."""
    plain, model = twins()
    optimizers = [torch.optim.AdamW(each.parameters(), 0.01) for each in (plain, model)]
    take_steps(plain, optimizers[0], 12)
    take_steps(model, optimizers[1], 2)
    model.zero_grad()
    count = ops_of_a_step(countdown, model)
    for k in range(2, 12):
        countdown.issued, countdown.fails_at, countdown.error = 0, (5 * k) % count, error
        with pytest.raises(type(error)):
            take_steps(model, optimizers[1], 1, start=k)
        countdown.fails_at = -1
        optimizers[1].zero_grad()
        take_steps(model, optimizers[1], 1, start=k)
    assert_same(plain, model)


# --- the user's code fails


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


@contextmanager
def in_forward(model: Any) -> Iterator[None]:
    model.layers[1].fails = True
    yield
    model.layers[1].fails = False


@contextmanager
def in_module_hook(model: Any) -> Iterator[None]:
    def fail(*args: Any) -> None:
        raise Planted("in a module hook")

    handle = model.layers[1].register_forward_hook(fail)
    yield
    handle.remove()


@contextmanager
def in_gradient_hook(model: Any) -> Iterator[None]:
    def fail(gradient: Tensor) -> None:
        raise Planted("in a gradient hook")

    handle = model.layers[1].linear.weight.register_hook(fail)
    yield
    handle.remove()


@contextmanager
def in_accumulate_hook(model: Any) -> Iterator[None]:
    def fail(param: Tensor) -> None:
        raise Planted("in a hook behind the accumulation")

    handle = model.layers[1].linear.weight.register_post_accumulate_grad_hook(fail)
    yield
    handle.remove()


PLACES: dict[str, Callable[[Any], Any]] = {
    "forward": in_forward,
    "module hook": in_module_hook,
    "gradient hook": in_gradient_hook,
    "accumulate hook": in_accumulate_hook,
}


@pytest.mark.parametrize("place", PLACES)
def test_code_of_the_user_may_fail(place: str) -> None:
    torch.manual_seed(0)
    plain, model = zoo.twins(Stack(layers=3, block=Fails))
    optimizers = [torch.optim.AdamW(each.parameters(), 0.01) for each in (plain, model)]
    take_steps(plain, optimizers[0], 4)
    take_steps(model, optimizers[1], 2)
    with PLACES[place](model), pytest.raises(Planted):
        take_steps(model, optimizers[1], 1, start=2)
    optimizers[1].zero_grad()
    take_steps(model, optimizers[1], 2, start=2)
    assert_same(plain, model)


def test_a_loss_that_is_never_differentiated() -> None:
    plain, model = twins()
    for each in (plain, model):
        step(each, batch(0))
    with pytest.raises(Planted):
        model(**batch(1))
        raise Planted("between forward and backward")
    for each in (plain, model):
        step(each, batch(2))
    assert_same(plain, model)


# --- the optimizer fails


def test_an_update_in_the_backward_that_fails_says_so(countdown: _Countdown) -> None:
    """Some layers are updated and some are not: the next backward does not just go on."""
    torch.manual_seed(0)
    model: Any = Stack(layers=2, block=Block)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    megacompile(model, device="cpu", lowering="eager", optimizer=optimizer)
    take_steps(model, optimizer, 1)
    before, states = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    count = ops_of_a_step(countdown, model)
    optimizer.step()
    optimizer.zero_grad()
    model.load_state_dict(before)
    countdown.issued, countdown.fails_at = 0, count - 5
    with pytest.raises(Planted):
        step(model, batch(1))
    countdown.fails_at = -1
    with unguarded():
        now = copy.deepcopy(model.state_dict())
    changed = [name for name, value in now.items() if not equal(value, before[name])]
    assert 0 < len(changed) < len(before), "half updated"
    with pytest.raises(OptimizerError, match="half updated.*backward failed .* with Planted"):
        step(model, batch(1))
    model.load_state_dict(before)
    optimizer.load_state_dict(states)
    take_steps(model, optimizer, 2)  # goes on


# --- NaN and inf


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
    with torch.no_grad():
        model.layers[1].gain[:3] = gain
    return megacompile(model, device="cpu", lowering="eager", **options)


INF = (
    r"backward of stage 'layers.1' \(2B\): the gradient of parameter 'layers.1.gain' has 3 inf "
    r"among 16 elements; what came in is finite: it arises in this stage"
)


def test_inf_is_named_by_stage() -> None:
    with pytest.raises(AnomalyError, match=INF):
        step(rooted(0.0, detect_anomaly=True), batch())


def test_nan_is_named_by_stage_and_the_forward_is_blamed() -> None:
    model = rooted(math.nan, detect_anomaly=True)
    with pytest.raises(AnomalyError, match=r"\(\d+B\).*nan.*look at the forward"):
        step(model, batch())


def test_nan_that_came_from_outside_is_said_to_have() -> None:
    model = rooted(1.0, detect_anomaly=True)
    loss = model(**batch())
    with pytest.raises(AnomalyError, match="came in from behind the stage has 1 nan"):
        (loss * torch.nan).backward()


def test_torchs_own_mode_is_heard_and_says_nan_alone() -> None:
    with torch.autograd.set_detect_anomaly(True):
        step(rooted(0.0), batch())
        with pytest.raises(AnomalyError, match="nan"):
            step(rooted(math.nan), batch())
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        step(rooted(math.nan), batch())


def test_without_it_nothing_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megacompile.runtime.ops.anomaly.check", None)
    model = rooted(0.0)
    step(model, batch())
    assert torch.isinf(model.layers[1].gain.grad[:3]).all()


def test_finite_gradients_pass_and_an_anomaly_leaves_the_next_step_right() -> None:
    torch.manual_seed(0)
    plain: Any = Stack(layers=3, block=Root)
    model = rooted(0.0, detect_anomaly=True)
    with pytest.raises(AnomalyError):
        step(model, batch())
    assert all(p.grad is None for p in model.parameters())
    with torch.no_grad():
        model.layers[1].gain.fill_(1.0)
    for each in (plain, model):
        step(each, batch())
    assert_same(plain, model)


def test_the_option_is_a_flag() -> None:
    with pytest.raises(OptionTypeError, match="'detect_anomaly' got 1"):
        rooted(1.0, detect_anomaly=1)
