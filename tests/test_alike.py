"""Steps over buckets that live on the device that are like the one before them."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from megacompile import compat, megacompile, unmegacompile, updates
from megacompile.errors import OptimizerError
from megacompile.runtime.optim.adam import ADAM
from megacompile.runtime.optim.kernels.table import describe, known, launches, renewed
from megacompile.runtime.optim.update import Update
from megacompile.runtime.step.alike import Alike
from tests import inside
from tests.training import adamw, data, groups, net
from tests.zoo import equal

BF16 = torch.bfloat16


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each step that another came before: was it like that?"""
    found: list[bool] = []
    again = Alike.again

    def noted(self: Alike, *args: Any) -> Any:
        step = again(self, *args)
        found.append(step is not None)
        return step

    monkeypatch.setattr(Alike, "again", noted)
    return found


def streamed() -> Any:
    """A model that all is resident of, which a rule updates."""
    return megacompile(
        net(), device="cpu", lowering="eager", resident="all", state_dtype=BF16, progress=False
    )


def steps(model: Any, optimizer: Optimizer, between: Callable[[Any, Any, int], None]) -> None:
    for i in range(6):
        model(**data(i)).backward()
        between(model, optimizer, i)
        optimizer.step()
        optimizer.zero_grad()


def nothing(model: Any, optimizer: Optimizer, i: int) -> None:
    del model, optimizer, i


def schedule(model: Any, optimizer: Optimizer, i: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 0.1 / (i + 1)


def clip(model: Any, optimizer: Optimizer, i: int) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1e-2)


def clip_some(model: Any, optimizer: Optimizer, i: int) -> None:
    nn.utils.clip_grad_norm_(list(model.parameters())[:2], 1e-2)


def regroup(model: Any, optimizer: Optimizer, i: int) -> None:
    if i == 3:
        first, second = optimizer.param_groups
        second["params"].append(first["params"].pop())


def drop_gradient(model: Any, optimizer: Optimizer, i: int) -> None:
    if i == 3:
        model.layers[1].up.weight.grad = None


def give_gradient(model: Any, optimizer: Optimizer, i: int) -> None:
    weight = model.layers[1].up.weight
    if i == 3:
        weight.grad = torch.ones_like(weight)
    if i == 4:
        weight.grad = weight.grad.t().contiguous().t()


def load(model: Any, optimizer: Optimizer, i: int) -> None:
    if i == 3:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def change_states(model: Any, optimizer: Optimizer, i: int) -> None:
    state = optimizer.state[model.layers[1].up.weight]
    if i == 2:
        state["exp_avg"].zero_()
    if i == 3:
        state["exp_avg"] = torch.ones_like(state["exp_avg"])
    if i == 4:
        state["step"] += 5


def forget_states(model: Any, optimizer: Optimizer, i: int) -> None:
    if i == 3:
        optimizer.state.clear()


def change_weights(model: Any, optimizer: Optimizer, i: int) -> None:
    weight = model.layers[1].up.weight
    if i == 2:
        with torch.no_grad():
            weight.mul_(0.5)
    if i == 3:
        weight.data = weight.data.clone()


def double(model: Any, optimizer: Optimizer, i: int) -> None:
    """A second step for the same gradients."""
    if i == 3:
        optimizer.step()


def other_optimizer(model: Any, optimizer: Optimizer, i: int) -> None:
    if i == 3:
        SGD(model.parameters(), lr=0.1).step()


BETWEEN: dict[Any, int] = {  # how many of five steps are like the ones before
    nothing: 5,
    schedule: 5,
    clip: 5,
    clip_some: 5,
    regroup: 4,
    drop_gradient: 3,
    give_gradient: 3,
    load: 4,
    change_states: 4,
    forget_states: 4,
    change_weights: 5,
    double: 6,
    other_optimizer: 5,
}


