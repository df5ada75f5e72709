"""The declaration of an op, from which everything else follows.

An op is a function with the decorator `op(...)`. Its name and arguments are those that the printed
Python calls. Its docstring says what it does. The decorator says its effects: its stream, the kinds
of values that it takes and returns, whose memory it makes, fills or frees, which parts of its
bucket it reads and writes in host memory, its slot, how it is shown, what it costs. `verify`, the
memory and cost models, traces and printed forms ask the declaration, never which op it is.
`megacompile.runtime.ops.executor` has a method of the op's name, which carries it out.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from torch import fx

from megacompile.ir.stages import Code
from megacompile.ir.stream import Stream
from megacompile.ir.tensors import tensors_bytes

__all__ = ["NO_OP", "OPS", "Op", "Part", "Show", "Takes", "Value", "alike"]  # of `ir.ops`


class Part(enum.Enum):
    """The parts of a bucket, where it is: in host memory, or resident on the device."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    STATES = "states"

    __hash__ = object.__hash__  # a member is one object; Enum hashes its name, in Python


class Value(enum.Enum):
    """The kind of value that an op returns; of a bucket or a stage, where its first argument is
    one."""

    POINT = "a point in time"
    WEIGHTS = "weights"
    SHARD = "the part of the weights that a rank has"
    RNG = "the state of the generators"
    COPY = "a copy"
    CHANGED = "a changed input"
    RESULTS = "results of a stage"  # a tuple
    SAVED_ON_HOST = "a saved tensor on the host"
    SAVED_ON_DISK = "a saved tensor on a disk"
    SAVED_BUFFER = "a buffer for a saved tensor"
    SAVED = "a saved tensor"
    GRADIENT_BUFFER = "a buffer for gradients"
    GRADIENTS_SO_FAR = "gradients so far"
    # Of a backward, or their sum with those so far, or over ranks. Those of a backward may be two
    # parameters', or a tangent: only memory of their own is changed in place.
    GRADIENTS = "gradients"
    NORMS = "norms"
    STATE_BUFFER = "a buffer for states"
    STATES = "states"
    UPDATED = "new parameters and states"
    DONE = "the end of a copy or an update"

    __hash__ = object.__hash__  # a member is one object; Enum hashes its name, in Python


class Show(enum.Enum):
    """The views that show an op; the Python has all of them."""

    STEP = "step"  # it has a row of the table
    CELL = "cell"  # in the row of the step that is issued after it
    ACTION = "action"  # among the actions, not in the table
    QUIET = "quiet"


@dataclass(frozen=True, slots=True)
class Takes:
    """A value among an op's arguments, by position."""

    at: int
    kind: Value | None = None  # what stands there, of the op's own bucket; None: anything
    optional: bool = False
    ends: bool = False  # the value goes nowhere else
    like: int | None = None  # it was made for the value that stands there


@dataclass(frozen=True, slots=True)
class Op:
    """The declaration of an op.

    Positions are those of its arguments. Memory is what the compute stream's allocator returns.
    """

    name: str
    stream: Stream
    label: Callable[[Sequence[Any]], str]  # from the positional arguments: "2PREFETCH@1"
    gives: Value | None = None
    takes: tuple[Takes, ...] = ()

    owns: bool = False  # what it returns is memory of its own
    fills: int | None = None  # what it returns is the memory of that argument, changed
    frees: int | None = None  # it gives up this argument's memory
    keeps: int | None = None  # this argument's memory is its bucket's from then on
    slot: int | None = None  # the argument that is the slot it works on
    fills_slot: bool = False
    reads: tuple[Part, ...] = ()  # of its bucket, where that is
    writes: tuple[Part, ...] = ()  # in this order
    lends: Part | None = None  # what it returns is that part of its bucket itself, where that is
    is_update: bool = False  # of a bucket, which has one in a step
    to_backward: bool = False  # the forward returns what it returns

    begins: bool = False  # it stands for everything that was queued before the schedule
    waits: bool = True  # its stream waits for what it names
    issues: bool = True  # it puts work on its stream
    drains: bool = False  # it waits for the copies of what earlier graphs deferred
    helps: bool = False  # it lets another stream make the work of ops that it names

    code: Callable[[Sequence[Any]], Code] | None = None  # what of its stage's template it runs
    count: Callable[[Sequence[Any]], int] | None = None  # how many values are in its tuple
    show: Show = Show.CELL
    # bytes through device memory, of an op without code
    traffic: Callable[[fx.Node], int] | None = None
    copied: Callable[[fx.Node], int] | None = None  # bytes over the link
    copies: Callable[[fx.Node], int] | None = None  # calls that this takes
    stored: Callable[[fx.Node], int] | None = None  # bytes from or to a disk
    gathered: Callable[[fx.Node], int] | None = None  # bytes that the ranks have together of it
    of_replicas: bool = False  # the ranks with the same rows do it, each with its part of that


