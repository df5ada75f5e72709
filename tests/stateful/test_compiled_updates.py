"""Loops around updates that Inductor compiles: by the host, by the device, and resident.

Equal to the plain loop but for rounding. What loops do to gradients and memory is drawn in
`test_training.py`, with compiled updates too.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Adam, AdamW, Muon, Optimizer

from megacompile.errors import BackwardError
from tests import inside
from tests.equality.nets import Applies
from tests.stateful.late import late
from tests.zoo import assert_close, twins

CONFIGS: dict[str, dict[str, Any]] = {
    "host": {"device_update": 0},
    "device update": {"device_update": 1.0},
    "resident": {"resident": "all"},
}

pytestmark = pytest.mark.skipif(not inside.has_cpp_compiler(), reason="needs a C++ compiler")


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
        self.a, self.b = (nn.Parameter(torch.rand(12, 25) + 0.5) for _ in range(2))
        self.c = nn.Parameter((torch.rand(25, 12) + 0.5).t())

    def forward(self, x: Tensor, skip: str) -> Tensor:
        x = self.a * x + self.c
        return x if skip else x * self.b


def adamw(model: Any) -> Optimizer:
    return AdamW(model.parameters(), lr=1e-2)


def backward(model: nn.Module, i: int, skip: str = "") -> None:
    x = torch.rand(4, 12, 25, generator=torch.Generator().manual_seed(i))
    model(x, skip).backward()


def steps(model: nn.Module, optimizer: Optimizer, *seeds: int) -> None:
    for i in seeds:
        backward(model, i)
        optimizer.step()
        optimizer.zero_grad()


def unusual(model: Any) -> list[Optimizer]:
    """Gradients that are not there, or added to, and states that are written under another name."""
    optimizer = adamw(model)
    steps(model, optimizer, 0, 1)
    backward(model, 5, skip="b")  # b gets none
    optimizer.step()
    backward(model, 5)
    model.layers[0].b.grad = None
    optimizer.step()
    backward(model, 6)
    backward(model, 7, skip="b")  # adds to the others
    optimizer.step()
    states = [optimizer.state[p]["exp_avg"].data for p in model.parameters()]
    backward(model, 7)
    for state in states:
        state.mul_(0.5)
    del state, states
    optimizer.step()
    model.zero_grad()
    return [optimizer]


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
            backward(model, 10 * i + k)
            nn.utils.clip_grad_norm_(params, 1e-2)
            each.step()
            model.zero_grad()
    return [first, second, *others]


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.filterwarnings("ignore:megacompile")
def test_loops(config: str) -> None:
    """Parameters and states are those of the plain loop."""
    torch.manual_seed(0)
    options = {"lowering": "inductor", "progress": False, **CONFIGS[config]}
    plain, streamed = twins(Product(), **options)
    found = [[*unusual(model), *several_optimizers(model)] for model in (plain, streamed)]
    assert_close(plain, streamed, 1e-5)
    pairs = list(zip(plain.parameters(), streamed.parameters(), strict=True))
    for mine, theirs in zip(*found, strict=True):
        for want, got in pairs:
            states, others = mine.state.get(want, {}), theirs.state.get(got, {})
            assert states.keys() == others.keys()
            for name, state in states.items():
                error = float((others[name] - state).norm())
                assert error <= 1e-4 * float(state.norm()), name


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


def test_a_backward_that_waits_for_no_parameter_waits_for_the_update() -> None:
    """Which reads the gradients that it writes."""
    shifts = {name: nn.Parameter(torch.zeros(16)) for name in "abc"}
    shifted = Applies(lambda model, x: (x + model.a + model.b + model.c).sum(), **shifts)
    both = twins(shifted, lowering="inductor", progress=False, device_update=0)
    late(both[1])
    for model in both:
        optimizer = SGD(model.parameters(), lr=0.1)
        losses = [model(torch.ones(4, 16)) * i for i in (1, 2)]
        for loss in losses:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert_close(*both, 1e-5)


def test_updates_in_the_background_are_out_of_the_compilers_hands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Dynamo, while it compiles, changes and restores the random state of the whole process, and a
    reset frees what another thread runs: so the code runs without it."""
    torch.manual_seed(0)
    plain, model = twins(Product(), lowering="inductor", progress=False, device_update=0)
    mine, theirs = adamw(plain), adamw(model)
    steps(plain, mine, 0, 1, 2)
    steps(model, theirs, 0, 1)
    backward(model, 2)
    inside.wait_for_updates(model)

    def never(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError

    before = torch.get_rng_state()
    torch.compiler.reset()
    with monkeypatch.context() as patched:
        patched.setattr(torch, "compile", never)
        theirs.step()
        inside.wait_for_updates(model)
    assert torch.equal(torch.get_rng_state(), before)
    assert_close(plain, model, 1e-5)


def test_a_change_past_the_guards_reaches_the_update_on_the_device() -> None:
    """As C++ makes it, which calls no `__torch_function__`."""
    torch.manual_seed(0)
    options = {"lowering": "inductor", "progress": False, "resident": 0, "device_update": 1.0}
    both = twins(Product(), **options)
    for model in both:
        optimizer = adamw(model)
        for i in range(4):
            optimizer.zero_grad()
            backward(model, i)
            if i > 1:
                with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                    model.layers[0].a.mul_(0.5)
            optimizer.step()
    assert_close(*both, 1e-5)
