"""Methods that are handed to what lives longer than their object."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """A bound method that does not keep its object alive, for Dynamo's caches, which never end."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        bound = reference()
        assert bound is not None, "a compiled frame outlived its model"
        return bound(*args)

    return call


def while_it_lives(method: Callable[[], None]) -> Callable[[], None]:
    """The same; nothing happens when the object is gone."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        bound = reference()
        if bound is not None:
            bound()

    return call
