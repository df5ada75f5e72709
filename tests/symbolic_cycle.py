"""A step and the next one, on symbols: forward, backward, update, forward, backward.

The graphs share streams, memory and tokens, so one begins while the others still run. There are too
many interleavings to try them all. A wrong result needs two ops that meet in the wrong order, and
one of them is not of the compute stream. So each op that is not runs once as late as it can (all
that does not need it comes first) and once as early as it can (nothing that it does not need comes
before it): of any two ops that nothing orders, both orders are seen. Some random interleavings come
on top.
"""

from __future__ import annotations

import enum
import heapq
import random
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from megacompile.ir import ops
from megacompile.ir.ops import Part
from megacompile.ir.schedule import Schedule
from megacompile.ir.stream import Stream
from tests.symbolic import FREED, Cells, Crash, Done, Lane, Step, term
from tests.symbolic_ops import Machine

_AT_RANDOM = 6  # interleavings


class Kind(enum.Enum):
    """What a user does between a backward and the next forward."""

    STEP = "one optimizer steps"
    CLIP = "one optimizer steps, with gradients that are clipped"
    TWO = "two optimizers step, one after the other"


@dataclass(frozen=True)
class _Op:
    """A step of a lane, and what must be done before it, by the numbers of ops."""

    step: Step
    waits: tuple[int, ...]  # the ops that it waits for, and the one before it on its lane


class Cycle:
    """The runs of a schedule's graphs, laid out over streams and cells; raises `Crash`."""

    def __init__(self, schedule: Schedule, kind: Kind, *, accumulate: bool) -> None:
        self.machines: list[Machine] = []
        trained = sorted(schedule.gradient_params)
        for name in _runs(schedule, accumulate):
            skipped: list[Collection[int]] = [()]
            if name == "update" and kind is Kind.TWO:
                skipped = [trained[::2], trained[1::2]]
            for skips in skipped:
                earlier = self.machines[-1] if self.machines else _Elsewhere(schedule)
                clips = kind is Kind.CLIP
                self.machines.append(
                    Machine(*(schedule, name), earlier=earlier, skips=frozenset(skips), clips=clips)
                )
        machine = self.machines[-1]
        self.defers, self.initial = machine.defers, machine.initial
        self.seen_cells = list(machine.persistent.items())
        self.seen_cells += [
            (("output", k, i), cell)
            for k, each in enumerate(self.machines)
            for i, cell in enumerate(each.outputs)
        ]
        self._number(machine.queues)

    def _number(self, queues: dict[Lane, list[Step]]) -> None:
        """Give each op a number, in an order in which they can run."""
        place: dict[Done, int] = {}
        lanes = list(queues.items())
        at = [0] * len(lanes)
        self.ops: list[_Op] = []
        moved = True
        while moved:
            moved = False
            for i, (lane, queue) in enumerate(lanes):
                while at[i] < len(queue) and all(done in place for done in queue[at[i]].waits):
                    step, at[i] = queue[at[i]], at[i] + 1
                    before = [place[lane, at[i] - 1]] if at[i] > 1 else []
                    waits = tuple({*(place[done] for done in step.waits), *before})
                    place[lane, at[i]] = len(self.ops)
                    self.ops.append(_Op(step, waits))
                    moved = True
        if any(n < len(queue) for n, (_, queue) in zip(at, lanes, strict=True)):
            raise Crash("deadlock")
        self.needed = [
            (tuple(place[done] for done in needed), lost) for needed, lost in self.defers
        ]

    def result(self, ranks: Callable[[int], float]) -> dict[object, int]:
        """What can be seen at the end if, of the ops that can run, the lowest rank is next."""
        cells: Cells = list(self.initial)
        missing = [len(op.waits) for op in self.ops]
        kept = [len(needed) for needed, _ in self.needed]
        keys = [(not op.step.release, ranks(n), n) for n, op in enumerate(self.ops)]
        ready = [keys[n] for n, count in enumerate(missing) if not count]
        heapq.heapify(ready)
        count = 0
        while ready:
            n = heapq.heappop(ready)[-1]
            self.ops[n].step.run(cells)
            count += 1
            for k in self._keeps.get(n, ()):
                kept[k] -= 1
                if not kept[k]:
                    for cell in self.needed[k][1]:
                        cells[cell] = FREED
            for later in self._behind[n]:
                missing[later] -= 1
                if not missing[later]:
                    heapq.heappush(ready, keys[later])
        assert count == len(self.ops)
        return {key: cells[cell] for key, cell in self.seen_cells}

    def results(self, seed: int = 0) -> Iterator[dict[object, int]]:
        """What can be seen at the end of the interleavings that matter; program order first."""
        self._behind: list[list[int]] = [[] for _ in self.ops]
        for n, op in enumerate(self.ops):
            for earlier in op.waits:
                self._behind[earlier].append(n)
        self._keeps: dict[int, list[int]] = {}
        for k, (needed, _) in enumerate(self.needed):
            for n in needed:
                self._keeps.setdefault(n, []).append(k)
        yield self.result(float)
        for n, op in enumerate(self.ops):
            if op.step.stream is Stream.COMPUTE:
                continue
            after = _closure(n, self._behind.__getitem__)
            yield self.result(lambda k, after=after: k + (k in after) * 1e6)  # type: ignore[misc]
            first = _closure(n, lambda k: self.ops[k].waits)
            yield self.result(lambda k, first=first: k - (k in first) * 1e6)  # type: ignore[misc]
        rng = random.Random(seed)
        for _ in range(_AT_RANDOM):
            order = [rng.random() for _ in self.ops]
            yield self.result(order.__getitem__)


