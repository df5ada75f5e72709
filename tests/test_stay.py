"""Forwards without a backward that follow one another: what stays in slots is not fetched again."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megacompile import megacompile, schedules
from megacompile.errors import ScheduleError
from megacompile.ir import ops
from megacompile.ir.schedule import Schedule
from megacompile.runtime.ops.weights import WeightOps
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

    def __init__(self, **options: object) -> None:
        torch.manual_seed(0)
        self.plain = Net()
        self.model = megacompile(copy.deepcopy(self.plain), progress=False, **options)  # type: ignore[arg-type]
        self.fetched: list[str] = []

    def forward(self, x: Tensor = X) -> str:
        """Run both, which are equal; gives the buckets that were fetched."""
        self.fetched.clear()
        with torch.no_grad():
            assert torch.equal(self.model(x), self.plain(x))
        return " ".join(self.fetched)

    def both(self, change: Callable[[Net], object]) -> None:
        for model in (self.plain, self.model):
            change(model)

    def schedule(self, **_: object) -> Schedule:
        return schedules(self.model)[-1]


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Pair]]:
    made: list[Pair] = []
    prefetch = WeightOps.prefetch

    def noted(self: WeightOps, bucket: object, slot: object, **after: object) -> object:
        for each in made:
            if self.machine is inside.machine(each.model):
                each.fetched.append(bucket.label)  # type: ignore[attr-defined]
        return prefetch(self, bucket, slot, **after)  # type: ignore[arg-type]

    monkeypatch.setattr(WeightOps, "prefetch", noted)

    def make(**options: object) -> Pair:
        made.append(Pair(**options))
        return made[-1]

    yield make


ALL = "0 1 2 3 4 5"


@pytest.mark.parametrize(
    ("slots", "again"), [(None, ALL), (3, ALL), (4, "1 2 3 4 5"), (5, "1 2 4 5"), (6, ""), (9, "")]
)
def test_what_has_a_slot_of_its_own_is_fetched_once(
    pair: Callable[..., Pair], slots: int | None, again: str
) -> None:
    both = pair(slots=slots)
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


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_in_between_is_seen(
    pair: Callable[..., Pair], change: Callable[[Net], object]
) -> None:
    both = pair(slots=6)
    for _ in range(2):
        both.forward()
        assert both.forward() == ""
        both.both(change)
    assert both.forward() != ""
    assert both.forward() == "", "and then it is fetched no more"


def test_nothing_stays_whose_memory_somebody_else_can_write(pair: Callable[..., Pair]) -> None:
    both = pair(slots=6)
    aliases = [weight(model, 3).detach() for model in (both.plain, both.model)]
    both.forward()
    for alias in aliases:
        alias.mul_(2)
    assert both.forward() == ALL
    del alias, aliases
    assert [both.forward() for _ in range(2)] == [ALL, ""]


def test_another_shape_takes_what_is_there(pair: Callable[..., Pair]) -> None:
    """A prompt, then its tokens."""
    both = pair(slots=6)
    assert [both.forward(X), both.forward(X[:1]), both.forward(X[:2])] == [ALL, "", ""]


def test_training_gives_the_slots_back_and_evaluation_takes_them_again(
    pair: Callable[..., Pair],
) -> None:
    both = pair(slots=5, device_update=0)
    machine = inside.machine(both.model)
    both.forward()
    for _ in range(2):
        assert both.forward() == "1 2 4 5" and len(machine.slots.buffers) == 5
        both.both(_stepped)
        both.fetched.clear()
        assert both.forward() == ALL


def test_memory_of_what_may_not_stay_is_given_back_too(pair: Callable[..., Pair]) -> None:
    both = pair(slots=6)
    slots = inside.machine(both.model).slots
    alias = [weight(model, 3).detach() for model in (both.plain, both.model)]
    assert [both.forward(), both.forward()] == [ALL, ALL] and alias
    assert len(slots.buffers) == 6
    both.both(lambda model: model(X).sum().backward())
    training = next(s for s in schedules(both.model) if s.backward is not None)
    assert len(slots.buffers) == len(training.slots)


def test_evaluation_between_steps_compiles_once(
    pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    both = pair(slots=6)
    streamed = inside.streamed(both.model)
    made: list[object] = []
    plan = streamed.buckets.plans.plan

    def noted(*args: Any) -> Schedule:
        made.append(args)
        return plan(*args)

    monkeypatch.setattr(streamed.buckets.plans, "plan", noted)

    def loop(steps: int) -> None:
        for _ in range(steps):
            for model in (both.plain, both.model):
                model.train()
            both.both(_stepped)
            for model in (both.plain, both.model):
                model.eval()
            both.forward()
            both.forward()

    loop(2)
    count, graphs = len(made), len(streamed.graphs)
    assert count
    loop(3)
    assert (len(made), len(streamed.graphs)) == (count, graphs)


# --- the proof


def warm() -> Schedule:
    model = megacompile(Net(), progress=False, slots=5)
    with torch.no_grad():
        model(X)
        model(X)
    (schedule,) = schedules(model)
    assert ops.nodes_of(schedule.forward, ops.reuse)
    verify(schedule)
    return schedule


def test_what_nobody_leaves_is_not_taken() -> None:
    schedule = warm()
    with pytest.raises(ScheduleError, match="no forward leaves it there"):
        verify(replace(schedule, reused=schedule.reused[1:]))


def test_a_forward_that_fills_the_slot_leaves_nothing_for_the_next() -> None:
    schedule = warm().copy()
    staying = ops.nodes_of(schedule.forward, ops.reuse)
    last = ops.nodes_of(schedule.forward, ops.prefetch)[-1]
    last.update_arg(1, ops.arguments(staying[0])[1])
    with pytest.raises(ScheduleError, match="the next forward expects bucket 0"):
        verify(schedule)


def test_a_forward_with_a_backward_takes_nothing_of_another() -> None:
    model = megacompile(Net(), progress=False, slots=6)
    model(X).sum().backward()
    (schedule,) = schedules(model)
    planted = schedule.copy()
    first = ops.nodes_of(planted.forward, ops.prefetch)[0]
    first.target = ops.reuse
    with pytest.raises(ScheduleError, match="no forward leaves it there"):
        verify(planted)
