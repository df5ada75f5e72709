"""Modules that nobody listed, and calls of modules in a megacompiled model.

Captured or not, they train as in the plain model, in every bit. Of what is called alone, all is
streamed, or it is said.
"""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.utils.checkpoint import checkpoint

from megacompile import megacompile, schedules
from megacompile.ir.capture import ParamInput
from tests import inside
from tests.equality.nets import Applies, assert_alike, trained
from tests.zoo import WIDTH, Stack, assert_same, batch, equal, step, twins

MODULES: dict[str, Callable[[], nn.Module]] = {}


def unusual(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    MODULES[make.__name__.removeprefix("_")] = make
    return make


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


@unusual
def _odd_parameters() -> nn.Module:
    """Complex, integer, boolean, scalar and empty ones."""

    def run(m: Any, x: Tensor) -> Tensor:
        y = torch.cat([x[..., m.order], m.empty.expand(*x.shape[:2], 0)], -1)
        mixed = (y.to(torch.cfloat) @ m.complex).abs() * m.mask * m.scalar
        return m.layer(mixed)

    return Applies(
        run,
        layer=linear(),
        complex=nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.cfloat)),
        order=nn.Parameter(torch.arange(WIDTH).flip(0), requires_grad=False),
        mask=nn.Parameter(torch.ones(WIDTH, dtype=torch.bool), requires_grad=False),
        scalar=nn.Parameter(torch.tensor(1.5)),
        empty=nn.Parameter(torch.empty(0)),
    )


@unusual
def _writes_through_views() -> nn.Module:
    @torch._dynamo.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def write(m: Any) -> None:
        m.layer.bias[0] = 3
        m.layer.weight[1:3].mul_(2)
        m.layer.weight.view(-1)[3:7] = 0
        first, second = m.layer.weight.chunk(2)
        first.copy_(second)
        m.last = m.layer.weight.detach()[0] * 1  # a buffer that is replaced, not changed

    def run(m: Any, x: Tensor) -> Tensor:
        write(m)
        return m.layer(x)

    return Applies(run, layer=linear(), last=torch.zeros(WIDTH))


