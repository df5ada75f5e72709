"""Every interleaving of a schedule, on symbols: what can its results be?

`tests.symbolic_ops` does to symbols what `megacompile.runtime.ops.bound` does to tensors. Memory is
a list of cells; what a cell holds is a term, such as "output 0 of template 2 on these inputs", by
its number. Slots, host memory, the generator and every tensor have cells, so two names of one
memory are one cell; what was not written yet is `POISON`, what was freed is `FREED`. A schedule is
right if every interleaving leaves the terms that it leaves in program order, and writes to nothing
that was freed. A name that is not there when it is used is a `Crash`, as it is in the printed code.

Memory is freed as soon as it can be: whoever is harmed by a later free is harmed by an early one.

It knows nothing of `megacompile.verify.hazard`, which it is there to judge.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from megacompile.ir import ops
from megacompile.ir.buckets import Bucket
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
class Tensor:
    """A value with one cell: an activation, a saved tensor, a generator's state, norms."""

    cell: int

    def cells(self) -> tuple[int, ...]:
        return (self.cell,)


@dataclass(frozen=True)
class Weights:
    """Views of a slot."""

    slot: int
    bucket: Bucket

    def cells(self) -> tuple[int, ...]:
        return ()


@dataclass(frozen=True)
class Group:
    """Gradients of a bucket's parameters."""

    key: int
    of: tuple[tuple[int, int], ...]  # (parameter, cell)

    def cells(self) -> tuple[int, ...]:
        return tuple(cell for _, cell in self.of)


@dataclass(frozen=True)
class States:
    """A buffer for a bucket's new parameters and states."""

    bucket: Bucket
    cell: int

    def cells(self) -> tuple[int, ...]:
        return (self.cell,)


Value = Tensor | Weights | Group | States | None


@dataclass(eq=False)
class Step:
    """An op in its stream's queue."""

    label: str
    stream: Stream
    run: Run
    waits: tuple[tuple[Stream, int], ...] = ()  # how far other streams must have come
    release: bool = False


@dataclass
class Start:
    """What a graph finds when it begins."""

    inputs: dict[str, int] = field(default_factory=dict)  # placeholder -> term
    slots: dict[int, int] = field(default_factory=dict)  # slot -> term
    rng: int = field(default_factory=lambda: term("rng"))


