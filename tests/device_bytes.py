"""Device memory, as tests compare it: what other tests left in the process does not count."""

from __future__ import annotations

import gc

import torch

from megacompile import compat


def device_bytes() -> int:
    """Of the tensors that live, on the current GPU: no garbage, and no workspaces of cuBLAS."""
    gc.collect()
    compat.release_device_cache(torch.device("cuda", torch.cuda.current_device()))
    return torch.cuda.memory_allocated()


def cublas_bytes() -> int:
    """What cuBLAS's workspaces took, one for each thread and stream: they are given back."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()
    return before - torch.cuda.memory_allocated()
