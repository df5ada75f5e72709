"""`optimizer.step()` returns before its updates are done; whoever looks waits for them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from megacompile.errors import OptimizerError
from megacompile.runtime.params.guards import GuardedParameter
from tests.gate import Gate, in_flight
from tests.training import (
    BUCKET,
    NAME,
    adamw,
    assert_states_same,
    data,
    gradients,
    net,
    through_file,
    train,
)
from tests.zoo import WIDTH, assert_same, equal, twins


def lerped(model: Any, _: Optimizer) -> Any:
    return torch.ones(2 * WIDTH, WIDTH).lerp_(model.get_parameter(NAME), 0.25)


def edited(model: Any, _: Optimizer) -> Any:
    param = model.get_parameter(NAME)
    with torch.no_grad():
        param.mul_(2).add_(1)
    return param.detach().clone()


def filled(model: Any, _: Optimizer) -> Any:
    nn.init.constant_(model.get_parameter(NAME)[3:], 5.0)
    return model.get_parameter(NAME).detach().clone()


def eval_forward(model: Any, _: Optimizer) -> Any:
    with torch.no_grad():
        return model.eval()(data(99)["x"])


def state_of(model: Any, optimizer: Optimizer) -> Any:
    return optimizer.state[model.get_parameter(NAME)]["exp_avg_sq"].clone()


USES: dict[str, Callable[[Any, Optimizer], Any]] = {
    "p": lambda m, _: m.get_parameter(NAME) + 0,
    "p.sum()": lambda m, _: m.get_parameter(NAME).sum(),
    "p.numpy()": lambda m, _: torch.tensor(m.get_parameter(NAME).detach().numpy()),
    "p.data": lambda m, _: m.get_parameter(NAME).data.clone(),
    "p[0, 0].item()": lambda m, _: m.get_parameter(NAME)[0, 0].item(),
    "p.grad": lambda m, _: m.get_parameter(NAME).grad * 1,
    "a state": state_of,
    "state_dict": lambda m, _: m.state_dict(),
    "torch.save(state_dict)": lambda m, _: through_file(m.state_dict()),
    "optimizer's torch.save": lambda _, o: through_file(o.state_dict()),
    "optimizer's deepcopy": lambda _, o: copy.deepcopy(o.state_dict()),
    "deepcopy(model)": lambda m, _: copy.deepcopy(m).state_dict(),
    "deepcopy(p)": lambda m, _: copy.deepcopy(m.get_parameter(NAME)).detach(),
    "lerp_": lerped,
    "edit": edited,
    "init of a part": filled,
    "torch.stack": lambda m, _: torch.stack([m.get_parameter(NAME), torch.ones(32, 16)]),
    "foreach": lambda m, _: list(torch._foreach_mul([m.get_parameter(NAME).detach()], 2.0)),
    "parameters_to_vector": lambda m, _: nn.utils.parameters_to_vector(m.parameters()),
    "clip_grad_norm_": lambda m, _: nn.utils.clip_grad_norm_(m.parameters(), 0.1),
    "eval forward": eval_forward,
    "a submodule alone": lambda m, _: m.layers[1](torch.ones(2, WIDTH)),
}


def detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


@pytest.mark.parametrize("use", USES)
def test_a_use_waits_and_sees_the_new_value(gate: Gate, use: str) -> None:
    (plain, mine), (streamed, theirs) = in_flight(gate)
    want, got = USES[use](plain, mine), USES[use](streamed, theirs)
    assert BUCKET in gate.waited
    assert_states_same(detached(want), detached(got))
    assert type(streamed.get_parameter(NAME)) is nn.Parameter
    assert_same(plain, streamed)


def test_a_use_waits_for_its_bucket_alone(gate: Gate) -> None:
    _, (streamed, theirs) = in_flight(gate)
    param, last = streamed.get_parameter(NAME), streamed.head.weight
    assert isinstance(param, GuardedParameter)
    param.sum()
    assert gate.waited == [BUCKET]
    assert gate.ran[-1] == BUCKET and "head+spare" not in gate.ran
    assert type(param) is nn.Parameter
    assert type(param.grad) is Tensor
    assert type(theirs.state[param]["exp_avg"]) is Tensor
    assert isinstance(last, GuardedParameter) and isinstance(last, nn.Parameter)


def test_metadata_does_not_wait(gate: Gate) -> None:
    _, (streamed, theirs) = in_flight(gate)
    param = streamed.get_parameter(NAME)
    assert param.shape == (2 * WIDTH, WIDTH) and param.dtype == torch.float32
    assert (param.numel(), param.dim(), param.device.type) == (512, 2, "cpu")
    assert param.requires_grad and param.is_leaf and param.grad is not None
    assert isinstance(param, nn.Parameter) and isinstance(param, Tensor)
    assert param in theirs.state and len({param, param}) == 1
    assert sum(p.numel() for p in streamed.parameters() if p.requires_grad) > 0
    theirs.zero_grad()
    assert param.grad is None
    assert gate.waited == []


def test_the_next_forward_waits_bucket_after_bucket(gate: Gate) -> None:
    (plain, mine), (streamed, theirs) = in_flight(gate)
    order = gate.names()
    assert order.index("embed") < order.index("layers.0") < order.index("layers.2")
    assert order[-1] == "head+spare", "in the order in which the forward reads them"
    theirs.zero_grad()
    mine.zero_grad()
    assert gate.waited == []
    with torch.no_grad():
        assert equal(plain(**data(7)), streamed(**data(7)))
    assert gate.waited == [name for name in order if name in gate.waited]
    assert gate.waited[-1] == "head+spare"
    assert_same(plain, streamed)


def test_lr_changed_at_once_is_for_the_next_step(gate: Gate) -> None:
    (plain, _), (streamed, theirs) = in_flight(gate)
    for group in theirs.param_groups:
        group["lr"] = 1000.0
    assert gate.waited == []
    assert_same(plain, streamed)


def test_zeroed_gradients_are_not_those_of_the_step_in_flight(gate: Gate) -> None:
    (plain, mine), (streamed, theirs) = in_flight(gate)
    for optimizer in (mine, theirs):
        optimizer.zero_grad(set_to_none=False)
    assert BUCKET in gate.waited
    assert_same(plain, streamed)
    for model, optimizer in ((plain, mine), (streamed, theirs)):
        for i in range(3, 6):
            gradients(model, i)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    assert_same(plain, streamed)


def test_the_next_backward_does_not_overwrite_gradients_in_flight(gate: Gate) -> None:
    (plain, mine), (streamed, theirs) = in_flight(gate)
    for model, optimizer in ((plain, mine), (streamed, theirs)):
        optimizer.zero_grad()
        gradients(model, 3)
        optimizer.step()
    assert_same(plain, streamed)


ALIASES: dict[str, Callable[[Any, Optimizer], Any]] = {
    "p.detach()": lambda m, _: m.get_parameter(NAME).detach(),
    "p.data": lambda m, _: m.get_parameter(NAME).data,
    "a view": lambda m, _: m.get_parameter(NAME).detach()[2:],
    "numpy": lambda m, _: m.get_parameter(NAME).detach().numpy(),
    "state_dict": lambda m, _: m.state_dict(),
    "a state's view": lambda m, o: o.state[m.get_parameter(NAME)]["exp_avg"].view(-1),
}


@pytest.mark.parametrize("kind", ALIASES)
def test_an_alias_makes_step_wait_for_its_bucket(gate: Gate, kind: str) -> None:
    _, streamed = twins(net())
    (optimizer,) = adamw(streamed)
    train(streamed, [optimizer], 2)
    alias = ALIASES[kind](streamed, optimizer)
    optimizer.zero_grad()
    gradients(streamed, 2)
    gate.reuse()
    optimizer.step()
    assert BUCKET in gate.waited
    if kind != "state_dict":
        assert gate.waited == [BUCKET]
    del alias


@pytest.mark.parametrize("use", ["p", "call", "step", "load_state_dict"])
def test_a_failed_update_is_said_until_a_checkpoint_is_loaded(gate: Gate, use: str) -> None:
    plain, streamed = twins(net())
    (mine,), (theirs,) = adamw(plain), adamw(streamed)
    train(plain, [mine], 2)
    train(streamed, [theirs], 2)
    checkpoint = copy.deepcopy((plain.state_dict(), mine.state_dict()))
    theirs.zero_grad()
    gradients(streamed, 2)
    gate.fails = BUCKET
    theirs.step()
    uses: dict[str, Callable[[], Any]] = {
        "p": lambda: streamed.get_parameter(NAME).sum(),
        "call": lambda: streamed(**data(0)),
        "step": lambda: theirs.step(),
        "load_state_dict": lambda: streamed.load_state_dict(checkpoint[0]),
    }
    if use == "load_state_dict":  # which makes parameters whole, and waits for the update
        uses[use]()
    else:
        with pytest.raises(OptimizerError, match=f"'{BUCKET}'.*out of numbers") as e:
            uses[use]()
        assert isinstance(e.value.__cause__, ArithmeticError)
        with pytest.raises(OptimizerError, match="half updated.*load one into the model and into"):
            uses[use]()
    gate.fails = ""
    streamed.load_state_dict(checkpoint[0])
    with pytest.raises(OptimizerError, match="half updated"):
        theirs.step()
    theirs.load_state_dict(checkpoint[1])
    train(plain, [mine], 3, start=2)
    train(streamed, [theirs], 3, start=2)
    assert_same(plain, streamed)
    assert_states_same(mine.state_dict(), theirs.state_dict())
