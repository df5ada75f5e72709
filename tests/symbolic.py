"""Every interleaving of a schedule, on symbols: what can its results be?

`Machine` does to symbols what `megacompile.runtime.executor` does to tensors. Memory is a list of cells;
what a cell holds is a term, such as "output 0 of template 2 on these inputs", by its number. Slots, host
memory, the generator and every tensor have cells, so two names of one memory are one cell; what was not
written yet is `POISON`, what was freed is `FREED`. A schedule is right if every interleaving leaves the
terms that it leaves in program order, and writes to nothing that was freed. A name that is not there
when it is used is a `Crash`, as it is in the printed code.

Memory is freed as soon as it can be: whoever is harmed by a later free is harmed by an early one.

It knows nothing of `megacompile.hazards`, which it is there to judge.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from megacompile import ops
from megacompile.ir import ArgRef, Bucket, ParamRef, SavedRef, Schedule, Stage, Stream

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
    """Room for a bucket's new parameters and states."""

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


class Machine:
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
        self.parked: dict[int, tuple[tuple[Stream, int], ...]] = {}  # cell -> kept until these
        self.parks: list[tuple[tuple[tuple[Stream, int], ...], list[int]]] = []
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
        held = {node.args[1].index for node in ops.nodes_of(self.graph, ops.hold)}  # type: ignore[union-attr]
        lost = [cell for index, cell in self.slots.items() if index not in held]
        if self.name == "backward" and not accumulate:
            lost += [c for k, c in self.persistent.items() if isinstance(k, tuple) and len(k) == 3]
        self._queue(Stream.COMPUTE, "EARLIER", _poisons(lost), ())

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
                raise Crash(f"no residual {node.name}")
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
            if value in self.place and node.target is not ops.park
        )
        carry: Any = getattr(self, f"_{op.name}")
        given: Any = node.kwargs.get("after", ()) or ()
        if node.target in (ops.free, ops.park):
            carry(node, node.args[0], tuple(self.place[n] for n in given if n in self.place))
            return
        run, result = carry(*node.args)
        self.place[node] = self._queue(op.stream, ops.label(node), run, waits)
        if isinstance(result, tuple):
            self.tuples[node] = result
            self.values[node] = None
        else:
            self._bind(node, result)

    def _begin(self) -> tuple[Run, Value]:
        return _nothing, None

    def _prefetch(self, bucket: Bucket, slot: Any) -> tuple[Run, Value]:
        into, source = self._slot(slot, bucket), self.persistent["params", bucket.key]

        def run(cells: Cells) -> None:
            cells[into] = cells[source]

        return run, Weights(into, bucket)

    def _hold(self, bucket: Bucket, slot: Any) -> tuple[Run, Value]:
        return _nothing, Weights(self._slot(slot, bucket), bucket)

    def _slot(self, slot: Any, bucket: Bucket) -> int:
        if slot is None or self.sizes.get(slot.index, -1) < bucket.size_bytes:
            raise Crash(f"{slot} is too small, or not there")
        return self.slots[slot.index]

    def _save_rng(self, stage: Stage) -> tuple[Run, Value]:
        return self._copy(self.rng)

    def _snapshot(self, tensor: Any) -> tuple[Run, Value]:
        return self._copy(self.tensor(tensor))

    def _copy(self, source: int) -> tuple[Run, Value]:
        made = self.cell()

        def run(cells: Cells) -> None:
            cells[made] = cells[source]

        return run, Tensor(made)

    def _assign(self, target: Any, value: Any) -> tuple[Run, Value]:
        into, source = self.tensor(target), self.tensor(value)

        return self._copies([(into, source)]), Tensor(into)

    def _primals(self, stage: Stage, weights: Any, args: Any) -> list[Callable[[Cells], int] | None]:
        """How to read each of a stage's inputs; None for what is not given."""
        found: list[Callable[[Cells], int] | None] = []
        for ref in stage.primals:
            given = weights if isinstance(ref, ParamRef) else args
            index = ref.bucket if isinstance(ref, ParamRef) else ref.index
            if index >= len(given):
                raise Crash(f"stage {stage.index} is given too little")
            if given[index] is None:
                found.append(None)
            elif isinstance(ref, ParamRef):
                value = self.get(given[index])
                if not isinstance(value, Weights) or ref.param >= len(value.bucket.params):
                    raise Crash(f"{given[index]} is no weights")
                found.append(_part(value.slot, value.bucket.params[ref.param].offset_bytes))
            else:
                found.append(_whole(self.tensor(given[index])))
        return found

    def _forward(
        self, stage: Stage, weights: Any, args: Any, saving: bool
    ) -> tuple[Run, tuple[Value, ...]]:
        template = stage.traced
        reads = _all(self._primals(stage, weights, args))
        keeps = [reads[i] for i in template.recompute_primals]
        outs = [self.cell() for _ in range(len(stage.outputs) + len(stage.mutated))]
        saved = [self.cell() for _ in range(len(template.saved) if saving else 0)]

        def run(cells: Cells) -> None:
            rng = self._draw(cells) if template.random else 0
            given, kept = _read(reads, cells), _read(keeps, cells)
            for i, cell in enumerate(outs):
                cells[cell] = _of("output", id(template), i, rng, *given)
            for i, cell in enumerate(saved):
                cells[cell] = _of("saved", id(template), i, rng, *kept)

        return run, tuple(map(Tensor, (*outs, *saved)))

    def _draw(self, cells: Cells) -> int:
        rng = cells[self.rng]
        cells[self.rng] = term("next", rng)
        return rng

    def _recompute(
        self, stage: Stage, weights: Any, args: Any, rng: Any
    ) -> tuple[Run, tuple[Value, ...]]:
        template = stage.traced
        primals = self._primals(stage, weights, args)
        reads = _all([primals[i] for i in template.recompute_primals])
        if template.random and rng is None:
            raise Crash("a random stage without a generator's state gives its outputs too")
        state = None if rng is None else self.tensor(rng)
        saved = [self.cell() for _ in template.saved]

        def run(cells: Cells) -> None:
            drawn = cells[state] if template.random and state is not None else 0
            kept = _read(reads, cells)
            for i, cell in enumerate(saved):
                cells[cell] = _of("saved", id(template), i, drawn, *kept)

        return run, tuple(map(Tensor, saved))

    def _backward(
        self, stage: Stage, weights: Any, args: Any, saved: Any, tangents: Any, carries: Any
    ) -> tuple[Run, tuple[Value, ...]]:
        template = stage.traced
        primals = self._primals(stage, weights, args)
        arg_carries = [i for i in template.carries if isinstance(stage.primals[i], ArgRef)]
        values, groups = carries[: len(arg_carries)], carries[len(arg_carries) :]
        so_far = {group.key: dict(group.of) for group in map(self.group, groups)}
        if len(values) < len(arg_carries) or len(saved) < len(template.saved):
            raise Crash("too few carries or saved tensors")
        reads: list[Callable[[Cells], int]] = []
        for item in template.backward_inputs:
            if isinstance(item, SavedRef):
                reads.append(_whole(self.tensor(saved[item.index])))
            else:
                reads += _all([primals[item]])
        reads += [_whole(self.tensor(tangent)) for tangent in tangents]
        flowing = iter(values)
        for i in template.carries:
            ref = stage.primals[i]
            if isinstance(ref, ArgRef):
                reads.append(_whole(self.tensor(next(flowing))))
            else:
                try:
                    reads.append(_whole(so_far[stage.buckets[ref.bucket].key][ref.param]))
                except KeyError:
                    raise Crash("no gradients so far") from None
        if len(reads) != len(template.backward_inputs) + len(template.tangent_metas):
            raise Crash("a backward takes more, or less")
        return self._gradients(stage, reads, so_far)

    def _gradients(
        self, stage: Stage, reads: list[Callable[[Cells], int]], so_far: dict[int, dict[int, int]]
    ) -> tuple[Run, tuple[Value, ...]]:
        template = stage.traced
        made = {primal: self.cell() for primal in template.gradients}
        of_args: list[Value] = []
        for primal, cell in made.items():
            ref = stage.primals[primal]
            if isinstance(ref, ArgRef):
                of_args.append(Tensor(cell))
            else:
                so_far.setdefault(stage.buckets[ref.bucket].key, {})
        merged = {b.key: dict(so_far[b.key]) for b in stage.gradient_buckets}
        for primal, cell in made.items():
            ref = stage.primals[primal]
            if isinstance(ref, ParamRef):
                merged[stage.buckets[ref.bucket].key][ref.param] = cell

        def run(cells: Cells) -> None:
            given = _read(reads, cells)
            for primal, cell in made.items():
                cells[cell] = _of("gradient", id(template), primal, *given)

        groups = [Group(key, tuple(of.items())) for key, of in merged.items()]
        return run, (*of_args, *groups)

    # Gradients on the host.

    def _alloc_grad(self, bucket: Bucket) -> tuple[Run, Value]:
        room = tuple((i, self.cell()) for i in self.gradient_params[bucket.key])
        return _poisons([cell for _, cell in room]), Group(bucket.key, room)

    def _fetch_grad(self, bucket: Bucket, room: Any) -> tuple[Run, Value]:
        group = self.group(room)
        pairs = [(cell, self._host_grad(group.key, i)) for i, cell in group.of]
        return self._copies(pairs), group

    def _host_grad(self, key: int, i: int) -> int:
        try:
            return self.persistent["gradient", key, i]
        except KeyError:
            raise Crash(f"no gradient {i} of bucket {key}") from None

    def _add_grad(self, bucket: Bucket, so_far: Any, gradients: Any) -> tuple[Run, Value]:
        total, new = self.group(so_far), self.group(gradients)
        to = dict(total.of)
        if not to.keys() >= dict(new.of).keys():
            raise Crash("gradients that there is no room for")
        pairs = [(to[i], cell) for i, cell in new.of]

        def run(cells: Cells) -> None:
            for into, source in pairs:
                self._put(cells, into, _of("+", cells[into], cells[source]))

        return run, total

    def _norm_grad(self, bucket: Bucket, gradients: Any) -> tuple[Run, Value]:
        of = dict(self.group(gradients).of)
        if not of.keys() >= set(self.gradient_params[bucket.key]):
            raise Crash("norms of what is not there")
        sources = [of[i] for i in self.gradient_params[bucket.key]]
        made = self.cell()

        def run(cells: Cells) -> None:
            cells[made] = _of("norms", *(cells[cell] for cell in sources))

        return run, Tensor(made)

    def _offload_grad(self, bucket: Bucket, gradients: Any, norms: Any = None) -> tuple[Run, Value]:
        group = self.group(gradients)
        pairs = [(self._host_grad(group.key, i), cell) for i, cell in group.of]
        if norms is not None:
            pairs.append((self.persistent["norms", group.key], self.tensor(norms)))
        return self._copies(pairs), None

    # Updates.

    def _alloc_state(self, bucket: Bucket, masters: bool) -> tuple[Run, Value]:
        room = States(bucket, self.cell())
        return _poisons([room.cell]), room

    def _fetch_state(self, bucket: Bucket, room: Any, masters: bool) -> tuple[Run, Value]:
        into = self._room(bucket, room)
        sources = [self.persistent["states", bucket.key]]
        sources += [self.persistent["params", bucket.key]] if masters else []

        def run(cells: Cells) -> None:
            self._put(cells, into.cell, _of("fetched", *(cells[cell] for cell in sources)))

        return run, into

    def _room(self, bucket: Bucket, room: Any) -> States:
        """Room for a bucket; that of another one does where their parameters are alike."""
        made = self.states(room)
        mine, theirs = bucket.params, made.bucket.params
        if [(p.shape, p.dtype) for p in mine] != [(p.shape, p.dtype) for p in theirs]:
            raise Crash("room of another size")
        return made

    def _update(
        self, bucket: Bucket, weights: Any, gradients: Any, state: Any
    ) -> tuple[Run, Value]:
        rooms, group = self._room(bucket, state), dict(self.group(gradients).of)
        wanted = self.gradient_params[bucket.key]
        if not group.keys() >= set(wanted):
            raise Crash("an update without gradients")
        given = None if weights is None else self.get(weights)
        if given is not None and not isinstance(given, Weights):
            raise Crash("no weights")

        def run(cells: Cells) -> None:
            old = term("no weights") if given is None else cells[given.slot]
            new = [cells[group[i]] for i in wanted]
            updated = _of("updated", bucket.key, old, *new, cells[rooms.cell])
            self._put(cells, rooms.cell, updated)

        return run, rooms

    def _offload_state(self, bucket: Bucket, updated: Any) -> tuple[Run, Value]:
        cell = self._room(bucket, updated).cell
        host = [self.persistent["params", bucket.key], self.persistent["states", bucket.key]]
        return self._copies([(into, cell) for into in host]), None

    # Lifetimes.

    def _free(self, node: fx.Node, value: Any, after: tuple[tuple[Stream, int], ...]) -> None:
        self._release(node, value, after, ())

    def _park(self, node: fx.Node, value: Any, after: tuple[tuple[Stream, int], ...]) -> None:
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
            self.parked[cell] = (*self.parked.get(cell, ()), *kept_for)
        self.place[node] = self._frees(f"del {value.name}", self._drop(value), waits)

    def _frees(
        self, label: str, lost: list[int], waits: tuple[tuple[Stream, int], ...]
    ) -> tuple[Stream, int]:
        """Memory goes: at once, or, where it is parked, when that allows."""
        at_once = [cell for cell in lost if not self.parked.get(cell)]
        where = self._queue(Stream.COMPUTE, label, _frees(at_once), waits, release=True)
        self.parks += [((where, *self.parked[c]), [c]) for c in lost if c not in at_once]
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


