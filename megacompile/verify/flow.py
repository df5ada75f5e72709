"""The part of `verify` that is about what flows: all that is needed, to those whom it is for.

What must hold:

- every op is given the values that it cannot do without;
- the gradient of a value goes, whole, to the backward of the stage that made the value;
- what a stage changes in place reaches the input that it belongs to.

The forward's own arguments are what a schedule means: nothing is there to hold them against.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx

from megacompile.ir import ops, signature
from megacompile.ir.stages import ArgRef, SavedRef, Stage
from megacompile.ir.values import inputs_behind, label, named
from megacompile.verify.hazard import Check, Hazard, HazardKind, View


def incomplete(view: View) -> Iterator[Hazard]:
    """Ops that are not given what they cannot do without; the other checks rely on it."""
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
        ):
            for i, value in enumerate(values):  # type: ignore[arg-type]
                if value is None and (needed is None or i in needed):
                    yield _lacks(view, node, f"{what} {i}")


def _lacks(view: View, node: fx.Node, what: str) -> Hazard:
    message = f"{label(node)} is not given {what}, which it reads; pass it"
    return view.hazard(HazardKind.ARGUMENTS, node, None, message)


def _gradients_flow(view: View) -> Iterator[Hazard]:
    """A backward takes the gradients of what its forward gave, summed over all who read it.

    The gradients so far of a forward's value are what the last backward of a reader gave for it.
    """
    if view.name != "backward":
        return
    forward = view.schedule.forward
    forwards = ops.calls_by_stage(forward, ops.forward)
    outputs = ops.returned(forward)[0]
    so_far: dict[fx.Node, str] = {}  # a forward's value -> the name of its gradient
    names = signature.tangents(view.graph)
    for k in view.schedule.tangents:
        if k < len(outputs) and isinstance(outputs[k], fx.Node):
            so_far[outputs[k]] = names.get(k, "")
    for node in view.nodes(ops.backward):
        stage: Any = node.args[0]
        call = forwards.get(stage.index)
        if call is None:
            continue
        results, taken = dict(ops.items(call)), dict(ops.items(node))
        args: Any = call.args[2]
        wanted = [("tangent", results.get(k)) for k in stage.traced.tangents]
        wanted += [
            ("partial gradient", args[ref.index])
            for ref in _arg_refs(stage, stage.traced.partial_gradients)
        ]
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
        for k, ref in enumerate(_arg_refs(stage, stage.traced.gradients)):
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


def _arg_refs(stage: Stage, primals: tuple[int, ...]) -> list[ArgRef]:
    return [ref for ref in (stage.primals[i] for i in primals) if isinstance(ref, ArgRef)]


def _changes_kept(view: View) -> Iterator[Hazard]:
    """The last new value of an input that stages change in place is assigned to it.

    A backward takes the memory of an input as the backwards before left it, and its new value is
    assigned before another takes it.
    """
    if view.name == "backward":
        yield from _writes_of_backward(view)
    if view.name != "forward":
        return
    last: dict[fx.Node, tuple[fx.Node, fx.Node]] = {}  # input -> who changes it last, its new value
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
                f"{label(assign)} writes {named(new)} over {target.name}, whose new value it is "
                "not; assign what the stage gives for it"
            )
            yield view.hazard(HazardKind.CHANGE_LOST, assign, None, message)


def _writes_of_backward(view: View) -> Iterator[Hazard]:
    forwards = ops.calls_by_stage(view.schedule.forward, ops.forward)
    behind = inputs_behind(view.schedule)
    left = {node.name: node for node in view.graph.find_nodes(op="placeholder")}
    wanted: dict[fx.Node, str] = {}  # a backward's new value -> the input that it is for
    for node in view.nodes(ops.backward, ops.assign):
        args: Any = node.args
        if node.target is ops.assign:
            name = wanted.pop(args[1], None)
            if name is None or args[0] is not left.get(name):
                message = (
                    f"{label(node)} writes {named(args[1])} over {args[0].name}, whose new value "
                    "it is not; assign what the backward gives for it"
                )
                yield view.hazard(HazardKind.CHANGE_LOST, node, None, message)
            else:
                left[name] = node
            continue
        stage, call = args[0], forwards.get(args[0].index)
        if call is None or not stage.traced.live:
            continue
        sources: Any = call.args[2]
        given = [sources[ref.index] for ref in _arg_refs(stage, stage.traced.live)]
        names = ["" if source is None else behind.get(source.name, "") for source in given]
        for name, got in zip(names, args[6] if len(args) > 6 else (), strict=False):
            if got is not left.get(name) or name in wanted.values():
                message = (
                    f"{label(node)} takes {named(got)} for the memory of input {name}; pass what "
                    "the backward before it leaves there"
                )
                yield view.hazard(HazardKind.CHANGE_LOST, node, None, message)
        taken, of_primal = dict(ops.items(node)), dict(zip(stage.traced.live, names, strict=True))
        first = sum(1 for _ in _arg_refs(stage, stage.traced.gradients)) + len(
            stage.gradient_buckets
        )
        for k, primal in enumerate(stage.traced.written, start=first):
            wanted[taken.get(k, node)] = of_primal[primal]
    for value, name in wanted.items():
        message = (
            f"{label(value)} writes input {name}, but its new value is not written there; "
            f"assign({name}, {value.name})"
        )
        yield view.hazard(HazardKind.CHANGE_LOST, value, None, message)


CHECKS: tuple[Check, ...] = (_gradients_flow, _changes_kept)
