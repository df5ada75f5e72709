"""Training within budgets of device, host and disk: equal in every bit wherever things lie, refused
where they fit nowhere, repeated where the device runs out in a step."""

from __future__ import annotations

import copy
import sys
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megacompile import (
    DeviceMemoryError,
    DiskError,
    HostMemoryError,
    explain,
    megacompile,
    schedules,
    unmegacompile,
)
from tests import inside
from tests.equality.nets import Applies
from tests.zoo import Tower

pytestmark = pytest.mark.filterwarnings("ignore:megacompile. disk=.* has no direct I/O")
linux = pytest.mark.skipif(sys.platform != "linux", reason="scratch files are for Linux")

LAYERS, WIDTH = 24, 64


def layer(base: bool) -> Applies:
    """A base with a trained vector in the middle of it."""
    up, down = (nn.Linear(WIDTH, WIDTH).requires_grad_(base) for _ in range(2))
    parts: dict[str, Any] = {"up": up, "down": down, "shift": nn.Parameter(torch.zeros(WIDTH))}
    return Applies(lambda m, x: x + m.down(m.up(x).relu() + m.shift), **parts)


def made(*, base: bool) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(*(layer(base) for _ in range(LAYERS)))


def size_of(model: nn.Module) -> int:
    return sum(param.nbytes for param in model.parameters())


def trained(model: Any, optimizer: Any, steps: int = 2) -> list[Tensor]:
    losses = []
    for k in range(steps):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(k))
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
    return losses


def on_disk(model: Any, what: str = "weights") -> set[str]:
    """The buckets that have their parameters, or their states, on the disk."""
    found = inside.buckets(model).items()
    if what == "states":
        return {name for name, bucket in found if bucket.states.on_disk()}
    return {name for name, bucket in found if bucket.on_disk is not None}


@dataclass(frozen=True)
class Row:
    """A budget, and how many buckets have parameters on the disk: at first, and after a call."""

    share: float  # of the parameters, that the host holds
    at_once: range = range(1)
    planned: range = range(1)
    base: bool = True  # trained
    in_backward: bool = False


ROWS = {
    "states go, in the backward": Row(2.0, in_backward=True),
    "the plan sends parameters": Row(1.85, planned=range(9, 24)),
    "parameters, in the backward": Row(0.97, range(1, 4), range(9, 20), in_backward=True),
    "parameters of a frozen base": Row(
        0.5, range(12, 16), range(18, 24), base=False, in_backward=True
    ),
}


def pair(folder: Path, row: Row, **options: Any) -> tuple[Any, Any, Any, Any]:
    """A model without budgets and one with them, with their optimizers."""
    first = made(base=row.base)
    second = copy.deepcopy(first)
    one, other = (
        torch.optim.AdamW([p for p in each.parameters() if p.requires_grad], lr=0.01)
        for each in (first, second)
    )
    common: dict[str, Any] = {"device": "cpu", "lowering": "eager"}
    if row.in_backward:  # then the plain loop has another arithmetic
        megacompile(first, **common, optimizer=one)
    given: dict[str, Any] = {"gpu_memory": "1GiB", "resident": 0, "disk": folder, **options}
    given["host_memory"] = int(row.share * size_of(second))
    megacompile(second, **common, **given, optimizer=other if row.in_backward else None)
    return first, one, second, other


