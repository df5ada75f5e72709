"""All passes in a row: none changes its input, and what comes out is proved safe."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from megacompile.ir import ops
from megacompile.ir.schedule import Plan, Schedule
from megacompile.passes.stages.templates import TemplateCache
from megacompile.verify.proof import verify
from tests import zoo
from tests.actions import apply, parse
from tests.capturing import Captured, Counting, Net, after_templates, capture

X = torch.linspace(-1, 1, 8).view(2, 4)
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "one ahead": {"lookahead": 1, "slots": 2},
    "accumulate": {"accumulate": True, "keep_last": False},
    "reuse": {"reuse": True, "slots": 4},
    "keep": {"activations": "keep"},
    "selective": {"activations": "selective"},
    "offload": {"activations": "offload", "lookahead": 1},
    "offload without keeping": {"activations": "offload", "lookahead": 1, "keep_last": False},
    "reuse and accumulate": {"reuse": True, "accumulate": True, "lookahead": 3, "slots": 4},
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


def _twice(net: Net, x: torch.Tensor) -> Any:
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
    assert schedule.backward is None and schedule.saved_values == ()


@st.composite
def chains(draw: st.DrawFn) -> dict[str, Any]:
    """What is special about the stages of a chain: which buckets each reads, and the rest."""
    count = draw(st.integers(1, 5))
    stages = range(count)
    known: list[str] = []
    reads = {}
    for i in stages:
        fresh = [str(i), f"{i}.1", f"{i}.2"][: draw(st.sampled_from([0, 1, 1, 1, 2, 3]))]
        again = draw(st.lists(st.sampled_from(known), unique=True, max_size=2)) if known else []
        known += fresh
        reads[i] = " ".join(again + fresh)
    some = st.sets(st.sampled_from(stages), max_size=2)
    frozen = range(draw(st.integers(0, count - 1)))
    kinds = {name: draw(some) for name in ("blind", "unsaved", "random")}
    return {"reads": reads, "frozen": frozen, **kinds}


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    chains(),
    st.integers(1, 4),
    st.integers(0, 2),
    st.booleans(),
    st.booleans(),
    st.sets(st.integers(0, 4)),
    st.sets(st.integers(0, 4)),
)
def test_any_chain_is_safe(
    stubs: dict[str, Any],
    lookahead: int,
    spare: int,
    reuse: bool,
    accumulate: bool,
    keep: set[int],
    offload: set[int],
) -> None:
    """Stages of no or many buckets, of each other's, that save nothing, that draw numbers.

    Any of them may be kept, and what any of them takes may wait on the host.
    """
    schedule = parse(" ".join(f"{i}F" for i in stubs["reads"]), **stubs)
    for name, function in after_templates(
        accumulate=accumulate, reuse=reuse, lookahead=lookahead, slots=lookahead + 1 + spare
    ).items():
        schedule = apply(function, schedule)
        if name == "plan":
            plan = Plan(frozenset(keep), offload=frozenset(offload))
            schedule = replace(schedule, plan=plan)
    verify(schedule)


def test_the_same_model_gives_the_same_schedule() -> None:
    """The order of sets and ids must not decide anything."""

    def code() -> str:
        schedule: Schedule = capture(copy.deepcopy(Net(_twice)), X).build()
        return schedule.code()

    assert code() == code()
