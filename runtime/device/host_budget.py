"""How much host memory a model's buffers take, and no more than they may."""

from __future__ import annotations

import itertools
import weakref

from megacompile.errors import HostMemoryError
from megacompile.host_memory import check_host_memory
from megacompile.runtime.device.buffers import HostBuffer
from megacompile.text import format_bytes


class HostBudget:
    """Makes host buffers.

    Args:
        limit_bytes: of all that live at a time; None: what the machine has.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.limit_bytes = limit_bytes
        self._sizes: dict[int, int] = {}  # of what lives; a finalizer may come at any time
        self._next = itertools.count()

    @property
    def held_bytes(self) -> int:
        """Of all that live now."""
        return sum(list(self._sizes.values()))

    def make(self, size_bytes: int, what: str, *, pin: bool, touch: bool = True) -> HostBuffer:
        """A buffer.

        Args:
            what: it is for.

        Raises:
            HostMemoryError: there is too little, or the limit is reached. The kernel would kill the
                process later, when the memory is touched.
        """
        if self.limit_bytes is not None and self.held_bytes + size_bytes > self.limit_bytes:
            raise HostMemoryError(
                f"megacompile(): host_memory is {format_bytes(self.limit_bytes)}; "
                f"{format_bytes(self.held_bytes)} of it are taken, and {what} needs "
                f"{format_bytes(size_bytes)} more; raise host_memory=, or use fewer or smaller "
                "optimizer states (state_dtype='int8')"
            )
        check_host_memory([(what, size_bytes)])
        buffer = HostBuffer(size_bytes, pin=pin, touch=touch)
        key = next(self._next)
        self._sizes[key] = size_bytes
        weakref.finalize(buffer, self._sizes.pop, key).atexit = False
        return buffer
