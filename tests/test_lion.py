"""Lion (`runtime/optim/lion.py`) against the class of the package lion-pytorch.

The package is not needed: `Lion` here makes the same operations in the same order. How its kernel
agrees with its twin is asked in test_kernels.py, as of every rule.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from megacompile import megacompile, updates
from megacompile.cost.optimizer import OptimizerCost
from megacompile.errors import OptimizerError, OptionError
from megacompile.options import Options
from megacompile.runtime.optim.lion import LION
from megacompile.runtime.optim.registry import rule_of
from megacompile.runtime.optim.twin import function_of
from megacompile.runtime.updates.compiled import compiled
from tests.training import STEPS, assert_states_same, data, groups, net, schedulers, train
from tests.zoo import assert_same, equal, twins

NAME = "layers.1.up.weight"  # a parameter to look at
NUMEL = 5003


class Lion(Optimizer):
    """The optimizer of lion-pytorch."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool = False,
    ) -> None:
        self.first_lr = lr
        self.decoupled_wd = decoupled_weight_decay
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            lr, decay, (beta1, beta2) = group["lr"], group["weight_decay"], group["betas"]
            if self.decoupled_wd:
                decay /= self.first_lr
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                m = state["exp_avg"]
                p.mul_(1.0 - lr * decay)
                p.add_(m.clone().mul_(beta1).add(p.grad, alpha=1.0 - beta1).sign_(), alpha=-lr)
                m.mul_(beta2).add_(p.grad, alpha=1.0 - beta2)
        return loss


Lion.__module__ = "lion_pytorch.lion_pytorch"  # by which it is known


def lion(model: nn.Module, **options: Any) -> list[Optimizer]:
    return [Lion(groups(model), **{"lr": 1e-3, "weight_decay": 0.1, **options})]


def assert_near(want: Tensor, got: Tensor, lr: float, steps: int = STEPS) -> None:
    """Nearly all elements to 1e-6; of a few the sign of a sum near 0 may have been another one."""
    apart = (got - want).abs()
    flipped = apart > 1e-6 * want.abs().max()
    assert flipped.double().mean() <= 2e-3
    assert apart.max() <= 2.5 * lr * steps


def assert_models_near(plain: nn.Module, streamed: nn.Module, lr: float = 1e-3) -> None:
    wants = torch.cat([p.detach().flatten() for p in plain.parameters()])
    assert_near(wants, torch.cat([p.detach().flatten() for p in streamed.parameters()]), lr)