def equal(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@linux
@pytest.mark.filterwarnings("ignore:megacompile. host memory .* does not hold")
@pytest.mark.parametrize("name", ROWS)
def test_the_same_numbers_wherever_they_lie(tmp_path: Path, name: str) -> None:
    row = ROWS[name]
    first, one, model, optimizer = pair(tmp_path, row)
    budget = inside.machine(model).host_budget
    assert len(on_disk(model)) in row.at_once
    losses = trained(model, optimizer)
    assert len(on_disk(model)) in row.planned
    plan = schedules(model)[-1].plan
    names = {bucket.key: bucket.name for bucket in schedules(model)[-1].buckets}
    assert {names[key] for key in plan.weights_on_disk} == on_disk(model)
    assert {names[key] for key in plan.on_disk} == on_disk(model, "states")
    assert plan.on_disk
    assert budget.limit_bytes is not None and budget.held_bytes <= budget.limit_bytes
    said = explain(model, changes=False)
    assert said.host.needed_bytes <= budget.limit_bytes and said.host.fits
    machine_disk = inside.machine(model).disk
    assert said.disk is not None and machine_disk is not None
    assert said.disk.needed_bytes >= machine_disk.used_bytes - 4096
    assert torch.equal(torch.stack(losses), torch.stack(trained(first, one)))
    assert equal(first, model)
    for mine, theirs in zip(optimizer.state.values(), one.state.values(), strict=True):
        for key in mine:
            assert torch.equal(torch.as_tensor(mine[key]), torch.as_tensor(theirs[key]))
    unmegacompile(model)
    assert equal(first, model)


@linux
@pytest.mark.filterwarnings("ignore:megacompile. host memory .* does not hold")
@pytest.mark.parametrize(("share", "amsgrad"), [(1.7, False), (1.85, True)])
def test_a_step_that_needs_more_than_the_plan_counted_changes_nothing(
    tmp_path: Path, share: float, amsgrad: bool
) -> None:
    """AdamW where the plan has one state a parameter, or its third state, which no plan counts."""
    plain, _, model, _ = pair(tmp_path, Row(share))
    for each in (plain, model):
        optimizer = torch.optim.AdamW(each.parameters(), lr=0.01, amsgrad=amsgrad)
        trained(each, optimizer, 1)
    x = torch.randn(4, WIDTH)
    optimizer.zero_grad()
    model(x).square().mean().backward()
    for _ in range(2):
        with pytest.raises(HostMemoryError):
            optimizer.step()
        assert equal(plain, model)
    states = optimizer.state_dict()["state"].values()
    assert all(int(each["step"]) == 1 and each["exp_avg"].isfinite().all() for each in states)
    model(x).square().mean().backward()


def test_nor_does_one_without_any_plan() -> None:
    """Nobody has counted them. torch.optim's own first step makes them."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    before = [param.detach().clone() for param in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters())
    megacompile(model, device="cpu", host_memory=int(2.5 * size_of(model)))
    model(torch.ones(2, 64)).sum().backward()
    for _ in range(2):
        with pytest.raises(HostMemoryError):
            optimizer.step()
        assert all(map(torch.equal, before, model.parameters()))
    model.state_dict()  # nothing is torn


@linux
def test_a_disk_that_may_not_be_used_or_is_too_small(tmp_path: Path) -> None:
    """The refusal comes before anything has changed, and says what would do."""
    *_, model, optimizer = pair(tmp_path, Row(1.85), disk_weights=False)
    with pytest.raises(HostMemoryError, match="disk_weights=False"):
        trained(model, optimizer, 1)
    assert not on_disk(model) and not optimizer.state
    with pytest.raises(HostMemoryError):
        pair(tmp_path, Row(0.8, base=False), disk_weights=False)
    with pytest.raises(DiskError, match="disk_memory=32 KiB"):
        pair(tmp_path, Row(0.6, base=False), disk_memory="32KiB")
    row = Row(0.97, in_backward=True)
    plain, _, model, optimizer = pair(
        tmp_path, row, disk_memory=int(2.1 * size_of(made(base=True)))
    )
    with pytest.raises(HostMemoryError, match="disk_memory="):
        trained(model, optimizer, 1)
    assert equal(plain, model) and all(p.grad is None for p in model.parameters())


AT: dict[str, set[int]] = {}  # calls that run out of memory, by what calls: forward or backward
CALLS = {"forward": 0, "backward": 0}


def _used(what: str) -> None:
    CALLS[what] += 1
    if CALLS[what] in AT.get(what, ()):
        if "repeated" in AT:  # and so does the forward that repeats it
            AT["forward"] = {CALLS["forward"] + call for call in AT.pop("repeated")}
        raise torch.OutOfMemoryError("planted: out of memory")


@torch.library.custom_op("tests::exhausting", mutates_args=())
def exhausting(x: Tensor) -> Tensor:
    """The identity, which runs out of memory at some calls."""
    _used("forward")
    return x.clone()


@torch.library.custom_op("tests::exhausting_backward", mutates_args=())
def exhausting_backward(x: Tensor) -> Tensor:
    """The same, in a backward."""
    _used("backward")
    return x.clone()


exhausting.register_fake(lambda x: torch.empty_like(x))
exhausting_backward.register_fake(lambda x: torch.empty_like(x))
exhausting.register_autograd(lambda ctx, grad: exhausting_backward(grad))


@pytest.fixture(autouse=True)
def _nothing_runs_out() -> Iterator[None]:
    AT.clear()
    yield
    AT.clear()


def run_out(what: str, *calls: int) -> None:
    AT[what] = {CALLS[what] + call for call in calls}


def tower() -> Tower:
    """Layers with dropout, so that a step that is repeated must draw the same numbers."""
    torch.manual_seed(0)
    layers = (nn.Linear(16, 16) for _ in range(4))
    return Tower(layers, lambda layer, x: x + F.dropout(F.gelu(exhausting(layer(x))), 0.5))


def dropping(**options: Any) -> Any:
    options = {"gpu_memory": 2**20, **options}
    return megacompile(tower(), device="cpu", lowering="eager", **options)


def steps(model: nn.Module, count: int = 3) -> list[Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(0)
    losses = []
    for i in range(count):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(i))
        for _ in range(2):  # accumulates
            loss = model(x)
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses


REPEATED = [  # what runs out, at which of its calls, whether buckets live on the device
    ("forward", (1,), 0),
    ("backward", (7,), 0),
    ("backward", (3, 9, 14), "auto"),  # steps down as often as it must
    ("repeated", (2,), "auto"),  # a backward, and the forward that repeats it
]


@pytest.mark.parametrize(("what", "calls", "resident"), REPEATED)
def test_the_step_is_repeated_with_the_same_numbers(
    what: str, calls: tuple[int, ...], resident: Any
) -> None:
    """Less is kept afterwards, and the slots of the old plan are given back."""
    plain, model = tower(), dropping(resident=resident)
    want = [*steps(plain, 1), *steps(plain)]
    first = steps(model, 1)  # in which custom operators are tried out too
    kept = max(len(s.plan.keep) for s in schedules(model))
    slots = [weakref.ref(buffer) for buffer in inside.machine(model).slots.buffers]
    if what == "repeated":
        run_out("backward", 7)
        AT[what] = set(calls)
    else:
        run_out(what, *calls)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = [*first, *steps(model)]
    said = {str(w.message) for w in caught if "repeated" in str(w.message)}
    assert len(said) == len(calls) + (what == "repeated"), "each with a smaller budget"
    assert torch.equal(torch.stack(want), torch.stack(got)) and equal(plain, model)
    if not resident:
        assert max(len(s.plan.keep) for s in schedules(model)) < kept
        assert slots and not any(buffer() is not None for buffer in slots)


@pytest.mark.filterwarnings("ignore:megacompile")
def test_when_nothing_is_left_to_give_it_is_an_error() -> None:
    model = dropping(resident=0)
    steps(model, 1)
    for what in ("forward", "backward"):
        run_out(what, *range(1, 1000))
        with pytest.raises(DeviceMemoryError, match=what):
            steps(model)
        AT.clear()
        steps(model, 1)  # goes on
    unplanned = dropping(gpu_memory=None)
    steps(unplanned, 1)
    run_out("forward", 2)
    with pytest.raises(DeviceMemoryError):
        steps(unplanned)


@pytest.mark.filterwarnings("ignore:megacompile")
def test_what_cannot_be_repeated_is_an_error() -> None:
    """A buffer that the forward has changed; another forward that waits for its backward."""
    model = dropping(resident=0)
    x = torch.ones(8, 16)
    first, second = model(x), model(x)
    run_out("backward", 2)
    with pytest.raises(DeviceMemoryError):
        second.backward()
    AT.clear()
    first.backward()
    layers = (nn.ModuleList([nn.Linear(16, 16), nn.BatchNorm1d(16)]) for _ in range(4))
    normed = Tower(layers, lambda layer, x: layer[1](exhausting(layer[0](x))))  # type: ignore[index]
    megacompile(normed, device="cpu", gpu_memory=2**20)
    normed(x).backward()
    for what in ("forward", "backward"):
        run_out(what, 2)
        with pytest.raises(DeviceMemoryError, match="gpu_memory="):
            normed(x).backward()
        AT.clear()
