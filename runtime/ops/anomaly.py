"""NaN and inf in gradients, named by the stage whose backward returns them.

With `megacompile(model, detect_anomaly=True)` both are errors. Under
`torch.autograd.detect_anomaly()` only NaN is, as in torch: a GradScaler expects occasional infs.
The check reads values, so the host synchronizes with the device after each stage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from megacompile.errors import AnomalyError
from megacompile.ir.stages import ArgRef, Stage


def check(
    stage: Stage,
    given: Sequence[Any],  # saved tensors and inputs, then the incoming gradients
    found: Sequence[torch.Tensor | None],  # gradients, in the order of template.gradients
    *,
    inf: bool,
) -> None:
    """Check the gradients that a stage's backward returned.

    Raises:
        AnomalyError: names the stage and the tensors with NaN (or, with `inf`, inf), and says
            whether the stage's inputs had it already.
    """
    names = (_name(stage, primal) for primal in stage.traced.gradients)
    bad = [f"{name} has {text}" for name, text in _bad(names, found, inf)]
    if not bad:
        return
    flows = len(stage.traced.tangent_metas)
    split = len(given) - flows
    came = [text for _, text in _bad(map(str, range(flows)), given[split:], inf)]
    kept = [text for _, text in _bad(map(str, range(split)), given[:split], inf)]
    if came:
        why = f"the gradient that came in from behind the stage has {came[0]} already"
    elif kept:
        why = f"what its forward read or kept has {kept[0]} already: look at the forward"
    else:
        why = "what came in is finite: it arises in this stage"
    raise AnomalyError(
        f"backward of stage {stage.name!r} ({stage.index}B): {'; '.join(bad)}; {why}; leave out "
        "detect_anomaly to go on regardless"
    )


def _bad(names: Any, tensors: Sequence[Any], inf: bool) -> Iterator[tuple[str, str]]:
    """The tensors with NaN (or inf), with counts."""
    for name, tensor in zip(names, tensors, strict=False):
        if not isinstance(tensor, torch.Tensor) or not (
            tensor.is_floating_point() or tensor.is_complex()
        ):
            continue
        nans, infs = int(tensor.isnan().sum()), int(tensor.isinf().sum())
        texts = [f"{nans} nan"] if nans else []
        texts += [f"{infs} inf"] if infs and inf else []
        if texts:
            yield name, f"{' and '.join(texts)} among {tensor.numel()} elements"


def _name(stage: Stage, primal: int) -> str:
    ref = stage.primals[primal]
    if isinstance(ref, ArgRef):
        return f"the gradient of input {ref.index} of shape {stage.metas[primal].shape}"
    return f"the gradient of parameter {stage.buckets[ref.bucket].params[ref.param].name!r}"
