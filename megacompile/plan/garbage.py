"""Planning makes thousands of small objects, which the garbage collector would look through often,
with all that torch and the model have made."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def old_objects_left_out() -> Iterator[None]:
    """For its duration, the collector looks through what is made in it alone.

    A search then takes half of its time. Where somebody else has frozen objects, nothing is done:
    they could not be told from ours afterwards.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
