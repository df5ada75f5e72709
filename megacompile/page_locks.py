"""Page-locked memory of this process: how much there is, and where the system has refused more.

It is not known in advance how much can be locked. `ulimit -l` is not asked by NVIDIA's driver.
Under WSL 2 it is what Windows lends, which can be as little as 0.5 GiB; some containers allow none.
So the limit is found by trying: what was refused once is not asked for again, and buffers that are
not locked are pageable. The numbers are the same. Their copies are slower, and plans allow for
that (`megacompile.cost.pageable`).
"""

from __future__ import annotations

import contextlib

import torch

from megacompile import notices
from megacompile.text import format_bytes


class PageLocks:
    """Page locks, and those that the system refused, by the address of buffers."""

    def __init__(self) -> None:
        self._locked: dict[int, int] = {}  # dictionaries, because several threads lock
        self._pageable: dict[int, int] = {}
        self._refused_bytes: int | None = None  # in all, with the smallest that was refused
        self._said = False

    @property
    def locked_bytes(self) -> int:
        """Bytes of all buffers of this process that are locked now."""
        return sum(list(self._locked.values()))

    @property
    def pageable_bytes(self) -> int:
        """Bytes of those that should be locked, and are not."""
        return sum(list(self._pageable.values()))

    @property
    def limit_bytes(self) -> int | None:
        """Bytes that can be locked in all, as far as is known; None: nothing was refused yet."""
        return None if self._refused_bytes is None else self.locked_bytes

    def lock(self, address: int, size_bytes: int) -> bool:
        """Lock whole pages for CUDA; False where they stay pageable."""
        if address in self._locked:
            return True
        now = self.locked_bytes + size_bytes
        if self._refused_bytes is None or now < self._refused_bytes:
            error = int(torch.cuda.cudart().cudaHostRegister(address, size_bytes, 0))
            if not error:
                self._locked[address] = size_bytes
                self._pageable.pop(address, None)
                return True
            self._refused_bytes = now
            _forget_error()
            self._say(size_bytes, error)
        self._pageable[address] = size_bytes
        return False

    def unlock(self, address: int) -> None:
        """The memory goes. A copy may be under way: it is waited for."""
        self._pageable.pop(address, None)
        try:
            if address in self._locked and torch.cuda.is_initialized():
                torch.cuda.synchronize()
                torch.cuda.cudart().cudaHostUnregister(address)
        finally:
            self._locked.pop(address, None)  # not before: another thread may lock meanwhile

    def _say(self, size_bytes: int, error: int) -> None:
        if self._said:
            return
        self._said = True
        notices.warn(
            f"megacompile: cudaHostRegister of {format_bytes(size_bytes)} failed with error "
            f"{error}, with {format_bytes(self.locked_bytes)} locked: memory that the "
            "system will not lock stays pageable, copies from and to it run at about half the "
            "speed, and plans allow for that (said once)",
            notices.Whose.RANK,
        )


PAGE_LOCKS = PageLocks()  # of this process, as the limit is


def pinned_empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A small host tensor for a copy: page-locked, where the system allows it."""
    try:
        return torch.empty(shape, dtype=dtype, pin_memory=True)
    except RuntimeError:  # torch has forgotten the error
        return torch.empty(shape, dtype=dtype)


def _forget_error() -> None:
    """CUDA keeps the last error of a thread, and the next kernel would raise it in torch's name.
    Launch one here, which consumes it."""
    with contextlib.suppress(RuntimeError, AssertionError):  # or torch has no CUDA
        torch.ones(1, device="cuda")
