"""Proof that a schedule is free of races, leaks and mix-ups; every schedule passes before it runs.

What must hold, given [Note: happens-before] in `megacompile.ir.edges`:

- every op has what it reads: its arguments, made before it, and the weights of its buckets;
- the backward sees what the forward saw: arguments, saved tensors, random numbers;
- memory is not reused while it is read: see `megacompile.verify.memory`;
- gradients reach the host once and whole: see `megacompile.verify.gradients`;
- what waits on the host is found there again: see `megacompile.verify.saved_tensors`;
- values reach those that they are for: see `megacompile.verify.flow`;
- `optimizer.step()` updates what got gradients, once: see `megacompile.verify.updates`;
- what is on a disk is read before it is used, and written: see `megacompile.verify.disk`;
- ranks gather a bucket where its part is, and issue the same collectives: see
  `megacompile.verify.ranks`;
- one graph waits for what another does to a bucket: see `megacompile.verify.cycle`.

The checks read the graphs alone: no device, no data.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import fx

from megacompile.errors import ScheduleError
from megacompile.ir import ops, signature
from megacompile.ir.buckets import Bucket
from megacompile.ir.ops import Op, Part, Value
from megacompile.ir.schedule import Schedule
from megacompile.ir.stages import ArgRef, Primal
from megacompile.ir.tokens import token_of
from megacompile.ir.values import (
    bucket_of,
    copied_away,
    fetched_from,
    kind_of,
    label,
    left_by_backward,
    named,
    producer,
)
from megacompile.verify import (
    cycle,
    disk,
    flow,
    gradients,
    memory,
    ranks,
    saved_tensors,
    updates,
)
from megacompile.verify.hazard import Check, Hazard, HazardKind, Order, View
from megacompile.views.table import table

__all__ = ["Hazard", "HazardKind", "hazards", "verify"]

_IN_FULL = 5  # hazards that the error spells out; the table marks them all


def verify(schedule: Schedule) -> None:
    """Prove a schedule safe.

    Raises:
        ScheduleError: it has hazards; the message lists them and marks them in its table.
    """
    found = hazards(schedule)
    if not found:
        return
    marks: dict[fx.Node, list[str]] = {}
    for hazard in found:
        for node in hazard.nodes:
            marks.setdefault(node, []).append(f"{ops.label(node)}: {hazard.kind.value}")
    lines = [f"schedule {schedule.name!r} has {len(found)} hazard{'s' * (len(found) > 1)}:"]
    lines += [f"  {hazard}" for hazard in found[:_IN_FULL]]
    lines += [f"  ... and {len(found) - _IN_FULL} more"] if len(found) > _IN_FULL else []
    texts = {node: "; ".join(dict.fromkeys(text)) for node, text in marks.items()}
    raise ScheduleError("\n".join([*lines, "", table(schedule, texts)]))


def hazards(schedule: Schedule) -> list[Hazard]:
    """Everything that is wrong with a schedule; [] if nothing."""
    left = left_by_backward(schedule)
    views = [View(schedule, n, graph, Order(graph), left) for n, graph in schedule.graphs.items()]
    found = [hazard for view in views for hazard in flow.incomplete(view)]
    if found:  # the checks below rely on what is missing
        return found
    found += _saved_values(views)
    for view in views:
        parts = (memory, saved_tensors, gradients, flow, updates, disk, ranks)
        for check in (*_CHECKS, *(check for part in parts for check in part.CHECKS)):
            found += check(view)
    for joined in (updates.updated_once, updates.left_taken, cycle.hazards):
        found += joined(views)
    return found


# What an op takes.


def _made_before_used(view: View) -> Iterator[Hazard]:
    for node in view.graph.nodes:
        for value in node.all_input_nodes:
            if view.order.issued_before(value, node):
                continue
            writes = Part.GRADIENTS in ops.effects(node).writes
            kind = HazardKind.GRADIENTS_NOT_READY if writes else HazardKind.USE_BEFORE_MADE
            message = (
                f"{label(node)} takes {named(value)}, which is made after it; "
                f"move {label(node)} behind {label(value)}"
            )
            yield view.hazard(kind, node, value, message)


def _arguments(view: View) -> Iterator[Hazard]:
    """A stage is given as much as its template takes, and all that it reads."""
    for node in view.that(lambda op: op.code):
        stage: Any = node.args[0]
        for what, position, needed in _counts(node):
            got = len(node.args[position]) if position < len(node.args) else 0  # type: ignore[arg-type]
            if got != needed:
                message = (
                    f"{label(node)} is given {got} {what}, but stage {stage.name!r} takes "
                    f"{needed}; give it {needed}"
                )
                yield view.hazard(HazardKind.ARGUMENTS, node, None, message)
        for index in sorted(_arg_indices([stage.primals[i] for i in _primals_read(node)])):
            if _at(node.args[2], index) is None:
                message = (
                    f"{label(node)} reads argument {index} of stage {stage.name!r}, but is not "
                    "given it; pass the value that the forward read"
                )
                yield view.hazard(HazardKind.ARGUMENTS, node, None, message)


def _counts(node: fx.Node) -> Iterator[tuple[str, int, int]]:
    """The values that a stage op takes: its name, its position in `args`, how many."""
    stage: Any = node.args[0]
    yield "weights", 1, len(stage.buckets)
    yield "args", 2, max(_arg_indices(stage.primals), default=-1) + 1
    if node.target is ops.backward:
        partial_gradients = stage.traced.partial_gradients
        values = sum(isinstance(stage.primals[i], ArgRef) for i in partial_gradients)
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
    """The buckets whose gradients a backward adds to; it carries what there is of them so far."""
    stage: Any = call.args[0]
    gives: tuple[Bucket, ...] = stage.buckets_read(stage.traced.gradients)
    return gives


def _arg_indices(primals: Sequence[Primal]) -> set[int]:
    return {ref.index for ref in primals if isinstance(ref, ArgRef)}


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
    """A compute is given every bucket it reads, as what it is."""
    for node in view.that(lambda op: op.code):
        stage: Any = node.args[0]
        needed = {bucket.key for bucket in stage.buckets_read(_primals_read(node))}
        for i, bucket in enumerate(stage.buckets):
            where = f"{label(node)} reads stage {stage.name!r} bucket {bucket.label}"
            given = _at(node.args[1], i)
            if given is None:
                if bucket.key in needed:
                    message = f"{where}, but is given no weights for it; prefetch it and pass it"
                    yield view.hazard(HazardKind.MISSING_WEIGHTS, node, None, message)
                continue
            got = bucket_of(given) if kind_of(given) is Value.WEIGHTS else None
            if got is None or got.key != bucket.key:
                message = (
                    f"{where}, but is given what {label(given)} gives; give it a prefetch of "
                    f"bucket {bucket.label}"
                )
                yield view.hazard(HazardKind.WRONG_WEIGHTS, node, given, message)


# What the backward takes from the forward.


def _saved_values(views: list[View]) -> Iterator[Hazard]:
    """The forward returns the saved values, in order; the backward takes nothing else of it."""
    forward, *others = views
    names = list(forward.schedule.saved_values)
    returned: Any = forward.graph.output_node().args[0]
    given = [node.name for node in returned[1]]
    if given != names:
        wrong = [name for name in (*given, *names) if (name in given) != (name in names)]
        message = (
            f"it returns {len(given)} saved values, the schedule lists {len(names)}, others or in "
            f"another order: {', '.join(wrong or given)}; both must be schedule.saved values"
        )
        yield forward.hazard(HazardKind.SAVED_VALUES, forward.graph.output_node(), None, message)
    for view in (view for view in others if view.name == "backward"):
        # it may leave out what its outputs' gradients do not need
        named = signature.tangents(view.graph)
        known = {*names, *(named[k] for k in view.schedule.tangents if k in named)}
        for node in view.graph.find_nodes(op="placeholder"):
            if node.name not in known and token_of(node) is None:
                message = (
                    f"it takes {node.name}, which is no saved value of the forward and no gradient "
                    "of an output; add it to schedule.saved values"
                )
                yield view.hazard(HazardKind.SAVED_VALUES, node, None, message)


def _sees_the_forward(view: View) -> Iterator[Hazard]:
    """Checks that the backward takes the arguments and saved tensors of its stage's forward."""
    forwards = ops.calls_by_stage(view.schedule.forward, ops.forward)
    away = copied_away(view.schedule)
    for node in view.nodes(ops.recompute, ops.rerun, ops.backward):
        stage: Any = node.args[0]
        forward = forwards.get(stage.index)
        if forward is None:
            continue
        yield from _same_arguments(view, node, forward, away)
        if node.target is ops.backward:
            yield from _own_saved(view, node, forward, away)


