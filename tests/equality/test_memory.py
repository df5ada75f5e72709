"""What a step holds: saved tensors on the device and the host, host memory made ahead, slots.

Forwards without a backward follow one another: what stays in slots is not fetched again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from megacompile import megacompile, schedules, trace
from megacompile.ir import ops
from tests import inside, zoo
from tests.zoo import Stack, batch, loss_of, twins

OFFLOAD: dict[str, Any] = {"activations": "offload", "lookahead": 1}


def loss(model: Any, seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    return loss_of(model(**batch(seed)))


def test_device_memory_at_the_turn_does_not_grow_with_depth() -> None:
    """Where stage inputs wait on the host; where they stay, it does."""
    left: dict[str, list[int]] = {"offload": [], "recompute": []}
    for choice, found in left.items():
        for layers in (4, 7):
            _, model = twins(Stack(layers=layers), activations=choice, lookahead=1)
            found.append(inside.left_for_backward(loss(model, 0)))
    assert left["offload"][0] == left["offload"][1] > 0
    assert left["recompute"][0] < left["recompute"][1]


def test_host_memory_is_reused_from_step_to_step() -> None:
    """Never more than was in use at once; lost forwards and evaluations hold nothing."""
    plain, model = twins(Stack(layers=5), **OFFLOAD)
    pool, sizes = inside.machine(model).activations, set[int]()
    with torch.no_grad():
        loss(model, 0)
    assert pool.peak_bytes == 0, "an evaluation offloads nothing"
    for i in range(4):
        for each in (plain, model):
            loss(each, i).backward()
        lost = loss(model, i)
        del lost
        sizes.add(pool.held_bytes)
        assert sizes == {pool.peak_bytes} and pool.peak_bytes and pool.lent_bytes == 0
        zoo.assert_same(plain, model)


class Runtime:
    """Of CUDA, which is not there: every page is locked."""

    def cudaHostRegister(self, *args: int) -> int:
        return 0


def pinned(**options: Any) -> tuple[Any, Any]:
    """(a model whose buckets are as if a GPU copied from them, its optimizer)."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    optimizer = AdamW(model.parameters(), lr=1e-2)
    if options.pop("in_backward", False):
        options["optimizer"] = optimizer
    megacompile(model, device="cpu", progress=False, **options)
    for bucket in inside.machine(model).buckets.values():
        bucket.pin = True
    return model, optimizer


def held(model: Any) -> int:
    """Of host memory, when nothing is being made."""
    budget = inside.machine(model).host_budget
    budget.await_made()
    return budget.held_bytes


@pytest.mark.parametrize(
    ("options", "least"),
    [
        ({"in_backward": True}, 8),
        ({"in_backward": True, "state_dtype": "int8"}, 2),
        ({"lowering": "inductor"}, 4 + 8),
    ],
    ids=str,
)
def test_the_first_step_finds_its_memory(options: Any, least: float) -> None:
    """Made during the first forward, to the byte: a step holds no more, and none for nothing."""
    with mock.patch.object(torch.cuda, "cudart", Runtime):
        model, optimizer = pinned(**options)
        before = held(model)
        out = model(torch.randn(2, 64)).square().sum()
        ahead = held(model) - before
        out.backward()
        optimizer.step()
        assert held(model) - before == ahead
        numel = sum(param.numel() for param in model.parameters())
        assert numel * least <= ahead < 1.2 * numel * least and optimizer.state


def test_what_nobody_will_need_is_not_made_or_goes() -> None:
    """In evaluations; states that an optimizer makes itself; what was not asked for."""
    with mock.patch.object(torch.cuda, "cudart", Runtime):
        model, optimizer = pinned(lowering="eager")
        before = held(model)
        with torch.no_grad():
            model(torch.randn(2, 64))
        assert held(model) == before
        model(torch.randn(2, 64)).sum().backward()
        gradients = sum(param.nbytes for param in model.parameters())
        assert gradients <= held(model) - before < 1.2 * gradients
        optimizer.step()
        without = held(model)
        budget = inside.machine(model).host_budget
        budget.preallocate([inside.wanted(4096)], "states", torch.device("cpu"))
        assert held(model) == without + 4096
        other = SGD(model.parameters(), lr=0.0)
        for _ in range(2):
            model(torch.randn(2, 64)).sum().backward()
            other.step()
        assert held(model) == without and not budget.ahead


