"""The graphs of a schedule on symbols: what can their results be?

`tests.symbolic_ops` does to symbols what `megacompile.runtime.ops.executor` does to tensors. Memory
is a list of cells; what a cell holds is a term, such as "output 0 of template 2 on these inputs",
by its number. Slots, host memory, the generator and every tensor have cells, so two names of one
memory are one cell; what was not written yet is `POISON`, what was freed is `FREED`. A schedule is
right if every interleaving leaves the terms that it leaves in program order, and writes to nothing
that was freed. A name that is not there when it is used is a `Crash`, as it is in the printed code.

Memory is freed as soon as it can be: whoever is harmed by a later free is harmed by an early one.

Graphs that run one after the other share streams, memory and tokens: `tests.symbolic_cycle`, which
tries the interleavings.

It knows nothing of `megacompile.verify.hazard`, which it is there to judge.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import fx

from megacompile.ir import ops
from megacompile.ir.buckets import Bucket
from megacompile.ir.edges import Place, token_of
from megacompile.ir.ops import Part
from megacompile.ir.schedule import Schedule
from megacompile.ir.stream import Stream

Cells = list[int]
Run = Callable[[Cells], None]

_terms: dict[tuple[object, ...], int] = {("poison",): 0, ("freed",): 1}
POISON, FREED = 0, 1  # what nobody wrote yet; what may belong to somebody else by now


def term(*parts: object) -> int:
    """The number of a term; equal terms have equal numbers."""
    return _terms.setdefault(parts, len(_terms))


class Crash(Exception):
    """The printed code or an op of it would raise."""


@dataclass(frozen=True)
class Value:
    """What a name stands for."""

    def cells(self) -> tuple[int, ...]:
        """Its memory, which goes with its last name."""
        return ()


NOTHING = Value()


@dataclass(frozen=True)
class Held(Value):
    cell: int

    def cells(self) -> tuple[int, ...]:
        return (self.cell,)


class Tensor(Held):
    """An activation, a saved tensor, a generator's state, norms."""


@dataclass(frozen=True)
class Copy(Held):
    """A saved tensor's copy on the host, or on a disk."""

    on_disk: bool = False
    once: bool = False  # its buffer is free behind the fetch


@dataclass(frozen=True)
class Weights(Value):
    """Views of a slot."""

    slot: int
    bucket: Bucket


@dataclass(frozen=True)
class Group(Value):
    """Gradients of a bucket's parameters."""

    key: int
    of: tuple[tuple[int, int], ...]  # (parameter, cell)

    def cells(self) -> tuple[int, ...]:
        return tuple(cell for _, cell in self.of)


@dataclass(frozen=True)
class States(Held):
    """A buffer for a bucket's new parameters and states."""

    bucket: Bucket


@dataclass(frozen=True)
class Update(Value):
    """An update that the host makes."""

    key: int


T = TypeVar("T")
Lane = Stream | int  # what runs in order: a stream, or one op of a stream that is not in order
Done = tuple[Lane, int]  # a lane has come so far


@dataclass(eq=False)
class Step:
    stream: Stream
    run: Run
    waits: tuple[Done, ...] = ()  # how far other lanes must have come
    release: bool = False


