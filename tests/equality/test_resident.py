"""Buckets that live on the device: which, when they move, and what a step does with them. They
move before anything runs, where a call can begin again.

The numbers of loops over residents: test_table.py.
"""

from __future__ import annotations

import copy
import gc
import io
import logging
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from megacompile import (
    DeviceMemoryError,
    HostMemoryError,
    OptimizerError,
    schedules,
    unmegacompile,
    updates,
)
from megacompile.ir import ops
from tests import disks, inside, training, zoo
from tests.equality import cells
from tests.equality.cells import Cell
from tests.equality.nets import Applies, assert_alike, said, train, with_adamw
from tests.inside import residents
from tests.training import adamw, data, groups, net
from tests.zoo import assert_same, twins, unlike

pytestmark = pytest.mark.filterwarnings("ignore:megacompile. .* runs in eager mode")
KB = 1000
BF16 = torch.bfloat16
Model = Any


def read_by(model: Model, op: Any) -> set[str]:
    """The buckets of an op in the forward and backward of a model."""
    (schedule,) = schedules(model)
    graphs = schedule.graphs.values()
    return {ops.arguments(n)[0].name for graph in graphs for n in ops.nodes_of(graph, op)}


def test_what_is_resident_is_not_copied_and_saves_as_a_plain_model() -> None:
    plain, streamed = twins(net(), resident="all")
    training.train(streamed, adamw(streamed), 1)
    assert not read_by(streamed, ops.prefetch) and schedules(streamed)[0].slots == ()
    saved = io.BytesIO()
    torch.save(streamed.state_dict(), saved)
    assert plain.state_dict().keys() == streamed.state_dict().keys()
    assert saved.tell() < 2 * sum(p.nbytes for p in plain.parameters()), "no tensor has others'"
    _, streamed = twins(net(), resident=30 * KB)
    training.train(streamed, adamw(streamed), 1)
    some = residents(streamed)
    assert some and read_by(streamed, ops.resident) <= some
    assert read_by(streamed, ops.prefetch) and not read_by(streamed, ops.prefetch) & some


TRAINING: dict[str, dict[str, Any]] = {
    "as it is": {},
    "masters, bf16 gradients": {"compute_dtype": BF16, "grad_dtype": BF16},
}


def resident_bytes(model: Model) -> list[int]:
    """What each bucket takes where it lives: its tensors, each once, and AdamW's moments."""
    found = []
    for bucket in inside.buckets(model).values():
        gradients = [param.grad for param in bucket.params if param.grad is not None]
        tensors: list[Tensor] = [*bucket.streamed, *bucket.values, *gradients]
        moments = 2 * sum(param.nbytes for param in bucket.params if param.grad is not None)
        found.append(sum({t.data_ptr(): t.nbytes for t in tensors}.values()) + moments)
    return found


@pytest.mark.parametrize("training", TRAINING)
def test_as_many_buckets_are_resident_as_fit(training: str) -> None:
    """What they need is what they take once training runs, to the byte."""
    options = TRAINING[training]
    made = nn.Sequential(*(nn.Linear(128, 128) for _ in range(4)))
    made[1].weight.requires_grad_(False)
    _, everywhere = twins(copy.deepcopy(made), resident="all", **options)
    everywhere(torch.ones(2, 128)).sum().backward()
    sizes = resident_bytes(everywhere)
    assert len(sizes) == 4
    for k in range(len(sizes) + 1):
        size = sum(sizes[:k])
        assert len(residents(twins(copy.deepcopy(made), resident=f"{size}", **options)[1])) == k
        if k:
            _, model = twins(copy.deepcopy(made), resident=size - 1, **options)
            assert len(residents(model)) == k - 1


