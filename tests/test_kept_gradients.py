"""Gradients of buckets that live on the device: they take memory from the backward on, and until
`zero_grad()`, in which the backward has made them."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megacompile import schedules
from megacompile.cost.memory import Kind, device_memory
from megacompile.cost.optimizer import OptimizerCost
from megacompile.ir import ops
from megacompile.runtime.ops.bound import BoundOps
from megacompile.runtime.params.bucket import HostBucket
from tests import inside
from tests.inside import residents
from tests.training import adamw, data, net, train
from tests.zoo import assert_same, twins


def grads(model: Any) -> list[Tensor]:
    return [g for bucket in inside.buckets(model).values() for g in bucket.grads.values()]


class Wide(nn.Module):
    """Matrices alone: nobody else has the memory of their gradients."""

    def __init__(self, layers: int = 3, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).relu()
        return x.square().mean()


X = torch.ones(4, 16)


def test_they_are_there_from_the_backward_to_the_next_forward() -> None:
    _, model = twins(Wide(), resident="all")
    loss = model(X)
    assert not grads(model)
    loss.backward()
    assert len(grads(model)) == 3
    there = [weakref.ref(g.untyped_storage()) for g in grads(model)]
    model.zero_grad()
    model(X)
    assert not grads(model) and not any(storage() for storage in there)


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_none_is_copied(monkeypatch: pytest.MonkeyPatch, lowering: str) -> None:
    """The memory is that which the backward has made."""
    made: list[int] = []
    real = HostBucket.make_grad

    def make_grad(bucket: HostBucket, index: int) -> Tensor:
        made.append(index)
        return real(bucket, index)

    monkeypatch.setattr(HostBucket, "make_grad", make_grad)
    _, model = twins(Wide(), resident="all", lowering=lowering, progress=False)
    model(X).backward()
    assert not made
    for param, gradient in zip(model.parameters(), grads(model), strict=True):
        assert param.grad is not None and param.grad.data_ptr() == gradient.data_ptr()


class Twice(nn.Module):
    """Two parameters whose gradients are one tensor, which is the gradient of an input too."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.ones(4, 16)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.a + self.b


def test_a_gradient_is_the_memory_of_one_parameter_alone() -> None:
    plain, model = twins(Twice(), resident="all")
    tangent = torch.full((4, 16), 3.0)
    found = []
    for each in (plain, model):
        x = torch.ones(4, 16, requires_grad=True)
        each(x).backward(tangent)
        each.a.grad.mul_(2.0)
        found += [each.a.grad, each.b.grad, x.grad]
    for want, got in zip(found[:3], found[3:], strict=True):
        assert torch.equal(want, got)
    assert torch.equal(tangent, torch.full((4, 16), 3.0))
    assert len({g.data_ptr() for g in found[3:]}) == 3


def keep_all(model: Any, held: list[Any]) -> None:
    held += [p.grad for p in model.parameters()]
    model.zero_grad()


def set_ones(model: Any, held: list[Any]) -> None:
    for p in model.parameters():
        p.grad = torch.ones_like(p)


LOOPS: dict[str, Callable[[Any, list[Any]], None]] = {
    "to none": lambda model, held: model.zero_grad(),
    "in place": lambda model, held: model.zero_grad(set_to_none=False),
    "accumulates": lambda model, held: None,
    "held": keep_all,
    "some": lambda model, held: setattr(next(model.parameters()), "grad", None),
    "foreign": set_ones,
}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("when", ["behind the step", "before the backward"])
def test_loops(loop: str, when: str) -> None:
    """What a loop does with `p.grad` gives the plain model's numbers."""
    plain, model = twins(net(), resident="all")
    seen: list[list[Tensor]] = []
    for each in (plain, model):
        held: list[Any] = []
        (optimizer,) = adamw(each)
        for i in range(4):
            loss = each(**data(i))
            if when == "before the backward":
                LOOPS[loop](each, held)
            loss.backward()
            optimizer.step()
            if when == "behind the step":
                LOOPS[loop](each, held)
        seen.append([g.clone() for g in held if g is not None])
    assert_same(plain, model)
    assert len(seen[0]) == len(seen[1]) and all(map(torch.equal, *seen))


def look(saw: dict[int, Tensor], at: int, param: nn.Parameter) -> None:
    assert param.grad is not None
    saw[at] = param.grad.clone()


def wanted(model: Any) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


