"""`cut`: where the captured graph is cut into stages, and what must stay together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacompile.ir.schedule import Schedule
from megacompile.passes.capture.propagate import propagate
from megacompile.passes.stages.segments import compute_nodes, cut
from tests.capturing import Layer, Net, capture

X = torch.linspace(-1, 1, 8).view(2, 4)
LAYERS = "embed | layers.0 | layers.1 | layers.2 | head"


def cuts(model: nn.Module, *args: Any, **kwargs: Any) -> str:
    """The nodes of each segment: "embed norm | linear add | ..."."""
    captured = capture(model, *args, **kwargs)
    values = propagate(captured.capture)
    nodes = compute_nodes(captured.capture, values)
    segments = cut(captured.capture, values, captured.units)
    assert [s.start for s in segments] == [0, *(s.stop for s in segments[:-1])], "they cover all"
    assert segments[-1].stop == len(nodes)
    return " | ".join(" ".join(_kind(n) for n in nodes[s.start : s.stop]) for s in segments)


def stages(model: nn.Module, *args: Any, **kwargs: Any) -> Schedule:
    return capture(model, *args, **kwargs).partition()


def names(schedule: Schedule) -> str:
    return " | ".join(stage.name for stage in schedule.stages)


def _kind(node: Any) -> str:
    return str(getattr(node.target, "__name__", node.target)).strip("_")


class Plain(nn.Module):
    """A layer of one operator."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(x)
        return out


def net(function: Callable[..., Any]) -> Net:
    """A net whose layers are one operator each."""
    made = Net(function, depth=0)
    made.layers.extend([Plain(), Plain()])
    return made


def test_layers_are_a_segment_each() -> None:
    """The docstring's example."""
    assert cuts(Net(Net.chain, depth=2), X) == (
        "linear | linear gelu dropout linear mul add | linear gelu dropout linear mul add "
        "| linear square mean"
    )


def test_the_loss_is_in_the_segment_of_the_head() -> None:
    def with_loss(net: Net, x: Tensor, target: Tensor) -> Any:
        logits = net.head(net.layers[1](net.layers[0](net.embed(x))))
        return F.cross_entropy(logits.float(), target) + 1e-4 * logits.logsumexp(-1).mean()

    assert cuts(net(with_loss), X, torch.tensor([0, 1])) == (
        "linear | linear | linear | linear float cross_entropy logsumexp mean mul add"
    )


def test_what_has_no_parameters_joins_the_neighbour_that_is_no_layer() -> None:
    """So layers stay alike."""

    def function(net: Net, x: Tensor) -> Any:
        x = net.embed(x).sin()
        x = net.layers[1](net.layers[0](x)).cos()
        return net.head(x)

    assert cuts(net(function), X) == "linear sin | linear | linear | cos linear"


def test_between_layers_the_cut_is_where_the_fewest_bytes_live() -> None:
    def widened(net: Net, x: Tensor) -> Any:
        x = net.layers[0](net.embed(x))
        x = x.repeat(1, 8).view(8, 2, 4).sum(0)  # narrow, wide, narrow
        return net.head(net.layers[1](x))

    def narrowed(net: Net, x: Tensor) -> Any:
        x = net.layers[0](net.embed(x))
        x = x.sum(-1, keepdim=True).expand(2, 4) * 2
        return net.head(net.layers[1](x))

    assert cuts(net(widened), X) == "linear | linear | repeat view sum linear | linear"
    assert cuts(net(narrowed), X) == "linear | linear sum | expand mul linear | linear"


def test_a_layer_called_twice_in_a_row_is_two_segments() -> None:
    def twice(net: Net, x: Tensor) -> Any:
        return net.head(net.layers[1](net.layers[0](net.layers[0](net.embed(x)))))

    assert names(stages(net(twice), X)) == "embed | layers.0 | layers.0 | layers.1 | head"


def test_a_module_called_twice_within_a_layer_does_not_cut_it() -> None:
    class Twice(Plain):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = super().forward(super().forward(x).relu())
            return out

    model = net(Net.chain)
    model.layers = nn.ModuleList([Twice(), Twice()])
    assert cuts(model, X) == "linear | linear relu linear | linear relu linear | linear square mean"


