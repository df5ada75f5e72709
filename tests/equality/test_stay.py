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
from megacompile.ir.schedule import Schedule
from megacompile.verify.proof import verify
from tests import inside

X = torch.linspace(-1, 1, 24).view(3, 8)


class Net(nn.Module):
    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def weight(model: Net, layer: int) -> nn.Parameter:
    found: nn.Parameter = model.layers[layer][0].weight  # type: ignore[index]
    return found


class Pair:
    """A plain model and a megacompiled one; what the latter fetches in a forward."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        self.plain = Net()
        self.model = megacompile(copy.deepcopy(self.plain), progress=False, **options)

    def forward(self, x: Tensor = X) -> str:
        """Run both, which are equal; gives the buckets that were fetched."""
        with torch.no_grad(), trace(self.model) as recorded:
            assert torch.equal(self.model(x), self.plain(x))
        names = [span.op.name.partition("@")[0] for span in recorded.spans]
        fetched = [name for name in names if name.endswith("PREFETCH")]
        return " ".join(name.removesuffix("PREFETCH") for name in fetched)

    def both(self, change: Callable[[Net], object]) -> None:
        for model in (self.plain, self.model):
            change(model)

    def schedule(self) -> Schedule:
        return schedules(self.model)[-1]


ALL = "0 1 2 3 4 5"


@pytest.mark.parametrize(
    ("slots", "again"), [(None, ALL), (4, "1 2 3 4 5"), (5, "1 2 4 5"), (9, "")]
)
def test_what_has_a_slot_of_its_own_is_fetched_once(slots: int | None, again: str) -> None:
    both = Pair(slots=slots)
    assert [both.forward() for _ in range(3)] == [ALL, again, again]
    schedule = both.schedule()
    assert len(schedule.slots) <= (slots or 3)
    reused = [ops.arguments(n)[0].label for n in ops.nodes_of(schedule.forward, ops.reuse)]
    assert {*reused, *again.split()} == {*ALL.split()}, "what is printed is what runs"


def _data(model: Net) -> None:
    weight(model, 3).data.mul_(2)


def _in_place(model: Net) -> None:
    with torch.no_grad():
        weight(model, 3).mul_(2)


def _by_numpy(model: Net) -> None:
    weight(model, 3).detach().numpy()[0] = 3


def _replaced(model: Net) -> None:
    weight(model, 3).data = torch.ones(8, 8)


def _another(model: Net) -> None:
    model.layers[3][0].weight = nn.Parameter(torch.ones(8, 8))  # type: ignore[index]


def _loaded(model: Net) -> None:
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})


def _stepped(model: Net) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(X).sum().backward()
    optimizer.step()


CHANGES = (_data, _in_place, _by_numpy, _replaced, _another, _loaded, _stepped)


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
    aliases = [weight(model, 3).detach() for model in (both.plain, both.model)]
    both.forward()
    for alias in aliases:
        alias.mul_(2)
    assert both.forward() == ALL
    del alias, aliases
    assert [both.forward() for _ in range(2)] == [ALL, ""]


def test_another_shape_takes_what_is_there() -> None:
    """A prompt, then its tokens."""
    both = Pair(slots=6)
    assert [both.forward(X), both.forward(X[:1]), both.forward(X[:2])] == [ALL, "", ""]


def test_training_gives_the_slots_back_and_evaluation_takes_them_again() -> None:
    both = Pair(slots=5, device_update=0)
    machine = inside.machine(both.model)
    both.forward()
    made = []
    for _ in range(3):
        assert both.forward() == "1 2 4 5" and len(machine.slots.buffers) == 5
        both.both(_stepped)
        assert both.forward() == ALL
        made.append([id(executor) for executor in inside.executors(both.model)])
    assert made[2] == made[1], "nothing is compiled anew"


def test_memory_of_what_may_not_stay_is_given_back_too() -> None:
    both = Pair(slots=6)
    slots = inside.machine(both.model).slots
    alias = [weight(model, 3).detach() for model in (both.plain, both.model)]
    assert [both.forward(), both.forward()] == [ALL, ALL] and alias
    assert len(slots.buffers) == 6
    both.both(lambda model: model(X).sum().backward())
    training = next(s for s in schedules(both.model) if s.backward is not None)
    assert len(slots.buffers) == len(training.slots)


def test_what_is_proved_of_it() -> None:
    """A forward takes what the one before left there, and leaves the same for the next."""
    model = megacompile(Net(), progress=False, slots=5)
    with torch.no_grad():
        model(X)
        model(X)
    (schedule,) = schedules(model)
    staying = ops.nodes_of(schedule.forward, ops.reuse)
    verify(schedule)
    with pytest.raises(ScheduleError):
        verify(replace(schedule, reused=schedule.reused[1:]))
    filled = schedule.copy()
    slot = ops.arguments(ops.nodes_of(filled.forward, ops.reuse)[0])[1]
    ops.nodes_of(filled.forward, ops.prefetch)[-1].update_arg(1, slot)
    with pytest.raises(ScheduleError):
        verify(filled)
    model(X).sum().backward()
    trained = next(each for each in schedules(model) if each.backward is not None).copy()
    ops.nodes_of(trained.forward, ops.prefetch)[0].target = ops.reuse
    with pytest.raises(ScheduleError):
        verify(trained)
    assert staying