def _same_arguments(
    view: View, node: fx.Node, forward: fx.Node, away: Mapping[str, fx.Node]
) -> Iterator[Hazard]:
    args: Any = node.args[2]
    for i, arg in enumerate(args):
        source = _at(forward.args[2], i)
        if arg is None or source is None:
            continue
        known = [user.name for user in source.users if ops.effects(user).gives is Value.COPY]
        if source.name not in view.schedule.written:  # else a backward may have changed it
            known.insert(0, source.name)
        given = fetched_from(away, arg).name
        if given not in known and not _is_made_again(arg, source):
            wanted = known[0] if known else "a snapshot of it"
            message = (
                f"{label(node)} takes {arg.name} as argument {i}, but {label(forward)} read "
                f"{source.name}; pass {wanted}"
            )
            yield view.hazard(HazardKind.WRONG_ARGUMENT, node, None, message)


def _is_made_again(arg: fx.Node, source: fx.Node) -> bool:
    """True if `arg` of the backward is the same output of a rerun as `source` is of the forward."""
    again, call = producer(arg), producer(source)
    if again.target is not ops.rerun or call.target is not ops.forward:
        return False
    of, stage = ops.arguments(again)[0], ops.arguments(call)[0]
    return of.index == stage.index and arg.args[1] == source.args[1]


