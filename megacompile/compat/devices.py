"""Devices: the memory that is free, the allocator, the default device."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch


def free_device_bytes(device: torch.device) -> int:  # torch 2.11 to 2.15
    """Device memory that this process can still get, within the limit that it was given."""
    if device.type != "cuda":
        return int(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    free, total = torch.cuda.mem_get_info(device)
    reserved, used = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    fraction = getattr(torch.cuda, "get_per_process_memory_fraction", None)
    share = 1.0 if fraction is None else float(fraction(device))
    return min(free, int(share * total) - reserved) + reserved - used


def use_expandable_segments() -> bool:  # torch 2.11 to 2.15
    """Let segments of the CUDA allocator grow, for the process; False where the user set it up."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    configured = getattr(torch._C, "_accelerator_getAllocatorSettings", str)
    if any(os.environ.get(name) for name in names) or configured():
        return False
    configure = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if configure is None:  # before torch 2.10
        configure = torch.cuda.memory._set_allocator_settings
    configure("expandable_segments:True")
    return True


def profiler_enabled() -> bool:  # torch 2.11 to 2.15
    """Is `torch.profiler` recording in this process?"""
    return bool(torch.autograd.profiler._is_profiler_enabled)


def on_host() -> AbstractContextManager[Any]:  # torch 2.11 to 2.15
    """For its duration, what names no device is on the CPU, whatever the default device is."""
    if torch.utils._device.CURRENT_DEVICE is None:
        return nullcontext()
    return torch.device("cpu")


@contextmanager
def side_stream(device: torch.device) -> Iterator[None]:  # torch 2.11 to 2.15
    """On CUDA: a stream of its own for the duration, done at the end. On the CPU: nothing."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)) as _:
        yield
        torch.cuda.current_stream(device).synchronize()
