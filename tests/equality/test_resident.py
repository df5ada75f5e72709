"""Buckets that live on the device: which, when they move, and what a step does with them.

The numbers of loops over residents: test_table.py.
"""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer, RMSprop

from megacompile import megacompile, schedules, unmegacompile, updates
from megacompile.errors import OptimizerError
from megacompile.ir import ops
from tests import inside, zoo
from tests.inside import residents
from tests.training import adamw, data, groups, net, train
from tests.zoo import assert_same, twins

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
    train(streamed, adamw(streamed), 1)
    assert not read_by(streamed, ops.prefetch) and schedules(streamed)[0].slots == ()
    saved = io.BytesIO()
    torch.save(streamed.state_dict(), saved)
    assert plain.state_dict().keys() == streamed.state_dict().keys()
    assert saved.tell() < 2 * sum(p.nbytes for p in plain.parameters()), "no tensor has others'"
    _, streamed = twins(net(), resident=30 * KB)
    train(streamed, adamw(streamed), 1)
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


def regroup(model: Model, optimizer: Optimizer, i: int) -> None:
    if i == 3:
        up = model.layers[1].up
        other = {up.weight: up.bias, up.bias: up.weight}
        for group in optimizer.param_groups:
            group["params"] = [other.get(param, param) for param in group["params"]]


def transpose(model: Model, optimizer: Optimizer, i: int) -> None:
    if i == 3:
        weight = model.layers[1].up.weight
        weight.grad = weight.grad.t().contiguous().t()


def new_states(model: Model, optimizer: Optimizer, i: int) -> None:
    state = optimizer.state[model.layers[1].up.weight]
    if i == 2:
        state["exp_avg"] = torch.ones_like(state["exp_avg"])
    if i == 3:
        state["step"] += 5
    if i == 4:
        optimizer.state.clear()


def double(model: Model, optimizer: Optimizer, i: int) -> None:
    """A second step for the same gradients."""
    if i == 3:
        optimizer.step()


def refuse(model: Model, optimizer: Optimizer, i: int) -> None:
    """What a step refuses it refuses again, and nothing changes."""
    if i == 3:
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.param_groups[1]["eps"] = "small"
        with pytest.raises(OptimizerError, match="eps"):
            optimizer.step()
        optimizer.param_groups[1]["eps"] = 1e-8
        assert all(map(torch.equal, model.parameters(), before))


BETWEEN = (regroup, transpose, new_states, double, refuse)


def test_a_step_that_is_alike_is_the_step() -> None:
    """In every bit that over streamed buckets; it holds no memory of buckets."""
    options: dict[str, Any] = {"device": "cpu", "lowering": "eager", "state_dtype": BF16}
    one, two = (megacompile(net(), resident=where, **options) for where in ("all", 0))
    start = copy.deepcopy(two.state_dict())
    for between in BETWEEN:
        found = []
        for model in (one, two):
            model.load_state_dict(start)
            (optimizer,) = adamw(model)
            for i in range(6):
                optimizer.zero_grad()
                model(**data(i)).backward()
                between(model, optimizer, i)
                optimizer.step()
            found.append([*model.parameters(), *map(torch.as_tensor, states(optimizer))])
            if model is one:
                assert set(updates(one).values()) == {"on the device, resident"}
        assert all(zoo.equal(a + 0, b + 0) for a, b in zip(*found, strict=True)), between.__name__
    gone = weakref.ref(inside.buckets(one)["layers.1"])
    del found, model
    unmegacompile(one)
    gc.collect()
    assert gone() is None


def states(optimizer: Optimizer) -> list[Any]:
    return [v for state in optimizer.state.values() for _, v in sorted(state.items())]


@pytest.mark.parametrize("make", [lambda p: AdamW(p, lr=1e-2), lambda p: RMSprop(p, lr=1e-3)])
def test_residents_are_clipped_like_others(make: Callable[[Any], Optimizer]) -> None:
    """With a hook, with what an earlier step has scaled and with two factors. By the rule, and by
    torch.optim's own step."""
    torch.manual_seed(0)
    start = nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.Linear(1024, 1024, bias=False))
    found = []
    for resident in (0, "all"):
        model: Any = copy.deepcopy(start)
        optimizer = make(model.parameters())
        options: dict[str, Any] = {"state_dtype": BF16} if isinstance(optimizer, AdamW) else {}
        megacompile(model, device="cpu", lowering="eager", resident=resident, **options)
        seen = []
        for i in range(4):
            torch.manual_seed(i)
            if i != 2:
                optimizer.zero_grad()
            handle = model[0].weight.register_hook(lambda g: g * 2) if i == 1 else None
            model(torch.randn(2, 1024)).square().sum().backward()
            if i == 2:
                (model[1].weight.square().sum() * 0.01).backward()
            seen.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05))
            if i == 3:
                seen.append(nn.utils.clip_grad_norm_(model[1].parameters(), 0.01))
            optimizer.step()
            seen += [param.grad.clone() for param in model.parameters()] if i % 2 else []
            if handle is not None:
                handle.remove()
        found.append([*seen, *model.parameters(), *map(torch.as_tensor, states(optimizer))])
    assert all(zoo.equal(a + 0, b + 0) for a, b in zip(*found, strict=True))


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