X = torch.linspace(-1, 1, 24).view(3, 8)


def net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6)))


def weight(model: Any) -> nn.Parameter:
    return model[3][0].weight


class Pair:
    """A plain model and a megacompiled one; what the latter fetches in a forward."""

    def __init__(self, **options: Any) -> None:
        self.plain = net()
        self.model = megacompile(copy.deepcopy(self.plain), progress=False, **options)

    def forward(self, x: Tensor = X) -> str:
        """Run both, which are equal; gives the buckets that were fetched."""
        with torch.no_grad(), trace(self.model) as recorded:
            assert torch.equal(self.model(x), self.plain(x))
        names = [span.op.name.partition("@")[0] for span in recorded.spans]
        fetched = [name for name in names if name.endswith("PREFETCH")]
        return " ".join(name.removesuffix("PREFETCH") for name in fetched)

    def both(self, change: Callable[[Any], object]) -> None:
        for model in (self.plain, self.model):
            change(model)


ALL = "0 1 2 3 4 5"


@pytest.mark.parametrize(
    ("slots", "again"), [(None, ALL), (4, "1 2 3 4 5"), (5, "1 2 4 5"), (9, "")]
)
def test_what_has_a_slot_of_its_own_is_fetched_once(slots: int | None, again: str) -> None:
    both = Pair(slots=slots)
    assert [both.forward() for _ in range(3)] == [ALL, again, again]
    (schedule,) = schedules(both.model)
    assert len(schedule.slots) <= (slots or 3)
    reused = [ops.arguments(n)[0].label for n in ops.nodes_of(schedule.forward, ops.reuse)]
    assert {*reused, *again.split()} == {*ALL.split()}, "what is printed is what runs"


def in_place(model: Any) -> None:
    with torch.no_grad():
        weight(model).mul_(2)


def by_numpy(model: Any) -> None:
    weight(model).detach().numpy()[0] = 3


def replaced(model: Any) -> None:
    weight(model).data = torch.ones(8, 8)


def another(model: Any) -> None:
    model[3][0].weight = nn.Parameter(torch.ones(8, 8))


def stepped(model: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(X).sum().backward()
    optimizer.step()


CHANGES = (in_place, by_numpy, replaced, another, stepped)


def test_a_change_in_between_is_seen() -> None:
    both = Pair(slots=6)
    for change in CHANGES:
        for _ in range(2):
            both.forward()
            assert both.forward() == ""
            both.both(change)
        assert both.forward() != "", change.__name__
        assert both.forward() == "", "and then it is fetched no more"


def test_nothing_stays_whose_memory_somebody_else_can_write() -> None:
    both = Pair(slots=6)
    aliases = [weight(model).detach() for model in (both.plain, both.model)]
    both.forward()
    for alias in aliases:
        alias.mul_(2)
    assert both.forward() == ALL
    del alias, aliases
    assert [both.forward(x) for x in (X, X, X[:1])] == [ALL, "", ""], "other sizes take it too"
    aliases = [weight(model).detach() for model in (both.plain, both.model)]
    assert [both.forward(), both.forward()] == [ALL, ALL] and aliases
    slots = inside.machine(both.model).slots
    assert len(slots.buffers) == 6
    both.both(lambda model: model(X).sum().backward())
    training = next(s for s in schedules(both.model) if s.backward is not None)
    assert len(slots.buffers) == len(training.slots), "memory of what may not stay goes too"


def test_training_gives_the_slots_back_and_evaluation_takes_them_again() -> None:
    both = Pair(slots=5, device_update=0)
    machine = inside.machine(both.model)
    both.forward()
    made = []
    for _ in range(3):
        assert both.forward() == "1 2 4 5" and len(machine.slots.buffers) == 5
        both.both(stepped)
        assert both.forward() == ALL
        made.append([id(executor) for executor in inside.executors(both.model)])
    assert made[2] == made[1], "nothing is compiled anew"
