"""The state of the random generators."""

from __future__ import annotations

import torch

Random = tuple[torch.Tensor, ...]


def random_state(device: torch.device) -> Random:
    """The generators' state: the host's, and the device's where it has one of its own."""
    host = torch.get_rng_state()
    return (host, torch.cuda.get_rng_state(device)) if device.type == "cuda" else (host,)


def set_random_state(device: torch.device, state: Random) -> None:
    """Set what `random_state` gave."""
    torch.set_rng_state(state[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state[1], device)
