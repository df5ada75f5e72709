"""Constants and functions of captured graphs: keys that are equal where the same is meant.

What a layer is configured with may be an object of its own for each layer, and Dynamo writes a
function of its own for each use of an `autograd.Function` that it leaves whole. Compared as
objects, no two layers would be equal.
"""

from __future__ import annotations

import dataclasses
import enum
import types
from collections.abc import Hashable
from typing import Any

import torch

PLAIN = frozenset(
    map(type, (0, 0.0, False, 0j, "", None, ..., torch.int8, torch.strided, torch.device("cpu")))
) | {torch.memory_format}


def constant_key(value: Any) -> Hashable:
    """Equal for constants that are equal: plain ones, members of enums, and what cannot change and
    is made of these (tuples, named ones too, and frozen dataclasses).

    Raises:
        TypeError: it is none of these.
    """
    kind = type(value)
    if kind is float:
        return kind, value.hex()  # -0.0 is not 0.0, and nan is itself
    if kind in PLAIN or isinstance(value, enum.Enum):
        return kind, value
    if isinstance(value, tuple):
        return kind, tuple(map(constant_key, value))
    if dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        parts = (getattr(value, field.name) for field in dataclasses.fields(kind))
        return kind, tuple(map(constant_key, parts))
    raise TypeError(f"{kind.__name__} is no constant")


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Object:
    """An object that is equal to itself alone."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Object) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def function_key(function: Any) -> Hashable:
    """Equal for functions of the same code around the same objects; of anything else, itself."""
    if type(function) is not types.FunctionType or not function.__closure__:
        return function  # type: ignore[no-any-return]
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    try:
        inside = [cell.cell_contents for cell in function.__closure__]
    except ValueError:  # a cell is empty
        return function
    around = (function.__globals__, *defaults, *inside)
    return function.__code__, tuple(map(_Object, around))
