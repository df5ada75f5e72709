"""Parameters that are tied, renamed or moved to other holders after `megacompile()`.

Each test does the same to a megacompiled model and to a plain copy of it, and compares every bit.
"""

from __future__ import annotations


import pytest
import torch
from torch import Tensor, nn

from megacompile.runtime.streamed import StreamedModel
from tests.zoo import WIDTH, Inputs, Stack, assert_steps_same, batch, step, twins


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


def in_buckets(model: nn.Module) -> bool:
    """Does each parameter lie in a bucket, under the name that it has now?"""
    streamed = model._compiled_call_impl
    assert isinstance(streamed, StreamedModel)
    named = [
        (place.name, id(param))
        for bucket in streamed.machine.buckets.values()
        for place, param in zip(bucket.layout.params, bucket.params, strict=True)
    ]
    now = {id(param) for param in model.parameters()}
    every = {(name, id(p)) for name, p in model.named_parameters(remove_duplicate=False)}
    return len(named) == len(now) and {param for _, param in named} == now and set(named) <= every


def assign(model: Any, target: str, source: str) -> None:
    """`model.target = model.source`."""
    path, _, name = target.rpartition(".")
    owner, _, other = source.rpartition(".")
    setattr(model.get_submodule(path), name, getattr(model.get_submodule(owner), other))


# --- ties

TIES = {
    "weights of a layer": ("layers.1.a.weight", "layers.1.b.weight"),
    "biases of a layer": ("layers.0.a.bias", "layers.0.b.bias"),
    "weights of two layers": ("layers.2.a.weight", "layers.0.b.weight"),
    "a module in a layer": ("layers.1.a", "layers.1.b"),
    "a module of another layer": ("layers.1.a", "layers.2.b"),
    "a layer": ("layers.1", "layers.2"),
    "head and embedding": ("head.weight", "embed.weight"),
}


@pytest.mark.parametrize("tie", TIES)
def test_tied_after_a_step(tie: str) -> None:
    """A graph that was captured before has two inputs where there is one parameter now."""
    plain, model, inputs = pairs()
    for each in (plain, model):
        assign(each, *TIES[tie])
    assert_steps_same(plain, model, inputs)
    assert_steps_same(plain, model, inputs)
    assert in_buckets(model)


def test_tied_and_untied_in_turns() -> None:
    plain, model, inputs = pairs()
    for i in range(4):
        for each in (plain, model):
            each.zero_grad()
            layer = each.layers[1]
            own = nn.Parameter(layer.b.weight.detach() * 2)
            layer.a.weight = own if i % 2 else layer.b.weight
        assert_steps_same(plain, model, inputs)
        assert in_buckets(model)