def test_moves_wait_for_backwards_and_keep_everything() -> None:
    """Names and objects stay; gradients of a micro-batch go along; a forward that is lost holds
    nothing up; slots are as large as what is streamed now."""
    plain, model = twins(net())
    before = {name: id(param) for name, param in model.named_parameters()}
    losses = []
    for each in (plain, model):
        first = each(**data(0))
        if each is model:
            inside.want(model, "embed", "layers.1")
        second = each(**data(1))
        assert residents(model) == set(), "nothing moves before a backward that is to come"
        second.backward()
        first.backward()
        losses.append(each(**data(2)).detach())
    assert residents(model) == {"embed", "layers.1"} and torch.equal(*losses)
    assert_same(plain, model)
    dropped = model(**data(0))
    del dropped
    inside.want(model, "layers.0")
    for each in (plain, model):
        each(**data(3)).backward()
    assert residents(model) == {"layers.0"}
    assert_same(plain, model)
    machine = inside.machine(model)
    largest = max(b.layout.size_bytes for b in machine.buckets.values() if b.resident is None)
    assert max(buffer.numel() for buffer in machine.slots.buffers) == largest
    assert before == {name: id(param) for name, param in model.named_parameters()}


def test_a_step_that_is_alike_is_the_step() -> None:
    """In every bit that over streamed buckets, whatever changes between two; what one refuses the
    next one refuses, and nothing changes. It holds no memory of buckets."""
    run = cells.build(Cell(numbers="bf16 states and gradients", weights="resident"))
    for loop in ("exchanged", "edited"):
        want = cells.expected(replace(run.cell, loop=loop))
        assert unlike(want, cells.trained(cells.on(run, loop))) == []
    run.backward(run.loss(0))
    before, (optimizer,) = copy.deepcopy(run.model.state_dict()), run.optimizers
    optimizer.param_groups[1]["eps"] = "small"
    with pytest.raises(OptimizerError, match="eps"):
        optimizer.step()
    assert unlike(before, run.model.state_dict()) == []
    optimizer.param_groups[1]["eps"] = 1e-8
    run.step()
    assert set(updates(run.model).values()) == {"on the device, resident"}
    gone = weakref.ref(inside.buckets(run.model)["layers.1"])
    unmegacompile(run.model)
    gc.collect()
    assert gone() is None


def test_large_updates_are_made_in_parts() -> None:
    pairs = with_adamw(twins(nn.Linear(1024, 1024, bias=False), resident="all"))
    train(pairs, lambda model, _: model(torch.randn(2, 1024)).square().sum())


SHARE = 0.7  # of the parameters of `net()`: the embedding and layers
THERE = {"embed", "layers.0", "layers.1"}  # what the backward leaves to the device
WEIGHT = "layers.1.up.weight"


def halve_gradient(model: Model, optimizer: Optimizer) -> None:
    gradient = model.get_parameter(WEIGHT).grad
    gradient.mul_(torch.full_like(gradient, 0.5))


def no_gradient(model: Model, optimizer: Optimizer) -> None:
    model.get_parameter(WEIGHT).grad = None


def double_state(model: Model, optimizer: Optimizer) -> None:
    optimizer.state[model.get_parameter(WEIGHT)]["exp_avg"].mul_(2)


def accumulates(model: Model, optimizer: Optimizer) -> None:
    model(**data(9)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-2)


def other_backward(model: Model, optimizer: Optimizer) -> None:
    torch.autograd.grad(model(**data(3)), [model.get_parameter(WEIGHT)])


EDITS: dict[Callable[[Model, Optimizer], None], set[str] | None] = {
    **dict.fromkeys((halve_gradient, no_gradient, double_state), THERE - {"layers.1"}),
    accumulates: THERE,
    other_backward: None,
}


