"""`torch.func.functional_call` of a megacompiled model: other tensors are its weights in a call.

They may depend on parameters (MAML, hypernetworks), so gradients flow through them. Each test does
the same to a plain copy, and compares every bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from tests import inside, zoo
from tests.zoo import (
    WIDTH,
    Stack,
    assert_same,
    assert_steps_same,
    batch,
    equal,
    stacks,
    step,
    twins,
)

Weights = dict[str, Tensor]


def in_place(model: Any) -> tuple[Any, ...]:
    """What a functional call leaves as it is: parameters, where they lie, their proxies."""
    streamed = inside.streamed(model)
    places = [(name, id(p), p.data_ptr()) for name, p in model.named_parameters()]
    return places, list(map(id, streamed.machine.buckets.values())), id(streamed.buckets.proxies)


def named(model: nn.Module) -> Weights:
    return dict(model.named_parameters())


def call(model: nn.Module, weights: Weights, seed: int = 1) -> Tensor:
    loss: Tensor = functional_call(model, weights, kwargs=batch(seed))
    return loss


# --- losses of models with other weights


def inner_step(model: nn.Module) -> Tensor:
    """First-order MAML: the loss behind an inner step of SGD."""
    params = named(model)
    loss = model(**batch())
    gradients = torch.autograd.grad(loss, list(params.values()))
    moved = {n: p - 0.1 * g for (n, p), g in zip(params.items(), gradients, strict=True)}
    return call(model, moved, 2)


def two_inner_steps(model: nn.Module) -> Tensor:
    """Each with the weights of the last, the second of some of them."""
    params = named(model)
    weights: Weights = dict(params)
    for i, names in enumerate((list(params), [n for n in params if "head" in n])):
        gradients = torch.autograd.grad(call(model, weights, i), [weights[n] for n in names])
        weights |= {n: weights[n] - 0.1 * g for n, g in zip(names, gradients, strict=True)}
    return call(model, weights, 3)


def scaled(model: Any) -> Tensor:
    return call(model, {"head.weight": model.head.weight * 2, "head.bias": model.head.weight[0]})


def of_one_layer(model: Any) -> Tensor:
    return call(model, {f"layers.1.{n}": p * 0.5 for n, p in named(model.layers[1]).items()})


def detached(model: nn.Module) -> Tensor:
    some = {n: p.detach() for n, p in model.named_parameters() if "layers.0" in n}
    return call(model, some)


def its_own(model: nn.Module) -> Tensor:
    return call(model, dict(model.named_parameters()))


def own_in_another_place(model: Any) -> Tensor:
    """Tied for the time of a call."""
    return call(model, {"head.weight": model.embed.weight})


def exchanged(model: Any) -> Tensor:
    other = {"head.weight": model.embed.weight, "embed.weight": model.head.weight}
    return call(model, other)


def with_a_plain_call(model: nn.Module) -> Tensor:
    with_others = call(model, {n: p * 2 for n, p in model.named_parameters() if "bias" in n})
    result: Tensor = with_others * 3
    return result


def of_a_streamed_one(model: Any) -> Tensor:
    """A weight that depends on a parameter which the same call streams."""
    return call(model, {"head.weight": model.embed.weight * 2 + model.head.weight})


LOSSES = (
    inner_step,
    two_inner_steps,
    scaled,
    of_one_layer,
    detached,
    its_own,
    own_in_another_place,
    exchanged,
    with_a_plain_call,
    of_a_streamed_one,
)


@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_reach_what_the_weights_depend_on(loss: Callable[[Any], Tensor]) -> None:
    plain, model, inputs = stacks()
    assert_steps_same(plain, model, inputs)
    before = in_place(model)
    for _ in range(2):
        values = []
        for each in (plain, model):
            each.zero_grad()
            value = loss(each)
            value.backward()
            values.append(value.detach())
        assert equal(*values)
        assert_same(plain, model)
        assert in_place(model) == before
    plain.zero_grad()
    model.zero_grad()
    assert_steps_same(plain, model, inputs)
    assert in_place(model) == before


TRANSFORMS: dict[str, Callable[[Any], Tensor]] = {
    "grad": lambda m: grad(lambda w: call(m, w))(named(m))["head.weight"],
    "vmap": lambda m: vmap(lambda x: functional_call(m, named(m), x))(batch()["x"]),
    "gradients of samples": lambda m: vmap(
        grad(lambda w, x, y: functional_call(m, w, (x, y))), (None, 0, 0)
    )({n: p.detach() for n, p in m.named_parameters()}, *batch().values())["layers.0.up.weight"],
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.filterwarnings("ignore:megacompile. .* eager mode")
def test_transforms(transform: str) -> None:
    """Their tensors stand in for parameters too; the call runs in eager mode."""
    plain, model, inputs = stacks()
    values = [TRANSFORMS[transform](each).detach() for each in (plain, model)]
    assert equal(*values)
    assert_steps_same(plain, model, inputs)


def test_it_trains() -> None:
    """Outer steps of MAML: the update of the streamed parameters is seen by the next inner step."""
    plain, model, _ = stacks()
    for each in (plain, model):
        optimizer = torch.optim.AdamW(each.parameters(), lr=0.01)
        for _ in range(3):
            inner_step(each).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same(plain, model)


def test_a_hypernetwork() -> None:
    """Its outputs are the head's weights; everything else is streamed."""
    plain, model, _ = stacks()
    grads = []
    for each in (plain, model):
        torch.manual_seed(5)
        hyper = nn.Linear(4, WIDTH * WIDTH)
        for i in range(2):
            made = hyper(torch.ones(4) * i).view(WIDTH, WIDTH)
            call(each, {"head.weight": made}, i).backward()
        grads.append([p.grad for p in hyper.parameters()])
    assert all(equal(mine, theirs) for mine, theirs in zip(*grads, strict=True))
    assert_same(plain, model)


