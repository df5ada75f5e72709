"""What an optimizer cannot go on from is refused when the step begins, and nothing has changed.

Each case is tried where torch.optim's own step makes the update, where a rule of ours does, on
residents, and in the backward; the plain loop raises too, at another point.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Adam, AdamW, Optimizer

from megacompile import megacompile
from megacompile.errors import OptimizerError
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
