"""`partition`: where a captured graph is cut into stages, what these take, give and change.

Stages run in torch, under autograd: outputs, gradients, buffers and inputs are, in every bit, those
of the plain module in the same run.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacompile.ir import ops
from megacompile.ir.schedule import Schedule
from tests.capturing import Net, capture, run_stages
from tests.zoo import assert_same, equal

X = torch.linspace(-1, 1, 8).view(2, 4)
EACH = "embed | layers.0 | layers.1 | layers.2 | head"
MERGED = "embed+layers.0+layers.1+head"


def check(model: nn.Module, *args: Any) -> Schedule:
    """Cut the model, and compare its stages with the plain one."""
    model.zero_grad()
    plain, plain_args = copy.deepcopy((model, args))
    captured = capture(model, *args)
    before = str(captured.capture.module.graph)
    schedule = captured.partition()
    assert str(captured.capture.module.graph) == before, "the capture is as it was"
    found = []
    for plainly in (True, False):
        torch.manual_seed(7)
        outputs = _tuple(plain(*plain_args)) if plainly else run_stages(captured, schedule)
        if isinstance(outputs[0], Tensor) and outputs[0].requires_grad:
            outputs[0].sum().backward()
        found.append(outputs)
    for one, other in [*zip(*found, strict=True), *zip(plain_args, args, strict=True)]:
        assert _equal(one, other), "an output, or an input that is changed"
    assert_same(plain, model)
    return schedule


def _tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _equal(one: Any, other: Any) -> bool:
    return equal(one, other) if isinstance(one, Tensor) else bool(one == other)


def names(schedule: Schedule) -> str:
    return " | ".join(stage.name for stage in schedule.stages)


def operators(schedule: Schedule) -> str:
    """The operators of each stage: "linear sin | linear"."""
    stages = []
    for stage in schedule.stages:
        nodes = [n for n in stage.module.graph.nodes if n.op in ("call_function", "call_method")]
        stages.append(" ".join(str(getattr(n.target, "__name__", n.target)) for n in nodes))
    return " | ".join(stages)


def buckets(schedule: Schedule) -> str:
    """The labels of the buckets that each stage reads."""
    return " | ".join(" ".join(b.label for b in stage.buckets) for stage in schedule.stages)


def changed(schedule: Schedule) -> str:
    """The stages that change an input in place."""
    return " ".join(str(stage.index) for stage in schedule.stages if stage.mutated)


class Plain(nn.Module):
    """A layer of one operator."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(x)
        return out


def plain_net(function: Callable[..., Any]) -> Net:
    """A net whose two layers are one operator each."""
    made = Net(function, depth=0)
    made.layers.extend([Plain(), Plain()])
    return made


def run(net: Net, x: Any, first: int = 0) -> Any:
    """Through the layers from `first` on."""
    for layer in list(net.layers)[first:]:
        x = layer(x)
    return x


# Models, as functions of a net.


def twice(net: Net, x: Tensor) -> Any:
    return net.head(net.layers[0](net.layers[1](net.layers[0](net.embed(x))))).sum()


def head_and_embed(net: Net, x: Tensor) -> Any:
    return F.linear(net.head(net.layers[0](net.embed(x))), net.embed.weight).sum()


def at_once(net: Net, x: Tensor) -> Any:
    return net.layers[0](F.linear(x, net.embed.weight @ net.head.weight)).sum()


def skip(net: Net, x: Tensor) -> Any:
    first = net.embed(x)
    return net.head(run(net, first) + first).sum()


def around(net: Net, x: Tensor) -> Any:
    """What has no parameters joins the neighbour that is no layer: so layers stay alike."""
    return net.head(run(net, net.embed(x).sin()).cos())


def narrowed(net: Net, x: Tensor) -> Any:
    x = net.layers[0](net.embed(x))
    return net.head(net.layers[1](x.sum(-1, keepdim=True).expand(2, 4) * 2))


def split(net: Net, x: Tensor) -> Any:
    """Items follow their tuple over layers."""
    parts = net.embed(x).chunk(2, -1)
    y = net.layers[0](torch.cat([parts[0], parts[0]], -1))
    return net.head(net.layers[1](y) + torch.cat([parts[1], parts[1]], -1))


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        wrong: Tensor = 3 * gradient * x  # on purpose
        return wrong


def custom(net: Net, x: Tensor) -> Any:
    """A custom function, and a branch on a value."""
    x = Square.apply(net.layers[0](net.embed(x)))  # type: ignore[no-untyped-call]
    x = torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))
    return net.head(net.layers[1](x)).sum()


def no_grad(net: Net, x: Tensor) -> Any:
    x = net.embed(x)
    with torch.no_grad():
        x = net.layers[1](net.layers[0](x))
    return net.head(net.layers[2](x)).sum()


