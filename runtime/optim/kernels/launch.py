"""Launch an update kernel on a bucket: one launch for each signature of dtypes in it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl

from megacompile.runtime.optim import blockwise
from megacompile.runtime.optim.kernels.table import launches
from megacompile.runtime.optim.rules import Update

BLOCK = 1024  # elements to a program; on an H200 2048 and 4096 are slower
_WARPS = 8

_DTYPES = {
    None: None,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
    torch.uint8: tl.uint8,
}


def launch(
    kernel: Any, updates: Sequence[Update], *, states: int, block: int, **constants: bool
) -> None:
    """Launch a kernel on the device of the gradients, on its current stream."""
    if not updates:
        return
    device = updates[0].grad.device
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        maps = blockwise.tables(device)
        for signature, blocks, table, hyper in launches(updates, states=states, block=block):
            dtypes = {f"STATE{i}": _DTYPES[dtype] for i, dtype in enumerate(signature.states)}
            kernel[(len(blocks),)](
                blocks,
                table,
                hyper,
                maps,
                PARAM=_DTYPES[signature.param],
                GRAD=_DTYPES[signature.grad],
                COPY=_DTYPES[signature.copy],
                STOCHASTIC=signature.stochastic,
                ALIGNED=signature.aligned,
                ROWS=block // blockwise.BLOCK,
                num_warps=_WARPS,
                enable_fp_fusion=False,  # the twins round each product too; memory is the limit
                **dtypes,
                **constants,
            )
