"""The faults, by the folders of the product.

Each changes what a user or a neighbouring module can notice: wrong numbers, a crash, a hang, a
leak, too much memory, a wrong report or plan. Left out is code that runs on a GPU alone.
"""

from __future__ import annotations

from tests.faults.listed import compiler, device, model, optimizer, params, passes, planning

FAULTS = (
    *passes.FAULTS,
    *planning.FAULTS,
    *compiler.FAULTS,
    *optimizer.FAULTS,
    *params.FAULTS,
    *model.FAULTS,
    *device.FAULTS,
)