class Layout:
    """One graph of a schedule, laid out over streams and cells.

    Args:
        schedule: that the graph is of.
        name: "forward", "backward" or "update".
        earlier: the graph before, which this one shares streams and memory with.
        skips: buckets that an update has nothing to do for.
        clips: do updates read the norms of all gradients?

    Raises:
        Crash: whatever the streams do.
    """

    def __init__(
        self,
        schedule: Schedule,
        name: str,
        *,
        earlier: Layout,
        skips: Collection[int] = (),
        clips: bool = False,
    ) -> None:
        self.schedule, self.name = schedule, name
        self.graph = schedule.graphs[name]
        self.skips, self.clips = skips, clips
        self.gradient_params = schedule.gradient_params
        self.autograd_has: dict[str, tuple[Value, Done | None, fx.Node]] = {}  # to the graph behind
        self.values: dict[fx.Node, Value] = {}
        self.tuples: dict[fx.Node, tuple[Value, ...]] = {}
        self.gone: set[fx.Node] = set()  # names that were deleted
        self.place: dict[fx.Node, Done] = {}
        self._share(earlier)
        if name != "update":
            self._earlier()
        elif clips:
            self._clip()
        for node in self.graph.nodes:
            if node.op == "placeholder":
                self._input(node, earlier)
            elif node.op == "call_function":
                self._call(node)
        self._end()

    # Memory.

    def _world(self) -> None:
        """Streams and memory, as the first graph finds them."""
        schedule = self.schedule
        self.runs = 0
        self.initial: Cells = []
        self.queues: dict[Lane, list[Step]] = {s: [] for s in Stream if s.in_order}
        self.owners: dict[int, set[fx.Node]] = {}  # cell -> names that keep its memory
        self.slots = {slot.index: self.cell() for slot in schedule.slots}
        self.sizes = {slot.index: slot.size_bytes for slot in schedule.slots}
        self.rng = self.cell(term("rng"))
        self.persistent: dict[object, int] = {"rng": self.rng, "corrupt": self.cell(term("no"))}
        self.deferred: dict[int, tuple[Done, ...]] = {}  # cell -> kept until these
        self.defers: list[tuple[tuple[Done, ...], list[int]]] = []
        self.tokens: dict[Place, Done] = {}  # who wrote a part last, as graphs have returned it
        self.host_waits: tuple[Done, ...] = ()  # what the host has waited for
        for bucket in schedule.buckets:
            self._host(bucket)

    def _share(self, earlier: Layout) -> None:
        self.runs = earlier.runs + 1
        self.initial, self.queues, self.owners = earlier.initial, earlier.queues, earlier.owners
        self.slots, self.sizes, self.rng = earlier.slots, earlier.sizes, earlier.rng
        self.persistent = earlier.persistent
        self.deferred, self.defers, self.tokens = earlier.deferred, earlier.defers, earlier.tokens
        self.host_waits = earlier.host_waits
        if earlier.name == "forward" and (copies := self.queues[Stream.H2D]):
            self.host_waits = (*self.host_waits, (Stream.H2D, len(copies)))  # the host drains it

    def cell(self, content: int = POISON) -> int:
        self.initial.append(content)
        return len(self.initial) - 1

    def _host(self, bucket: Bucket) -> None:
        key = bucket.key
        self.persistent["params", key] = self.cell(term("params", key))
        self.persistent["states", key] = self.cell(term("states", key))
        if key in self.schedule.plan.on_disk:
            self.persistent["staged", key] = self.cell()
        self.persistent["norms", key] = self.cell(term("no norms"))
        for i in self.gradient_params.get(key, ()):
            self.persistent["gradient", key, i] = self.cell(term("gradient", key, i))

    def _earlier(self) -> None:
        """What an earlier schedule may still do when this one starts."""
        held = {node.args[1].index for node in ops.nodes_of(self.graph, ops.reuse)}  # type: ignore[union-attr]
        lost = [cell for index, cell in self.slots.items() if index not in held]
        self._queue(Stream.COMPUTE, fills(lost, POISON), ())

    def _queue(
        self, stream: Stream, run: Run, waits: tuple[Done, ...], *, release: bool = False
    ) -> Done:
        in_order = stream.in_order and (self.name, stream) != ("update", Stream.D2H)  # by threads
        lane: Lane = stream if in_order else len(self.queues)
        waits = (*waits, *self.host_waits)
        queue = self.queues.setdefault(lane, [])
        queue.append(Step(stream, run, waits, release))
        return lane, len(queue)

    def _clip(self) -> None:
        """The host waits for all gradients, and looks at their norms."""
        norms = [c for k, c in self.persistent.items() if isinstance(k, tuple) and k[0] == "norms"]
        made = self.persistent.setdefault("clip", self.cell())

        def run(cells: Cells) -> None:
            cells[made] = term("clip", *(cells[cell] for cell in norms))

        waits = tuple(done for (_, part), done in self.tokens.items() if part is Part.GRADIENTS)
        self.host_waits = (self._queue(Stream.HOST, run, waits),)

    def _put(self, cells: Cells, into: int, content: int) -> None:
        """Write to memory that was there before."""
        if cells[into] == FREED:
            cells[self.persistent["corrupt"]] = term("yes")
        else:
            cells[into] = content

    def _copies(self, pairs: list[tuple[int, int]]) -> Run:
        def run(cells: Cells) -> None:
            for into, source in pairs:
                self._put(cells, into, cells[source])

        return run

    # Names.

    def _input(self, node: fx.Node, earlier: Layout) -> None:
        token = token_of(node)
        if token is not None:
            self.values[node] = NOTHING
            if token.place in self.tokens:
                self.place[node] = self.tokens[token.place]
            return
        if node.name in earlier.autograd_has:
            value, done, name = earlier.autograd_has.pop(node.name)
            self._bind(node, value)
            if done is not None:
                self.place[node] = done
            for cell in value.cells():
                self.owners[cell].discard(name)
            return
        if self.skips:  # another step has taken it
            self.values[node] = NOTHING
            return
        if self.name != "forward" and not node.name.removeprefix("t").isdigit():
            raise Crash(f"nobody gives {node.name}")
        cell = self.cell(term("input", node.name, self.runs))
        copies = {n.name: n for n in ops.nodes_that(self.schedule.forward, lambda o: o.to_backward)}
        if self.name == "backward" and node.name in copies:
            self._bind(node, Copy(cell, copies[node.name].target is ops.write_saved))
        else:
            self._bind(node, Tensor(cell))
        if self.name == "forward":
            self.persistent["input", node.name, self.runs, ""] = cell
            self.owners[cell] = {self.graph.output_node()}  # the user keeps it

    def _bind(self, node: fx.Node, value: Value) -> None:
        self.values[node] = value
        for cell in value.cells():
            self.owners.setdefault(cell, set()).add(node)

    def get(self, node: Any) -> Value:
        if not isinstance(node, fx.Node):
            raise Crash(f"{node!r} is no value")
        if node in self.gone or node not in self.values:
            raise Crash(f"{node.name} is not there")
        return self.values[node]

    def _of(self, node: Any, kind: type[T]) -> T:
        value = self.get(node)
        if not isinstance(value, kind):
            raise Crash(f"{node} is no {kind.__name__}")
        return value

    def tensor(self, node: Any) -> int:
        return self._of(node, Tensor).cell

    def copied(self, node: Any, *, on_disk: bool | None = False) -> Copy:
        """A copy on the host (False), on a disk (True), or either."""
        value = self._of(node, Copy)
        if on_disk not in (None, value.on_disk):
            raise Crash(f"{node} is no such copy")
        return value

    def group(self, node: Any) -> Group:
        return self._of(node, Group)

    def states(self, node: Any) -> States:
        return self._of(node, States)

    # Ops.

    def _call(self, node: fx.Node) -> None:
        if node.target is operator.getitem:
            source: Any = node.args[0]
            if source not in self.tuples or node in self.gone:
                raise Crash(f"{node.name} is taken of what is not there")
            index: Any = node.args[1]
            if index >= len(self.tuples[source]):
                raise Crash(f"{source.name} has no item {index}")
            self.place[node] = self.place[source]
            self._bind(node, self.tuples[source][index])
            return
        op = ops.op_of(node)
        assert op is not None
        for value in node.all_input_nodes:  # Python looks every name up
            if value not in self.tuples:
                self.get(value)
        if self._skipped(node):
            self.values[node] = NOTHING
            return
        waits = tuple(
            self.place[value]
            for value in node.all_input_nodes
            if value in self.place and node.target not in (ops.defer_free, ops.help_host)
        )
        if node.target in (ops.free, ops.defer_free):
            given: Any = node.kwargs.get("after", ()) or ()
            after = tuple(self.place[n] for n in given if n in self.place)
            self._release(node, node.args[0], after)
            return
        run, result = getattr(self, f"_{op.name}")(*node.args)
        self.place[node] = self._queue(op.stream, run, waits)
        if isinstance(result, tuple):
            self.tuples[node] = result
            self.values[node] = NOTHING
        else:
            self._bind(node, result)

    def _skipped(self, node: fx.Node) -> bool:
        """Is it of a bucket that this update has nothing to do for?"""
        subject: Any = node.args[0] if node.args else None
        if not self.skips:
            return False
        key = self._key(subject) if isinstance(subject, fx.Node) else getattr(subject, "key", None)
        return key in self.skips

    def _key(self, node: fx.Node) -> int | None:
        """The bucket that a value is of."""
        value = self.values.get(node)
        if isinstance(value, States):
            return value.bucket.key
        return value.key if isinstance(value, (Group, Update)) else None

    # Lifetimes.

    def _release(self, node: fx.Node, value: Any, after: tuple[Done, ...]) -> None:
        found = self.get(value)
        self.gone.add(value)
        waits, kept_for = (after, ()) if node.target is ops.free else ((), after)
        for cell in found.cells():
            self.deferred[cell] = (*self.deferred.get(cell, ()), *kept_for)
        self.place[node] = self._frees(self._drop(value), waits)

    def _frees(self, lost: list[int], waits: tuple[Done, ...]) -> Done:
        """Memory goes: at once, or, where it is deferred, when that allows."""
        at_once = [cell for cell in lost if not self.deferred.get(cell)]
        where = self._queue(Stream.COMPUTE, fills(at_once, FREED), waits, release=True)
        self.defers += [((where, *self.deferred[c]), [c]) for c in lost if c not in at_once]
        return where

    def _drop(self, node: fx.Node) -> list[int]:
        """The cells that a name was the last one of."""
        lost: list[int] = []
        if isinstance(self.values[node], Copy):
            return lost  # who works on it has it too
        for cell in self.values[node].cells():
            names = self.owners[cell]
            if node in names:
                names.discard(node)
                lost += [] if names else [cell]
        return lost

    def _end(self) -> None:
        """The code returns: what it does not return dies."""
        returned = ops.returned(self.graph)
        nodes: list[fx.Node] = []
        fx.map_arg(returned, nodes.append)
        for node in nodes:
            self.get(node)
        if self.name != "forward":
            self._hand_tokens(returned[-1])
        outputs: list[fx.Node] = []
        fx.map_arg(returned[0] if self.name != "update" else (), outputs.append)
        self.outputs = [cell for node in outputs for cell in self.values[node].cells()]
        for cell in self.outputs:
            self.owners[cell].add(self.graph.output_node())  # the user keeps it
        handed: list[fx.Node] = [n for n in self.values if self._key(n) in self.skips]
        fx.map_arg(returned[1] if len(returned) > 1 else (), handed.append)
        self.autograd_has = {n.name: (self.values[n], self.place.get(n), n) for n in handed}
        lost = [
            cell
            for node in list(self.values)
            if node not in nodes and node not in self.gone and node not in handed
            for cell in self._drop(node)
        ]
        self._frees(lost, ())

    def _hand_tokens(self, nodes: Any) -> None:
        for node in nodes:
            subject: Any = node.args[0] if node.args else None
            for part in _WRITTEN.get(node.target, ()):
                if node in self.place:
                    self.tokens[subject.key, part] = self.place[node]


_WRITTEN: dict[object, tuple[Part, ...]] = {  # what an op is the last writer of
    ops.keep_grad: (Part.GRADIENTS,),
    ops.offload_grad: (Part.GRADIENTS,),
    ops.offload_state: (Part.WEIGHTS, Part.STATES),
    ops.update_host: (Part.WEIGHTS, Part.STATES),
    ops.update_resident: (Part.WEIGHTS, Part.STATES),
    ops.update_in_place: (Part.WEIGHTS, Part.STATES),
    ops.write_state: (Part.STATES,),
}


def fills(lost: list[int], content: int) -> Run:
    def run(cells: Cells) -> None:
        for cell in lost:
            cells[cell] = content

    return run
