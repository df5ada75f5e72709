"""Replaces functions of torch, and of packages whose loops train a model."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any


class _Partial(functools.partial[Any]):
    """A function of a module, pickled by its name, as Python's functions are."""

    def __reduce__(self) -> str:
        return self.__qualname__  # type: ignore[attr-defined,no-any-return]


def replace(owner: Any, name: str, function: Callable[..., Any]) -> None:
    """Makes `owner.name(...)` call `function(stock, ...)` from now on, with the function that it
    replaces. Later calls for the same `owner` and `name` change nothing."""
    stock = getattr(owner, name)
    if hasattr(stock, "of_megacompile"):
        return

    ours: Any = _Partial(function, stock)
    if not inspect.ismodule(owner):  # of a class: it must take `self`

        def ours(*args: Any, **kwargs: Any) -> Any:
            return function(stock, *args, **kwargs)

    functools.update_wrapper(ours, stock)
    ours.of_megacompile = True
    # `self.name(...)` must not pass itself
    static = isinstance(inspect.getattr_static(owner, name), staticmethod)
    setattr(owner, name, staticmethod(ours) if static else ours)
