"""Checks that ops get the values that are meant for them, within a graph and across graphs.

The backward sees what the forward saw: arguments, saved tensors, random numbers. The complete
gradient of a value goes to the backward of the stage that made the value, and that of a bucket to
the last stage that reads it. The forward's own arguments define the schedule, so there is nothing
to check them against.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import fx

from megacompile.ir import ops
from megacompile.ir.buckets import Bucket
from megacompile.ir.edges import token_of
from megacompile.ir.ops import Part, Takes, Value, effects
from megacompile.ir.stages import ArgRef, SavedRef, Stage
from megacompile.ir.values import (
    bucket_of,
    fetched_from,
    groups,
    kind_of,
    label,
    named,
    producer,
    reads,
    taken,
    tangents_of,
)
from megacompile.verify.hazard import Check, Hazard, HazardKind, View

# An argument: its name in messages, True if the op needs it, and a test of a value for it.
Wanted = tuple[str, bool, Callable[[fx.Node], bool]]
_SOURCES = (Value.GRADIENTS, Value.SAVED_ON_DISK)
_COPIES = (Value.SAVED_ON_HOST, Value.SAVED_ON_DISK)


def arguments(view: View) -> Iterator[Hazard]:
    """Each op gets its arguments; the other checks rely on these."""
    stages = _Stages(view)
    for node, op in view.order.calls:
        for takes in op.takes:
            wanted = _declared(view, node, takes)
            yield from _checked(view, node, _at(node.args, takes.at), wanted)
        if op.code:
            for k, (what, wanted_values) in enumerate(stages.wanted(node), start=1):
                given: Any = node.args[k] if k < len(node.args) else ()
                if len(given) != len(wanted_values):
                    message = f"{label(node)} gets {len(given)} {what}, needs {len(wanted_values)}"
                    yield view.hazard(HazardKind.ARGUMENTS, node, None, message)
                for value, each in zip(given, wanted_values, strict=False):
                    yield from _checked(view, node, value, each)
            stages.ran(node)
        elif node.target is ops.assign and not stages.assigned(node):
            target, new, *_ = ops.arguments(node)
            message = f"{label(node)} writes {named(new)} to {target.name}, not its new value"
            yield view.hazard(HazardKind.LOST, node, None, message)
    for value, name in stages.changed.items():
        message = f"{label(value)} changes input {name}, but its new value is not written there"
        yield view.hazard(HazardKind.LOST, value, None, message)
    inputs = view.schedule.forward.find_nodes(op="placeholder")
    sources = {node.name: node for node in inputs}
    returned = ops.returned(view.graph)[0] if view.name == "backward" else ()
    for name, value in zip(view.schedule.gradients, returned, strict=False):
        if isinstance(value, fx.Node) and stages.gradients.get(sources[name]) != value.name:
            message = f"it returns {named(value)} as the gradient of {name}"
            output = view.graph.output_node()
            yield view.hazard(HazardKind.WRONG_ARGUMENT, output, value, message)


def _made_before_used(view: View) -> Iterator[Hazard]:
    for node in view.graph.nodes:
        for value in node.all_input_nodes:
            if not view.order.issued_before(value, node):
                message = f"{label(node)} takes {named(value)}, which is made after it"
                yield view.hazard(HazardKind.USE_BEFORE_MADE, node, value, message)


def _at(values: Sequence[Any], index: int) -> Any:
    return values[index] if index < len(values) else None


def _checked(view: View, node: fx.Node, value: Any, wanted: Wanted) -> Iterator[Hazard]:
    what, required, is_right = wanted
    if isinstance(value, fx.Node):
        if not is_right(value):
            message = f"{label(node)} takes {named(value)} as {what}"
            yield view.hazard(HazardKind.WRONG_ARGUMENT, node, value, message)
    elif required:
        message = f"{label(node)} does not get {what}, which it reads"
        yield view.hazard(HazardKind.ARGUMENTS, node, None, message)


def _declared(view: View, node: fx.Node, takes: Takes) -> Wanted:
    """An argument that its op declares."""

    def is_right(given: fx.Node) -> bool:
        value = view.source(given)
        if takes.kind in (None, *_COPIES):
            is_saved = effects(node).gives is Value.SAVED
            return not is_saved or fetched_from(view.copies, node) != node.name
        if kind_of(value) is not takes.kind:
            return False
        if takes.like is not None:
            return value.args[1] is _made_of(node.args[takes.like])
        if takes.kind is Value.SHARD and value.args[1] != node.args[1]:
            return False
        bucket = bucket_of(value)
        return bucket is not None and bucket.key == ops.bucket_of(node).key

    subject: Any = node.args[0]
    kind = "a value" if takes.kind is None else takes.kind.value
    of = f" of bucket {subject.label}" if isinstance(subject, Bucket) else ""
    return f"{kind}{of}", not takes.optional, is_right


def _made_of(value: Any) -> Any:
    """The gradients or the copy on a disk that a value was made from, or the value itself."""
    for takes in effects(value).takes if isinstance(value, fx.Node) else ():
        if takes.kind in _SOURCES and effects(value).gives is not takes.kind:
            return value.args[takes.at]
    return value


def _read_on_the_device(view: View) -> Iterator[Hazard]:
    """Ops other than fetches take values in device memory, and no tokens."""
    for node in view.that(lambda op: op.frees is None):
        allowed = [taken(node, kind) for kind in _COPIES]
        for value in reads(node):
            is_copy = value.op == "placeholder" and value.name in view.copies
            is_copy = is_copy or effects(value).gives in _COPIES
            if (is_copy and value not in allowed) or token_of(value) is not None:
                message = f"{label(node)} takes {value.name}, which is not in device memory"
                yield view.hazard(HazardKind.WRONG_ARGUMENT, node, value, message)


def _weights_or_masters(view: View) -> Iterator[Hazard]:
    """Updated parameters come from the bucket's slot or, as masters, with the states."""
    for node in view.that(lambda op: op.gives is Value.UPDATED):
        weights, given = taken(node, Value.WEIGHTS), taken(node, Value.STATES)
        state = given and view.source(given)
        if state is None or kind_of(state) is not Value.STATES:
            continue  # reported elsewhere
        if (weights is None) != bool(ops.arguments(state)[2]):
            which = "neither" if weights is None else "both"
            message = f"{label(node)} gets {which} weights of its bucket and masters; pass one"
            yield view.hazard(HazardKind.ARGUMENTS, node, weights, message)


