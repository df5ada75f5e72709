"""Calls of a streamed model and of modules in it, that nobody listed: forms, other weights.
Captured or not, they train as in the plain model, in every bit. Of what is called alone, all is
streamed, or it is said."""

from __future__ import annotations

import copy
import functools
import gc
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.optim import SGD, AdamW
from torch.utils.checkpoint import checkpoint

from megacompile import megacompile, schedules
from megacompile.ir.capture import ParamInput
from tests import inside, zoo
from tests.equality.nets import (
    Applies,
    assert_alike,
    in_a_row,
    leaves,
    said,
    train,
    trained,
    with_adamw,
)
from tests.zoo import WIDTH, Stack, assert_same, batch, equal, step, twins


class Output(NamedTuple):
    prediction: Tensor
    hidden: Any


@dataclass
class Record:
    prediction: Tensor
    hidden: Tensor


FORMS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "same twice": lambda p, h: (h, h, p),
    "nested": lambda p, h: {"a": Output(p, [h, None, 3, "text"]), "b": {"c": p}},
    "dataclass": Record,
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_outputs(form: str) -> None:
    """Whichever outputs get a gradient; at last in two backwards, one after the other."""

    def forward(m: Any, x: Tensor) -> Any:
        hidden = m.stack.layers[0](m.stack.embed(x))
        return FORMS[form](m.stack.head(m.stack.layers[1](hidden)), hidden)

    models = twins(Applies(forward, stack=Stack()))
    for chosen in (slice(None), slice(0, 1), slice(1, 2), None):

        def use(model: Any, chosen: slice | None = chosen) -> Any:
            output = model(X)
            losses = [t.square().sum() for t in leaves(output) if isinstance(t, Tensor)]
            if chosen is None:
                losses[0].backward(retain_graph=True)
                losses[-1].backward()
            else:
                torch.stack(losses[chosen]).sum().backward()
            return output

        assert_alike(models, use)


def through(m: Any, data: dict[str, Any], *, scale: float, add: Tensor | None) -> Any:
    """Takes containers, numbers and what may be missing; gives its input back."""
    first, rest = data["pair"]
    out: Tensor = m.first(first) * scale + rest["y"]
    return first, out if add is None else out + add, first[1:]


def test_nested_inputs_and_inputs_that_are_outputs() -> None:
    models = twins(in_a_row(through, count=1, width=WIDTH))
    for scale, add in ((2.0, None), (0.5, None), (0.5, torch.ones(WIDTH))):

        def use(model: Any, scale: float = scale, add: Tensor | None = add) -> Any:
            x = batch()["x"].requires_grad_()
            same, out, part = model({"pair": (x, {"y": Y})}, scale=scale, add=add)
            assert equal(same, x) and equal(part, x[1:])
            (out.square().sum() + part.square().sum()).backward()
            model({"pair": (x, {"y": Y})}, scale=scale, add=add)[0].sum().backward()
            return x.grad

        assert_alike(models, use)


X, Y = batch(1).values()


def test_hooks_on_saved_tensors_see_nothing_of_a_capture() -> None:
    """A checkpoint compares what is saved in both of its forwards; the first one is captured."""
    models = twins(zoo.graph_break()[0])
    assert_alike(models, lambda m: checkpoint(m, X, Y, use_reentrant=False).backward())


Weights = dict[str, Tensor]


def named(model: nn.Module) -> Weights:
    return dict(model.named_parameters())


def called(model: nn.Module, weights: Weights, seed: int = 1) -> Tensor:
    return functional_call(model, weights, kwargs=batch(seed))


def inner_step(model: nn.Module) -> Tensor:
    """First-order MAML: the loss behind two inner steps of SGD, the second of some weights."""
    weights = named(model)
    for i, names in enumerate((list(weights), [n for n in weights if "head" in n])):
        gradients = torch.autograd.grad(called(model, weights, i), [weights[n] for n in names])
        weights |= {n: weights[n] - 0.1 * g for n, g in zip(names, gradients, strict=True)}
    return called(model, weights, 3)


def given_parameters(model: nn.Module) -> Tensor:
    """As an average of the weights is: no replacement, so they go into no bucket."""
    given: Weights = {n: nn.Parameter(p.detach() * 0.9) for n, p in named(model).items()}
    places = [p.data_ptr() for p in given.values()]
    called(model, given).backward()
    assert [p.data_ptr() for p in given.values()] == places
    return torch.stack([p.grad.sum() for p in given.values() if p.grad is not None]).sum()


def in_a_module_around(model: nn.Module) -> Tensor:
    scale = nn.Parameter(torch.tensor(3.0))
    made = Applies(lambda m, **inputs: m.inner(**inputs) * m.scale, inner=model, scale=scale)
    return called(made, {n: p * 2 for n, p in made.named_parameters()})


