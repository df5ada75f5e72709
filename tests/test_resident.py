"""Buckets that live on the device: parameters, gradients and optimizer states."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from megacompile import megacompile, schedules, updates
from megacompile.ir import ops
from megacompile.ir.placement import Placement
from tests import inside
from tests.cases import CASES, LONG, build
from tests.draws import drawn
from tests.inside import residents
from tests.training import adamw, data, net, schedulers, train
from tests.zoo import assert_same, twins

KB = 1000


def kinds(model: Any) -> dict[str, set[str]]:
    """The buckets of each op in the schedules of a model."""
    found: dict[str, set[str]] = {}
    for schedule in schedules(model):
        for graph in schedule.graphs.values():
            for node in ops.nodes_of(graph, ops.prefetch, ops.reuse, ops.resident):
                op = ops.op_of(node)
                assert op is not None
                found.setdefault(op.name, set()).add(ops.arguments(node)[0].name)
    return found


@pytest.mark.parametrize("case", drawn([case for case in CASES if case not in LONG], LONG))
@pytest.mark.parametrize("resident", ["all", 2 * KB])
def test_two_steps_are_bitwise_the_plain_ones(case: str, resident: Any) -> None:
    made = build(case)
    plain, streamed = twins(made.model, resident=resident)
    losses = []
    for model in (plain, streamed):
        torch.manual_seed(0)
        for i in range(2):
            loss = made.loss(model, i, torch.device("cpu"))
            loss.backward()
        losses.append(loss)
    assert torch.equal(*losses)
    assert_same(plain, streamed)


def test_what_is_resident_is_not_copied() -> None:
    plain, streamed = twins(net(), resident="all")
    train(streamed, adamw(streamed), 1)
    assert kinds(streamed).keys() == {"resident"}
    assert all(schedule.slots == () for schedule in schedules(streamed))
    plain, streamed = twins(net(), resident=30 * KB)
    train(streamed, adamw(streamed), 1)
    some = residents(streamed)
    assert some and kinds(streamed)["resident"] == some & kinds(streamed)["resident"]
    assert kinds(streamed)["prefetch"] and not kinds(streamed)["prefetch"] & some
    assert any("live on the device" in r for r in schedules(streamed)[0].plan.reasons)


@pytest.mark.parametrize("resident", ["all", 30 * KB])
def test_ten_steps_eager(resident: Any) -> None:
    """Resident parameters take the optimizer's own step."""
    plain, streamed = twins(net(), resident=resident)
    mine, theirs = adamw(plain), adamw(streamed)
    for model, of in ((plain, mine), (streamed, theirs)):
        train(model, of, of=schedulers(of))
    assert_same(plain, streamed)


@pytest.mark.parametrize("resident", ["all", 30 * KB])
def test_ten_steps_by_kernel(resident: Any) -> None:
    plain, streamed = twins(net(), resident=resident, lowering="inductor", progress=False)
    for model in (plain, streamed):
        of = adamw(model)
        train(model, of, of=schedulers(of))
    ways = {name: way for name, way in updates(streamed).items() if name in residents(streamed)}
    assert set(ways.values()) == {"on the device, resident"}
    for want, got in zip(plain.parameters(), streamed.parameters(), strict=True):
        assert (got - want).norm() <= 1e-5 * want.norm()


def test_states_have_the_dtype_that_was_asked_for() -> None:
    model = net()
    megacompile(
        model, device="cpu", lowering="inductor", resident="all", state_dtype=torch.bfloat16
    )
    optimizer = AdamW(model.parameters())
    model(**data(0)).backward()
    optimizer.step()
    assert optimizer.state[model.embed.weight]["exp_avg"].dtype == torch.bfloat16
    saved = io.BytesIO()
    torch.save(optimizer.state_dict(), saved)


def test_the_checkpoint_is_the_plain_one() -> None:
    plain, streamed = twins(net(), resident="all")
    assert plain.state_dict().keys() == streamed.state_dict().keys()
    saved = io.BytesIO()
    torch.save(streamed.state_dict(), saved)
    largest = sum(p.numel() * p.itemsize for p in plain.parameters())
    assert saved.tell() < 2 * largest, "a tensor was saved with the memory of others"


def test_other_optimizers_take_their_own_step() -> None:
    plain, streamed = twins(net(), resident="all", lowering="inductor", progress=False)
    for model in (plain, streamed):
        optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
        for i in range(3):
            model(**data(i)).backward()
            optimizer.step()
            optimizer.zero_grad()
    for want, got in zip(plain.parameters(), streamed.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_clipping_of_resident_and_streamed_parameters_together() -> None:
    plain, streamed = twins(net(), resident=30 * KB, lowering="inductor", progress=False)
    norms = []
    for model in (plain, streamed):
        model(**data(0)).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1e-2))
        SGD(model.parameters(), lr=0.1).step()
    torch.testing.assert_close(norms[1], norms[0], rtol=1e-5, atol=0)
    for want, got in zip(plain.parameters(), streamed.parameters(), strict=True):
        torch.testing.assert_close(got + 0, want + 0, rtol=1e-5, atol=1e-7)