def _nothing(cells: Cells) -> None:
    del cells


def _frees(lost: list[int]) -> Run:
    def run(cells: Cells) -> None:
        for cell in lost:
            cells[cell] = FREED

    return run


def _poisons(lost: list[int]) -> Run:
    def run(cells: Cells) -> None:
        for cell in lost:
            cells[cell] = POISON

    return run


def _whole(cell: int) -> Callable[[Cells], int]:
    return lambda cells: cells[cell]


def _part(cell: int, offset: int) -> Callable[[Cells], int]:
    return lambda cells: _of("part", offset, cells[cell])


def _of(kind: str, *parts: int) -> int:
    """A term of others; poison spoils it (numbers that are no terms are never 0)."""
    return term(kind, *parts)


def _all(
    reads: list[Callable[[Cells], int] | None],
) -> list[Callable[[Cells], int]]:
    found = [read for read in reads if read is not None]
    if len(found) != len(reads):
        raise Crash("an input is not given")
    return found


def _read(reads: list[Callable[[Cells], int]], cells: Cells) -> list[int]:
    return [read(cells) for read in reads]


Path = list[Stream]  # the streams of the ops in the order in which they run


def in_order(machine: Machine) -> Cells:
    """The cells after a run in which copies come as early as they can."""
    for cells, _ in explore(machine):
        return cells
    raise Crash("deadlock")


def explore(machine: Machine, limit: int = 20_000) -> Iterator[tuple[Cells, Path]]:
    """The final cells of all interleavings, each once, with one that leads there.

    A state is how far each stream has come and what the cells hold: interleavings that meet in one go
    on as one.

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


def _freed(machine: Machine, at: At, cells: Cells) -> tuple[At, tuple[int, ...]]:
    """The state after everything that can be freed has been."""
    compute = machine.queues[Stream.COMPUTE]
    i = _INDEX[Stream.COMPUTE]
    while at[i] < len(compute) and compute[at[i]].release and _ready(compute[at[i]], at):
        compute[at[i]].run(cells)
        at = (*at[:i], at[i] + 1, *at[i + 1 :])
    for needed, lost in machine.parks:
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