def test_the_backward_hands_over_and_changes_before_the_step_are_seen() -> None:
    """Their bucket is updated on the host. Equal to the plain loop but for rounding."""
    plain, model = twins(net(), lowering="inductor", device_update=SHARE, progress=False)
    optimizers = [AdamW(groups(each), lr=1e-2, weight_decay=0.1) for each in (plain, model)]
    start = copy.deepcopy(plain.state_dict())
    for edit, there in EDITS.items():
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            each.load_state_dict(start)
            optimizer.state.clear()
            for i in range(3):
                optimizer.zero_grad()
                each(**data(i)).backward()
                nn.utils.clip_grad_norm_(each.parameters(), 1e-2)
                if i == 2:
                    edit(each, optimizer)
                optimizer.step()
        found = {name for name, way in updates(model).items() if way == "on the device"}
        assert there is None or found == there, edit.__name__
        zoo.assert_close(plain, model, tolerance=1e-4)
        for want, got in zip(plain.parameters(), model.parameters(), strict=True):
            assert (want.grad is None) == (got.grad is None)
            if want.grad is not None:
                torch.testing.assert_close(got.grad + 0, want.grad, rtol=1e-4, atol=1e-7)
    schedule = schedules(model)[0]
    assert schedule.update is not None
    updated = ops.nodes_of(schedule.update, ops.update)
    assert {ops.arguments(node)[0].name for node in updated} == THERE
    actions = ops.actions(schedule.forward).split()
    readers = [actions.index(f"{stage}F") for stage in (0, 1, 2)]
    assert max(readers) < actions.index("DRAIN") < actions.index("4F"), "its memory is taken back"


def test_gradients_of_each_step_come_into_the_same_host_memory() -> None:
    """To make and lock new memory takes longer than the update. The norms, which are asked for when
    gradients are clipped, must not hold those of an earlier step."""
    layers = [nn.Linear(16, 16) for _ in range(3)]
    plain, model = twins(nn.Sequential(*layers), lowering="inductor", progress=False, resident=0)
    homes = []  # a look at `p.grad` itself would forget its norm
    for each in (plain, model):
        optimizer = AdamW(each.parameters())
        for k in range(8):
            each(torch.ones(4, 16) * k).square().mean().backward()
            if k % 2:
                nn.utils.clip_grad_norm_(each.parameters(), 1e-2)
                memory = (bucket.grads for bucket in inside.buckets(model).values())
                homes.append([grad.data_ptr() for of in memory for grad in of.values()])
                optimizer.step()
                optimizer.zero_grad()
    zoo.assert_close(plain, model, tolerance=1e-4)
    assert len(homes[-1]) == 6 and homes[4:] == homes[4:5] * 4


def layers(m: Any, x: Tensor) -> Tensor:
    for layer in m.layers:
        x = m.drop(layer(x).relu())
    return m.norm(x).square().mean()


@torch._dynamo.disable  # type: ignore[untyped-decorator]
def note(m: Any) -> None:
    m.calls += 1


def talks(m: Any, x: Tensor) -> Tensor:
    """A line that Dynamo does not capture comes first."""
    note(m)
    return layers(m, x)


