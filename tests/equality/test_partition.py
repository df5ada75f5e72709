"""Where a captured graph is cut into stages, which of them share a template, and what these change.

Outputs, gradients, buffers and inputs are, in every bit, those of the plain module in the same run.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacompile import schedules
from megacompile.ir import ops
from megacompile.ir.schedule import Schedule
from tests.capturing import Net
from tests.zoo import assert_same, equal, twins

X = torch.linspace(-1, 1, 8).view(2, 4)


def check(model: nn.Module, *args: Any, activations: str = "keep") -> Schedule:
    """Compare a streamed model with the plain one; gives its schedule."""
    plain, streamed = twins(model, activations=activations)
    found = []
    for each in (plain, streamed):
        torch.manual_seed(7)
        inputs = copy.deepcopy(args)
        given = each(*inputs)
        outputs = given if isinstance(given, tuple) else (given,)
        if outputs[0].requires_grad:
            outputs[0].sum().backward()
        found.append([*outputs, *inputs])
    for one, other in zip(*found, strict=True):
        assert equal(one.detach(), other.detach()), "an output, or an input that is changed"
    assert_same(plain, streamed)
    (schedule,) = schedules(streamed)
    return schedule


def run(net: Net, x: Any, first: int = 0) -> Any:
    for layer in list(net.layers)[first:]:
        x = layer(x)
    return x


def twice(net: Net, x: Tensor) -> Any:
    return net.head(net.layers[0](net.layers[1](net.layers[0](net.embed(x))))).sum()


def head_and_embed(net: Net, x: Tensor) -> Any:
    return F.linear(net.head(net.layers[0](net.embed(x))), net.embed.weight).sum()


def at_once(net: Net, x: Tensor) -> Any:
    return net.layers[0](F.linear(x, net.embed.weight @ net.head.weight)).sum()


def skip(net: Net, x: Tensor) -> Any:
    first = net.embed(x)
    return net.head(run(net, first) + first).sum()


def split(net: Net, x: Tensor) -> Any:
    """Items follow their tuple over layers."""
    parts = net.embed(x).chunk(2, -1)
    y = net.layers[0](torch.cat([parts[0], parts[0]], -1))
    return net.head(run(net, y, 1) + torch.cat([parts[1], parts[1]], -1))


def narrowed(net: Net, x: Tensor) -> Any:
    """It is cut where the least is alive."""
    x = net.layers[0](net.embed(x))
    return net.head(run(net, x.sum(-1, keepdim=True).expand(2, 4) * 2, 1))


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * gradient * x  # on purpose


def custom(net: Net, x: Tensor) -> Any:
    """A custom function, and a branch on a value."""
    x = Square.apply(net.layers[0](net.embed(x)))  # type: ignore[no-untyped-call]
    x = torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))
    return net.head(run(net, x, 1)).sum()


def no_grad(net: Net, x: Tensor) -> Any:
    x = net.embed(x)
    with torch.no_grad():
        x = net.layers[1](net.layers[0](x))
    return net.head(net.layers[2](x)).sum()


def anchored(net: Net, x: Tensor) -> Any:
    """A view that is made under no_grad says that it requires grad, and gets none."""
    x = net.embed(x)
    with torch.no_grad():
        anchor = x[0]
    return net.head(run(net, x) * anchor).sum()


def nested_autocast(net: Net, x: Tensor) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        x = net.layers[0](net.embed(x))
        with torch.autocast("cpu", enabled=False):
            x = net.layers[1](x.float())
        x = net.layers[2](x)
        return net.head(x).float().sum(), net.head(x)


def running(net: Net, x: Tensor) -> Any:
    """A value that later stages change in place: the head takes the new one."""
    x = net.embed(x)
    total = x * 1.5
    x = net.layers[0](x)
    total.mul_(2)
    x = net.layers[1](x + total)
    total.add_(1)
    return net.head(net.layers[2](x) + total).sum()


def filled_in(net: Net, x: Tensor) -> Any:
    """Requires grad since a part of it was set; made in one stage, filled in by the next ones."""
    x = net.embed(x)
    collected = torch.zeros(3, 2, 4)
    for i, layer in enumerate(net.layers):
        x = layer(x)
        collected[i].copy_(x)
    return net.head(collected.sum(0)).sum()


def row_of_what_is_used(net: Net, x: Tensor) -> Any:
    """A view of what changes is used elsewhere: what lies between is one stage."""
    x = net.embed(x)
    scaled = x * 2
    row = scaled[:1]
    x = net.layers[0](x)
    row.mul_(3)
    return net.head(net.layers[1](x) + scaled).sum()


def row_alone(net: Net, x: Tensor) -> Any:
    """A part changes, and nothing else uses the whole."""
    x = net.embed(x)
    row = (x * 2)[:1]
    x = net.layers[0](x)
    row.mul_(3)
    return net.head(net.layers[1](x) + row).sum()


def tied() -> nn.Module:
    net = Net(lambda net, x: F.linear(net.layers[0](net.embed(x)), net.head.weight).sum())
    net.head.weight = net.embed.weight
    return net


def small_ends() -> nn.Module:
    """Small neighbours that are no layers join while they stay within the largest bucket."""
    net: Any = Net(lambda net, x: net.head(run(net, net.first(net.embed(x)))), depth=2, width=8)
    net.embed, net.first, net.head = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 8)
    return net


def frozen_layer() -> nn.Module:
    net: Any = Net(Net.chain)
    net.layers[1].requires_grad_(False)
    return net


def norms(*, shared: bool = False) -> nn.Module:
    norm = nn.BatchNorm1d(4)
    pairs = [(nn.Linear(4, 4), norm if shared else nn.BatchNorm1d(4)) for _ in range(2)]
    if shared:
        return nn.Sequential(*(module for pair in pairs for module in pair))
    return nn.Sequential(*(nn.Sequential(*pair) for pair in pairs))


EACH = "embed | layers.0 | layers.1 | layers.2 | head"
ROWS: list[tuple[Any, str | None, str]] = [  # the stages, and those that change an input in place
    (twice, "embed | layers.0 | layers.1 | layers.0 | head", ""),
    (tied, "embed | layers.0 | embed", ""),
    (head_and_embed, "embed | layers.0 | head+embed", ""),
    (at_once, None, ""),
    (small_ends, "embed+first | layers.0 | layers.1 | head", ""),
    *((each, EACH, "") for each in (skip, split, narrowed, custom, no_grad, anchored)),
    (nested_autocast, None, ""),
    (running, EACH, "2 3"),
    (filled_in, EACH, "2 3 4"),
    (row_of_what_is_used, "embed+layers.0+layers.1+head", ""),
    (row_alone, "embed | layers.0 | layers.1 | head", "2"),
]
MODULES = (tied, small_ends)  # the others are functions of a net


@pytest.mark.parametrize(
    ("made", "names", "changed"), ROWS, ids=lambda v: getattr(v, "__name__", "")
)
def test_stages_are_the_plain_model(made: Any, names: str | None, changed: str) -> None:
    schedule = check(made() if made in MODULES else Net(made), X)
    assert names in (None, " | ".join(stage.name for stage in schedule.stages))
    assert " ".join(str(stage.index) for stage in schedule.stages if stage.mutated) == changed
    keys = [place.name for bucket in schedule.buckets for place in bucket.params]
    assert len(keys) == len(set(keys)), "each parameter lies in one bucket"
    if made is nested_autocast:  # what was traced there has its casts already
        check(Net(made), X, activations="recompute")
    if made is narrowed:
        cut = schedule.stages[1].outputs[0], schedule.stages[2].metas[-1]
        assert [meta.shape for meta in cut] == [(2, 1), (2, 1)]


SHARING = {  # the templates of the stages, in the order of first use; constants: test_templates.py
    "a b b b c": lambda: Net(Net.chain),
    "a b c b d": frozen_layer,
}


@pytest.mark.parametrize("expected", SHARING)
def test_like_layers_share_a_template(expected: str) -> None:
    schedule = check(SHARING[expected](), X)
    letters = {template: chr(ord("a") + i) for i, template in enumerate(schedule.templates)}
    assert " ".join(letters[stage.traced] for stage in schedule.stages) == expected


def test_the_mode_that_a_graph_is_captured_in() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        check(Net(Net.chain), X)
    with torch.no_grad():
        schedule = check(Net(Net.chain), X)
    assert not schedule.stages[-1].outputs[0].requires_grad


def computed(schedule: Schedule) -> str:
    actions = ops.actions(schedule.forward).split()
    return " ".join(each for each in actions if each == "ASSIGN" or each[-1] == "F")


def test_what_is_changed_is_assigned_once_by_the_last_stage_that_changes_it() -> None:
    """Inputs, and the statistics of norms."""

    def function(net: Net, x: Tensor, state: Tensor, cache: Tensor) -> Any:
        x = net.embed(x)
        state.add_(1)
        for i, layer in enumerate(net.layers):
            x = layer(x) + state
            cache[i] = x.detach()
            x = x + cache[i]
        state.mul_(2)
        return net.head(x + state).sum() + cache.sum()

    schedule = check(Net(function), X, X.clone(), torch.zeros(3, 2, 4))
    assert computed(schedule) == "0F 1F 2F 3F 4F ASSIGN ASSIGN"
    assign = " ASSIGN ASSIGN ASSIGN"
    assert computed(check(norms(), X)) == f"0F{assign} 1F{assign}"
    assert computed(check(norms().eval(), X)) == "0F 1F"
    found = computed(check(norms(shared=True), X))
    assert found.endswith(assign) and found.count("ASSIGN") == 3
