"""The interface of an optimizer rule: the one place to look at before adding an optimizer.

A rule is a file of this folder with one `OptimizerRule`, and a line in `registry.KNOWN`. It has

    types     the optimizers it stands for
    moments   their states, by the names in `optimizer.state[p]`
    options   what a parameter group must hold
    scalars   what a step makes of a parameter group: the numbers that the arithmetic takes
    twin      the arithmetic in plain torch: compiled to C++ for the host
    kernel    the arithmetic in Triton, for the device; the twin is what it is tested against

Twin and kernel are pure and elementwise, on values in fp32 (fp64 for fp64 parameters). Everything
around them is the same for all rules: dtypes, 8-bit states, rounding, masters and their copies
(`twin.py`, `kernels/update.py`), and when and where an update is made (`runtime/updates`). The rest
of the code asks the rule, and never which one it is.

An optimizer whose update is not elementwise has an `OwnStep` instead: its own code runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

Group = Mapping[str, Any]  # a parameter group: its options
MAX_MOMENTS = 3  # that the kernel has arguments for

# (p, g, states, scalars) -> (new p, new states). Tensors are (numel,) in the arithmetic's dtype,
# scalars 0-d. `states` are those that there are, in the order of `moments`; as many come back.
Twin = Callable[
    [Tensor, Tensor, tuple[Tensor, ...], Sequence[Tensor]], tuple[Tensor, tuple[Tensor, ...]]
]


@dataclass(frozen=True, slots=True)
class Moment:
    """A state with an element for each of the parameter's; it begins as zeros."""

    name: str  # in `optimizer.state[p]`
    signed: bool = True  # has it negative values? Its 8-bit codes go by that
    option: str | None = None  # of the group, which must be true, or not 0; None: always there
    late: bool = False  # a state without it is right: the next step makes it


@dataclass(frozen=True, slots=True)
class Option:
    """The requirements on an option of a parameter group for an update to begin."""

    name: str
    fits: Callable[[Any], bool]
    needed: str  # in an error, after "needed"


def is_number(value: Any) -> bool:
    """True if it is a real number, or a tensor of one."""
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, (int, float)) or isinstance(value, Real)  # that asks an ABC


def numbers(*names: str) -> tuple[Option, ...]:
    """Options that are one number each."""
    return tuple(Option(name, is_number, "a number") for name in names)


def _never(optimizer: Optimizer) -> str:
    del optimizer
    return ""


@dataclass(frozen=True, kw_only=True, eq=False)
class KnownOptimizer:
    """An optimizer that can update streamed parameters.

    Attributes:
        types: its classes, which must be the very ones: a subclass may do anything. A class of
            another package stands as its dotted name, such as "package.module.Class".
        counts: does it keep a "step" in the state of each parameter?
        options: what a parameter group must hold.
        unsupported_reason: why this optimizer must make its own step after all, as a clause; "" if
            not.
    """

    types: tuple[type[Optimizer] | str, ...]
    counts: bool
    options: tuple[Option, ...] = ()
    unsupported_reason: Callable[[Optimizer], str] = _never

    @property
    def names(self) -> tuple[str, ...]:
        """Names of its classes, as an error lists them."""
        return tuple(
            kind.rpartition(".")[2] if isinstance(kind, str) else kind.__name__
            for kind in self.types
        )

    def has_states(self, group: Group) -> bool:
        """True if a parameter of this group has states after its first step."""
        raise NotImplementedError

    def shapes(
        self, group: Group, shape: Sequence[int], state: Mapping[str, Any]
    ) -> Iterable[tuple[str, Sequence[int]]]:
        """The names and shapes that a parameter's state must have, if it has anything."""
        raise NotImplementedError

    def because(self, name: str) -> str:
        """The reason why a state that is missing is needed, as an error's parenthesis; "" if that
        is plain."""
        del name
        return ""


@dataclass(frozen=True, kw_only=True, eq=False)
class OwnStep(KnownOptimizer):
    """An optimizer whose own step runs on the device, a parameter at a time.

    Attributes:
        state_shapes: as `shapes`.
        takes_dtensors: is torch.optim's step right where ranks share the parameters?
    """

    state_shapes: Callable[
        [Group, Sequence[int], Mapping[str, Any]], Iterable[tuple[str, Sequence[int]]]
    ]
    takes_dtensors: bool

    def has_states(self, group: Group) -> bool:
        del group
        return True

    def shapes(
        self, group: Group, shape: Sequence[int], state: Mapping[str, Any]
    ) -> Iterable[tuple[str, Sequence[int]]]:
        return self.state_shapes(group, shape, state)


@dataclass(frozen=True, kw_only=True, eq=False)
class OptimizerRule(KnownOptimizer):
    """An optimizer whose update is elementwise; see the module.

    Attributes:
        name: of the kernel.
        moments: its states; those with an `option` come last, so that states that are there are the
            first ones.
        scalars: (group, step, first) -> numbers. `step` counts from 1 (by the "step" of the state);
            `first`: some state has no value yet.
        twin: see `Twin`.
        kernel: the twin in Triton's language, called the same way. It is not decorated: triton is
            imported when the first bucket is updated on a GPU, and is given `tl` then.
    """

    name: str
    moments: tuple[Moment, ...]
    scalars: Callable[[Group, float, bool], Sequence[float]]
    twin: Twin
    kernel: Callable[..., Any]

    def __post_init__(self) -> None:
        assert len(self.moments) <= MAX_MOMENTS, f"{self.name}: the kernel takes {MAX_MOMENTS}"

    def state_names(self, group: Group) -> tuple[str, ...]:
        """The states of a parameter of this group, in the order of `moments`."""
        return tuple(m.name for m in self.moments if m.option is None or group[m.option])

    def signed(self, name: str) -> bool:
        """True if a state has negative values."""
        return all(moment.signed for moment in self.moments if moment.name == name)

    def has_states(self, group: Group) -> bool:
        return bool(self.state_names(group))

    def shapes(
        self, group: Group, shape: Sequence[int], state: Mapping[str, Any]
    ) -> Iterable[tuple[str, Sequence[int]]]:
        late = {m.name for m in self.moments if m.late}
        for name in self.state_names(group):
            if name not in late or state.get(name) is not None:
                yield name, shape

    def because(self, name: str) -> str:
        option = next((m.option for m in self.moments if m.name == name), None)
        return "" if option is None else f" ({option}=True needs it)"

    def hyper(
        self, group: Group, *, step: float | Tensor = 1, first: bool = False, scale: float = 1.0
    ) -> tuple[float, ...]:
        """The numbers of one step: the gradient's factor, negative to maximize, and `scalars`."""
        factor = -scale if group.get("maximize", False) else scale
        return (factor, *self.scalars(group, float(step), first))


# The update of one parameter, as data: what rules in plain torch and kernels both take.

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
