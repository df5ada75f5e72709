"""Inserts frees and tokens, when all other ops are in place.

`insert_free` frees each value where it dies.

    before: 2F(y1) 3F(y2)        after: 2F(y1) del y1 3F(y2) del y2

Memory comes from the compute stream's allocator, so a value that a copy on another stream reads is
freed only after that copy: `free(value, after=copy)` makes the compute stream wait for it. To avoid
a stall, such a free comes after the next backward (in a forward graph, the next forward). For new
optimizer states it comes after `plan.state_delay` of them, for saved tensors copied to the host
after `plan.saved_delay`. If fewer are left, the frees of states and of gradients that the update
takes are deferred to the next forward (`defer_free`, `insert_drain`).

`insert_tokens` orders ops across graphs: an op that touches a bucket on the host names its last
writer.

    before: 3PREFETCH@1              after: 3PREFETCH@1 after=(weights_3)

The first op of a forward or a backward that reads a part of a bucket in host memory takes the token
of that part, and a backward or an update returns the last ops that wrote a part (see
`megacompile.ir.edges`). The compute stream is in order across graphs, so its ops need tokens only
for gradients. The ops of an update already wait for these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from megacompile import compat
from megacompile.ir import ops
from megacompile.ir.edges import Place, add, take, token_of, tokens_of, written
from megacompile.ir.ops import Part, Value
from megacompile.ir.plan import Plan
from megacompile.ir.schedule import Schedule
from megacompile.ir.stream import Stream
from megacompile.ir.values import outliving, owns, producer, reads, taken
from megacompile.passes.edit import body_of, last_item


def insert_free(schedule: Schedule) -> Schedule:
    """Free every value that owns device memory."""
    new = schedule.copy()
    for name, graph in new.graphs.items():
        copied = _still_copied(new) if name == "update" else {}
        _insert(graph, new.plan, copied, owns_inputs=name != "forward")
    return new


def _still_copied(schedule: Schedule) -> dict[str, list[fx.Node]]:
    """Tokens of the copies to the host of each value that the backward leaves, by its name."""
    backward, update = schedule.graphs["backward"], schedule.graphs["update"]
    found = {}
    for node in backward.nodes if schedule.left else ():
        if node.name in schedule.left:
            copies = [user for user in node.users if ops.stream_of(user) is Stream.D2H]
            places = [(ops.bucket_of(copy), part) for copy in copies for _, part in written(copy)]
            found[node.name] = [take(update, bucket, part) for bucket, part in places]
    return found


def _insert(
    graph: fx.Graph,
    plan: Plan,
    copied: Mapping[str, list[fx.Node]],
    *,
    owns_inputs: bool,
) -> None:
    nodes = list(graph.nodes)
    position = {node: p for p, node in enumerate(nodes)}
    ends = {producer(node): at for at, node in enumerate(nodes)}  # of an op's last result
    lasting = outliving(graph)
    steps = ops.nodes_of(graph, ops.backward) or ops.nodes_of(graph, ops.forward)
    computes = [position[n] for n in steps]
    frees: list[tuple[int, fx.Node, tuple[fx.Node, ...], bool]] = []
    for at, node in enumerate(nodes):
        input_of = node.op == "placeholder"
        owned = owns_inputs and token_of(node) is None if input_of else owns(node)
        if node in lasting or not owned:
            continue
        users = list(node.users)
        last = max(map(position.__getitem__, _readers(node, users)), default=at)
        last = max(last, ends[producer(node)])
        unordered = [u for u in users if _unordered(u, position, last)]
        waits = tuple(u for u in unordered if node in reads(u))  # `after=` needs only the name
        waits += tuple(copied.get(node.name, ()))
        deferred = False
        if waits:
            later = [p for p in computes if p > last]
            state = node.name in copied or any(Part.STATES in ops.effects(u).writes for u in waits)
            deferred = state and len(later) < plan.state_delay
            if deferred or not later:
                last = len(nodes) - 2
            else:
                saved = any(ops.effects(u).gives is Value.SAVED_ON_HOST for u in waits)
                so_many = plan.state_delay if state else plan.saved_delay if saved else 1
                last = ends[nodes[later[min(so_many, len(later)) - 1]]]
        frees.append((last, node, waits, deferred))
    # a free names the values that it waits for, so they are freed after it
    named: dict[fx.Node, tuple[int, int]] = {}  # value -> the last such free, length of the chain
    for k, (last, node, waits, deferred) in enumerate(frees):
        latest, chain = named.get(node, (0, 0))
        last = max(last, latest)
        frees[k] = last, node, waits, deferred
        for wait in waits:
            before, longest = named.get(wait, (0, 0))
            named[wait] = max(last, before), max(chain + 1, longest)
    frees.sort(key=lambda entry: (entry[0], named.get(entry[1], (0, 0))[1]), reverse=True)
    for last, node, waits, deferred in frees:
        with graph.inserting_after(nodes[last]):
            op = ops.defer_free if deferred else ops.free
            ops.call(graph, op, node, name=f"{op.__name__}_{node.name}", after=waits)


def _readers(node: fx.Node, users: Sequence[fx.Node]) -> list[fx.Node]:
    """The readers of a value; for a buffer, also those of the value that a copy brings into it. A
    copy on the host or on a disk is not freed before the value fetched from it, so its free waits
    for nothing."""
    found = list(users)
    for user in users:
        if ops.effects(user).takes and taken(user, Value.SAVED_ON_DISK) is node:
            found += user.users
    for reader in tuple(found):
        op = ops.effects(reader)
        if op.fills is None or op.stream is Stream.COMPUTE:
            continue  # no copy or collective fills memory that is read through its result
        if op.stream is Stream.H2D or reader.args[op.fills] is node:
            found += reader.users
    return found


def _unordered(user: fx.Node, position: Mapping[fx.Node, int], last: int) -> bool:
    """True if the user is on another stream and no compute up to `last` waits for it."""
    if ops.stream_of(user) is Stream.COMPUTE:
        return False
    if taken(user, Value.SAVED_ON_DISK) is not None:
        return all(_unordered(fetch, position, last) for fetch in user.users)
    return not any(
        ops.stream_of(reader) is Stream.COMPUTE and position[reader] <= last
        for reader in user.users
    )


def insert_drain(graph: fx.Graph, *, late: bool = False, after: int = 0) -> None:
    """Free, in a forward, the device memory whose free the previous step deferred.

        before: 0F 1F 2F 3F          after: 0F 1F 2F DRAIN 3F

    The drain follows the middle stage, or with `late` the one before the last, and never precedes
    the stage `after`; a forward without stages has none. While the forward begins, new parameters
    and states, and gradients that the update took on the device, are still being copied to the
    host.
    """
    computes = ops.nodes_of(graph, ops.forward)
    if not computes:
        return
    position = max(len(computes) - 2, 0) if late else len(computes) // 2
    with graph.inserting_after(last_item(computes[max(position, after)])):
        ops.call(graph, ops.drain, name="drained")


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
            if (bucket.key, part) in touched or op.stream is Stream.COMPUTE:
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
