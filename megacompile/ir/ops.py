"""The vocabulary of a schedule: the functions that its FX nodes call.

A schedule's synchronisation is what its nodes show and nothing else: the values a node takes
(read after write), the order of its stream, and `after=` (write after read, free after use). The
runtime turns each such edge that crosses streams into an event record and a wait; the same edges
are what `megacompile.verify` proves. The functions here only name the ops and give their
signatures: `megacompile.runtime.ops.bound` holds what they do.

    op            stream    label        takes -> gives
    begin         compute   BEGIN        () -> a point after everything that was queued before
    prefetch      h2d       3PREFETCH@1  bucket, slot -> weights
    hold          compute   3HOLD@1      bucket, slot -> weights that the forward left in the slot
    resident      compute   3RESIDENT    bucket -> weights that stay on the device
    save_rng      compute   3RNG         stage -> the generators' state
    snapshot      compute   SNAPSHOT     tensor -> copy, made before the tensor is changed in place
    forward       compute   3F           stage, weights, args -> outputs, new values, saved
    assign        compute   ASSIGN       tensor, new value -> the tensor, changed in place
    recompute     compute   3RECOMPUTE   stage, weights, args, rng -> saved
    backward      compute   3B           stage, weights, args, saved, tangents, carries -> gradients
    offload       d2h       3OFFLOAD     stage, value -> its copy on the host
    alloc         compute   3ALLOC       stage, copy on the host -> room for the value
    fetch         h2d       3FETCH       stage, copy on the host, room -> the value again
    alloc_grad    compute   3ALLOC_GRAD  bucket -> room for its gradients
    fetch_grad    h2d       3FETCH_GRAD  bucket, room -> gradients so far, for accumulation
    add_grad      compute   3ADD_GRAD    bucket, gradients so far, gradients -> their sum
    norm_grad     compute   3NORM_GRAD   bucket, gradients -> their L2 norms and largest values
    offload_grad  d2h       3OFFLOAD_GRAD  bucket, gradients, norms -> done
    alloc_state   compute   3ALLOC_STATE   bucket -> room for its optimizer states
    fetch_state   h2d       3FETCH_STATE   bucket, room -> states
    update        compute   3UPDATE        bucket, weights, gradients, states -> all of them, new
    offload_state d2h       3OFFLOAD_STATE  bucket, new parameters and states -> done
    hand_over     compute   3HAND_OVER     bucket, gradients, states -> optimizer.step() takes them
    park          compute   PARK         value, after -> nothing; kept until `after` is done
    reclaim       compute   RECLAIM      () -> nothing; what was parked before goes
    free          compute   -            value, after -> nothing; printed as `del`
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import fx

from megacompile.ir.buckets import Bucket, Slot
from megacompile.ir.stages import Stage
from megacompile.ir.stream import Stream


def _unbound(name: str) -> NoReturn:
    raise AssertionError(
        f"op {name!r} runs through the executor, not by calling megacompile.ir.ops"
    )


def begin() -> Any:
    """Everything that was queued on the compute stream before this schedule."""
    _unbound("begin")


def prefetch(bucket: Bucket, slot: Slot, *, after: tuple[Any, ...] = ()) -> Any:
    """Copy a bucket into a slot; `after` is the last reader of what the slot held."""
    _unbound("prefetch")


def hold(bucket: Bucket, slot: Slot, *, after: tuple[Any, ...] = ()) -> Any:
    """Take the weights that the forward left in a slot."""
    _unbound("hold")


def resident(bucket: Bucket) -> Any:
    """Take the weights of a bucket that lives on the device."""
    _unbound("resident")


def save_rng(stage: Stage) -> Any:
    """The state of the random generators just before a stage that draws from them."""
    _unbound("save_rng")


def snapshot(tensor: Any) -> Any:
    """Copy a tensor that is about to be changed in place and that the backward needs as it was."""
    _unbound("snapshot")


def forward(stage: Stage, weights: tuple[Any, ...], args: tuple[Any, ...], saving: bool) -> Any:
    """Run a stage: outputs, new values of mutated inputs, and with `saving` its saved tensors."""
    _unbound("forward")


def assign(tensor: Any, value: Any, *, after: tuple[Any, ...] = ()) -> Any:
    """Write a new value into an input that the model changes in place (a BatchNorm statistic)."""
    _unbound("assign")


def recompute(stage: Stage, weights: tuple[Any, ...], args: tuple[Any, ...], rng: Any) -> Any:
    """Run a stage's forward again for its saved tensors, with the random numbers it drew then."""
    _unbound("recompute")


