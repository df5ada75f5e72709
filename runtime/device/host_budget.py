"""Allocates the host memory of a model's buffers within a limit.

[Note: buffers allocated in advance] Allocating the pages of a gigabyte takes 0.1 s, and locking
them 0.2 s: for 40 GiB of gradients and states, 9 s of a first step of 65 s, which other parts of
that step can hide. So a thread allocates buffers in advance. A caller takes a ready buffer of its
size, waits for one that is being allocated, or else allocates its own.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import weakref
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future

import torch

from megacompile import numa
from megacompile.errors import HostMemoryError
from megacompile.host_memory import check_host_memory
from megacompile.progress import phase
from megacompile.runtime.device.background import Background, fulfil, is_over
from megacompile.runtime.device.buffers import HostBuffer, Wanted
from megacompile.text import format_bytes

_WAIT = "allocating host memory"  # touches and locks its pages


class HostBudget:
    """Allocates a model's host buffers, in any thread, and keeps their total within a limit.

    Args:
        limit_bytes: limit of all live buffers together; None: the machine's memory.
        node: the NUMA node near the device that copies from and to them; None: any.
    """

    def __init__(self, limit_bytes: int | None = None, node: numa.Node | None = None) -> None:
        self.limit_bytes = limit_bytes
        self.node = node
        self._sizes: dict[int, int] = {}  # of live buffers; a finalizer may run at any time
        self._buffers: weakref.WeakValueDictionary[int, HostBuffer] = weakref.WeakValueDictionary()
        self._next = itertools.count()
        self._ahead: dict[tuple[int, bool], deque[Future[HostBuffer]]] = {}  # being allocated
        self._maker = Background("megacompile-host-memory")

    @property
    def held_bytes(self) -> int:
        """Bytes of all live buffers."""
        return sum(list(self._sizes.values()))

    @property
    def locked_bytes(self) -> int:
        """Bytes of the live page-locked buffers."""
        return sum(len(buffer) for buffer in list(self._buffers.values()) if buffer.locked)

    def make(self, size_bytes: int, what: str, *, pin: bool, touch: bool = True) -> HostBuffer:
        """Return a new buffer, or one allocated in advance.

        Args:
            what: names the purpose of the buffer in errors.

        Raises:
            HostMemoryError: too little memory, or the limit is reached. Without this check the
                kernel would kill the process when the memory is touched.
        """
        if touch and (ready := self.ready(size_bytes, pin=pin)) is not None:
            return ready
        try:
            return self._new(size_bytes, what, pin=pin, touch=touch)
        except HostMemoryError:
            if not self._ahead:
                raise
        self.drop_preallocated()  # frees buffers that may never be requested
        self.await_made()  # and those being allocated
        return self._new(size_bytes, what, pin=pin, touch=touch)

    def ready(self, size_bytes: int, *, pin: bool) -> HostBuffer | None:
        """Return a buffer that was allocated in advance or is being allocated."""
        try:
            future = self._ahead[size_bytes, pin].popleft()
        except (KeyError, IndexError):  # another thread may have freed it
            return None
        with phase(_WAIT):
            if future.cancel() or future.exception() is not None:
                return None
            return future.result()

    def preallocate(self, wanted: Iterable[Wanted], what: str, device: torch.device) -> None:
        """Allocate buffers in the background; `make` returns them for matching requests.

        Args:
            what: names their purpose in errors.
            device: the device whose copies need page-locked memory.
        """
        for each in wanted:
            future: Future[HostBuffer] = Future()
            self._ahead.setdefault((each.size_bytes, each.pin), deque()).append(future)
            make = functools.partial(_make_ahead, weakref.ref(self), future, what, device, each)
            self._maker.submit(make)

    def drop_preallocated(self) -> None:
        """Free the buffers that were allocated in advance but never requested."""
        while self._ahead:
            _, futures = self._ahead.popitem()
            while futures:
                futures.popleft().cancel()

    def await_made(self) -> None:
        """Wait until no buffer is being allocated. Dropped buffers have no memory then."""
        self._maker.call(lambda: None)

    def _new(self, size_bytes: int, what: str, *, pin: bool, touch: bool) -> HostBuffer:
        key = next(self._next)
        self._sizes[key] = size_bytes  # count first: other threads allocate buffers too
        try:
            self._check(size_bytes, what)
            with phase(_WAIT):
                buffer = HostBuffer(size_bytes, pin=pin, touch=touch, node=self.node)
        except BaseException as error:
            del self._sizes[key]
            if isinstance(error, OSError) and error.errno == errno.ENOMEM:
                raise HostMemoryError(
                    f"megacompile(): the system refused {format_bytes(size_bytes)} of host memory "
                    f"for {what} ({error}); raise the limit of the process (ulimit -d, ulimit -v), "
                    "or set a smaller host_memory="
                ) from error
            raise
        weakref.finalize(buffer, self._sizes.pop, key).atexit = False
        self._buffers[key] = buffer
        return buffer

    def _check(self, size_bytes: int, what: str) -> None:
        held = self.held_bytes
        if self.limit_bytes is not None and held > self.limit_bytes:
            raise HostMemoryError(
                f"megacompile(): host_memory is {format_bytes(self.limit_bytes)}; "
                f"{format_bytes(held - size_bytes)} of it is in use, and {what} needs "
                f"{format_bytes(size_bytes)} more; raise host_memory=, or use less: "
                "state_dtype='int8', a smaller batch, or disk="
            )
        check_host_memory([(what, size_bytes)])


def _make_ahead(
    budget: weakref.ref[HostBudget],
    future: Future[HostBuffer],
    what: str,
    device: torch.device,
    wanted: Wanted,
) -> None:
    """Allocate a buffer in the thread. The caller that requests the buffer gets the error."""
    alive = budget()
    if alive is None or is_over():
        future.cancel()
    else:
        fulfil(future, functools.partial(_made_ahead, alive, what, device, wanted))


def _made_ahead(alive: HostBudget, what: str, device: torch.device, wanted: Wanted) -> HostBuffer:
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        buffer = alive._new(wanted.size_bytes, what, pin=wanted.pin, touch=True)
        if wanted.lock:
            buffer.lock()
    return buffer
