"""`split_stages`: how much a stage saves, and what it never saves or draws again."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megacompile import compat
from megacompile.ir import ops
from megacompile.ir.schedule import Plan, Schedule
from megacompile.ir.stages import Code
from megacompile.options import Lowering
from megacompile.passes.schedule.split import split_stages
from megacompile.passes.stages.templates import TemplateCache
from megacompile.verify.proof import verify
from tests.actions import apply, parse
from tests.capturing import Captured, Net, capture

X = torch.linspace(-1, 1, 64 * 4).view(64, 4)


class Wide(nn.Module):
    """A layer that has much to save."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.up = nn.Linear(4, 16)
        self.mid = nn.Linear(16, 16)
        self.down = nn.Linear(16, 4)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(self.norm(x)))
        hidden = nn.functional.dropout(torch.sigmoid(self.mid(hidden)), self.dropout)
        out: Tensor = x + self.down(hidden)
        return out


def in_bf16(net: Net, x: Tensor) -> Tensor:
    """Parameters are cast, so that it would be faster to save the casts."""
    with torch.autocast("cpu", torch.bfloat16):
        return net.chain(x)


@functools.cache
def captured(dropout: float = 0.0, autocast: bool = False) -> Captured:
    net = Net(in_bf16 if autocast else Net.chain)
    net.layers = nn.ModuleList(Wide(dropout) for _ in range(3))
    return capture(net, X)


def split(
    saved_fractions: dict[int, float],
    *,
    until: str = "tokens",
    dropout: float = 0.0,
    autocast: bool = False,
    cache: TemplateCache | None = None,
) -> Schedule:
    """The schedule in which every stage is kept, and some save less."""
    of, cache = captured(dropout, autocast), {} if cache is None else cache
    schedule = of.with_tangent()
    for name, function in of.passes(cache=cache).items():
        schedule = apply(function, schedule) if name == "split" else function(schedule)
        if name == "plan":
            plan = Plan(frozenset(range(5)), saved_fractions=tuple(sorted(saved_fractions.items())))
            schedule = replace(schedule, plan=plan)
        if name == until:
            break
    if until == "tokens":
        verify(schedule)
    return schedule


def saved_bytes(schedule: Schedule) -> list[int]:
    return [stage.traced.saved_bytes for stage in schedule.stages]


def test_a_lower_budget_saves_less_and_computes_more() -> None:
    saved_fractions = [1.0, 0.5, 0.2, 0.0]
    schedules = [split({1: saved_fraction}) for saved_fraction in saved_fractions]
    saved = [saved_bytes(schedule)[1] for schedule in schedules]
    assert saved == sorted(saved, reverse=True) and saved[0] > saved[1] > saved[3]
    nodes = [len(s.stages[1].traced.graphs[Code.BACKWARD].graph.nodes) for s in schedules]
    assert nodes[3] > nodes[0]


def test_only_the_stages_of_the_plan_are_split_anew() -> None:
    whole, part = split({}), split({1: 0.2, 3: 0.2})
    for index, (mine, theirs) in enumerate(zip(saved_bytes(whole), saved_bytes(part), strict=True)):
        assert (theirs < mine) == (index in (1, 3))


def test_stages_of_one_template_share_the_new_one_and_nothing_is_traced_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache: TemplateCache = {}
    split({}, cache=cache)
    count = len(cache)
    monkeypatch.setattr(compat, "trace", None)
    schedule = split({1: 0.5, 2: 0.5, 3: 0.2}, cache=cache)
    one, two, three = (stage.traced for stage in schedule.stages[1:4])
    assert one is two and one is not three
    assert [one.saved_fraction, three.saved_fraction] == [0.5, 0.2]
    assert len(cache) == count + 2
    again = split({1: 0.5}, cache=cache)
    assert again.stages[1].traced is one


def test_the_forward_and_the_backward_agree() -> None:
    schedule = split({1: 0.2}, until="split")
    (call,) = [n for n in ops.nodes_of(schedule.forward, ops.forward) if ops.label(n) == "1F"]
    names = [item.name for k, item in sorted(ops.items(call)) if k >= 1]
    assert len(names) == len(schedule.stages[1].traced.saved)
    assert schedule.backward is not None
    (back,) = [n for n in ops.nodes_of(schedule.backward, ops.backward) if ops.label(n) == "1B"]
    assert [value.name for value in ops.arguments(back)[3]] == names
    assert set(names) <= set(schedule.saved_values)
    assert names == [f"s1_{k}" for k in range(len(names))], "as differentiate names them"


@pytest.mark.parametrize("lowering", list(Lowering), ids=lambda each: each.value)
@pytest.mark.parametrize("saved_fraction", [0.0, 0.3, 0.7, 1.0])
def test_parameters_are_never_saved(
    saved_fraction: float, lowering: Lowering, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor views or casts of them: nothing that is saved is computed from parameters alone."""
    cache: TemplateCache = {}
    passes = captured(autocast=True).passes(cache=cache)
    trace: Any = passes["templates"]
    passes["templates"] = functools.partial(trace.func, **{**trace.keywords, "lowering": lowering})
    monkeypatch.setattr(Captured, "passes", lambda self, **options: passes)
    schedule = split({i: saved_fraction for i in range(4)}, autocast=True, cache=cache)
    for stage in schedule.stages:
        graph = stage.traced.graphs[Code.FORWARD_SAVING].graph
        inputs = graph.find_nodes(op="placeholder")
        params = sum(len(bucket.params) for bucket in stage.buckets)
        for node in ops.returned(graph)[len(stage.outputs) :]:
            assert reachable(node) & set(inputs[params:]), f"{node} of {stage.name}"


def reachable(node: Any) -> set[Any]:
    found, stack = set(), [node]
    while stack:
        each = stack.pop()
        if each not in found:
            found.add(each)
            stack += each.all_input_nodes
    return found


@pytest.mark.parametrize("saved_fraction", [0.0, 0.1, 0.5])
def test_random_numbers_are_not_drawn_again(saved_fraction: float) -> None:
    schedule = split({1: saved_fraction}, dropout=0.3)
    template = schedule.stages[1].traced
    assert template.random and template.saved_fraction == saved_fraction
    backward = template.graphs[Code.BACKWARD].graph
    assert not any(compat.is_random(node) for node in backward.nodes)
    assert template.saved, "the mask"


def test_without_budgets_nothing_changes() -> None:
    schedule = parse("0F 1F | 1B 0B")
    assert split_stages(schedule, cache={}) is schedule
    forward = replace(parse("0F 1F"), plan=Plan(saved_fractions=((0, 0.5),)))
    assert split_stages(forward, cache={}) is forward
