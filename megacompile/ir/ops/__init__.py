"""The vocabulary of a schedule: the functions that its FX nodes call.

A schedule's synchronisation is what its nodes show and nothing else: the values a node takes
(read after write), the order of its stream, and `after=` (write after read, free after use, and
tokens of earlier graphs: `megacompile.ir.tokens`). The
runtime turns each such edge that crosses streams into an event record and a wait; the same edges
are what `megacompile.verify` proves. The functions here only name the ops and declare
their effects (`megacompile.ir.ops.op`): `megacompile.runtime.ops.executor` holds what they do.

    op             stream   label             takes -> returns
    begin          compute  BEGIN             () -> a point after everything that was queued before
    prefetch       h2d      3PREFETCH@1       bucket, slot -> weights
    reuse          compute  3REUSE@1          bucket, slot -> weights that the forward left there
    resident       compute  3RESIDENT         bucket -> weights that stay on the device
    save_rng       compute  3RNG              stage -> the generators' state
    snapshot       compute  SNAPSHOT          tensor -> copy, made before the tensor is changed
    forward        compute  3F                stage, weights, args -> outputs, new values, saved
    assign         compute  ASSIGN            tensor, new value -> the tensor, changed in place
    recompute      compute  3RECOMPUTE        stage, weights, args, rng -> saved
    rerun          compute  3RERUN            stage, weights, args, rng -> outputs
    backward       compute  3B                stage, weights, args, saved, ... -> gradients
    offload_saved  d2h      3OFFLOAD_SAVED    stage, value -> its copy on the host
    write_saved    write    3WRITE_SAVED      stage, copy on the host -> its copy on a disk
    read_saved     read     3READ_SAVED       stage, copy on a disk -> a copy on the host
    alloc_saved    compute  3ALLOC_SAVED      stage, copy on the host -> a buffer for the value
    fetch_saved    h2d      3FETCH_SAVED      stage, copy on the host, buffer -> the value again
    alloc_grad     compute  3ALLOC_GRAD       bucket -> a buffer for its gradients
    fetch_grad     h2d      3FETCH_GRAD       bucket, buffer -> gradients so far
    add_grad       compute  3ADD_GRAD         bucket, gradients so far, gradients -> their sum
    norm_grad      compute  3NORM_GRAD        bucket, gradients -> their norms and largest values
    keep_grad      compute  3KEEP_GRAD        bucket, gradients -> done; it lives on the device
    offload_grad   d2h      3OFFLOAD_GRAD     bucket, gradients, norms -> done
    alloc_state    compute  3ALLOC_STATE      bucket -> a buffer for its optimizer states
    fetch_state    h2d      3FETCH_STATE      bucket, buffer -> states
    update         compute  3UPDATE           bucket, weights, gradients, states -> all, new
    offload_state  d2h      3OFFLOAD_STATE    bucket, new parameters and states -> done
    update_host    host     3UPDATE           bucket -> done; in host memory
    update_resident compute 3UPDATE           bucket -> done; of a bucket that lives on the device
    read_state     read     3READ_STATE       bucket -> done; its states are in host memory
    write_state    write    3WRITE_STATE      bucket -> done; its states are on the disk
    read_weights   read     3READ_WEIGHTS     bucket -> done; its prefetch may copy from host memory
    read_trained   read     3READ_TRAINED     bucket -> done; an update on the host may change them
    write_weights  write    3WRITE_WEIGHTS    bucket -> done; its new parameters are on the disk
    update_in_place compute 3UPDATE           bucket, gradients, norms -> done; in the backward
    prefetch_shard h2d      3PREFETCH_SHARD@1 bucket, slot -> this rank's part of the weights
    all_gather     comm     3ALL_GATHER@1     bucket, slot, this rank's part -> weights
    alloc_shard    compute  3ALLOC_SHARD      bucket -> a buffer for this rank's gradients
    reduce_scatter comm     3REDUCE_SCATTER   bucket, gradients, buffer -> their mean over ranks
    all_reduce     comm     3ALL_REDUCE       bucket, gradients -> their mean over replicas
    help_host      device   HELP_HOST         updates -> nothing; the device makes some of them
    defer_free     compute  DEFER_FREE        value, after -> nothing; kept until `after` is done
    drain          compute  DRAIN             () -> nothing; what was deferred before goes
    free           compute  -                 value, after -> nothing; printed as `del`
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator
from typing import Any

from torch import fx

from megacompile import compat
from megacompile.ir.buckets import Bucket
from megacompile.ir.ops.collectives import (
    all_gather,
    all_reduce,
    alloc_shard,
    prefetch_shard,
    reduce_scatter,
    scattered,
)
from megacompile.ir.ops.compute import (
    assign,
    backward,
    forward,
    recompute,
    rerun,
    save_rng,
    snapshot,
)
from megacompile.ir.ops.device_updates import alloc_state, fetch_state, offload_state, update
from megacompile.ir.ops.disk import (
    read_state,
    read_trained,
    read_weights,
    write_state,
    write_weights,
)
from megacompile.ir.ops.gradients import (
    add_grad,
    alloc_grad,
    fetch_grad,
    keep_grad,
    norm_grad,
    offload_grad,
)
from megacompile.ir.ops.lifetimes import defer_free, drain, free
from megacompile.ir.ops.op import NO_OP, OPS, Op, Part, Show, Takes, Value, alike
from megacompile.ir.ops.saved_tensors import (
    alloc_saved,
    fetch_saved,
    offload_saved,
    read_saved,
    write_saved,
)
from megacompile.ir.ops.updates import help_host, update_host, update_in_place, update_resident
from megacompile.ir.ops.weights import begin, prefetch, resident, reuse
from megacompile.ir.stages import Code
from megacompile.ir.stream import Stream

__all__ = [
    "OPS",
    "Op",
    "Part",
    "Show",
    "Takes",
    "Value",
    "actions",
    "add_grad",
    "all_gather",
    "all_reduce",
    "alloc_grad",
    "alloc_saved",
    "alloc_shard",
    "alike",
    "alloc_state",
    "arguments",
    "assign",
    "backward",
    "begin",
    "bucket_of",
    "call",
    "calls_by_stage",
    "code_of",
    "copied_bytes",
    "defer_free",
    "drain",
    "effects",
    "fetch_grad",
    "fetch_saved",
    "fetch_state",
    "forward",
    "free",
    "help_host",
    "items",
    "keep_grad",
    "label",
    "nodes_of",
    "nodes_that",
    "norm_grad",
    "offload_grad",
    "offload_saved",
    "offload_state",
    "op_of",
    "prefetch",
    "prefetch_shard",
    "read_saved",
    "read_state",
    "read_trained",
    "read_weights",
    "recompute",
    "reduce_scatter",
    "rerun",
    "resident",
    "returned",
    "reuse",
    "save_rng",
    "scattered",
    "snapshot",
    "stored_bytes",
    "stream_of",
    "update",
    "update_host",
    "update_in_place",
    "update_resident",
    "write_saved",
    "write_state",
    "write_weights",
]


def call(
    graph: fx.Graph,
    op: Callable[..., Any],
    *args: Any,
    name: str | None = None,
    after: tuple[fx.Node, ...] | None = None,
) -> fx.Node:
    """Add a node that calls an op, where the graph inserts now.

    `create_node` would look into each argument for symbols, and a search makes a million nodes.
    """
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
    """The bucket that a node is about: the first argument of all ops that have one."""
    bucket: Bucket = arguments(node)[0]
    return bucket


def returned(graph: fx.Graph) -> Any:
    """The values that a graph returns: (outputs, saved values) of a forward; (gradients of inputs,
    what is left for the update, tokens) of a backward; (tokens,) of an update."""
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


def copied_bytes(node: fx.Node) -> int:
    """Bytes that an op moves between host and device."""
    copied = effects(node).copied
    return 0 if copied is None else copied(node)


def stored_bytes(node: fx.Node) -> int:
    """Bytes that an op moves between a disk and host memory."""
    stored = effects(node).stored
    return 0 if stored is None else stored(node)


def stream_of(node: fx.Node) -> Stream:
    """The stream that a node runs on; items and placeholders belong to the compute stream."""
    op = op_of(node)
    return Stream.COMPUTE if op is None else op.stream


def label(node: fx.Node) -> str:
    """The printed name of a node: "3PREFETCH@1", "3F"; a value's own name where it has no op."""
    op = op_of(node)
    return node.name if op is None else op.label(node.args)


