"""Gives memory its pages, on several threads.

The kernel provides a page when it is first written, and clears it: 6.5 GiB/s on one thread of a
machine with an H200, for a thread that writes as for one that page-locks. Pages that are there are
locked at 25 GiB/s. To ask for pages (MADV_POPULATE_WRITE) takes less than half as long as to write
to them, per core, and no longer on two threads than on one (Linux 6.18, private and shared memory).
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable

import torch

from megacompile import numa

MOST_THREADS = 8  # then the memory itself is what takes the time
CHUNK_BYTES = 64 * 2**20  # whole huge pages
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, of Linux 5.14

Advise = Callable[[int, int, int], int]


def touch(
    memory: torch.Tensor, node: numa.Node | None = None, *, advise: Advise | None = None
) -> None:
    """Gives memory its pages. Its content stays as it is.

    Args:
        memory: (size_bytes,) uint8, whole pages.
        node: on whose cores that is done, by other threads than this one; None: on any.
        advise: asks for the pages of (address, bytes, advice), and gives 0 if they are there;
            None: the system.
    """
    size_bytes = memory.numel()
    chunks = deque(range(0, size_bytes, CHUNK_BYTES))
    refused = threading.Event()
    advise = _madvise() if advise is None else advise

    def work() -> None:
        start = memory.data_ptr()  # which it keeps alive
        while chunks and not refused.is_set():
            try:
                first = chunks.popleft()
            except IndexError:  # another thread was faster
                return
            end = min(first + CHUNK_BYTES, size_bytes)
            if advise(start + first, end - first, _POPULATE_WRITE):
                refused.set()

    def near() -> None:
        if node is not None:
            numa.bind(node.cores)
        work()

    count = min(MOST_THREADS, cores() if node is None else len(node.cores), len(chunks))
    threads = []
    try:
        for _ in range(count - 1 if node is None else count):
            thread = threading.Thread(target=near, name="megacompile-touch", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no more threads
                break
            threads.append(thread)
        if node is None or not threads:
            work()
        for thread in threads:
            thread.join()
    finally:
        chunks.clear()  # the threads end when Ctrl-C comes
    if refused.is_set():  # an old kernel, or too little memory, which the writer is told
        memory[:: mmap.PAGESIZE].bitwise_or_(0)


def cores() -> int:
    """Number of threads that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@functools.cache
def _madvise() -> Advise:
    """The system's; it runs without Python's lock, which `mmap.madvise` keeps."""
    try:
        found = ctypes.CDLL(None).madvise
    except (AttributeError, OSError, TypeError):  # not there, or not on this system
        return lambda start, size_bytes, advice: -1
    found.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    made: Advise = found
    return made


# Memory that was freed, and that malloc keeps for itself, goes back to the system.
#
# What is below malloc's threshold for mappings (up to 32 MiB) is in its heap, and stays there when
# it is freed. Parameters that moved to buckets would take their memory twice.

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
