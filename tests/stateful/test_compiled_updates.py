"""Loops around updates that Inductor compiles: by the host, by the device, and resident.

Equal to the plain loop but for rounding. One captured model of each configuration runs all loops,
which begin anew; what they do beside eager updates is drawn in `test_training.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Adam, AdamW, Muon, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from megacompile import compat, megacompile, updates
from megacompile.errors import BackwardError
from megacompile.runtime.optim.adam import ADAM
from megacompile.runtime.optim.rule import Update
from megacompile.runtime.optim.twin import apply
from megacompile.runtime.updates.compiled import Compiled
from tests import inside
from tests.interrupts import traced
from tests.stateful.late import AtCall
from tests.training import adamw as adamw_in_groups
from tests.training import net, train
from tests.zoo import assert_close, twins

CONFIGS: dict[str, dict[str, Any]] = {
    "host": {"device_update": 0},
    "device update": {"device_update": 1.0},
    "resident": {"resident": "all"},
}

pytestmark = pytest.mark.skipif(not compat.has_cpp_compiler(), reason="needs a C++ compiler")


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
        self.a, self.b, self.c = (nn.Parameter(torch.rand(12, 25) + 0.5) for _ in range(3))

    def forward(self, x: Tensor, skip: str) -> Tensor:
        x = self.a * x + self.c
        return x if skip else x * self.b


class Planted(Exception):
    """What the user's code raises."""


def planted(*args: Any) -> Any:
    raise Planted


def adamw(model: Any) -> Optimizer:
    return AdamW(model.parameters(), lr=1e-2)


def damped(model: Any) -> Optimizer:
    """Its first step is another one than those that follow."""
    return SGD(model.parameters(), 0.1, 0.9, dampening=0.5)


def backward(model: nn.Module, i: int, skip: str = "") -> None:
    x = torch.rand(4, 12, 25, generator=torch.Generator().manual_seed(i))
    model(x, skip).backward()


def steps(model: nn.Module, optimizer: Optimizer, *seeds: int) -> None:
    for i in seeds:
        backward(model, i)
        optimizer.step()
        optimizer.zero_grad()


def looked_at(model: Any, optimizer: Optimizer) -> list[Any]:
    """Copies of parameters, gradients and states."""
    found: list[Any] = []
    for param in model.parameters():
        values = (param, param.grad, *optimizer.state.get(param, {}).values())
        found += [v.detach().clone() if isinstance(v, Tensor) else v for v in values]
    return found


def assert_untouched(model: Any, optimizer: Optimizer, before: list[Any]) -> None:
    for a, b in zip(before, looked_at(model, optimizer), strict=True):
        assert a is b is None or torch.equal(torch.as_tensor(a), torch.as_tensor(b))


# --- loops: they give the optimizers


def unusual_gradients(model: Any) -> list[Optimizer]:
    optimizer = adamw(model)
    steps(model, optimizer, 0, 1)
    first, last = model.layers
    backward(model, 5, skip="b")  # b gets none
    optimizer.step()
    backward(model, 5)
    first.b.grad = None
    optimizer.step()
    views = [p.grad.data for p in model.parameters() if p.grad is not None]
    backward(model, 6)
    for view in views:
        view.mul_(0.1)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
    optimizer.step()
    first.a.grad, last.c.grad = last.c.grad, first.a.grad
    backward(model, 6)
    optimizer.step()

    def scale(*_: Any) -> None:
        for param in model.parameters():
            param.grad.mul_(0.01)

    optimizer.register_step_pre_hook(scale)
    backward(model, 7)
    optimizer.step()
    return [optimizer]


def unusual_memory(model: Any) -> list[Optimizer]:
    optimizer = adamw(model)
    steps(model, optimizer, 0, 1)
    aliases = list(model.state_dict().values())
    backward(model, 6)
    for alias in aliases:
        alias.mul_(0.5)
    del alias, aliases
    optimizer.step()
    states = [optimizer.state[p]["exp_avg"].data for p in model.parameters()]
    backward(model, 7)
    for state in states:
        state.mul_(0.5)
    del state, states
    optimizer.step()
    backward(model, 5)
    first, last = model.layers
    first.b.data = first.b.data * 1.1
    first.a.data, last.a.data = last.a.data, first.a.data
    optimizer.step()
    return [optimizer]