class _Stages:
    """The values that stages get in one graph; updated in program order."""

    def __init__(self, view: View) -> None:
        self.view = view
        # forward's value, or bucket key -> name of its gradient so far
        self.gradients: dict[Any, str] = {}
        self.changed: dict[fx.Node, str] = {}  # new value that is not assigned yet -> input
        self.root: dict[fx.Node, fx.Node] = {}  # value in the forward -> the input in its memory
        if view.name == "backward":
            outputs, names = ops.returned(view.schedule.forward)[0], tangents_of(view.graph)
            tangents = [k for k in view.schedule.tangents if k < len(outputs)]
            self.gradients = {outputs[k]: names.get(k, "") for k in tangents}
        else:
            self.root = {node: node for node in view.graph.find_nodes(op="placeholder")}

    def wanted(self, node: fx.Node) -> Iterator[tuple[str, list[Wanted]]]:
        """The lists of values that a stage op takes, in the order of its arguments."""
        stage: Any = node.args[0]
        traced, call = stage.traced, self.view.forwards.get(stage.index)
        every = range(len(stage.primals))
        of_target = {
            ops.backward: traced.backward_primals,
            ops.recompute: traced.recompute_primals,
        }
        primals: Sequence[int] = of_target.get(node.target, every)  # type: ignore[arg-type]
        keys = {bucket.key for bucket in stage.buckets_read(primals)}
        yield "weights", [_weights(bucket, bucket.key in keys) for bucket in stage.buckets]
        refs = {ref.index for ref in stage.arg_refs(primals)}
        count = max((ref.index for ref in stage.arg_refs(every)), default=-1) + 1
        sources: Any = () if call is None else call.args[2]
        yield "args", [self._arg(i, _at(sources, i), i in refs) for i in range(count)]
        if node.target is ops.backward:
            yield from self._of_backward(stage, call)

    def _arg(self, index: int, source: fx.Node | None, required: bool) -> Wanted:
        def is_right(value: fx.Node) -> bool:
            if self.view.name == "forward" or source is None:
                return True
            again = producer(value)
            if again.target is ops.rerun:
                call = producer(source)
                if call.target is not ops.forward or value.args[1] != source.args[1]:
                    return False
                return bool(ops.arguments(again)[0].index == ops.arguments(call)[0].index)
            known = [user.name for user in source.users if effects(user).gives is Value.COPY]
            return fetched_from(self.view.copies, value) in (source.name, *known)

        name = "" if source is None else f", which was {source.name} in the forward"
        return f"argument {index}{name}", required, is_right

    def _of_backward(
        self, stage: Stage, call: fx.Node | None
    ) -> Iterator[tuple[str, list[Wanted]]]:
        traced = stage.traced
        results = {} if call is None else dict(ops.items(call))
        sources: Any = () if call is None else call.args[2]
        kept = {item.name: k - stage.result_count for k, item in results.items()}
        read = {i.index for i in traced.backward_inputs if isinstance(i, SavedRef)}

        def saved(index: int) -> Wanted:
            def is_right(value: fx.Node) -> bool:
                source: Any = producer(value)
                if source.target is ops.recompute:
                    return bool(source.args[0].index == stage.index and value.args[1] == index)
                given = source.op == "placeholder" or kind_of(source) is Value.SAVED
                return given and kept.get(fetched_from(self.view.copies, value)) == index

            return f"saved tensor {index}", index in read, is_right

        def gradient(what: str, of: Any) -> Wanted:
            name = getattr(of, "name", of)
            known = self.gradients.get(of)
            return f"{what} of {name}", True, lambda value: of is None or known == value.name

        yield "saved tensors", [saved(i) for i in range(len(traced.saved))]
        yield "tangents", [gradient("the tangent", results.get(k)) for k in traced.tangents]
        refs = stage.arg_refs(traced.partial_gradients)
        partial: list[Any] = [_at(sources, ref.index) for ref in refs]
        partial += [b.key for b in stage.gradient_buckets if b.key in self.gradients]
        yield "partial gradients", [gradient("the gradient so far", of) for of in partial]

    def ran(self, node: fx.Node) -> None:
        """Record the results of a stage op: gradients, and new values of inputs."""
        stage: Any = node.args[0]
        items, call = dict(ops.items(node)), self.view.forwards.get(stage.index)
        if node.target is ops.backward and call is not None:
            sources: Any = call.args[2]
            refs = stage.arg_refs(stage.traced.gradients)
            of: list[Any] = [sources[ref.index] for ref in refs]
            of += [bucket.key for _, bucket in groups(node)]
            for k, source in enumerate(of):
                self.gradients[source] = items[k].name if k in items else ""
        elif node.target is ops.forward:
            args: Any = node.args[2]
            for k, primal in enumerate(stage.mutated, start=len(stage.outputs)):
                ref = stage.primals[primal]
                source = self.root.get(args[ref.index]) if isinstance(ref, ArgRef) else None
                if source is not None:
                    self.changed = {v: n for v, n in self.changed.items() if n != source.name}
                    self.changed[items.get(k, node)] = source.name
                    self.root[items.get(k, node)] = source

    def assigned(self, node: fx.Node) -> bool:
        """Record an `assign`; False if it does not write the new value of its input there."""
        target, new, *_ = ops.arguments(node)
        source = self.root.get(target)
        if source is None or new is target or self.root.get(new) is not source:
            return False
        self.root[node] = source
        self.changed.pop(new, None)
        return True


