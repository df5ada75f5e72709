"""Templates: who shares one, what it saves, what its gradients are, and that its code computes, in
every bit, what autograd does; how much less a stage saves; which code is made."""

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
from megacompile.ir.stages import ArgRef, Code, SavedRef, Stage, Template
from megacompile.ir.tensors import TensorMeta
from megacompile.options import Lowering
from megacompile.passes.stages.layout import with_strides
from megacompile.passes.stages.lower import lower
from megacompile.verify.proof import verify
from tests import zoo
from tests.actions import apply
from tests.capturing import Captured, Layer, Net, capture, run_stages

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


def test_what_a_backward_takes_tells_templates_apart() -> None:
    """The first of two calls adds to the second's gradients; a value used twice carries, too."""

    def twice(net: Net, x: Tensor) -> Any:
        x = net.embed(x)
        x = net.layers[0](net.layers[0](x))
        return (net.head(net.layers[2](net.layers[1](x))) + x).sum()

    schedule = templates(Net(twice), X)
    assert sharing(schedule) == "a b c d c e"
    partial_gradients = [kinds(stage, stage.traced.partial_gradients) for stage in schedule.stages]
    assert partial_gradients == ["", "up.weight up.bias down.weight down.bias", "", "x", "", ""]


def test_a_cache_is_shared_between_schedules() -> None:
    cache: dict[Any, Template] = {}
    first = chain().templates(cache)
    assert len(cache) == 3
    second = capture(Net(Net.chain, depth=2), X).templates(cache)
    assert set(second.templates) == set(first.templates)
    capture(Net(Net.chain), X[:1]).templates(cache)
    assert len(cache) == 6, "other shapes"


def test_the_pass_leaves_its_input_and_the_random_generator_alone() -> None:
    captured = chain(0.5)
    before = torch.get_rng_state()
    schedule = captured.with_tangent()
    after = apply(captured.passes()["templates"], schedule)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(stage.template is None for stage in schedule.stages)
    for node in ops.nodes_of(after.forward, ops.forward):
        assert node.args[0].template is not None  # type: ignore[union-attr]


# Gradients.


def test_gradients_are_of_what_requires_them_and_is_used() -> None:
    def function(net: Net, x: Tensor) -> Any:
        with torch.no_grad():
            scale = net.layers[1](x)
        return (net.head(net.layers[0](net.embed(x))) * scale).sum()

    net = Net(function)
    net.layers[0].up.weight.requires_grad_(False)  # type: ignore[union-attr]
    net.layers[0].unused = nn.Parameter(torch.ones(3))
    found = [kinds(stage, stage.traced.gradients) for stage in templates(net, X).stages]
    assert " ".join(found).split() == (
        "embed.weight embed.bias up.bias down.weight down.bias x head.weight head.bias x".split()
    )
    taken = templates(Net(Net.chain), X.clone().requires_grad_()).stages[0]
    assert kinds(taken, taken.traced.gradients) == "embed.weight embed.bias x"


def test_nothing_flows_below_frozen_layers() -> None:
    net = Net(Net.chain)
    for module in (net.embed, net.layers[0]):
        module.requires_grad_(False)
    stages = templates(net, X).stages
    assert [stage.traced.has_backward for stage in stages] == [False, False] + [True] * 3
    assert "x" not in kinds(stages[2], stages[2].traced.gradients).split()


def test_without_gradients_there_is_no_backward() -> None:
    with torch.no_grad():
        schedule = templates(Net(Net.chain), X)
    for template in schedule.templates:
        assert set(template.graphs) == {Code.FORWARD}
        assert not (template.saved or template.gradients or template.backward_inputs)


# What is saved, and what the code computes.


def _autocast(net: Net, x: Tensor) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return net.chain(x).float()


