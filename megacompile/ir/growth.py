"""The growth of a schedule's memory with its sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import sympy

from megacompile import compat
from megacompile.ir.schedule import Schedule
from megacompile.ir.tensors import TensorMeta


def bytes_of(schedule: Schedule, symbols: Sequence[sympy.Symbol]) -> Callable[..., int]:
    """Bytes of what the stages give and save, as a function of the symbols' values.

    Not what a step needs, but a measure by which two sets of sizes are compared: a long batch of
    few rows may need less than a short one of many.
    """
    terms: Counter[Any] = Counter()
    for stage in schedule.stages:
        for meta in (*stage.outputs, *stage.traced.saved):
            if isinstance(meta, TensorMeta) and meta.symbolic is not None:
                terms[sympy.prod(meta.symbolic.shape)] += meta.dtype.itemsize
    total = sympy.Add(*(size * count for size, count in terms.items()))
    function = compat.as_function((total,), symbols)
    return lambda *values: int(function(*values)[0])