def alike(op: Op) -> bool:
    """True if all ranks that share a model issue an op alike, in the same order."""
    return op.issues and op.stream is Stream.COMM


NO_OP = Op("", Stream.COMPUTE, lambda args: "", issues=False, show=Show.QUIET)
OPS: dict[Callable[..., Any], Op] = {}  # filled by the declarations

F = TypeVar("F", bound=Callable[..., Any])


def op(
    stream: Stream, label: Callable[[str], Callable[[Sequence[Any]], str]], **effects: Any
) -> Callable[[F], F]:
    """Declare a function as an op: `@op(Stream.H2D, by_slot, gives=Value.WEIGHTS, ...)`."""

    def declare(function: F) -> F:
        name = function.__name__
        OPS[function] = Op(name, stream, label(name.upper()), **effects)
        return function

    return declare


def unbound(function: Callable[..., Any]) -> NoReturn:
    """Raises: the op was called outside of a schedule."""
    raise AssertionError(
        f"op {function.__name__!r} runs through the executor, not by calling megacompile.ir.ops"
    )


# How ops are called in print.


def named(text: str) -> Callable[[Sequence[Any]], str]:
    """ "BEGIN"."""
    return lambda args: text


def by_subject(text: str) -> Callable[[Sequence[Any]], str]:
    """ "3OFFLOAD_GRAD": with the index of its stage, or the label of its bucket."""
    return lambda args: f"{getattr(args[0], 'label', None) or args[0].index}{text}"


def by_slot(text: str) -> Callable[[Sequence[Any]], str]:
    """ "3PREFETCH@1"."""
    return lambda args: f"{args[0].label}{text}@{'?' if args[1] is None else args[1].index}"


def short(text: str) -> Callable[[str], Callable[[Sequence[Any]], str]]:
    """Another text than the op's name: "3F"."""
    return lambda _: by_subject(text)


# Bytes that ops move: what the cost of an op is declared with.

Size = Callable[[fx.Node], int]


def value_bytes(node: Any) -> int:
    """Bytes of what a node returns; 0 for no node, and for what has no size."""
    return tensors_bytes(node.meta.get("value")) if isinstance(node, fx.Node) else 0


def of_value(times: int = 1) -> Size:
    """Those of what the op returns, as often."""
    return lambda node: times * value_bytes(node)


def of_argument(at: int, times: int = 1) -> Size:
    """Those of an argument, as often."""
    return lambda node: times * value_bytes(node.args[at])


def of_arguments(node: fx.Node) -> int:
    """Those of all arguments together."""
    taken: dict[fx.Node, None] = {}
    fx.map_arg(node.args, lambda n: taken.setdefault(n))
    return sum(map(value_bytes, taken))


def of_bucket(node: fx.Node) -> int:
    """Those of the op's bucket."""
    bucket: Any = node.args[0]
    return int(bucket.size_bytes)


def of_shard(node: fx.Node) -> int:
    """Those of one rank's part of the op's bucket."""
    bucket: Any = node.args[0]
    return int(bucket.shard_bytes)


def tensors_of_arguments(node: fx.Node) -> int:
    """Number of tensors of the largest group among the arguments."""
    values = [source.meta.get("value") for source in node.all_input_nodes]
    return max([len(value) for value in values if isinstance(value, tuple)], default=1)


def of_params(times: int = 1) -> Size:
    """Number of parameters of the op's bucket, times a factor."""

    def count(node: fx.Node) -> int:
        bucket: Any = node.args[0]
        return times * len(bucket.params)

    return count
