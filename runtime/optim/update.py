"""The update of one parameter, as data: what rules in plain torch and kernels both take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

# A tensor of the parameter's numel, or (codes, absmax) as blockwise.quantize returns them.
State: TypeAlias = Tensor | tuple[Tensor, Tensor]


class Update(NamedTuple):
    """One parameter of a bucket's update; all tensors contiguous and of the parameter's numel."""

    param: Tensor  # bf16, fp16, fp32 or fp64
    grad: Tensor  # any float dtype
    states: tuple[State | None, ...]  # in the order of the rule's `moments`
    hyper: Sequence[float]  # `OptimizerRule.hyper`
    out: Tensor | None = None  # where the new parameter goes, of its dtype; None is `param`
    copy: Tensor | None = None  # of another float dtype: takes the new parameter too
    seed: int | None = None  # a bf16 parameter is rounded stochastically with it
    factor: Tensor | None = None  # 0-d, of the gradient's dtype: first, as `grad.mul_(factor)` does

    def map(self, function: Callable[[str, Tensor], Tensor]) -> Update:
        """The update of what a function makes of each tensor that there is.

        It is told which one: "param", "grad", "state", "codes", "absmax", "out" or "copy".
        """

        def maybe(name: str, tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else function(name, tensor)

        def state(value: State | None) -> State | None:
            if isinstance(value, tuple):
                return function("codes", value[0]), function("absmax", value[1])
            return maybe("state", value)

        return self._replace(
            param=function("param", self.param),
            grad=function("grad", self.grad),
            states=tuple(map(state, self.states)),
            out=maybe("out", self.out),
            copy=maybe("copy", self.copy),
        )

    def tensors(self) -> list[tuple[str, Tensor]]:
        """Every tensor, with its name as in `map`."""
        found = []

        def note(name: str, tensor: Tensor) -> Tensor:
            found.append((name, tensor))
            return tensor

        self.map(note)
        return found


def math_dtype(param: torch.dtype) -> torch.dtype:
    """The dtype of the arithmetic, and of `hyper`, for parameters of a dtype."""
    return torch.float64 if param == torch.float64 else torch.float32