@pytest.mark.parametrize("between", BETWEEN, ids=lambda f: f.__name__)
def test_a_step_that_is_alike_is_the_step(
    between: Any, seen: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = streamed(), streamed()
    mine, theirs = adamw(one)[0], adamw(two)[0]
    steps(one, mine, between)
    assert set(updates(one).values()) == {"on the device, resident"}
    assert sum(seen) == BETWEEN[between], seen
    monkeypatch.setattr(Alike, "of", lambda *_: None)
    steps(two, theirs, between)
    for got, want in zip(one.parameters(), two.parameters(), strict=True):
        assert equal(got + 0, want + 0)
        assert mine.state[got].keys() == theirs.state[want].keys()
        for name, state in theirs.state[want].items():
            assert equal(mine.state[got][name] + 0, state + 0)


@pytest.mark.parametrize(
    "make",
    [lambda p: SGD(p, lr=0.1), lambda p: SGD(p, lr=0.1, momentum=0.9), Adam],
    ids=["sgd", "momentum", "adam"],
)
def test_of_other_rules(make: Any, seen: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = streamed(), streamed()
    steps(one, make(one.parameters()), nothing)
    assert sum(seen) >= 4, seen
    monkeypatch.setattr(Alike, "of", lambda *_: None)
    steps(two, make(two.parameters()), nothing)
    assert all(map(torch.equal, one.parameters(), two.parameters()))


def test_what_a_step_refuses_it_refuses_again() -> None:
    model = streamed()
    optimizer = AdamW(groups(model))
    steps(model, optimizer, nothing)
    before = [p.detach().clone() for p in model.parameters()]
    model(**data(0)).backward()
    optimizer.param_groups[1]["eps"] = "small"
    with pytest.raises(OptimizerError, match=r"param_groups\[1\] has eps='small'"):
        optimizer.step()
    assert all(map(torch.equal, model.parameters(), before))
    optimizer.param_groups[1]["eps"] = 1e-8
    optimizer.step()
    assert optimizer.state[model.layers[1].up.weight]["step"] == 7


def test_it_holds_no_memory_of_buckets() -> None:
    model = streamed()
    optimizer = AdamW(model.parameters())
    steps(model, optimizer, nothing)
    found = inside.streamed(model).updates._alike[optimizer]
    values = [value for _, row in found._described for value in row]
    assert set(map(type, values)) == {int}
    weight = model.layers[1].up.weight
    assert compat.storage_users(optimizer.state[weight]["exp_avg"]) == 2  # its buffer, and it
    before = weakref.ref(inside.buckets(model)["layers.1"])
    unmegacompile(model)
    gc.collect()
    assert before() is None


# --- the table


def some_updates(seed: int) -> list[Update]:
    """Of two signatures, in turns."""
    torch.manual_seed(seed)
    found = []
    for i, numel in enumerate((48, 5, 16, 7, 32)):
        dtype = BF16 if i % 2 else torch.float32
        moments = (torch.rand(numel), torch.rand(numel), None)
        hyper = ADAM.hyper({**adamw(nn.Linear(2, 2))[0].param_groups[0]}, step=seed + i % 2 + 1)
        found.append(
            Update(torch.rand(numel).to(dtype), torch.rand(numel).to(dtype), moments, hyper)
        )
    return found


@pytest.mark.parametrize("scaled", [False, True])
def test_a_table_with_other_gradients_is_the_new_table(scaled: bool) -> None:
    first = some_updates(0)
    of_both = [
        update._replace(
            grad=torch.rand_like(update.param, dtype=update.param.dtype),
            hyper=other.hyper,
            factor=torch.ones((), dtype=update.grad.dtype) if scaled else None,
        )
        for update, other in zip(first, some_updates(1), strict=True)
    ]
    want = list(launches(ADAM, of_both, block=1024))
    rows = {k: describe(k, ADAM, update) for k, update in enumerate(first)}
    factors = [u.factor.data_ptr() for u in of_both if u.factor is not None]
    got = [
        renewed(
            each,
            [update.grad.data_ptr() for update in of_both],
            factors or None,
            [update.hyper for update in of_both],
            block=1024,
            device=torch.device("cpu"),
        )
        for each in known(rows)
    ]
    assert len(got) == len(want) > 1
    for one, other in zip(got, want, strict=True):
        assert one.signature == other.signature
        assert torch.equal(one.blocks, other.blocks)
        assert torch.equal(one.table, other.table)
        assert torch.equal(one.hyper, other.hyper)
