"""A garbage collector that runs seldom and skips old objects, for planning, which creates millions
of small objects."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

_OFTEN: list[tuple[int, int, int]] = []  # previous thresholds, inside `old_objects_left_out`
_OBJECTS = 300_000  # allocations between collections, about 30 MiB; Python's default is 700
OF_A_PLAN = 6_000_000  # more than `plan` allocates for a large model; about 600 MiB


@contextlib.contextmanager
def old_objects_left_out(objects: int = _OBJECTS) -> Iterator[None]:
    """A context in which the collector scans only objects created inside, every `objects`
    allocations. A search then takes a third of its time. Has no effect inside another such context,
    or if other code has frozen objects, which could not be told apart afterwards."""
    if _OFTEN or gc.get_freeze_count():  # the list first: counting a million objects takes 45 ms
        yield
        return
    often = gc.get_threshold()
    gc.freeze()
    try:
        _OFTEN.append(often)
        if often[0]:  # 0 disables the collector
            gc.set_threshold(max(objects, often[0]), *often[1:])
        yield
    finally:
        take_old_objects_in()


def take_old_objects_in() -> None:
    """End the enclosing `old_objects_left_out`, if any, before long work that is not planning."""
    if _OFTEN:
        gc.set_threshold(*_OFTEN.pop())
        gc.unfreeze()


def every_object() -> list[Any]:
    """All objects that the collector tracks, frozen ones included."""
    if not _OFTEN:
        return gc.get_objects()
    gc.unfreeze()
    try:
        return gc.get_objects()
    finally:
        gc.freeze()
