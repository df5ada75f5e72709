"""`optimizer.step()` over streamed parameters, against the stock optimizer in the same run.

One captured model serves all optimizers: each begins from the same parameters.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, RMSprop
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from megacompile import megacompile
from megacompile.runtime.updates.update import UpdatePath
from tests import inside, zoo
from tests.training import (
    NAME,
    OPTIMIZERS,
    STEPS,
    adamw,
    assert_states_same,
    backward,
    data,
    gradients,
    groups,
    move,
    net,
    schedulers,
    train,
)
from tests.zoo import assert_same, twins


class Both:
    """A plain model and a streamed one, which begin anew each time."""

    def __init__(self, **options: Any) -> None:
        self.models = twins(net(), **options)
        self.start = copy.deepcopy(self.models[0].state_dict())

    def each(self) -> tuple[Any, Any]:
        """Both, as at first."""
        for model in self.models:
            model.zero_grad()
            model.load_state_dict(self.start)
        return self.models


def shape(found: dict[str, Any]) -> list[Any]:
    """The keys of a state dict, in order."""
    return [(key, list(state)) for key, state in found["state"].items()]


def test_every_optimizer_is_bitwise_the_stock_one() -> None:
    """Schedulers, the order of states, states that were loaded, and moved from side to side."""
    both = Both()
    for case, make in OPTIMIZERS.items():
        found: list[Any] = []
        for model in both.each():
            optimizers = make(model)
            of = schedulers(optimizers)
            norms = train(model, optimizers, 4, of=of)
            order = [shape(optimizer.state_dict()) for optimizer in optimizers]
            saved = [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers]
            for optimizer, of_it in zip(optimizers, saved, strict=True):
                optimizer.load_state_dict(of_it)
            train(model, optimizers, 3, start=4)
            for optimizer, of_it in zip(optimizers, saved, strict=True):
                for key, state in optimizer.state_dict()["state"].items():
                    # what was loaded goes on being the state
                    assert all(v is of_it["state"][key][n] for n, v in state.items()), case
            found.append((norms, order, [o.state_dict() for o in optimizers], optimizers))
        assert_states_same(found[0][0], found[1][0])
        assert found[0][1] == found[1][1], case
        assert_states_same(found[0][2], found[1][2])
        assert_same(*both.models)
        plain, streamed = both.models
        move((streamed, *found[1][3]), (plain, *found[0][3]))
        for model, (*_, optimizers) in zip(both.models, found, strict=True):
            train(model, optimizers, 1, start=7)
        assert_same(plain, streamed)
        assert inside.ways(streamed) == {UpdatePath.STOCK}
        assert streamed.layers[0].norm.weight.grad is None is streamed.spare.weight.grad


def scaler(model: Any) -> Any:
    (optimizer,) = adamw(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=3)
    for i in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(model(**data(i)) * 4).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
    assert 1.0 < scaler.get_scale() < 2.0**127, "some steps were skipped"
    assert 0 < optimizer.state[model.get_parameter(NAME)]["step"] < STEPS
    model.zero_grad()  # what was unscaled has NaN of another kind


def hooks(model: Any) -> Any:
    """Those of the optimizer and those of all see gradients; one scales them."""
    (optimizer,) = adamw(model)
    counts: list[int] = []

    def count(*_: Any) -> None:
        counts.append(sum(p.grad is not None for p in model.parameters()))

    def scale(*_: Any) -> None:
        for param in model.parameters():
            if param.grad is not None:
                param.grad.mul_(0.01)

    handles = [register_optimizer_step_pre_hook(count), register_optimizer_step_post_hook(count)]
    optimizer.register_step_pre_hook(count)
    optimizer.register_step_post_hook(count)
    train(model, [optimizer], 2)
    optimizer.register_step_pre_hook(scale)
    train(model, [optimizer], 2, start=2)
    for handle in handles:
        handle.remove()
    assert counts[-1] > 0
    return counts


def order_beside_other_parameters(model: Any) -> Any:
    """A parameter that the model does not have is among its own; a bias gets a gradient later."""
    other = nn.Parameter(torch.ones(3))
    params = list(model.parameters())
    late = model.head.bias.requires_grad_(False)
    optimizer = AdamW([*params[:4], other, *params[4:]], lr=1e-2)
    for i in range(3):
        late.requires_grad_(i > 0)
        optimizer.zero_grad()
        other.square().sum().backward()
        gradients(model, i)
        optimizer.step()
    return [shape(optimizer.state_dict()), other.detach()]


LOOPS: list[Callable[[Any], Any]] = [
    scaler,
    hooks,
    order_beside_other_parameters,
]


@pytest.mark.parametrize("resident", [0, "all"])
def test_other_loops(resident: Any) -> None:
    both = Both(resident=resident)
    for loop in LOOPS:
        plain, streamed = both.each()
        mine, theirs = loop(plain), loop(streamed)
        assert_states_same(mine, theirs)
        found = zoo.differences(plain, streamed)
        assert found == [], loop.__name__


def test_an_optimizer_without_an_update_of_ours_is_stock_and_said_once() -> None:
    plain, streamed = twins(net())
    mine, theirs = (RMSprop(groups(model), lr=1e-3) for model in (plain, streamed))
    train(plain, [mine], 4)
    with pytest.warns(UserWarning, match="RMSprop") as said:
        train(streamed, [theirs], 1)
    assert len(said) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(streamed, [theirs], 3, start=1)
    assert_same(plain, streamed)
    assert inside.ways(streamed) == set()


def test_a_state_is_a_view_of_the_buckets_flat_one() -> None:
    _, streamed = twins(net())
    (optimizer,) = adamw(streamed)
    train(streamed, [optimizer], 2)
    seen = 0
    for bucket in inside.buckets(streamed).values():
        for i, param in enumerate(bucket.params):
            for name in ("exp_avg", "exp_avg_sq") if param in optimizer.state else ():
                state, buffer = optimizer.state[param][name], bucket.states.of(optimizer)[name][i]
                assert isinstance(buffer, Tensor)
                assert state.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
                assert (state.shape, state.stride()) == (param.shape, param.stride())
                seen += 1
    assert seen == 2 * len(optimizer.state)


def test_two_models_have_the_states_that_both_loaded() -> None:
    """In torch their optimizers then share these, which is seldom wanted."""
    found = []
    for model in twins(net()):
        other = copy.deepcopy(model)
        (optimizer,), (its,) = adamw(model), adamw(other)
        train(model, [optimizer], 2)
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer.load_state_dict(saved)
        its.load_state_dict(saved)
        for i in range(2, 4):
            train(model, [optimizer], 1, start=i)
            train(other, [its], 1, start=i)
        found.append([model, other])
    for plain, streamed in zip(*found, strict=True):
        assert_same(plain, streamed)


def test_the_order_of_states_with_an_update_in_the_backward() -> None:
    plain = net()
    streamed = copy.deepcopy(plain)
    found = []
    for model, in_backward in ((plain, False), (streamed, True)):
        optimizer = AdamW(model.parameters(), lr=1e-2)
        if in_backward:
            megacompile(model, device="cpu", lowering="eager", optimizer=optimizer)
        backward(model, 0, 0)
        optimizer.step()
        found.append(shape(optimizer.state_dict()))
    assert found[0] == found[1]
