"""An adversarial device: the streams of a schedule, simulated on the CPU, in any order allowed.

The printed code runs, with the ops of `megacompile.runtime.ops.executor`; only `Streams` is
another. Its `issue` queues the work, which is carried out when a policy says, as far as the order
of the streams and the events that ops wait for allow: one stream may starve, any other run away.

What is freed or not written yet holds NaN. A value lives as long as the printed code has a name for
it: its `del` is an op of the compute stream. Memory that others may hold (inputs and outputs of the
model, gradients that autograd passes in) is never poisoned.

[Note: states on a disk] Where the backward updates, threads and the simulated streams wait for one
another. So a copy whose states are not read yet is not ready, and others run meanwhile; and a write
is an op of its stream, which begins it when what it follows has run: no thread of the disk waits
for the simulated streams.
"""

from __future__ import annotations

import dataclasses
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megacompile import compat
from megacompile.ir import ops
from megacompile.ir.buckets import Bucket, Slot
from megacompile.ir.stages import Stage
from megacompile.ir.stream import Stream
from megacompile.runtime.device.background import OVER, Completion
from megacompile.runtime.device.pool import Lease
from megacompile.runtime.device.streams import Handle, Streams
from megacompile.runtime.model import program
from megacompile.runtime.ops.executor import BoundOps, Executor
from megacompile.runtime.ops.machine import Machine, handles
from megacompile.runtime.params.backward_pass import GradRoute
from megacompile.views import python
from tests import inside
from tests.interrupts import traced

PATIENCE_S = 30.0  # with a read of states


@dataclasses.dataclass(eq=False, slots=True)
class Work:
    """One op in its queue; it stands for the event behind it too."""

    stream: Stream
    waits: tuple[Work, ...]
    run: Callable[[], Any] | None  # None: done
    device: Adversary
    release: bool = False  # a `del`, or the wait before it
    reads: tuple[Lease, ...] = ()  # that it waits for

    def synchronize(self) -> None:
        if self.run is None:  # a thread of a disk, which must not wait for whoever has the device
            return
        with self.device._alone:
            while self.run is not None:
                assert self.device._step(), "deadlock: each stream waits for another"

    @property
    def ready(self) -> bool:
        return all(earlier.run is None for earlier in self.waits)

    @property
    def reading(self) -> bool:
        """Is what it waits for still read?"""
        return any(not lease.done() for lease in self.reads)

    @property
    def lost(self) -> bool:
        """Will what it waits for not be there?"""
        return self.reading or any(getattr(lease, "given_up", False) for lease in self.reads)


class Policy:
    """When and in which order work that is ready is carried out."""

    disk = 0  # how a disk behaves, as a seed

    def after_issue(self) -> int:
        """How many ops run now, while the host issues the next."""
        return 0

    def pick(self, ready: Sequence[Work]) -> Work:
        return ready[0]


class Random(Policy):
    """Each seed is a device of its own: how far the host is ahead, and who starves."""

    def __init__(self, seed: int) -> None:
        self.disk = seed
        self.random = random.Random(seed)
        self.weights = {stream: self.random.choice((0, 1, 1, 20)) for stream in Stream}
        self.pace = self.random.choice((0, 0, 1, 2, 100))

    def after_issue(self) -> int:
        return self.random.randint(0, self.pace)

    def pick(self, ready: Sequence[Work]) -> Work:
        weights = [self.weights[work.stream] for work in ready]
        if not any(weights):
            return self.random.choice(ready)
        return self.random.choices(ready, weights)[0]


class Handed(Completion):
    """The end of what threads do once a simulated stream has come to it."""

    end: Completion = OVER

    def wait(self) -> None:
        self.end.wait()


