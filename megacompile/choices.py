"""Words that options take. Without torch, for the command line reads them before it is imported."""

from __future__ import annotations

import enum

COMPUTE_DTYPES = ("bfloat16", "float16")
GRAD_DTYPES = ("bfloat16", "float16", "float32")
STATE_DTYPES = ("float32", "bfloat16", "int8")  # int8: blocks of 8 bits, no dtype of torch's


class Lowering(enum.Enum):
    """The way a stage's graph becomes code."""

    EAGER = "eager"  # the traced ATen graph, one kernel at a time: bitwise equal to the plain model
    INDUCTOR = "inductor"  # fused by TorchInductor: fast, equal within its own tolerance


class Head(enum.Enum):
    """The way a language model's head and its loss are computed."""

    AUTO = "auto"  # in chunks with Inductor, where logits would take more than 1 GiB
    WHOLE = "whole"  # as the model has it
    CHUNKED = "chunked"  # in chunks of tokens, so that logits are never there as a whole


class Activations(enum.Enum):
    """The place of the tensors that a stage's backward takes from its forward."""

    AUTO = "auto"  # what the plan finds best
    KEEP = "keep"  # saved tensors stay on the device
    SELECTIVE = "selective"  # about half of them do, the rest is computed again
    RECOMPUTE = "recompute"  # stage inputs stay on the device, all else is computed again
    OFFLOAD = "offload"  # stage inputs wait on the host, all else is computed again
