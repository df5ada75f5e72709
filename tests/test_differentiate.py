"""`differentiate`: the backward graph, what it takes from the forward, how gradients add up."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from megacompile.ir import ops
from megacompile.ir.schedule import Schedule
from megacompile.passes.schedule.differentiate import differentiate
from tests.actions import apply, parse, text
from tests.capturing import Counting, Net, capture

X = torch.linspace(-1, 1, 8).view(2, 4)


def differentiated(line: str, **stubs: Any) -> Schedule:
    return apply(differentiate, parse(line, **stubs))


def backward(schedule: Schedule) -> fx.Graph:
    assert schedule.backward is not None
    return schedule.backward


def takes(schedule: Schedule) -> str:
    """What each backward takes: "1B(s1_0; d2_0)", saved tensors; tangents; carries."""
    words = []
    for node in ops.nodes_of(backward(schedule), ops.backward):
        _, _, args, saved, tangents, partial_gradients = ops.arguments(node)
        parts = [[a for a in args if a], saved, tangents, partial_gradients]
        shown = "; ".join(" ".join(value.name for value in part) for part in parts if part)
        words.append(f"{ops.label(node)}({shown})")
    return " ".join(words)


def test_backwards_from_last_to_first() -> None:
    """The docstring's example."""
    assert text(differentiated("0F 1F 2F")) == "0F 1F 2F | 2B 1B 0B"


def test_each_takes_its_saved_tensors_and_the_gradient_of_its_output() -> None:
    schedule = differentiated("0F 1F 2F")
    assert takes(schedule) == "2B(s2_0; t0) 1B(s1_0; d2_0) 0B(s0_0; d1_0)"
    assert all(ops.arguments(n)[3] for n in ops.nodes_of(schedule.forward, ops.forward)), "saving"


def test_residuals_are_what_the_backward_takes_and_every_boundary() -> None:
    """A backward for other outputs could be built later, from the boundaries alone."""
    schedule = differentiated("0F 1F 2F")
    assert schedule.saved_values == ("s2_0", "s1_0", "s0_0", "x", "y0_0", "y1_0")
    taken = [node.name for node in backward(schedule).find_nodes(op="placeholder")]
    assert taken == ["s2_0", "s1_0", "s0_0", "t0"]
    returned = ops.returned(schedule.forward)[1]
    assert tuple(node.name for node in returned) == schedule.saved_values


def test_without_a_gradient_there_is_no_backward() -> None:
    schedule = differentiated("0F 1F", frozen=(0, 1))
    assert text(schedule) == "0F 1F"
    assert schedule.backward is None and schedule.saved_values == ()


def test_stages_without_a_backward_are_left_out() -> None:
    schedule = differentiated("0F 1F 2F", frozen=(0,))
    assert text(schedule) == "0F 1F 2F | 2B 1B"
    assert [ops.arguments(n)[3] for n in ops.nodes_of(schedule.forward)] == [False, True, True]


def test_the_generators_state_is_saved_just_before_a_random_stage() -> None:
    schedule = differentiated("0F 1F 2F", random=(1,))
    assert text(schedule) == "0F 1RNG 1F 2F | 2B 1B 0B"
    assert "rng1" in schedule.saved_values


def test_gradients_of_a_shared_bucket_are_carried() -> None:
    schedule = differentiated("0F 1F 2F", reads={2: "0"})
    assert takes(schedule) == "2B(s2_0; t0) 1B(s1_0; d2_0) 0B(s0_0; d1_0; g0_2)"


def test_gradients_of_a_value_that_several_stages_use_are_carried() -> None:
    def skip(net: Net, x: Tensor) -> Any:
        first = net.embed(x)
        return net.head(net.layers[1](net.layers[0](first)) + first).sum()

    schedule = capture(Net(skip), X).build("differentiate")
    assert text(schedule) == "0F 1F 2F 3F | 3B 2B 1B 0B"
    calls = takes(schedule).split(") ")
    assert calls[2].endswith("d2_0; d3_1"), "of y0_0, by the layer and by the skip"


def test_gradients_of_inputs_are_returned() -> None:
    schedule = capture(Net(Net.chain), X.clone().requires_grad_()).build("differentiate")
    assert schedule.gradients == ("x2",)
    gradients, left, tokens = ops.returned(backward(schedule))
    assert [node.name for node in gradients] == ["d0_0"] and left == tokens == ()
    assert capture(Net(Net.chain), X).build("differentiate").gradients == ()


def test_the_gradient_of_an_output_that_is_used_too() -> None:
    """Of the two outputs, `schedule.tangents` names the one that gets a gradient."""

    def outputs(net: Net, x: Tensor) -> Any:
        first = net.layers[0](net.embed(x))
        return first, net.head(first).sum()

    captured = capture(Net(outputs), X)
    first = differentiate(captured.templates(output=0))
    assert text(first) == "0F 1F 2F | 1B 0B", "the head gives nothing"
    last = differentiate(captured.templates(output=1))
    assert text(last) == "0F 1F 2F | 2B 1B 0B"
    assert takes(last).startswith("2B(") and "t1" in takes(last)


def test_an_input_is_copied_before_it_is_changed() -> None:
    """What the backward takes is the value that the forward read."""
    schedule = capture(nn.Sequential(Counting(), Counting()), X).build("differentiate")
    assert text(schedule) == "0F SNAPSHOT ASSIGN 1F SNAPSHOT ASSIGN | 1B 0B"
    snapshots = ops.nodes_of(schedule.forward, ops.snapshot)
    for snapshot, assign in zip(snapshots, ops.nodes_of(schedule.forward, ops.assign), strict=True):
        copied, changed = ops.arguments(snapshot)[0], ops.arguments(assign)[0]
        assert copied is changed
        assert snapshot.name in schedule.saved_values and copied.name not in schedule.saved_values


def test_one_copy_serves_every_stage() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
            self.register_buffer("scale", torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            scale = self.get_buffer("scale")
            for layer in self.layers:
                x = layer(x) * scale.clone()
            scale.add_(1)
            return x.sum()

    schedule = capture(Shared(), X).build("differentiate")
    assert text(schedule) == "0F 1F SNAPSHOT ASSIGN | 1B 0B"