class Adversary(Streams):
    """Stands in for `Streams` of a device with queues of its own."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.policy = Policy()
        self.queues: dict[Stream, deque[Work]] = {stream: deque() for stream in Stream}
        self.memory = Memory()
        self.defers: dict[Handle, tuple[Work, ...]] = {}  # what must be done before they go
        self.deferred: list[tuple[tuple[Work, ...], Handle]] = []  # whose names are gone
        self.executed = 0
        self.ends: Sequence[Stream] = tuple(Stream)  # what is drained when a run ends
        self._alone = threading.RLock()  # one thread at a time has the device

    @property
    def alone(self) -> bool:
        """No value is there as soon as its op is issued."""
        return False

    @alone.setter
    def alone(self, value: bool) -> None:
        """Whatever the graph has."""

    @contextmanager
    def run(self) -> Iterator[None]:
        if not any(self.queues.values()):
            self.memory.known.clear()
        try:
            yield
            for stream in self.ends:
                self.synchronize(stream)
        except KeyboardInterrupt:  # the device goes on
            self._drop_unread()
            for stream in self.ends:
                self.synchronize(stream)
            raise
        except BaseException:
            for queue in self.queues.values():
                for work in queue:
                    work.run = None  # nobody waits for it
                queue.clear()
            self.deferred.clear()
            raise

    def issue(
        self,
        stream: Stream,
        waits: Iterable[Handle],
        work: Callable[[], Any],
        *,
        release: bool = False,
    ) -> Handle:
        handle, waits = Handle(None, stream), tuple(waits)

        def run() -> None:
            for earlier in waits:
                if earlier.host is not None:  # threads of the host, which have begun by now
                    earlier.host.wait()
            handle.value = work()
            self.memory.name(handle)

        reads = tuple(each.host for each in waits if isinstance(each.host, Lease))
        queued = Work(stream, events_of(waits), run, self, release, reads)
        handle.event = queued  # type: ignore[assignment]
        with self._alone:
            self.queues[stream].append(queued)
            for _ in range(self.policy.after_issue()):
                if not self._step():
                    break
        return handle

    def hand(
        self, stream: Stream, waits: Iterable[Handle], begin: Callable[[], tuple[Any, Any]]
    ) -> Handle:
        """Threads begin when the events have come: they cannot wait for these themselves."""
        handed = Handed()

        def run() -> Any:
            value, handed.end = begin()
            return value

        handle = self.issue(stream, waits, run)
        handle.host = handed
        return handle

    def synchronize(self, stream: Stream) -> None:
        with self._alone:
            while self.queues[stream]:
                assert self._step(), "deadlock: each stream waits for another"

    def wait_for(self, handle: Handle) -> None:
        for work in events_of([handle]):
            work.synchronize()

    def _step(self) -> bool:
        heads = [queue[0] for queue in self.queues.values() if queue]
        ready = [work for work in heads if work.ready]
        if not ready:
            return False
        there = [work for work in ready if not work.reading]
        limit = time.monotonic() + PATIENCE_S
        while not there:
            assert time.monotonic() < limit, "deadlock: a read waits for a buffer"
            time.sleep(0.0002)
            there = [work for work in ready if not work.reading]
        work = self.policy.pick(there)
        self.queues[work.stream].popleft()
        assert work.run is not None
        with traced(None):
            work.run()
        work.run, work.waits = None, ()
        self.executed += not work.release
        for entry in [entry for entry in self.deferred if all(w.run is None for w in entry[0])]:
            self.deferred.remove(entry)
            self.memory.forget(entry[1])
        return True

    def _drop_unread(self) -> None:
        """Drop copies out of buffers that are not filled, or were given up, and all that a device
        would get after them: the host issues these later, or never."""
        dropped: set[Work] = set()
        before = -1
        while len(dropped) > before:
            before = len(dropped)
            for queue in self.queues.values():
                behind = False
                for work in queue:
                    behind |= work.lost or not dropped.isdisjoint(work.waits)
                    if behind and not work.release:
                        dropped.add(work)
        for stream, queue in self.queues.items():
            self.queues[stream] = deque(work for work in queue if work not in dropped)
        for work in dropped:
            work.run = None  # nobody waits for it

    def free(self, handle: Handle) -> None:
        """A name is gone; its memory is used again behind what was queued before."""
        kept_for = self.defers.pop(handle, ())

        def forget() -> None:
            self.deferred.append((kept_for, handle)) if kept_for else self.memory.forget(handle)

        self.issue(Stream.COMPUTE, (), forget, release=True)


class Memory:
    """Which names there are for device memory, by storage."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[set[Handle], dict[int, Tensor]]] = {}
        self.visible: deque[int] = deque(maxlen=64)  # storages that the user may hold
        self.residents: dict[int, list[int]] = {}  # bucket -> storages, which outlive their names
        self.poisoned = 0

    def name(self, handle: Handle) -> None:
        for tensor in tensors_in(handle.value):
            names, tensors = self.known.setdefault(_storage(tensor), (set(), {}))
            names.add(handle)
            tensors[id(tensor)] = tensor

    def forget(self, handle: Handle) -> None:
        """Poison the memory that a name stood for, unless it has another."""
        for tensor in tensors_in(handle.value):
            storage = _storage(tensor)
            if storage not in self.known:
                continue
            names, tensors = self.known[storage]
            names.discard(handle)
            if names:
                continue
            del self.known[storage]
            lasts = storage in self.visible or any(storage in r for r in self.residents.values())
            if not lasts and compat.storage_users(tensor) == len(tensors):
                poison(tensor.untyped_storage(), tensor.dtype)
                self.poisoned += 1


