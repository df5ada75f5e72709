"""What passes make of captured graphs: what is saved, waits on the host, runs again, is merged.

Chains of stages are tested without a capture (`tests/unit/test_passes.py`); here are values that
several stages take, buffers that change in place, and the code of templates. Models that fit, whose
short stages run as one, train as the plain model does.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacompile import explain, megacompile, schedules
from megacompile.ir import ops
from megacompile.ir.schedule import Schedule
from tests import inside
from tests.capturing import Counting, Net, capture, differentiated
from tests.planned import passed, rows

X = torch.linspace(-1, 1, 8).view(2, 4)


def build(graphs: Schedule, offload: Collection[int], **options: Any) -> Schedule:
    """The schedule of a plan by which these stages offload what they save, proved safe."""
    plan = rows(len(graphs.stages), offload=offload)
    schedule = passed(graphs, plan=plan, lookahead=1, **options)
    inside.prove(schedule)
    return schedule


def _skips(net: Net, x: Tensor) -> Tensor:
    """Like a U-Net: stage 1's output is read by stages 2 and 6, stage 2's by 3 and 5."""
    x = net.embed(x)
    down = [x := net.layers[0](x), x := net.layers[1](x)]
    x = net.layers[3](net.layers[2](x))
    x = net.layers[4](x * down[1])
    x = net.layers[5](x * down[0])
    return net.head(x).square().mean()


@functools.cache
def skips() -> Schedule:
    return differentiated(capture(Net(_skips, depth=6), X))


def on_host(schedule: Schedule) -> list[str]:
    return [node.name for node in ops.nodes_of(schedule.forward, ops.offload_saved)]


def test_a_value_that_several_stages_take_goes_once_and_is_back_for_the_first() -> None:
    """One that a stage on the device takes stays there: it must be there at the boundary anyway."""
    schedule = build(skips(), range(7))
    assert schedule.backward is not None
    offloads = ops.nodes_of(schedule.forward, ops.offload_saved)
    copies = [node.all_input_nodes[0].name for node in offloads]
    fetches = ops.nodes_of(schedule.backward, ops.fetch_saved)
    assert len(copies) == len(set(copies)) and len(fetches) <= len(copies)
    order = list(schedule.backward.nodes)
    several = 0
    for fetch in fetches:
        readers = [u for u in fetch.users if u.target in (ops.recompute, ops.backward)]
        several += len({ops.arguments(reader)[0].index for reader in readers}) > 1
        (release,) = (user for user in fetch.users if user.target is ops.free)
        places = [order.index(user) for user in fetch.users if user is not release]
        assert order.index(fetch) < min(places) and order.index(release) > max(places)
    assert several, "a skip"
    less = build(skips(), range(5))
    assert "y1_0_host" in set(on_host(schedule)) - set(on_host(less)), "stage 6 takes it"


def test_what_is_returned_to_the_user_stays() -> None:
    def both(net: Net, x: Tensor) -> tuple[Tensor, Tensor]:
        middle = net.layers[1](net.layers[0](net.embed(x)))
        return net.head(net.layers[2](middle)).mean(), middle

    schedule = build(differentiated(capture(Net(both), X)), range(4))
    outputs, _ = ops.returned(schedule.forward)
    taken = [node.all_input_nodes[0] for node in ops.nodes_of(schedule.forward, ops.offload_saved)]
    assert taken and outputs[1] not in taken


def test_what_changes_in_place_is_recomputed_from_its_copy_wherever_that_waits() -> None:
    graphs = differentiated(capture(nn.Sequential(Counting(), Counting(), Counting()), X))
    schedule = passed(graphs, keep_last=False)
    assert schedule.backward is not None
    for node in ops.nodes_of(schedule.backward, ops.recompute):
        taken = [value.name for value in ops.arguments(node)[2] if value]
        assert taken[-1].endswith("_old")
    schedule = build(graphs, {0, 1}, keep_last=False)
    assert any(name.endswith("_old_host") for name in on_host(schedule))
    assert ops.actions(schedule.forward).count("SNAPSHOT") == 3


needs_compiler = pytest.mark.skipif(
    not inside.has_cpp_compiler(), reason="Inductor needs a C++ compiler"
)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.norm(self.conv(x)))


class Vision(nn.Module):
    """Convolutions, and statistics of three dtypes' worth of buffers that each forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.blocks = nn.ModuleList(Block(8) for _ in range(3))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x.mean((2, 3)))
        return F.cross_entropy(logits, labels), logits


def made() -> Vision:
    torch.manual_seed(0)
    return Vision()


def compare(sizes: list[int], *, close: Any, **options: Any) -> list[int]:
    """Losses, statistics and parameters of steps of so many rows, with an evaluation in between,
    are those of the plain model; gives the numbers of stages. 400 rows are of larger images."""
    models: list[Any] = [made(), megacompile(made(), device="cpu", progress=False, **options)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in models]
    generator, counts = torch.Generator().manual_seed(1), []
    for k, n in enumerate(sizes):
        x = torch.randn(n, 3, 8, 8, generator=generator).repeat(1, 1, *[4 if n == 400 else 1] * 2)
        labels = torch.randint(4, (n,), generator=generator)
        losses: list[Tensor] = []
        for model, optimizer in zip(models, optimizers, strict=True):
            loss, _ = model(x, labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        close(*losses)
        counts.append(len(schedules(models[1])[-1].stages))
        if k == 2 and n != 400:
            for model in models:
                model.eval()
                with torch.no_grad():
                    losses.append(model(x, labels)[1])
                model.train()
            close(*losses[2:])
    for mine, theirs in zip(*(model.state_dict().values() for model in models), strict=True):
        close(mine, theirs)
    if options.get("gpu_memory") and 400 not in sizes:
        assert "short stages run as one" in str(explain(models[1], changes=False))
    return counts


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@needs_compiler
@pytest.mark.thorough
@pytest.mark.parametrize("memory", ["1GiB", None])
def test_a_model_that_fits_trains_as_the_plain_one(memory: str | None) -> None:
    sizes = [4, 4, 4, 3, 4, 4, 3, 4]
    counts = compare(sizes, close=close, gpu_memory=memory, lowering="inductor")
    assert set(counts) == ({1} if memory else {5})


@needs_compiler
def test_what_grew_too_large_runs_in_stages() -> None:
    counts = compare([4, 6, 400], close=close, gpu_memory="100MiB", lowering="inductor")
    assert counts == [1, 1, 5]


@needs_compiler
def test_statistics_are_written_as_one_by_one() -> None:
    """In every bit, also where the graph is eager: their new values go in a few copies."""

    def same(a: Tensor, b: Tensor) -> None:
        assert torch.equal(a, b)

    compare([4, 4, 4, 3, 4], close=same, lowering="eager", resident="all")
