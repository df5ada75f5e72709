"""Schedules of models that are only shapes are those of the model in memory; where Dynamo traces
one of equal layers, the graph is that of a capture which traces all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.comptime import comptime

from megacompile import compat, megacompile, schedules
from megacompile.cost.memory import host_memory
from megacompile.errors import ModelError, OptionError
from megacompile.ir import ops
from megacompile.ir.capture import Capture, ParamInput
from megacompile.ir.schedule import Schedule
from megacompile.ir.stages import Code
from megacompile.plan.abstract import abstract_options, abstract_programs, abstract_schedules
from megacompile.plan.equal_layers import equal_layers

IDS = torch.zeros(2, 8, dtype=torch.int64)


class Mixed(nn.Module):
    """Tied weights, a buffer, a frozen parameter, an integer input, two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.head = nn.Linear(16, 64, bias=False)
        self.head.weight = self.embed.weight
        self.layers[1].bias.requires_grad_(False)
        self.scale: Tensor
        self.register_buffer("scale", torch.full((16,), 2.0))

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Any:
        x = self.embed(ids)
        for layer in self.layers:
            x = torch.relu(layer(x)) * self.scale
        logits = self.head(x)
        if labels is None:
            return logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


class Broken(nn.Module):
    """Two captured graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        total: Tensor = self.second(x).sum()
        return total


def actions(found: list[Schedule]) -> list[str]:
    return [ops.actions(graph) for schedule in found for graph in schedule.graphs.values()]


EAGER = abstract_options(device="cpu", lowering="eager")


def test_the_schedule_is_the_one_that_runs() -> None:
    """In everything but the history."""
    with torch.device("meta"):
        model = Mixed()
    (abstract,) = abstract_schedules(model, (IDS,), {"labels": IDS}, options=EAGER)
    running = megacompile(Mixed(), device="cpu", progress=False)
    running(IDS, labels=IDS)[0].backward()
    (real,) = schedules(running)
    assert actions([real]) == actions([abstract])
    for name in ("slots", "buckets", "gradient_params", "saved_values"):
        assert getattr(real, name) == getattr(abstract, name)
    for mine, theirs in zip(real.templates, abstract.templates, strict=True):
        for name in ("saved_bytes", "primals", "gradient_metas"):
            assert getattr(mine, name) == getattr(theirs, name)


def test_graph_breaks_are_those_of_the_model_that_runs() -> None:
    x = torch.ones(4, 16)
    with torch.device("meta"):
        model = Broken()
    found = abstract_schedules(model, (x,), options=EAGER)
    running = megacompile(Broken(), device="cpu", progress=False)
    for _ in range(2):  # which outputs get a gradient is a guess in the first
        running.zero_grad()
        running(x).backward()
    assert actions(schedules(running)) == actions(found)


def test_the_model_is_left_as_it_was() -> None:
    """Also where it raises."""
    model = Mixed()
    before = {name: (id(p), p.clone(), p.grad) for name, p in model.named_parameters()}
    buffers = {name: id(b) for name, b in model.named_buffers()}
    abstract_schedules(model, (IDS, IDS))
    with pytest.raises(Exception, match="shape|size|dim"):
        abstract_schedules(model, (IDS, torch.zeros(3)))
    for name, p in model.named_parameters():
        assert id(p) == before[name][0] and torch.equal(p, before[name][1]) and p.grad is None
    assert {name: id(b) for name, b in model.named_buffers()} == buffers
    assert model.head.weight is model.embed.weight and type(model.embed.weight.data) is Tensor
    assert torch.isfinite(model(IDS)).all()


def test_no_memory_is_taken() -> None:
    """A model of 100 TiB."""
    wide = nn.Sequential(*(nn.Linear(2**20, 2**20, bias=False, device="meta") for _ in range(24)))
    (schedule,) = abstract_schedules(wide, (torch.empty(4, 2**20, device="meta"),))
    assert sum(host_memory(schedule).values()) == 2 * 24 * 2**40 * 4
    assert len(schedule.stages) == 24 and len(schedule.templates) <= 3


def test_one_capture_gives_several_schedules() -> None:
    (program,) = abstract_programs(Mixed(), (IDS, IDS))
    assert sum(isinstance(item, ParamInput) for item in program.capture.inputs) == 9
    adding = program.schedule(accumulate=True, reuse=False)
    assert "FETCH_GRAD" in actions([adding])[1] and "REUSE" not in actions([adding])[1]
    assert adding.templates == program.schedule().templates  # traced once
    with torch.no_grad():
        (inference,) = abstract_schedules(Mixed(), (IDS,))
    assert inference.backward is None
    assert Code.BACKWARD not in inference.templates[0].graphs


def test_bad_input_is_refused() -> None:
    for given in (3, nn.ReLU()):
        with pytest.raises(ModelError):
            abstract_schedules(given, (torch.ones(2),))  # type: ignore[arg-type]
    with pytest.raises(OptionError):
        abstract_options(lookahead=0)


# One of equal layers.

needs_reuse = pytest.mark.skipif(not compat.REUSES_REGIONS, reason="Dynamo traces every region")


class Layer(nn.Module):
    def __init__(self, place: int, width: int = 8) -> None:
        super().__init__()
        self.place = place
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor, scale: Tensor, **options: Any) -> Any:
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
    def __init__(self, layers: list[nn.Module], call: Callable[..., Any]) -> None:
        super().__init__()
        self.layers, self.head, self.call = nn.ModuleList(layers), nn.Linear(8, 3), call

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


def of(layer: type[Layer], call: Callable[..., Any]) -> Callable[[], nn.Module]:
    return lambda: Net([layer(k) for k in range(4)], call)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "equal": of(Layer, plain),
    "one reads its place": of(Placed, plain),
    "a tensor twice": of(Layer, lambda layer, k, x: layer(x, x if k < 2 else x * 2)),
    "grad mode": of(Moded, frozen),
    "a call twice": of(Layer, lambda layer, k, x: layer(layer(x, x), x)),
}


def as_it_is(x: Tensor, scale: Tensor, **options: Any) -> Tensor:
    return x


def doubled(module: Any, args: Any, result: Tensor) -> Tensor:
    return result * 2


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a hook": lambda m: m[2].down.register_forward_hook(doubled),
    "tied": lambda m: setattr(m[3].down, "weight", m[2].down.weight),
    "frozen": lambda m: m[1].up.weight.requires_grad_(False),
    "another forward": lambda m: setattr(m[1], "forward", as_it_is),
    "another eps": lambda m: setattr(m[3].norm, "eps", 1e-3),
}


def test_layers_that_differ_are_not_equal() -> None:
    for name, change in CHANGES.items():
        model: Any = MODELS["equal"]()
        assert [len(group) for group in equal_layers(model)] == [4]
        change(model.layers)
        assert not equal_layers(model), name


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


@needs_reuse
@pytest.mark.parametrize("name", MODELS)
def test_the_graph_is_that_of_a_plain_capture(name: str) -> None:
    """Where every layer has a number of its own, none is taken for equal."""
    found = []
    for equal in (True, False):
        torch.compiler.reset()
        model: Any = MODELS[name]()
        for k, layer in enumerate(model.layers):
            layer.number = 0.5 if equal else k + 0.5
        assert bool(equal_layers(model)) == equal
        x = torch.ones(2, 4, 8, device="meta")
        (program,) = abstract_programs(model, (x,), options=abstract_options())
        found.append(listed(program.capture))
    assert found[0] == found[1]


class Noted(Layer):
    """Notes that Dynamo traces it."""

    traced: list[int] = []

    def forward(self, x: Tensor, scale: Tensor, **options: Any) -> Any:
        comptime(lambda context: Noted.traced.append(1))
        return super().forward(x, scale, **options)


@needs_reuse
def test_equal_layers_are_traced_once() -> None:
    counts = []
    for equal in (True, False):
        Noted.traced.clear()
        model: Any = of(Noted, plain)()
        model.layers[0].number = 0.5 if equal else 1.5
        for layer in model.layers[1:]:
            layer.number = 0.5
        abstract_programs(model, (torch.ones(2, 4, 8, device="meta"),))
        counts.append(len(Noted.traced))
    assert counts[0] < counts[1]