# --- the arithmetic


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"weight_decay": 0.3}, {"betas": (0.5, 0.7)}, {"betas": (0.0, 1.0)}], ids=str
)
def test_the_twin_is_the_packages(options: dict[str, Any], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    leaf = nn.Parameter(torch.randn(NUMEL, dtype=dtype))
    param, m = leaf.detach().clone(), torch.zeros(NUMEL, dtype=dtype)
    optimizer = Lion([leaf], lr=1e-2, **options)
    for _ in range(STEPS):
        grad = torch.randn(NUMEL, dtype=dtype)
        leaf.grad = grad
        optimizer.step()
        hyper = torch.tensor(LION.hyper(optimizer.param_groups[0]), dtype=dtype)
        function_of(LION)(param, grad, (m,), None, hyper)
    assert_near(leaf.detach(), param, 1e-2)
    assert torch.allclose(m, optimizer.state[leaf]["exp_avg"], rtol=1e-5, atol=1e-6)


def test_no_gradient_is_no_step() -> None:
    """The sign of 0 is 0."""
    param, zeros = torch.randn(NUMEL), torch.zeros(NUMEL)
    hyper = torch.tensor(LION.hyper({"lr": 1.0, "betas": (0.9, 0.99), "weight_decay": 0.0}))
    before = param.clone()
    function_of(LION)(param, zeros.clone(), (zeros,), None, hyper)
    assert torch.equal(param, before) and not zeros.any()


# --- optimizer.step() over streamed parameters


def test_ten_steps_are_the_packages_in_every_bit() -> None:
    """Groups, clipping, accumulation and a scheduler."""
    plain, streamed = twins(net())
    of_plain, of_streamed = lion(plain), lion(streamed)
    norms = train(plain, of_plain, of=schedulers(of_plain))
    for want, got in zip(
        norms, train(streamed, of_streamed, of=schedulers(of_streamed)), strict=True
    ):
        assert equal(want, got)
    assert_same(plain, streamed)
    assert_states_same(of_plain[0].state_dict(), of_streamed[0].state_dict())
    assert "torch.optim" in set(updates(streamed).values())


def test_inductor_compiles_the_twin() -> None:
    plain, streamed = twins(net(), lowering="inductor")
    for model in (plain, streamed):
        optimizers = lion(model)
        train(model, optimizers, 2)
        compiled(LION).wait()
        train(model, optimizers)
    assert "compiled to C++" in set(updates(streamed).values())
    assert_models_near(plain, streamed)


def test_handed_over() -> None:
    plain, streamed = twins(net(), lowering="inductor", device_update=0.7)
    for model in (plain, streamed):
        train(model, lion(model))
    assert "on the device" in set(updates(streamed).values())
    assert_models_near(plain, streamed)


def test_in_the_backward() -> None:
    plain: Any = net()
    streamed = copy.deepcopy(plain)
    mine, theirs = lion(plain)[0], lion(streamed)[0]
    megacompile(streamed, device="cpu", lowering="eager", optimizer=theirs)
    for model, optimizer in ((plain, mine), (streamed, theirs)):
        for i in range(STEPS):
            optimizer.zero_grad()
            model(**data(i)).backward()
            optimizer.step()
    assert set(updates(streamed).values()) == {"in the backward"}
    assert_models_near(plain, streamed)
    kept = theirs.state_dict()["state"]
    for number, state in mine.state_dict()["state"].items():
        assert list(kept[number]) == list(state) == ["exp_avg"]
        assert torch.allclose(kept[number]["exp_avg"], state["exp_avg"], atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, "int8"], ids=str)
@pytest.mark.parametrize("backward", [False, True], ids=["step", "backward"])
def test_states_in_another_dtype(dtype: torch.dtype | str, backward: bool) -> None:
    """The parameters move as they do with states in fp32, but for signs of what is near 0."""
    start = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128))
    plain, streamed = start, copy.deepcopy(start)
    before = torch.cat([p.detach().flatten() for p in plain.parameters()])
    mine, theirs = Lion(plain.parameters(), lr=1e-3), Lion(streamed.parameters(), lr=1e-3)
    options: dict[str, Any] = {"optimizer": theirs} if backward else {}
    megacompile(streamed, device="cpu", lowering="eager", state_dtype=dtype, **options)
    for model, optimizer in ((plain, mine), (streamed, theirs)):
        torch.manual_seed(0)
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(torch.randn(8, 128)).square().mean().backward()
            optimizer.step()
    moved = torch.cat([p.detach().flatten() for p in streamed.parameters()]) - before
    wanted = torch.cat([p.detach().flatten() for p in plain.parameters()]) - before
    assert wanted.norm() > 0 and (moved - wanted).norm() <= 0.2 * wanted.norm()
    state = theirs.state[next(streamed.parameters())]["exp_avg"]
    kept = mine.state[next(plain.parameters())]["exp_avg"]
    assert state.dtype == (torch.float32 if dtype == "int8" else dtype)
    assert (state.float() - kept).norm() <= 0.05 * kept.norm()
    assert (state < 0).any(), "its codes are signed"


