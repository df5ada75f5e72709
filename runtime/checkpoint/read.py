"""Reads tensors of files into existing memory, on several threads.

`preadv` copies from the page cache or the disk directly into the destination. The first access to
the memory takes longest (page faults), so threads share it: they read pieces of a bucket in
parallel, in the order of the buckets, while the caller page-locks the finished ones.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import cast

import torch

from megacompile.errors import CheckpointError
from megacompile.runtime.checkpoint.files import Entry

PIECE_BYTES = 16 * 2**20
STAGED_BYTES = 4 * 2**20  # staging memory of a thread, for conversions
THREADS = 16  # maximum; more would contend for page faults in the same shared-memory file


class Reader:
    """Reads entries in the background, in the order of the calls.

    Use it as a context manager. On exit all reads have ended, so their memory may be freed.

    Args:
        done: called from any thread with the number of bytes read.
    """

    def __init__(self, done: Callable[[int], object]) -> None:
        self._done = done
        self._files: dict[Path, int] = {}
        self._opening = threading.Lock()
        self._of_thread = threading.local()
        self._computing = ThreadPoolExecutor(1, "megacompile-convert")
        self._pool = ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1), "megacompile-read")

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._computing.shutdown(wait=False, cancel_futures=True)
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._computing.shutdown(wait=True)  # last, because it may wait for reads
        for file in self._files.values():
            os.close(file)

    def read(self, entry: Entry, into: torch.Tensor) -> list[Future[None]]:
        """Start reading a tensor.

        Args:
            entry: the tensor to read.
            into: the destination: same shape, any device; another dtype converts values.
        """
        file = self._open(entry.path)
        if into.dtype != entry.dtype or into.device.type != "cpu" or not into.is_contiguous():
            return [self._pool.submit(self._convert, file, entry, into)]
        memory = _bytes_of(into)
        return [
            self._pool.submit(self._fill, file, entry, begin, memory[begin : begin + PIECE_BYTES])
            for begin in range(0, entry.size_bytes, PIECE_BYTES)
        ]

    def compute(
        self,
        entries: Mapping[str, Entry],
        into: Callable[[Mapping[str, torch.Tensor]], None],
    ) -> list[Future[None]]:
        """Start reading a group of entries and calling `into` with them, one group at a time."""
        return [self._computing.submit(self._compute, entries, into)]

    def _compute(
        self,
        entries: Mapping[str, Entry],
        into: Callable[[Mapping[str, torch.Tensor]], None],
    ) -> None:
        with torch.inference_mode(False), torch.no_grad():
            staged = {
                name: torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
                for name, entry in entries.items()
            }
            reading = [self.read(entry, staged[name]) for name, entry in entries.items()]
            for pieces in reading:
                for piece in pieces:
                    piece.result()
            into(staged)

    def _open(self, path: Path) -> int:
        with self._opening:
            if path not in self._files:
                try:
                    self._files[path] = os.open(path, os.O_RDONLY)
                except OSError as error:
                    raise CheckpointError(
                        f"megacompile(): file {path} cannot be opened ({error}); it existed when "
                        "its header was read; load it again when it is complete"
                    ) from error
            return self._files[path]

    def _convert(self, file: int, entry: Entry, into: torch.Tensor) -> None:
        with torch.inference_mode(False), torch.no_grad():  # modes are per thread
            if not into.is_contiguous():
                whole = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
                self._fill(file, entry, 0, _bytes_of(whole))
                into.copy_(whole)
                return
            staging, flat = self._staging(entry.dtype), into.view(-1)
            for begin in range(0, flat.numel(), staging.numel()):
                piece = flat[begin : begin + staging.numel()]
                staged = staging[: piece.numel()]
                self._fill(file, entry, begin * staged.itemsize, _bytes_of(staged))
                piece.copy_(staged)

    def _staging(self, dtype: torch.dtype) -> torch.Tensor:
        """This thread's staging memory, reused: the allocator keeps freed memory per thread."""
        if not hasattr(self._of_thread, "staging"):
            self._of_thread.staging = torch.empty(STAGED_BYTES, dtype=torch.uint8, device="cpu")
        return cast(torch.Tensor, self._of_thread.staging).view(dtype)

    def _fill(self, file: int, entry: Entry, begin: int, into: torch.Tensor) -> None:
        """Fill `into` (uint8) with an entry's bytes from offset `begin`."""
        size_bytes = into.numel()
        memory = (ctypes.c_char * size_bytes).from_address(into.data_ptr())
        left = memoryview(memory).cast("B")
        at = entry.offset_bytes + begin
        while left:
            try:
                got = os.preadv(file, [left], at)
            except OSError as error:
                raise CheckpointError(
                    f"megacompile(): file {entry.path} cannot be read at byte {at} ({error}); "
                    f"needed {len(left)} more bytes of {entry.name}; check the disk"
                ) from error
            if not got:  # the file was complete when its header was read
                raise CheckpointError(
                    f"megacompile(): file {entry.path} ends at byte {at}; needed {len(left)} more "
                    f"bytes of {entry.name}; it was truncated meanwhile; load it again when it is "
                    "complete"
                )
            at += got
            left = left[got:]
        self._done(size_bytes)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor: (bytes,) uint8."""
    return tensor.detach().view(-1).view(torch.uint8)