def _transposed(net: Net, x: Tensor) -> Any:
    """Views, casts and copies of parameters in the middle of the code."""
    x = net.embed(x)
    layers: Any = net.layers
    for layer in layers:
        weight = layer.up.weight.t().contiguous().double().float().reshape(4, 8)
        x = x + (x @ weight).tanh()[:, :4] * layer.down.bias.expand(2, 4)
    return net.head(x).sum()


def _filled(net: Net, x: Tensor) -> Any:
    """A tensor of zeros requires grad once a part of it is set to what does."""
    collected = torch.zeros(3, 2, 4)
    x = net.embed(x)
    for i, layer in enumerate(net.layers):
        collected[i].copy_(layer(x))
    return net.head(collected.sum(0)).sum()


def _tied(net: Net, x: Tensor) -> Any:
    return F.linear(net.chain(x) * x, net.embed.weight).square().sum()


def _leaks(net: Net, x: Tensor) -> Any:
    """A view of a parameter does not leave its stage."""
    return net.head(net.layers[0](net.embed(x))).sum(), net.embed.weight.t()[:2]


def _zoo(make: Callable[[], zoo.Made]) -> Captured:
    model, inputs = make()
    return capture(model, **inputs)


SAVING: dict[str, Callable[[], Captured]] = {
    "chain": chain,
    "dropout": lambda: chain(0.3),
    "autocast": lambda: capture(Net(_autocast), X),
    "views and casts": lambda: capture(Net(_transposed), X),
    "tied": lambda: capture(Net(_tied), X),
    "filled in": lambda: capture(Net(_filled), X),
    "leaks": lambda: capture(Net(_leaks), X),
    "frozen": lambda: _zoo(zoo.frozen),
    "unused": lambda: _zoo(zoo.unused),
    "batch norm": lambda: _zoo(zoo.batchnorm),
    "shared": lambda: _zoo(zoo.shared),
}


@pytest.mark.parametrize("name", SAVING)
def test_the_code_is_that_of_autograd(name: str) -> None:
    captured = SAVING[name]()
    schedule = captured.build("templates")
    for stage in schedule.stages:
        if stage.traced.has_backward:
            _check_saved(stage)
            if not stage.traced.random:
                _check_numbers(stage, captured)
    captured.model.zero_grad()
    run_stages(captured, schedule)[0].backward()
    want = {n for n, p in captured.model.named_parameters() if p.grad is not None}
    got = {
        bucket.params[i].name
        for bucket in schedule.buckets
        for i in schedule.gradient_params.get(bucket.key, ())
    }
    assert got == want, "every parameter that has a gradient gets one"


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


def _check_numbers(stage: Stage, captured: Captured) -> None:
    template = stage.traced
    generator = torch.Generator().manual_seed(stage.index)
    primals = [_values(meta, generator) for meta in template.primals]
    tangents = [_values(meta, generator) for meta in template.tangent_metas]
    inputs = [p.clone() if i in stage.mutated else p for i, p in enumerate(primals)]
    with captured.capture.ambient.apply():
        want = [*stage.module(*inputs), *(inputs[i] for i in stage.mutated)]
    ends = [want[k] for k in template.tangents] + [primals[k] for k in template.partial_gradients]
    gradients = torch.autograd.grad(ends, [primals[i] for i in template.gradients], tangents)
    plain = [p.detach() for p in primals]
    results = template.graphs[Code.FORWARD_SAVING](*plain)
    saved = results[len(want) :]
    taken = [
        saved[i.index] if isinstance(i, SavedRef) else plain[i] for i in template.backward_inputs
    ]
    again = [plain[i] for i in template.recompute_primals]
    for got, wanted in (
        (results[: len(want)], want),
        (template.graphs[Code.FORWARD](*plain), want),
        (template.graphs[Code.RECOMPUTE](*again), saved),
        (template.graphs[Code.BACKWARD](*taken, *tangents), gradients),
    ):
        assert len(got) == len(wanted)
        for one, other in zip(got, wanted, strict=True):
            assert one.dtype == other.dtype and torch.equal(one, other)