def backward(
    stage: Stage,
    weights: tuple[Any, ...],
    args: tuple[Any, ...],
    saved: tuple[Any, ...],
    tangents: tuple[Any, ...],
    carries: tuple[Any, ...],
) -> Any:
    """Gradients of a stage's inputs, then of its parameters, one group a bucket.

    `carries` are gradients so far of inputs and parameters that a later stage used too: they enter
    the stage's graph, so that sums run in the order in which autograd adds them.
    """
    _unbound("backward")


def offload(stage: Stage, value: Any) -> Any:
    """Copy what a stage's backward takes from the forward to the host, where it waits."""
    _unbound("offload")


def alloc(stage: Stage, on_host: Any) -> Any:
    """Device memory for a value that waits on the host."""
    _unbound("alloc")


def fetch(stage: Stage, on_host: Any, room: Any) -> Any:
    """Copy a value back to the device, once its `offload` is done."""
    _unbound("fetch")


def alloc_grad(bucket: Bucket) -> Any:
    """Device memory for a bucket's gradients so far."""
    _unbound("alloc_grad")


def fetch_grad(bucket: Bucket, room: Any) -> Any:
    """The gradients that earlier backwards left on the host."""
    _unbound("fetch_grad")


def add_grad(bucket: Bucket, so_far: Any, gradients: Any) -> Any:
    """`so_far + gradients`, as autograd accumulates into `p.grad`."""
    _unbound("add_grad")


def norm_grad(bucket: Bucket, gradients: Any) -> Any:
    """L2 norm and largest absolute value of each gradient, float32 (2, gradients)."""
    _unbound("norm_grad")


def offload_grad(bucket: Bucket, gradients: Any, norms: Any = None) -> Any:
    """Copy gradients to their places in the bucket's gradient buffer, and their norms along."""
    _unbound("offload_grad")


def alloc_state(bucket: Bucket, masters: bool) -> Any:
    """Device memory for a bucket's new parameters and its optimizer states.

    With `masters`, what is streamed is a copy of the parameters in another dtype.
    """
    _unbound("alloc_state")


def fetch_state(bucket: Bucket, room: Any, masters: bool) -> Any:
    """The optimizer states as the last update left them; with `masters`, the parameters too."""
    _unbound("fetch_state")


def update(bucket: Bucket, weights: Any, gradients: Any, state: Any) -> Any:
    """The optimizer's step on a bucket: new parameters and states, in the room of the states."""
    _unbound("update")


def offload_state(bucket: Bucket, updated: Any) -> Any:
    """Copy new parameters to their bucket, and new states to theirs."""
    _unbound("offload_state")


def hand_over(bucket: Bucket, gradients: Any, state: Any) -> Any:
    """Leave gradients, parameters and states on the device: `optimizer.step()` updates them there.

    What is on the host stays right: if anything is changed before the step, the step is made there.
    """
    _unbound("hand_over")


def park(value: Any, *, after: tuple[Any, ...] = ()) -> None:
    """Keep a value until `after` is done, or a `reclaim` comes; no stream waits for it here."""
    _unbound("park")


def reclaim() -> Any:
    """Give back what earlier backwards parked: the compute stream waits for the copies out of it.

    It is in a forward, half a schedule behind those copies. Nobody in its graph reads that memory,
    so it names no value, and it may be anywhere, or nowhere: then memory goes later.
    """
    _unbound("reclaim")


def free(value: Any, *, after: tuple[Any, ...] = ()) -> None:
    """Give a value's memory back, once `after` (readers on other streams) is done."""
    _unbound("free")


@dataclass(frozen=True, slots=True)
class Op:
    """What the schedule needs to know of an op: its stream and its printed name."""

    name: str
    stream: Stream
    label: Callable[[Sequence[Any]], str]  # from the op's positional arguments


def _named(text: str) -> Callable[[Sequence[Any]], str]:
    return lambda args: text


def _by_stage(suffix: str) -> Callable[[Sequence[Any]], str]:
    return lambda args: f"{args[0].index}{suffix}"


def _by_bucket(suffix: str) -> Callable[[Sequence[Any]], str]:
    return lambda args: f"{args[0].label}{suffix}"


def _by_slot(suffix: str) -> Callable[[Sequence[Any]], str]:
    return lambda args: f"{args[0].label}{suffix}@{'?' if args[1] is None else args[1].index}"


