"""The update of a whole bucket: one launch of a kernel for all its parameters.

Nothing here needs triton, which is imported when the first bucket on a CUDA device is updated.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from megacompile.runtime.optim.kernels.table import KnownParams, describe, renewed
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


def update_known(
    rule: OptimizerRule,
    parameters: Sequence[KnownParams],
    gradients: Sequence[Tensor],
    factors: Sequence[Tensor] | None,
    hypers: Sequence[Sequence[float]],
) -> None:
    """Update parameters on a CUDA device of which only the gradients, their factors and the scalars
    are new; see `renewed`."""
    from megacompile.runtime.optim.kernels.update import BLOCK, run

    addresses = [gradient.data_ptr() for gradient in gradients]
    of_factors = None if factors is None else [factor.data_ptr() for factor in factors]
    device = gradients[0].device
    new = (
        renewed(each, addresses, of_factors, hypers, block=BLOCK, device=device)
        for each in parameters
    )
    run(rule, new, device)
