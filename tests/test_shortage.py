"""Device memory that runs out in a step: a plan that needs less, and the same numbers."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megacompile import megacompile, schedules
from megacompile.errors import DeviceMemoryError
from megacompile.runtime.ops.bound import BoundOps
from tests import inside
from tests.draws import pairwise
from tests.training import adamw, data, net
from tests.zoo import assert_same, twins

MiB = 2**20
OPS = ["forward", "backward", "recompute", "prefetch"]


class Shortage:
    """Lets an op run out of memory, at chosen calls of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        self.at: set[int] = set()
        self.above = 0  # every call, while the plan needs more than these bytes
        self._patch = monkeypatch

    def on(self, op: str) -> Shortage:
        real = getattr(BoundOps, op)

        def run(ops: Any, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.calls in self.at:
                raise torch.OutOfMemoryError("planted: out of memory")
            return real(ops, *args, **kwargs)

        self._patch.setattr(BoundOps, op, run)
        return self


@pytest.fixture
def shortage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Shortage]:
    yield Shortage(monkeypatch)


class Dropping(nn.Module):
    """Layers with dropout, so that a step that is repeated must draw the same numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.dropout(F.gelu(layer(x)), 0.5, self.training)
        return x.square().mean()


def train(model: nn.Module, steps: int = 4) -> list[Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(0)
    losses = []
    for i in range(steps):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(i))
        for _ in range(2):  # accumulates
            loss = model(x)
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize(
    ("call", "op", "resident"), pairwise([1, 3, 6, 11], ["forward", "backward"], ["auto", 0])
)
def test_the_step_is_repeated_with_the_same_numbers(
    shortage: Shortage, op: str, call: int, resident: Any
) -> None:
    plain, streamed = twins(Dropping(), gpu_memory=MiB, resident=resident)
    want = train(plain)
    shortage.on(op).at = {call}
    with pytest.warns(UserWarning, match=f"ran out in the {op}.*repeated.*at most"):
        got = train(streamed)
    assert torch.equal(torch.stack(want), torch.stack(got))
    assert_same(plain, streamed)


def test_it_steps_down_as_often_as_it_must(shortage: Shortage) -> None:
    plain, streamed = twins(Dropping(), gpu_memory=MiB)
    want = train(plain)
    shortage.on("backward").at = {3, 5, 9, 14}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        got = train(streamed)
    budgets = [str(w.message) for w in said if "repeated" in str(w.message)]
    assert len(budgets) == 4 and len(set(budgets)) == 4
    assert torch.equal(torch.stack(want), torch.stack(got))
    assert_same(plain, streamed)


def test_less_is_kept_afterwards(shortage: Shortage) -> None:
    _, streamed = twins(Dropping(), gpu_memory=MiB, resident=0)
    shortage.on("backward")
    train(streamed, 1)
    before = max(len(s.plan.keep) for s in schedules(streamed))
    shortage.at = {shortage.calls + 2}
    with pytest.warns(UserWarning, match="repeated"):
        train(streamed, 1)
    assert max(len(s.plan.keep) for s in schedules(streamed)) < before


@pytest.mark.parametrize("op", ["forward", "backward"])
def test_the_slots_of_the_old_plan_are_given_back(shortage: Shortage, op: str) -> None:
    _, streamed = twins(Dropping(), gpu_memory=MiB, resident=0)
    shortage.on(op)
    train(streamed, 1)
    slots = inside.machine(streamed).slots
    before = [weakref.ref(buffer) for buffer in slots.buffers]
    assert before
    shortage.at = {shortage.calls + 2}
    with pytest.warns(UserWarning, match="repeated"):
        train(streamed, 1)
    assert not any(buffer() is not None for buffer in before)


@pytest.mark.parametrize("op", ["forward", "backward"])
def test_when_nothing_is_left_to_give_it_is_an_error(shortage: Shortage, op: str) -> None:
    _, streamed = twins(Dropping(), gpu_memory=MiB)
    shortage.on(op).at = set(range(1, 1000))
    with (
        pytest.warns(UserWarning, match="repeated"),
        pytest.raises(DeviceMemoryError, match=f"(?s)ran out in the {op}, with every .*needed  "),
    ):
        train(streamed)
    shortage.at = set()
    train(streamed, 1)  # goes on


def test_without_a_plan_there_is_nothing_to_give(shortage: Shortage) -> None:
    _, streamed = twins(Dropping())
    shortage.on("forward").at = {2}
    with pytest.raises(DeviceMemoryError, match="nothing resident"):
        train(streamed)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@pytest.mark.parametrize(("op", "why"), [("forward", "changed a buffer"), ("backward", "buffers")])
def test_what_cannot_be_repeated_is_said(shortage: Shortage, op: str, why: str) -> None:
    model = megacompile(Normed(), device="cpu", gpu_memory=MiB)
    shortage.on(op).at = {3}
    with pytest.raises(DeviceMemoryError, match=f"(?s){why}.*gpu_memory="):
        model(torch.ones(4, 8)).backward()


def test_another_forward_that_waits_for_its_backward(shortage: Shortage) -> None:
    _, streamed = twins(Dropping(), gpu_memory=MiB, resident=0)
    x = torch.ones(8, 16)
    first, second = streamed(x), streamed(x)
    shortage.on("backward").at = {2}
    with pytest.raises(DeviceMemoryError, match="another forward waits"):
        second.backward()
    first.backward()


def test_buckets_move_before_the_first_step() -> None:
    """The optimizer makes its states on the device at once."""
    plain, streamed = twins(net(), gpu_memory=MiB)
    for model in (plain, streamed):
        (optimizer,) = adamw(model)
        model(**data(0)).backward()
        optimizer.step()
    assert len(schedules(streamed)) == 1, "what ran is there, though another one comes next"
    machine = inside.machine(streamed)
    assert all(bucket.resident is not None for bucket in machine.buckets.values())
    assert not any(bucket.states for bucket in machine.buckets.values() if not bucket.resident)
    assert_same(plain, streamed)