@pytest.mark.parametrize("how", ["retain", "two losses", "grad", "hook"])
def test_backwards(how: str) -> None:
    plain, model = twins(net(), resident="all")
    found: list[dict[int, Tensor]] = []
    for each in (plain, model):
        saw: dict[int, Tensor] = {}
        if how == "hook":
            for at, p in enumerate(wanted(each)):
                p.register_post_accumulate_grad_hook(functools.partial(look, saw, at))
        loss = each(**data(0))
        if how == "retain":
            loss.backward(retain_graph=True)
        if how == "two losses":
            loss = loss + each(**data(1))
        if how == "grad":
            given = torch.autograd.grad(loss, wanted(each), retain_graph=True, allow_unused=True)
            saw |= {at: g for at, g in enumerate(given) if g is not None}
        loss.backward()
        found.append(saw)
    assert_same(plain, model)
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][at], found[1][at]) for at in found[0])


def test_a_backward_that_runs_out_of_memory_leaves_none_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They would be there while the step is made again, by a plan that needs less."""
    plain, model = twins(Wide(4), gpu_memory=2**20)
    train_of(plain, 2)
    real, calls, left = BoundOps.backward, [0], []

    def backward(of: Any, *args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == 7:  # the third of the second step
            left.append(len(grads(model)))
            raise torch.OutOfMemoryError("planted: out of memory")
        left.append(len(grads(model)))
        return real(of, *args, **kwargs)

    monkeypatch.setattr(BoundOps, "backward", backward)
    with pytest.warns(UserWarning, match="ran out in the backward"):
        train_of(model, 2)
    assert_same(plain, model)
    at = left.index(2, 4)
    assert left[at + 1] == 0, "the backward that is made again begins without any"


def train_of(model: Any, steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(X).backward()
        optimizer.step()
        optimizer.zero_grad()


# Memory.


def live(model: Any, **how: Any) -> list[int]:
    cost = OptimizerCost.of(inside.streamed(model).options)
    (schedule,) = schedules(model)
    found = device_memory(schedule, optimizer=cost, fused=False, **how)
    return [moment.live_bytes[Kind.GRADIENTS] for moment in found.moments]


def test_the_memory_model_has_them_from_the_backward_on() -> None:
    _, model = twins(Wide(), resident="all")
    model(X).backward()
    (schedule,) = schedules(model)
    assert schedule.backward is not None
    assert len(ops.nodes_of(schedule.backward, ops.keep_grad)) == 3
    size = sum(g.nbytes for g in grads(model))
    found = live(model)
    assert found[0] == 0 and found[-1] == size
    assert min(live(model, gradients_stay=True)) == size
    model(X).backward()  # adds: another schedule
    assert min(live(model)) == size


def planned(budget: int) -> Any:
    _, model = twins(Wide(6, 64), gpu_memory=budget)
    return model


def test_a_forward_that_finds_them_has_a_plan_that_counts_them() -> None:
    """Fewer buckets live on the device then, where it takes the memory."""
    x = torch.ones(64, 64)
    _, probe = twins(Wide(6, 64), resident="all", activations="keep")
    probe(x).backward()
    (schedule,) = schedules(probe)
    cost = OptimizerCost.of(inside.streamed(probe).options)
    least, most = (
        device_memory(schedule, optimizer=cost, fused=False, gradients_stay=stay).peak.total_bytes
        for stay in (False, True)
    )
    assert least < most
    budget = (3 * least + most) // 4
    plain, model = twins(Wide(6, 64), gpu_memory=budget)
    plain(x).backward()
    plain(x).backward()
    model(x).backward()
    before = residents(model)
    assert len(before) == 6
    model.zero_grad()
    model(x).backward()
    with torch.no_grad():
        model(x)
    model.zero_grad()
    model(x).backward()
    assert residents(model) == before, "a loop without micro-batches stays as it is"
    model(x).backward()
    assert residents(model) < before
    (now,) = schedules(model)
    assert device_memory(now, optimizer=cost, fused=False).peak.total_bytes <= budget
    for want, got in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(want.grad, got.grad)


def test_where_the_memory_is_enough_nothing_is_planned_anew() -> None:
    model = planned(2**24)
    x = torch.ones(512, 64)
    model(x).backward()
    (before,) = schedules(model)
    model(x).backward()
    programs = [p for g in inside.streamed(model).graphs for p in g.programs.values()]
    made = [e.schedule for p in programs if p is not None for e in p.executors.values()]
    assert any(schedule is before for schedule in made)


def test_training_goes_on_as_ever() -> None:
    plain, model = twins(net(), resident="all")
    for each in (plain, model):
        train(each, adamw(each), 3)
    assert_same(plain, model)
