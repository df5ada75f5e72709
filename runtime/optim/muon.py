"""Muon. It needs matrix products for each parameter, so torch's own step runs, on the device.

Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024, as
implemented by torch.optim.Muon.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from megacompile.runtime.optim.rule import Group, OwnStep


def state_shapes(
    group: Group, shape: Sequence[int], state: Mapping[str, Any]
) -> Iterator[tuple[str, Sequence[int]]]:
    """See `rule.KnownOptimizer.shapes`."""
    if state.get("momentum_buffer") is not None and group["momentum"]:
        yield "momentum_buffer", shape


MUON = OwnStep(
    types=(torch.optim.Muon,), counts=False, state_shapes=state_shapes, takes_dtensors=True
)
