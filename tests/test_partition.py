"""`partition`: the stages' inputs and outputs, what is changed in place, and the same numbers.

Numbers are compared with the plain module in the same run: stages run in torch, under autograd.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from megacompile.errors import UnsupportedGraphError
from megacompile.ir import ops
from megacompile.ir.buckets import Bucket, Unit
from megacompile.ir.capture import Ambient, Capture, ConstantInput, ParamInput, TensorInput
from megacompile.ir.schedule import Schedule
from megacompile.ir.stages import ArgRef, ParamRef
from megacompile.ir.tensors import TensorMeta
from megacompile.passes.stages.partition import partition
from tests.capturing import CPU, Net, capture, result, run_stages

X = torch.linspace(-1, 1, 8).view(2, 4)


def check(model: nn.Module, *args: Any) -> Schedule:
    """Cut the model; outputs, gradients, buffers and inputs are bitwise those of the plain one."""
    model.zero_grad()
    plain, plain_args = copy.deepcopy((model, args))
    captured = capture(model, *args)
    schedule = captured.partition()
    torch.manual_seed(7)
    want = _tuple(plain(*plain_args))
    torch.manual_seed(7)
    got = run_stages(captured, schedule)
    for one, other in zip(want, got, strict=True):
        assert _equal(one, other), "an output"
    for outputs in (want, got):
        if isinstance(outputs[0], Tensor) and outputs[0].requires_grad:
            outputs[0].sum().backward()
    for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert _equal(p.grad, q.grad), f"the gradient of {name}"
    for (name, a), b in zip(plain.named_buffers(), model.buffers(), strict=True):
        assert _equal(a, b), f"buffer {name}"
    for i, (a, b) in enumerate(zip(plain_args, args, strict=True)):
        assert _equal(a, b), f"input {i}"
    return schedule


def _tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return bool(one == other)


def names(schedule: Schedule) -> str:
    return " | ".join(stage.name for stage in schedule.stages)


def signatures(schedule: Schedule) -> str:
    """Each stage as "1(y0_0)->1": what it takes besides parameters, how many values it gives."""
    words = []
    for call in ops.nodes_of(schedule.forward, ops.forward):
        stage, _, args, _ = ops.arguments(call)
        taken = ",".join(arg.name for arg in args)
        words.append(f"{stage.index}({taken})->{len(stage.outputs)}")
    return " ".join(words)


def buckets(schedule: Schedule) -> str:
    """The labels of the buckets that each stage reads."""
    return " | ".join(" ".join(b.label for b in stage.buckets) for stage in schedule.stages)


# Stages.


def test_a_chain() -> None:
    """The docstring's example: one stage a layer, the loss with the head."""
    schedule = check(Net(Net.chain, depth=2), X)
    assert ops.actions(schedule.forward) == "0F 1F 2F 3F"
    assert names(schedule) == "embed | layers.0 | layers.1 | head"
    assert signatures(schedule) == "0(x2)->1 1(y0_0)->1 2(y1_0)->1 3(y2_0)->1"
    assert result(schedule, 0).meta["value"].shape == (), "logits do not leave the head's stage"


def test_primals_are_parameters_first_in_the_order_of_their_bucket() -> None:
    stage = check(Net(Net.chain), X).stages[1]
    assert stage.primals == (*(ParamRef(0, i) for i in range(4)), ArgRef(0))
    shapes = [meta.shape for meta in stage.metas]
    assert shapes == [(8, 4), (8,), (4, 8), (4,), (2, 4)]
    assert [meta.requires_grad for meta in stage.metas] == [True] * 5


def test_a_layer_called_twice_is_two_stages_on_one_bucket() -> None:
    def twice(net: Net, x: Tensor) -> Any:
        return net.head(net.layers[0](net.layers[1](net.layers[0](net.embed(x))))).sum()

    schedule = check(Net(twice), X)
    assert names(schedule) == "embed | layers.0 | layers.1 | layers.0 | head"
    assert buckets(schedule) == "0 | 1 | 2 | 1 | 4"


def test_tied_weights_are_one_bucket_that_two_stages_read() -> None:
    def tied(net: Net, x: Tensor) -> Any:
        return F.linear(net.layers[0](net.embed(x)), net.head.weight).sum()

    net = Net(tied)
    net.head.weight = net.embed.weight
    schedule = check(net, X)
    assert buckets(schedule) == "0 | 1 | 0"
    assert names(schedule) == "embed | layers.0 | embed"


