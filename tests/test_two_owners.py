"""Two optimizers over the same parameters, and two megacompiled models with one in common."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Adam, AdamW, Muon, Optimizer

from megacompile import megacompile
from megacompile.errors import ModelError
from tests import inside
from tests.zoo import equal, twins

CONFIGS: dict[str, dict[str, Any]] = {
    "eager": {"lowering": "eager"},
    "inductor": {"lowering": "inductor", "device_update": 0},
    "device update": {"lowering": "inductor", "device_update": 1.0},
    "resident": {"lowering": "inductor", "resident": "all"},
    "resident, eager": {"lowering": "eager", "resident": "all"},
}


class Net(nn.Module):
    """Two units, each with a matrix and a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


def train(model: nn.Module, optimizer: Optimizer, *seeds: int) -> None:
    for seed in seeds:
        model(torch.rand(4, 24, generator=torch.Generator().manual_seed(seed))).backward()
        optimizer.step()
        optimizer.zero_grad()


def warm(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=1e-2, betas=(0.5, 0.9))


def cold(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)


def in_turns(model: nn.Module) -> list[Optimizer]:
    first, second = warm(model), cold(model)
    for i in range(3):
        train(model, first, 3 * i, 3 * i + 1)
        train(model, second, 3 * i + 2)
    return [first, second]


def both_in_a_step(model: nn.Module) -> list[Optimizer]:
    """As with an auxiliary loss: two steps on one gradient, then on another."""
    first, second = warm(model), Adam(model.parameters(), lr=1e-3)
    for i in range(4):
        model(torch.rand(4, 24, generator=torch.Generator().manual_seed(i))).backward()
        first.step()
        second.step()
        first.zero_grad()
    return [first, second]


def with_momentum(model: nn.Module) -> list[Optimizer]:
    params = list(model.parameters())
    first, second = SGD(params, 0.1, 0.9, dampening=0.1), SGD(params, 0.05, 0.8, nesterov=True)
    for i in range(3):
        train(model, first, 2 * i)
        train(model, second, 2 * i + 1)
    return [first, second]


def of_other_families(model: Any) -> list[Optimizer]:
    """Muon's momentum has the name of SGD's."""
    matrices = [layer.weight for layer in model.layers]
    first, second = Muon(matrices, lr=0.02), SGD(model.parameters(), 0.1, 0.9)
    third = Adafactor(model.parameters(), lr=1e-3)
    for i in range(3):
        train(model, first, 3 * i)
        train(model, second, 3 * i + 1)
        train(model, third, 3 * i + 2)
    return [first, second, third]


def one_after_the_other(model: nn.Module) -> list[Optimizer]:
    first = warm(model)
    train(model, first, 0, 1, 2)
    del first
    second = cold(model)
    train(model, second, 3, 4, 5)
    return [second]


def states_of_the_first_loaded(
    model: nn.Module, given: Callable[[Any], Any] = copy.deepcopy
) -> list[Optimizer]:
    first = warm(model)
    train(model, first, 0, 1, 2)
    second = cold(model)
    second.load_state_dict(given(first.state_dict()))
    train(model, second, 3, 4)
    train(model, first, 5)
    train(model, second, 6)
    return [first, second]


def states_loaded_without_a_copy(model: nn.Module) -> list[Optimizer]:
    """`load_state_dict` copies no tensor that has the right dtype: both have the same states."""
    return states_of_the_first_loaded(model, lambda states: states)


def states_of_a_dead_one_loaded(model: nn.Module) -> list[Optimizer]:
    first = warm(model)
    train(model, first, 0, 1, 2)
    saved = first.state_dict()
    del first
    second = cold(model)
    second.load_state_dict(saved)
    train(model, second, 3, 4)
    return [second]


def each_with_a_part(model: Any) -> list[Optimizer]:
    """As two networks in one module, with a common part."""
    first = AdamW([*model.layers[0].parameters(), model.layers[1].bias], lr=1e-2)
    second = AdamW(model.layers[1].parameters(), lr=2e-2)
    for i in range(3):
        train(model, first, 2 * i)
        model.zero_grad()
        train(model, second, 2 * i + 1)
        model.zero_grad()
    return [first, second]


LOOPS: list[Callable[[Any], list[Optimizer]]] = [
    in_turns,
    both_in_a_step,
    with_momentum,
    of_other_families,
    one_after_the_other,
    states_of_the_first_loaded,
    states_loaded_without_a_copy,
    states_of_a_dead_one_loaded,
    each_with_a_part,
]


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_two_optimizers(loop: Callable[[Any], list[Optimizer]], config: str) -> None:
    """Parameters and states are those of the plain loop."""
    torch.manual_seed(0)
    plain, streamed = twins(Net(), progress=False, **CONFIGS[config])
    mine, theirs = loop(plain), loop(streamed)
    exact = CONFIGS[config]["lowering"] == "eager"
    pairs = list(zip(plain.parameters(), streamed.parameters(), strict=True))
    for want, got in pairs:
        assert_near(got.detach(), want.detach(), exact)
    for one, other in zip(mine, theirs, strict=True):
        for want, got in pairs:
            assert one.state.get(want, {}).keys() == other.state.get(got, {}).keys()
            for name, state in one.state.get(want, {}).items():
                assert_near(other.state[got][name], state, exact)


def assert_near(got: Any, want: Any, exact: bool) -> None:
    if not isinstance(want, Tensor):
        assert got == want
    elif exact:
        assert equal(got, want)
    else:
        assert float((got - want).norm()) <= 1e-6 * float(want.norm())


