"""Checks that values reach the graphs and ops that they are meant for.

What must hold:

- the forward returns the saved values, and the backward takes nothing else from it;
- the update takes everything that the backward leaves: each bucket's complete gradients and its
  states;
- the complete gradient of a value goes to the backward of the stage that made the value;
- changes that a stage makes in place reach the input that they belong to.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx

from megacompile.ir import ops, signature
from megacompile.ir.ops import Part, Value, effects
from megacompile.ir.stages import ArgRef, Stage
from megacompile.ir.tokens import token_of
from megacompile.ir.values import kind_of, label, named, underlying_inputs
from megacompile.verify.hazard import Check, Hazard, HazardKind, View


def saved_values(views: list[View]) -> Iterator[Hazard]:
    """The forward returns the saved values, in order; the backward takes nothing else from it."""
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
        # it may take fewer if the gradients of its outputs need fewer
        named = signature.tangents(view.graph)
        known = {*names, *(named[k] for k in view.schedule.tangents if k in named)}
        for node in view.graph.find_nodes(op="placeholder"):
            if node.name not in known and token_of(node) is None:
                message = (
                    f"it takes {node.name}, which is no saved value of the forward and no gradient "
                    "of an output; add it to schedule.saved values"
                )
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
        message = (
            f"it leaves {', '.join(returned) or 'nothing'}, the schedule lists "
            f"{', '.join(names) or 'nothing'}, the update takes {', '.join(taken) or 'nothing'}; "
            "all three must be schedule.left"
        )
        yield backward.hazard(HazardKind.LEFT_BEHIND, backward.graph.output_node(), None, message)
    for node in left:
        if kind_of(node) is Value.GRADIENTS and not _complete(node):
            message = (
                f"it leaves {named(node)}, which are incomplete: later backwards add to them; "
                "leave the gradients that it offloads"
            )
            yield backward.hazard(HazardKind.LEFT_BEHIND, node, None, message)


def _complete(gradients: fx.Node) -> bool:
    """True if these are the gradients that go to the host."""
    return any(Part.GRADIENTS in effects(user).writes for user in gradients.users)


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
        tangents, partial_gradients = node.args[4:6]
        given = [*tangents, *partial_gradients]  # type: ignore[misc]
        for (what, value), got in zip(wanted, given, strict=False):
            if value is None or so_far.get(value) == got.name:
                continue
            message = (
                f"{label(node)} takes {named(got)} as its {what} for {value.name}, whose gradient "
                f"is {so_far.get(value, 'not there yet')}; pass that"
            )
            yield view.hazard(HazardKind.WRONG_GRADIENTS, node, None, message)
        for k, ref in enumerate(stage.arg_refs(stage.traced.gradients)):
            so_far[args[ref.index]] = taken[k].name if k in taken else ""
    yield from _returned(view, so_far)


def _returned(view: View, so_far: dict[fx.Node, str]) -> Iterator[Hazard]:
    inputs = {node.name: node for node in view.schedule.forward.find_nodes(op="placeholder")}
    values = ops.returned(view.graph)[0]
    for name, value in zip(view.schedule.gradients, values, strict=False):
        if isinstance(value, fx.Node) and so_far.get(inputs[name]) != value.name:
            message = f"it returns {named(value)} as the gradient of {name}; return that"
            output = view.graph.output_node()
            yield view.hazard(HazardKind.WRONG_GRADIENTS, output, value, message)


def _changes_kept(view: View) -> Iterator[Hazard]:
    """If stages change an input in place, its last new value is assigned to it.

    A backward takes the memory of such an input as the previous backwards left it, and its new
    value is assigned before another backward takes it.
    """
    if view.name == "backward":
        yield from _writes_of_backward(view)
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
    assigned = {(root.get(n.args[0]), n.args[1]) for n in view.nodes(ops.assign)}  # type: ignore[arg-type]
    for source, (node, value) in last.items():
        if (source, value) not in assigned:
            message = (
                f"{label(node)} changes {source.name} in place, but its new value is not written "
                f"there; assign({source.name}, {value.name})"
            )
            yield view.hazard(HazardKind.CHANGE_LOST, node, None, message)
    for assign in view.nodes(ops.assign):
        target: Any = assign.args[0]
        new: Any = assign.args[1]
        if new is target or root.get(new) is not root.get(target):
            message = (
                f"{label(assign)} writes {named(new)} to {target.name}, but that is not its new "
                "value; assign the value that the stage returns for it"
            )
            yield view.hazard(HazardKind.CHANGE_LOST, assign, None, message)


def _writes_of_backward(view: View) -> Iterator[Hazard]:
    underlying = underlying_inputs(view.schedule)
    left = {node.name: node for node in view.graph.find_nodes(op="placeholder")}
    wanted: dict[fx.Node, str] = {}  # backward's new value -> its input
    for node in view.nodes(ops.backward, ops.assign):
        args: Any = node.args
        if node.target is ops.assign:
            name = wanted.pop(args[1], None)
            if name is None or args[0] is not left.get(name):
                message = (
                    f"{label(node)} writes {named(args[1])} to {args[0].name}, but that is not its "
                    "new value; assign the value that the backward returns for it"
                )
                yield view.hazard(HazardKind.CHANGE_LOST, node, None, message)
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
        message = (
            f"{label(value)} writes input {name}, but its new value is not written there; "
            f"assign({name}, {value.name})"
        )
        yield view.hazard(HazardKind.CHANGE_LOST, value, None, message)


CHECKS: tuple[Check, ...] = (_gradients_flow, _changes_kept)