TRAINING: dict[str, dict[str, Any]] = {
    "as it is": {},
    "masters": {"compute_dtype": torch.bfloat16},
    "masters, bf16 gradients": {"compute_dtype": torch.bfloat16, "grad_dtype": torch.bfloat16},
    "bf16 gradients": {"grad_dtype": torch.bfloat16},
}


def resident_bytes(model: Any) -> list[int]:
    """What each bucket takes where it lives: its tensors, each once, and AdamW's moments."""
    found = []
    for bucket in inside.buckets(model).values():
        gradients = [param.grad for param in bucket.params if param.grad is not None]
        tensors: list[torch.Tensor] = [*bucket.streamed, *bucket.values, *gradients]
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
        _, model = twins(copy.deepcopy(made), resident=f"{size}", **options)
        assert len(residents(model)) == k
        if k:
            _, model = twins(copy.deepcopy(made), resident=size - 1, **options)
            assert len(residents(model)) == k - 1


# Moves.


def want(model: Any, *names: str) -> None:
    """Let these buckets live on the device from the next call on."""
    streamed = inside.streamed(model)
    keys = [b.layout.key for b in streamed.machine.buckets.values() if b.layout.name in names]
    compiler: Any = streamed.buckets.plans.compiler
    compiler.chooser._wanted = Placement(frozenset(keys))


PLACES = [(), ("embed", "layers.0"), ("embed", "layers.0", "layers.1"), ("layers.1",), ()]


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_buckets_move_between_steps(lowering: str) -> None:
    """There and back, with gradients that accumulate and states that go on."""
    plain, streamed = twins(net(), lowering=lowering, progress=False)
    (mine,), (theirs,) = adamw(plain), adamw(streamed)
    for i, places in enumerate(PLACES):
        for k in range(2):
            plain(**data(2 * i + k)).backward()
            streamed(**data(2 * i + k)).backward()
            if k == 0:
                want(streamed, *places)  # between two micro-batches
        assert residents(streamed) == set(places)
        for optimizer in (mine, theirs):
            optimizer.step()
            optimizer.zero_grad(set_to_none=bool(i % 2))
    if lowering == "eager":
        assert_same(plain, streamed)
    for one, other in zip(plain.parameters(), streamed.parameters(), strict=True):
        assert (one - other).norm() <= 1e-5 * one.norm()


def test_slots_are_for_the_buckets_that_are_streamed_now() -> None:
    """The largest goes to the device: no slot needs to be as large as it any more."""
    model = nn.Sequential(nn.Linear(4, 400), nn.Linear(400, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    streamed: Any = megacompile(model, device="cpu", lowering="eager")
    streamed(torch.ones(2, 4)).sum().backward()
    want(streamed, "0", "1")
    streamed(torch.ones(2, 4)).sum().backward()
    machine = inside.machine(streamed)
    largest = max(b.layout.size_bytes for b in machine.buckets.values() if b.resident is None)
    assert [buffer.numel() for buffer in machine.slots.buffers] == [largest] * 2


def test_nothing_moves_before_a_backward_that_is_to_come() -> None:
    plain, streamed = twins(net())
    losses = []
    for model in (plain, streamed):
        first = model(**data(0))
        if model is streamed:
            want(model, "embed", "layers.1")
        second = model(**data(1))
        if model is streamed:
            assert residents(model) == set()
        second.backward()
        first.backward()
        losses.append(model(**data(2)).detach())
    assert residents(streamed) == {"embed", "layers.1"}
    assert torch.equal(*losses)
    assert_same(plain, streamed)


def test_a_forward_without_a_backward_does_not_hold_up_moves() -> None:
    _, streamed = twins(net())
    dropped = streamed(**data(0))
    del dropped
    want(streamed, "embed")
    streamed(**data(0))
    assert residents(streamed) == {"embed"}


def test_names_and_objects_stay() -> None:
    _, streamed = twins(net())
    before = {name: id(param) for name, param in streamed.named_parameters()}
    streamed(**data(0)).backward()
    want(streamed, "embed", "layers.0")
    streamed(**data(0)).backward()
    assert before == {name: id(param) for name, param in streamed.named_parameters()}


@pytest.mark.parametrize(
    "options", [{"grad_dtype": torch.bfloat16}, {"state_dtype": torch.bfloat16}], ids=str
)
def test_other_dtypes_with_eager_lowering(options: dict[str, Any]) -> None:
    """torch.optim refuses them; our rule does not, wherever the parameters are."""

    def trained(resident: Any) -> tuple[list[float], nn.Module]:
        torch.manual_seed(0)
        layers = [nn.Linear(16, 16) for _ in range(3)]
        model = megacompile(
            nn.Sequential(*layers), device="cpu", lowering="eager", resident=resident, **options
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for _ in range(5):
            loss = model(torch.ones(2, 16)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        wanted = options.get("state_dtype", torch.float32)
        assert optimizer.state[layers[0].weight]["exp_avg"].dtype == wanted
        return losses, model

    (here, streamed), (there, resident) = trained(0), trained("all")
    assert here[-1] < 0.5 * here[0]
    assert here == there
    assert_same(streamed, resident)
