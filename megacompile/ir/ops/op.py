"""The declaration of an op, from which everything else follows.

An op is a function with the decorator `op(...)`, which declares its effects. `verify`, the memory
and cost models, traces and printed forms read the declaration and never test for a specific op.
`megacompile.runtime.ops.executor` implements it as a method with the op's name.
"""

from __future__ import annotations

import enum
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import fx

from megacompile import compat
from megacompile.ir.buckets import Bucket
from megacompile.ir.stages import Code
from megacompile.ir.stream import Stream
from megacompile.ir.tensors import tensors_bytes


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
    """The declaration of an op. Positions are those of arguments. "Memory" is allocated by the
    compute stream's allocator."""

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
    # bytes over the link, from or to a disk, or over all ranks; through device memory, for a
    # compute without code
    moves: Callable[[fx.Node], int] | None = None
    copies: Callable[[fx.Node], int] = lambda node: 1  # number of calls for the transfer
    of_replicas: bool = False  # among the ranks with the same rows, each with its part

    @property
    def fills_slot(self) -> bool:
        """True if it writes weights into its slot."""
        return self.slot is not None and self.stream is not Stream.COMPUTE

    @property
    def on_disk(self) -> bool:
        """True if it reads from a disk or writes to it."""
        return self.stream in (Stream.READ, Stream.WRITE)


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
    """Declare a function as an op: `@op(Stream.H2D, by_slot, gives=Value.WEIGHTS, ...)`. Its body
    is its docstring: only the executor runs ops. By default a copy to the host moves its arguments,
    and another copy its result."""
    if stream in (Stream.H2D, Stream.READ, Stream.WRITE):
        effects.setdefault("moves", value_bytes)
    elif stream is Stream.D2H:
        effects.setdefault("moves", of_arguments)

    def declare(function: F) -> F:
        name = function.__name__
        OPS[function] = Op(name, stream, label(name.upper()), **effects)
        return function

    return declare


def value_bytes(node: Any) -> int:
    """Bytes of a node's result; 0 without a node or a size."""
    return tensors_bytes(node.meta.get("value")) if isinstance(node, fx.Node) else 0


def of_arguments(node: fx.Node) -> int:
    """Bytes of all arguments together."""
    taken = set[fx.Node]()
    fx.map_arg(node.args, taken.add)
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


def call(
    graph: fx.Graph,
    op: Callable[..., Any],
    *args: Any,
    name: str | None = None,
    after: tuple[fx.Node, ...] | None = None,
) -> fx.Node:
    """Add a node that calls an op, at the graph's insertion point. `create_node` searches each
    argument for symbols, and a plan search creates a million nodes."""
    kwargs = {} if after is None else {"after": after}
    if name is not None:
        return compat.new_node(graph, "call_function", op, name, args, kwargs)
    node = graph.create_node("call_function", op)
    compat.set_args(node, args)
    compat.set_kwargs(node, kwargs)
    return node


def arguments(node: fx.Node) -> tuple[Any, ...]:
    """The positional arguments of a node, which may be stages, buckets and slots."""
    return node.args


def bucket_of(node: fx.Node) -> Bucket:
    """The bucket of a node: the first argument of all bucket ops."""
    bucket: Bucket = arguments(node)[0]
    return bucket


def returned(graph: fx.Graph) -> Any:
    """The results of a graph: (outputs, saved values) of a forward; (gradients of inputs, values
    left for the update, tokens) of a backward; (tokens,) of an update."""
    return graph.output_node().args[0]


def op_of(node: fx.Node) -> Op | None:
    """The op that a node calls; None for placeholders, outputs and `getitem`."""
    target: Any = node.target
    op = OPS.get(target)
    if op is None and node.op == "call_function" and target is not operator.getitem:
        raise KeyError(target)
    return op


def effects(node: fx.Node) -> Op:
    """The op that a node calls; one without effects for placeholders, outputs and `getitem`."""
    target: Any = node.target
    return OPS.get(target) or op_of(node) or NO_OP


def moved_bytes(node: fx.Node) -> int:
    """Bytes that an op moves over the link, from or to a disk, or over all ranks."""
    op = effects(node)
    return 0 if op.moves is None or op.stream is Stream.COMPUTE else op.moves(node)


def stream_of(node: fx.Node) -> Stream:
    """The stream that a node runs on; items and placeholders belong to the compute stream."""
    op = op_of(node)
    return Stream.COMPUTE if op is None else op.stream


def label(node: fx.Node) -> str:
    """The printed name of a node: "3PREFETCH@1", "3F"; the value's name if it has no op."""
    op = op_of(node)
    return node.name if op is None else op.label(node.args)


def nodes_that(graph: fx.Graph, wanted: Callable[[Op], object]) -> list[fx.Node]:
    """The nodes whose op has an effect, in program order: `nodes_that(g, lambda op: op.code)`."""
    targets = [target for target, op in OPS.items() if wanted(op)]
    return nodes_of(graph, *targets) if targets else []


def nodes_of(graph: fx.Graph, *targets: Callable[..., Any]) -> list[fx.Node]:
    """The nodes that call one of `targets` (every op without targets), in program order."""
    if not targets:
        return [n for n in graph.nodes if n.target in OPS]
    if len(targets) == 1:
        return list(graph.find_nodes(op="call_function", target=targets[0]))
    each = (graph.find_nodes(op="call_function", target=t, sort=False) for t in targets)
    return sorted(itertools.chain.from_iterable(each))


def calls_by_stage(graph: fx.Graph, target: Callable[..., Any]) -> dict[int, fx.Node]:
    """The nodes that call `target`, by the index of their stage."""
    return {arguments(node)[0].index: node for node in nodes_of(graph, target)}


def code_of(node: fx.Node) -> Code:
    """The template code that a compute node runs."""
    code = effects(node).code
    assert code is not None, f"{label(node)} runs no template"
    return code(node.args)


def items(node: fx.Node) -> Iterator[tuple[int, fx.Node]]:
    """The `getitem` users of a node that returns a tuple, as (index, item)."""
    for user in node.users:
        if user.op == "call_function" and user.target is operator.getitem:
            index: Any = user.args[1]
            yield index, user


def actions(graph: fx.Graph) -> str:
    """The graph as one line of labels: "0PREFETCH@0 0F"; omits allocations and frees."""
    found = ((node, op_of(node)) for node in nodes_of(graph))
    return " ".join(label(n) for n, op in found if op is not None and op.show is not Show.QUIET)