class Layout:
    """One graph of a schedule, laid out over streams and cells.

    Args:
        schedule: that the graph is of.
        name: "forward" or "backward".
        start: what the forward left, for a backward.
        accumulate: are there gradients on the host?

    Raises:
        Crash: whatever the streams do.
    """

    def __init__(self, schedule: Schedule, name: str, start: Start, accumulate: bool) -> None:
        self.schedule, self.name = schedule, name
        self.graph = schedule.graphs[name]
        self.initial: Cells = []
        self.queues: dict[Stream, list[Step]] = {stream: [] for stream in Stream}
        self.values: dict[fx.Node, Value] = {}
        self.tuples: dict[fx.Node, tuple[Value, ...]] = {}
        self.gone: set[fx.Node] = set()  # names that were deleted
        self.place: dict[fx.Node, tuple[Stream, int]] = {}
        self.owners: dict[int, set[fx.Node]] = {}  # cell -> names that keep its memory
        self.slots = {slot.index: self.cell(start.slots.get(slot.index)) for slot in schedule.slots}
        self.sizes = {slot.index: slot.size_bytes for slot in schedule.slots}
        self.rng = self.cell(start.rng)
        self.persistent: dict[object, int] = {"rng": self.rng, "corrupt": self.cell(term("no"))}
        self.deferred: dict[int, tuple[tuple[Stream, int], ...]] = {}  # cell -> kept until these
        self.defers: list[tuple[tuple[tuple[Stream, int], ...], list[int]]] = []
        self.gradient_params = schedule.gradient_params
        for bucket in schedule.buckets:
            self._host(bucket, accumulate)
        self._earlier(accumulate)
        for node in self.graph.nodes:
            if node.op == "placeholder":
                self._input(node, start)
            elif node.op == "call_function":
                self._call(node)
        self._end()

    # Memory.

    def cell(self, content: int | None = POISON) -> int:
        self.initial.append(POISON if content is None else content)
        return len(self.initial) - 1

    def _host(self, bucket: Bucket, accumulate: bool) -> None:
        key = bucket.key
        self.persistent["params", key] = self.cell(term("params", key))
        self.persistent["states", key] = self.cell(term("states", key))
        self.persistent["norms", key] = self.cell(term("no norms"))
        for i in self.gradient_params.get(key, ()):
            content = term("gradient", key, i) if accumulate else POISON
            self.persistent["gradient", key, i] = self.cell(content)

    def _earlier(self, accumulate: bool) -> None:
        """What an earlier schedule may still do when this one starts."""
        held = {node.args[1].index for node in ops.nodes_of(self.graph, ops.reuse)}  # type: ignore[union-attr]
        lost = [cell for index, cell in self.slots.items() if index not in held]
        if self.name == "backward" and not accumulate:
            lost += [c for k, c in self.persistent.items() if isinstance(k, tuple) and len(k) == 3]
        self._queue(Stream.COMPUTE, "EARLIER", poisons(lost), ())

    def _queue(
        self,
        stream: Stream,
        label: str,
        run: Run,
        waits: tuple[tuple[Stream, int], ...],
        *,
        release: bool = False,
    ) -> tuple[Stream, int]:
        self.queues[stream].append(Step(label, stream, run, waits, release))
        return stream, len(self.queues[stream])

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

    def _input(self, node: fx.Node, start: Start) -> None:
        content = start.inputs.get(node.name)
        if content is None:
            if self.name == "backward" and not node.name.removeprefix("t").isdigit():
                raise Crash(f"no saved value {node.name}")
            content = term("input", node.name)
        cell = self.cell(content)
        self._bind(node, Tensor(cell))
        if self.name == "forward":
            self.persistent["input", node.name] = cell
            self.owners[cell] = set()  # the user keeps it

    def _bind(self, node: fx.Node, value: Value) -> None:
        self.values[node] = value
        for cell in value.cells() if value is not None else ():
            self.owners.setdefault(cell, set()).add(node)

    def get(self, node: Any) -> Value:
        """A name's value."""
        if not isinstance(node, fx.Node):
            raise Crash(f"{node!r} is no value")
        if node in self.gone or node not in self.values:
            raise Crash(f"{node.name} is not there")
        return self.values[node]

    def tensor(self, node: Any) -> int:
        value = self.get(node)
        if not isinstance(value, Tensor):
            raise Crash(f"{node} is no tensor")
        return value.cell

    def group(self, node: Any) -> Group:
        value = self.get(node)
        if not isinstance(value, Group):
            raise Crash(f"{node} is no gradients")
        return value

    def states(self, node: Any) -> States:
        value = self.get(node)
        if not isinstance(value, States):
            raise Crash(f"{node} is no states")
        return value

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
        waits = tuple(
            self.place[value]
            for value in node.all_input_nodes
            if value in self.place and node.target is not ops.defer_free
        )
        carry_out: Any = getattr(self, f"_{op.name}")
        given: Any = node.kwargs.get("after", ()) or ()
        if node.target in (ops.free, ops.defer_free):
            carry_out(node, node.args[0], tuple(self.place[n] for n in given if n in self.place))
            return
        run, result = carry_out(*node.args)
        self.place[node] = self._queue(op.stream, ops.label(node), run, waits)
        if isinstance(result, tuple):
            self.tuples[node] = result
            self.values[node] = None
        else:
            self._bind(node, result)

    # Lifetimes.

    def _free(self, node: fx.Node, value: Any, after: tuple[tuple[Stream, int], ...]) -> None:
        self._release(node, value, after, ())

    def _defer_free(self, node: fx.Node, value: Any, after: tuple[tuple[Stream, int], ...]) -> None:
        self._release(node, value, (), after)

    def _release(
        self,
        node: fx.Node,
        value: Any,
        waits: tuple[tuple[Stream, int], ...],
        kept_for: tuple[tuple[Stream, int], ...],
    ) -> None:
        found = self.get(value)
        self.gone.add(value)
        for cell in found.cells() if found is not None else ():
            self.deferred[cell] = (*self.deferred.get(cell, ()), *kept_for)
        self.place[node] = self._frees(f"del {value.name}", self._drop(value), waits)

    def _frees(
        self, label: str, lost: list[int], waits: tuple[tuple[Stream, int], ...]
    ) -> tuple[Stream, int]:
        """Memory goes: at once, or, where it is deferred, when that allows."""
        at_once = [cell for cell in lost if not self.deferred.get(cell)]
        where = self._queue(Stream.COMPUTE, label, _frees(at_once), waits, release=True)
        self.defers += [((where, *self.deferred[c]), [c]) for c in lost if c not in at_once]
        return where

    def _drop(self, node: fx.Node) -> list[int]:
        """The cells that a name was the last one of."""
        value = self.values[node]
        lost = []
        for cell in value.cells() if value is not None else ():
            names = self.owners[cell]
            if node in names:
                names.discard(node)
                lost += [] if names else [cell]
        return lost

    def _end(self) -> None:
        """The code returns: what it does not return dies."""
        returned = ops.returned(self.graph)
        self.returned: list[tuple[str, int]] = []
        nodes: list[fx.Node] = []
        fx.map_arg(returned, nodes.append)
        for node in nodes:
            value = self.get(node)
            cells = value.cells() if value is not None else ()
            self.returned += [(node.name, cell) for cell in cells]
        lost = [
            cell
            for node in list(self.values)
            if node not in nodes and node not in self.gone
            for cell in self._drop(node)
        ]
        self._frees("return", lost, ())

    def seen(self, cells: Cells) -> tuple[object, ...]:
        """What can be seen at the end."""
        kept = tuple(cells[cell] for cell in self.persistent.values())
        return kept, tuple(cells[cell] for _, cell in self.returned)

    def next(self, cells: Cells) -> Start:
        """What a backward finds after this forward."""
        inputs = {name: cells[cell] for name, cell in self.returned}
        slots = {index: cells[cell] for index, cell in self.slots.items()}
        return Start(inputs, slots, cells[self.rng])


