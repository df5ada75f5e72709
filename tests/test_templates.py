"""`trace_templates`: who shares one, what it saves, what its gradients are."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from megacompile.errors import UnsupportedGraphError
from megacompile.ir import ops
from megacompile.ir.schedule import Schedule
from megacompile.ir.stages import ArgRef, Code, SavedRef, Stage, Template
from megacompile.options import Lowering
from megacompile.passes.stages.templates import TemplateCache, trace_templates
from tests import zoo
from tests.actions import apply
from tests.capturing import Captured, Layer, Net, capture, run_stages

X = torch.linspace(-1, 1, 8).view(2, 4)


def templates(model: nn.Module, *args: Any) -> Schedule:
    return capture(model, *args).build("templates")


@functools.cache
def chain(dropout: float = 0.0) -> Schedule:
    """embed, three layers and head, in a row."""
    return templates(Net(Net.chain, dropout=dropout), X)


def sharing(schedule: Schedule) -> str:
    """The stages' templates as letters, in the order of first use: "a b b c"."""
    letters = {template: chr(ord("a") + i) for i, template in enumerate(schedule.templates)}
    return " ".join(letters[stage.traced] for stage in schedule.stages)


def kinds(stage: Stage, primals: Sequence[int]) -> str:
    """Primals by name: "up.weight x"."""
    return " ".join(_kind(stage, i) for i in primals)


def _kind(stage: Stage, primal: int) -> str:
    ref = stage.primals[primal]
    if isinstance(ref, ArgRef):
        return "x" if ref.index == 0 else f"x{ref.index}"
    name = stage.buckets[ref.bucket].params[ref.param].name
    return ".".join(name.split(".")[-2:])


# Sharing.


def test_like_layers_share_a_template() -> None:
    assert sharing(chain()) == "a b b b c"


def test_layers_of_another_constant_or_shape_do_not() -> None:
    net = Net(Net.chain, depth=5)
    net.layers[1] = Layer(scale=2.0)
    net.layers[3] = nn.Linear(4, 4)
    assert sharing(templates(net, X)) == "a b c b d b e"


def test_a_frozen_layer_does_not() -> None:
    net = Net(Net.chain)
    net.layers[1].requires_grad_(False)
    assert sharing(templates(net, X)) == "a b c b d"


def test_what_a_backward_takes_tells_templates_apart() -> None:
    """The first of two calls adds to the second's gradients; a value used twice carries, too."""

    def twice(net: Net, x: Tensor) -> Any:
        x = net.embed(x)
        x = net.layers[0](net.layers[0](x))
        skip = net.layers[2](net.layers[1](x))
        return (net.head(skip) + x).sum()

    schedule = templates(Net(twice), X)
    assert sharing(schedule) == "a b c d c e"
    partial_gradients = [kinds(stage, stage.traced.partial_gradients) for stage in schedule.stages]
    assert partial_gradients == ["", "up.weight up.bias down.weight down.bias", "", "x", "", ""]


def test_a_cache_is_shared_between_schedules() -> None:
    cache: TemplateCache = {}
    first = capture(Net(Net.chain), X).templates(cache)
    assert len(cache) == 3
    second = capture(Net(Net.chain, depth=2), X).templates(cache)
    assert set(second.templates) == set(first.templates)
    capture(Net(Net.chain), X[:1]).templates(cache)
    assert len(cache) == 6, "other shapes"


def test_without_gradients_there_is_no_backward() -> None:
    with torch.no_grad():
        schedule = templates(Net(Net.chain), X)
    for template in schedule.templates:
        assert set(template.graphs) == {Code.FORWARD}
        assert not (template.saved or template.gradients or template.backward_inputs)


def test_checkpointed_layers_share() -> None:
    assert sharing(templates(Net(Net.checkpointed), X)) == "a b b b c"


# Gradients.


