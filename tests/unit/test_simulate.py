"""Predicted timelines of schedules with times worked out by hand, and of real ones."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx, nn

from megacompile import megacompile, schedules
from megacompile.cost.hardware import H200, Hardware
from megacompile.cost.optimizer import OptimizerCost
from megacompile.cost.queues import STREAMS, Queues, Work
from megacompile.cost.simulate import Prediction, simulate
from megacompile.errors import OptionError
from megacompile.ir import ops
from megacompile.ir.buckets import Bucket, Param, Slot
from megacompile.ir.edges import take
from megacompile.ir.ops import Part
from megacompile.ir.plan import Places, Plan, Updater
from megacompile.ir.schedule import Schedule
from megacompile.ir.stream import Stream
from megacompile.ir.tensors import TensorMeta
from tests.planned import planned

UNIT = Hardware("unit", 2.0, 2.0, 1.0, 1.0, 1.0, 1.0, 0.0)  # 2 GB/s alone, 1 GB/s together
SLOW = UNIT.replace(update_gb_s=2.0)


def gigabytes(key: int, size: float) -> Bucket:
    """A bucket of one parameter of float32."""
    numel = int(size * 1e9 / 4)
    param = Param("weight", (numel,), (1,), torch.float32, 0)
    return Bucket(key, f"b{key}", (param,), numel * 4, str(key))


def floats(size: float) -> TensorMeta:
    return TensorMeta((int(size * 1e9 / 4),), torch.float32, (1,))


class Graph:
    """A graph written op by op; sizes in GB."""

    def __init__(self, *, begins: bool = True) -> None:
        self.graph = fx.Graph()
        if begins:  # an update does not
            self.start = ops.call(self.graph, ops.begin, name="start")

    def prefetch(self, key: int, size: float, *after: fx.Node) -> fx.Node:
        waits = after or (self.start,)
        place = Slot(key, 0)
        return ops.call(self.graph, ops.prefetch, gigabytes(key, size), place, after=waits)

    def token(self, key: int, part: Part) -> fx.Node:
        return take(self.graph, gigabytes(key, 2.0), part)

    def place(self, name: str, size: float) -> fx.Node:
        """The value that an earlier graph left under a name."""
        node = self.graph.placeholder(name)
        node.meta["value"] = floats(size)
        return node

    def compute(self, source: fx.Node, seconds: float) -> fx.Node:
        """A copy within device memory: 1 GB/s, each byte read and written."""
        node = ops.call(self.graph, ops.snapshot, source)
        node.meta["value"] = floats(seconds / 2)
        return node

    def offload(self, key: int, size: float, source: fx.Node) -> fx.Node:
        source.meta.setdefault("value", floats(size))
        return ops.call(self.graph, ops.offload_grad, gigabytes(key, size), source)

    def done(self, *tokens: fx.Node, left: tuple[fx.Node, ...] = ()) -> fx.Graph:
        """End any graph; a forward returns no tokens."""
        self.graph.output(((), left, tokens) if left or tokens else ((), ()))
        return self.graph


def spans(timeline: Prediction, step: int = 0) -> dict[str, tuple[Any, Any]]:
    return {
        e.label: (pytest.approx(e.start_s), pytest.approx(e.stop_s))
        for e in timeline.events
        if e.step == step and e.stop_s > 0
    }


def test_both_directions_share_the_bandwidth_while_both_run() -> None:
    made = Graph()
    made.prefetch(0, 2.0)
    buffer = ops.call(made.graph, ops.alloc_grad, gigabytes(9, 1.0), name="room")
    buffer.meta["value"] = (floats(0.5),)
    made.offload(9, 0.5, buffer)
    timeline = simulate(Schedule("both", made.done(), None, ()), UNIT)
    # 0.5 s together move 0.5 GB each way; the other 1.5 GB go at 2 GB/s
    assert spans(timeline) == {"9OFFLOAD_GRAD": (0.0, 0.5), "0PREFETCH@0": (0.0, 0.5 + 0.75)}


def test_a_compute_waits_for_its_weights_and_its_slot_for_the_compute() -> None:
    made = Graph()
    first = made.compute(made.prefetch(0, 2.0), 3.0)
    second = made.prefetch(1, 2.0, first)
    made.compute(second, 1.0)
    timeline = simulate(Schedule("chain", made.done(), None, ()), UNIT)
    assert [e.stop_s for e in timeline.events[1:]] == [1.0, 4.0, 5.0, 6.0]
    taken = {stream: s for stream, s in timeline.critical_s.items() if s}
    assert taken == pytest.approx({Stream.COMPUTE: 4.0, Stream.H2D: 2.0})
    assert timeline.busy_s(Stream.H2D) == 2.0


BUCKETS = (gigabytes(0, 2.0), gigabytes(1, 2.0))


class OfTwo(Schedule):
    """A schedule without stages, of both buckets."""

    gradient_params = {0: (0,), 1: (0,)}
    buckets = BUCKETS


class OfOne(Schedule):
    """The same with the first bucket only."""

    gradient_params = {0: (0,)}
    buckets = BUCKETS[:1]


def trained(helped: tuple[int, ...] = ()) -> Schedule:
    """Two buckets of 2 GB: forward and backward 1 s each; the host updates both, or the device
    helps."""
    forward, backward, update = Graph(), Graph(), Graph(begins=False)
    for key in (0, 1):
        token = forward.token(key, Part.WEIGHTS)
        forward.compute(forward.prefetch(key, 2.0, token, forward.start), 1.0)
    offloads = []
    for key in (1, 0):
        gradients = backward.compute(backward.start, 1.0)
        offloads.append(backward.offload(key, 0.0, gradients))
    made = [
        ops.call(update.graph, ops.update_host, bucket, after=(update.token(key, Part.GRADIENTS),))
        for key, bucket in enumerate(BUCKETS)
    ]
    if helped:
        ops.call(update.graph, ops.help_host, tuple(made[key] for key in helped))
    graphs = forward.done(), backward.done(*offloads)
    return OfTwo("trained", *graphs, (), update=update.done(*made))


def test_the_next_forward_waits_for_its_own_buckets_alone() -> None:
    """SGD moves 12 bytes a parameter: 6 GB a bucket, 3 s at 2 GB/s."""
    timeline = simulate(trained(), SLOW, optimizer=OptimizerCost(states=0), steps=2)
    first = spans(timeline)
    # prefetches until 2; 0F 1 to 2, 1F 2 to 3, backwards 3 to 5, the last gradients there at 5.25
    assert first["0OFFLOAD_GRAD"] == (5.0, 5.25)
    assert (first["0UPDATE"], first["1UPDATE"]) == ((5.25, 8.25), (8.25, 11.25))
    second = spans(timeline, step=1)
    assert second["0PREFETCH@0"] == (8.25, 9.25)
    assert second["1PREFETCH@1"] == (11.25, 12.25)
    # 1F until 13.25, two backwards, the last offload
    assert second["0OFFLOAD_GRAD"] == (15.25, 15.5)
    assert timeline.start_s == pytest.approx(5.25)
    assert timeline.step_s == pytest.approx(15.5 - 5.25)
    assert max(timeline.critical_s, key=timeline.critical_s.__getitem__) is Stream.HOST
    assert timeline.critical_s[Stream.HOST] == pytest.approx(6.0)
    assert timeline.busy_s(Stream.HOST) == pytest.approx(6.0)


def left_for_the_update() -> Schedule:
    """One bucket of 2 GB, whose gradients and states (6 GB with the parameters) stay on the device;
    the forward computes a second, drains, and computes a second."""
    forward, backward, update = Graph(), Graph(), Graph(begins=False)
    bucket = BUCKETS[0]
    weights = forward.prefetch(0, 2.0, forward.token(0, Part.WEIGHTS), forward.start)
    forward.compute(weights, 1.0)
    ops.call(forward.graph, ops.drain)
    forward.compute(forward.start, 1.0)
    buffer = ops.call(backward.graph, ops.alloc_state, bucket, True)
    waits = (backward.token(0, Part.STATES),)
    state = ops.call(backward.graph, ops.fetch_state, bucket, buffer, True, name="s0", after=waits)
    buffer.meta["value"] = state.meta["value"] = floats(6.0)
    gradients = ops.call(backward.graph, ops.snapshot, backward.start, name="g0")
    gradients.meta["value"] = floats(0.5)  # a second
    offload = backward.offload(0, 0.5, gradients)
    taken = update.place("g0", 0.5), update.place("s0", 6.0)
    new = ops.call(update.graph, ops.update, bucket, None, *taken)
    back = ops.call(update.graph, ops.offload_state, bucket, new)
    ops.call(update.graph, ops.defer_free, new, after=(back,))
    graphs = forward.done(), backward.done(offload, left=(gradients, state))
    plan = Plan(Places().changed([0], updater=Updater.DEVICE))
    return OfOne("left", *graphs, (), update=update.done(back), left=("g0", "s0"), plan=plan)


def test_a_device_update_waits_for_its_states_and_its_bucket_stays_there() -> None:
    """Two moments: 14 GB are read and written at 1 GB/s, 6 GB go back at 2 GB/s."""
    schedule = left_for_the_update()
    timeline = simulate(schedule, UNIT, optimizer=OptimizerCost(), steps=2)
    first, second = spans(timeline), spans(timeline, step=1)
    # computes until 2; states are 6 GB, 0.5 of them beside the gradients' copy
    assert first["0OFFLOAD_GRAD"] == (3.0, 3.5)
    assert first["0FETCH_STATE"] == (2.0, 5.25)
    assert first["0UPDATE"] == (5.25, 19.25)
    assert first["0OFFLOAD_STATE"] == (19.25, 22.25)
    # the forward takes what is there, behind the update; its drain waits for the copies
    computes = [e for e in timeline.events if e.label == "SNAPSHOT" and e.graph == "forward"]
    times = [(e.start_s, e.stop_s) for e in computes if e.step == 1]
    assert times == [(19.25, 20.25), (22.25, 23.25)]
    assert second["DRAIN"] == (22.25, 22.25)
    assert second["0FETCH_STATE"][0] == 23.25
    # without the edge the next update would begin when the gradients are there, at 24.25
    assert second["0UPDATE"][0] == second["0FETCH_STATE"][1] == 26.5
    # where nobody defers the new values, they come from the host
    for node in ops.nodes_of(schedule.graphs["update"], ops.defer_free):
        schedule.graphs["update"].erase_node(node)
    again = spans(simulate(schedule, UNIT, optimizer=OptimizerCost(), steps=2), 1)
    assert again["0PREFETCH@0"][0] == 22.25


def test_the_device_takes_the_first_update() -> None:
    """Half a billion parameters: 2 GB each way and gradients of 2 GB, 4 GB in at 1 GB/s."""
    helped = OptimizerCost(states=0, helped=True)
    alone = simulate(trained(), SLOW, optimizer=OptimizerCost(states=0), steps=2)
    timeline = simulate(trained(helped=(0, 1)), SLOW, optimizer=helped, steps=2)
    first = {e.label: e for e in timeline.events if e.graph == "update" and e.step == 0}
    assert {label: e.stream for label, e in first.items()} == {
        "0UPDATE": Stream.DEVICE,
        "1UPDATE": Stream.HOST,
    }
    assert (first["0UPDATE"].start_s, first["0UPDATE"].stop_s) == (5.25, 9.25)
    assert (first["1UPDATE"].start_s, first["1UPDATE"].stop_s) == (5.25, 8.25)
    assert spans(timeline, step=1)["0PREFETCH@0"] == (9.25, pytest.approx(10.25))
    assert timeline.step_s < alone.step_s
    assert 0 < timeline.busy_s(Stream.DEVICE) < timeline.step_s


def test_the_third_step_is_like_the_later_ones() -> None:
    hardware, sgd = SLOW.replace(host_memory_gb_s=3.0), OptimizerCost(states=0)
    third, later = (simulate(trained(), hardware, optimizer=sgd, steps=n).step_s for n in (3, 7))
    assert later == pytest.approx(third)


def test_the_order_of_graphs() -> None:
    """A backward begins when the prefetches are done; captured graphs run in order and back."""

    def schedule(name: str, size: float) -> Schedule:
        forward, backward = Graph(), Graph()
        forward.prefetch(0, size)
        forward.compute(forward.start, 1.0)
        backward.compute(backward.start, 2.0)
        return Schedule(name, forward.done(), backward.done(), ())

    assert simulate(schedule("turn", 4.0), UNIT).total_s == 2.0 + 2.0
    timeline = simulate([schedule("a", 1.0), schedule("b", 1.0)], UNIT)
    order = [e.graph for e in timeline.events if e.label == "SNAPSHOT"]
    assert order == ["forward", "forward", "backward", "backward"]
    assert timeline.total_s == 6.0


def streamed(in_backward: bool) -> Schedule:
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters()) if in_backward else None
    model = megacompile(model, device="cpu", optimizer=optimizer)
    model(torch.randn(8, 32)).sum().backward()
    return schedules(model)[0]


RATES = (
    *("h2d_gb_s", "d2h_gb_s", "h2d_both_gb_s", "d2h_both_gb_s", "matmul32_tflop_s"),
    *("memory_gb_s", "host_memory_gb_s", "update_gb_s"),
)


@pytest.mark.parametrize("in_backward", [False, True])
def test_ops_keep_their_order_and_more_of_anything_is_never_slower(in_backward: bool) -> None:
    """Ops of a lane do not overlap, and none ends before an op that it waits for."""
    schedule, cost = streamed(in_backward=in_backward), OptimizerCost(in_backward=in_backward)
    timeline = simulate(schedule, H200, optimizer=cost)
    for name, graph in schedule.graphs.items():
        events = [e for e in timeline.events if e.graph == name]
        nodes = [n for n in ops.nodes_of(graph) if n.target not in (ops.defer_free, ops.free)]
        by_label = {e.label: e for e in events if e.label != "FREE"}
        assert sorted(by_label) == sorted(map(ops.label, nodes))
        for lane in Stream:
            own = sorted((e for e in events if e.stream is lane), key=lambda e: e.stop_s)
            assert all(a.stop_s <= b.start_s for a, b in itertools.pairwise(own))
        for node in nodes:
            for source in node.all_input_nodes:
                earlier = by_label.get(ops.label(source))
                if earlier is not None and ops.op_of(source) is not None:
                    assert earlier.stop_s <= by_label[ops.label(node)].stop_s
    assert timeline.total_s == max(e.stop_s for e in timeline.events)
    slow = H200.replace(
        **dict.fromkeys(RATES[:4], 1e-3),
        **{"matmul32_tflop_s": 1e-6, "memory_gb_s": 3e-3, "update_gb_s": 2e-3},
        **{"host_memory_gb_s": 3e-3, "copy_s": 0.0, "launch_s": 0.0},
    )
    matters = ["h2d_gb_s", "d2h_gb_s", "matmul32_tflop_s", "memory_gb_s"]
    matters += [] if in_backward else ["update_gb_s"]
    for rate in RATES:
        times = []
        for factor in (1.0, 1.3, 10.0):
            hardware = replace(slow, **{rate: getattr(slow, rate) * factor})
            found = simulate(schedule, hardware, optimizer=cost, steps=3)
            times.append(found.total_s)
            assert sum(found.critical_s.values()) == pytest.approx(found.step_s)
            assert all(found.busy_s(lane) <= found.step_s * (1 + 1e-9) for lane in Stream)
        assert all(b <= a * (1 + 1e-9) for a, b in itertools.pairwise(times)), rate
        assert times[-1] < times[0] or rate not in matters


def ends(hardware: Hardware, **gigabytes_of: float) -> dict[str, float]:
    """Ends of works that all begin at the same time, by stream."""
    queues = Queues(hardware)
    for name, size in gigabytes_of.items():
        queues.add(Work("forward", name, STREAMS.index(Stream[name]), size * 1e9, [], 0))
    queues.go()
    return dict(zip(gigabytes_of, queues.stop_s, strict=True))


def test_a_gather_over_pcie_shares_the_link_both_ways() -> None:
    nvlink = UNIT.with_interconnect(4.0)
    assert ends(nvlink, COMM=4.0, H2D=2.0) == {"COMM": 1.0, "H2D": 1.0}
    pcie = UNIT.with_interconnect(1.0)
    # the gather sends as much as it gets, so each way has 1 GB/s, which copies share with it
    assert ends(pcie, COMM=1.0) == {"COMM": 1.0}
    assert ends(pcie, COMM=1.0, H2D=1.0) == {"COMM": 2.0, "H2D": 2.0}
    assert ends(pcie, COMM=1.0, D2H=1.0) == {"COMM": 2.0, "D2H": 2.0}
    assert ends(UNIT.with_interconnect(2.0), COMM=1.0) == {"COMM": 0.5}, "as was measured"
    slow = UNIT.with_interconnect(0.25)  # takes what it can, and leaves the rest
    assert ends(slow, COMM=0.5, H2D=1.5) == {"COMM": 2.0, "H2D": 2.0}


def test_a_rank_gathers_what_others_have() -> None:
    """With two ranks a half of each bucket, with four three quarters."""
    hardware = H200.replace(collective_s=0.0)
    two, four = (
        simulate(planned("0F 1F", ranks=ranks), hardware, optimizer=OptimizerCost())
        for ranks in (2, 4)
    )
    assert four.busy_s(Stream.COMM) == pytest.approx(1.5 * two.busy_s(Stream.COMM))


def test_copies_and_updates_share_host_memory() -> None:
    updating = SLOW.replace(host_memory_gb_s=3.0)  # of 4 GB/s that are wanted
    assert ends(updating, H2D=2.0, HOST=6.0) == pytest.approx({"H2D": 4 / 3, "HOST": 10 / 3})
    shared = UNIT.replace(host_memory_gb_s=4.0)
    assert ends(shared, H2D=2.0, D2H=2.0) == {"H2D": 2.0, "D2H": 2.0}
    assert ends(shared.shared_by(4), H2D=1.0, D2H=1.0) == {"H2D": 2.0, "D2H": 2.0}
    assert ends(shared.shared_by(4), H2D=1.0, COMM=0.0)["H2D"] == 1.0


def test_ranks_of_a_host_share_its_disk() -> None:
    whole = UNIT.replace(
        **{"disk_read_gb_s": 4.0, "disk_write_gb_s": 4.0},
        **{"disk_read_both_gb_s": 2.0, "disk_write_both_gb_s": 2.0},
    )
    assert ends(whole, READ=1.0) == {"READ": 0.25}
    assert ends(whole.shared_by(4), READ=1.0) == {"READ": 1.0}
    assert ends(whole.shared_by(4), READ=1.0, WRITE=1.0) == {"READ": 2.0, "WRITE": 2.0}
    assert UNIT.shared_by(4).disk_read_gb_s is None


def test_another_link_or_interconnect_keeps_the_shares_of_this_one() -> None:
    """Gathers over the link scale with it; gathers over another interconnect do not change."""
    pcie = UNIT.replace(gathers_over_pcie=1.0, interconnect_gb_s=1.5, h2d_both_gb_s=1.8)
    slow = pcie.with_link(1.0)
    assert slow.h2d_gb_s == slow.d2h_gb_s == 1.0
    assert slow.h2d_both_gb_s == pytest.approx(0.9)
    assert slow.interconnect_gb_s == pytest.approx(0.75)
    assert H200.with_link(12.0).interconnect_gb_s == H200.interconnect_gb_s
    assert H200.with_interconnect(20.0).gathers_over_pcie == 1.0 != H200.gathers_over_pcie
    for wrong in (0.0, -1.0, math.nan):
        with pytest.raises(OptionError, match="h2d_gb_s="):
            UNIT.with_link(wrong)
    with pytest.raises(OptionError, match="interconnect_gb_s=0"):
        UNIT.with_interconnect(0.0)
