"""The garbage collector while plans are made."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from megacompile import megacompile
from megacompile.garbage import every_object, old_objects_left_out


def test_the_collector_is_as_before_afterwards_whatever_happens() -> None:
    before = gc.get_threshold()
    old = [object()]
    with pytest.raises(KeyError), old_objects_left_out():
        assert gc.get_freeze_count() and gc.get_threshold()[0] > before[0]
        with old_objects_left_out():
            pass
        assert gc.get_freeze_count() and gc.get_threshold()[0] > before[0]
        assert any(each is old for each in every_object())
        assert not any(each is old for each in gc.get_objects())
        raise KeyError
    assert gc.get_threshold() == before and not gc.get_freeze_count()
    assert any(each is old for each in every_object())


def test_who_never_wants_it_to_run_is_heeded() -> None:
    before = gc.get_threshold()
    gc.set_threshold(0)
    try:
        with old_objects_left_out():
            assert gc.get_threshold()[0] == 0
    finally:
        gc.set_threshold(*before)


def test_where_somebody_has_frozen_objects_they_stay_so() -> None:
    gc.freeze()
    try:
        most = gc.get_freeze_count()
        least = 0.99 * most  # other threads let some of them die
        with old_objects_left_out():
            assert least <= gc.get_freeze_count() <= most
        assert least <= gc.get_freeze_count() <= most
    finally:
        gc.unfreeze()


def test_a_capture_is_quiet_and_a_run_is_not() -> None:
    """The model looks itself: while it is captured, and in a hook of the backward."""
    frozen: list[bool] = []

    class Looks(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if torch.compiler.is_compiling():
                look()
            return super().forward(x)

    @torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
    def look() -> int:  # runs while Dynamo captures
        frozen.append(gc.get_freeze_count() > 0)
        return 0

    model = megacompile(Looks(4, 4), device="cpu", lowering="eager", progress=False)
    for _ in range(2):
        x = torch.ones(2, 4, requires_grad=True)
        out = model(x).sum()
        x.register_hook(lambda grad: frozen.append(gc.get_freeze_count() > 0))
        out.backward()
    assert frozen[-2:] == [False, False]
    assert not gc.get_freeze_count()
