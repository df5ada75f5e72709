"""Orders ops across graphs: an op that touches a bucket on the host names its last writer.

    before: 3PREFETCH@1              after: 3PREFETCH@1 after=(weights_3)

The first op of a forward or a backward that reads a part of a bucket in host memory takes the token
of that part, and a backward or an update returns the last ops that wrote a part (see
`megacompile.ir.edges`). The compute stream is in order across graphs, so its ops need tokens only
for gradients. The ops of an update already wait for these.
"""

from __future__ import annotations

from torch import fx

from megacompile import compat
from megacompile.ir import ops
from megacompile.ir.edges import Place, add, tokens_of, written
from megacompile.ir.ops import Part
from megacompile.ir.schedule import Schedule
from megacompile.ir.stream import Stream
from megacompile.passes.edit import body_of


def insert_tokens(schedule: Schedule) -> Schedule:
    """Make graphs take and return tokens."""
    new = schedule.copy()
    for name, graph in new.graphs.items():
        if name != "update":
            _wait(graph)
        if name != "forward":
            _return(graph)
    return new


def _wait(graph: fx.Graph) -> None:
    touched: set[Place] = set()
    tokens, body = tokens_of(graph), body_of(graph)
    for node in ops.nodes_that(graph, lambda op: op.reads or op.writes):
        bucket = ops.bucket_of(node)
        op = ops.effects(node)
        for part in op.reads:
            # the compute stream is in order after the last write of a resident bucket
            in_order = op.stream is Stream.COMPUTE and part is not Part.GRADIENTS
            if (bucket.key, part) in touched or in_order:
                continue
            token = tokens.get((bucket.key, part)) or add(graph, bucket, part, body)
            after = node.kwargs.get("after", ())
            compat.set_kwargs(node, {**node.kwargs, "after": (token, *after)})  # type: ignore[misc]
        touched |= {(bucket.key, part) for part in op.reads} | set(written(node))


def _return(graph: fx.Graph) -> None:
    last: dict[Place, fx.Node] = {}
    for node in ops.nodes_that(graph, lambda op: op.writes):
        last |= dict.fromkeys(written(node), node)
    *others, _ = ops.returned(graph)
    tokens = sorted(set(last.values()))  # in program order, so the later of two wrote last
    compat.set_args(graph.output_node(), ((*others, tuple(tokens)),))
