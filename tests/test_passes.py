"""All passes in a row: none changes its input, and what comes out is proved safe."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from megacompile import ops
from megacompile.ir import Schedule
from megacompile.passes.templates import TemplateCache
from megacompile.verify import verify
from tests import zoo
from tests.actions import apply
from tests.capturing import Captured, Counting, Net, capture

X = torch.linspace(-1, 1, 8).view(2, 4)
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "one ahead": {"lookahead": 1, "slots": 2},
    "accumulate": {"accumulate": True, "keep_last": False},
    "hold": {"hold": True, "slots": 4},
    "hold and accumulate": {"hold": True, "accumulate": True, "lookahead": 3, "slots": 4},
}
MODELS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "dropout": lambda: (Net(Net.chain, dropout=0.3), X),
    "input": lambda: (Net(Net.chain), X.clone().requires_grad_()),
    "in place": lambda: (nn.Sequential(Counting(), Counting()), X),
    "batch norm": lambda: _zoo(zoo.batchnorm),
    "frozen": lambda: _zoo(zoo.frozen),
    "unused": lambda: _zoo(zoo.unused),
    "tied": lambda: _zoo(zoo.tied),
    "shared": lambda: _zoo(zoo.shared),
    "twice": lambda: (Net(_twice), X),
}


def _twice(net: Net, x: torch.Tensor) -> torch.Tensor:
    x = net.layers[0](net.layers[0](net.embed(x)))
    return (net.head(net.layers[1](x)) + net.layers[0](x)).sum()


def _zoo(make: Callable[[], zoo.Made]) -> tuple[nn.Module, Any]:
    model, inputs = make()
    return model, inputs


@functools.cache
def captured(name: str) -> tuple[Captured, TemplateCache]:
    model, inputs = MODELS[name]()
    if isinstance(inputs, dict):
        return capture(model, **inputs), {}
    return capture(model, inputs), {}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", MODELS)
def test_each_pass_leaves_its_input_alone_and_the_last_schedule_is_safe(
    name: str, options: str
) -> None:
    of, cache = captured(name)
    schedule = of.with_tangent()
    for function in of.passes(cache=cache, **OPTIONS[options]).values():
        schedule = apply(function, schedule)
    verify(schedule)
    assert schedule.backward is not None
    assert ops.nodes_of(schedule.backward, ops.offload_grad), "gradients reach the host"


@pytest.mark.parametrize("name", ["dropout", "batch norm", "tied"])
def test_a_forward_alone_is_safe(name: str) -> None:
    model, inputs = MODELS[name]()
    with torch.no_grad():
        of = capture(model, **inputs) if isinstance(inputs, dict) else capture(model, inputs)
    schedule = of.build()
    verify(schedule)
    assert schedule.backward is None and schedule.residuals == ()


def test_the_same_model_gives_the_same_schedule() -> None:
    """The order of sets and ids must not decide anything."""

    def code() -> str:
        schedule: Schedule = capture(copy.deepcopy(Net(_twice)), X).build()
        return schedule.code()

    assert code() == code()
