"""The declaration of an op, from which everything else follows.

An op is a function with the decorator `op(...)`. Its name and arguments appear in the printed
Python. Its docstring describes it. The decorator declares its effects: its stream, the kinds of
values that it takes and returns, the memory that it allocates, fills or frees, the parts of its
bucket that it reads and writes in host memory, its slot, its views and its cost. `verify`, the
memory and cost models, traces and printed forms read the declaration and never test for a specific
op. `megacompile.runtime.ops.executor` implements it as a method with the op's name.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import fx

from megacompile.ir.stages import Code
from megacompile.ir.stream import Stream
from megacompile.ir.tensors import tensors_bytes

# Exported by `ir.ops`.
__all__ = ["NO_OP", "OPS", "Op", "Part", "Show", "Takes", "Value", "alike", "leaves_compute"]


class Part(enum.Enum):
    """The parts of a bucket, in host memory or resident on the device."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    STATES = "states"

    __hash__ = object.__hash__  # a member is one object; Enum hashes its name, in Python


class Value(enum.Enum):
    """The kind of value that an op returns, for the bucket or stage in its first argument."""

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
    # From a backward, or summed with earlier gradients or over ranks. A backward's gradients may
    # alias each other or a tangent: only separately allocated memory is changed in place.
    GRADIENTS = "gradients"
    NORMS = "norms"
    STATE_BUFFER = "a buffer for states"
    STATES = "states"
    UPDATED = "new parameters and states"
    DONE = "the end of a copy or an update"

    __hash__ = object.__hash__  # a member is one object; Enum hashes its name, in Python


class Show(enum.Enum):
    """The views that show an op; the printed Python shows all ops."""

    STEP = "step"  # in its own row of the table
    CELL = "cell"  # in the row of the next issued step
    ACTION = "action"  # in the list of actions, not in the table
    QUIET = "quiet"


@dataclass(frozen=True, slots=True)
class Takes:
    """A value argument of an op, by position."""

    at: int
    kind: Value | None = None  # its kind, of the op's own bucket; None: anything
    optional: bool = False
    ends: bool = False  # the value has no other user
    like: int | None = None  # it was created for the value at that position


@dataclass(frozen=True, slots=True)
class Op:
    """The declaration of an op.

    Positions are argument positions. "Memory" is allocated by the compute stream's allocator.
    """

    name: str
    stream: Stream
    label: Callable[[Sequence[Any]], str]  # from the positional arguments: "2PREFETCH@1"
    gives: Value | None = None
    takes: tuple[Takes, ...] = ()

    owns: bool = False  # its result is newly allocated
    fills: int | None = None  # its result is that argument's memory, changed in place
    frees: int | None = None  # it frees this argument's memory
    keeps: int | None = None  # its bucket takes over this argument's memory
    slot: int | None = None  # the position of its slot argument
    fills_slot: bool = False
    reads: tuple[Part, ...] = ()  # of its bucket, where that is
    writes: tuple[Part, ...] = ()  # in this order
    lends: Part | None = None  # its result is that part of its bucket, in place
    is_update: bool = False  # unique per bucket in a step
    to_backward: bool = False  # the forward returns its result

    begins: bool = False  # it represents all work queued before the schedule
    waits: bool = True  # its stream waits for its arguments
    issues: bool = True  # it issues work on its stream
    drains: bool = False  # it waits for copies that earlier graphs deferred
    helps: bool = False  # it lets another stream do the work of the named ops

    code: Callable[[Sequence[Any]], Code] | None = None  # the template code that it runs
    count: Callable[[Sequence[Any]], int] | None = None  # number of values in its tuple
    show: Show = Show.CELL
    # bytes through device memory, for an op without code
    traffic: Callable[[fx.Node], int] | None = None
    copied: Callable[[fx.Node], int] | None = None  # bytes over the link
    copies: Callable[[fx.Node], int] | None = None  # number of calls for the transfer
    stored: Callable[[fx.Node], int] | None = None  # bytes from or to a disk
    gathered: Callable[[fx.Node], int] | None = None  # bytes over all ranks
    of_replicas: bool = False  # among the ranks with the same rows, each with its part


def alike(op: Op) -> bool:
    """True if all ranks that share a model issue the op in the same order."""
    return op.issues and op.stream is Stream.COMM


def leaves_compute(op: Op) -> bool:
    """True if the op runs on another stream than compute."""
    return op.stream is not Stream.COMPUTE


NO_OP = Op("", Stream.COMPUTE, lambda args: "", issues=False, show=Show.QUIET)
OPS: dict[Callable[..., Any], Op] = {}  # filled by the declarations

F = TypeVar("F", bound=Callable[..., Any])


Label = Callable[[Sequence[Any]], str]


def by_subject(text: str) -> Label:
    """ "3OFFLOAD_GRAD": with the index of its stage, or the label of its bucket."""
    return lambda args: f"{getattr(args[0], 'label', None) or args[0].index}{text}"


def by_slot(text: str) -> Label:
    """ "3PREFETCH@1"."""
    return lambda args: f"{args[0].label}{text}@{'?' if args[1] is None else args[1].index}"


def named(text: str) -> Label:
    """ "BEGIN"."""
    return lambda args: text


def short(text: str) -> Callable[[str], Label]:
    """A printed text other than the op's name: "3F"."""
    return lambda _: by_subject(text)


def op(
    stream: Stream, label: Callable[[str], Label] = by_subject, **effects: Any
) -> Callable[[F], F]:
    """Declare a function as an op: `@op(Stream.H2D, by_slot, gives=Value.WEIGHTS, ...)`.

    Its body is its docstring: only the executor runs ops.
    """

    def declare(function: F) -> F:
        name = function.__name__
        OPS[function] = Op(name, stream, label(name.upper()), **effects)
        return function

    return declare


# What ops move, for their declared cost.


def value_bytes(node: Any) -> int:
    """Bytes of a node's result; 0 without a node or a size."""
    return tensors_bytes(node.meta.get("value")) if isinstance(node, fx.Node) else 0


def of_arguments(node: fx.Node) -> int:
    """Bytes of all arguments together."""
    taken: dict[fx.Node, None] = {}
    fx.map_arg(node.args, lambda n: taken.setdefault(n))
    return sum(map(value_bytes, taken))


def of_bucket(node: fx.Node) -> int:
    """Bytes of the op's bucket."""
    bucket: Any = node.args[0]
    return int(bucket.size_bytes)


def tensors_of_arguments(node: fx.Node) -> int:
    """Number of tensors in the largest group of arguments."""
    values = [source.meta.get("value") for source in node.all_input_nodes]
    return max([len(value) for value in values if isinstance(value, tuple)], default=1)


def params(node: fx.Node) -> int:
    """Number of parameters of the op's bucket."""
    bucket: Any = node.args[0]
    return len(bucket.params)