def _own_saved(
    view: View, node: fx.Node, forward: fx.Node, away: Mapping[str, fx.Node]
) -> Iterator[Hazard]:
    stage: Any = node.args[0]
    first = stage.result_count
    kept = {item.name: i - first for i, item in ops.items(forward) if i >= first}
    saved: Any = node.args[3]
    for i, value in enumerate(saved):
        if value is None:
            continue
        source = producer(value)
        if source.op == "placeholder" or kind_of(source) is Value.SAVED:
            right = kept.get(fetched_from(away, value).name) == i
        else:
            of: Any = source.args[0] if source.target is ops.recompute else None
            right = of is not None and of.index == stage.index and value.args[1] == i
        if not right:
            message = (
                f"{label(node)} takes {named(value)} as saved tensor {i} of stage "
                f"{stage.name!r}, which it is not; pass that of {label(forward)} or its recompute"
            )
            yield view.hazard(HazardKind.WRONG_SAVED, node, value, message)


def _random_numbers(view: View) -> Iterator[Hazard]:
    """A stage that draws again starts from the state that was saved before its forward."""
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
                f"{where}, but {rng.name} is not the state just before its forward; save it "
                f"directly before {stage.index}F"
            )
            yield view.hazard(HazardKind.WRONG_RNG, node, None, message)


def _states_saved(view: View) -> Iterator[Hazard]:
    """A backward for other outputs may take the states that this one does not."""
    for node in view.that(_saves_rng):
        stage: Any = node.args[0]
        if stage.traced.random and _draws_next(node) != stage.index:
            message = f"{label(node)} is not just before {stage.index}F draws; move it there"
            yield view.hazard(HazardKind.WRONG_RNG, node, None, message)


def _saves_rng(op: Op) -> bool:
    return op.gives is Value.RNG


def _draws_next(save: fx.Node) -> int | None:
    """The index of the first random stage whose forward is after `save`."""
    following = save.next
    while following.op != "output":
        if following.target is ops.forward:
            stage: Any = following.args[0]
            if stage.traced.random:
                return int(stage.index)
        following = following.next
    return None


_CHECKS: tuple[Check, ...] = (
    _made_before_used,
    _arguments,
    _weights,
    _sees_the_forward,
    _random_numbers,
)
