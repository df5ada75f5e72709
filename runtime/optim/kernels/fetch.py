"""Copies a small host tensor to the device with a kernel that reads page-locked memory.

The copy engine serves requests in order: a table of 2 KB waited 100 ms for the gigabytes of states
and weights before it. A kernel reads across the bus without the copy engine.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections import deque

import torch
import triton
import triton.language as tl

from megacompile.host_memory import pinned_empty

_BLOCK = 1024

_in_use: deque[tuple[torch.Tensor, torch.cuda.Event]] = deque()  # until the kernel has read them


def fetch(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy `host`, (numel,) int64, to a CUDA device on its current stream."""
    _drop_read()
    pinned = pinned_empty((host.numel(),), torch.int64).copy_(host)
    target = torch.empty(host.numel(), dtype=torch.int64, device=device)
    if not pinned.is_pinned():  # the system is out of page-locked memory
        return target.copy_(host)
    grid = (triton.cdiv(host.numel(), _BLOCK),)
    _fetch[grid](pinned.data_ptr(), target, host.numel(), BLOCK=_BLOCK)
    event = torch.cuda.Event()
    event.record()
    _in_use.append((pinned, event))
    return target


def _drop_read() -> None:
    """Free the buffers that kernels have read. Thread-safe: popping an entry claims it."""
    while True:
        try:
            first = _in_use.popleft()
        except IndexError:
            return
        if not first[1].query():
            _in_use.appendleft(first)
            return


@triton.jit(do_not_specialize=["source", "numel"])
def _fetch(source, target, numel, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < numel
    address = source.to(tl.int64).to(tl.pointer_type(tl.int64), bitcast=False)
    tl.store(target + index, tl.load(address + index, mask=mask), mask=mask)