def test_gradients_are_of_what_requires_them_and_is_used() -> None:
    def function(net: Net, x: Tensor) -> Any:
        return net.head(net.layers[0](net.embed(x))).sum()

    net = Net(function)
    net.layers[0].up.weight.requires_grad_(False)  # type: ignore[union-attr]
    net.layers[0].unused = nn.Parameter(torch.ones(3))
    embed, layer, head = templates(net, X).stages
    assert kinds(embed, embed.traced.gradients) == "embed.weight embed.bias"
    assert kinds(layer, layer.traced.gradients) == "up.bias down.weight down.bias x"
    assert kinds(head, head.traced.gradients) == "head.weight head.bias x"


def test_a_parameter_that_is_used_without_gradient_gets_none() -> None:
    def function(net: Net, x: Tensor) -> Any:
        with torch.no_grad():
            scale = net.head(x)
        return (net.layers[0](net.embed(x)) * scale).sum()

    for stage in templates(Net(function), X).stages:
        assert "head" not in kinds(stage, stage.traced.gradients)


def test_nothing_flows_below_frozen_layers() -> None:
    net = Net(Net.chain)
    for module in (net.embed, net.layers[0]):
        module.requires_grad_(False)
    schedule = templates(net, X)
    assert [stage.traced.has_backward for stage in schedule.stages] == [False, False] + [True] * 3
    first = schedule.stages[2]
    assert "x" not in kinds(first, first.traced.gradients).split()


def test_an_input_that_requires_grad_gets_one() -> None:
    stage = templates(Net(Net.chain), X.clone().requires_grad_()).stages[0]
    assert kinds(stage, stage.traced.gradients) == "embed.weight embed.bias x"


# Saved tensors.


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


SAVING: dict[str, Callable[[], Captured]] = {
    "chain": lambda: capture(Net(Net.chain), X),
    "dropout": lambda: capture(Net(Net.chain, dropout=0.3), X),
    "autocast": lambda: capture(Net(_autocast), X),
    "views and casts": lambda: capture(Net(_transposed), X),
    "tied": lambda: capture(Net(_tied), X),
    "filled in": lambda: capture(Net(_filled), X),
    "frozen": lambda: _zoo(zoo.frozen),
    "unused": lambda: _zoo(zoo.unused),
    "batch norm": lambda: _zoo(zoo.batchnorm),
    "shared": lambda: _zoo(zoo.shared),
}


def _zoo(make: Callable[[], zoo.Made]) -> Captured:
    model, inputs = make()
    return capture(model, **inputs)


@functools.cache
def saving(name: str) -> tuple[Captured, Schedule]:
    captured = SAVING[name]()
    return captured, captured.build("templates")


@pytest.mark.parametrize("name", SAVING)
def test_no_parameter_is_saved_nor_a_view_or_cast_of_one(name: str) -> None:
    for stage in saving(name)[1].stages:
        template = stage.traced
        params = sum(not isinstance(ref, ArgRef) for ref in stage.primals)
        if template.has_backward:
            saved = _saved(template)
            assert len(saved) == len(template.saved)
            for node in saved:
                sources = _inputs_behind(node)
                assert sources - set(range(params)), f"stage {stage.name!r} saves {node}"
            _check_memory(template, params)


def _saved(template: Template) -> list[fx.Node]:
    returned: Any = ops.returned(template.graphs[Code.FORWARD_SAVING].graph)
    return list(returned[len(template.outputs) + len(template.mutated) :])


def _inputs_behind(node: fx.Node) -> set[int]:
    """The placeholders that a value is computed from; drawing random numbers counts as -1."""
    placeholders = node.graph.find_nodes(op="placeholder")
    found: set[int] = set()
    stack = [node]
    while stack:
        value = stack.pop()
        if value.op == "placeholder":
            found.add(placeholders.index(value))
        elif not value.all_input_nodes:
            found.add(-1)
        stack.extend(value.all_input_nodes)
    return found


def _check_memory(template: Template, params: int) -> None:
    """Nothing that a stage gives shares memory with its parameters: slots are filled again."""
    primals = [meta.zeros() for meta in template.primals]
    held = {p.untyped_storage().data_ptr() for p in primals[:params]}
    for value in template.graphs[Code.FORWARD_SAVING](*primals):
        assert value.untyped_storage().data_ptr() not in held


