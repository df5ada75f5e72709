"""Values of options as users write them (words, dtypes, memory sizes), and torchrun's numbers.

Imports no torch: the command line reads these values before torch is imported.
"""

from __future__ import annotations

import enum
import os
import re
from dataclasses import dataclass
from typing import Any

from megacompile.errors import OptionError

COMPUTE_DTYPES = ("bfloat16", "float16")
GRAD_DTYPES = ("bfloat16", "float16", "float32")
STATE_DTYPES = ("float32", "bfloat16", "int8")  # int8: blockwise 8 bits, not a torch dtype


class Lowering(enum.Enum):
    """The backend that turns a stage's graph into code."""

    EAGER = "eager"  # the traced ATen graph, op by op: bitwise equal to the plain model
    INDUCTOR = "inductor"  # fused by TorchInductor: fast, equal within its rounding


class Head(enum.Enum):
    """The method for a language model's head and loss."""

    AUTO = "auto"  # in chunks with Inductor if logits exceed 1 GiB
    WHOLE = "whole"  # as the model computes it
    CHUNKED = "chunked"  # in chunks of tokens: the logits never exist as a whole


class Activations(enum.Enum):
    """The treatment of the tensors that a stage saves for its backward."""

    AUTO = "auto"  # the plan decides
    KEEP = "keep"  # saved tensors stay on the device
    SELECTIVE = "selective"  # about half of them stay, the rest is recomputed
    RECOMPUTE = "recompute"  # stage inputs stay on the device, the rest is recomputed
    OFFLOAD = "offload"  # stage inputs wait on the host, the rest is recomputed


@dataclass(frozen=True, slots=True)
class PlannedMesh:
    """A mesh for plans, without processes."""

    shape: tuple[int, int]  # as of a DeviceMesh: replicas, and ranks that shard


_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_NEEDED = 'bytes (an int), a string such as "20GiB", or a fraction of the total (0 < f <= 1)'


def parse_bytes(name: str, value: Any, total_bytes: int, *, words: str = "") -> int:
    """Convert an option's memory size to bytes.

    Args:
        name: the option's name, for errors.
        value: an int; a string: a number with B, KiB, MiB, GiB or TiB (GB etc. are powers of ten);
            or a float from 0 to 1, a fraction of `total_bytes`.
        words: other accepted values, for errors: "'all', ".

    Raises:
        OptionError: another type, a negative size, an unknown unit, a fraction above 1.
    """
    if isinstance(value, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([KMGT]?)(i)?B?\s*", value, re.IGNORECASE)
        if found is not None:
            number, unit, binary = found.groups()
            scale = _UNITS[unit.upper()]
            if unit and not binary:
                scale = 1000 ** list(_UNITS).index(unit.upper())
            return int(float(number) * scale)
    if type(value) is float and 0 <= value <= 1:  # nor nan
        return int(value * total_bytes)
    if type(value) is int and value >= 0:
        return value
    raise OptionError(f"megacompile(): got {name}={value!r}; needed {words}{_NEEDED}")


def torchrun_count(name: str) -> int:
    """The number that torchrun sets in an environment variable, such as "WORLD_SIZE"; 0 without."""
    said = os.environ.get(name, "")
    return int(said) if said.isdecimal() else 0
