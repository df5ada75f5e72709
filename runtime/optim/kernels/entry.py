"""The update of a whole bucket: one kernel launch for all its parameters.

Triton is imported for the first bucket on a CUDA device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megacompile.runtime.optim.kernels.table import Table, describe
from megacompile.runtime.optim.rule import OptimizerRule, Update
from megacompile.runtime.optim.twin import apply


def update_bucket(rule: OptimizerRule, updates: Sequence[Update]) -> None:
    """Update the parameters of one bucket in place: by a kernel on a CUDA device, else by the twin.

    All tensors are on the gradients' device or in memory that it can address. Raises ValueError for
    a tensor that is not contiguous or has the wrong size or dtype.
    """
    if not updates:
        return
    if updates[0].grad.device.type == "cuda":
        from megacompile.runtime.optim.kernels.fused_update import launch

        launch(rule, updates)
        return
    for i, update in enumerate(updates):
        describe(i, rule, update)  # raises the kernel's errors
        apply(rule, update)


def update_again(
    rule: OptimizerRule,
    tables: Sequence[Table],
    gradients: Sequence[int],
    factors: Sequence[int] | None,
    hypers: Sequence[tuple[float, ...]],
    device: torch.device,
) -> None:
    """Repeat an update on a CUDA device with new scalars and gradients.

    Args:
        tables: of the earlier update.
        gradients: see `Table.renew`.
        factors: see `Table.renew`.
        hypers: the scalars of all parameters of the step.
        device: of the parameters.
    """
    from megacompile.runtime.optim.kernels.fused_update import BLOCK, run

    for table in tables:
        table.renew(gradients, factors)
    run(rule, (each.launch(hypers, block=BLOCK, device=device) for each in tables), device)
