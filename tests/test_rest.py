"""What no schedule's update makes of a step is made by a graph of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import AdamW

from megacompile.runtime.ops.executor import Executor
from tests import inside, zoo
from tests.zoo import Block, assert_close, assert_same, batch, step, twins


def by_hand(model: Any, optimizer: AdamW) -> None:
    """Steps over gradients that no backward has made."""
    with torch.no_grad():
        model(**batch())
    for value in (0.5, 1.5):
        for param in model.parameters():
            param.grad = torch.full_like(param, value)
        optimizer.step()


def by_backward(model: Any, optimizer: AdamW) -> None:
    for _ in range(3):
        optimizer.zero_grad()
        step(model, batch())
        optimizer.step()


@pytest.mark.parametrize(
    ("trained", "options"),
    [
        (by_hand, {}),
        (by_hand, {"lowering": "inductor", "resident": "all"}),
        (by_backward, {"lowering": "inductor", "device_update": 1.0}),
    ],
    ids=["streamed", "resident", "device update"],
)
def test_buckets_of_one_label_are_two(
    trained: Callable[[Any, AdamW], None], options: dict[str, Any]
) -> None:
    """Each captured graph counts its buckets from 0."""
    plain, streamed = twins(zoo.graph_break()[0], **options)
    for model in (plain, streamed):
        trained(model, AdamW(model.parameters(), lr=1e-2))
    if options:
        assert_close(plain, streamed, tolerance=2e-5)
    else:
        assert_same(plain, streamed)


def test_a_model_that_has_shrunk_since_its_backward() -> None:
    plain, streamed = twins(zoo.stack()[0])
    for model in (plain, streamed):
        optimizer = AdamW(model.parameters(), lr=1e-2)
        step(model, batch())
        del model.layers[2]
        with torch.no_grad():
            model(**batch())
        optimizer.step()
    assert_same(plain, streamed)


def test_a_layer_that_was_replaced_has_no_states_that_were_learned() -> None:
    plain, streamed = twins(zoo.stack()[0], lowering="inductor", device_update=1.0)
    for model in (plain, streamed):
        optimizer = AdamW(model.parameters(), lr=1e-2)
        by_backward(model, optimizer)
        torch.manual_seed(3)
        model.layers[0] = Block()
        optimizer.add_param_group({"params": list(model.layers[0].parameters())})
        by_backward(model, optimizer)
    assert_close(plain, streamed, tolerance=2e-5)


def test_it_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where two optimizers take turns."""
    made: list[str] = []
    init = Executor.__init__

    def counted(self: Executor, schedule: Any, machine: Any) -> None:
        made.append(schedule.name)
        init(self, schedule, machine)

    monkeypatch.setattr(Executor, "__init__", counted)
    _, streamed = twins(zoo.stack()[0])
    half = list(streamed.parameters())
    optimizers = [AdamW(half[: len(half) // 2]), AdamW(half[len(half) // 2 :])]
    for _ in range(3):
        for param in half:
            param.grad = torch.ones_like(param)
        for optimizer in optimizers:
            optimizer.step()
    assert made == ["the rest of a step"] * 2


def test_executors_that_are_gone_are_not_remembered() -> None:
    _, streamed = twins(zoo.stack()[0])
    machine = inside.machine(streamed)

    class Ran:
        """An executor whose backward ran."""

    for _ in range(9):
        machine.note_backward(Ran())
    last = Ran()
    machine.note_backward(last)
    assert [reference() for reference in machine.trained] == [last]
