"""Training loops that do something unusual between forward, backward and step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from megacompile.errors import BackwardError
from megacompile.runtime.updates.update import BucketUpdate
from tests import inside
from tests.zoo import assert_close, twins


class Product(nn.Module):
    """Three parameters of a bucket side by side, and a second bucket of the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Factors() for _ in range(2))

    def forward(self, x: Tensor, skip: str = "") -> Tensor:
        for layer in self.layers:
            x = layer(x, skip)
        return x.square().mean()


class Factors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.rand(300) + 0.5) for _ in range(3))

    def forward(self, x: Tensor, skip: str) -> Tensor:
        x = self.a * x + self.c
        return x if skip else x * self.b


Act = Callable[[Any, Optimizer], None]
CONFIGS: dict[str, dict[str, Any]] = {
    "eager": {"lowering": "eager"},
    "inductor": {"lowering": "inductor", "device_update": 0},
    "device update": {"lowering": "inductor", "device_update": 1.0},
    "resident": {"lowering": "inductor", "resident": "all"},
}


def adamw(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=1e-2)


def compare(
    config: str, loop: Act, make: Callable[[nn.Module], Optimizer] = adamw, before: int = 3
) -> None:
    """The same loop on a plain and on a streamed model, behind some ordinary steps."""
    torch.manual_seed(0)
    plain, streamed = twins(Product(), progress=False, **CONFIGS[config])
    for model in (plain, streamed):
        optimizer = make(model)
        for i in range(before):
            backward(model, i)
            optimizer.step()
            optimizer.zero_grad()
        loop(model, optimizer)
    assert_close(plain, streamed, 1e-5)


def backward(model: nn.Module, i: int, skip: str = "") -> None:
    x = torch.rand(4, 300, generator=torch.Generator().manual_seed(i))
    model(x, skip).backward()


def frozen_midway(model: Any, optimizer: Optimizer) -> None:
    model.layers[0].b.requires_grad_(False)
    backward(model, 5)
    optimizer.step()


def unused_for_once(model: Any, optimizer: Optimizer) -> None:
    backward(model, 5, skip="b")
    optimizer.step()


def gradient_taken_away(model: Any, optimizer: Optimizer) -> None:
    backward(model, 5)
    model.layers[0].b.grad = None
    optimizer.step()


def data_replaced(model: Any, optimizer: Optimizer) -> None:
    backward(model, 5)
    model.layers[0].b.data = model.layers[0].b.data * 1.1
    optimizer.step()


def data_swapped(model: Any, optimizer: Optimizer) -> None:
    backward(model, 5)
    a, b = model.layers[0].a, model.layers[1].a
    a.data, b.data = b.data, a.data
    optimizer.step()


def written_by_an_alias_that_is_gone(model: Any, optimizer: Optimizer) -> None:
    aliases = list(model.state_dict().values())
    backward(model, 5)
    for alias in aliases:
        alias.mul_(0.5)
    del alias, aliases
    optimizer.step()


def states_written_by_an_alias_that_is_gone(model: Any, optimizer: Optimizer) -> None:
    states = [optimizer.state[p]["exp_avg"].data for p in model.parameters()]
    backward(model, 5)
    for state in states:
        state.mul_(0.5)
    del state, states
    optimizer.step()


def gradients_scaled_by_an_alias(model: Any, optimizer: Optimizer) -> None:
    backward(model, 5)
    views = [p.grad.data for p in model.parameters()]
    backward(model, 6)
    for view in views:
        view.mul_(0.1)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
    optimizer.step()


def gradients_swapped(model: Any, optimizer: Optimizer) -> None:
    backward(model, 5)
    a, b = model.layers[0].a, model.layers[1].c
    a.grad, b.grad = b.grad, a.grad
    backward(model, 6)
    optimizer.step()


def hook_registered_late(model: Any, optimizer: Optimizer) -> None:
    def halve(optimizer: Any, args: Any, kwargs: Any) -> None:
        for param in model.parameters():
            param.grad.mul_(0.01)

    optimizer.register_step_pre_hook(halve)
    backward(model, 5)
    optimizer.step()


class Planted(Exception):
    """What the user's code raises."""


def once(*args: Any) -> None:
    raise Planted