def errors_of_the_user(model: Any) -> list[Optimizer]:
    optimizer = adamw(model)
    steps(model, optimizer, 0)
    backward(model, 5)
    before = looked_at(model, optimizer)
    for register in (optimizer.register_step_pre_hook, register_optimizer_step_pre_hook):
        handle = register(planted)
        with pytest.raises(Planted):
            optimizer.step()
        handle.remove()
    with pytest.raises(Planted):
        optimizer.step(planted)
    assert_untouched(model, optimizer, before)
    if inside.is_streamed(model) and not inside.residents(model):
        # the second of its parts cannot be prepared, as when the compiler of its code fails
        with pytest.raises(Planted), traced(AtCall("prepare", 2, Planted())):
            optimizer.step()
        assert_untouched(model, optimizer, before)
    handle = optimizer.register_step_post_hook(planted)
    with pytest.raises(Planted):
        optimizer.step()
    handle.remove()
    optimizer.zero_grad()
    steps(model, optimizer, 6)

    def closure() -> float:
        backward(model, 7)
        return 1.5

    assert optimizer.step(closure) == 1.5
    return [optimizer]


def frozen_midway(model: Any) -> list[Optimizer]:
    optimizer = damped(model)
    steps(model, optimizer, 0)
    model.layers[0].b.requires_grad_(False)
    steps(model, optimizer, 5)
    model.layers[0].b.requires_grad_(True)
    return [optimizer]


def options_switched(model: Any) -> list[Optimizer]:
    """A state that is there from before is not used, nor touched."""
    adam = Adam(model.parameters(), lr=1e-2, amsgrad=True, betas=(0.9, 0.5))
    sgd = SGD(model.parameters(), 0.1, 0.9)
    for optimizer, name, values in ((adam, "amsgrad", (False, True)), (sgd, "momentum", (0, 0.9))):
        for value in (None, *values):
            for group in optimizer.param_groups if value is not None else []:
                group[name] = value
            steps(model, optimizer, 1, 2)
    return [adam, sgd]


def several_optimizers(model: Any) -> list[Optimizer]:
    """In turns, in one step, of other families, and over parts."""
    params = list(model.parameters())
    first, second = adamw(model), AdamW(params, lr=3e-3, weight_decay=0.1)
    steps(model, first, 0, 1)
    steps(model, second, 2)
    backward(model, 3)
    first.step()
    second.step()
    model.zero_grad()
    others: list[Optimizer] = [
        Muon(params, lr=0.02),
        SGD(params, 0.1, 0.9, dampening=0.1),
        SGD(params, 0.05, 0.8, nesterov=True),
        Adafactor(params, lr=1e-3),
        AdamW(params[:4], lr=1e-2),
        AdamW(params[3:], lr=2e-2),
    ]
    for i in range(2):
        for k, each in enumerate(others):
            steps(model, each, 10 * i + k)
            model.zero_grad()
    return [first, second, *others]


def states_of_another_loaded(model: Any) -> list[Optimizer]:
    """`load_state_dict` copies no tensor that has the right dtype: then both have the same."""
    first = adamw(model)
    steps(model, first, 0, 1)
    copied, shared, last = adamw(model), adamw(model), adamw(model)
    copied.load_state_dict(copy.deepcopy(first.state_dict()))
    shared.load_state_dict(first.state_dict())
    for each in (copied, first, shared, first):
        steps(model, each, 3, 4)
    saved = first.state_dict()
    del first
    last.load_state_dict(saved)
    steps(model, last, 5)
    return [copied, shared, last]


LOOPS: list[Callable[[Any], list[Optimizer]]] = [
    unusual_gradients,
    unusual_memory,
    errors_of_the_user,
    frozen_midway,
    options_switched,
    several_optimizers,
    states_of_another_loaded,
]


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.filterwarnings("ignore:megacompile")
def test_loops(config: str) -> None:
    """Parameters and states are those of the plain loop."""
    torch.manual_seed(0)
    options = {"lowering": "inductor", "progress": False, **CONFIGS[config]}
    plain, streamed = twins(Product(), **options)
    start = copy.deepcopy(plain.state_dict())
    for loop in LOOPS:
        found = []
        for model in (plain, streamed):
            model.zero_grad()
            model.load_state_dict(start)
            found.append(loop(model))
        pairs = list(zip(plain.parameters(), streamed.parameters(), strict=True))
        for want, got in pairs:
            error = float((got - want).detach().norm())
            assert error <= 1e-5 * float(want.detach().norm()), loop.__name__
        for mine, theirs in zip(*found, strict=True):
            for want, got in pairs:
                states, others = mine.state.get(want, {}), theirs.state.get(got, {})
                assert states.keys() == others.keys(), loop.__name__
                for name, state in states.items():
                    error = float((others[name] - state).norm())
                    assert error <= 1e-4 * float(state.norm()), (loop.__name__, name)


def spoil(model: Any) -> None:
    """A backward outside of the model adds to gradients that were scaled: they are wrong."""
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    model.layers[1].c.sum().backward()


