"""The update in the backward: `megacompile(model, optimizer=...)`, against the plain loop."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from megacompile import megacompile
from megacompile.api import accumulate
from megacompile.errors import (
    BackwardError,
    ModelError,
    OptimizerError,
    OptionError,
    OptionTypeError,
)
from tests import inside, zoo
from tests.training import groups
from tests.zoo import WIDTH, assert_close, batch, mixed

STEPS = 10

Make = Callable[[nn.Module], Optimizer]


CASES: dict[str, Make] = {
    "adamw": lambda m: AdamW(groups(m, lr=1e-3), lr=1e-2, weight_decay=0.1),
    "adam, amsgrad": lambda m: Adam(groups(m, lr=1e-3), lr=1e-2, weight_decay=0.1, amsgrad=True),
    "sgd": lambda m: SGD(groups(m, lr=1e-3), lr=0.1, weight_decay=0.01),
    "sgd, momentum": lambda m: SGD(groups(m, lr=1e-3), lr=0.1, momentum=0.9, dampening=0.1),
    "sgd, nesterov": lambda m: SGD(groups(m, lr=1e-3), lr=0.1, momentum=0.9, nesterov=True),
}


def pair(case: str = "adamw") -> tuple[tuple[Any, Optimizer], tuple[Any, Optimizer]]:
    """(plain, its optimizer), (megacompiled with its optimizer, that)."""
    plain = mixed()[0]
    streamed = copy.deepcopy(plain)
    mine, theirs = CASES[case](plain), CASES[case](streamed)
    megacompile(streamed, device="cpu", lowering="eager", optimizer=theirs)
    return (plain, mine), (streamed, theirs)


def train(
    model: Any, optimizer: Optimizer, steps: int = STEPS, *, start: int = 0, micro: int = 1
) -> None:
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 1.0 / (1 + i))
    streamed = inside.is_streamed(model)
    for i in range(start, start + steps):
        for k in range(micro):
            waits = streamed and k + 1 < micro
            with accumulate(model) if waits else contextlib.nullcontext():
                (model(**batch(micro * i + k)) / micro).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    for group in optimizer.param_groups:
        group["lr"] = group.pop("initial_lr")


def host_gradients(model: Any) -> int:
    """How many gradients have host memory."""
    return sum(len(b.grads) for b in inside.buckets(model).values())


# --- numbers


@pytest.mark.parametrize("case", CASES)
def test_ten_steps(case: str) -> None:
    (plain, mine), (streamed, theirs) = pair(case)
    train(plain, mine)
    train(streamed, theirs)
    assert_close(plain, streamed)
    assert host_gradients(streamed) == 0


@pytest.mark.parametrize("case", ["adamw", "sgd, momentum"])
def test_micro_batches(case: str) -> None:
    (plain, mine), (streamed, theirs) = pair(case)
    train(plain, mine, micro=3)
    train(streamed, theirs, micro=3)
    assert_close(plain, streamed)


def test_what_gets_no_gradient_stays() -> None:
    _, (streamed, theirs) = pair()
    names = ("layers.0.norm.weight", "layers.1.extra", "spare.weight")
    before = {name: streamed.get_parameter(name).detach().clone() for name in names}
    train(streamed, theirs, 2)
    for name, value in before.items():
        param = streamed.get_parameter(name)
        assert torch.equal(param.detach(), value)
        assert param.grad is None
        assert param not in theirs.state


def test_the_gradient_of_an_input() -> None:
    (plain, _), (streamed, _) = pair()
    found = []
    for model in (plain, streamed):
        inputs = batch(1)
        inputs["x"].requires_grad_()
        model(**inputs).backward()
        found.append(inputs["x"].grad)
    assert zoo.equal(*found)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(set_to_none: bool) -> None:
    (plain, mine), (streamed, theirs) = pair()
    for model, optimizer in ((plain, mine), (streamed, theirs)):
        for i in range(4):
            optimizer.zero_grad(set_to_none=set_to_none)
            model(**batch(i)).backward()
            optimizer.step()
            if i % 2:
                model.zero_grad(set_to_none=set_to_none)
    assert_close(plain, streamed)


def test_zero_grad_between_backward_and_step() -> None:
    """The update has been made; the plain loop would have skipped the step."""
    _, (streamed, theirs) = pair()
    streamed(**batch(0)).backward()
    theirs.zero_grad(set_to_none=False)
    gradient = streamed.head.weight.grad
    assert gradient is not None and gradient.shape == (WIDTH, WIDTH)


@pytest.mark.parametrize("case", ["adamw", "adam, amsgrad", "sgd, momentum"])
def test_states_move_between_plain_and_streamed(case: str) -> None:
    (plain, mine), (streamed, theirs) = pair(case)
    reference = copy.deepcopy(plain)
    of_reference = CASES[case](reference)
    for start in (0, 3, 6):
        train(reference, of_reference, 3, start=start)
    train(plain, mine, 3)
    streamed.load_state_dict(plain.state_dict())
    theirs.load_state_dict(copy.deepcopy(mine.state_dict()))
    train(streamed, theirs, 3, start=3)
    states = theirs.state_dict()
    assert states.keys() == mine.state_dict().keys()
    assert {k: list(v) for k, v in states["state"].items()} == {
        k: list(v) for k, v in mine.state_dict()["state"].items()
    }
    plain.load_state_dict(streamed.state_dict())
    mine.load_state_dict(copy.deepcopy(states))
    train(plain, mine, 3, start=6)
    assert_close(reference, plain)


def test_autograd_grad_takes_gradients_and_updates_nothing() -> None:
    (plain, _), (streamed, _) = pair()
    before = streamed.head.weight.detach().clone()
    found = [
        torch.autograd.grad(model(**batch(0)), [model.head.weight, model.layers[1].up.weight])
        for model in (plain, streamed)
    ]
    for want, got in zip(*found, strict=True):
        assert zoo.equal(want, got)
    assert torch.equal(streamed.head.weight.detach(), before)
    assert streamed.head.weight.grad is None


# --- what it cannot do


def gone() -> tuple[Any, Optimizer]:
    """After a backward."""
    _, (streamed, theirs) = pair()
    streamed(**batch(0)).backward()
    return streamed, theirs


USES: dict[str, Callable[[Any], Any]] = {
    "a product": lambda m: m.head.weight.grad * 2,
    "norm": lambda m: m.head.weight.grad.norm(),
    "item": lambda m: m.head.bias.grad[0].item(),
    "clip_grad_norm_ by another norm": lambda m: nn.utils.clip_grad_norm_(m.parameters(), 1.0, 1),
    "clip_grad_value_": lambda m: nn.utils.clip_grad_value_(m.parameters(), 1.0),
    "add_": lambda m: m.head.weight.grad.add_(2),
    "deepcopy": lambda m: copy.deepcopy(m.head.weight.grad),
}


@pytest.mark.parametrize("use", USES)
def test_a_gradient_that_is_gone_says_so(use: str) -> None:
    streamed, theirs = gone()
    with pytest.raises(OptimizerError, match="p.grad of '.*' is not there") as caught:
        USES[use](streamed)
    assert "leave out optimizer=" in str(caught.value)
    assert streamed.head.weight.grad.shape == (WIDTH, WIDTH)
    theirs.step()
    assert streamed.head.weight.grad is None


# --- the norm of the gradients, which loops log


NORMS: dict[str, Callable[[nn.Module], Tensor]] = {
    "clip_grad_norm_": lambda m: nn.utils.clip_grad_norm_(m.parameters(), torch.inf),
    "not foreach": lambda m: nn.utils.clip_grad_norm_(m.parameters(), torch.inf, foreach=False),
    "get_total_norm": lambda m: nn.utils.get_total_norm(
        [p.grad for p in m.parameters() if p.grad is not None]
    ),
    "of one": lambda m: torch.linalg.vector_norm(m.get_parameter("head.weight").grad),
    "a limit above it": lambda m: nn.utils.clip_grad_norm_(m.parameters(), 1e6),
}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("micro", [1, 2])
def test_the_norm_is_that_of_the_plain_loop(norm: str, micro: int) -> None:
    (plain, mine), (streamed, theirs) = pair()
    for i in range(3):
        found = []
        for model, optimizer in ((plain, mine), (streamed, theirs)):
            for k in range(micro):
                waits = model is streamed and k + 1 < micro
                with accumulate(model) if waits else contextlib.nullcontext():
                    model(**batch(micro * i + k)).backward()
            found.append(NORMS[norm](model))
            optimizer.step()
            optimizer.zero_grad()
        assert found[1].shape == () and found[1].dtype == found[0].dtype
        torch.testing.assert_close(*found, rtol=1e-5, atol=0)
    assert_close(plain, streamed)


@pytest.mark.parametrize("foreach", [None, False])
def test_clipping_comes_too_late(foreach: bool | None) -> None:
    streamed, theirs = gone()
    with pytest.raises(OptimizerError, match=r"cannot be multiplied by 0.*made the update.*inf"):
        nn.utils.clip_grad_norm_(streamed.parameters(), 1e-3, foreach=foreach)
    theirs.step()


def test_the_norm_with_gradients_of_others() -> None:
    """Of a part that the optimizer of the model does not update, and of one that is lazy."""
    (plain, _), (streamed, _) = pair()
    other = nn.Linear(3, 3)
    lazy = megacompile(copy.deepcopy(plain), device="cpu", lowering="eager")
    norms = []
    for model in (plain, streamed):
        lazy.zero_grad()
        other.zero_grad()
        model(**batch(0)).backward()
        other(torch.ones(3)).sum().backward()
        lazy(**batch(1)).backward()
        params = [*model.parameters(), *other.parameters(), *lazy.parameters()]
        norms.append(nn.utils.clip_grad_norm_(params, torch.inf))
    torch.testing.assert_close(*norms)


def test_zero_grad_zeroes_those_of_others() -> None:
    _, (streamed, _) = pair()
    other = nn.Linear(3, 3)
    optimizer = SGD([*streamed.parameters(), *other.parameters()], foreach=True)
    streamed(**batch(0)).backward()
    other(torch.ones(3)).sum().backward()
    optimizer.zero_grad(set_to_none=False)
    assert other.weight.grad is not None and not other.weight.grad.any()


@pytest.mark.parametrize("several", [False, True])
def test_a_scaled_loss_is_refused_in_time(several: bool) -> None:
    (plain, mine), (streamed, theirs) = pair()
    scaler = torch.amp.GradScaler("cpu")
    for model, optimizer in ((plain, mine), (streamed, theirs)):
        train(model, optimizer, 1)
        if model is streamed:
            loss = model(**batch(1))
            scaled: Any = scaler.scale([loss])[0] if several else scaler.scale(loss)
            with pytest.raises(
                OptimizerError, match=r"scaled by a GradScaler.*nothing was updated"
            ):
                scaled.backward()
            model.zero_grad()
        train(model, optimizer, 2, start=1)
    assert_close(plain, streamed)


def test_a_scaler_that_is_not_enabled() -> None:
    """And one that scales a loss of something else."""
    (plain, mine), (streamed, theirs) = pair()
    off, other = torch.amp.GradScaler("cpu", enabled=False), torch.amp.GradScaler("cpu")
    weight = torch.ones(2, requires_grad=True)
    for model, optimizer in ((plain, mine), (streamed, theirs)):
        for i in range(3):
            scaled: Any = other.scale(weight.sum())
            scaled.backward()
            loss: Any = off.scale(model(**batch(i)))
            loss.backward()
            off.step(optimizer)
            off.update()
            optimizer.zero_grad()
    assert_close(plain, streamed)


def test_gradients_that_are_unscaled_too_late() -> None:
    _, (streamed, theirs) = pair()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    (streamed(**batch(0)) * scaler.get_scale()).backward()
    with pytest.raises(
        OptimizerError, match=r"cannot be unscaled.*has made the update.*checkpoint"
    ):
        scaler.unscale_(theirs)


def test_a_second_backward_before_step() -> None:
    streamed, theirs = gone()
    with pytest.raises(OptimizerError, match="updated in a backward already.*accumulate"):
        streamed(**batch(1)).backward()
    theirs.step()
    streamed(**batch(1)).backward()
    theirs.step()


def test_a_forward_without_gradients_between_backward_and_step() -> None:
    """It is captured there, and Dynamo asks each parameter whether it has a gradient."""
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    optimizer = SGD(plain.parameters(), lr=0.1)
    model = megacompile(plain, device="cpu", lowering="eager", optimizer=optimizer)
    x = torch.randn(2, WIDTH)
    model(x).mean().backward()
    with torch.no_grad():
        assert model(x).shape == x.shape
    optimizer.step()


def test_an_option_changed_between_backward_and_step() -> None:
    streamed, theirs = gone()
    lr = theirs.param_groups[0]["lr"]
    theirs.param_groups[0]["lr"] = 0.5
    with pytest.raises(OptimizerError, match=r"lr: 0\.01 -> 0\.5.*change it after step\(\)"):
        theirs.step()
    theirs.param_groups[0]["lr"] = lr
    theirs.step()
    assert theirs.state[streamed.head.weight]["step"] == 1


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_are_refused(kind: str) -> None:
    _, (streamed, _) = pair()
    getattr(streamed.head.weight, kind)(lambda *_: None)
    with pytest.raises(BackwardError, match="'head.weight' is wanted by a hook.*accumulate"):
        streamed(**batch(0)).backward()


def test_optimizers_that_cannot() -> None:
    model = mixed()[0]
    with pytest.raises(OptionError, match="optimizer=Adagrad; needed .*AdamW, Adam"):
        megacompile(model, device="cpu", optimizer=Adagrad(model.parameters()))
    with pytest.raises(OptionTypeError, match="'optimizer' got 3"):
        megacompile(model, device="cpu", optimizer=3)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="differentiable or capturable"):
        options: Any = {"differentiable": True}
        megacompile(model, device="cpu", optimizer=AdamW(model.parameters(), **options))
    assert not inside.is_streamed(model)


def test_a_parameter_that_is_not_in_the_optimizer() -> None:
    model = mixed()[0]
    optimizer = AdamW([p for n, p in model.named_parameters() if n != "head.bias"])
    with pytest.raises(OptionError, match="head.bias is not in the optimizer"):
        megacompile(model, device="cpu", optimizer=optimizer)
    model.head.bias.requires_grad_(False)
    megacompile(model, device="cpu", optimizer=optimizer)


def test_accumulate_needs_an_optimizer() -> None:
    model = mixed()[0]
    for _ in range(2):
        with pytest.raises(ModelError, match=r"accumulate\(\): Stack was not megacompiled with"):
            with accumulate(model):
                raise AssertionError("not reached")
        megacompile(model, device="cpu")


def test_within_accumulate_gradients_are_there() -> None:
    (plain, _), (streamed, _) = pair()
    plain(**batch(0)).backward()
    with accumulate(streamed):
        streamed(**batch(0)).backward()
    zoo.assert_same(plain, streamed)
    want: Tensor = nn.utils.clip_grad_norm_(plain.parameters(), 1e-2)
    assert zoo.equal(want, nn.utils.clip_grad_norm_(streamed.parameters(), 1e-2))
    zoo.assert_same(plain, streamed)