def looked_at(model: Any, optimizer: Optimizer) -> list[tuple[Tensor | None, ...]]:
    """Copies of parameters, gradients and states."""
    return [
        tuple(
            value.detach().clone() if isinstance(value, Tensor) else value
            for value in (param, param.grad, *optimizer.state.get(param, {}).values())
        )
        for param in model.parameters()
    ]


def assert_untouched(model: Any, optimizer: Optimizer, before: list[Any]) -> None:
    for was, now in zip(before, looked_at(model, optimizer), strict=True):
        for a, b in zip(was, now, strict=True):
            assert a is b is None or (a is not None and b is not None and torch.equal(a, b))


def pre_hook_raises(model: Any, optimizer: Optimizer) -> None:
    backward(model, 5)
    before = looked_at(model, optimizer)
    handle = optimizer.register_step_pre_hook(once)
    for _ in range(2):
        with pytest.raises(Planted):
            optimizer.step()
        assert_untouched(model, optimizer, before)
    handle.remove()
    optimizer.step()
    backward(model, 6)
    optimizer.step()


def global_pre_hook_raises(model: Any, optimizer: Optimizer) -> None:
    backward(model, 5)
    before = looked_at(model, optimizer)
    handle = register_optimizer_step_pre_hook(once)
    with pytest.raises(Planted):
        optimizer.step()
    handle.remove()
    assert_untouched(model, optimizer, before)
    optimizer.step()


def post_hook_raises(model: Any, optimizer: Optimizer) -> None:
    backward(model, 5)
    handles = [
        optimizer.register_step_post_hook(once),
        register_optimizer_step_post_hook(once),
    ]
    gradients = [param.grad.clone() for param in model.parameters()]
    for handle in handles:
        with pytest.raises(Planted):
            optimizer.step()
        for param, gradient in zip(model.parameters(), gradients, strict=True):
            assert torch.equal(param.grad, gradient)
        handle.remove()
    optimizer.zero_grad()
    backward(model, 6)
    optimizer.step()


def closure_raises(model: Any, optimizer: Optimizer) -> None:
    before: list[Any] = []

    def closure(fails: bool) -> float:
        optimizer.zero_grad()
        backward(model, 5)
        if fails:
            before.extend(looked_at(model, optimizer))
            raise Planted
        return 1.5

    with pytest.raises(Planted):
        optimizer.step(lambda: closure(True))
    assert_untouched(model, optimizer, before)
    assert optimizer.step(closure=lambda: closure(False)) == 1.5


LOOPS = [
    frozen_midway,
    unused_for_once,
    gradient_taken_away,
    data_replaced,
    data_swapped,
    written_by_an_alias_that_is_gone,
    states_written_by_an_alias_that_is_gone,
    gradients_scaled_by_an_alias,
    gradients_swapped,
    hook_registered_late,
    pre_hook_raises,
    global_pre_hook_raises,
    post_hook_raises,
    closure_raises,
]


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_loops(loop: Act, config: str) -> None:
    compare(config, loop)


def _switched(option: str, off: Any, on: Any) -> Act:
    def loop(model: Any, optimizer: Optimizer) -> None:
        for value in (off, on):
            for group in optimizer.param_groups:
                group[option] = value
            for i in range(3):
                backward(model, 5 + i)
                optimizer.step()
                optimizer.zero_grad()

    return loop


@pytest.mark.parametrize("config", ["inductor", "resident"])
def test_options_switched_off_and_on(config: str) -> None:
    """A state that is there from before is not used, nor touched."""
    compare(
        config,
        _switched("amsgrad", False, False),
        lambda m: Adam(m.parameters(), lr=1e-2, amsgrad=True, betas=(0.9, 0.5)),
    )
    compare(config, _switched("momentum", 0, 0.9), lambda m: SGD(m.parameters(), 0.1, 0.9))


def test_a_copy_follows_a_parameter_that_has_another_name() -> None:
    _, streamed = twins(nn.Sequential(nn.Linear(8, 8)), compute_dtype=torch.bfloat16)
    x = torch.rand(4, 8)
    alias = streamed[0].weight.data
    with torch.no_grad():
        before = streamed(x)
        alias.mul_(0.0)
        del alias
        assert not torch.equal(before, streamed(x))


# --- a step that is refused changes nothing


def damped(params: Any) -> Any:
    """Its first step is another one than those that follow."""
    return SGD(params, 0.1, 0.9, dampening=0.5)


def adam(params: Any) -> Any:
    return Adam(params, lr=1e-2)


