"""The update of a whole bucket: one launch of a kernel for all its parameters.

Nothing here needs triton, which is imported when the first bucket on a CUDA device is updated.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megacompile.runtime.optim.kernels.table import Table, describe
from megacompile.runtime.optim.rule import OptimizerRule, Update
from megacompile.runtime.optim.twin import apply


def update_bucket(rule: OptimizerRule, updates: Sequence[Update]) -> None:
    """Update the parameters of one bucket in place: by a kernel on a CUDA device, else by the twin.

    Everything is on the device of the gradients, or in memory that it can address. Raises
    ValueError for a tensor that is not contiguous or has another size or dtype than needed.
    """
    if not updates:
        return
    if updates[0].grad.device.type == "cuda":
        from megacompile.runtime.optim.kernels.update import launch

        launch(rule, updates)
        return
    for i, update in enumerate(updates):
        describe(i, rule, update)  # refuses what the kernels refuse
        apply(rule, update)


def update_again(
    rule: OptimizerRule,
    tables: Sequence[Table],
    gradients: Sequence[int],
    factors: Sequence[int] | None,
    hypers: Sequence[tuple[float, ...]],
    device: torch.device,
) -> None:
    """Update parameters on a CUDA device of which only the gradients, their factors (as addresses;
    see `Table.renew`) and the scalars are new."""
    from megacompile.runtime.optim.kernels.update import BLOCK, run

    for table in tables:
        table.renew(gradients, factors)
    run(rule, (each.launch(hypers, block=BLOCK, device=device) for each in tables), device)