def test_a_view_of_a_parameter_does_not_leave_the_stage() -> None:
    def leaks(net: Net, x: Tensor) -> Any:
        return net.head(net.layers[0](net.embed(x))).sum(), net.embed.weight.t()[:2]

    schedule = templates(Net(leaks), X)
    for stage in schedule.stages:
        _check_memory(stage.traced, sum(not isinstance(ref, ArgRef) for ref in stage.primals))


@pytest.mark.parametrize("name", SAVING)
def test_every_parameter_that_has_a_gradient_gets_one(name: str) -> None:
    """As autograd finds, when the stages run in torch."""
    captured, schedule = saving(name)
    captured.model.zero_grad()
    run_stages(captured, schedule)[0].backward()
    want = {n for n, p in captured.model.named_parameters() if p.grad is not None}
    got = {
        bucket.params[i].name
        for bucket in schedule.buckets
        for i in schedule.gradient_params.get(bucket.key, ())
    }
    assert got == want


# What the code computes.


@pytest.mark.parametrize("name", SAVING)
def test_forward_and_backward_are_those_of_autograd(name: str) -> None:
    captured, schedule = saving(name)
    for stage in schedule.stages:
        template = stage.traced
        if not template.has_backward or template.random:
            continue
        generator = torch.Generator().manual_seed(stage.index)
        primals = [_values(meta, generator) for meta in template.primals]
        tangents = [_values(meta, generator) for meta in template.tangent_metas]
        want, gradients = _autograd(stage, captured, primals, tangents)
        results = template.graphs[Code.FORWARD_SAVING](*[p.detach() for p in primals])
        saved = results[len(want) :]
        _assert_equal(results[: len(want)], want)
        _assert_equal(template.graphs[Code.FORWARD](*[p.detach() for p in primals]), want)
        again = [primals[i].detach() for i in template.recompute_primals]
        _assert_equal(template.graphs[Code.RECOMPUTE](*again), saved)
        taken = [
            saved[i.index] if isinstance(i, SavedRef) else primals[i].detach()
            for i in template.backward_inputs
        ]
        _assert_equal(template.graphs[Code.BACKWARD](*taken, *tangents), gradients)


def _values(meta: Any, generator: torch.Generator) -> Tensor:
    if not meta.dtype.is_floating_point:
        return torch.zeros(meta.shape, dtype=meta.dtype)
    numel = 1 + sum((n - 1) * step for n, step in zip(meta.shape, meta.stride, strict=True))
    values = torch.rand(numel, generator=generator, dtype=meta.dtype)
    return values.as_strided(meta.shape, meta.stride).requires_grad_(meta.requires_grad)


def _autograd(
    stage: Stage, captured: Captured, primals: list[Tensor], tangents: list[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """A stage's results, and its gradients with the carries added, without our tracing."""
    template = stage.traced
    inputs = [p.clone() if i in stage.mutated else p for i, p in enumerate(primals)]
    with captured.capture.ambient.apply():
        results = [*stage.module(*inputs), *(inputs[i] for i in stage.mutated)]
    ends = [results[k] for k in template.tangents] + [
        primals[k] for k in template.partial_gradients
    ]
    gradients = torch.autograd.grad(ends, [primals[i] for i in template.gradients], tangents)
    return [r.detach() for r in results], list(gradients)


def _assert_equal(got: Any, want: Any) -> None:
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)


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


@pytest.mark.parametrize(
    ("model", "random"),
    [
        (Net(Net.chain, dropout=0.5), "- r r r -"),
        (Net(Net.chain, dropout=0.0), "- - - - -"),
        (nn.Sequential(Attention(0.0), Attention(0.1), Attention(0.0)), "- r -"),
        (Net(_noisy), "r"),
    ],
    ids=["dropout", "dropout of 0", "attention", "rand_like"],
)
def test_stages_that_draw_random_numbers(model: nn.Module, random: str) -> None:
    schedule = templates(model, X)
    flags = ["r" if stage.traced.random else "-" for stage in schedule.stages]
    assert " ".join(flags) == random


def test_a_mask_is_drawn_in_the_order_of_memory() -> None:
    """As eager `dropout` does for a transposed value: each layer draws the plain layer's mask."""

    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(self.fc(x).t(), 0.5).t()

    captured = capture(nn.Sequential(Transposed(), Transposed()), X)
    stage = captured.build("templates").stages[0]
    primals = [meta.zeros().add(1) for meta in stage.metas]
    torch.manual_seed(0)
    want = stage.module(*primals)[0]
    torch.manual_seed(0)
    assert torch.equal(stage.traced.graphs[Code.FORWARD](*primals)[0], want)


def test_eval_mode_draws_none() -> None:
    layers = [nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)) for _ in range(2)]
    model = nn.Sequential(*layers)
    assert [s.traced.random for s in templates(model, X).stages] == [True, True]
    assert [s.traced.random for s in templates(model.eval(), X).stages] == [False, False]


