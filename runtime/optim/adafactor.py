"""Adafactor. It needs means over the rows and columns of each parameter, so torch's own step runs,
on the device.

Source: Shazeer & Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost", 2018,
arXiv 1804.04235, as implemented by torch.optim.Adafactor.
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
    del group, state
    if len(shape) > 1:
        yield "row_var", (*shape[:-1], 1)
        yield "col_var", (*shape[:-2], 1, shape[-1])
    else:
        yield "variance", shape


ADAFACTOR = OwnStep(
    types=(torch.optim.Adafactor,),
    counts=True,
    state_shapes=state_shapes,
    takes_dtensors=False,  # its step squares a norm in place, which DTensor does not support
)