def _closure(n: int, following: Callable[[int], Collection[int]]) -> set[int]:
    found, stack = {n}, [n]
    while stack:
        for k in following(stack.pop()):
            if k not in found:
                found.add(k)
                stack.append(k)
    return found


def kinds(schedule: Schedule) -> list[Kind]:
    if schedule.update is None or schedule.backward is None:
        return [Kind.STEP]
    found = [Kind.STEP]
    if ops.nodes_of(schedule.backward, ops.norm_grad):
        found.append(Kind.CLIP)
    if len(schedule.gradient_params) > 1:
        found.append(Kind.TWO)
    return found


def _runs(schedule: Schedule, accumulate: bool) -> list[str]:
    if schedule.backward is None:
        return ["forward"]
    once = ["forward", "backward"]
    if schedule.update is None:
        return [*once, *once]
    return [*once, *(once if accumulate else []), "update", *once]


class _Elsewhere(Machine):
    """A step of another schedule, of which nothing is done yet: what comes first finds it."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self.name = schedule, "elsewhere"
        self.gradient_params = schedule.gradient_params
        self.autograd_has = {}
        self._world()
        for bucket in schedule.buckets:
            self._steps(bucket.key)
        for bucket in schedule.buckets:
            self._copies_of(bucket.key)
        streamed = [b.key for b in schedule.buckets if b.key not in schedule.plan.resident]
        copies = tuple(self.tokens[key, Part.GRADIENTS] for key in streamed)
        self._queue(Stream.D2H, lambda cells: None, copies)

    def _steps(self, key: int) -> None:
        plan = self.schedule.plan
        params, states = self.persistent["params", key], self.persistent["states", key]

        def changes(*changed: int) -> Callable[[Cells], None]:
            def run(cells: Cells) -> None:
                for cell in changed:
                    cells[cell] = term("elsewhere", key, cells[cell])

            return run

        stream = Stream.COMPUTE if key in plan.resident else Stream.HOST
        both = changes(params) if key in plan.on_disk else changes(params, states)
        made = self._queue(stream, both, ())
        self.tokens[key, Part.WEIGHTS] = self.tokens[key, Part.STATES] = made
        if key in plan.on_disk:  # they are written behind the update
            written = self._queue(Stream.WRITE, changes(states), (made,))
            self.tokens[key, Part.STATES] = written

    def _copies_of(self, key: int) -> None:
        into = [self._host_grad(key, i) for i in self.gradient_params.get(key, ())]

        def run(cells: Cells) -> None:
            for cell in into:
                cells[cell] = term("elsewhere", "gradient", key, cell)

        waits = (self.tokens[key, Part.WEIGHTS],)
        resident = key in self.schedule.plan.resident
        stream = Stream.COMPUTE if resident else Stream.HOST  # which is in whatever order
        done = self._queue(stream, run, waits)
        self.tokens[key, Part.GRADIENTS] = done