def _weights(bucket: Bucket, required: bool) -> Wanted:
    def is_right(value: fx.Node) -> bool:
        own = bucket_of(value) if kind_of(value) is Value.WEIGHTS else None
        return own is not None and own.key == bucket.key

    return f"the weights of bucket {bucket.label}", required, is_right


def _random_numbers(view: View) -> Iterator[Hazard]:
    """A recomputed stage draws from the generator state saved before its forward. All saved states
    are checked, because a backward for other outputs may use states that this one does not."""
    drawing: dict[str, int] = {}  # state -> the first random stage whose forward follows
    states: list[str] = []
    for node in ops.nodes_of(view.schedule.forward, ops.save_rng, ops.forward):
        if node.target is ops.save_rng:
            states.append(node.name)
        elif (stage := ops.arguments(node)[0]).traced.random:
            drawing |= dict.fromkeys(states, stage.index)
            states = []
    for node in ops.nodes_of(view.graph, ops.save_rng, ops.recompute, ops.rerun):
        stage, rng = ops.arguments(node)[0], node if node.target is ops.save_rng else node.args[3]
        name = getattr(rng, "name", "no state")
        if stage.traced.random and drawing.get(name) != stage.index:
            message = f"{label(node)}: {name} is not the state directly before {stage.index}F"
            yield view.hazard(HazardKind.WRONG_ARGUMENT, node, None, message)


def saved_values(views: list[View]) -> Iterator[Hazard]:
    """The forward returns the saved values, in order; the backward takes nothing else from it."""
    forward, *others = views
    names = list(forward.schedule.saved_values)
    given = [node.name for node in ops.returned(forward.graph)[1]]
    if given != names:
        message = f"it returns the saved values {', '.join(given)}, needed {', '.join(names)}"
        yield forward.hazard(HazardKind.HANDED_ON, forward.graph.output_node(), None, message)
    for view in others:
        if view.name != "backward":
            continue
        # it may take fewer values, if its outputs' gradients need fewer
        tangents = tangents_of(view.graph)
        known = {*names, *(tangents[k] for k in view.schedule.tangents if k in tangents)}
        for node in view.graph.find_nodes(op="placeholder"):
            if node.name not in known and token_of(node) is None:
                message = f"it takes {node.name}, neither a saved value nor an output's gradient"
                yield view.hazard(HazardKind.HANDED_ON, node, None, message)


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
    given = [node.name for node in takes if token_of(node) is None]
    if returned != names or sorted(given) != sorted(names):
        each = (", ".join(which) or "nothing" for which in (returned, names, given))
        message = "it leaves {}, the schedule lists {}, the update takes {}".format(*each)
        yield backward.hazard(HazardKind.HANDED_ON, backward.graph.output_node(), None, message)
    for node in left:
        complete = any(Part.GRADIENTS in effects(user).writes for user in node.users)
        if kind_of(node) is Value.GRADIENTS and not complete:
            message = f"it leaves {named(node)}, to which later backwards add"
            yield backward.hazard(HazardKind.HANDED_ON, node, None, message)


CHECKS: tuple[Check, ...] = (
    _made_before_used,
    _read_on_the_device,
    _weights_or_masters,
    _random_numbers,
)
