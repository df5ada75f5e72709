"""A square root that is rounded correctly wherever it runs.

torch's own on the CPU is MKL's on x86, which may be off in the last bit. Compiled C++ and the
kernels use the processor's, which is right; so twins that run as they are must be right too.
"""

from __future__ import annotations

import torch
from torch import Tensor

_SPLIT = 2.0**27 + 1  # divides the 53 bits of a number into two halves
_TINY = 2.0**-500  # below it, the error of a square is no normal number


def sqrt(x: Tensor) -> Tensor:
    """The number nearest to the root of each element: fp32 or fp64, of at least 0."""
    if torch.compiler.is_dynamo_compiling() or x.device.type != "cpu":
        return x.sqrt()
    if x.dtype == torch.float32:  # no root of 24 bits is near enough to the middle of two numbers
        return x.double().sqrt().float()
    return _of_doubles(x)


def _of_doubles(x: Tensor) -> Tensor:
    """One step of Newton from a root that is off by one bit, with the error of its square exact.

    Right but for roots within 2^-106 of the middle of two numbers, such as that of 1 - 2^-53.

    Source of the product without an error: Dekker, "A floating-point technique for extending the
    available precision", 1971.
    """
    tiny = x < _TINY
    x = torch.where(tiny, x * 2.0**512, x)
    root = x.sqrt()
    high = root * _SPLIT
    high = high - (high - root)
    low = root - high
    square = root * root
    error = ((high * high - square) + 2 * high * low) + low * low
    step = ((x - square) - error) / (2 * root)
    root = torch.where(step.isfinite(), root + step, root)  # not of 0, infinity and NaN
    return torch.where(tiny, root * 2.0**-256, root)
