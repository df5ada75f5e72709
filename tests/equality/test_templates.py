"""Templates: layers that share one, what is saved and how much less a stage may save, and the code
that is made."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacompile import compat
from megacompile.ir import ops
from megacompile.ir.schedule import Plan, Schedule
from megacompile.ir.stages import ArgRef, Code, Stage, Template
from megacompile.ir.tensors import TensorMeta
from megacompile.options import Lowering
from megacompile.passes.stages.lower import lower
from megacompile.passes.stages.strides import with_strides
from megacompile.verify.proof import verify
from tests.actions import apply
from tests.capturing import Captured, Layer, Net, capture

X = torch.linspace(-1, 1, 8).view(2, 4)


def templates(model: nn.Module, *args: Any) -> Schedule:
    return capture(model, *args).build("templates")


@functools.cache
def chain(dropout: float = 0.0) -> Captured:
    """embed, three layers and head, in a row."""
    return capture(Net(Net.chain, dropout=dropout), X)


@functools.cache
def of_chain(dropout: float = 0.0) -> Schedule:
    return chain(dropout).build("templates")


def kinds(stage: Stage, primals: Sequence[int]) -> str:
    """Primals by name: "up.weight x"."""

    def kind(primal: int) -> str:
        ref = stage.primals[primal]
        if isinstance(ref, ArgRef):
            return "x" if ref.index == 0 else f"x{ref.index}"
        return ".".join(stage.buckets[ref.bucket].params[ref.param].name.split(".")[-2:])

    return " ".join(map(kind, primals))


# Sharing.


def sharing(schedule: Schedule) -> str:
    """The stages' templates as letters, in the order of first use: "a b b c"."""
    letters = {template: chr(ord("a") + i) for i, template in enumerate(schedule.templates)}
    return " ".join(letters[stage.traced] for stage in schedule.stages)


def _another_constant() -> Net:
    net = Net(Net.chain, depth=5)
    net.layers[1], net.layers[3] = Layer(scale=2.0), nn.Linear(4, 4)
    return net


def _frozen_layer() -> Net:
    net = Net(Net.chain)
    net.layers[1].requires_grad_(False)
    return net


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: Net(Net.chain), "a b b b c"),
        (lambda: Net(Net.checkpointed), "a b b b c"),
        (_another_constant, "a b c b d b e"),
        (_frozen_layer, "a b c b d"),
    ],
)
def test_like_layers_share_a_template(make: Callable[[], Net], expected: str) -> None:
    assert sharing(templates(make(), X)) == expected


def test_a_cache_is_shared_between_schedules() -> None:
    cache: dict[Any, Template] = {}
    first = chain().templates(cache)
    assert len(cache) == 3
    second = capture(Net(Net.chain, depth=2), X).templates(cache)
    assert set(second.templates) == set(first.templates)
    capture(Net(Net.chain), X[:1]).templates(cache)
    assert len(cache) == 6, "other shapes"


# What is saved, and what the code computes.


def _autocast(net: Net, x: Tensor) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return net.chain(x).float()


def _check_saved(stage: Stage) -> None:
    """No parameter is saved, nor a view or cast of one; and nothing that the stage gives shares
    memory with its parameters: slots are filled again."""
    template = stage.traced
    params = sum(not isinstance(ref, ArgRef) for ref in stage.primals)
    graph = template.graphs[Code.FORWARD_SAVING].graph
    saved = ops.returned(graph)[len(template.outputs) + len(template.mutated) :]
    assert len(saved) == len(template.saved)
    for node in saved:
        assert _sources(node) - set(range(params)), f"stage {stage.name!r} saves {node}"
    primals = [meta.zeros() for meta in template.primals]
    held = {p.untyped_storage().data_ptr() for p in primals[:params]}
    for value in template.graphs[Code.FORWARD_SAVING](*primals):
        assert value.untyped_storage().data_ptr() not in held


def _sources(node: Any) -> set[int]:
    """The placeholders that a value is computed from; drawing random numbers counts as -1."""
    placeholders = node.graph.find_nodes(op="placeholder")
    found: set[int] = set()
    stack, seen = [node], set()
    while stack:
        value = stack.pop()
        if value.op == "placeholder":
            found.add(placeholders.index(value))
        elif not value.all_input_nodes:
            found.add(-1)
        stack += [each for each in value.all_input_nodes if each not in seen]
        seen.update(value.all_input_nodes)
    return found


