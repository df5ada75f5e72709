"""Devices: the memory that is free, the allocator, the default device."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from megacompile.host_memory import available_bytes

_C: Any = torch._C  # its stubs leave this out


def free_device_bytes(device: torch.device) -> int:  # torch 2.11 to 2.15
    """Device memory that this process can still get, within the limit that it was given."""
    if device.type != "cuda":
        return available_bytes()
    free, total = torch.cuda.mem_get_info(device)
    reserved, used = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    share = float(torch.cuda.get_per_process_memory_fraction(device))
    return min(free, int(share * total) - reserved) + reserved - used


_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # torch reads the first that is set


def use_expandable_segments() -> bool:  # torch 2.11 to 2.15
    """Turns expandable segments of the CUDA allocator on, for the process, where everybody can see
    it.

    Code that cannot do with it (vLLM's memory pools) asks the environment. So it is set there too,
    and not at all where the user set the allocator up, or where memory was taken from it already:
    a caller that did that has asked before. Torch 2.11 cannot say what a program has set (2.12
    can).
    """
    configured = getattr(_C, "_accelerator_getAllocatorSettings", str)
    if any(os.environ.get(name) for name in _ALLOCATOR) or configured() or _has_allocated():
        return False
    for name in _ALLOCATOR:
        os.environ[name] = "expandable_segments:True"
    _C._accelerator_setAllocatorSettings("expandable_segments:True")
    return True


def _has_allocated() -> bool:
    """True if memory was ever taken from the CUDA allocator, even if it was given back since."""
    if not torch.cuda.is_initialized():
        return False
    devices = range(torch.cuda.device_count())
    return any(torch.cuda.memory_stats(d).get("segment.all.allocated", 0) for d in devices)


def give_cache_back(device: torch.device) -> None:  # torch 2.11 to 2.15
    """Return unused device memory to the driver: workspaces, and what is cached."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        _C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


def give_pinned_cache_back(device: torch.device) -> None:  # torch 2.11 to 2.15
    """Give page-locked host memory that torch's allocator caches back to the system. Where a kernel
    is tuned that writes to a tensor in place, and device memory is short, Inductor copies that
    tensor there, in blocks of powers of two."""
    if device.type == "cuda":
        _C._host_emptyCache()


def profiler_enabled() -> bool:  # torch 2.11 to 2.15
    """True if `torch.profiler` is recording in this process."""
    return bool(torch.autograd.profiler._is_profiler_enabled)


def on_host() -> AbstractContextManager[Any]:  # torch 2.11 to 2.15
    """For its duration, what names no device is on the CPU, whatever the default device is."""
    if _C._len_torch_function_stack() == 0:  # a default device is a mode, like `with device:`
        return nullcontext()
    return torch.device("cpu")


def without_autocast() -> AbstractContextManager[Any]:  # torch 2.11 to 2.15
    """For its duration, no operation casts what it reads, whatever autocast the caller is in."""
    guard: AbstractContextManager[Any] = _C._DisableAutocast()
    return guard


@contextmanager
def side_stream(device: torch.device) -> Iterator[None]:  # torch 2.11 to 2.15
    """On CUDA: a stream of its own for the duration, done at the end. On the CPU: nothing."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)) as _:
        yield
        torch.cuda.current_stream(device).synchronize()