def test_a_random_stage_draws_the_same_in_every_piece_of_code() -> None:
    template = chain(dropout=0.5).stages[1].traced
    code = template.graphs
    assert code[Code.FORWARD] is code[Code.FORWARD_SAVING] is code[Code.RECOMPUTE]


def test_tracing_leaves_the_random_generator_alone() -> None:
    captured = capture(Net(Net.chain, dropout=0.5), X)
    before = torch.get_rng_state()
    captured.build("templates")
    assert torch.equal(torch.get_rng_state(), before)


# What a recompute leaves out.


def test_a_recompute_leaves_out_what_no_backward_needs() -> None:
    """The last matrix product of a layer: nothing is saved of what comes behind it."""
    stage = chain().stages[1]
    template = stage.traced
    assert kinds(stage, template.recompute_primals) == "up.weight up.bias x"
    products = {code: _products(template, code) for code in template.graphs}
    assert products[Code.FORWARD] == products[Code.FORWARD_SAVING] == 2
    assert products[Code.RECOMPUTE] == 1
    assert products[Code.BACKWARD] == 4


def _products(template: Template, code: Code) -> int:
    """How many matrix products a piece of code computes."""
    products = (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
    return sum(node.target in products for node in template.graphs[code].graph.nodes)


def test_new_values_of_what_is_changed_come_out_of_the_forward_alone() -> None:
    template = templates(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), X).stages[-1].traced
    assert len(template.mutated) == 3, "mean, variance, count"
    assert len(ops.returned(template.graphs[Code.FORWARD].graph)) == 1 + 3
    assert len(ops.returned(template.graphs[Code.RECOMPUTE].graph)) == len(template.saved)


# The pass.


def test_the_input_schedule_is_left_as_it_was() -> None:
    captured = capture(Net(Net.chain), X)
    schedule = captured.with_tangent()
    after = apply(captured.passes()["templates"], schedule)
    assert all(stage.template is None for stage in schedule.stages)
    assert [s.index for s in after.stages] == [0, 1, 2, 3, 4]
    for node in ops.nodes_of(after.forward, ops.forward):
        assert node.args[0].template is not None  # type: ignore[union-attr]


def test_a_stage_that_cannot_be_traced_is_named() -> None:
    captured = capture(Net(Net.chain), X)
    schedule = captured.with_tangent()
    stage = schedule.stages[1]
    graph = fx.Graph()
    inputs = [graph.placeholder(f"p{i}") for i in range(len(stage.primals))]
    graph.output((graph.call_function(torch.nonzero, (inputs[-1],)),))
    object.__setattr__(stage, "module", fx.GraphModule(nn.Module(), graph))
    with pytest.raises(UnsupportedGraphError, match=r"stage 'layers.0': .*nonzero"):
        trace_templates(
            schedule, ambient=captured.capture.ambient, cache={}, lowering=Lowering.INDUCTOR
        )
