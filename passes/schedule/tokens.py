"""Orders graphs after one another: an op that touches a bucket on the host names its last writer.

    before: 3PREFETCH@1              after: 3PREFETCH@1 after=(weights_3)

The first op of a forward or a backward that reads a part of a bucket in host memory takes the token
of that part, and a backward or an update returns the ops that were the last to write one (see
`megacompile.ir.tokens`). The compute stream is in order over all graphs, so its ops need no token
of the weights and states of a resident bucket; the h2d stream fetches the gradients of one. What an
update reads is after the gradients that it waits for.
"""

from __future__ import annotations

from torch import fx

from megacompile import compat
from megacompile.ir import ops
from megacompile.ir.ops import Op, Part
from megacompile.ir.schedule import Schedule
from megacompile.ir.stream import Stream
from megacompile.ir.tokens import Place, add, taken, written
from megacompile.passes.edit import body_of


def insert_tokens(schedule: Schedule) -> Schedule:
    """The schedule whose graphs take and return tokens."""
    new = schedule.copy()
    for name, graph in new.graphs.items():
        if name != "update":
            _wait(graph)
        if name != "forward":
            _return(graph)
    return new


def _wait(graph: fx.Graph) -> None:
    touched: set[Place] = set()
    there, body = taken(graph), body_of(graph)
    for node in ops.nodes_that(graph, lambda op: op.reads or op.writes):
        bucket = ops.bucket_of(node)
        op = ops.effects(node)
        for part in op.reads:
            if (bucket.key, part) in touched or _in_order(op, part):
                continue
            token = there.get((bucket.key, part)) or add(graph, bucket, part, body)
            after = node.kwargs.get("after", ())
            compat.set_kwargs(node, {**node.kwargs, "after": (token, *after)})  # type: ignore[misc]
        touched |= {(bucket.key, part) for part in op.reads} | set(written(node))


def _in_order(op: Op, part: Part) -> bool:
    """True if an op is in any case after the last write of a part of a resident bucket."""
    return op.stream is Stream.COMPUTE and part is not Part.GRADIENTS


def _return(graph: fx.Graph) -> None:
    last: dict[Place, fx.Node] = {}
    for node in ops.nodes_that(graph, lambda op: op.writes):
        last |= dict.fromkeys(written(node), node)
    *others, _ = ops.returned(graph)
    tokens = sorted(set(last.values()))  # in program order: of two, the later one wrote last
    compat.set_args(graph.output_node(), ((*others, tuple(tokens)),))
