"""Values of options as users write them: words, dtypes, memory sizes.

Needs no torch: the command line reads them before it is imported.
"""

from __future__ import annotations

import enum
import re
from typing import Any

from megacompile.errors import OptionError, OptionTypeError

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


_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_NEEDED = 'bytes (an int), a text such as "20GiB", or a fraction of what there is (0 < f <= 1)'


def parse_bytes(name: str, value: Any, total_bytes: int, *, words: str = "") -> int:
    """The bytes that an option's value stands for.

    Args:
        name: of the option, for errors.
        value: an int; a text: a number with B, KiB, MiB, GiB or TiB (GB and the like are powers of
            ten); or a float up to 1, a fraction of `total_bytes`.
        words: other values that the option takes, for errors: "'all', ".

    Raises:
        OptionError: a negative size, a unit that there is none of, a fraction above 1.
        OptionTypeError: neither a number nor a text.
    """
    needed = words + _NEEDED
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        kind = type(value).__name__
        raise OptionTypeError(
            f"megacompile(): option {name!r} got {value!r} ({kind}); needed {needed}"
        )
    if isinstance(value, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([KMGT]?)(i?)B?\s*", value, re.IGNORECASE)
        if found is None:
            raise OptionError(f"megacompile(): got {name}={value!r}; needed {needed}")
        number, unit, binary = found.groups()
        scale = _UNITS[unit.upper()]
        if unit and not binary:
            scale = 1000 ** list(_UNITS).index(unit.upper())
        return int(float(number) * scale)
    if isinstance(value, float):
        if not 0 <= value <= 1:  # nor nan
            raise OptionError(f"megacompile(): got {name}={value}; needed {needed}")
        return int(value * total_bytes)
    if value < 0:
        raise OptionError(f"megacompile(): got {name}={value}; needed {needed}")
    return value