def test_a_stage_that_reads_two_buckets() -> None:
    def head_and_embed(net: Net, x: Tensor) -> Any:
        x = net.layers[0](net.embed(x))
        return F.linear(net.head(x), net.embed.weight).sum()

    schedule = check(Net(head_and_embed), X)
    assert buckets(schedule) == "0 | 1 | 2 0"
    assert names(schedule) == "embed | layers.0 | head+embed"
    assert schedule.stages[2].primals[:3] == (ParamRef(0, 0), ParamRef(0, 1), ParamRef(1, 0))


def test_a_stage_that_is_the_first_to_read_two_buckets() -> None:
    def at_once(net: Net, x: Tensor) -> Any:
        return net.layers[0](F.linear(x, net.embed.weight @ net.head.weight)).sum()

    assert buckets(check(Net(at_once), X)) == "0 0.1 | 1"


def test_a_skip_over_several_stages() -> None:
    def skip(net: Net, x: Tensor) -> Any:
        first = net.embed(x)
        x = first
        for layer in net.layers:
            x = layer(x)
        return net.head(x + first).sum()

    schedule = check(Net(skip), X)
    assert signatures(schedule) == ("0(x2)->1 1(y0_0)->1 2(y1_0)->1 3(y2_0)->1 4(y3_0,y0_0)->1")


def test_branches() -> None:
    def branches(net: Net, x: Tensor) -> Any:
        x = net.embed(x)
        return net.head(net.layers[1](net.layers[0](x) + net.layers[2](x)) + x).sum()

    assert names(check(Net(branches), X)) == "embed | layers.0 | layers.2 | layers.1 | head"


def test_chunks_that_later_stages_take() -> None:
    def chunks(net: Net, x: Tensor) -> Any:
        left, right = net.embed(x).chunk(2, -1)
        y = net.layers[0](torch.cat([left, left], -1))
        return net.head(net.layers[1](y) * torch.cat([right, right], -1)).sum()

    schedule = check(Net(chunks), X)
    assert names(schedule) == "embed | layers.0 | layers.1 | head"
    assert signatures(schedule).startswith("0(x2)->2"), "the halves cross, the tuple does not"


def test_outputs_are_what_the_graph_returns() -> None:
    def outputs(net: Net, x: Tensor) -> tuple[Any, ...]:
        first = net.embed(x)
        y = net.layers[0](first)
        return net.head(y).sum(), first, y.detach(), y.view(-1)

    check(Net(outputs), X)


def test_constants_that_the_graph_holds() -> None:
    def constants(net: Net, x: Tensor) -> Any:
        scale = torch.tensor([1.0, 2.0, 3.0, 4.0])
        x = net.embed(x) * scale
        for layer in net.layers:
            x = layer(x) * scale
        return net.head(x).sum()

    check(Net(constants), X)


def test_dynamic_sizes_are_folded() -> None:
    def sized(net: Net, x: Tensor) -> tuple[Tensor, int]:
        count = x.shape[0]
        x = net.embed(x).view(1, count, 4)
        for layer in net.layers:
            x = layer(x) / count
        return net.head(x.view(count, 4)[: count - 1]).sum(), count + 1

    x = torch.ones(6, 4)
    torch._dynamo.mark_dynamic(x, 0)
    captured = capture(Net(sized), x)
    assert ConstantInput(6) in captured.capture.inputs, "the size is an input of the graph"
    schedule = check(Net(sized), x)
    assert names(schedule) == "embed | layers.0 | layers.1 | layers.2 | head"
    for stage in schedule.stages:
        assert all(isinstance(meta, TensorMeta) for meta in stage.metas), "sizes are literals"


def test_random_operators_draw_as_before() -> None:
    check(Net(Net.chain, dropout=0.5), X)


def test_a_custom_function_and_a_branch_on_a_value() -> None:
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

    def function(net: Net, x: Tensor) -> Any:
        x = Square.apply(net.layers[0](net.embed(x)))  # type: ignore[no-untyped-call]
        x = torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))
        return net.head(net.layers[1](x)).sum()

    assert names(check(Net(function), X)) == "embed | layers.0 | layers.1 | head"


def test_checkpointed_layers() -> None:
    schedule = check(Net(Net.checkpointed, dropout=0.5), X)
    assert names(schedule) == "embed | layers.0 | layers.1 | layers.2 | head"


# Regions.


def test_no_grad_over_several_stages() -> None:
    def region(net: Net, x: Tensor) -> Any:
        x = net.embed(x)
        with torch.no_grad():
            x = net.layers[1](net.layers[0](x))
        return net.head(net.layers[2](x)).sum()

    schedule = check(Net(region), X)
    assert names(schedule) == "embed | layers.0 | layers.1 | layers.2 | head"
    needs = [stage.outputs[0].requires_grad for stage in schedule.stages]
    assert needs == [True, False, False, True, True]


