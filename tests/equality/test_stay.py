"""Forwards without a backward that follow one another: what stays in slots is not fetched again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megacompile import megacompile, schedules, trace
from megacompile.errors import ScheduleError
from megacompile.ir import ops
from tests import inside

X = torch.linspace(-1, 1, 24).view(3, 8)


def net() -> Any:
    """Layers in a row, called "0", "1" and so on."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6)))


def weight(model: Any) -> nn.Parameter:
    found: nn.Parameter = model[3][0].weight
    return found


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


def test_what_is_proved_of_it() -> None:
    """A forward takes what the one before left there, and leaves the same for the next."""
    model = megacompile(net(), progress=False, slots=5)
    with torch.no_grad():
        model(X)
        model(X)
    (schedule,) = schedules(model)
    staying = ops.nodes_of(schedule.forward, ops.reuse)
    inside.prove(schedule)
    with pytest.raises(ScheduleError):
        inside.prove(replace(schedule, reused=schedule.reused[1:]))
    filled = schedule.copy()
    slot = ops.arguments(ops.nodes_of(filled.forward, ops.reuse)[0])[1]
    ops.nodes_of(filled.forward, ops.prefetch)[-1].update_arg(1, slot)
    with pytest.raises(ScheduleError):
        inside.prove(filled)
    model(X).sum().backward()
    trained = next(each for each in schedules(model) if each.backward is not None).copy()
    ops.nodes_of(trained.forward, ops.prefetch)[0].target = ops.reuse
    with pytest.raises(ScheduleError):
        inside.prove(trained)
    assert staying
