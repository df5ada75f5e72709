"""The interface of an optimizer rule (`OptimizerRule`). Read this file before adding an optimizer.

A rule has the arithmetic of an update, with the names of `triton.language`: the kernel for the
device inlines it, and the twin, which is compiled to C++ for the host, calls it with the same names
in torch (`twin.TorchLanguage`). It is pure and elementwise, on values in fp32 (fp64 for fp64
parameters). All rules share the code around it: dtypes, 8-bit states, rounding, masters and their
copies (`twin.py`, `kernels.py`), and the time and place of an update (`runtime/updates`). The rest
of the code never checks which rule it has.

An optimizer whose update is not elementwise has an `OwnStep` instead, which runs torch's own code.
"""

from __future__ import annotations

import functools
import itertools
import operator
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from megacompile.runtime.optim.blockwise import BLOCK, absmax_numel

Group = Mapping[str, Any]  # a parameter group: its options


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
    return tuple(Option(name, is_number, "a number") for name in names)


@dataclass(frozen=True, kw_only=True, eq=False)
class KnownOptimizer:
    """An optimizer that can update streamed parameters."""

    # its exact classes: subclasses may do anything; "package.module.Class" of another package
    types: tuple[type[Optimizer] | str, ...]
    counts: bool  # True if it keeps a "step" in the state of each parameter
    moments: tuple[Moment, ...] = ()  # its states; optional ones are last: existing ones are first
    options: tuple[Option, ...] = ()  # that a parameter group must have
    # returns the reason why an optimizer must run its own step on the host, as a clause, or ""
    unsupported_reason: Callable[[Optimizer], str] = lambda optimizer: ""

    @property
    def names(self) -> tuple[str, ...]:
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
        for m in self.moments:
            is_on = m.option is None or group[m.option]
            if is_on and not (m.late and state.get(m.name) is None):
                yield m.name, shape


@dataclass(frozen=True, kw_only=True, eq=False)
class OwnStep(KnownOptimizer):
    """An optimizer whose own step runs on the device, a parameter at a time."""

    takes_dtensors: bool  # True if torch.optim's step is correct for sharded parameters

    def has_states(self, group: Group) -> bool:
        return True


@dataclass(frozen=True, kw_only=True, eq=False)
class OptimizerRule(KnownOptimizer):
    """An optimizer whose update is elementwise; see the module."""

    name: str  # the kernel's
    # (group, step, first) -> numbers. `step` counts from 1 (the state's "step"); `first` is True if
    # a state has no value yet
    scalars: Callable[[Group, float, bool], Sequence[float]]
    # (p, g, states, scalars) -> (new p, new states). `states` are the existing ones in the order of
    # `moments`; as many are returned. For tensors, (numel,) each, scalars are 0-d
    arithmetic: Callable[..., Any]

    def signed(self, name: str) -> bool:
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

    def map(self, function: Callable[[str, Tensor], Tensor]) -> Update:
        """The update with each existing tensor replaced by `function(name, tensor)`. Names are
        "param", "grad", "state", "codes", "absmax", "out" and "copy"."""

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
        named = []

        def note(name: str, tensor: Tensor) -> Tensor:
            named.append((name, tensor))
            return tensor

        self.map(note)
        return named


def math_dtype(param: torch.dtype) -> torch.dtype:
    """The dtype of the arithmetic and of `hyper` for a parameter's dtype."""
    return torch.float64 if param == torch.float64 else torch.float32


# The table of a bucket's parameters that an update kernel reads.
#
# The parameters of a bucket have their own tensors, sizes and scalars. Three device tensors
# describe them to the kernel, which shares this layout:
#
#     blocks  (programs, 2) int32: the parameter's row, the block's number in the parameter
#     table   (params, columns) int64: numel; addresses of param, out, copy, grad, each state (or
#             its codes) and each state's absmax; the seed. Missing tensors are 0
#     hyper   (params, columns) fp32 or fp64: `OptimizerRule.hyper`
#
# `blocks` depends only on the sizes and is cached. The others are fetched in every call, from one
# new pinned tensor (see `kernels.fetch`). If only gradients and scalars change between steps, the
# `Table` is reused.

NUMEL, PARAM, OUT, COPY, GRAD, STATES = range(6)  # columns; STATES is the first state's

PROGRAM_NUMEL = 1024  # elements per program; 2048 and 4096 are slower on an H200
_ALIGNMENT = 16  # wide loads need it: bytes of an address, elements of a size


class Signature(NamedTuple):
    """The compilation key of a kernel; all parameters of a launch share it."""

    param: torch.dtype
    grad: torch.dtype
    copy: torch.dtype | None
    states: tuple[torch.dtype | None, ...]  # uint8: 8-bit codes
    stochastic: bool
    aligned: bool