def events_of(handles: Iterable[Handle]) -> tuple[Work, ...]:
    """The ops that must be done for some values to be there."""
    events: list[Any] = [handle.event for handle in handles]
    return tuple(event for event in events if isinstance(event, Work))


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def poison(storage: torch.UntypedStorage, dtype: torch.dtype) -> None:
    """NaN all over; for integers what is no index."""
    value = torch.nan if dtype.is_floating_point or dtype.is_complex else 0x7F
    if storage.nbytes() >= dtype.itemsize:
        count = storage.nbytes() // dtype.itemsize
        torch.empty(0, dtype=dtype).set_(storage, 0, (count,), (1,)).fill_(value)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in what an op gives."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))


class Name:
    """A variable's hold on a value: the printed code has these, the ops get the handles."""

    def __init__(self, handle: Handle, device: Adversary) -> None:
        self.handle, self.device = handle, device
        self.kept = False

    def __del__(self) -> None:
        if not self.kept:
            self.device.free(self.handle)


class LateOps(BoundOps):
    """The ops of the executor, whose results may come later than the call."""

    _count = 0  # results of the op that is called now
    _fresh = False  # does it give memory that nothing was written to?

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.assigned: list[Handle] = []  # in this run

    def _issue(self, stream: Any, waits: Any, work: Any) -> Handle:
        fresh, self._fresh = self._fresh, False

        def run() -> Any:
            value = work()
            for tensor in tensors_in(value) if fresh else ():
                poison(tensor.untyped_storage(), tensor.dtype)
            return value

        return super()._issue(stream, waits, run)

    def _issue_many(self, waits: Any, work: Callable[[], Sequence[Any]]) -> tuple[Handle, ...]:
        streams: Any = self.machine.streams
        items = [Handle(None, Stream.COMPUTE) for _ in range(self._count)]

        def run() -> None:
            for item, value in zip(items, work(), strict=True):
                item.value = value
                streams.memory.name(item)

        whole = streams.issue(Stream.COMPUTE, handles(waits), run)
        for item in items:
            item.event = whole.event
        return tuple(items)

    def wait(self, *handles: Handle) -> None:
        streams: Any = self.machine.streams
        streams.issue(Stream.COMPUTE, handles, lambda: None, release=True)

    def defer_free(self, value: Handle, *, after: tuple[Handle, ...] = ()) -> None:
        streams: Any = self.machine.streams
        streams.defers[value] = events_of(after)

    def forward(self, stage: Stage, weights: Any, args: Any, saving: bool) -> tuple[Handle, ...]:
        results = stage.result_count
        self._count = results + (len(stage.saved_values) if saving else 0)
        return super().forward(stage, weights, args, saving)

    def recompute(self, stage: Stage, weights: Any, args: Any, rng: Any) -> tuple[Handle, ...]:
        self._count = len(stage.saved_values)
        return super().recompute(stage, weights, args, rng)

    def rerun(self, stage: Stage, weights: Any, args: Any, rng: Any) -> tuple[Handle, ...]:
        self._count = len(stage.outputs)
        return super().rerun(stage, weights, args, rng)

    def backward(self, stage: Stage, *args: Any) -> tuple[Handle, ...]:
        params = stage.buckets_read(stage.traced.gradients)
        of_args = len(stage.traced.gradients) - sum(
            hasattr(stage.primals[i], "param") for i in stage.traced.gradients
        )
        self._count = of_args + len(params)
        return super().backward(stage, *args)

    def assign(self, *args: Any, **kwargs: Any) -> Handle:
        """What the user reads is queued behind it, on the same stream; here it has to run."""
        done = super().assign(*args, **kwargs)
        self.assigned.append(done)
        return done

    def keep_grad(self, bucket: Bucket, gradients: Handle) -> Handle:
        """On a device a tensor is there as soon as its op is issued; here it has to run."""
        done = super().keep_grad(bucket, gradients)
        streams: Any = self.machine.streams
        streams.wait_for(done)
        return done

    def resident(self, bucket: Bucket, **after: Any) -> Handle:
        handle = super().resident(bucket, **after)
        streams: Any = self.machine.streams
        there = self.machine.buckets[bucket.key].streamed
        streams.memory.residents[bucket.key] = list(map(_storage, there))
        return handle

    def alloc_grad(self, bucket: Bucket) -> Handle:
        self._fresh = True
        return super().alloc_grad(bucket)

    def alloc_state(self, bucket: Bucket, masters: bool) -> Handle:
        self._fresh = True
        return super().alloc_state(bucket, masters)

    def offload_state(self, bucket: Bucket, updated: Handle, norms: Handle | None = None) -> Handle:
        streams: Any = self.machine.streams
        if self.machine.staging is not None and not self.in_step:
            streams.synchronize(Stream.WRITE)  # it takes a buffer that one of them gives back
        return super().offload_state(bucket, updated, norms)

    def write_state(self, bucket: Bucket, *, after: tuple[Any, ...] = ()) -> Handle:
        return self._written(bucket, super().write_state, after)

    def write_weights(self, bucket: Bucket, *, after: tuple[Any, ...] = ()) -> Handle:
        return self._written(bucket, super().write_weights, after)

    def _written(
        self, bucket: Bucket, write: Callable[..., Handle], after: tuple[Any, ...]
    ) -> Handle:
        if self.in_step:
            return write(bucket, after=after)
        done = self._issue(Stream.WRITE, (after,), lambda: write(bucket, after=after).value)
        done.host = self.machine.buckets[bucket.key].pending
        return done

    def _bring_back(self, bucket: Bucket, updated: Handle) -> Handle:
        streams: Any = self.machine.streams
        streams.wait_for(updated)  # on a CPU it is brought back at once
        return super()._bring_back(bucket, updated)


