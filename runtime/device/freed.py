"""Memory that was freed, and that malloc keeps for itself, goes back to the system.

What is below malloc's threshold for mappings (up to 32 MiB) is in its heap, and stays there when
it is freed. Parameters that moved to buckets would take their memory twice.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

BETWEEN_BYTES = 2**30  # are freed before it is worth the milliseconds


def give_back() -> None:
    """Returns to the system what malloc keeps of freed memory, where it is the GNU C library's."""
    trim = _trim()
    if trim is not None:
        trim(0)


@functools.cache
def _trim() -> Callable[[int], int] | None:
    try:
        found: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # another C library
        return None
    return found
