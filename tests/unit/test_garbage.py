"""The garbage collector while plans are made."""

from __future__ import annotations

import gc

import pytest

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