def test_a_checkpoint_goes_on() -> None:
    """Made by a plain model, loaded into a streamed one, and back."""
    whole, plain = net(), net()
    plain.load_state_dict(whole.state_dict())
    (of_whole,), (of_plain,) = lion(whole), lion(plain)
    train(whole, [of_whole], 6)
    train(plain, [of_plain], 3)
    streamed = net()
    streamed.load_state_dict(plain.state_dict())
    megacompile(streamed, device="cpu", lowering="eager")
    (of_streamed,) = lion(streamed)
    of_streamed.load_state_dict(copy.deepcopy(of_plain.state_dict()))
    train(streamed, [of_streamed], 3, start=3)
    assert_same(whole, streamed)
    assert_states_same(of_whole.state_dict(), of_streamed.state_dict())


# --- refusals


def _option(name: str, value: Any) -> Callable[[Optimizer, Tensor], None]:
    return lambda optimizer, _: optimizer.param_groups[0].update({name: value})


def _state(change: Callable[[Tensor], Any]) -> Callable[[Optimizer, Tensor], None]:
    def put(optimizer: Optimizer, param: Tensor) -> None:
        optimizer.state[param]["exp_avg"] = change(optimizer.state[param]["exp_avg"] + 0)

    return put


BAD: dict[str, tuple[Callable[[Optimizer, Tensor], None], str]] = {
    "lr": (_option("lr", "0.1"), r"param_groups\[0\] has lr='0.1' \(str\); needed a number"),
    "decay": (_option("weight_decay", None), "has weight_decay=None"),
    "betas": (_option("betas", (0.9,)), r"has betas=\(0.9,\) .*needed two numbers"),
    "shape": (_state(lambda m: m[:8]), rf"'exp_avg' of parameter '{NAME}' has shape \(8, 16\)"),
    "dtype": (_state(lambda m: m.long()), "is torch.int64"),
    "missing": (
        lambda o, p: o.state[p].update(other=o.state[p].pop("exp_avg")),
        f"'exp_avg' of parameter '{NAME}' is missing",
    ),
}


@pytest.mark.parametrize("way", ["own step", "rule", "backward"])
@pytest.mark.parametrize("name", BAD)
def test_refused_before_anything_changes(name: str, way: str) -> None:
    bad, says = BAD[name]
    model: Any = net()
    (optimizer,) = lion(model)
    options: dict[str, Any] = {"optimizer": optimizer} if way == "backward" else {}
    options |= {"state_dtype": torch.bfloat16} if way == "rule" else {}
    megacompile(model, device="cpu", lowering="eager", **options)
    _one_step(model, optimizer)
    bad(optimizer, model.get_parameter(NAME))
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(OptimizerError, match=says) as caught:
        _one_step(model, optimizer)
    assert "nothing was updated" in str(caught.value)
    for want, param in zip(before, model.parameters(), strict=True):
        assert torch.equal(want, param.detach())


def _one_step(model: Any, optimizer: Optimizer) -> None:
    optimizer.zero_grad()
    model(**data(0)).backward()
    optimizer.step()


@pytest.mark.filterwarnings("default")
def test_decoupled_weight_decay_is_its_own_step() -> None:
    """The decay is then divided by an lr that no parameter group has."""
    plain, streamed = twins(net())
    for model in (plain, streamed):
        optimizers = lion(model, decoupled_weight_decay=True)
        if model is streamed:
            with pytest.warns(UserWarning, match="Lion keeps torch.optim's path .* divides by"):
                train(model, optimizers)
        else:
            train(model, optimizers)
    assert_same(plain, streamed)
    with pytest.raises(OptionError, match=r"optimizer=Lion \(decoupled_weight_decay=True"):
        megacompile(net(), device="cpu", optimizer=lion(net(), decoupled_weight_decay=True)[0])


def test_another_lion_is_not_this_one() -> None:
    class Lion(Optimizer):
        """May do anything in its step."""

    assert rule_of(Lion([nn.Parameter(torch.zeros(1))], {})) is None


def test_the_plan_counts_one_state() -> None:
    optimizer = Lion([nn.Parameter(torch.zeros(1))])
    options = Options.resolve(device="cpu", optimizer=optimizer)
    assert OptimizerCost.of(options).states == 1
