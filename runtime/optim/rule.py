"""The interface of an optimizer rule (`OptimizerRule`). Read this file before adding an optimizer.

A rule has the arithmetic of an update twice: in plain torch (the twin, compiled to C++ for the
host) and in Triton (the kernel, for the device), tested against each other. Both are pure and
elementwise, on values in fp32 (fp64 for fp64 parameters). All rules share the code around them:
dtypes, 8-bit states, rounding, masters and their copies (`twin.py`, `kernels.py`), and the time and
place of an update (`runtime/updates`). The rest of the code never checks which rule it has.

An optimizer whose update is not elementwise has an `OwnStep` instead, which runs torch's own code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from megacompile.runtime.optim.blockwise import BLOCK

Group = Mapping[str, Any]  # a parameter group: its options

# (p, g, states, scalars) -> (new p, new states). Tensors are (numel,) in the arithmetic's dtype,
# scalars 0-d. `states` are the existing ones in the order of `moments`; as many are returned.
Twin = Callable[
    [Tensor, Tensor, tuple[Tensor, ...], Sequence[Tensor]], tuple[Tensor, tuple[Tensor, ...]]
]


@dataclass(frozen=True, slots=True)
class Moment:
    """A state shaped like the parameter, initially zeros."""

    name: str  # in `optimizer.state[p]`
    signed: bool = True  # True if values can be negative; selects the map of the 8-bit codes
    option: str | None = None  # the group option that enables it (true or not 0); None: always on
    late: bool = False  # True if other states may exist without it; the next step creates it


@dataclass(frozen=True, slots=True)
class Option:
    """A required option of a parameter group, checked before an update begins."""

    name: str
    fits: Callable[[Any], bool]
    needed: str  # in an error, after "needed"


def is_number(value: Any) -> bool:
    """True for a real number or a tensor with one."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, (int, float)) or isinstance(value, Real)  # an ABC: slow


def numbers(*names: str) -> tuple[Option, ...]:
    """Options with numeric values."""
    return tuple(Option(name, is_number, "a number") for name in names)


@dataclass(frozen=True, kw_only=True, eq=False)
class KnownOptimizer:
    """An optimizer that can update streamed parameters.

    Attributes:
        types: its exact classes; subclasses do not count, because they may do anything. A class of
            another package is given by its dotted name, such as "package.module.Class".
        counts: True if it keeps a "step" in the state of each parameter.
        moments: its states. Optional ones come last, so the existing states are the first ones.
        options: the required options of a parameter group.
        unsupported_reason: returns the reason why an optimizer must run its own step on the host,
            as a clause, or "".
    """

    types: tuple[type[Optimizer] | str, ...]
    counts: bool
    moments: tuple[Moment, ...] = ()
    options: tuple[Option, ...] = ()
    unsupported_reason: Callable[[Optimizer], str] = lambda optimizer: ""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of its classes, for errors."""
        kinds = (kind if isinstance(kind, str) else kind.__name__ for kind in self.types)
        return tuple(kind.rpartition(".")[2] for kind in kinds)

    def state_names(self, group: Group) -> tuple[str, ...]:
        """The states of a parameter of this group, in the order of `moments`."""
        return tuple([m.name for m in self.moments if m.option is None or group[m.option]])

    def has_states(self, group: Group) -> bool:
        """True if a parameter of this group has states after its first step."""
        return bool(self.state_names(group))

    def shapes(
        self, group: Group, shape: Sequence[int], state: Mapping[str, Any]
    ) -> Iterable[tuple[str, Sequence[int]]]:
        """The required names and shapes in a parameter's state, unless the state is empty."""
        late = {m.name for m in self.moments if m.late}
        for name in self.state_names(group):
            if name not in late or state.get(name) is not None:
                yield name, shape

    def because(self, name: str) -> str:
        """The reason why a missing state is needed, in parentheses for an error; "" if obvious."""
        option = next((m.option for m in self.moments if m.name == name), None)
        return "" if option is None else f" ({option}=True needs it)"


