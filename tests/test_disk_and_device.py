"""States on a disk beside updates on the device: what lies on the host keeps its fast ways."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from megacompile import megacompile, schedules, updates
from megacompile.cost.hardware import H200
from megacompile.cost.optimizer import OptimizerCost
from megacompile.cost.optimizer import updates as costs
from megacompile.ir import ops
from megacompile.ir.schedule import Schedule
from megacompile.passes.schedule.plan import make_plan
from megacompile.plan import tries
from megacompile.plan.choice import Choice
from megacompile.plan.freeing import freed
from megacompile.plan.planner import search
from megacompile.runtime.model.lookup import streamed_model
from megacompile.runtime.params.bucket import HostBucket
from megacompile.runtime.updates import update
from megacompile.verify.proof import HazardKind, hazards, verify
from tests import adversary, disks
from tests.capturing import capture
from tests.test_disk_placement import GIB, problem

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="scratch files are for Linux"),
    pytest.mark.filterwarnings("ignore:megacompile. disk=.* has no direct I/O"),
]

LAYERS = 5
ON_DISK = frozenset({2, 4})
MODES: dict[str, dict[str, Any]] = {
    "exact": {},
    "8 bits": {"state_dtype": "int8"},
    "bfloat16 computed": {"compute_dtype": torch.bfloat16},
}


def built(folder: Path | None, kind: Any = AdamW, **options: Any) -> tuple[Any, Any]:
    """A model of equal layers: the device updates layers 0, 1 and 3, and the host 2 and 4, whose
    states are on the disk, if there is one."""
    torch.manual_seed(0)
    layers = [m for _ in range(LAYERS) for m in (nn.Linear(64, 64), nn.Tanh())]
    model: Any = nn.Sequential(*layers)
    optimizer = kind(model.parameters(), lr=0.01)
    megacompile(model, device="cpu", lowering="inductor", device_update=1.0, disk=folder, **options)
    if folder is not None:
        store(model, ON_DISK)
    return model, optimizer


def store(model: Any, keys: frozenset[int]) -> None:
    """Let the states of these buckets lie on the disk, as a plan would, and others on the host."""
    moving = streamed_model(model, "test").buckets
    moving._move(replace(moving.plans.placement, on_disk=keys))


def run(model: Any, optimizer: Any, steps: int, first: int = 0) -> None:
    for k in range(first, steps):
        optimizer.zero_grad()
        x = torch.randn(3, 64, generator=torch.Generator().manual_seed(k))
        model(x).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()


def values(model: Any, optimizer: Any) -> list[torch.Tensor]:
    found = [param.detach().clone() for param in model.parameters()]
    for state in optimizer.state_dict()["state"].values():
        found += [v.clone() for v in state.values() if isinstance(v, torch.Tensor)]
    return found


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def expected(steps: int, monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[torch.Tensor]:
    """What the same updates give without a disk."""
    with monkeypatch.context() as patch:
        patch.setattr("megacompile.plan.pipeline.make_plan", without(ON_DISK))
        model, optimizer = built(None, **options)
        run(model, optimizer, steps)
    assert on_device(model) == {0, 1, 3}
    return values(model, optimizer)


def without(keys: frozenset[int]) -> Any:
    """`make_plan` that lets the host update some buckets, as if their states were on a disk."""

    def made(schedule: Schedule, **options: Any) -> Schedule:
        return make_plan(schedule, **(options | {"on_disk": keys}))

    return made


def on_device(model: Any) -> set[int]:
    """The buckets whose last update was made on the device."""
    ways = updates(model)
    return {key for key, b in buckets(model).items() if ways[b.layout.name] == "on the device"}


def buckets(model: Any) -> dict[int, HostBucket]:
    return streamed_model(model, "test").machine.buckets


@pytest.mark.parametrize("mode", MODES)
def test_the_same_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    model, optimizer = built(tmp_path, **MODES[mode])
    run(model, optimizer, 5)
    assert on_device(model) == {0, 1, 3}
    (schedule,) = schedules(model)
    assert schedule.plan.device_update == {0, 1, 3} and schedule.plan.on_disk == ON_DISK
    assert schedule.update is not None
    actions = ops.actions(schedule.update).split()
    assert {"2READ_STATE", "2UPDATE", "2WRITE_STATE", "3OFFLOAD_STATE"} <= {*actions}
    assert "3READ_STATE" not in actions
    held = {key: len(b.states.on_disk()) for key, b in buckets(model).items()}
    assert {key for key, count in held.items() if count} == ON_DISK
    assert same(values(model, optimizer), expected(5, monkeypatch, **MODES[mode]))


def test_on_an_adversarial_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any interleaving of the streams and of a drive that shows what is not there yet as NaN."""
    right = expected(4, monkeypatch)
    for seed in range(6):
        rng = random.Random(seed)
        with adversary.adversarial(), disks.harsh(rng), disks.few_buffers(rng):
            model, optimizer = built(tmp_path)
            adversary.attach(model).policy = adversary.Random(seed)
            run(model, optimizer, 4)
            assert on_device(model) == {0, 1, 3}
            assert same(values(model, optimizer), right), seed


