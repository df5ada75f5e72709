"""Checks of the arguments of ops, mainly of computes.

What must hold:

- every op gets its required arguments, and they are made before it;
- a compute gets as many values as its template takes, and the weights of its stage's buckets;
- the backward sees what the forward saw: arguments, saved tensors, random numbers.

The forward's own arguments define the schedule, so there is nothing to check them against.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from torch import fx

from megacompile.ir import ops
from megacompile.ir.buckets import Bucket
from megacompile.ir.ops import Op, Part, Value
from megacompile.ir.stages import SavedRef
from megacompile.ir.values import bucket_of, fetched_from, kind_of, label, named, producer
from megacompile.verify.hazard import Check, Hazard, HazardKind, View


def incomplete(view: View) -> Iterator[Hazard]:
    """Ops that lack a required argument; the other checks rely on these."""
    for node in view.that(lambda op: op.takes):
        for takes in ops.effects(node).takes:
            given = node.args[takes.at] if takes.at < len(node.args) else None
            if not isinstance(given, fx.Node) and not takes.optional:
                yield _lacks(view, node, f"a value as argument {takes.at}")
    for node in view.nodes(ops.backward):
        stage: Any = node.args[0]
        saved, tangents, partial_gradients = node.args[3:6]
        read = {i.index for i in stage.traced.backward_inputs if isinstance(i, SavedRef)}
        for what, values, needed in (
            ("saved tensor", saved, read),
            ("tangent", tangents, None),
            ("partial gradient", partial_gradients, None),
            ("live input", node.args[6] if len(node.args) > 6 else (), None),
        ):
            for i, value in enumerate(values):  # type: ignore[arg-type]
                if value is None and (needed is None or i in needed):
                    yield _lacks(view, node, f"{what} {i}")


def _lacks(view: View, node: fx.Node, what: str) -> Hazard:
    message = f"{label(node)} does not get {what}, which it reads; pass it"
    return view.hazard(HazardKind.ARGUMENTS, node, None, message)


def _made_before_used(view: View) -> Iterator[Hazard]:
    for node in view.graph.nodes:
        for value in node.all_input_nodes:
            if view.order.issued_before(value, node):
                continue
            writes = Part.GRADIENTS in ops.effects(node).writes
            kind = HazardKind.GRADIENTS_NOT_READY if writes else HazardKind.USE_BEFORE_MADE
            message = (
                f"{label(node)} takes {named(value)}, which is made after it; "
                f"move {label(node)} after {label(value)}"
            )
            yield view.hazard(kind, node, value, message)


def _arguments(view: View) -> Iterator[Hazard]:
    """A stage gets as many values as its template takes, including all that it reads."""
    for node in view.that(lambda op: op.code):
        stage: Any = node.args[0]
        for what, position, needed in _counts(node):
            got = len(node.args[position]) if position < len(node.args) else 0  # type: ignore[arg-type]
            if got != needed:
                message = (
                    f"{label(node)} gets {got} {what}, but stage {stage.name!r} takes "
                    f"{needed}; pass {needed}"
                )
                yield view.hazard(HazardKind.ARGUMENTS, node, None, message)
        for index in sorted({ref.index for ref in stage.arg_refs(_primals_read(node))}):
            if _at(node.args[2], index) is None:
                message = (
                    f"{label(node)} reads argument {index} of stage {stage.name!r}, but does "
                    "not get it; pass the value that the forward read"
                )
                yield view.hazard(HazardKind.ARGUMENTS, node, None, message)


def _counts(node: fx.Node) -> Iterator[tuple[str, int, int]]:
    """The lists of values that a stage op takes: name, position in `args`, needed length."""
    stage: Any = node.args[0]
    yield "weights", 1, len(stage.buckets)
    refs = stage.arg_refs(range(len(stage.primals)))
    yield "args", 2, max((ref.index for ref in refs), default=-1) + 1
    if node.target is ops.backward:
        values = len(stage.arg_refs(stage.traced.partial_gradients))
        yield "saved", 3, len(stage.traced.saved)
        yield "tangents", 4, len(stage.traced.tangents)
        so_far = {bucket.key for call in _backwards_before(node) for bucket in _gives(call)}
        yield "partial gradients", 5, values + sum(bucket.key in so_far for bucket in _gives(node))
        if stage.traced.live or len(node.args) > 6:
            yield "live inputs", 6, len(stage.traced.live)


def _backwards_before(node: fx.Node) -> Iterator[fx.Node]:
    return itertools.takewhile(
        lambda call: call is not node, ops.nodes_of(node.graph, ops.backward)
    )


def _gives(call: fx.Node) -> tuple[Bucket, ...]:
    """The buckets whose gradients a backward adds to; it takes the gradients so far as
    arguments."""
    stage: Any = call.args[0]
    gives: tuple[Bucket, ...] = stage.buckets_read(stage.traced.gradients)
    return gives


def _primals_read(node: fx.Node) -> Sequence[int]:
    stage: Any = node.args[0]
    if node.target in (ops.forward, ops.rerun):
        return range(len(stage.primals))
    primals = "recompute_primals" if node.target is ops.recompute else "backward_primals"
    read: tuple[int, ...] = getattr(stage.traced, primals)
    return read


def _at(values: Any, index: int) -> fx.Node | None:
    return values[index] if index < len(values) else None


def _weights(view: View) -> Iterator[Hazard]:
    """A compute gets the weights of every bucket that it reads."""
    for node in view.that(lambda op: op.code):
        stage: Any = node.args[0]
        needed = {bucket.key for bucket in stage.buckets_read(_primals_read(node))}
        for i, bucket in enumerate(stage.buckets):
            where = f"{label(node)} reads stage {stage.name!r} bucket {bucket.label}"
            given = _at(node.args[1], i)
            if given is None:
                if bucket.key in needed:
                    message = f"{where}, but gets no weights for it; prefetch it and pass it"
                    yield view.hazard(HazardKind.MISSING_WEIGHTS, node, None, message)
                continue
            got = bucket_of(given) if kind_of(given) is Value.WEIGHTS else None
            if got is None or got.key != bucket.key:
                message = (
                    f"{where}, but gets the result of {label(given)}; pass a prefetch of "
                    f"bucket {bucket.label}"
                )
                yield view.hazard(HazardKind.WRONG_WEIGHTS, node, given, message)


# The backward's values from the forward.


def _sees_the_forward(view: View) -> Iterator[Hazard]:
    """The backward takes the arguments and saved tensors of its stage's forward."""
    for node, forward in view.with_forwards(ops.recompute, ops.rerun, ops.backward):
        yield from _same_arguments(view, node, forward)
        if node.target is ops.backward:
            yield from _own_saved(view, node, forward)


