"""Planning makes millions of small objects, which the garbage collector would look through often,
with all that torch and the model have made."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

_OFTEN: list[tuple[int, int, int]] = []  # thresholds from before, while old objects are left out
_OBJECTS = 300_000  # new ones, about 30 MiB, that the collector waits for; Python's default: 700
OF_A_PLAN = 6_000_000  # more than `plan` makes for a large model; about 600 MiB


@contextlib.contextmanager
def old_objects_left_out(objects: int = _OBJECTS) -> Iterator[None]:
    """For its duration, the collector looks through what is made in it alone, and seldom.

    A search then takes a third of its time. Where other code has frozen objects, nothing is
    done: they could not be told from ours afterwards. Within itself it does nothing more.

    Args:
        objects: so many new ones it waits for. What is not collected by then is collected
            afterwards: more of them save time only where the process ends.
    """
    if _OFTEN or gc.get_freeze_count():  # the list first: to count a million objects takes 45 ms
        yield
        return
    often = gc.get_threshold()
    gc.freeze()
    try:
        _OFTEN.append(often)
        if often[0]:  # 0: never
            gc.set_threshold(max(objects, often[0]), *often[1:])
        yield
    finally:
        take_old_objects_in()


def take_old_objects_in() -> None:
    """End the block of `old_objects_left_out` that this is in, if any: what follows may run long,
    and is no planning."""
    if _OFTEN:
        gc.set_threshold(*_OFTEN.pop())
        gc.unfreeze()


def every_object() -> list[Any]:
    """The objects that the collector knows, and those that `old_objects_left_out` leaves out."""
    if not _OFTEN:
        return gc.get_objects()
    gc.unfreeze()
    try:
        return gc.get_objects()
    finally:
        gc.freeze()