def test_states_in_8_bits_belong_to_one_optimizer() -> None:
    """The second one's are those that it would have alone."""
    found = []
    for alone in (True, False):
        torch.manual_seed(0)
        model = megacompile(wide(), device="cpu", state_dtype="int8", progress=False)
        before = copy.deepcopy(model.state_dict())
        first, second = warm(model), cold(model)
        if not alone:
            step(model, first, 1)
            model.load_state_dict(before)
        step(model, second, 2)
        if not alone:
            step(model, first, 1)
        found.append({k: v.clone() for k, v in second.state[model[0].weight].items()})
    assert all(equal(found[0][name], found[1][name]) for name in found[0])


def wide() -> Any:
    return nn.Sequential(nn.Linear(80, 80), nn.Tanh())


def step(model: Any, optimizer: Optimizer, seed: int) -> None:
    x = torch.rand(4, 80, generator=torch.Generator().manual_seed(seed))
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("config", CONFIGS)
def test_states_go_with_their_optimizer(config: str) -> None:
    """Their memory is free when it is gone, but for what somebody holds."""
    model: Any = megacompile(Net(), device="cpu", progress=False, **CONFIGS[config])
    optimizer = warm(model)
    train(model, optimizer, 0, 1, 2)
    buckets = inside.buckets(model).values()
    buffers = [
        weakref.ref(buffer)
        for bucket in buckets
        for by_param in bucket.states.of(optimizer).values()
        for buffer in by_param.values()
    ]
    assert len(buffers) == (0 if config == "resident, eager" else 8)
    held = optimizer.state[next(model.parameters())]["exp_avg"].detach()
    before = held.clone()
    del optimizer
    model(torch.rand(4, 24)).backward()
    assert not any(buffer() is not None for buffer in buffers)
    optimizer = cold(model)
    optimizer.step()
    train(model, optimizer, 3, 4)
    assert equal(held, before)


# --- two models


class Two(nn.Module):
    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.encoder(x))
        return out


def compiled(model: Any) -> Any:
    return megacompile(model, device="cpu", lowering="eager", progress=False)


SHARED = (
    r"parameter Two\.encoder\.weight is owned by another megacompiled model \(Two\.encoder\."
    r"weight there\).*one module that has both"
)


def test_two_models_with_a_parameter_in_common() -> None:
    encoder = nn.Linear(8, 8)
    one, other = Two(encoder), Two(encoder)
    compiled(one)
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(ModelError, match=SHARED):
        compiled(other)
    assert not inside.is_streamed(other), "it is as it was"
    assert all(equal(before[name], value) for name, value in other.state_dict().items())
    x = torch.rand(2, 8)
    assert equal(one(x), one.head(encoder(x)))
    assert equal(other(x), other.head(encoder(x))), "a plain model may use it"


def test_a_tied_parameter() -> None:
    one, other = Two(nn.Linear(8, 8)), Two(nn.Linear(8, 8))
    other.encoder.weight = one.encoder.weight
    compiled(one)
    with pytest.raises(ModelError, match=SHARED):
        compiled(other)


def test_tied_after_both_were_megacompiled() -> None:
    one, other = compiled(Two(nn.Linear(8, 8))), compiled(Two(nn.Linear(8, 8)))
    own = other.encoder.weight
    other.encoder.weight = one.encoder.weight
    x = torch.rand(2, 8)
    with pytest.raises(ModelError, match=SHARED):
        other(x)
    want = one.head(one.encoder(x))
    assert equal(one(x), want)
    other.encoder.weight = own
    assert equal(other(x), other.head(other.encoder(x)))
    for model in (one, other):
        model(x).sum().backward()
        assert model.encoder.weight.grad is not None


def test_a_part_of_a_megacompiled_model() -> None:
    outer = compiled(Two(nn.Linear(8, 8)))
    with pytest.raises(ModelError, match=r"Linear\.weight is owned .*\(Two\.encoder\.weight there"):
        compiled(outer.encoder)
    outer(torch.rand(2, 8))


def test_a_parameter_that_was_given_away() -> None:
    """Its owner has another one in its place, and was not called since."""
    one, other = compiled(Two(nn.Linear(8, 8))), Two(nn.Linear(8, 8))
    moved = one.encoder.weight
    one.encoder.weight = nn.Parameter(torch.rand(8, 8))
    other.encoder.weight = moved
    plain = copy.deepcopy(nn.ModuleList([one, other]))
    compiled(other)
    for pair in ((one, other), plain):
        optimizer = AdamW([p for model in pair for p in model.parameters()], lr=1e-2)
        for i in range(6):
            x = torch.rand(2, 8, generator=torch.Generator().manual_seed(i))
            for model in pair if i > 2 else (pair[1],):
                model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    for model, want in zip((one, other), plain, strict=True):
        for got, wanted in zip(model.parameters(), want.parameters(), strict=True):
            assert equal(got.detach(), wanted.detach())


def test_parameters_of_a_dead_model() -> None:
    encoder = nn.Linear(8, 8)
    one: Any = compiled(Two(encoder))
    x = torch.rand(2, 8)
    one(x).sum().backward()
    del one  # nobody collects it: a model and what is behind its calls refer to each other
    gc.disable()
    try:
        other = compiled(Two(encoder))
    finally:
        gc.enable()
    assert equal(other(x), other.head(encoder(x)))


def test_a_deepcopy_and_a_second_call() -> None:
    one = compiled(Two(nn.Linear(8, 8)))
    assert compiled(one) is one
    other = compiled(copy.deepcopy(one))
    x = torch.rand(2, 8)
    assert equal(one(x), other(x))
    del one
    gc.collect()
    assert equal(other(x), other.head(other.encoder(x)))