class Launch(NamedTuple):
    signature: Signature
    blocks: Tensor  # (programs, 2) int32
    packed: Tensor  # the table and the scalars on the host, both aligned to 16 bytes: int64
    columns: tuple[int, int]  # of the table and of the scalars
    params: int

    def split(self, packed: Tensor) -> tuple[Tensor, Tensor]:
        """The table and the scalars in `packed`, or in a copy of it."""
        dtype, (columns, hypers) = math_dtype(self.signature.param), self.columns
        numel = self.params * columns
        hyper = packed[numel + numel % 2 :].view(dtype)[: self.params * hypers]
        return packed[:numel].view(-1, columns), hyper.view(-1, hypers)


class Table:
    """The parameters of one launch, which can be repeated with other gradients."""

    def __init__(
        self, signature: Signature, rows: Sequence[list[int]], positions: Sequence[int]
    ) -> None:
        self.signature = signature
        self.positions = positions  # of the parameters in the step
        self._columns = len(rows[0])
        self._rows = array("q", itertools.chain.from_iterable(rows))
        self._numels = tuple([row[NUMEL] for row in rows])

    def renew(self, gradients: Sequence[int]) -> None:
        """Set the addresses of other gradients, aligned like the previous ones, of all parameters
        of the step."""
        self._rows[GRAD :: self._columns] = array("q", [gradients[k] for k in self.positions])

    def launch(
        self,
        hypers: Sequence[tuple[float, ...]],
        *,
        block: int = PROGRAM_NUMEL,
        device: torch.device,
    ) -> Launch:
        """The launch for a step with these scalars of all its parameters, `block` elements per
        program."""
        own = [hypers[k] for k in self.positions]
        kind = "d" if math_dtype(self.signature.param) == torch.float64 else "f"
        as_bytes = {each: array(kind, each).tobytes() for each in set(own)}
        packed = bytearray(self._rows.tobytes() + bytes(len(self._rows) % 2 * 8))
        packed.extend(b"".join(map(as_bytes.__getitem__, own)))
        packed.extend(bytes(-len(packed) % 8))
        return Launch(
            self.signature,
            program_blocks(self._numels, block, device),
            torch.frombuffer(packed, dtype=torch.int64),
            (self._columns, len(own[0])),
            len(own),
        )


def tables_of(described: Mapping[int, tuple[Signature, list[int]]]) -> list[Table]:
    """A table for each signature among the parameters: position -> signature and row."""
    groups: dict[Signature, list[int]] = {}
    for position, (signature, _) in described.items():
        groups.setdefault(signature, []).append(position)
    return [
        Table(signature, [described[position][1] for position in positions], positions)
        for signature, positions in groups.items()
    ]


def launches(
    rule: OptimizerRule, updates: Sequence[Update], *, block: int = PROGRAM_NUMEL
) -> Iterator[Launch]:
    """One launch for each signature among the updates, with `block` elements per program."""
    described = {i: describe(rule, update) for i, update in enumerate(updates)}
    hypers = [tuple(update.hyper) for update in updates]
    for table in tables_of({i: d for i, d in described.items() if d[1][NUMEL]}):
        yield table.launch(hypers, block=block, device=updates[0].grad.device)


def describe(rule: OptimizerRule, update: Update) -> tuple[Signature, list[int]]:
    """A parameter's signature and its row of the table."""
    param, grad, given, _, out, copy, seed = update
    numel = param.numel()
    out = param if out is None else out
    codes = [state[0] if isinstance(state, tuple) else state for state in given]
    absmaxes = [state[1] if isinstance(state, tuple) else None for state in given]
    assert len(given) == len(rule.moments) and out.dtype == param.dtype
    for moment, state, absmax in zip(rule.moments, codes, absmaxes, strict=True):
        assert state is not None or moment.option is not None, moment.name
        assert absmax is None or (state is not None and state.dtype == torch.uint8)
        assert absmax is None or absmax.dtype == torch.float32
    dense = [_address(tensor, numel) for tensor in (param, out, copy, grad, *codes)]
    scales = [_address(tensor, absmax_numel(numel)) for tensor in absmaxes]
    signature = Signature(
        param=param.dtype,
        grad=grad.dtype,
        copy=None if copy is None else copy.dtype,
        states=tuple(None if state is None else state.dtype for state in codes),
        stochastic=seed is not None and param.dtype == torch.bfloat16,
        aligned=functools.reduce(operator.or_, dense, numel) % _ALIGNMENT == 0,
    )
    return signature, [numel, *dense, *scales, seed or 0]


def _address(tensor: Tensor | None, numel: int) -> int:
    """The address of a tensor's memory; 0 if there is none."""
    assert tensor is None or (tensor.numel() == numel and tensor.is_contiguous())
    return 0 if tensor is None else tensor.data_ptr()


@functools.cache
def program_blocks(numels: tuple[int, ...], block: int, device: torch.device) -> Tensor:
    """The parameter and the block of each program: (programs, 2) int32."""
    counts = torch.tensor([-(-numel // block) for numel in numels])
    rows = torch.repeat_interleave(torch.arange(len(numels)), counts)
    starts = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    numbers = torch.arange(len(rows)) - starts
    return torch.stack([rows, numbers], 1).to(torch.int32).to(device)
