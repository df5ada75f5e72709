"""The garbage collector while plans are made."""

from __future__ import annotations

import gc
from unittest import mock

import pytest
import torch
from torch import nn

from megacompile import megacompile
from megacompile.garbage import every_object, old_objects_left_out
from megacompile.runtime.model import autograd, streamed
from megacompile.runtime.model.captured import CapturedGraph


def test_the_collector_is_as_before_afterwards_whatever_happens() -> None:
    before = gc.get_threshold()
    with pytest.raises(KeyError), old_objects_left_out():
        assert gc.get_freeze_count() and gc.get_threshold()[0] > before[0]
        with old_objects_left_out():
            pass
        assert gc.get_freeze_count() and gc.get_threshold()[0] > before[0]
        raise KeyError
    assert gc.get_threshold() == before and not gc.get_freeze_count()


def test_what_is_left_out_is_not_counted_again() -> None:
    """To count walks through all of it."""
    with mock.patch.object(gc, "get_freeze_count", return_value=0) as count:
        with old_objects_left_out(), old_objects_left_out():
            pass
    assert count.call_count == 1


def test_who_never_wants_it_to_run_is_heeded() -> None:
    before = gc.get_threshold()
    gc.set_threshold(0)
    try:
        with old_objects_left_out():
            assert gc.get_threshold()[0] == 0
    finally:
        gc.set_threshold(*before)


def test_what_is_left_out_is_found() -> None:
    old = [object()]
    with old_objects_left_out():
        assert any(each is old for each in every_object())
        assert not any(each is old for each in gc.get_objects())
        count = gc.get_freeze_count()
        assert count
    assert any(each is old for each in every_object()) and not gc.get_freeze_count()


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


def test_a_capture_and_what_is_made_of_it_are_quiet_and_runs_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    frozen: dict[str, bool] = {}

    def note(what: str, owner: object, name: str) -> None:
        original = getattr(owner, name)

        def noting(*args: object) -> object:
            frozen[what] = gc.get_freeze_count() > 0
            return original(*args)

        monkeypatch.setattr(owner, name, noting)

    note("captured", streamed.StreamedModel, "_capture")  # at the end of Dynamo's work
    note("planned", CapturedGraph, "_plan")
    note("run", autograd, "run")
    model = megacompile(nn.Linear(4, 4), device="cpu", lowering="eager")
    for size in (2, 3):
        model(torch.ones(size, 4)).sum().backward()
        assert frozen.pop("planned") is True and frozen.pop("run") is False
        assert frozen.pop("captured") is (size == 2)
    assert not gc.get_freeze_count()