def anchored(view: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """A view that is made under no_grad says that it requires grad, and gets none."""

    def function(net: Net, x: Tensor) -> Any:
        x = net.embed(x)
        with torch.no_grad():
            anchor = view(x)
        return net.head(run(net, x) * anchor).sum()

    return function


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


@dataclass(frozen=True)
class Row:
    """What is said of the stages; what is not asked for is None."""

    model: Callable[[], nn.Module]
    names: str | None = EACH
    operators: str | None = None
    buckets: str | None = None
    changed: str = ""


def row(function: Callable[..., Any], names: str | None = EACH, **more: Any) -> Row:
    return Row(lambda: Net(function), names, **more)


def of_plain(function: Callable[..., Any], operators: str) -> Row:
    return Row(lambda: plain_net(function), None, operators)


def tied() -> nn.Module:
    def function(net: Net, x: Tensor) -> Any:
        return F.linear(net.layers[0](net.embed(x)), net.head.weight).sum()

    net = Net(function)
    net.head.weight = net.embed.weight
    return net


def small_ends() -> nn.Module:
    """Small neighbours that are no layers join while they stay within the largest bucket."""

    def function(net: Any, x: Tensor) -> Any:
        return net.head(run(net, net.first(net.embed(x))))

    net: Any = Net(function, depth=2, width=8)
    net.embed, net.first = nn.Linear(4, 8), nn.Linear(8, 8)
    net.head = nn.Linear(8, 8)
    return net  # type: ignore[no-any-return]


class Interleave(Plain):
    """A value is set in the stage that made it; the next layer only reads."""

    def forward(self, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        out[..., ::2] = self.fc(x)[..., 1::2]
        out[..., 1::2] = x[..., ::2]
        out += x
        return F.relu_(out)


LINEAR = "linear gelu dropout linear mul add"
ROWS: dict[str, Row] = {
    "a chain": row(
        Net.chain, operators=f"linear | {LINEAR} | {LINEAR} | {LINEAR} | linear square mean"
    ),
    "a layer called twice": row(
        twice, "embed | layers.0 | layers.1 | layers.0 | head", buckets="0 | 1 | 2 | 1 | 4"
    ),
    "tied weights": Row(tied, "embed | layers.0 | embed", buckets="0 | 1 | 0"),
    "two buckets in a stage": row(
        head_and_embed, "embed | layers.0 | head+embed", buckets="0 | 1 | 2 0"
    ),
    "the first to read two buckets": row(at_once, None, buckets="0 0.1 | 1"),
    "small neighbours": Row(small_ends, "embed+first | layers.0 | layers.1 | head"),
    "a skip": row(skip),
    "items of a tuple": of_plain(
        split, "linear chunk getitem getitem cat | linear | linear | cat add linear"
    ),
    "no parameters": of_plain(around, "linear sin | linear | linear | cos linear"),
    "narrow": of_plain(narrowed, "linear | linear sum | expand mul linear | linear"),
    "a custom function": row(custom, "embed | layers.0 | layers.1 | head"),
    "no_grad": row(no_grad),
    "an index under no_grad": row(anchored(lambda y: y[0])),
    "nested autocast": row(nested_autocast, None),
    "changed by later stages": row(running, changed="2 3"),
    "filled in": row(filled_in, changed="2 3 4"),
    "set where it was made": Row(
        lambda: nn.Sequential(*(Interleave() for _ in range(3))), "0 | 1 | 2"
    ),
    "a view of what changes": row(row_of_what_is_used, MERGED),
    "a part alone": row(row_alone, "embed | layers.0 | layers.1 | head", changed="2"),
}


@pytest.mark.parametrize("name", ROWS)
def test_stages_are_the_plain_model(name: str) -> None:
    told = ROWS[name]
    schedule = check(told.model(), X)
    assert told.names in (None, names(schedule))
    assert told.operators in (None, operators(schedule))
    assert told.buckets in (None, buckets(schedule))
    assert changed(schedule) == told.changed


def test_the_mode_that_a_graph_is_captured_in() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        check(Net(Net.chain), X)
    with torch.no_grad():
        schedule = check(Net(Net.chain), X)
    assert not schedule.stages[-1].outputs[0].requires_grad


# Inputs and buffers that are changed.


def test_an_input_that_is_changed_is_assigned_once_at_the_end() -> None:
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
    assert ops.actions(schedule.forward) == "0F 1F 2F 3F 4F ASSIGN ASSIGN"


def norms(*, shared: bool) -> nn.Module:
    norm = nn.BatchNorm1d(4)
    pairs = [(nn.Linear(4, 4), norm if shared else nn.BatchNorm1d(4)) for _ in range(2)]
    if shared:
        return nn.Sequential(*(module for pair in pairs for module in pair))
    return nn.Sequential(*(nn.Sequential(*pair) for pair in pairs))


def test_statistics_are_assigned_by_the_last_stage_that_changes_them() -> None:
    assign = " ASSIGN ASSIGN ASSIGN"
    own = norms(shared=False)
    assert ops.actions(check(own, X).forward) == f"0F{assign} 1F{assign}"
    assert ops.actions(check(own.eval(), X).forward) == "0F 1F"
    schedule = check(norms(shared=True), X)
    assert ops.actions(schedule.forward).endswith(assign)
    assert ops.actions(schedule.forward).count("ASSIGN") == 3
