"""The methods of a model's classes: what Dynamo takes for granted once it has captured a module.

Dynamo looks at a module's own attributes again in each call, and not at the functions of its class.
So what it has captured belongs to the functions that there were.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import nn

from megacompile import compat

State = frozenset[tuple[type, int]]  # classes with other methods than at first, and which


class ClassMethods:
    """The methods that the classes of a model's modules have had; of a streamed model.

    Args:
        model: the modules in it, and those that will be.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._classes: dict[type, _Methods] = {}
        self.find()

    def find(self) -> None:
        """Look for classes that came since."""
        for kind in {type(module) for module in compat.modules_of(self._model)}:
            for cls in kind.__mro__:
                if cls not in self._classes and cls not in (nn.Module, object):
                    self._classes[cls] = _Methods(cls)

    def state(self) -> State:
        """Equal where all classes have the same methods."""
        return frozenset(
            (cls, state) for cls, methods in self._classes.items() if (state := methods.state())
        )


class _Methods:
    """The methods of one class: those that there have been, and which of them there are now."""

    def __init__(self, cls: type) -> None:
        self.cls = cls
        self._values: tuple[Any, ...] = ()
        self._had: list[dict[str, Any]] = []
        self._now = 0
        self.state()

    def state(self) -> int:
        """Number of others that there were before these first came."""
        values = tuple(vars(self.cls).values())
        if len(values) != len(self._values) or not all(map(operator.is_, values, self._values)):
            self._values = values
            self._now = self._position(
                {name: value for name, value in vars(self.cls).items() if _is_method(value)}
            )
        return self._now

    def _position(self, methods: dict[str, Any]) -> int:
        for k, had in enumerate(self._had):
            if had.keys() == methods.keys() and all(had[n] is methods[n] for n in had):
                return k
        self._had.append(methods)
        return len(self._had) - 1


def _is_method(value: Any) -> bool:
    return callable(value) or hasattr(type(value), "__get__")
