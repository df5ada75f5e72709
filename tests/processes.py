"""Processes of `torchrun`, and a process group of this process alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

ROOT = Path(__file__).resolve().parent.parent


def torchrun(
    module: str, *arguments: str, ranks: int, timeout_s: float, device: str = "cpu"
) -> None:
    """Run a module in several processes that end, whatever happens.

    Args:
        device: "cuda", or "cpu", where they see no GPU.
    """
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), "-m", module, *arguments]
    started = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **hidden},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        said, _ = started.communicate(timeout=timeout_s)
    finally:
        if started.poll() is None:
            started.terminate()  # it ends its workers then
            try:
                started.wait(30)
            finally:
                started.kill()
    assert started.returncode == 0, said


@contextmanager
def group_of_one(timeout: timedelta | None = None, backend: str = "gloo") -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
    try:
        yield
    finally:
        dist.destroy_process_group()