def _values(meta: Any, generator: torch.Generator) -> Tensor:
    if not meta.dtype.is_floating_point:
        return torch.zeros(meta.shape, dtype=meta.dtype)
    numel = 1 + sum((n - 1) * step for n, step in zip(meta.shape, meta.stride, strict=True))
    values = torch.rand(numel, generator=generator, dtype=meta.dtype)
    return values.as_strided(meta.shape, meta.stride).requires_grad_(meta.requires_grad)


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


def test_new_values_of_what_is_changed_come_out_of_the_forward_alone() -> None:
    template = templates(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), X).stages[-1].traced
    assert len(template.mutated) == 3, "mean, variance, count"
    assert len(ops.returned(template.graphs[Code.FORWARD].graph)) == 1 + 3
    assert len(ops.returned(template.graphs[Code.RECOMPUTE].graph)) == len(template.saved)


# Random numbers.


class Attention(nn.Module):
    """Causal attention of one head."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.qkv = nn.Linear(4, 12)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:  # (length, 4) -> (length, 4)
        q, k, v = self.qkv(x)[None, None].chunk(3, -1)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)
        return x + y[0, 0]


def _noisy(net: Net, x: Tensor) -> Any:
    return net.head(net.embed(x) + torch.rand_like(x)).sum()


class Transposed(nn.Module):
    """A mask is drawn in the order of memory, as eager `dropout` does for a transposed value."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.fc(x).t(), 0.5, training=self.training).t()


@pytest.mark.parametrize(
    ("model", "random"),
    [
        (Net(Net.chain, dropout=0.5), "- r r r -"),
        (Net(Net.chain, dropout=0.0), "- - - - -"),
        (nn.Sequential(Attention(0.0), Attention(0.1), Attention(0.0)), "- r -"),
        (Net(_noisy), "r"),
        (nn.Sequential(Transposed(), Transposed()), "r r"),
        (nn.Sequential(Transposed(), Transposed()).eval(), "- -"),
    ],
)
def test_stages_that_draw_random_numbers(model: nn.Module, random: str) -> None:
    """The same ones in every piece of code, and as the plain stage does."""
    schedule = templates(model, X)
    assert " ".join("r" if s.traced.random else "-" for s in schedule.stages) == random
    for stage in schedule.stages:
        code = stage.traced.graphs
        if not stage.traced.random:
            continue
        assert code[Code.FORWARD] is code[Code.FORWARD_SAVING] is code[Code.RECOMPUTE]
        primals, results = [meta.zeros().add(1) for meta in stage.metas], []
        for each in (stage.module, code[Code.FORWARD]):
            torch.manual_seed(0)
            results.append(each(*primals)[0])
        assert torch.equal(*results)


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
        if name == "split" and fractions:
            _check_agreement(schedule)
    verify(schedule)
    return schedule


def _check_agreement(schedule: Schedule) -> None:
    """The forward gives what the backward takes, by the names that `differentiate` gives."""
    index = min(s.index for s in schedule.stages if s.traced.saved_fraction < 1)
    stage = schedule.stages[index]
    assert schedule.backward is not None
    call = ops.calls_by_stage(schedule.forward, ops.forward)[index]
    back = ops.calls_by_stage(schedule.backward, ops.backward)[index]
    names = [item.name for k, item in sorted(ops.items(call)) if k >= 1]
    assert names == [f"s{index}_{k}" for k in range(len(stage.traced.saved))]
    assert [value.name for value in ops.arguments(back)[3]] == names
    assert set(names) <= set(schedule.saved_values)


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


@pytest.mark.parametrize("fraction", [0.0, 0.3, 0.7, 1.0])
def test_what_is_never_saved_or_drawn_again(fraction: float) -> None:
    """Parameters, with views and casts of them; random numbers."""
    plan = {i: fraction for i in range(4)} if fraction < 1 else {}
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