def _same_arguments(view: View, node: fx.Node, forward: fx.Node) -> Iterator[Hazard]:
    args: Any = node.args[2]
    for i, arg in enumerate(args):
        source = _at(forward.args[2], i)
        if arg is None or source is None:
            continue
        known = [user.name for user in source.users if ops.effects(user).gives is Value.COPY]
        if source.name not in view.schedule.written:  # else a backward may have changed it
            known.insert(0, source.name)
        given = fetched_from(view.copies, arg).name
        if given not in known and not _is_made_again(arg, source):
            wanted = known[0] if known else "a snapshot of it"
            message = (
                f"{label(node)} takes {arg.name} as argument {i}, but {label(forward)} read "
                f"{source.name}; pass {wanted}"
            )
            yield view.hazard(HazardKind.WRONG_ARGUMENT, node, None, message)


def _is_made_again(arg: fx.Node, source: fx.Node) -> bool:
    """True if `arg` is the output of a rerun that `source` is of the same stage's forward."""
    again, call = producer(arg), producer(source)
    if again.target is not ops.rerun or call.target is not ops.forward:
        return False
    of, stage = ops.arguments(again)[0], ops.arguments(call)[0]
    return of.index == stage.index and arg.args[1] == source.args[1]


def _own_saved(view: View, node: fx.Node, forward: fx.Node) -> Iterator[Hazard]:
    stage: Any = node.args[0]
    first = stage.result_count
    kept = {item.name: i - first for i, item in ops.items(forward) if i >= first}
    saved: Any = node.args[3]
    for i, value in enumerate(saved):
        if value is None:
            continue
        source = producer(value)
        if source.op == "placeholder" or kind_of(source) is Value.SAVED:
            right = kept.get(fetched_from(view.copies, value).name) == i
        else:
            of: Any = source.args[0] if source.target is ops.recompute else None
            right = of is not None and of.index == stage.index and value.args[1] == i
        if not right:
            message = (
                f"{label(node)} takes {named(value)} as saved tensor {i} of stage "
                f"{stage.name!r}, but is not; pass that of {label(forward)} or its recompute"
            )
            yield view.hazard(HazardKind.WRONG_SAVED, node, value, message)


def _random_numbers(view: View) -> Iterator[Hazard]:
    """A recomputed stage draws from the generator state saved before its forward."""
    saved = {node.name: node for node in ops.nodes_that(view.schedule.forward, _saves_rng)}
    if view.name == "forward":
        yield from _states_saved(view)
    for node in view.nodes(ops.recompute, ops.rerun):
        stage: Any = node.args[0]
        if not stage.traced.random:
            continue
        rng: Any = node.args[3]
        where = f"{label(node)} draws random numbers for stage {stage.name!r}"
        if rng is None:
            message = f"{where}, but has no generator state; save it with {stage.index}RNG, pass it"
            yield view.hazard(HazardKind.WRONG_RNG, node, None, message)
        elif rng.name not in saved or _draws_next(saved[rng.name]) != stage.index:
            message = (
                f"{where}, but {rng.name} is not the state at its forward; save it "
                f"directly before {stage.index}F"
            )
            yield view.hazard(HazardKind.WRONG_RNG, node, None, message)


def _states_saved(view: View) -> Iterator[Hazard]:
    """Every saved state is the one at its stage's forward, because a backward for other outputs may
    use states that this one does not."""
    for node in view.that(_saves_rng):
        stage: Any = node.args[0]
        if stage.traced.random and _draws_next(node) != stage.index:
            message = (
                f"{label(node)} is not directly before {stage.index}F, which draws; move it there"
            )
            yield view.hazard(HazardKind.WRONG_RNG, node, None, message)


def _saves_rng(op: Op) -> bool:
    return op.gives is Value.RNG


def _draws_next(save: fx.Node) -> int | None:
    """Index of the first random stage whose forward follows `save`."""
    following = save.next
    while following.op != "output":
        if following.target is ops.forward:
            stage: Any = following.args[0]
            if stage.traced.random:
                return int(stage.index)
        following = following.next
    return None


CHECKS: tuple[Check, ...] = (
    _made_before_used,
    _arguments,
    _weights,
    _sees_the_forward,
    _random_numbers,
)
