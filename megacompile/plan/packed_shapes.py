"""Stand-ins for packed parameters of a class of its own where there are only shapes.

Dynamo captures tensors of a foreign class only where they wrap others, and the code of that class
asks for it and for its attributes. So this is of that class, and wraps a fake tensor.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from megacompile import compat


class Shape(torch.Tensor):
    """The looks of a fake tensor, of another class too."""

    fake: torch.Tensor

    @staticmethod
    def __new__(cls, fake: torch.Tensor) -> Shape:
        self: Shape = compat.wrapper(cls, fake, fake.device)
        self.fake = fake
        self._is_param = True  # isinstance(self, nn.Parameter)
        return self

    def __init__(self, fake: torch.Tensor) -> None:
        del fake

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        del tensor_contents
        return f"{type(self).__name__}({self.fake!r})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["fake"], None

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, torch.Tensor], context: None, size: Any, stride: Any
    ) -> Shape:
        del context, size, stride
        return cls(inner["fake"])

    __torch_function__ = compat.NO_TORCH_FUNCTION  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        del types

        def inner(value: Any) -> Any:
            return value.fake if isinstance(value, Shape) else value

        given, given_kwargs = compat.tree_map(inner, (args, kwargs or {}))
        return func(*given, **given_kwargs)


@functools.cache
def shape_class(cls: type[torch.Tensor]) -> type[Shape]:
    """The stand-in for parameters of a class: `isinstance` says the same of it."""
    return type(f"Shape{cls.__name__}", (Shape, cls), {"__module__": __name__})
