"""Checks that ops get the values that they are meant for, within a graph and across graphs.

What must hold:

- every op gets its required arguments, and they are made before it;
- a compute gets as many values as its template takes, and the weights of its stage's buckets;
- the backward sees what the forward saw: arguments, saved tensors, random numbers;
- the forward returns the saved values, and the backward takes nothing else from it;
- the update takes everything that the backward leaves: each bucket's complete gradients and its
  states;
- the complete gradient of a value goes to the backward of the stage that made the value;
- changes that a stage makes in place reach the input that they belong to.

The forward's own arguments define the schedule, so there is nothing to check them against.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from torch import fx

from megacompile.ir import ops, signature
from megacompile.ir.edges import token_of
from megacompile.ir.ops import Op, Part, Value
from megacompile.ir.stages import ArgRef, SavedRef, Stage
from megacompile.ir.values import (
    bucket_of,
    fetched_from,
    kind_of,
    label,
    named,
    producer,
    underlying_inputs,
)
from megacompile.verify.hazard import Check, Hazard, HazardKind, View


def incomplete(view: View) -> Iterator[Hazard]:
    """Ops that lack a required argument; the other checks rely on these."""
    lacks: list[tuple[fx.Node, str]] = []
    for node in view.that(lambda op: op.takes):
        for takes in ops.effects(node).takes:
            given = node.args[takes.at] if takes.at < len(node.args) else None
            if not isinstance(given, fx.Node) and not takes.optional:
                lacks.append((node, f"a value as argument {takes.at}"))
    for node in view.nodes(ops.backward):
        stage, _, _, saved, tangents, partial, *live = ops.arguments(node)
        read = {i.index for i in stage.traced.backward_inputs if isinstance(i, SavedRef)}
        every = {"tangent": tangents, "partial gradient": partial}
        every |= {"live input": live[0]} if live else {}
        lacks += ((node, f"saved tensor {i}") for i in sorted(read) if _at(saved, i) is None)
        lacks += ((node, f"{w} {i}") for w, vs in every.items() for i, v in enumerate(vs) if not v)
    for node, what in lacks:
        message = f"{label(node)} does not get {what}, which it reads"
        yield view.hazard(HazardKind.ARGUMENTS, node, None, message)


def _made_before_used(view: View) -> Iterator[Hazard]:
    for node in view.graph.nodes:
        for value in node.all_input_nodes:
            if not view.order.issued_before(value, node):
                writes = Part.GRADIENTS in ops.effects(node).writes
                kind = HazardKind.GRADIENTS_NOT_READY if writes else HazardKind.USE_BEFORE_MADE
                message = f"{label(node)} takes {named(value)}, which is made after it"
                yield view.hazard(kind, node, value, message)


def _arguments(view: View) -> Iterator[Hazard]:
    """A stage gets as many values as its template takes, including all that it reads."""
    for node in view.that(lambda op: op.code):
        stage: Any = node.args[0]
        for what, position, needed in _counts(node):
            got = len(node.args[position]) if position < len(node.args) else 0  # type: ignore[arg-type]
            if got != needed:
                message = f"{label(node)} gets {got} {what}, stage {stage.name!r} takes {needed}"
                yield view.hazard(HazardKind.ARGUMENTS, node, None, message)
        for index in sorted({ref.index for ref in stage.arg_refs(_primals_read(node))}):
            if _at(node.args[2], index) is None:
                message = f"{label(node)} reads argument {index} of stage {stage.name!r}: got None"
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
        calls = ops.nodes_of(node.graph, ops.backward)
        earlier = itertools.takewhile(lambda call: call is not node, calls)
        so_far = {b.key for call in earlier for b in ops.arguments(call)[0].gradient_buckets}
        adds = sum(bucket.key in so_far for bucket in stage.gradient_buckets)
        yield "partial gradients", 5, values + adds
        if stage.traced.live or len(node.args) > 6:
            yield "live inputs", 6, len(stage.traced.live)


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
                    message = f"{where}, but gets no weights for it"
                    yield view.hazard(HazardKind.MISSING_WEIGHTS, node, None, message)
                continue
            got = bucket_of(given) if kind_of(given) is Value.WEIGHTS else None
            if got is None or got.key != bucket.key:
                message = f"{where}, but gets the result of {label(given)}"
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
            message = (
                f"{label(node)} takes {arg.name} as argument {i}, but {label(forward)} read "
                f"{source.name}; pass {known[0] if known else 'a snapshot of it'}"
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
    stage, saved = ops.arguments(node)[0], ops.arguments(node)[3]
    first = stage.result_count
    kept = {item.name: i - first for i, item in ops.items(forward) if i >= first}
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
            message = f"{label(node)} takes {named(value)} as saved tensor {i}, but is not"
            yield view.hazard(HazardKind.WRONG_SAVED, node, value, message)


def _random_numbers(view: View) -> Iterator[Hazard]:
    """A recomputed stage draws from the generator state saved before its forward. Every saved state
    is that, because a backward for other outputs may use states that this one does not."""
    saved = {node.name: node for node in ops.nodes_that(view.schedule.forward, _saves_rng)}
    for node in saved.values() if view.name == "forward" else ():
        stage: Any = node.args[0]
        if stage.traced.random and _draws_next(node) != stage.index:
            message = f"{label(node)} is not directly before {stage.index}F, which draws"
            yield view.hazard(HazardKind.WRONG_RNG, node, None, message)
    for node in view.nodes(ops.recompute, ops.rerun):
        stage, _, _, rng = ops.arguments(node)
        state = None if rng is None else saved.get(rng.name)
        if stage.traced.random and (state is None or _draws_next(state) != stage.index):
            got = (
                "no generator state" if rng is None else f"{rng.name}, not the state at its forward"
            )
            message = f"{label(node)} draws random numbers for stage {stage.name!r}, but gets {got}"
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


# Values that graphs pass on.


def saved_values(views: list[View]) -> Iterator[Hazard]:
    """The forward returns the saved values, in order; the backward takes nothing else from it."""
    forward, *others = views
    names = list(forward.schedule.saved_values)
    given = [node.name for node in ops.returned(forward.graph)[1]]
    if given != names:
        message = f"it returns the saved values {', '.join(given)}, needed {', '.join(names)}"
        yield forward.hazard(HazardKind.SAVED_VALUES, forward.graph.output_node(), None, message)
    for view in (view for view in others if view.name == "backward"):
        # it may take fewer if the gradients of its outputs need fewer
        named = signature.tangents(view.graph)
        known = {*names, *(named[k] for k in view.schedule.tangents if k in named)}
        for node in view.graph.find_nodes(op="placeholder"):
            if node.name not in known and token_of(node) is None:
                message = f"it takes {node.name}, no saved value and no gradient of an output"
                yield view.hazard(HazardKind.SAVED_VALUES, node, None, message)


def left_taken(views: list[View]) -> Iterator[Hazard]:
    """The backward returns what `schedule.left` lists, and the update takes all of it."""
    by_name = {view.name: view for view in views}
    backward, update = by_name.get("backward"), by_name.get("update")
    if backward is None:
        return
    names = list(backward.schedule.left)
    left: Any = ops.returned(backward.graph)[1]
    returned = [node.name for node in left]
    takes = [] if update is None else update.graph.find_nodes(op="placeholder")
    taken = [node.name for node in takes if token_of(node) is None]
    if returned != names or sorted(taken) != sorted(names):
        each = (", ".join(which) or "nothing" for which in (returned, names, taken))
        message = "it leaves {}, the schedule lists {}, the update takes {}".format(*each)
        yield backward.hazard(HazardKind.LEFT_BEHIND, backward.graph.output_node(), None, message)
    for node in left:
        complete = any(Part.GRADIENTS in ops.effects(user).writes for user in node.users)
        if kind_of(node) is Value.GRADIENTS and not complete:
            message = f"it leaves {named(node)}, to which later backwards add"
            yield backward.hazard(HazardKind.LEFT_BEHIND, node, None, message)


def _gradients_flow(view: View) -> Iterator[Hazard]:
    """A backward takes the gradients of its forward's outputs, summed over all readers.

    The gradient so far of a forward's value is what the last backward of a reader returned for it.
    """
    if view.name != "backward":
        return
    outputs = ops.returned(view.schedule.forward)[0]
    so_far: dict[fx.Node, str] = {}  # forward value -> name of its gradient
    names = signature.tangents(view.graph)
    for k in view.schedule.tangents:
        if k < len(outputs) and isinstance(outputs[k], fx.Node):
            so_far[outputs[k]] = names.get(k, "")
    for node, call in view.with_forwards(ops.backward):
        stage: Stage = ops.arguments(node)[0]
        results, taken = dict(ops.items(call)), dict(ops.items(node))
        args: Any = call.args[2]
        wanted = [("tangent", results.get(k)) for k in stage.traced.tangents]
        partial = stage.arg_refs(stage.traced.partial_gradients)
        wanted += [("partial gradient", args[ref.index]) for ref in partial]
        tangents, partial_gradients = ops.arguments(node)[4:6]
        for (what, value), got in zip(wanted, (*tangents, *partial_gradients), strict=False):
            if value is None or so_far.get(value) == got.name:
                continue
            message = (
                f"{label(node)} takes {named(got)} as its {what} for {value.name}, whose gradient "
                f"is {so_far.get(value, 'not there yet')}"
            )
            yield view.hazard(HazardKind.WRONG_GRADIENTS, node, None, message)
        for k, ref in enumerate(stage.arg_refs(stage.traced.gradients)):
            so_far[args[ref.index]] = taken[k].name if k in taken else ""
    inputs = {node.name: node for node in view.schedule.forward.find_nodes(op="placeholder")}
    for name, value in zip(view.schedule.gradients, ops.returned(view.graph)[0], strict=False):
        if isinstance(value, fx.Node) and so_far.get(inputs[name]) != value.name:
            message = f"it returns {named(value)} as the gradient of {name}"
            output = view.graph.output_node()
            yield view.hazard(HazardKind.WRONG_GRADIENTS, output, value, message)


def _changes_of_forward(view: View) -> Iterator[Hazard]:
    """If stages change an input in place, its last new value is assigned to it."""
    if view.name != "forward":
        return
    last: dict[fx.Node, tuple[fx.Node, fx.Node]] = {}  # input -> its last writer, its new value
    root: dict[fx.Node, fx.Node] = {n: n for n in view.graph.find_nodes(op="placeholder")}
    for node in view.nodes(ops.forward, ops.assign):
        args: Any = node.args
        if node.target is ops.assign:
            if args[0] in root:
                root[node] = root[args[0]]
            continue
        stage, taken = args[0], dict(ops.items(node))
        for k, primal in enumerate(stage.mutated, start=len(stage.outputs)):
            ref = stage.primals[primal]
            source = root.get(args[2][ref.index]) if isinstance(ref, ArgRef) else None
            if source is not None:
                last[source] = node, taken.get(k, node)
                root[last[source][1]] = source
    assigns = view.nodes(ops.assign)
    assigned = {(root.get(n.args[0]), n.args[1]) for n in assigns}  # type: ignore[arg-type]
    for source, (node, value) in last.items():
        if (source, value) not in assigned:
            yield _not_assigned(view, node, source.name)
    for assign in assigns:
        target, new, *_ = ops.arguments(assign)
        if new is target or root.get(new) is not root.get(target):
            yield _wrongly_assigned(view, assign)


def _changes_of_backward(view: View) -> Iterator[Hazard]:
    """A backward takes the memory of an input that backwards change as the previous ones left it,
    and its new value is assigned before another backward takes it."""
    if view.name != "backward":
        return
    underlying = underlying_inputs(view.schedule)
    left = {node.name: node for node in view.graph.find_nodes(op="placeholder")}
    wanted: dict[fx.Node, str] = {}  # backward's new value -> its input
    for node in view.nodes(ops.backward, ops.assign):
        args: Any = node.args
        if node.target is ops.assign:
            name = wanted.pop(args[1], None)
            if name is None or args[0] is not left.get(name):
                yield _wrongly_assigned(view, node)
            else:
                left[name] = node
            continue
        stage, call = args[0], view.forwards.get(args[0].index)
        if call is None or not stage.traced.live:
            continue
        sources: Any = call.args[2]
        given = [sources[ref.index] for ref in stage.arg_refs(stage.traced.live)]
        names = ["" if source is None else underlying.get(source.name, "") for source in given]
        for name, got in zip(names, args[6] if len(args) > 6 else (), strict=False):
            if got is not left.get(name) or name in wanted.values():
                message = (
                    f"{label(node)} takes {named(got)} as the memory of input {name}; pass the "
                    "value that the previous backward left there"
                )
                yield view.hazard(HazardKind.CHANGE_LOST, node, None, message)
        taken, of_primal = dict(ops.items(node)), dict(zip(stage.traced.live, names, strict=True))
        first = len(stage.arg_refs(stage.traced.gradients)) + len(stage.gradient_buckets)
        for k, primal in enumerate(stage.traced.written, start=first):
            wanted[taken.get(k, node)] = of_primal[primal]
    for value, name in wanted.items():
        yield _not_assigned(view, value, name)


def _not_assigned(view: View, value: fx.Node, name: str) -> Hazard:
    message = f"{label(value)} changes input {name}, but its new value is not written there"
    return view.hazard(HazardKind.CHANGE_LOST, value, None, message)


def _wrongly_assigned(view: View, assign: fx.Node) -> Hazard:
    target, new, *_ = ops.arguments(assign)
    message = f"{label(assign)} writes {named(new)} to {target.name}, but that is not its new value"
    return view.hazard(HazardKind.CHANGE_LOST, assign, None, message)


CHECKS: tuple[Check, ...] = (
    _made_before_used,
    _arguments,
    _weights,
    _sees_the_forward,
    _random_numbers,
    _gradients_flow,
    _changes_of_forward,
    _changes_of_backward,
)