def test_enable_grad_within_no_grad() -> None:
    def region(net: Net, x: Tensor) -> Any:
        x = net.embed(x)
        with torch.no_grad():
            y = net.layers[0](x)
            with torch.enable_grad():
                z = net.layers[1](x)
            y = net.layers[2](y)
        return net.head(y + z).sum()

    check(Net(region), X)


@pytest.mark.parametrize(
    "view", [lambda x: x[0], lambda x: x.t().t(), lambda x: x.view(-1)[:4]], ids=["[]", "t", "view"]
)
def test_a_view_under_no_grad_gets_no_gradient(view: Callable[[Tensor], Tensor]) -> None:
    """It says that it requires grad. An index is not moved out of there, as a tuple's items are."""

    def region(net: Net, x: Tensor) -> Any:
        x = net.embed(x)
        with torch.no_grad():
            anchor = view(x)
        for layer in net.layers:
            x = layer(x)
        return net.head(x * anchor).sum()

    first = check(Net(region), X).stages[0]
    assert [meta.requires_grad for meta in first.outputs] == [True, False]


def test_autocast_over_several_stages() -> None:
    def region(net: Net, x: Tensor) -> Any:
        x = net.embed(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for layer in net.layers:
                x = layer(x)
        return net.head(x.float()).sum()

    schedule = check(Net(region), X)
    dtypes = [stage.outputs[0].dtype for stage in schedule.stages]
    assert dtypes == [torch.float32] * 5, "a saved value of bf16 and fp32"
    assert names(schedule) == "embed | layers.0 | layers.1 | layers.2 | head"


def test_nested_autocast_over_several_stages() -> None:
    def region(net: Net, x: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = net.embed(x)
            x = net.layers[0](x)
            with torch.autocast("cpu", enabled=False):
                x = net.layers[1](x.float())
            x = net.layers[2](x)
            return net.head(x).float().sum(), net.head(x)

    check(Net(region), X)


def test_captured_under_autocast_or_no_grad() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        check(Net(Net.chain), X)
    with torch.no_grad():
        schedule = check(Net(Net.chain), X)
    assert not schedule.stages[-1].outputs[0].requires_grad


# Changes in place.


def changed(schedule: Schedule) -> str:
    """The stages that change an input in place."""
    return " ".join(str(stage.index) for stage in schedule.stages if stage.mutated)


def test_a_value_that_later_stages_change_in_place() -> None:
    def function(net: Net, x: Tensor) -> Any:
        x = net.embed(x)
        running = x * 1.5
        x = net.layers[0](x)
        running.mul_(2)
        x = net.layers[1](x + running)
        running.add_(1)
        return net.head(net.layers[2](x) + running).sum()

    schedule = check(Net(function), X)
    assert names(schedule) == "embed | layers.0 | layers.1 | layers.2 | head"
    assert changed(schedule) == "2 3"
    assert signatures(schedule).endswith("4(y3_0,y3_1)->1"), "the head takes the new value"


def test_a_value_that_was_changed_before_is_only_read_later() -> None:
    """Then it is no new value: a ResNet's layers end in `relu_`, and the next ones only read."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(2, 2, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x)
            y += x
            return F.relu_(y)

    schedule = check(nn.Sequential(*(Block() for _ in range(3))), torch.ones(1, 2, 4, 4))
    assert names(schedule) == "0 | 1 | 2"
    assert changed(schedule) == ""


def test_a_value_that_requires_grad_since_a_part_was_set() -> None:
    """Made in one stage without gradient, filled in by the next ones."""

    def function(net: Net, x: Tensor) -> Any:
        x = net.embed(x)
        collected = torch.zeros(3, 2, 4)
        for i, layer in enumerate(net.layers):
            x = layer(x)
            collected[i].copy_(x)
        return net.head(collected.sum(0)).sum()

    schedule = check(Net(function), X)
    assert names(schedule) == "embed | layers.0 | layers.1 | layers.2 | head"
    flows = [
        [item.meta["value"].requires_grad for k, item in sorted(ops.items(call))]
        for call in ops.nodes_of(schedule.forward, ops.forward)
    ]
    new = [True, True]  # what the stage gives, and the new value of `collected`
    assert flows == [[True, False], [True], new, new, new]


def test_a_value_that_was_set_in_the_stage_that_made_it() -> None:
    class Interleave(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            out = torch.empty_like(x)
            out[..., ::2] = self.fc(x)[..., 1::2]
            out[..., 1::2] = x[..., ::2]
            return out

    schedule = check(nn.Sequential(*(Interleave() for _ in range(3))), X)
    assert names(schedule) == "0 | 1 | 2"


def test_a_view_of_what_changes_is_used_elsewhere() -> None:
    def function(net: Net, x: Tensor) -> Any:
        x = net.embed(x)
        scaled = x * 2
        row = scaled[:1]
        x = net.layers[0](x)
        row.mul_(3)
        return net.head(net.layers[1](x) + scaled).sum()

    assert names(check(Net(function), X)) == "embed+layers.0+layers.1+head"


def test_a_part_that_changes_and_nothing_else_uses_the_whole() -> None:
    def function(net: Net, x: Tensor) -> Any:
        x = net.embed(x)
        row = (x * 2)[:1]
        x = net.layers[0](x)
        row.mul_(3)
        return net.head(net.layers[1](x) + row).sum()

    schedule = check(Net(function), X)
    assert names(schedule) == "embed | layers.0 | layers.1 | head"
    assert changed(schedule) == "2"


def test_an_input_that_is_changed_is_assigned_once_at_the_end() -> None:
    def function(net: Net, x: Tensor, state: Tensor) -> Any:
        x = net.layers[0](net.embed(x))
        state.add_(1)
        x = net.layers[1](x) + state
        state.mul_(2)
        return net.head(x + state).sum()

    schedule = check(Net(function), X, X.clone())
    assert ops.actions(schedule.forward) == "0F 1F 2F 3F ASSIGN"
    assert changed(schedule) == "2 3"
    assert signatures(schedule).endswith("2(x7,y1_0)->1 3(y2_0,y2_1)->1")


def test_parts_of_an_input_that_are_changed_by_several_stages() -> None:
    def function(net: Net, x: Tensor, cache: Tensor) -> Any:
        x = net.embed(x)
        for i, layer in enumerate(net.layers):
            x = layer(x)
            cache[i] = x.detach()
            x = x + cache[i]
        return net.head(x).sum() + cache.sum()

    schedule = check(Net(function), X, torch.zeros(3, 2, 4))
    assert ops.actions(schedule.forward).count("ASSIGN") == 1


def test_batch_norm_statistics_are_assigned() -> None:
    def layer() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

    model = nn.Sequential(layer(), layer())
    assert ops.actions(check(model, X).forward) == (
        "0F ASSIGN ASSIGN ASSIGN 1F ASSIGN ASSIGN ASSIGN"
    )
    assert ops.actions(check(model.eval(), X).forward) == "0F 1F"


def test_statistics_that_several_stages_change_are_assigned_by_the_last() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = self.norm(layer(x))
            return x.square().sum()

    schedule = check(Shared(), X)
    assert ops.actions(schedule.forward) == "0F 1F 2F 3F ASSIGN ASSIGN ASSIGN"
    assert buckets(schedule) == "0 | 1 | 2 | 1"


# What cannot be scheduled.


def test_a_parameter_that_is_changed_in_place() -> None:
    def function(net: Net, x: Tensor) -> Any:
        with torch.no_grad():
            net.embed.weight.mul_(2)
        return net.head(net.embed(x))

    with pytest.raises(UnsupportedGraphError, match=r"'embed.weight' is changed in place by mul_"):
        capture(Net(function), X).partition()


def test_a_view_of_a_parameter_that_is_changed_in_place() -> None:
    def function(net: Net, x: Tensor) -> Any:
        net.head.weight.detach()[0].zero_()
        return net.head(net.embed(x))

    with pytest.raises(UnsupportedGraphError, match=r"'head.weight' is changed in place by zero_"):
        capture(Net(function), X).partition()


def test_a_parameter_that_is_returned() -> None:
    """Dynamo hands it out itself; a graph that does return one is refused."""
    graph = fx.Graph()
    weight = graph.placeholder("weight")
    graph.output((graph.call_function(torch.sin, (weight,)), weight))
    module = fx.GraphModule(nn.Module(), graph)
    bucket = Bucket.layout(0, "unit", [("layer.weight", torch.ones(2))])
    inputs = (ParamInput(bucket, 0, True),)
    captured = Capture("model", module, inputs, CPU, Ambient.current(CPU))
    with pytest.raises(UnsupportedGraphError, match=r"'layer.weight' is an output"):
        partition(captured, (Unit(bucket, frozenset(), frozenset(), repeated=False),))


def test_a_shape_that_depends_on_data() -> None:
    graph = fx.Graph()
    graph.output((graph.call_function(torch.nonzero, (graph.placeholder("x"),)),))
    module = fx.GraphModule(nn.Module(), graph)
    inputs = (TensorInput(TensorMeta.of(X)),)
    with pytest.raises(UnsupportedGraphError, match=r"model: .*nonzero"):
        partition(Capture("model", module, inputs, CPU, Ambient.current(CPU)), ())


def test_nothing_of_the_capture_is_changed() -> None:
    captured = capture(Net(Net.chain), X)
    before = str(captured.capture.module.graph)
    captured.partition()
    assert str(captured.capture.module.graph) == before
