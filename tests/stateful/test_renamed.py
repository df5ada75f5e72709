"""Parameters that are tied, renamed or moved to other holders after `megacompile()`.

Each test does the same to a megacompiled model and to a plain copy of it, and compares every bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from megacompile.ir.capture import TensorInput
from tests import inside
from tests.zoo import WIDTH, Inputs, Stack, assert_same, assert_steps_same, batch, step, twins


class Pair(nn.Module):
    """Two layers of one shape, which lie in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.b = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.b(self.a(x).relu())
        return result


def pairs() -> tuple[Any, Any, Inputs]:
    """A stack of pairs, plain and megacompiled, that have made a step."""
    torch.manual_seed(0)
    plain, model = twins(Stack(block=Pair))
    for each in (plain, model):
        step(each, batch())
        each.zero_grad()
    return plain, model, batch()


def assert_streamed(model: nn.Module, *, strict: bool = False) -> None:
    """Each parameter lies in a bucket, under the name that it has now.

    Args:
        strict: and no captured graph takes one as a plain input.
    """
    named = [
        (place.name, id(param))
        for bucket in inside.buckets(model).values()
        for place, param in zip(bucket.layout.params, bucket.params, strict=True)
    ]
    now = {id(param) for param in model.parameters()}
    every = {(name, id(p)) for name, p in model.named_parameters(remove_duplicate=False)}
    assert len(named) == len(now) and {param for _, param in named} == now
    assert set(named) <= every
    inputs = [x for program in inside.programs(model) for x in program.capture.inputs]
    plain = [x for x in inputs if isinstance(x, TensorInput) and x.meta.requires_grad]
    assert inputs and not (strict and plain)


def assign(model: Any, target: str, source: str) -> None:
    """`model.target = model.source`."""
    path, _, name = target.rpartition(".")
    owner, _, other = source.rpartition(".")
    setattr(model.get_submodule(path), name, getattr(model.get_submodule(owner), other))


TIES = [
    ("layers.1.a.weight", "layers.1.b.weight"),
    ("layers.1.a", "layers.2.b"),
    ("head.weight", "embed.weight"),
]


def test_tied_after_a_step_and_untied() -> None:
    """A graph that was captured before has two inputs where there is one parameter now."""
    plain, model, inputs = pairs()
    for tie in TIES:
        for each in (plain, model):
            assign(each, *tie)
        assert_steps_same(plain, model, inputs)
        assert_steps_same(plain, model, inputs)
        assert_streamed(model)
    for i in range(3):
        for each in (plain, model):
            each.zero_grad()
            layer = each.layers[0]
            own = nn.Parameter(layer.b.weight.detach() * 2)
            layer.a.weight = own if i % 2 else layer.b.weight
        assert_steps_same(plain, model, inputs)
        assert_streamed(model)


# Parameters of other names, and in other holders.


class Adapter(nn.Module):
    """A frozen layer, and a low-rank term beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.full((base.in_features, 2), 0.1))
        self.up = nn.Parameter(torch.full((2, base.out_features), 0.2))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base(x) + x @ self.down @ self.up
        return result

    def merged(self) -> nn.Linear:
        """The layer alone, with the term in its weight."""
        with torch.no_grad():
            self.base.weight += (self.down @ self.up).t()
        return self.base.requires_grad_(True)


class Converted(nn.Linear):
    """What quantization-aware training and float8 put in a layer's place, with its parameters."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__(base.in_features, base.out_features, device="meta")
        self.weight, self.bias = base.weight, base.bias

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x.t()


def parametrize_(model: Any) -> None:
    parametrize.register_parametrization(model.layers[1].a, "weight", Symmetric())


def unparametrize(model: Any) -> None:
    parametrize.remove_parametrizations(model.layers[1].a, "weight")


def inject(model: Any) -> None:
    for layer in model.layers:
        layer.a = Adapter(layer.a)


def merge(model: Any) -> None:
    for layer in model.layers:
        layer.a = layer.a.merged()


def convert(model: Any) -> None:
    for layer in model.layers:
        layer.a, layer.b = Converted(layer.a), Converted(layer.b)


def rename(model: Any) -> None:
    """In the same place of the same holder, which ids in a row do not tell."""
    layer = model.head
    params, layer._parameters = layer._parameters, {}
    layer.register_parameter("matrix", params["weight"])
    layer.register_parameter("shift", params["bias"])
    layer.forward = lambda x: F.linear(x, layer.matrix, layer.shift)


def exchange(model: Any) -> None:
    """Two layers change places."""
    first, last = model.layers[0], model.layers[2]
    model.layers[0], model.layers[2] = last, first


def other_holder(model: Any) -> None:
    """A module of the same class with the same parameters is in the place of each."""
    for layer in model.layers:
        for name in ("a", "b"):
            made = nn.Linear(WIDTH, WIDTH)
            made.weight, made.bias = getattr(layer, name).weight, getattr(layer, name).bias
            setattr(layer, name, made)


def as_it_is(model: Any) -> None:
    del model


CHANGES: dict[str, tuple[Callable[[Any], None], ...]] = {
    "parametrized": (parametrize_, unparametrize),
    "adapters": (inject, merge),
    "renamed, and layers that change places": (rename, exchange),
    "other holders, then converted": (other_holder, convert),
}


@pytest.mark.parametrize("change", CHANGES)
def test_renamed_and_moved_parameters(change: str) -> None:
    plain, model, inputs = pairs()
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (plain, model)]
    for apply in (*CHANGES[change], as_it_is):
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            apply(each)
            optimizer.zero_grad()
        names = list(plain.state_dict())
        assert_steps_same(plain, model, inputs)
        for optimizer in optimizers:
            optimizer.step()
        assert list(model.state_dict()) == names
        assert_same(plain, model)
        assert_streamed(model, strict=True)