def test_a_layer_captured_alone_is_one_segment() -> None:
    """After a graph break, a layer's own frame is captured: the graph does not say so."""

    class Twice(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.act(self.down(self.act(self.up(x))))
            return out

    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Twice(), Twice()])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                torch._dynamo.graph_break()
                x = layer(x)
            return x

    assert cuts(Broken(), X) == "linear relu linear relu"


def test_small_neighbours_that_are_no_layers_join() -> None:
    """While their buckets stay within the largest one."""

    class Ends(Net):
        def __init__(self, wide: int) -> None:
            super().__init__(Ends.run, depth=2, width=wide)
            self.embed = nn.Linear(wide, wide)
            self.first = nn.Linear(wide, wide)
            self.head = nn.Linear(wide, wide)

        def run(self, x: Tensor) -> Any:
            x = self.first(self.embed(x))
            return self.head(self.layers[1](self.layers[0](x)))

    assert names(stages(Ends(8), torch.ones(2, 8))) == "embed+first | layers.0 | layers.1 | head"


def test_an_operator_that_reads_two_units_belongs_to_the_larger() -> None:
    def mixed(net: Net, x: Tensor) -> Any:
        x = net.embed(x)
        other: Any = net.layers[1]
        return net.layers[0](x) + F.linear(x, other.fc.weight @ net.head.weight)

    assert names(stages(net(mixed), X)) == "embed | layers.0 | head"


def test_a_tuple_and_its_items_stay_together() -> None:
    """An item is taken where it is used, maybe layers later; only the items it names may cross."""

    def reduced(net: Net, x: Tensor) -> Any:
        values, indices = net.layers[0](net.embed(x)).max(-1)
        return net.head(net.layers[1](x * (values + indices).view(2, 1)))

    assert cuts(net(reduced), X) == (
        "linear | linear max getitem getitem add | view mul linear | linear"
    )


def test_items_follow_their_tuple_over_layers() -> None:
    def split(net: Net, x: Tensor) -> Any:
        parts = net.embed(x).chunk(2, -1)
        y = net.layers[0](torch.cat([parts[0], parts[0]], -1))
        return net.head(net.layers[1](y) + torch.cat([parts[1], parts[1]], -1))

    assert cuts(net(split), X) == (
        "linear chunk getitem getitem cat | linear | linear | cat add linear"
    )


def test_an_index_into_a_tensor_stays_where_it_is() -> None:
    """It is no item of a tuple: under `no_grad`, it must not be moved out of there."""

    def indexed(net: Net, x: Tensor) -> Any:
        x = net.embed(x)
        y = net.layers[0](x)
        return net.head(net.layers[1](y) + x[0])

    assert cuts(net(indexed), X) == "linear | linear | linear | getitem add linear"


def test_checkpointed_layers_are_a_segment_each() -> None:
    """The checkpoint is one operator that gives a tuple, outside of the layer's module."""

    assert names(stages(Net(Net.checkpointed), X)) == LAYERS


def test_a_view_of_what_changes_in_place_keeps_segments_together() -> None:
    def changed(net: Net, x: Tensor) -> Any:
        x = net.embed(x)
        scaled = x * 2
        row = scaled[:1]
        y = net.layers[0](x)
        row.add_(1)  # changes `scaled` too
        return net.head(net.layers[1](y) + scaled)

    merged = "embed+layers.0+layers.1+head"
    assert names(stages(net(changed), X)) == merged


def test_views_of_what_does_not_change_keep_nothing_together() -> None:
    def unchanged(net: Net, x: Tensor) -> Any:
        x = net.embed(x)
        row = x[:1]
        y = net.layers[0](x)
        return net.head(net.layers[1](y) + x + row)

    assert names(stages(net(unchanged), X)) == "embed | layers.0 | layers.1 | head"


def test_merging_spares_the_layers_beyond() -> None:
    def changed(net: Net, x: Tensor) -> Any:
        x = net.layers[0](net.embed(x))
        scaled = x * 2
        row = scaled[:1]
        x = net.layers[2](net.layers[1](x))
        row.add_(1)
        return net.head(x + scaled)

    assert names(stages(Net(changed), X)) == "embed | layers.0 | layers.1+layers.2+head"


@pytest.mark.parametrize("depth", [0, 1])
def test_without_parameters_there_is_one_segment(depth: int) -> None:
    def nothing(net: Net, x: Tensor) -> Any:
        return x.sin().cos()

    assert cuts(Net(nothing, depth=depth), X) == "sin cos"