EACH = [("eager", adam), ("inductor", adam), ("device update", damped), ("resident", damped)]


def spoil(model: Any) -> None:
    """A backward outside of the model adds to gradients that were scaled: they are wrong."""
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    model.layers[1].c.sum().backward()


@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("make", [damped, adam])
@pytest.mark.parametrize("config", ["inductor", "device update"])
def test_a_gradient_is_refused(make: Any, config: str, before: int) -> None:
    def loop(model: Any, optimizer: Optimizer) -> None:
        if inside.is_streamed(model):
            backward(model, 5)
            spoil(model)
            was = [param.detach().clone() for param in model.parameters()]
            states = {name: list(state) for name, state in optimizer.state.items()}
            for _ in range(2):
                with pytest.raises(BackwardError, match="was scaled"):
                    optimizer.step()
            assert {name: list(state) for name, state in optimizer.state.items()} == states
            assert all(map(torch.equal, model.parameters(), was))
            optimizer.zero_grad()
        for i in (6, 7):
            backward(model, i)
            optimizer.step()
            optimizer.zero_grad()

    compare(config, loop, lambda model: make(model.parameters()), before)


@pytest.mark.parametrize("make", [damped, adam])
def test_one_of_two_models_refuses(make: Any) -> None:
    """The other one's part of the step is not made either, nor made twice by the next."""
    torch.manual_seed(0)
    pairs = [twins(Product(), progress=False, **CONFIGS["inductor"]) for _ in range(4)]
    plain, streamed = zip(*pairs, strict=True)
    for models in (plain, streamed):
        optimizer = make([param for model in models for param in model.parameters()])
        for i in range(3):
            for k, model in enumerate(models):
                backward(model, 5 * i + k)
            if i == 1 and models is streamed:
                for model in models[1:3]:
                    spoil(model)
                    with pytest.raises(BackwardError, match="was scaled"):
                        optimizer.step()
                    model.zero_grad()
                    backward(model, 5 * i + models.index(model))
            optimizer.step()
            optimizer.zero_grad()
    for one, other in zip(plain, streamed, strict=True):
        for want, got in zip(one.parameters(), other.parameters(), strict=True):
            assert float((got - want).norm()) <= 1e-5 * float(want.norm())


@pytest.mark.parametrize(("config", "make"), EACH)
def test_torch_refuses_a_parameter_that_is_not_ours(make: Any, config: str) -> None:
    rest: list[Tensor] = []

    def loop(model: Any, optimizer: Optimizer) -> None:
        (other,) = optimizer.param_groups[0]["params"]
        backward(model, 5)
        before = looked_at(model, optimizer)
        other.grad = torch.ones(3)
        optimizer.param_groups[0]["lr"] = "much"
        with pytest.raises(TypeError):
            optimizer.step()
        assert_untouched(model, optimizer, before)
        assert torch.equal(other.grad, torch.ones(3))
        optimizer.param_groups[0]["lr"] = 0.5
        optimizer.step()
        other.grad = None
        optimizer.step()
        rest.append(other.detach())

    def with_another(model: nn.Module) -> Optimizer:
        other = nn.Parameter(torch.ones(3))
        made: Optimizer = make([{"params": [other]}, {"params": list(model.parameters())}])
        return made

    compare(config, loop, with_another, before=0)
    assert torch.equal(*rest) and float(rest[0][0]) < 1


@pytest.mark.parametrize(("config", "make"), EACH)
def test_a_part_cannot_be_prepared(make: Any, config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the compiler of its code fails."""
    prepare, parts = BucketUpdate.prepare, []

    def second_fails(update: BucketUpdate, done: dict[object, bool]) -> None:
        parts.append(update)
        if len(parts) == 2:
            raise Planted
        prepare(update, done)

    def loop(model: Any, optimizer: Optimizer) -> None:
        for i in (5, 6):
            backward(model, i)
            # a step over resident buckets that is like the one before is not prepared
            if inside.is_streamed(model) and not (config == "resident" and i == 6):
                parts.clear()
                before = looked_at(model, optimizer)
                with monkeypatch.context() as planted, pytest.raises(Planted):
                    planted.setattr(BucketUpdate, "prepare", second_fails)
                    optimizer.step()
                assert_untouched(model, optimizer, before)
            optimizer.step()
            optimizer.zero_grad()

    compare(config, loop, lambda model: make(model.parameters()), before=0)
