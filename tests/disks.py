"""A disk that is slow, at random, and shows what is not read or written whole yet as NaN."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from unittest import mock

from torch import Tensor

from megacompile.errors import HostMemoryError, OptimizerError
from megacompile.passes.schedule import insert_disk
from megacompile.runtime import disk
from megacompile.runtime.device.buffers import HostBuffer
from megacompile.runtime.device.pool import BufferPool, Lease, Lender
from megacompile.runtime.disk import Way
from megacompile.runtime.ops.machine import Machine
from megacompile.runtime.updates.staging import BucketBuffers

LATE_S = 0.001  # at most, but for what a thread waits for the processor


@contextmanager
def harsh(rng: random.Random) -> Iterator[None]:
    """For its duration threads go on in any order, and buffers that are given back hold NaN."""
    real = disk._transfer

    def transfer(file: Any, way: Way, at: int, whole: Tensor, *place: int) -> None:
        start, size = place
        if way is Way.READ:
            whole[start : start + size].fill_(255)
        else:
            torn = HostBuffer(whole.numel() + 4096, pin=False).bytes(whole.numel()).fill_(255)
            real(file, way, at, torn, start, size)
        until = time.monotonic() + LATE_S
        for _ in range(rng.choice((0, 1, 10, 1000))):
            os.sched_yield()
            if time.monotonic() > until:  # others have the processor for long
                break
        real(file, way, at, whole, start, size)

    def poisoned(pool: type[Lender]) -> Any:
        take_back = pool.take_back

        def poison(self: Lender, lease: Lease, used: Any) -> None:
            if lease.buffer is not None:
                lease.buffer.memory.bytes(lease.buffer.size_bytes).fill_(255)
            take_back(self, lease, used)

        return poison

    with ExitStack() as stack:
        for module, name, value in (
            (disk, "_transfer", transfer),
            (disk, "CHUNK_BYTES", 4096),
            (BucketBuffers, "take_back", poisoned(BucketBuffers)),
            (BufferPool, "take_back", poisoned(BufferPool)),
        ):
            stack.enter_context(mock.patch.object(module, name, value))
        yield


@contextmanager
def no_host_memory(machine: Machine) -> Iterator[None]:
    """For its duration no host buffer can be made; then all who waited for one are told."""
    machine.host_budget.limit_bytes = machine.host_budget.held_bytes
    try:
        yield
    finally:
        for bucket in machine.buckets.values():
            for _ in bucket.params:
                with suppress(OptimizerError, HostMemoryError):
                    bucket.pending.wait()
        machine.host_budget.limit_bytes = None


@contextmanager
def few_buffers(rng: random.Random) -> Iterator[None]:
    """For its duration schedules are planned with any number of buffers, down to one."""
    with ExitStack() as stack:
        for kind in ("STATE", "SAVED", "WEIGHT", "NEW", "LANDING"):
            count = rng.choice((1, 2, 4))
            stack.enter_context(mock.patch.object(insert_disk, f"{kind}_SETS", count))
        yield