@dataclass(frozen=True, kw_only=True, eq=False)
class OwnStep(KnownOptimizer):
    """An optimizer whose own step runs on the device, a parameter at a time.

    Attributes:
        takes_dtensors: True if torch.optim's step is correct for sharded parameters.
    """

    takes_dtensors: bool

    def has_states(self, group: Group) -> bool:
        del group
        return True


@dataclass(frozen=True, kw_only=True, eq=False)
class OptimizerRule(KnownOptimizer):
    """An optimizer whose update is elementwise; see the module.

    Attributes:
        name: the kernel's name.
        scalars: (group, step, first) -> numbers. `step` counts from 1 (the state's "step"); `first`
            is True if a state has no value yet.
        twin: see `Twin`.
        kernel: the twin in Triton, with the same arguments. It is not decorated, and `tl` is bound
            later, because triton is imported for the first update on a GPU.
    """

    name: str
    scalars: Callable[[Group, float, bool], Sequence[float]]
    twin: Twin
    kernel: Callable[..., Any]

    def signed(self, name: str) -> bool:
        """True if a state can have negative values."""
        return all(moment.signed for moment in self.moments if moment.name == name)

    def hyper(
        self, group: Group, *, step: float | Tensor = 1, first: bool = False, scale: float = 1.0
    ) -> tuple[float, ...]:
        """The numbers of one step: the gradient's factor (negative to maximize) and `scalars`."""
        factor = -scale if group.get("maximize", False) else scale
        return (factor, *self.scalars(group, float(step), first))


# The update of one parameter as data: the input of twins and kernels.

# A tensor of the parameter's numel, or the (codes, absmax) of blockwise.quantize.
State: TypeAlias = Tensor | tuple[Tensor, Tensor]


def map_state(function: Callable[[Tensor], Tensor], state: Any) -> Any:
    """A state with `function` applied to its tensors; anything else, such as None, unchanged."""
    if isinstance(state, tuple):
        return tuple(map(function, state))
    return function(state) if isinstance(state, Tensor) else state


class Update(NamedTuple):
    """The update of one parameter; tensors are contiguous and have the parameter's numel."""

    param: Tensor  # bf16, fp16, fp32 or fp64
    grad: Tensor  # any float dtype
    states: tuple[State | None, ...]  # in the order of the rule's `moments`
    hyper: Sequence[float]  # `OptimizerRule.hyper`
    out: Tensor | None = None  # destination of the new parameter, of its dtype; None: `param`
    copy: Tensor | None = None  # second destination, of another float dtype
    seed: int | None = None  # of stochastic rounding, for a bf16 parameter
    factor: Tensor | None = None  # 0-d, of the gradient's dtype; applied first, as by `grad.mul_`

    def map(self, function: Callable[[str, Tensor], Tensor]) -> Update:
        """The update with each existing tensor replaced by `function(name, tensor)`.

        Names are "param", "grad", "state", "codes", "absmax", "out" and "copy".
        """

        def state(value: State | None) -> State | None:
            if isinstance(value, tuple):
                return function("codes", value[0]), function("absmax", value[1])
            return None if value is None else function("state", value)

        return self._replace(
            param=function("param", self.param),
            grad=function("grad", self.grad),
            states=tuple(map(state, self.states)),
            out=None if self.out is None else function("out", self.out),
            copy=None if self.copy is None else function("copy", self.copy),
        )

    def part(self, first: int, end: int) -> Update:
        """Elements [first, end) of flat tensors; `first` is a multiple of `BLOCK`."""

        def part(name: str, tensor: Tensor) -> Tensor:
            if name == "absmax":
                return tensor[first // BLOCK : -(-end // BLOCK)]
            return tensor[first:end]

        return self.map(part)

    def tensors(self) -> list[tuple[str, Tensor]]:
        """All tensors, with the names of `map`."""
        named = []

        def note(name: str, tensor: Tensor) -> Tensor:
            named.append((name, tensor))
            return tensor

        self.map(note)
        return named


def math_dtype(param: torch.dtype) -> torch.dtype:
    """The dtype of the arithmetic and of `hyper` for a parameter's dtype."""
    return torch.float64 if param == torch.float64 else torch.float32
