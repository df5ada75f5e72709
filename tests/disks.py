"""A disk that is slow, at random, and shows what is not read or written whole yet as NaN."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from torch import Tensor

from megacompile.passes.schedule import disk, disk_weights
from megacompile.runtime.device.buffers import HostBuffer
from megacompile.runtime.disk import transfers
from megacompile.runtime.disk.transfers import Way
from megacompile.runtime.updates import loans, staging


@contextmanager
def harsh(rng: random.Random) -> Iterator[None]:
    """For its duration threads go on in any order, and buffers that are given back hold NaN."""
    real = transfers._transfer

    def transfer(file: Any, way: Way, at: int, whole: Tensor, *place: int) -> None:
        start, size = place
        if way is Way.READ:
            whole[start : start + size].fill_(255)
        else:
            torn = HostBuffer(whole.numel() + 4096, pin=False).bytes(whole.numel()).fill_(255)
            real(file, way, at, torn, start, size)
        for _ in range(rng.choice((0, 1, 10, 1000))):
            os.sched_yield()
        real(file, way, at, whole, start, size)

    give_back, release = loans.Loans.give_back, staging.Staging._release

    def poison_loan(self: loans.Loans, loan: loans.Loan, event: Any = None) -> None:
        if loan.memory is not None:
            loan.flat().fill_(255)
        give_back(self, loan, event)

    def poison_states(self: staging.Staging, staged: staging.Staged) -> None:
        for memory in staged.memory:
            memory.bytes(len(memory)).fill_(255)
        release(self, staged)

    with ExitStack() as stack:
        for module, name, value in (
            (transfers, "_transfer", transfer),
            (transfers, "CHUNK_BYTES", 4096),
            (loans.Loans, "give_back", poison_loan),
            (staging.Staging, "_release", poison_states),
        ):
            stack.enter_context(mock.patch.object(module, name, value))
        yield


@contextmanager
def few_buffers(rng: random.Random) -> Iterator[None]:
    """For its duration schedules are planned with any number of buffers, down to one."""
    with ExitStack() as stack:
        for module, name in (
            (disk, "SETS"),
            (disk_weights, "SETS"),
            (disk_weights, "NEW_SETS"),
            (disk_weights, "LANDING_SETS"),
        ):
            count = rng.choice((1, 2, 4))
            stack.enter_context(mock.patch.object(module, name, count))
        yield