@pytest.mark.parametrize("config", ["host", "device update"])
def test_a_gradient_is_refused(config: str) -> None:
    """Nothing is stepped: neither in this model, nor in another one of the same optimizer."""
    torch.manual_seed(0)
    options = {"lowering": "inductor", "progress": False, **CONFIGS[config]}
    pairs = [twins(Product(), **options) for _ in range(2)]
    plain, streamed = zip(*pairs, strict=True)
    for models in (plain, streamed):
        every = [param for model in models for param in model.parameters()]
        made: list[Optimizer] = [SGD(every, 0.1, 0.9, dampening=0.5), Adam(every, lr=1e-2)]
        for optimizer in made:
            for i in range(3):
                for k, model in enumerate(models):
                    backward(model, 5 * i + k)
                if i != 1 and models is streamed:
                    spoil(models[i // 2])
                    was = [param.detach().clone() for param in every]
                    states = {p: list(state) for p, state in optimizer.state.items()}
                    for _ in range(2):
                        with pytest.raises(BackwardError):
                            optimizer.step()
                    assert {p: list(state) for p, state in optimizer.state.items()} == states
                    assert all(map(torch.equal, every, was))
                    models[i // 2].zero_grad()
                    backward(models[i // 2], 5 * i + i // 2)
                optimizer.step()
                optimizer.zero_grad()
    for one, other in zip(plain, streamed, strict=True):
        assert_close(one, other, 1e-5)


def test_resident_parameters_of_two_groups_that_are_not_contiguous() -> None:
    """Each tensor is given to the update in the order of its memory, with its group's options."""
    models = [net(), net()]
    for model in models:
        for layer in model.layers:
            layer.up.weight.data = layer.up.weight.detach().t().contiguous().t()
    plain, streamed = models
    megacompile(streamed, device="cpu", lowering="inductor", resident="all", progress=False)
    for model in models:
        train(model, adamw_in_groups(model), 2)
        params = [p for p in model.parameters() if p.requires_grad]
        groups: list[dict[str, Any]] = [
            {"params": params[::2]},
            {"params": params[1::2], "lr": 3e-2, "amsgrad": True},
        ]
        train(model, [AdamW(groups, lr=1e-3)], 2)
    assert set(updates(streamed).values()) == {"on the device, resident"}
    assert not streamed.layers[0].up.weight.is_contiguous()
    assert_close(plain, streamed, 1e-5)
    assert inside.residents(streamed) == set(inside.buckets(streamed))


def test_states_in_8_bits_belong_to_one_optimizer() -> None:
    """The second one's are those that it would have alone."""
    found = []
    for alone in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(80, 80), nn.Tanh())
        megacompile(model, device="cpu", state_dtype="int8", progress=False)
        before = copy.deepcopy(model.state_dict())
        first, second = adamw(model), AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
        for optimizer in [second] if alone else [first, second, first]:
            if optimizer is second:
                model.load_state_dict(before)
            x = torch.rand(4, 80, generator=torch.Generator().manual_seed(2))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        states = second.state[model.get_parameter("0.weight")]
        found.append({k: v.clone() for k, v in states.items()})
    assert all(torch.equal(found[0][k] + 0, found[1][k] + 0) for k in found[0])


def test_a_rule_in_the_background_is_out_of_the_compilers_hands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Dynamo, while it compiles, changes and restores the random state of the whole process, and a
    reset frees what another thread runs: so the code runs without it."""
    rule, other = Compiled(ADAM), Compiled(ADAM)
    wants: dict[torch.dtype, Tensor] = {}
    given: dict[torch.dtype, Update] = {}
    for dtype in (torch.float32, torch.bfloat16):
        generator = torch.Generator().manual_seed(0)
        tensors = [torch.rand(64, generator=generator).to(dtype) for _ in range(4)]
        group = AdamW([nn.Parameter(tensors[0])]).param_groups[0]
        states = (tensors[2], tensors[3], None)
        given[dtype] = Update(tensors[0], tensors[1], states, ADAM.hyper(group))
        wanted = copy.deepcopy(given[dtype])
        apply(ADAM, wanted)
        wants[dtype] = wanted.param
        compile_now(rule, given[dtype])
    compile_now(other, given[torch.float32])  # finds both in Dynamo's cache, the older one behind

    def never(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError

    for each, dtype in ((other, torch.float32), (rule, torch.bfloat16)):
        before = torch.get_rng_state()
        torch.compiler.reset()
        with monkeypatch.context() as patched:
            patched.setattr(torch, "compile", never)
            each(given[dtype])
        assert torch.equal(torch.get_rng_state(), before)
        torch.testing.assert_close(given[dtype].param, wants[dtype], rtol=1e-6, atol=1e-6)


def compile_now(rule: Compiled, update: Update) -> None:
    if not rule.ready(update):
        rule.wait()
        assert rule.ready(update)
