"""The functions that Dynamo captures on the thread of a call instead of torch's."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

from megacompile import compat
from megacompile.runtime.model.dropout import dropout
from megacompile.runtime.model.sized import affine_grid, linspace, max_pool1d
from megacompile.runtime.params.undo import Undos, exchange

_HERE = threading.local()  # its `on`: is a model called on this thread?

_SIZED: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.nn.functional.affine_grid: affine_grid,
    torch.linspace: linspace,
    torch.nn.functional.max_pool1d: max_pool1d,
}


def swap_in(undos: Undos) -> None:
    """Until the undos run, Dynamo captures our operators where a number or a size is a symbol."""
    compat.capture_dropout_as(dropout, _is_on)
    for stock, own in _SIZED.items():
        compat.capture_sized_as(stock, own, _is_on)
    holders = [vars(_HERE)]
    if not _is_on():
        undos.append(functools.partial(exchange, holders, ["on"], [True], [None]))
        exchange(holders, ["on"], [None], [True])


def _is_on() -> bool:
    return bool(getattr(_HERE, "on", None))
