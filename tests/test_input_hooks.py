"""The hook of transformers and PEFT that lets inputs require grad does not break the graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megacompile import compat, megacompile, schedules
from tests import inside, quantized
from tests.quantized import OWN


def hooked(kind: str) -> quantized.Model:
    def make_inputs_require_grads(module: Any, args: Any, output: torch.Tensor) -> None:
        output.requires_grad_(True)

    model = quantized.model(OWN[kind])
    model.embed.register_forward_hook(make_inputs_require_grads)
    return model


@pytest.mark.parametrize("kind", OWN)
def test_one_graph_and_the_plain_numbers(kind: str) -> None:
    expected = quantized.trained(hooked(kind), steps=2)
    model = megacompile(hooked(kind), lowering="eager")
    found = quantized.trained(model, steps=2)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    (schedule,) = schedules(model)
    assert len(schedule.stages) == 5


def test_hooks_are_themselves_between_calls() -> None:
    model = megacompile(hooked("wrapper"), lowering="eager")
    (hook,) = compat.forward_hooks_of(model.embed).values()
    ids = torch.arange(16).view(2, 8)
    model(ids).backward()
    assert list(compat.forward_hooks_of(model.embed).values()) == [hook]
    with torch.no_grad():
        model(ids)
    assert list(compat.forward_hooks_of(model.embed).values()) == [hook]
    assert [len(schedule.stages) for schedule in schedules(model)] == [5, 5]


def test_hooks_that_pile_up_capture_nothing_anew() -> None:
    """TRL turns checkpoints off and on in every step, and transformers adds a hook each time."""
    plain, model = hooked("wrapper"), megacompile(hooked("wrapper"), lowering="eager")
    order: list[str] = []
    ids = torch.arange(16).view(2, 8)
    for step in range(4):
        for each in (plain, model):
            each.zero_grad()
            hook = next(iter(compat.forward_hooks_of(each.embed).values()))
            each.embed.register_forward_hook(hook)
            each(ids).backward()
        assert all(
            torch.equal(a.grad, b.grad)
            for a, b in zip(plain.parameters(), model.parameters(), strict=True)
            if a.grad is not None and b.grad is not None
        )
        hooks = compat.forward_hooks_of(model.embed)
        assert list(hooks) == sorted(hooks) and len(hooks) == step + 2
    assert len(inside.streamed(model).graphs) == 1
    model.embed.register_forward_hook(lambda module, args, out: order.append("another"))
    model.embed.register_forward_hook(hook)  # behind another, so it is not left out
    model(ids)
    hooks = compat.forward_hooks_of(model.embed)
    assert list(hooks) == sorted(hooks) and len(hooks) == 7
    assert order == ["another"]


def test_other_hooks_are_left() -> None:
    model = quantized.model(quantized.wrapped)
    seen: list[torch.Size] = []
    model.embed.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    megacompile(model, lowering="eager")(torch.arange(16).view(2, 8))
    assert seen == [torch.Size([2, 8, 128])]


def test_minus_zero_changes_no_bit() -> None:
    numbers = torch.tensor([0.0, -0.0, 1.5, float("-inf"), 1e-45])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        given = numbers.to(dtype)
        added = given + torch.full((), -0.0)
        assert torch.equal(added.view(torch.uint8), given.view(torch.uint8))