def test_a_recompute_leaves_out_what_no_backward_needs() -> None:
    """The last matrix product of a layer: nothing is saved of what comes behind it."""
    stage = of_chain().stages[1]
    template = stage.traced
    assert kinds(stage, template.recompute_primals) == "up.weight up.bias x"
    products = (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
    counts = [
        sum(node.target in products for node in template.graphs[code].graph.nodes)
        for code in (Code.FORWARD, Code.FORWARD_SAVING, Code.RECOMPUTE, Code.BACKWARD)
    ]
    assert counts == [2, 2, 1, 4]


# How much of it is saved.


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
        hidden = F.dropout(torch.sigmoid(self.mid(hidden)), self.dropout)
        out: Tensor = x + self.down(hidden)
        return out


@functools.cache
def wide(dropout: float = 0.0, autocast: bool = False) -> Captured:
    net = Net(_autocast if autocast else Net.chain)
    net.layers = nn.ModuleList(Wide(dropout) for _ in range(3))
    return capture(net, torch.linspace(-1, 1, 64 * 4).view(64, 4))


def split(
    of: Captured, fractions: dict[int, float], cache: dict[Any, Template] | None = None
) -> Schedule:
    """The verified schedule in which every stage is kept, and some save less."""
    schedule = of.with_tangent()
    for name, function in of.passes(cache={} if cache is None else cache).items():
        schedule = apply(function, schedule) if name == "split" else function(schedule)
        if name == "plan":
            plan = Plan(frozenset(range(5)), saved_fractions=tuple(sorted(fractions.items())))
            schedule = replace(schedule, plan=plan)
    verify(schedule)
    return schedule


def test_a_lower_budget_saves_less_and_computes_more() -> None:
    """In the stages of the plan alone; those of one template share the new one, which is split of
    what was traced before."""
    cache: dict[Any, Template] = {}
    found = {1.0: split(wide(), {}, cache).stages}
    count = len(cache)
    for fraction in (0.5, 0.2, 0.0):
        found[fraction] = split(wide(), {1: fraction, 2: fraction}, cache).stages
        _, one, two, three, _ = (stage.traced for stage in found[fraction])
        assert one is two is not three and one.saved_fraction == fraction
        assert three is found[1.0][3].traced
    assert len(cache) == count + 3
    saved = [stages[1].traced.saved_bytes for stages in found.values()]
    assert saved == sorted(saved, reverse=True) and saved[0] > saved[1] > saved[3]
    nodes = [len(s[1].traced.graphs[Code.BACKWARD].graph.nodes) for s in found.values()]
    assert nodes[3] > nodes[0]


def _leaks(net: Net, x: Tensor) -> Any:
    """A view of a parameter is given."""
    return net.head(net.layers[0](net.embed(x))).sum(), net.embed.weight.t()[:2]


def test_no_view_of_a_parameter_leaves_its_stage() -> None:
    """The slot that it would be in is filled again."""
    for stage in templates(Net(_leaks), X).stages:
        _check_saved(stage)


@pytest.mark.parametrize("fraction", [0.0, 0.3])
def test_what_is_never_saved_or_drawn_again(fraction: float) -> None:
    """Parameters, with views and casts of them; random numbers."""
    plan = dict.fromkeys(range(4), fraction)
    for stage in split(wide(autocast=True), plan).stages:
        _check_saved(stage)
    template = split(wide(dropout=0.3), plan).stages[1].traced
    backward = template.graphs[Code.BACKWARD].graph
    assert template.random and template.saved, "the mask"
    assert not any(compat.is_random(node) for node in backward.nodes)


# Code.


def lowered(schedule: Schedule) -> list[tuple[int, str]]:
    """What is lowered, in order."""
    work: list[tuple[int, str]] = []

    def progress(
        wanted: Iterable[tuple[Template, Code]], total: int
    ) -> Iterable[tuple[Template, Code]]:
        items = list(wanted)
        assert len(items) == len(set(items)) == total
        work.extend((template.index, code.value) for template, code in items)
        return items

    before = {t: dict(t.graphs) for t in schedule.templates}
    assert lower(schedule, lowering=Lowering.EAGER, progress=progress) is schedule
    assert {t: dict(t.graphs) for t in schedule.templates} == before
    return work


def test_what_the_schedule_runs_is_lowered_once() -> None:
    cache: dict[Any, Template] = {}
    kept = chain().build(cache=cache)
    assert len(lowered(kept)) == 7 and lowered(kept) == []
    assert [" ".join(sorted(c.value for c in t.code)) for t in kept.templates] == [
        "backward forward",  # embed saves nothing
        "backward forward recompute",
        "backward forward_saving",  # the head is kept
    ]
    recomputed = chain().build(cache=cache, keep_last=False)
    assert lowered(recomputed) == [(0, "forward"), (0, "recompute")], "of the head, traced first"
    template = kept.stages[1].traced
    primals = [meta.zeros().add(1) for meta in template.primals]
    want = template.graphs[Code.FORWARD](*primals)
    (got,) = template.code[Code.FORWARD](primals)
    assert isinstance(got, Tensor) and torch.equal(got, want[0])


def test_results_have_the_strides_that_they_were_traced_with() -> None:
    """Inductor pads matrix products, and gives a part of what it has padded. Strides of what has
    one element do not matter."""
    x = torch.arange(12.0).reshape(3, 4)
    traced = [x * 2, (x * 3).t(), x.sum(0, keepdim=True), torch.ones(1, 4)]
    metas = [*map(TensorMeta.of, traced), None]
    padded = [F.pad(t, (0, 4))[:, : t.shape[1]] for t in traced[:2]]
    given = [*padded, traced[2], torch.empty_strided((1, 4), (64, 1)).fill_(1), None]
    found = with_strides(lambda: given, metas)()
    for got, before, want in zip(found, given, traced, strict=False):
        assert got is not None and before is not None and torch.equal(got, want)
        assert (got is before) == (before.numel() == 4) and (
            got.stride() == want.stride() or got.numel() == 4
        )
    assert found[4] is None


def test_strides_that_are_always_right_are_looked_at_once() -> None:
    right, wrong = torch.zeros(2, 3), torch.zeros(3, 2).t()
    for settled in (False, True):
        results = [right, wrong]
        run = with_strides(lambda: results, [TensorMeta.of(right)] * 2, settled=settled)  # noqa: B023
        assert [each.stride() for each in run()] == [(3, 1)] * 2
        assert [each.stride() for each in run()] == [(3, 1)] * 2, "what is wrong each time"
        results[0] = wrong
        assert run()[0].stride() == ((1, 2) if settled else (3, 1))
