"""What an optimizer cannot go on from is refused when the step begins, and nothing has changed.

Each case is tried where torch.optim's own step makes the update, where a rule of ours does, and in
the backward; the plain loop raises too, at another point and with less of a message.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Adam, AdamW, Muon, Optimizer

from megacompile import megacompile
from megacompile.errors import OptimizerError
from megacompile.runtime.updates import refusals
from tests import inside, zoo
from tests.training import groups, take_steps

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
    "muon": lambda m: Muon([p for p in m.parameters() if p.dim() == 2], lr=1e-2),
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


# name: (optimizer, what is done, what the error says)
OPTIONS: dict[str, tuple[str, Bad, str]] = {
    "lr is text": ("adamw", option("lr", "0.1"), r"param_groups\[1\] has lr='0.1' \(str\); needed"),
    "lr is None": ("sgd", option("lr", None), r"param_groups\[1\] has lr=None"),
    "momentum is text": ("sgd", option("momentum", "0.9"), "momentum='0.9'"),
    "one beta": ("adamw", option("betas", (0.9,)), r"betas=\(0.9,\)"),
    "beta of 1": ("adamw", option("betas", (1.0, 0.999)), r"betas=\(1.0, 0.999\)"),
    "beta above 1": ("adamw", option("betas", (0.9, 1.5)), r"betas=\(0.9, 1.5\)"),
    "no eps": ("adamw", lambda o, _: o.param_groups[1].pop("eps"), "has no eps"),
    "amsgrad later": (
        "adamw",
        option("amsgrad", True),
        "'max_exp_avg_sq' of .* is missing .amsgrad=True",
    ),
}
STATES: dict[str, tuple[str, Bad, str]] = {
    "half of it": ("adamw", state("exp_avg", lambda t: t[:8]), r"shape \(8, 16\); needed \(32, 16"),
    "one element": ("adamw", state("exp_avg_sq", lambda t: t[:1, :1]), r"shape \(1, 1\)"),
    "flat": ("sgd", state("momentum_buffer", torch.flatten), r"shape \(512,\); needed"),
    "loaded": ("adamw", state("exp_avg", lambda t: t[:8], load=True), r"shape \(8, 16\); needed"),
    "max": ("adam, amsgrad", state("max_exp_avg_sq", lambda t: t[0]), r"shape \(16,\); needed"),
    "a list": ("adamw", state("exp_avg", lambda t: t.tolist()), "'exp_avg' .* is a list; needed"),
    "whole numbers": ("adamw", state("exp_avg", lambda t: t.long()), "is torch.int64"),
    "complex": ("sgd", state("momentum_buffer", lambda t: t + 1j), "is torch.complex64"),
    "no exp_avg_sq": (
        "adamw",
        without("exp_avg_sq"),
        f"'exp_avg_sq' of parameter '{NAME}' is miss",
    ),
    "no step": ("adamw", without("step"), "'step' .* is missing"),
    "two steps": ("adamw", state("step", lambda t: t.expand(2).clone()), "'step' .* needed one"),
}
STOCK: dict[str, tuple[str, Bad, str]] = {
    "float64": ("adamw", state("exp_avg", lambda t: t.double()), "own step refuses .*RuntimeError"),
    "muon, shape": ("muon", state("momentum_buffer", lambda t: t[:8]), r"shape \(8, 16\); needed"),
    "muon, option": ("muon", option("ns_coefficients", (1.0,)), "own step refuses .*ValueError"),
    "adafactor, shape": ("adafactor", state("row_var", lambda t: t[:8]), r"needed \(32, 1\)"),
    "adafactor, option": ("adafactor", option("eps", 1e-3), "own step refuses .*TypeError"),
    "adafactor, no step": ("adafactor", without("step"), "'step' .* is missing"),
    "tensor lr": ("adamw", tensor_lr, "own step refuses .*RuntimeError"),
}


def backward(model: Any, seed: int) -> None:
    zoo.step(model, zoo.batch(seed))


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


def made(case: str, options: dict[str, Any], way: str) -> tuple[Any, Optimizer]:
    model = net()
    optimizer = MAKES[case](model)
    if way == "backward":
        options = {**options, "optimizer": optimizer}
    return megacompile(model, device="cpu", lowering="eager", **options), optimizer


TRIES = [(way, case) for way in WAYS for case in ("adamw", "adam, amsgrad", "sgd")]
TRIES += [("torch.optim", "muon"), ("torch.optim", "adafactor")]


@pytest.mark.parametrize(("way", "case"), TRIES)
def test_refused_before_anything_changes(way: str, case: str) -> None:
    """One bad thing after the other; behind each a checkpoint is loaded."""
    tries = OPTIONS | STATES | (STOCK if way == "torch.optim" else {})
    whole, mine = made(case, WAYS[way], way)
    model, optimizer = made(case, WAYS[way], way)
    for each, of_it in ((whole, mine), (model, optimizer)):
        take_steps(each, of_it, 2)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    for name, (kind, bad, says) in tries.items():
        if kind != case:
            continue
        bad(optimizer, model.get_parameter(NAME))
        before = snapshot(model, optimizer)
        model.zero_grad()
        with pytest.raises(OptimizerError, match=says) as caught:
            backward(model, 2)
            assert way != "backward", f"{name}: the update was made"
            optimizer.step()
        assert "nothing was updated" in str(caught.value)
        buckets = inside.buckets(model).values()
        assert all(bucket.pending.in_flight is None for bucket in buckets)
        after = snapshot(model, optimizer)
        assert all(zoo.equal(a, b) for a, b in zip(before, after, strict=True)), name
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
    for each, of_it in ((whole, mine), (model, optimizer)):
        take_steps(each, of_it, 2, start=2)
    zoo.assert_same(whole, model)


@pytest.mark.parametrize("name", OPTIONS | STATES | STOCK)
def test_the_plain_loop_raises_too(name: str) -> None:
    case, bad, _ = (OPTIONS | STATES | STOCK)[name]
    model = net()
    optimizer = MAKES[case](model)
    take_steps(model, optimizer, 2)
    bad(optimizer, model.get_parameter(NAME))
    errors = (TypeError, LookupError, ValueError, RuntimeError, ArithmeticError, AttributeError)
    with pytest.raises(errors):
        take_steps(model, optimizer, 1, start=2)


@pytest.mark.parametrize("way", WAYS)
def test_what_torchs_step_takes_is_taken(way: str) -> None:
    """Constructors refuse a negative lr, steps take it: some schedulers end a little below 0."""
    plain = net()
    of_plain = MAKES["sgd"](plain)
    model, optimizer = made("sgd", {**WAYS[way], "state_dtype": None}, way)
    for i, value in enumerate([-1e-2, -1e-20, 0.0, torch.tensor(1e-3), torch.inf, torch.nan]):
        for each, of_it in ((plain, of_plain), (model, optimizer)):
            for group in of_it.param_groups:
                group["lr"] = value
            take_steps(each, of_it, 1, start=i)
        for want, got in zip(plain.parameters(), model.parameters(), strict=True):
            assert torch.allclose(want, got, equal_nan=True, rtol=1e-5, atol=1e-7)


def test_nesterov_without_momentum() -> None:
    """Momentum set to 0 later: torch's step goes by the momentum."""
    plain = net()
    model = copy.deepcopy(plain)
    optimizers = [
        SGD(each.parameters(), lr=1e-2, momentum=0.9, nesterov=True) for each in (plain, model)
    ]
    megacompile(model, device="cpu", lowering="eager", optimizer=optimizers[1])
    for each, optimizer in zip((plain, model), optimizers, strict=True):
        take_steps(each, optimizer, 2)
        for group in optimizer.param_groups:
            group["momentum"] = 0.0
        take_steps(each, optimizer, 2, start=2)
    for want, got in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.allclose(want, got, rtol=1e-5, atol=1e-7)


def test_what_went_well_is_not_rehearsed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own step runs on stand-ins where something has changed since: an option, a state."""
    torch.manual_seed(0)
    model = megacompile(nn.Linear(4, 4), device="cpu", lowering="eager", progress=False)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    rehearsed: list[float] = []
    plain = refusals._rehearse

    def noted(where: str, optimizer: Optimizer, update: Any, step: Any) -> None:
        rehearsed.append(step.group["lr"])
        plain(where, optimizer, update, step)

    monkeypatch.setattr(refusals, "_rehearse", noted)

    def take_a_step() -> int:
        before = len(rehearsed)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return len(rehearsed) - before

    assert [take_a_step() for _ in range(4)] == [2, 2, 0, 0], "without states, then with some"
    optimizer.param_groups[0]["lr"] = 1e-3
    assert [take_a_step() for _ in range(2)] == [2, 0], "a weight and a bias"
    optimizer.param_groups[0]["lr"] = torch.tensor(1e-3)
    assert [take_a_step() for _ in range(2)] == [2, 2], "a tensor may change unseen"
    optimizer.param_groups[0]["lr"] = "fast"
    with pytest.raises(OptimizerError, match="lr"):
        take_a_step()