def test_parameters_that_are_given() -> None:
    """As an average of the weights is: no replacement, so they go into no bucket."""
    plain, model, inputs = stacks()
    assert_steps_same(plain, model, inputs)
    before = in_place(model)
    grads = []
    for each in (plain, model):
        given: Weights = {n: nn.Parameter(p.detach() * 0.9) for n, p in named(each).items()}
        places = [p.data_ptr() for p in given.values()]
        each.zero_grad()
        call(each, given).backward()
        assert [p.data_ptr() for p in given.values()] == places
        grads.append([p.grad for p in given.values()])
    assert all(equal(mine, theirs) for mine, theirs in zip(*grads, strict=True))
    assert all(p.grad is None for p in model.parameters())
    assert in_place(model) == before
    assert_steps_same(plain, model, inputs)


def test_tied_parameters() -> None:
    """One tensor is given for both places."""
    plain, model = twins(zoo.tied()[0])
    for each in (plain, model):
        step(each, batch())
        call(each, {"embed.weight": each.embed.weight * 2}).backward()
        assert each.head.weight is each.embed.weight
    assert_same(plain, model)


def test_buffers() -> None:
    """Running statistics go into the dict that was given, not into the model."""
    plain, model = twins(zoo.batchnorm()[0])
    given = []
    for each in (plain, model):
        step(each, batch())
        state = {n: b.clone() for n, b in each.named_buffers()}
        state |= {n: p * 2 for n, p in each.named_parameters()}
        call(each, state, 2).backward()
        given.append(state)
    assert_same(plain, model)
    assert list(given[0]) == list(given[1])
    assert all(equal(given[0][name], given[1][name]) for name in given[0])


def test_without_gradients() -> None:
    plain, model, inputs = stacks()
    weights = {"head.weight": torch.eye(WIDTH)}
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert equal(*(call(each, weights) for each in (plain, model)))
    assert_steps_same(plain, model, inputs)


def test_in_a_module_around() -> None:
    class Around(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner
            self.scale = nn.Parameter(torch.tensor(3.0))

        def forward(self, **inputs: Tensor) -> Tensor:
            result: Tensor = self.inner(**inputs) * self.scale
            return result

    plain, model, _ = stacks()
    for each in (plain, model):
        around = Around(each)
        call(around, {n: p * 2 for n, p in around.named_parameters()}).backward()
    assert_same(plain, model)


def test_changes_of_the_model_before() -> None:
    """What the user replaced is taken over in the same call, with the tensors given out of it."""
    plain, model, inputs = stacks()
    assert_steps_same(plain, model, inputs)
    for each in (plain, model):
        each.zero_grad()
        torch.manual_seed(3)
        each.layers.append(zoo.Block())
        each.embed.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        weights = {n: p * 2 for n, p in each.named_parameters() if "layers" in n}
        call(each, weights).backward()
    assert_same(plain, model)
    assert_steps_same(plain, model, inputs)


def test_a_weight_where_there_was_none() -> None:
    torch.manual_seed(0)
    made = Stack()
    made.head = nn.Linear(WIDTH, WIDTH, bias=False)
    plain, model = twins(made)
    for each in (plain, model):
        bias = torch.ones(WIDTH, requires_grad=True)
        call(each, {"head.bias": bias}).backward()
        assert each.head.bias is None
    assert_same(plain, model)
    assert_steps_same(plain, model, batch())


def test_a_forward_that_fails() -> None:
    plain, model, inputs = stacks()
    weights = {"head.weight": torch.ones(1, 2)}
    given = dict(weights)
    with pytest.raises(RuntimeError):
        call(model, weights)
    assert weights == given
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert_steps_same(plain, model, inputs)