_C, _H, _D = Stream.COMPUTE, Stream.H2D, Stream.D2H
OPS: dict[Callable[..., Any], Op] = {
    begin: Op("begin", _C, _named("BEGIN")),
    prefetch: Op("prefetch", _H, _by_slot("PREFETCH")),
    hold: Op("hold", _C, _by_slot("HOLD")),
    resident: Op("resident", _C, _by_bucket("RESIDENT")),
    save_rng: Op("save_rng", _C, _by_stage("RNG")),
    snapshot: Op("snapshot", _C, _named("SNAPSHOT")),
    forward: Op("forward", _C, _by_stage("F")),
    assign: Op("assign", _C, _named("ASSIGN")),
    recompute: Op("recompute", _C, _by_stage("RECOMPUTE")),
    backward: Op("backward", _C, _by_stage("B")),
    offload: Op("offload", _D, _by_stage("OFFLOAD")),
    alloc: Op("alloc", _C, _by_stage("ALLOC")),
    fetch: Op("fetch", _H, _by_stage("FETCH")),
    alloc_grad: Op("alloc_grad", _C, _by_bucket("ALLOC_GRAD")),
    fetch_grad: Op("fetch_grad", _H, _by_bucket("FETCH_GRAD")),
    add_grad: Op("add_grad", _C, _by_bucket("ADD_GRAD")),
    norm_grad: Op("norm_grad", _C, _by_bucket("NORM_GRAD")),
    offload_grad: Op("offload_grad", _D, _by_bucket("OFFLOAD_GRAD")),
    alloc_state: Op("alloc_state", _C, _by_bucket("ALLOC_STATE")),
    fetch_state: Op("fetch_state", _H, _by_bucket("FETCH_STATE")),
    update: Op("update", _C, _by_bucket("UPDATE")),
    offload_state: Op("offload_state", _D, _by_bucket("OFFLOAD_STATE")),
    hand_over: Op("hand_over", _C, _by_bucket("HAND_OVER")),
    park: Op("park", _C, _named("PARK")),
    reclaim: Op("reclaim", _C, _named("RECLAIM")),
    free: Op("free", _C, _named("FREE")),
}


GIVE_WEIGHTS = (prefetch, hold, resident)


def call(
    graph: fx.Graph,
    op: Callable[..., Any],
    *args: Any,
    name: str | None = None,
    after: tuple[fx.Node, ...] | None = None,
) -> fx.Node:
    """Add a node that calls an op, where the graph inserts now."""
    kwargs: dict[str, Any] = {} if after is None else {"after": after}
    return graph.create_node("call_function", op, args, kwargs, name)


def arguments(node: fx.Node) -> tuple[Any, ...]:
    """The positional arguments of a node, which may be stages, buckets and slots."""
    return node.args


def returned(graph: fx.Graph) -> Any:
    """What a graph returns: (outputs, residuals) of a forward, gradients of a backward."""
    return graph.output_node().args[0]


def op_of(node: fx.Node) -> Op | None:
    """The op that a node calls; None for placeholders, outputs and `getitem`."""
    if node.op != "call_function" or node.target is operator.getitem:
        return None
    assert callable(node.target)
    return OPS[node.target]


def stream_of(node: fx.Node) -> Stream:
    """The stream that a node runs on; items and placeholders belong to the compute stream."""
    op = op_of(node)
    return Stream.COMPUTE if op is None else op.stream


def label(node: fx.Node) -> str:
    """The printed name of a node: "3PREFETCH@1", "3F"; a value's own name where it has no op."""
    op = op_of(node)
    return node.name if op is None else op.label(node.args)


def nodes_of(graph: fx.Graph, *targets: Callable[..., Any]) -> list[fx.Node]:
    """The nodes that call one of `targets` (every op without targets), in program order."""
    wanted = targets or tuple(OPS)
    return [n for n in graph.nodes if n.op == "call_function" and n.target in wanted]


def items(node: fx.Node) -> Iterator[tuple[int, fx.Node]]:
    """The `getitem` users of a node that gives a tuple, as (index, item)."""
    for user in node.users:
        if user.op == "call_function" and user.target is operator.getitem:
            index = user.args[1]
            assert isinstance(index, int)
            yield index, user


def actions(graph: fx.Graph) -> str:
    """The graph as one line of labels: "0PREFETCH@0 0F"; `begin`, frees, allocations left out."""
    quiet = (free, park, alloc, alloc_grad, alloc_state, begin, resident)
    return " ".join(label(n) for n in nodes_of(graph) if n.target not in quiet)
