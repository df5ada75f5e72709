"""`fold_vmaps`: a vmap is one node, its stages stream, and the numbers are the plain model's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from megacompile import compat, schedules
from megacompile.ir.capture import Ambient, Capture, TensorInput
from megacompile.ir.tensors import TensorMeta
from megacompile.passes.capture.vmaps import fold_vmaps
from tests.zoo import assert_same, equal, twins


def scale(x: Tensor, weight: Tensor) -> Tensor:
    return x * weight.tanh() + 1


class Mapped(nn.Module):
    """A layer whose weight acts on each row, by way of vmap."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        mapped: Tensor = torch.vmap(scale, in_dims=(0, None))(x, self.weight)
        both: Tensor = torch.vmap(torch.vmap(torch.mul), in_dims=1, out_dims=1)(mapped, x)
        result: Tensor = self.linear(both + mapped)
        return result


class Stack(nn.Module):
    def __init__(self, *, checkpoints: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mapped() for _ in range(4))
        self.checkpoints = checkpoints

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpoints else layer(x)
        return x.square().sum()


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.filterwarnings("error:megacompile")
def test_streamed_is_plain(checkpoints: bool) -> None:
    torch.manual_seed(0)
    plain, streamed = twins(Stack(checkpoints=checkpoints))
    x = torch.randn(2, 4)
    for model in (plain, streamed):
        model(x).backward()
    assert_same(plain, streamed)
    with torch.no_grad():
        assert equal(plain(x), streamed(x))
    (schedule, *_) = schedules(streamed)
    assert len(schedule.stages) == 4
    assert len(schedule.templates) == 3  # of the first layer, of the last, of those in between


def of_function(function: object, *inputs: Tensor) -> Capture:
    """What Dynamo captures of a function of tensors."""
    found: list[fx.GraphModule] = []

    def backend(module: fx.GraphModule, examples: object) -> fx.GraphModule:
        del examples
        found.append(module)
        return module

    torch.compile(function, backend=backend)(*inputs)  # type: ignore[call-overload]
    (module,) = found
    cpu = torch.device("cpu")
    kinds = tuple(TensorInput(TensorMeta.of(x)) for x in inputs)
    return Capture("f", module, kinds, cpu, Ambient.current(cpu))


def calls(capture: Capture) -> list[str]:
    graph = capture.module.graph
    return [str(n.target) for n in graph.nodes if n.op in ("call_module", "call_function")]


def test_a_vmap_becomes_one_node() -> None:
    x = torch.arange(6.0).view(2, 3)

    def function(x: Tensor) -> Tensor:
        y: Tensor = torch.vmap(torch.vmap(lambda row: row + 1))(x) * torch.vmap(torch.mul)(x, x)
        return y

    given = of_function(function, x)
    before = list(given.module.graph.nodes)
    folded = fold_vmaps(given)
    assert [name for name in calls(folded) if name.startswith("vmap")] == ["vmap_0", "vmap_1"]
    assert not folded.module.graph.find_nodes(op="call_function", target=compat.VMAP_BEGIN)
    assert list(given.module.graph.nodes) == before  # the given one is left as it is
    folded.module.graph.lint()
    assert torch.equal(folded.module(x)[0], function(x))


def test_a_graph_without_one_is_returned_itself() -> None:
    given = of_function(lambda x: x + 1, torch.ones(2))
    assert fold_vmaps(given) is given
