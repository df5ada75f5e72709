"""megacompile: default options, or everything streamed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from benchmarks.models import to_float8
from benchmarks.peers.system import System, adamw, loop
from megacompile import explain, megacompile
from megacompile.runtime.updates.compiled import wait_until_compiled


def setup(
    model: nn.Module,
    device: str,
    *,
    streamed: bool = False,
    in_backward: bool = False,
    float8: str | None = None,
) -> System:
    """Train a `Loss`.

    Args:
        model: in host memory; float32 parameters compute in bf16.
        device: "cuda" or "cpu".
        streamed: no parameter stays on the device, every layer is recomputed.
        in_backward: the update is made there, with 8-bit moments and without clipping.
        float8: torchao's recipe for the linear layers but the head.
    """
    if float8:
        to_float8(model, float8)
    options: dict[str, Any] = {"device": device, "progress": False}
    if any(parameter.dtype == torch.float32 for parameter in model.parameters()):
        options |= {"compute_dtype": torch.bfloat16, "grad_dtype": torch.bfloat16}
    elif not in_backward:
        options["state_dtype"] = torch.float32
    if streamed:
        options |= {"resident": 0, "activations": "recompute"}
    optimizer = adamw(model.parameters())
    if in_backward:
        options |= {"optimizer": optimizer, "state_dtype": "int8"}
    whole = megacompile(model, **options)

    def finish() -> None:
        for parameter in whole.parameters():
            parameter.detach().flatten()[:1].tolist()  # whoever looks waits for the update

    def notes() -> dict[str, Any]:
        said = explain(whole, changes=False)
        return {"predicted_s": said.step_s, "bound": said.bound}

    step = loop(whole, optimizer, clips=not in_backward)
    return System(step, finish, wait_until_compiled, notes)