@unusual
def _forces() -> nn.Module:
    """A gradient inside of the forward, also where the caller has it off."""

    def run(m: Any, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            (force,) = torch.autograd.grad(m.energy(x).square().sum(), x)
        return m.head(force)

    return Applies(run, energy=linear(), head=linear())


@pytest.mark.filterwarnings("ignore:megacompile")  # some are not captured, and say so
@pytest.mark.parametrize("name", MODULES)
def test_unusual_modules(name: str) -> None:
    torch.manual_seed(0)
    models = twins(MODULES[name]())
    x = torch.randn(2, 5, WIDTH)

    def steps(model: Any) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        seen = [trained(x)(model)]
        optimizer.step()
        return [*seen, trained(x)(model)]

    assert_alike(models, steps, times=2)
    assert all(type(p) is nn.Parameter for p in models[1].parameters())
    with torch.no_grad():
        assert_alike(models, lambda m: m.eval()(x))


class Task(nn.Module):
    """As a LightningModule: the loop calls its methods, which call modules in it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Stack()
        self.head = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.loss = nn.MSELoss()

    def training_step(self, inputs: dict[str, Tensor]) -> Tensor:
        hidden = self.norm(self.net(inputs["x"]))
        return self.loss(self.head(hidden), inputs["y"])

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.net(x)))


def streamed_names(model: nn.Module) -> set[str]:
    found = set()
    for program in inside.programs(model):
        for given in program.capture.inputs:
            if isinstance(given, ParamInput):
                found.add(given.bucket.params[given.param].name)
    return found


def test_a_training_step_that_calls_modules() -> None:
    """All parameters are streamed, and nothing is said, not even of a head that is never used."""
    plain, model = twins(Task())
    optimizers = [AdamW(each.parameters(), lr=1e-2) for each in (plain, model)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(3):
            for each, optimizer in zip((plain, model), optimizers, strict=True):
                loss = each.training_step(batch(i)) if i < 2 else each.net(**batch(i))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            assert_same(plain, model)
    assert not [w for w in caught if str(w.message).startswith("megacompile")]
    assert streamed_names(model) == {name for name, _ in model.named_parameters()}
    assert all(schedule.backward is not None for schedule in schedules(model))


def within(mode: Callable[[], Any], model: Any, i: int) -> Tensor:
    """The loss of a call in a mode of autograd's, of an input that gets a gradient."""
    x = batch(i)["x"].requires_grad_()
    with mode():
        loss: Tensor = model(x.tanh()).square().mean()
    (gradient,) = torch.autograd.grad(loss, x, retain_graph=True)
    return loss + gradient.sum()


CALLS: dict[str, Callable[[Any, int], Tensor]] = {
    "save_on_cpu": lambda m, i: within(torch.autograd.graph.save_on_cpu, m, i),  # the first one
    "on its own output": lambda m, i: m(m(batch(i)["x"])).square().mean(),
    "the model and a module": lambda m, i: m(batch(i)["x"]).sum() + m.net(**batch(i)),
    "a head outside": lambda m, i: F.mse_loss(m.head(m(batch(i)["x"])), batch(i)["y"]),
    "a layer": lambda m, i: m.net.layers[1](batch(i)["x"]).square().mean(),
    "one twice": lambda m, i: m.head(m.head(batch(i)["x"])).square().mean(),
    "a checkpoint": lambda m, i: checkpoint(
        lambda x: m.net(x.sin()).cos().sum(), batch(i)["x"], use_reentrant=False
    ),
    "a reentrant checkpoint": lambda m, i: checkpoint(
        m.net, batch(i)["x"].requires_grad_(), use_reentrant=True
    ).sum(),
}


def test_calls_of_modules() -> None:
    """One after the other, of the same model."""
    plain, model = twins(Task())
    optimizers = [AdamW(each.parameters(), lr=1e-2) for each in (plain, model)]
    for name, loss in CALLS.items():
        for i in range(2):
            found = []
            for each, optimizer in zip((plain, model), optimizers, strict=True):
                torch.manual_seed(i)
                found.append(loss(each, i))
                found[-1].backward()
                optimizer.step()
                optimizer.zero_grad()
            assert equal(found[0].detach(), found[1].detach()), name
            assert_same(plain, model)
    for each in (plain, model):
        each.eval()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert equal(plain.net(batch()["x"]), model.net(batch()["x"]))
            assert equal(plain.head(batch()["x"]), model.head(batch()["x"]))


def test_modules_that_came_since_and_went() -> None:
    plain, model = twins(Task())
    part = weakref.ref(model.net)
    for each in (plain, model):
        torch.manual_seed(3)
        each.extra = nn.Linear(WIDTH, WIDTH)
        each.net(**batch()).backward()  # takes over again
        each.extra(batch()["x"]).sum().backward()
    assert_same(plain, model)
    assert "extra.weight" in streamed_names(model)
    optimizer = SGD(model.parameters(), lr=0.1)
    optimizer.step()
    for each in (plain, model):
        each.net, each.norm = nn.Identity(), nn.BatchNorm1d(WIDTH)
    model(batch()["x"]).sum().backward()
    optimizer.step()
    gc.collect()
    assert part() is None, "the model does not keep what was replaced"


@pytest.mark.parametrize("in_backward", [False, True])
def test_an_old_loss_keeps_no_model(in_backward: bool) -> None:
    """As `merge_and_unload()` of PEFT: the inner model is taken out of the outer one. A part keeps
    no model either, and what an old loss gives to inputs is as ever."""
    outer: Any = nn.Sequential(Stack())
    optimizer = AdamW(outer.parameters(), lr=1e-2)
    given: dict[str, Any] = {"optimizer": optimizer} if in_backward else {}
    twin = copy.deepcopy(outer)
    megacompile(outer, device="cpu", lowering="eager", **given)
    xs = [batch()["x"].requires_grad_() for _ in range(2)]
    old, theirs = outer(xs[0]).sum(), twin(xs[1]).sum()
    older = outer(batch()["x"]).sum()
    inner, streamed = outer[0], weakref.ref(inside.streamed(outer))
    del outer, optimizer
    gc.collect()
    assert streamed() is None
    if not in_backward:  # there, the backward would update what is gone
        theirs.backward()
        old.backward()
        assert equal(xs[0].grad, xs[1].grad)
    inner.zero_grad()
    plain = copy.deepcopy(inner)
    assert equal(step(plain, batch()), step(inner, batch())), "plain again"
    megacompile(inner, device="cpu", lowering="eager")
    for each in (plain, inner):
        step(each, batch())
    assert_same(plain, inner)
    assert older.requires_grad, "it lives"