def test_states_that_go_to_the_disk_and_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was learned of where they lay is forgotten: the device does not fetch it there."""
    model, optimizer = built(tmp_path)
    steps = 0
    for keys in (ON_DISK, ON_DISK | {1}, ON_DISK, ON_DISK | {0, 3}, ON_DISK):
        store(model, keys)
        run(model, optimizer, steps + 2, first=steps)
        steps += 2
        assert on_device(model) == {0, 1, 2, 3, 4} - keys
    right = expected(steps, monkeypatch)
    for want, got in zip(right, values(model, optimizer), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)  # the host rounds otherwise


def test_the_rest_of_a_step_reads_what_lies_on_the_disk(tmp_path: Path) -> None:
    """A gradient of the user's is updated on the host, wherever its states lie."""
    (model, optimizer), (other, its) = built(tmp_path), built(None)
    for one, opt in ((model, optimizer), (other, its)):
        run(one, opt, 3)
        opt.zero_grad()
        one(torch.ones(3, 64)).square().mean().backward()
        for layer in (1, 2):
            one[2 * layer].weight.grad = torch.ones(64, 64)
        opt.step()
    assert on_device(model) == {0, 3}
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_the_device_is_not_asked_to_help_with_what_comes_from_a_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(update, "LEAST_HELPED", 1)
    asked: dict[str, bool] = {}
    real = update.BucketUpdate.__call__

    def call(self: update.BucketUpdate) -> None:
        asked[self.bucket.layout.name] = self.suits_chunks()
        real(self)

    monkeypatch.setattr(update.BucketUpdate, "__call__", call)
    model, optimizer = built(tmp_path, kind=SGD)
    run(model, optimizer, 1)
    for bucket in buckets(model).values():
        bucket.pending.settle()
    suits = {key for key, b in buckets(model).items() if asked[b.layout.name]}
    assert suits == {0, 1, 3}


# What is proved, and what is planned.


def drawn(**options: Any) -> Schedule:
    torch.manual_seed(0)
    model = nn.Sequential(*(m for _ in range(LAYERS) for m in (nn.Linear(4, 4), nn.Tanh())))
    return capture(model, torch.randn(2, 4)).build(helps=True, on_disk=ON_DISK, **options)


def test_a_help_that_would_wait_for_the_disk_is_reported() -> None:
    schedule = drawn()
    verify(schedule)
    assert schedule.update is not None
    (helps,) = ops.nodes_of(schedule.update, ops.help_host)
    of_disk = next(
        node
        for node in ops.nodes_of(schedule.update, ops.update_host)
        if ops.arguments(node)[0].key in ON_DISK
    )
    helps.args = ((*ops.arguments(helps)[0], of_disk),)
    assert [hazard.kind for hazard in hazards(schedule)] == [HazardKind.WRONG_HELP]


def test_an_update_on_the_device_of_states_on_the_disk_is_reported() -> None:
    schedule = drawn(device_update=1.0)
    verify(schedule)
    assert schedule.plan.device_update == {0, 1, 3}
    plan = replace(schedule.plan, on_disk=ON_DISK | {1})
    found = {hazard.kind for hazard in hazards(replace(schedule, plan=plan))}
    assert HazardKind.NOT_READ in found and HazardKind.NOT_WRITTEN in found


def test_the_cost_of_help_is_that_of_what_lies_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megacompile.cost.optimizer.LEAST_HELPED", 1)
    found = costs(drawn(), OptimizerCost(helped=True))
    assert {each.bucket.key for each in found if not each.helped_bytes} == ON_DISK


def slow_host(**changes: Any) -> Any:
    """A tower whose steps wait for the host, unless the device updates; and a slow disk."""
    names = ("disk_read_gb_s", "disk_write_gb_s", "disk_read_both_gb_s", "disk_write_both_gb_s")
    hardware = H200.replace(update_gb_s=20.0, host_memory_gb_s=40.0, **dict.fromkeys(names, 0.5))
    return problem(hardware=hardware, budget_bytes=int(1.7 * GIB), **changes)


@pytest.mark.parametrize("share", [0.75, 0.9])
def test_a_disk_takes_no_update_from_the_device(share: float) -> None:
    """Where nothing need lie on the disk, the plan is as fast as without one."""
    whole = slow_host().host_bytes(Choice())
    tower = slow_host(host_budget_bytes=int(share * whole))
    tower = replace(tower, budget_bytes=int(1.4 * GIB))
    updates = []
    for frees in (False, True):  # what the device could still free makes more of it resident
        with mock.patch.object(tries, "freed", freed if frees else lambda *_, **__: iter(())):
            found, without = search(replace(tower)), search(replace(tower, disk_budget_bytes=None))
        assert found is not None and without is not None
        assert tower.expected_s(found.choice) <= 1.005 * tower.expected_s(without.choice)
        updates.append(without.choice.device_update)
    assert updates[0], "the device updates"


def test_shares_are_tried_where_the_fewest_residents_need_no_disk() -> None:
    whole = slow_host().host_bytes(Choice())
    tower = slow_host(host_budget_bytes=int(0.7 * whole))
    first, least = tower.fewest_residents(disk=False), tower.fewest_residents()
    assert first is not None and least is not None and first > least
    found = search(tower)
    assert found is not None and len(found.choice.resident) != first
    tried = {c.device_update for c in tower._steps_s if len(c.resident) == first and not c.on_disk}
    assert len(tried) > 1, "what fits of them"


def test_memory_of_updates_on_the_device_is_that_of_the_ones_chosen() -> None:
    """Of more states on the disk, fewer are updated on the device."""
    tower = slow_host()
    keys = [bucket.key for bucket in tower.buckets]
    few, many = (
        Choice(0, on_disk=frozenset(keys[len(keys) - count :]), device_update=1.0)
        for count in (2, 14)
    )
    assert tower.peak_bytes(many) < tower.peak_bytes(few)
    assert tower.peak_bytes(few) == tower.memory(few).peak.total_bytes