def nodes_that(graph: fx.Graph, wanted: Callable[[Op], object]) -> list[fx.Node]:
    """The nodes whose op has an effect, in program order: `nodes_that(g, lambda op: op.code)`."""
    targets = [target for target, op in OPS.items() if wanted(op)]
    return nodes_of(graph, *targets) if targets else []


def nodes_of(graph: fx.Graph, *targets: Callable[..., Any]) -> list[fx.Node]:
    """The nodes that call one of `targets` (every op without targets), in program order.

    The graph has a table of them; of every op, its nodes are looked through.
    """
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
    """The code of its template that a compute node runs."""
    code = effects(node).code
    assert code is not None, f"{label(node)} runs no template"
    return code(node.args)


def items(node: fx.Node) -> Iterator[tuple[int, fx.Node]]:
    """The `getitem` users of a node that returns a tuple, as (index, item)."""
    for user in node.users:
        if user.op == "call_function" and user.target is operator.getitem:
            index = user.args[1]
            assert isinstance(index, int)
            yield index, user


def actions(graph: fx.Graph) -> str:
    """The graph as one line of labels: "0PREFETCH@0 0F"; allocations and frees are left out."""
    found = ((node, op_of(node)) for node in nodes_of(graph))
    return " ".join(label(n) for n, op in found if op is not None and op.show is not Show.QUIET)
