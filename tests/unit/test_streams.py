"""Streams, threads, replays, and memory that a backward defers: in program order, or by events.

On CUDA there are the waits that the edges of the graph ask for. What a backward defers is drained
by the next forward, after the copies out of it. CUDA and its events are played by stand-ins that
note what is asked of them: an event has not happened yet.
Replays of models: equality/test_replay.py.
"""

from __future__ import annotations

import functools
import gc
import itertools
import random
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim import AdamW

from megacompile import accumulate, megacompile
from megacompile.ir import ops
from megacompile.ir.stream import Stream
from megacompile.runtime.device.replay import CudaGraphs, Replay
from megacompile.runtime.device.streams import Handle, Streams
from tests import inside
from tests.equality.test_replay import Emulated
from tests.interrupts import Places
from tests.processes import python
from tests.zoo import Stack

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
COMPUTE, H2D, D2H, COMM = Stream.COMPUTE, Stream.H2D, Stream.D2H, Stream.COMM


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What `Streams` takes of torch.cuda; `log` has the calls in order."""
    log: list[tuple[str, ...]] = []
    inside, copies, numbers = ["user"], iter(("h2d", "d2h", "comm")), itertools.count(1)

    def queue(name: str) -> Any:
        return SimpleNamespace(
            name=name,
            wait_event=lambda event: log.append(("wait", name, event.name)),
            synchronize=lambda: log.append(("synchronize", name)),
        )

    def event() -> Any:
        made = SimpleNamespace(name=f"event {next(numbers)}")
        made.record = lambda queue: log.append(("record", queue.name, made.name))
        return made

    @contextmanager
    def stream(queue: Any) -> Iterator[None]:
        inside.append(queue.name)
        yield
        inside.pop()

    def work(name: str) -> str:
        log.append(("work", inside[-1], name))
        return name

    made = SimpleNamespace(log=log, queue=queue, work=work, user=queue("user"))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: queue(next(copies)))
    monkeypatch.setattr(torch.cuda, "Event", event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: made.user)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    return made


def test_an_edge_between_streams_is_an_event_that_is_waited_for(cuda: Any) -> None:
    """prefetch -> forward -> offload: each waits for the one before, and nobody for more. Compute
    is the stream that the caller is in, another one the next time; the host waits for copies."""
    streams = Streams(GPU)
    with streams.run():
        weights = streams.issue(H2D, (), lambda: cuda.work("prefetch"))
        y = streams.issue(COMPUTE, (weights,), lambda: cuda.work("forward"))
        streams.issue(D2H, (y,), lambda: cuda.work("offload"))
    assert cuda.log == [
        ("work", "h2d", "prefetch"),
        ("record", "h2d", "event 1"),
        ("wait", "user", "event 1"),
        ("work", "user", "forward"),
        ("record", "user", "event 2"),
        ("wait", "d2h", "event 2"),
        ("work", "d2h", "offload"),
        ("record", "d2h", "event 3"),
    ]
    assert (weights.value, y.value) == ("prefetch", "forward")
    cuda.log.clear()
    cuda.user = cuda.queue("side")
    with streams.run():
        streams.issue(COMPUTE, (), lambda: None)
    for stream in (H2D, D2H, COMPUTE):
        streams.synchronize(stream)
    assert [entry[:2] for entry in cuda.log] == [
        *(("record", "side"), ("synchronize", "h2d"), ("synchronize", "d2h"))
    ]


class Bucket:
    """A bucket that the host works on until `over`."""

    def __init__(self, log: list[Any], error: Exception | None = None) -> None:
        self.log = log
        self.over = False
        self.error = error

    def done(self) -> bool:
        return self.over

    def wait(self) -> None:
        self.log.append(("settled" if self.over else "waited",))
        self.over = True
        if self.error is not None:
            raise self.error


def behind(bucket: Bucket) -> Handle:
    """What threads of the host do to a bucket."""
    completion: Any = bucket
    return Handle(None, Stream.HOST, host=completion)


def work_of(cuda: Any) -> list[str]:
    return [entry[2] for entry in cuda.log if entry[0] == "work"]


def test_a_copy_from_a_busy_bucket_is_put_off_until_it_is_needed(cuda: Any) -> None:
    """What does not need it is issued first; later copies do not overtake it. The CPU waits."""
    log: list[Any] = []
    assert Streams(CPU).issue(H2D, (behind(Bucket(log)),), lambda: 3).value == 3
    assert log == [("waited",)]
    streams = Streams(GPU)
    bucket = Bucket(cuda.log)
    with streams.run():
        early = streams.issue(H2D, (behind(bucket),), lambda: cuda.work("prefetch 1"))
        late = streams.issue(H2D, (), lambda: cuda.work("prefetch 2"))
        streams.issue(COMPUTE, (), lambda: cuda.work("0F"))
        assert early.event is None and late.event is None and work_of(cuda) == ["0F"]
        streams.issue(COMPUTE, (early,), lambda: cuda.work("1F"))
        assert early.value == "prefetch 1" and work_of(cuda) == ["0F", "prefetch 1", "1F"]
        streams.issue(COMPUTE, (late,), lambda: cuda.work("2F"))
    assert work_of(cuda) == ["0F", "prefetch 1", "1F", "prefetch 2", "2F"]
    assert [entry for entry in cuda.log if entry[0] == "waited"] == [("waited",)]
    assert early.value == "prefetch 1" and early.event is not None


def test_what_went_wrong_on_the_host_is_raised_where_the_copy_is_needed(cuda: Any) -> None:
    streams = Streams(GPU)
    with pytest.raises(ValueError, match="in the update"), streams.run():
        bucket = Bucket(cuda.log, ValueError("in the update"))
        weights = streams.issue(H2D, (behind(bucket),), lambda: cuda.work("prefetch"))
        streams.issue(H2D, (), lambda: cuda.work("another"))
        streams.issue(COMPUTE, (weights,), lambda: cuda.work("0F"))
    assert work_of(cuda) == []
    with streams.run():
        streams.issue(COMPUTE, (), lambda: cuda.work("next"))
    assert work_of(cuda) == ["next"], "what the failed run put off is gone"


@pytest.mark.parametrize("seed", range(20))
def test_collectives_are_issued_in_program_order(cuda: Any, seed: int) -> None:
    """Whatever the host still does, each rank issues them, and its copies, in the same order."""
    rng = random.Random(seed)
    streams = Streams(GPU)
    buckets = [Bucket(cuda.log) for _ in range(4)]
    handles: list[Handle] = []
    wanted: dict[Stream, list[str]] = {stream: [] for stream in (H2D, COMM, COMPUTE, D2H)}
    with streams.run():
        for i in range(30):
            stream = rng.choice((H2D, H2D, COMM, COMM, COMPUTE, D2H))
            waits = rng.sample(handles[-6:], min(len(handles), rng.randint(0, 2)))
            if stream is H2D and rng.random() < 0.6:
                waits.append(behind(rng.choice(buckets)))
            name = f"{stream.value} {i}"
            wanted[stream].append(name)
            handles.append(streams.issue(stream, waits, functools.partial(cuda.work, name)))
            if rng.random() < 0.2:
                rng.choice(buckets).over = True
            if rng.random() < 0.1:
                rng.choice(buckets).over = False
    for stream, names in wanted.items():
        assert [name for name in work_of(cuda) if name.startswith(f"{stream.value} ")] == names
    assert all(handle.event is not None and not handle.deferred for handle in handles)


class Event:
    """Stands in for an event after an op."""

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        pass


class Queue(list[Any]):
    """Stands in for a compute stream: the events that it waits for."""

    def wait_event(self, event: Event) -> None:
        self.append(event)


class Played:
    """Runs everything in program order and records the waits for copies to the host."""

    def __init__(self, machine: Any) -> None:
        self.streams = machine.streams
        self.fails_in = 0  # ops; 0: none fails
        self.waits: list[list[Any]] = []  # of computes, for copies
        self.issued: Callable[..., Any] = self.streams.issue
        self.streams.issue = self.issue

    def issue(self, stream: Stream, waits: Iterable[Any], work: Callable[[], Any]) -> Any:
        self.fails_in -= 1
        if self.fails_in == 0:
            raise RuntimeError("planted")
        awaited = [h.event for h in waits if h.stream is Stream.D2H and h.event]
        if stream is Stream.COMPUTE and awaited:
            self.waits.append(awaited)
        handle = self.issued(stream, (), work)
        handle.event = Event()
        return handle


def test_every_loop_drains_what_was_deferred(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, half-way through the next forward, whatever comes between; memory goes then."""
    queue = Queue()  # the compute stream that the user is in
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: queue)
    model: Any = Stack(layers=4)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    megacompile(model, device="cpu", lowering="eager", optimizer=optimizer)
    machine: Any = inside.machine(model)
    streams = Played(machine)

    def deferred() -> list[Any]:
        return list(machine.deferred)

    drained: list[Any] = []  # the copies that computes of the last forward waited for

    def forward() -> Any:
        streams.waits.clear()
        loss = model(torch.ones(2, 16)).mean()
        drained[:] = streams.waits
        return loss

    def step() -> None:
        forward().backward()
        optimizer.step()
        optimizer.zero_grad()

    first = forward()
    assert not drained, "there is nothing yet"
    (executor,) = inside.executors(model)
    nodes = ops.nodes_of(executor.schedule.forward, ops.forward, ops.drain)
    labels = [ops.label(node) for node in nodes]
    assert labels.count("DRAIN") == 1 and 0 < labels.index("DRAIN") < len(labels) - 1
    del first
    step()
    copies = [entry.copied for entry in deferred()]
    updates = [entry for entry in deferred() if isinstance(entry.value, dict)]  # no norms
    memory = [weakref.ref(buffer.new) for entry in updates for buffer in entry.value.values()]
    del updates
    assert copies and memory and all(buffer() is not None for buffer in memory)
    streams.fails_in = 2
    with pytest.raises(RuntimeError, match="planted"):
        forward()
    assert len(deferred()) == len(copies), "a forward that fails before the drain loses nothing"
    queue.clear()
    waiting = forward()
    assert drained == [copies], "one op waits for all copies, and no other waits"
    assert queue == copies, "so does the stream whose memory it is"
    gc.collect()
    assert not deferred() and all(buffer() is None for buffer in memory)
    forward().backward()  # another one, before the backward
    assert not drained, "it is given back once"
    optimizer.step()
    assert deferred()
    del waiting
    model.eval()
    with torch.no_grad():
        forward()
    assert drained and not deferred(), "an evaluation drains too"
    model.train()
    with accumulate(model):  # leaves gradients, and defers nothing
        forward().backward()
    assert not deferred()
    step()
    assert deferred()


