"""A process group of this process alone, for systems that ask for one."""

from __future__ import annotations

import os
import socket

import torch.distributed as dist


def group_of_one(device: str) -> None:
    """Start it, with the environment variables that `torchrun` sets."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(
        RANK="0",
        LOCAL_RANK="0",
        WORLD_SIZE="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