class LateExecutor(Executor):
    """Runs the printed code with `LateOps`, and sees where names end."""

    def _compile(self, name: str, bind: Any = None) -> Callable[[list[Any]], Any]:
        bound = self._bound[name] = LateOps(self.schedule, self.machine)
        namespace: dict[str, Any] = {
            op.name: self._named(getattr(bound, op.name)) for op in ops.OPS.values()
        }
        namespace |= {"wait": self._named(bound.wait), **python.names(self.schedule)}
        exec(compile(python.graph_code(self.schedule, name), f"<{name}>", "exec"), namespace)
        code = namespace[f"run_{name}"]

        def run(taken: list[Handle]) -> Any:
            device = self.device
            device.ends = self._ends(name)
            self._before(name)
            seen = self._outside(name)
            inputs = []
            for handle, outside in zip(taken, seen, strict=True):
                device.memory.name(handle)
                inputs.append(Name(handle, device))
                inputs[-1].kept = outside
            taken.clear()
            result = _handles_of(code(inputs), keep=True)
            self._show(name, result)
            values = result if name == "forward" else result[:-1]  # nobody waits for tokens here
            for handle in (*handles(values), *bound.assigned):
                device.wait_for(handle)
            bound.assigned.clear()
            return result

        return run

    @property
    def device(self) -> Adversary:
        streams = self.machine.streams
        assert isinstance(streams, Adversary)
        return streams

    def _named(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            given = {key: _handles_of(value) for key, value in kwargs.items()}
            return self._names_of(function(*_handles_of(args), **given))

        return call

    def _names_of(self, result: Any) -> Any:
        if isinstance(result, tuple):
            return tuple(map(self._names_of, result))
        return Name(result, self.device) if isinstance(result, Handle) else result

    def _outside(self, name: str) -> list[bool]:
        """Which inputs of a graph may somebody else hold?"""
        inputs = self._inputs[name]
        if name == "forward" or (name == "backward" and compat.keeps_graph()):
            return [True] * len(inputs)
        outputs, _ = ops.returned(self.schedule.forward)
        seen = {node.name for node in outputs if hasattr(node, "name")}
        seen |= {node.name for node in self.schedule.forward.find_nodes(op="placeholder")}
        return [
            token is not None or key in seen or key.removeprefix("t").isdigit()
            for key, token in inputs
        ]

    def _show(self, name: str, result: Any) -> None:
        """The user gets the outputs of a forward: nobody knows for how long."""
        if name == "forward":
            self.device.synchronize(Stream.COMPUTE)
            for handle in handles(result[0]):
                self.device.memory.visible.extend(map(_storage, tensors_in(handle.value)))

    def _ends(self, name: str) -> Sequence[Stream]:
        """What must be done when a run ends: of a forward the computes, which draw random numbers;
        of a backward copies to the host that find their place when they run."""
        run = self.machine.run
        late = run is not None and not {each.route for each in run.records.values()} <= {
            GradRoute.WRITE,
            GradRoute.ACCUMULATE,
            GradRoute.ACCUMULATE_SAME_PASS,
        }
        if late or self.machine.in_backward is not None:
            return tuple(Stream)
        return (Stream.COMPUTE,) if name == "forward" else ()

    def _before(self, name: str) -> None:
        """What an earlier schedule still does when this one begins: everything but held slots."""
        if name == "update":
            return
        graph, machine = self.schedule.graphs[name], self.machine
        held: set[int] = set()
        for node in ops.nodes_of(graph, ops.reuse):
            slot: Any = node.args[1]
            assert isinstance(slot, Slot)
            held.add(slot.index)
        grads: list[Tensor] = []
        if name == "backward":
            run = machine.run
            assert run is not None
            first = [at for at, each in run.records.items() if each.route is GradRoute.WRITE]
            there = machine.buckets
            grads = [there[k].grads[i] for k, i in first if there[k].resident is None]
            grads = [] if machine.in_backward is not None else grads

        def late() -> None:
            for i, buffer in enumerate(machine.slots.buffers):
                if i not in held:
                    buffer.fill_(255)  # NaN in every floating dtype
            for grad in grads:
                grad.fill_(torch.nan)

        self.device.issue(Stream.COMPUTE, (), late)


def _handles_of(value: Any, *, keep: bool = False) -> Any:
    """The handles that names stand for, in nested tuples; with `keep` they are never freed."""
    if isinstance(value, tuple):
        return tuple(_handles_of(item, keep=keep) for item in value)
    if isinstance(value, Name):
        value.kept = value.kept or keep
        return value.handle
    return value


def attach(model: Any) -> Adversary:
    """Put a megacompiled model on an adversarial device; its calls belong into `adversarial()`."""
    machine: Machine = inside.machine(model)
    assert machine.device.type == "cpu"
    machine.streams = machine.gradients.streams = device = Adversary()
    start: Any = machine.host_updates.start

    def behind_gradients(update: Any, behind: Sequence[Any], *others: Any) -> Any:
        for event in behind:  # here: no thread can wait for the simulated streams
            event.synchronize()
        return start(update, (), *others)

    machine.host_updates.start = behind_gradients  # type: ignore[assignment,method-assign]
    return device


def await_compute(model: Any) -> None:
    """Wait for the compute stream, on which what the user does next would be queued."""
    streams = inside.machine(model).streams
    if isinstance(streams, Adversary):
        streams.synchronize(Stream.COMPUTE)


@contextmanager
def adversarial() -> Iterator[None]:
    """For its duration, schedules that are built are made to run on an `Adversary`."""
    with mock.patch.object(program, "Executor", LateExecutor):
        yield
