"""Schedules of models that are only shapes are those of the model in memory; where Dynamo traces
one of equal layers, the graph is that of a capture which traces all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.comptime import comptime

from megacompile import ModelError, OptionError, megacompile, schedules
from megacompile.ir import ops
from megacompile.ir.capture import Capture, ParamInput
from megacompile.ir.schedule import Schedule
from tests import inside

IDS = torch.zeros(2, 8, dtype=torch.int64)


class Mixed(nn.Module):
    """A buffer, a frozen parameter, an integer input, two outputs; tied, or with a break."""

    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.head = nn.Linear(16, 64, bias=False)
        if not breaks:
            self.head.weight = self.embed.weight
        self.layers[1].bias.requires_grad_(False)
        self.scale: Tensor
        self.register_buffer("scale", torch.full((16,), 2.0))
        self.breaks = breaks

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        x = self.embed(ids)
        for layer in self.layers:
            x = torch.relu(layer(x)) * self.scale
        if self.breaks:
            torch._dynamo.graph_break()
        logits = self.head(x)
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


def actions(found: list[Schedule]) -> list[str]:
    return [ops.actions(graph) for schedule in found for graph in schedule.graphs.values()]


@pytest.mark.parametrize("breaks", [False, True])
def test_the_schedule_is_the_one_that_runs(breaks: bool) -> None:
    """In everything but the history."""
    with torch.device("meta"):
        model = Mixed(breaks)
    *others, last = inside.abstract(model, (IDS,), {"labels": IDS})
    found = [*(program.schedule(reuse=False) for program in others), last.schedule()]
    running = megacompile(Mixed(breaks), device="cpu", progress=False)
    for _ in range(1 + breaks):  # which outputs get a gradient is a guess in the first
        running.zero_grad()
        running(IDS, labels=IDS)[0].backward()
    assert actions(schedules(running)) == actions(found) and len(found) == 1 + breaks
    for real, abstract in zip(schedules(running), found, strict=True):
        for name in ("slots", "buckets", "gradient_params", "saved_values"):
            assert getattr(real, name) == getattr(abstract, name)
        for mine, theirs in zip(real.templates, abstract.templates, strict=True):
            for name in ("saved_bytes", "primals", "gradient_metas"):
                assert getattr(mine, name) == getattr(theirs, name)


def test_the_model_is_left_as_it_was() -> None:
    """Also where it raises."""
    model = Mixed()
    before = {name: (id(p), p.clone(), p.grad) for name, p in model.named_parameters()}
    buffers = {name: id(b) for name, b in model.named_buffers()}
    inside.abstract(model, (IDS, IDS))
    with pytest.raises(Exception, match="shape|size|dim"):
        inside.abstract(model, (IDS, torch.zeros(3)))
    for name, p in model.named_parameters():
        assert id(p) == before[name][0] and torch.equal(p, before[name][1]) and p.grad is None
    assert {name: id(b) for name, b in model.named_buffers()} == buffers
    assert model.head.weight is model.embed.weight and type(model.embed.weight.data) is Tensor
    assert torch.isfinite(model(IDS, IDS)[1]).all()


def test_no_memory_is_taken() -> None:
    """A model of 100 TiB. In a capture without gradients there is no backward."""
    wide = nn.Sequential(*(nn.Linear(2**20, 2**20, bias=False, device="meta") for _ in range(24)))
    x = torch.empty(4, 2**20, device="meta")
    (program,) = inside.abstract(wide, (x,))
    schedule = program.schedule()
    assert len(schedule.stages) == 24 and len(schedule.templates) <= 3
    with torch.no_grad():
        (program,) = inside.abstract(wide, (x,))
    assert program.schedule().backward is None


def test_bad_input_is_refused() -> None:
    for given in (3, nn.ReLU()):
        with pytest.raises(ModelError):
            inside.abstract(given, (torch.ones(2),))  # type: ignore[arg-type]
    with pytest.raises(OptionError):
        inside.abstract(Mixed(), (IDS, IDS), lookahead=0)


# One of equal layers.


class Layer(nn.Module):
    traced: list[int] = []  # how often Dynamo has traced one

    def __init__(self, place: int, width: int = 8) -> None:
        super().__init__()
        self.place = place
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor, scale: Tensor, **options: Any) -> Any:
        comptime(lambda context: Layer.traced.append(1))
        hidden = self.up(self.norm(x)) * scale
        if options.get("shift") is not None:
            hidden = hidden + options["shift"][0] * options["shift"][1]
        return x + self.down(hidden.relu())


class Placed(Layer):
    """Reads its place."""

    def forward(self, x: Tensor, scale: Tensor, **options: Any) -> Any:
        made = super().forward(x, scale, **options)
        return made.tanh() if self.place == 2 else made * self.place


class Moded(Layer):
    """Asks for the grad mode."""

    def forward(self, x: Tensor, scale: Tensor, **options: Any) -> Any:
        return super().forward(x, scale, **options) if torch.is_grad_enabled() else x.sin()


class Net(nn.Module):
    def __init__(self, layer: type[Layer], call: Callable[..., Any]) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(map(layer, range(4))), nn.Linear(8, 3)
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        for k, layer in enumerate(self.layers):
            x = self.call(layer, k, x)
        result: Tensor = self.head(x).sum()
        return result


def plain(layer: nn.Module, k: int, x: Tensor) -> Any:
    return layer(x, x * 2, shift=(x, None if k < 0 else x.exp()))


def frozen(layer: nn.Module, k: int, x: Tensor) -> Any:
    with torch.set_grad_enabled(k != 1):
        return layer(x, x + k)


def as_it_is(x: Tensor, scale: Tensor, **options: Any) -> Tensor:
    return x


def doubled(module: Any, args: Any, result: Tensor) -> Tensor:
    return result * 2


Call = Callable[..., Any]
Change = Callable[[Any], Any]
MODELS: dict[str, tuple[type[Layer], Call, Change | None]] = {
    "equal": (Layer, plain, None),
    "one reads its place": (Placed, plain, None),
    "a tensor twice": (Layer, lambda layer, k, x: layer(x, x if k < 2 else x * 2), None),
    "grad mode": (Moded, frozen, None),
    "a call twice": (Layer, lambda layer, k, x: layer(layer(x, x), x), None),
    # Here none is taken for equal.
    "a hook": (Layer, plain, lambda m: m[2].down.register_forward_hook(doubled)),
    "tied": (Layer, plain, lambda m: setattr(m[3].down, "weight", m[2].down.weight)),
    "frozen": (Layer, plain, lambda m: m[1].up.weight.requires_grad_(False)),
    "another forward": (Layer, plain, lambda m: setattr(m[1], "forward", as_it_is)),
    "another eps": (Layer, plain, lambda m: setattr(m[3].norm, "eps", 1e-3)),
}


def listed(made: Capture) -> list[str]:
    """The nodes but for the inputs; those by what they are: their order and names differ."""
    graph = made.module.graph
    places: dict[Any, str] = {}
    for node, item in zip(graph.find_nodes(op="placeholder"), made.inputs, strict=True):
        places[node] = str(item)
        if isinstance(item, ParamInput):
            places[node] = item.bucket.params[item.param].name
    lines = []
    for node in graph.nodes:
        if node.op != "placeholder":
            args = torch.fx.map_arg((node.args, node.kwargs), places.__getitem__)
            lines.append(f"{node.op} {node.target} {args}")
            places[node] = f"%{len(lines)}"
    return lines


@pytest.mark.parametrize("name", MODELS)
def test_the_graph_is_that_of_a_plain_capture(name: str) -> None:
    """Where every layer has a number of its own, none is taken for equal."""
    layer, call, change = MODELS[name]
    found, traced = [], []
    for equal in (True, False):
        torch.compiler.reset()
        Layer.traced.clear()
        model: Any = Net(layer, call)
        for k, each in enumerate(model.layers):
            each.number = 0.5 if equal else k + 0.5
        if change is not None:
            change(model.layers)
        (program,) = inside.abstract(model, (torch.ones(2, 4, 8, device="meta"),))
        found.append(listed(program.capture))
        traced.append(len(Layer.traced))
    assert found[0] == found[1]
    if name == "equal":
        assert traced[0] < traced[1]
    elif change is not None:
        assert traced[0] == traced[1]
