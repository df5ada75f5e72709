"""What a step finds out once: for each parameter group, for all counters, for dense memory."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import AdamW

from megacompile import megacompile, updates
from megacompile.runtime.optim.adam import ADAM, USUAL
from megacompile.runtime.params.optimizer_states import count_up
from megacompile.runtime.step.groups import Groups
from tests.training import adamw, net, train
from tests.zoo import twins


def test_a_group_is_asked_once() -> None:
    group, other = dict(USUAL), {**USUAL, "lr": 1.0, "amsgrad": True}
    groups = Groups(ADAM)
    names = [groups.names(each) for each in (group, other, group)]
    assert names == [ADAM.state_names(each) for each in (group, other, group)]
    assert names[0] is names[2]
    asked: list[dict[str, Any]] = [
        {"step": 3.0, "first": False, "scale": 1.0},
        {"step": 4.0, "first": False, "scale": 1.0},
        {"step": 3.0, "first": False, "scale": 0.5},
    ]
    for each in (group, other):
        for options in asked:
            step = options["step"]
            found = groups.hyper(each, step, first=options["first"], scale=options["scale"])
            assert found == ADAM.hyper(each, **options)
            assert groups.hyper(each, step, first=False, scale=options["scale"]) is found


def test_all_counters_count() -> None:
    """Of any dtype, and numbers, which an old checkpoint may have."""
    dtypes = (torch.float32, torch.float64, torch.int64)
    states: list[dict[str, Any]] = [{"step": torch.tensor(2, dtype=dtype)} for dtype in dtypes]
    states += [{"step": 2}, {}, {"step": 2.0}]
    counters = [state.get("step") for state in states]
    count_up(states)
    assert [float(state["step"]) for state in states if state] == [3.0] * 5
    assert all(s["step"] is c for s, c in zip(states[:3], counters, strict=False)), "in place"
    assert [state["step"].dtype for state in states[:3]] == list(dtypes)


def test_resident_parameters_that_are_not_contiguous() -> None:
    """Each tensor is given to the update in the order of its memory."""
    models = [net(), net()]
    for model in models:
        for layer in model.layers:
            layer.up.weight.data = layer.up.weight.detach().t().contiguous().t()
            assert not layer.up.weight.is_contiguous()
    plain, streamed = models
    megacompile(streamed, device="cpu", lowering="inductor", resident="all", progress=False)
    for model in models:
        train(model, adamw(model), 3)
    assert set(updates(streamed).values()) == {"on the device, resident"}
    for want, got in zip(plain.parameters(), streamed.parameters(), strict=True):
        assert got.stride() == want.stride()
        assert (got - want).norm() <= 1e-5 * want.norm()


def test_the_options_of_each_group_are_heeded() -> None:
    """By a bucket that has parameters of both."""
    plain, streamed = twins(net(), resident="all", lowering="inductor", progress=False)
    for model in (plain, streamed):
        params = [p for p in model.parameters() if p.requires_grad]
        groups: list[dict[str, Any]] = [
            {"params": params[::2]},
            {"params": params[1::2], "lr": 3e-2, "amsgrad": True},
        ]
        train(model, [AdamW(groups, lr=1e-3)], 3)
    for want, got in zip(plain.parameters(), streamed.parameters(), strict=True):
        assert (got - want).norm() <= 1e-5 * want.norm()