def of_samples(model: nn.Module) -> Tensor:
    weights = {n: p.detach() for n, p in model.named_parameters()}
    each = vmap(grad(lambda w, x, y: functional_call(model, w, (x, y))), (None, 0, 0))
    return each(weights, X, Y)["layers.0.up.weight"]


def came_since(model: Any) -> Tensor:
    """Taken over in the call, with the tensors given out of it."""
    torch.manual_seed(3)
    model.layers.append(zoo.Block())
    model.embed.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
    return called(model, {n: p * 2 for n, p in model.named_parameters() if "layers" in n})


LOSSES: dict[str, Callable[[Any], Tensor]] = {
    "MAML": inner_step,
    "exchanged": lambda m: called(
        m, {"head.weight": m.embed.weight, "embed.weight": m.head.weight}
    ),
    "of a streamed one": lambda m: called(m, {"head.weight": m.embed.weight * 2 + m.head.weight}),
    "parameters": given_parameters,
    "a module around": in_a_module_around,
    "gradients of samples": of_samples,
    "what came since": came_since,
}


def places(model: Any) -> tuple[Any, ...]:
    """What a functional call leaves as it is: parameters, where they lie, their proxies."""
    streamed = inside.streamed(model)
    found = [(name, id(p), p.data_ptr()) for name, p in model.named_parameters()]
    return found, list(map(id, streamed.machine.buckets.values())), id(streamed.buckets.proxies)


@pytest.mark.filterwarnings("ignore:megacompile. .* eager mode")  # of torch.func's transforms
def test_functional_calls_of_one_model() -> None:
    """Gradients reach what the weights depend on. It trains, and the next call sees the update."""
    models = plain, model = twins(zoo.stack()[0])
    optimizers = {m: torch.optim.AdamW(m.parameters(), lr=0.01) for m in (plain, model)}
    for name, loss in LOSSES.items():

        def use(m: Any, loss: Callable[[Any], Tensor] = loss) -> Tensor:
            m.zero_grad()
            value = loss(m)
            if value.requires_grad:
                value.sum().backward()
            return value

        before = places(model)
        assert_alike(models, use, name=name)
        assert loss is came_since or places(model) == before, name
        for optimizer in optimizers.values():
            optimizer.step()


def norm(model: nn.Module) -> Tensor:
    return torch.stack([p.square().sum() for p in model.parameters()]).sum()


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, norm: Any) -> Tensor:
    """A step that reads parameters behind the last one, whose update may be on its way."""
    loss: Tensor = model(**batch()) + norm(model).detach()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@pytest.mark.parametrize("around", ["model", "step", "layers"])
def test_torch_compile_changes_nothing(around: str) -> None:
    models = plain, streamed = twins(zoo.stack()[0])
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=0.01) for m in (streamed, plain))
    compiled: Any = functools.partial(torch.compile, backend="aot_eager")
    for layer in [*plain.layers, *streamed.layers] if around == "layers" else []:
        layer.compile(backend="aot_eager")
    step = compiled(stepped) if around == "step" else stepped
    model = compiled(streamed) if around == "model" else streamed
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            assert equal(stepped(plain, theirs, norm), step(model, ours, compiled(norm)))
            assert_same(*models)
    said = [w for w in caught if str(w.message).startswith("megacompile")]
    assert len(said) == (around != "layers")
    assert schedules(model), "and it is still streamed"


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def odd_parameters() -> nn.Module:
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


def writes_through_views() -> nn.Module:
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


def forces() -> nn.Module:
    """A gradient inside of the forward, also where the caller has it off."""

    def run(m: Any, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            (force,) = torch.autograd.grad(m.energy(x).square().sum(), x)
        return m.head(force)

    return Applies(run, energy=linear(), head=linear())


@pytest.mark.filterwarnings("ignore:megacompile")  # some are not captured, and say so
@pytest.mark.parametrize("make", [odd_parameters, writes_through_views, forces])
def test_unusual_modules(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    models = twins(make())
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
    """One after the other, of the same model. All parameters are streamed, and nothing is said, not
    even of a head that is never used."""
    plain, model = twins(Task())
    pairs = with_adamw((plain, model))
    with said() as texts:
        train(pairs, lambda m, i: m.training_step(batch(i)), range(2))
        train(pairs, lambda m, i: m.net(**batch(i)), range(1))
    assert not texts and streamed_names(model) == {name for name, _ in model.named_parameters()}
    assert all(schedule.backward is not None for schedule in schedules(model))
    for loss in CALLS.values():
        train(pairs, loss, range(2))
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
