"""Calls of a streamed model: forms, autocast, other weights, and `torch.compile` around it."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils.checkpoint import checkpoint

from megacompile import schedules
from tests import inside, zoo
from tests.equality.nets import Applies, assert_alike, in_a_row, leaves, trained
from tests.zoo import WIDTH, Stack, assert_same, batch, equal, twins


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


def within(m: Any, x: Tensor, y: Tensor) -> Tensor:
    """Enters and leaves autocast; a part of it computes in float32 all the same."""
    with torch.autocast("cpu", torch.bfloat16):
        prediction = m.stack(x)
        with torch.autocast("cpu", enabled=False):
            prediction = prediction.float() @ m.stack.head.weight
    q, k, v = m.values(x).view(1, 4, 3, 2, 8).permute(2, 0, 3, 1, 4)
    heads = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)  # float32, on a CPU
    return F.mse_loss(prediction, y) + heads.float().square().mean()


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_autocast_inside(activations: str) -> None:
    """What was traced there has its casts already."""
    made = Applies(within, stack=Stack(), values=nn.Linear(WIDTH, 3 * WIDTH))
    models = twins(made, activations=activations)
    for enabled in (False, True):

        def use(model: Any, enabled: bool = enabled) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                loss: Tensor = model(X, Y)
            loss.backward()
            return loss

        assert_alike(models, use)


def test_autocast_in_another_dtype_has_code_of_its_own() -> None:
    models = twins(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            assert_alike(models, trained(X))


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


def train(model: nn.Module, optimizer: torch.optim.Optimizer, norm: Any) -> Tensor:
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
    step = compiled(train) if around == "step" else train
    model = compiled(streamed) if around == "model" else streamed
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            assert equal(train(plain, theirs, norm), step(model, ours, compiled(norm)))
            assert_same(*models)
    said = [w for w in caught if str(w.message).startswith("megacompile")]
    assert len(said) == (around != "layers")
    assert schedules(model), "and it is still streamed"