def _frees(lost: list[int]) -> Run:
    def run(cells: Cells) -> None:
        for cell in lost:
            cells[cell] = FREED

    return run


def poisons(lost: list[int]) -> Run:
    def run(cells: Cells) -> None:
        for cell in lost:
            cells[cell] = POISON

    return run


Path = list[Stream]  # the streams of the ops in the order in which they run


def in_order(machine: Layout) -> Cells:
    """The cells after a run in which copies come as early as they can."""
    for cells, _ in explore(machine):
        return cells
    raise Crash("deadlock")


def explore(machine: Layout, limit: int = 20_000) -> Iterator[tuple[Cells, Path]]:
    """The final cells of all interleavings, each once, with one that leads there.

    A state is how far each stream has come and what the cells hold: interleavings that meet in one
    go on as one.

    Raises:
        Crash: no op can run.
        OverflowError: more than `limit` states.
    """
    queues = [machine.queues[stream] for stream in Stream]
    ends = tuple(map(len, queues))
    first = _freed(machine, (0,) * len(queues), list(machine.initial))
    seen = {first}
    stack: list[tuple[At, tuple[int, ...], Any]] = [(*first, None)]
    while stack:
        at, content, path = stack.pop()
        if at == ends:
            yield list(content), _unwind(path)
            continue
        moved = False
        for i, queue in enumerate(queues):
            if at[i] == ends[i] or not _ready(queue[at[i]], at):
                continue
            moved = True
            cells = list(content)
            queue[at[i]].run(cells)
            following = _freed(machine, (*at[:i], at[i] + 1, *at[i + 1 :]), cells)
            if following not in seen:
                seen.add(following)
                stack.append((*following, (path, queue[at[i]].stream)))
        if not moved:
            raise Crash("deadlock")
        if len(seen) > limit:
            raise OverflowError(f"more than {limit} states")


At = tuple[int, ...]  # how far each stream has come
_INDEX = {stream: i for i, stream in enumerate(Stream)}


def _ready(step: Step, at: At) -> bool:
    return all(at[_INDEX[stream]] >= count for stream, count in step.waits)


def _freed(machine: Layout, at: At, cells: Cells) -> tuple[At, tuple[int, ...]]:
    """The state after everything that can be freed has been."""
    compute = machine.queues[Stream.COMPUTE]
    i = _INDEX[Stream.COMPUTE]
    while at[i] < len(compute) and compute[at[i]].release and _ready(compute[at[i]], at):
        compute[at[i]].run(cells)
        at = (*at[:i], at[i] + 1, *at[i + 1 :])
    for needed, lost in machine.defers:
        if all(at[_INDEX[stream]] >= count for stream, count in needed):
            for cell in lost:
                cells[cell] = FREED
    return at, tuple(cells)


def _unwind(path: Any) -> Path:
    found: Path = []
    while path is not None:
        path, stream = path
        found.append(stream)
    return found[::-1]