TRAINING = """
import atexit, threading, torch
from tests.training import take_steps
from tests.zoo import assert_same, stacks

def compare():
    plain, streamed, _ = stacks()
    for model in (plain, streamed):
        take_steps(model, torch.optim.AdamW(model.parameters(), 0.1), 5)
    assert_same(plain, streamed)
    print("same", flush=True)
    return streamed

def late():
    threading.main_thread().join()
    compare()

torch.set_num_threads(1)
threading.Thread(target=late).start()
atexit.register(compare)
kept = compare()
"""


def test_training_at_the_end_of_the_process() -> None:
    """In a thread, at exit, with an update in flight."""
    done = python("-c", TRAINING)
    assert done.stderr == ""
    assert done.stdout.split() == ["same"] * 3


def test_interrupts() -> None:
    """Wherever Ctrl-C comes, the calls after that have the numbers of the code."""
    place, stopped = 0, True
    while stopped:
        place += 1
        graphs: Any = Emulated()
        replay = Replay(graphs, weakref.WeakSet(), 1, in_place=[], given_away=[0], leaves=True)
        places = Places(place, "replay")
        stopped = False
        for k in range(7):
            x = torch.full((3,), float(k))
            sys.settrace(places)
            try:
                found = replay(lambda inputs: [inputs[0] * 2], [x])
            except KeyboardInterrupt:
                stopped = True
                continue
            finally:
                sys.settrace(None)
            assert found[0] is not None and found[0].equal(2 * x), places.stopped
        stopped = stopped or bool(places.stopped)
    assert place > 20


@pytest.mark.gpu
def test_a_capture_that_fails_leaves_no_trace() -> None:
    """Random numbers, graphs from before it, and later captures go on."""
    device = torch.device("cuda", torch.cuda.current_device())
    graphs, x = CudaGraphs(device), torch.ones(3, device=device)
    before, there = graphs.capture(
        lambda inputs: [inputs[0] + torch.rand(3, device=device)], [x], leaves=False
    )
    for leaves in (False, True):
        with pytest.raises(RuntimeError):
            graphs.capture(lambda inputs: [inputs[0] * inputs[0].sum().item()], [x], leaves=leaves)
        torch.manual_seed(0)
        expected = x + torch.rand(3, device=device)
        torch.manual_seed(0)
        graphs.follow()
        before()
        assert there[0] is not None and there[0].equal(expected)
        later, result = graphs.capture(lambda inputs: [inputs[0] * 2], [x], leaves=leaves)
        later()
        assert result[0] is not None and result[0].equal(2 * x)