def pair(function: Callable[..., Any] = layers, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    linear = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
    net = Applies(function, layers=linear, norm=nn.BatchNorm1d(8), drop=nn.Dropout(0.5), calls=0)
    return twins(net, **(options or {"gpu_memory": "2MiB"}), progress=False)


def loss(model: Any, seed: int) -> Tensor:
    return model(torch.ones(4, 8) * seed + torch.arange(8))


def settled(model: nn.Module) -> bool:
    return inside.residents(model) == inside.buckets(model).keys()


@contextmanager
def captures(caplog: pytest.LogCaptureFixture, *, count: int) -> Iterator[None]:
    with caplog.at_level(logging.INFO, "megacompile.capture"):
        yield
    assert len([r for r in caplog.records if r.name == "megacompile.capture"]) == count


def test_the_first_call_has_them_where_they_belong(caplog: pytest.LogCaptureFixture) -> None:
    models = _, model = pair()
    with captures(caplog, count=1):
        assert_alike(models, lambda m: loss(m, 5))
        assert settled(model)
        (first,) = schedules(model)
        train(with_adamw(models), loss)
    assert schedules(model) == [first]


def test_gradients_of_the_user_update_a_bucket_where_it_is() -> None:
    """The update's graph, which no backward has made, is that of the place."""
    models = plain, model = pair(lowering="inductor")
    names = list(inside.buckets(model))
    for each in models:
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for seed in range(3):
            if each is model:
                inside.want(model, *names[seed % 2 :: 2])
            for param in each.parameters():
                param.grad = torch.full_like(param, seed + 1.0)
            optimizer.step()
    assert set(names[::2]) == inside.residents(model)
    zoo.assert_close(plain, model, 1e-6)


def test_a_move_that_does_not_fit_keeps_the_gradients() -> None:
    models = _, model = pair()
    assert_alike(models, lambda m: loss(m, 0).backward())
    inside.want(model)
    with disks.no_host_memory(inside.machine(model)), pytest.raises(HostMemoryError):
        loss(model, 1)
    assert_same(*models)
    train(with_adamw(models), loss)


@pytest.mark.parametrize("held", [False, True])
def test_another_name_of_what_moves_is_told_of(*, held: bool) -> None:
    models = pair()
    state = models[1].state_dict() if held else None
    with said("layers.0.weight") as texts:
        train(with_adamw(models), loss)
    assert settled(models[1]) and len(texts) == held
    del state


def test_what_has_run_is_not_run_again() -> None:
    models = plain, model = pair(talks)
    assert_alike(models, lambda m: loss(m, 7))
    assert model.calls == plain.calls
    assert not inside.residents(model), "not in this call"
    train(with_adamw(models), loss)
    assert settled(model) and model.calls == plain.calls


def tower() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        return x + m.narrow(m.wide(x).tanh())

    layers = (Applies(forward, wide=nn.Linear(64, 64), narrow=nn.Linear(64, 64)) for _ in range(4))
    return nn.Sequential(*layers)


def of_rows(model: Any, rows: int) -> Tensor:
    return model(torch.randn(rows, 64)).square().mean()


def test_buckets_leave_the_device_for_larger_inputs(caplog: pytest.LogCaptureFixture) -> None:
    """The first batch is small, and puts all of them there. Nothing is captured again when they
    have left, nor for sizes that there is room for."""
    torch.manual_seed(0)
    pairs = with_adamw(twins(tower(), gpu_memory="2MiB", progress=False))
    residents = []
    with captures(caplog, count=2):  # 8, any
        for rows in (8, 16, 100, 900, 1000, 50):
            train(pairs, of_rows, [rows])
            residents.append(len(inside.residents(pairs[1][0])))
    assert residents == [4, 4, 4, 0, 0, 0]


def test_a_call_that_starts_over_searches_for_no_plan_again() -> None:
    """It does because buckets have moved for the plan that was found, and some stay resident."""
    torch.manual_seed(0)
    pairs = with_adamw(twins(tower(), gpu_memory="2MiB", progress=False))
    searches: list[Any] = []

    def profile(frame: Any, event: str, arg: Any) -> None:
        if event == "call" and frame.f_code.co_name == "search_everywhere":
            searches.append(frame.f_back)

    for rows, count in ((8, 4), (600, 1)):
        sys.setprofile(profile)
        try:
            train(pairs, of_rows, [rows])
        finally:
            sys.setprofile(None)
        assert len(inside.residents(pairs[1][0])) == count
    assert len(searches) == 2


def broken(first: nn.Module) -> list[tuple[Any, Any]]:
    """Two captured graphs, the first of which draws random numbers. Their buckets live on the
    device, with room for few rows."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = nn.functional.dropout(m.first(x), 0.5)
        torch._dynamo.graph_break()
        return m.layers(x)

    torch.manual_seed(0)
    made = Applies(forward, first=first, layers=tower())
    pairs = with_adamw(twins(made, gpu_memory="2MiB", progress=False))
    train(pairs, of_rows, (8, 8))
    assert len(inside.residents(pairs[1][0])) >= 4
    return pairs


@pytest.mark.parametrize("first", [nn.Identity(), nn.Linear(64, 64)])
def test_a_call_that_has_begun_begins_again_where_nothing_fits_otherwise(first: nn.Module) -> None:
    pairs = broken(first)
    for rows in (1100, 1100, 8):
        train(pairs, of_rows, [rows])
        assert inside.residents(pairs[1][0]) <= {"first"}


def test_a_call_that_cannot_begin_again_fails_and_the_next_one_runs() -> None:
    """The BatchNorm has counted its batch."""
    (plain, _), (model, _) = pairs = broken(nn.BatchNorm1d(64))
    with pytest.raises(DeviceMemoryError):
        train(pairs[1:], of_rows, [1100])
    model.load_state_dict(plain.state_dict())
    train(pairs, of_rows, [1100])
