"""One of equal layers is traced: the graph is that of a capture that traces all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from megacompile import compat
from megacompile.ir.capture import Capture, GraphInput, ParamInput
from megacompile.plan import abstract
from megacompile.plan.abstract import abstract_options, abstract_programs
from megacompile.plan.equal_layers import NotEqualError, equal_layers

needs_reuse = pytest.mark.skipif(not compat.REUSES_REGIONS, reason="Dynamo traces every region")


class Layer(nn.Module):
    def __init__(self, place: int, width: int = 8) -> None:
        super().__init__()
        self.place = place
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor, scale: Tensor, **options: Any) -> Tensor:
        hidden = self.up(self.norm(x)) * scale
        if options.get("shift") is not None:
            hidden = hidden + options["shift"][0] * options["shift"][1]
        result: Tensor = x + self.down(hidden.relu())
        return result


class Placed(Layer):
    """Reads its place."""

    def forward(self, x: Tensor, scale: Tensor, **options: Any) -> Tensor:
        if self.place == 2:
            return super().forward(x, scale, **options).tanh()
        return super().forward(x, scale, **options) * self.place


class Counting(Layer):
    """Writes to a buffer."""

    def __init__(self, place: int) -> None:
        super().__init__(place)
        self.register_buffer("calls", torch.zeros(()))

    calls: Tensor

    def forward(self, x: Tensor, scale: Tensor, **options: Any) -> Tensor:
        self.calls.add_(1)
        return super().forward(x, scale, **options)


class Moded(Layer):
    """Asks for the grad mode."""

    def forward(self, x: Tensor, scale: Tensor, **options: Any) -> Tensor:
        if not torch.is_grad_enabled():
            return x.sin()
        return super().forward(x, scale, **options)


class Pair(Layer):
    """Gives its input back, too."""

    def forward(self, x: Tensor, scale: Tensor, **options: Any) -> Any:
        return super().forward(x, scale, **options), x


class Net(nn.Module):
    def __init__(self, layers: list[nn.Module], call: Callable[..., Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(8, 3)
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        for k, layer in enumerate(self.layers):
            x = self.call(layer, k, x)
        result: Tensor = self.head(x).sum()
        return result


def plain(layer: nn.Module, k: int, x: Tensor) -> Any:
    return layer(x, x * 2, shift=(x, None if k < 0 else x.exp()))


def alone(layer: nn.Module, k: int, x: Tensor) -> Any:
    """The first two get one tensor twice."""
    return layer(x, x if k < 2 else x * 2)


def frozen(layer: nn.Module, k: int, x: Tensor) -> Any:
    with torch.set_grad_enabled(k != 1):
        return layer(x, x + k)


def first(layer: nn.Module, k: int, x: Tensor) -> Any:
    return layer(x, x * 2)[0]


def turned(layer: nn.Module, k: int, x: Tensor) -> Any:
    return layer(x, x, shift=[x, float(k % 2)])


def capture(model: nn.Module, *, regions: bool) -> tuple[Capture, list[bool]]:
    """The captured graph, and whether it came out of regions."""
    done: list[bool] = []
    call = abstract._Capturing._call_in_regions

    def note(self: Any, *args: Any) -> bool:
        done.append(call(self, *args))
        return done[-1]

    with (
        mock.patch.object(compat, "REUSES_REGIONS", regions),
        mock.patch.object(abstract._Capturing, "_call_in_regions", note),
    ):
        x = torch.ones(2, 4, 8, device="meta")
        (program,) = abstract_programs(model, (x,), options=abstract_options())
    return program.capture, done


def listed(made: Capture) -> list[str]:
    """The nodes but for the inputs; those by what they are: their order and names differ."""
    graph = made.module.graph
    inputs = zip(graph.find_nodes(op="placeholder"), made.inputs, strict=True)
    places = {node: _told(item) for node, item in inputs}
    lines = []
    for node in graph.nodes:
        if node.op != "placeholder":
            args = torch.fx.map_arg((node.args, node.kwargs), places.__getitem__)
            modules = dict.fromkeys(module for module, _ in compat.module_calls(node))
            lines.append(f"{node.op} {node.target} {args} {list(modules)}")
            places[node] = f"%{len(lines)}"
    return lines


def _told(item: GraphInput) -> str:
    if isinstance(item, ParamInput):
        return f"{item.bucket.params[item.param].name} {item.requires_grad}"
    return str(item)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "equal": lambda: Net([Layer(k) for k in range(5)], plain),
    "one reads its place": lambda: Net([Placed(k) for k in range(5)], plain),
    "buffers change": lambda: Net([Counting(k) for k in range(4)], plain),
    "a tensor twice": lambda: Net([Layer(k) for k in range(5)], alone),
    "grad mode": lambda: Net([Moded(k) for k in range(4)], frozen),
    "an input is given back": lambda: Net([Pair(k) for k in range(4)], first),
    "constants differ": lambda: Net([Layer(k) for k in range(5)], turned),
    "a call twice": lambda: Net(
        [Layer(k) for k in range(3)], lambda layer, k, x: layer(layer(x, x), x)
    ),
    "backwards": lambda: Net(
        [Layer(k) for k in range(4)], lambda layer, k, x: layer(x.flip(-1), x * k)
    ),
}


@needs_reuse
@pytest.mark.parametrize("name", MODELS)
def test_the_graph_is_that_of_a_plain_capture(name: str) -> None:
    model = MODELS[name]()
    assert equal_layers(model)
    one, _ = capture(model, regions=True)
    other, done = capture(model, regions=False)
    assert listed(one) == listed(other) and not done
    assert not any("forward" in vars(module) for module in model.modules())


@needs_reuse
def test_equal_layers_are_traced_once() -> None:
    model = MODELS["equal"]()
    made, done = capture(model, regions=True)
    assert done == [True] and len(made.module.graph.find_nodes(op="placeholder")) == 1 + 5 * 6 + 2


def different(change: Callable[[list[Layer]], Any]) -> nn.Module:
    layers = [Layer(k) for k in range(4)]
    change(layers)
    return Net(list(layers), plain)


def hook(layers: list[Layer]) -> None:
    layers[2].down.register_forward_hook(lambda module, args, result: result * 2)


def tie(layers: list[Layer]) -> None:
    layers[3].down.weight = layers[2].down.weight


def tie_inside(layers: list[Layer]) -> None:
    layers[3].down.weight = layers[3].up.weight


def share(layers: list[Layer]) -> None:
    layers[3].down = layers[2].down


def freeze(layers: list[Layer]) -> None:
    layers[1].up.weight.requires_grad_(False)


def narrow(layers: list[Layer]) -> None:
    layers[1].up, layers[1].down = nn.Linear(8, 4), nn.Linear(4, 8)


def cast(layers: list[Layer]) -> None:
    layers[1].norm.double()


def replace_forward(layers: list[Layer]) -> None:
    layers[1].forward = lambda x, scale, **options: x  # type: ignore[method-assign]


def change_eps(layers: list[Layer]) -> None:
    layers[3].norm.eps = 1e-3


def another_class(layers: list[Layer]) -> None:
    layers[0].up = nn.Bilinear(8, 8, 8)  # type: ignore[assignment]


def evaluate(layers: list[Layer]) -> None:
    layers[2].eval()


CHANGES = [
    hook,
    tie,
    tie_inside,
    share,
    freeze,
    narrow,
    cast,
    replace_forward,
    change_eps,
    another_class,
    evaluate,
]


@pytest.mark.parametrize("change", CHANGES)
def test_layers_that_differ_are_not_equal(change: Callable[[list[Layer]], Any]) -> None:
    assert equal_layers(different(lambda layers: None))
    assert not equal_layers(different(change))


@needs_reuse
@pytest.mark.parametrize("change", [hook, tie, freeze, replace_forward, change_eps, evaluate])
def test_what_torch_does_not_see_is_captured_plainly(change: Callable[[list[Layer]], Any]) -> None:
    model = different(change)
    one, done = capture(model, regions=True)
    other, _ = capture(model, regions=False)
    assert listed(one) == listed(other) and not done


@needs_reuse
def test_a_region_with_other_tensors_is_not_taken() -> None:
    model = MODELS["equal"]()
    broken = mock.Mock(side_effect=NotEqualError)
    with mock.patch.object(abstract, "inlined", broken):
        one, done = capture(model, regions=True)
    other, _ = capture(model, regions=False)
    assert done == [False] and broken.called and listed(one) == listed(other)
