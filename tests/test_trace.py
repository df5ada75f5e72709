"""Traces: every op of a run, with the times at which it ran; what is made of them."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import megacompile
from megacompile import Trace, schedules, trace
from megacompile.cost.memory import Kind, device_memory
from megacompile.errors import ModelError, TraceError
from megacompile.ir import ops, values
from megacompile.ir.ops.sizes import value_bytes
from megacompile.ir.schedule import Schedule
from megacompile.ir.stages import Code
from megacompile.runtime.updates.update import BucketUpdate
from megacompile.tracing import recorder
from megacompile.tracing.describe import describe
from megacompile.tracing.recorder import Recording, Tracer, _Clock
from megacompile.tracing.timeline import HOST, Span, covered_s
from tests import inside
from tests.schedules import ACTIVATION, WEIGHT, Spec, build
from tests.zoo import Made, Stack, batchnorm, dropout, stack, step, tied, twins

QUIET = (ops.free, ops.defer_free, ops.begin)


def tracer_of(model: Any) -> Any:
    return inside.machine(model).tracer


def names(spans: Iterator[Span] | tuple[Span, ...] | list[Span]) -> list[str]:
    return [span.op.name for span in spans]


def wanted(schedule: Schedule | None, graph: str) -> list[fx.Node]:
    assert schedule is not None
    return [n for n in ops.nodes_of(schedule.graphs[graph]) if n.target not in QUIET]


class Clock:
    """Stands in for `time` where ops are recorded: it moves on when it is read, and when told."""

    TICK_S = 2.0**-20

    def __init__(self) -> None:
        self.now_s = 0.0
        self._lock = threading.Lock()  # the host's updates run in a thread of their own

    def advance(self, seconds: float) -> float:
        with self._lock:
            self.now_s += seconds
            return self.now_s

    def perf_counter(self) -> float:
        return self.advance(self.TICK_S)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    stand_in = Clock()
    monkeypatch.setattr(recorder, "time", stand_in)
    return stand_in


@contextmanager
def failing(schedule: Schedule, code: Code) -> Iterator[None]:
    """Stage 1's code, and that of all stages of its template, raises."""
    codes = schedule.stages[1].traced.code
    honest = codes[code]

    def fail(inputs: Any) -> Any:
        raise ValueError("in the stage")

    codes[code] = fail
    try:
        yield
    finally:
        codes[code] = honest


# --- what is recorded


@pytest.mark.parametrize("made", [stack, dropout, batchnorm, tied], ids=lambda made: made.__name__)
def test_every_op_of_a_step_is_recorded_in_its_order(made: Any) -> None:
    model_and_inputs: Made = made()
    _, model = twins(model_and_inputs[0])
    for _ in range(2):  # the second accumulates
        with trace(model) as t:
            step(model, model_and_inputs[1])
        assert [run.graph for run in t.measured.runs] == ["forward", "backward"]
        for i, run in enumerate(t.measured.runs):
            nodes = wanted(run.schedule, run.graph)
            assert names(t.measured.of_run(i)) == [ops.label(n) for n in nodes]
            lanes = [span.op.lane for span in t.measured.of_run(i)]
            assert lanes == [ops.stream_of(n).value for n in nodes]
    assert any(span.op.kind == "fetch_grad" for span in t.spans)


def test_times_keep_the_schedules_order() -> None:
    _, model = twins(stack()[0])
    before = time.perf_counter()
    with trace(model) as t:
        step(model, stack()[1])
    length = time.perf_counter() - before
    assert all(0.0 <= span.start_s <= span.stop_s <= length for span in t.spans)
    for i, run in enumerate(t.measured.runs):
        at = dict(zip(wanted(run.schedule, run.graph), t.measured.of_run(i), strict=True))
        for node, span in at.items():
            for source in map(values.producer, node.all_input_nodes):
                assert source not in at or at[source].stop_s <= span.start_s


def test_a_span_is_as_long_as_its_op(clock: Clock) -> None:
    _, model = twins(stack()[0])
    step(model, stack()[1])
    (schedule,) = schedules(model)
    codes = schedule.stages[1].traced.code
    honest = codes[Code.FORWARD]

    def slow(inputs: Any) -> Any:
        clock.advance(0.02)
        return honest(inputs)

    codes[Code.FORWARD] = slow
    with trace(model) as t:
        step(model, stack()[1])
    for span in t.spans:
        late = span.op.kind == "forward" and schedule.stages[1].traced is (
            schedule.stages[int(span.op.name[:-1])].traced
        )
        assert span.duration_s == pytest.approx(Clock.TICK_S + 0.02 * late), span


def test_spans_know_their_unit_and_bytes() -> None:
    _, model = twins(stack()[0])
    with trace(model) as t:
        step(model, stack()[1])
    (schedule,) = schedules(model)
    sizes = {bucket.name: bucket.size_bytes for bucket in schedule.buckets}
    for span in t.spans:
        if span.op.kind == "prefetch":
            assert span.op.size_bytes == sizes[span.op.module]
        elif span.op.kind == "offload_grad":
            gradients = [p.numel() * 4 for p in model.get_submodule(span.op.module).parameters()]
            assert span.op.size_bytes == sum(gradients)
        else:
            assert span.op.size_bytes == 0
        if span.op.kind in ("forward", "recompute", "backward"):
            assert span.op.module == schedule.stages[int(re.sub(r"\D", "", span.op.name))].name


def test_several_steps_and_micro_batches() -> None:
    _, model = twins(stack()[0])
    with trace(model) as t:
        for _ in range(2):
            step(model, stack()[1])
            step(model, stack()[1])
            model.zero_grad()
        with torch.no_grad():
            model(**stack()[1])
    graphs = [run.graph for run in t.measured.runs]
    assert graphs == ["forward", "backward"] * 4 + ["forward"]
    assert all(t.measured.of_run(i) for i in range(len(graphs)))
    assert "Stack forward x5, Stack backward x4" in t.table()


def test_updates_in_the_backward_are_ops_like_others() -> None:
    plain, inputs = stack()
    optimizer = torch.optim.AdamW(plain.parameters())
    model = megacompile.megacompile(plain, optimizer=optimizer, device="cpu")
    with trace(model) as t:
        with megacompile.accumulate(model):
            step(model, inputs)
        step(model, inputs)
        optimizer.step()
    for i, run in enumerate(t.measured.runs):
        nodes = wanted(run.schedule, run.graph)
        assert names(t.measured.of_run(i)) == [ops.label(n) for n in nodes]
    buckets = len(schedules(model)[0].buckets)
    counts = Counter(span.op.kind for span in t.spans)
    for kind in ("fetch_state", "update", "offload_state", "fetch_grad"):
        assert counts[kind] == buckets
    assert HOST not in t.measured.lanes


def test_every_captured_graph_is_recorded() -> None:
    """A graph break makes two of them."""

    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            torch._dynamo.graph_break()
            loss: Tensor = self.second(x).mean()
            return loss

    _, model = twins(Broken())
    with trace(model) as t:
        step(model, {"x": stack()[1]["x"]})
    made = schedules(model)
    assert len(made) == 2
    runs = [(run.schedule and run.schedule.name, run.graph) for run in t.measured.runs]
    first, second = (schedule.name for schedule in made)
    assert runs == [
        *((first, "forward"), (second, "forward")),
        *((second, "backward"), (first, "backward")),
    ]


# --- the host's updates


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    step(model, stack()[1])
    optimizer.step()
    optimizer.zero_grad()


def test_updates_on_the_host_are_a_lane(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each bucket, under its label; reading waits for those that still run."""
    _, model = twins(stack()[0])
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    honest = BucketUpdate.__call__

    def slow(self: BucketUpdate) -> None:
        clock.advance(0.01)
        honest(self)

    monkeypatch.setattr(BucketUpdate, "__call__", slow)
    with trace(model) as t:
        train(model, optimizer)
    (schedule,) = schedules(model)
    updates = [span for span in t.spans if span.op.lane == HOST]
    assert sorted(names(updates)) == sorted(f"{b.label}UPDATE" for b in schedule.buckets)
    assert {span.op.module for span in updates} == {b.name for b in schedule.buckets}
    assert all(span.duration_s >= 0.01 for span in updates)
    assert {t.measured.runs[span.run].graph for span in updates} == {"update"}
    assert {span.op.kind for span in updates} == {"update_host"}
    backward = max(span.stop_s for span in t.spans if span.op.lane != HOST)
    assert min(span.start_s for span in updates) >= backward, "one time axis"


def test_a_failed_update_is_recorded_and_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    _, model = twins(stack()[0])
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    with monkeypatch.context() as patch, trace(model) as t:

        def fail(self: BucketUpdate) -> None:
            raise ValueError("in the update")

        patch.setattr(BucketUpdate, "__call__", fail)
        train(model, optimizer)
        with pytest.raises(megacompile.OptimizerError, match="in the update"):
            model(**stack()[1])
    assert any(span.op.lane == HOST for span in t.spans)


def test_updates_alone_have_the_buckets_labels() -> None:
    """The forward that named them ran before the trace."""
    _, model = twins(stack()[0])
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, stack()[1])
    with trace(model) as t:
        optimizer.step()
    (schedule,) = schedules(model)
    assert names(t.spans) == [f"{bucket.label}UPDATE" for bucket in schedule.buckets]
    assert "Stack update x1" in t.table()


# --- on and off


def test_nothing_is_recorded_while_no_trace_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    _, model = twins(stack()[0])
    with trace(model) as t:
        step(model, stack()[1])
        count = len(tracer_of(model).marks)
    assert tracer_of(model) is None

    def refused(*args: Any) -> None:
        raise AssertionError("recorded with no trace on")

    for name in ("run", "_here", "_on_stream"):
        monkeypatch.setattr(Tracer, name, refused)
    for name in ("next_op", "in_background"):
        monkeypatch.setattr(Recording, name, refused)
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    assert len(t.spans) == count


def test_nested_traces_each_have_their_part() -> None:
    _, model = twins(stack()[0])
    with trace(model) as outer:
        step(model, stack()[1])
        with trace(model) as inner:
            step(model, stack()[1])
        step(model, stack()[1])
        assert tracer_of(model) is not None
    assert tracer_of(model) is None
    assert len(outer.measured.runs) == 6
    assert len(inner.measured.runs) == 2
    assert names(inner.spans) == names([span for span in outer.spans if span.run in (2, 3)])
    shift = outer.measured.of_run(2)[0].start_s - inner.spans[0].start_s
    assert shift > outer.measured.of_run(1)[-1].stop_s, "each begins its own axis"


def test_overlapping_blocks() -> None:
    _, model = twins(stack()[0])
    first, second = trace(model), trace(model)
    first.__enter__()
    step(model, stack()[1])
    second.__enter__()
    step(model, stack()[1])
    first.__exit__(None, None, None)
    step(model, stack()[1])
    second.__exit__(None, None, None)
    assert [len(t.measured.runs) for t in (first, second)] == [4, 4]


def test_traces_in_several_threads() -> None:
    models = [twins(stack()[0])[1] for _ in range(2)]
    for model in models:
        step(model, stack()[1])
    found: dict[int, Trace] = {}

    def run(i: int) -> None:
        with trace(models[i]) as found[i]:
            for _ in range(5):
                models[i](**stack()[1])

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(2):
        assert len(found[i].measured.runs) == 5
        assert tracer_of(models[i]) is None


def test_several_models_are_on_one_axis() -> None:
    models = [twins(stack()[0])[1] for _ in range(2)]
    with trace(*models, models[0]) as t:
        for model in models:
            step(model, stack()[1])
    assert [run.model for run in t.measured.runs] == ["Stack", "Stack", "Stack 2", "Stack 2"]
    assert t.measured.of_run(1)[-1].stop_s <= t.measured.of_run(2)[0].start_s


@pytest.mark.parametrize("code", [Code.FORWARD, Code.BACKWARD])
def test_an_exception_in_the_block_leaves_what_ran(code: Code) -> None:
    _, model = twins(stack()[0])
    step(model, stack()[1])
    (schedule,) = schedules(model)
    with pytest.raises(ValueError, match="in the stage"), trace(model) as t:
        with failing(schedule, code):
            step(model, stack()[1])
    assert tracer_of(model) is None
    failed = next(
        n
        for n in ops.nodes_of(schedule.graphs["forward" if code is Code.FORWARD else "backward"])
        if n.target is (ops.forward if code is Code.FORWARD else ops.backward)
        and ops.arguments(n)[0].traced is schedule.stages[1].traced
    )
    assert t.spans
    assert ops.label(failed) not in names(t.spans)
    with trace(model) as again:
        step(model, stack()[1])
    assert [run.graph for run in again.measured.runs] == ["forward", "backward"]


def test_reading_inside_of_the_block() -> None:
    _, model = twins(stack()[0])
    with trace(model) as t:
        assert t.spans == ()
        assert t.table() == "nothing ran while the trace was on"
        step(model, stack()[1])
        half = len(t.spans)
        step(model, stack()[1])
    assert 0 < half < len(t.spans)
    assert repr(t) == "<trace of Stack: over>"


def test_errors() -> None:
    _, model = twins(stack()[0])
    with pytest.raises(ModelError, match=r"trace\(\): Linear is not megacompiled"):
        trace(nn.Linear(2, 2))
    with pytest.raises(ModelError, match="got no model"):
        trace()
    t = trace(model)
    with t:
        pass
    with pytest.raises(TraceError, match="make a new one"), t:
        pass


# --- what adds up


def test_busy_and_idle_and_kinds() -> None:
    _, model = twins(stack()[0])
    with trace(model) as t:
        step(model, stack()[1])
    found = t.measured
    for lane in found.lanes:
        spans = [span for span in t.spans if span.op.lane == lane]
        assert found.busy_s(lane) == pytest.approx(sum(span.duration_s for span in spans))
        assert found.busy_s(lane) <= found.total_s
    counts = {kind.kind: kind.count for kind in found.kinds()}
    assert counts == Counter(span.op.kind for span in t.spans)
    totals = t.to_dict()["measured"]
    assert totals["total_s"] == found.total_s
    assert totals["streams"]["compute"]["busy_s"] == found.busy_s("compute")
    rows = {line.split()[0]: line.split() for line in t.table().splitlines() if line}
    assert rows["prefetch"][1:3] == ["h2d", str(counts["prefetch"])]
    assert float(rows["compute"][1]) == pytest.approx(found.busy_s("compute") * 1e3, abs=1e-3)


def test_what_overlaps_counts_once() -> None:
    assert covered_s([(0, 2), (1, 3), (5, 6), (5.5, 5.75)]) == 4
    assert covered_s([]) == 0


def test_memory_of_a_forward() -> None:
    """Two slots; each stage makes an output, and the one before dies behind it."""
    schedule = build(Spec(stages=3, training=False))
    found = {info.name: info.memory_bytes for info in describe(schedule, "forward")}
    slots, y = 2 * WEIGHT.size_bytes, ACTIVATION.size_bytes
    x = y  # the graph's input is counted: it is on the device
    assert [found[f"{i}F"] for i in range(3)] == [slots + x, slots + x + y, slots + x + y]


@pytest.mark.parametrize("activations", ["recompute", "offload"])
def test_memory_ends_with_what_is_returned(activations: str) -> None:
    """Behind the last free of a step only slots, inputs and the returned gradients are left."""
    _, model = twins(Stack(layers=6), activations=activations)
    step(model, stack()[1])
    (schedule,) = schedules(model)
    assert schedule.backward is not None
    end = device_memory(schedule).end
    inputs = sum(value_bytes(n) for n in schedule.forward.find_nodes(op="placeholder"))
    returned = sum(map(value_bytes, schedule.backward.output_node().all_input_nodes))
    slots = sum(slot.size_bytes for slot in schedule.slots)
    assert {kind: size for kind, size in end.items() if size} == {
        Kind.SLOTS: slots,
        Kind.INPUTS: inputs,
        **({Kind.GRADIENTS: returned} if returned else {}),
    }


# --- CUDA, played


class Cuda:
    """Events whose times are a counter; `log` has what was asked of which stream."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[tuple[str, Any]] = []
        self.stream: Any = "user"
        self.now_ms = 100.0
        cuda = self

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                assert enable_timing
                self.ms = -1.0

            def record(self, stream: Any = None) -> None:
                cuda.now_ms += 1.0
                self.ms = cuda.now_ms
                cuda.log.append(("record", stream or cuda.stream))

            def synchronize(self) -> None:
                cuda.log.append(("synchronize", None))

            def elapsed_time(self, other: Any) -> float:
                return float(other.ms - self.ms)

        @contextmanager
        def device(_: torch.device) -> Iterator[None]:
            yield

        stats = {"allocated_bytes": {"all": {"current": 77}}}
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: "new")
        monkeypatch.setattr(torch.cuda, "device", device)
        monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: stats)


def test_on_cuda_events_stand_around_the_work_and_nothing_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = Cuda(monkeypatch)
    tracer = Tracer(torch.device("cuda", 0))
    assert ("record", "user") not in cuda.log, "the clock is read on a stream of its own"
    cuda.log.clear()
    recording = tracer.run(build(Spec(stages=2, training=False)), "forward")
    recording.next_op()
    prefetch = recording.timed(lambda: cuda.log.append(("work", cuda.stream)))
    recording.next_op()
    recording.next_op()
    forward = recording.timed(lambda: cuda.log.append(("work", cuda.stream)))
    unknown = recording.timed(int)
    assert unknown is int, "what is no op of the table is left alone"
    forward()
    cuda.stream = "h2d"  # put off until now
    prefetch()
    assert cuda.log == [
        *(("record", "user"), ("work", "user"), ("record", "user")),
        *(("record", "h2d"), ("work", "h2d"), ("record", "h2d")),
    ]
    marks = {mark.info.name: mark for mark in tracer.marks}
    assert set(marks) == {"0PREFETCH@0", "0F"}
    assert marks["0F"].memory_bytes == 77
    assert marks["0PREFETCH@0"].memory_bytes is None
    clock = tracer.clock
    lengths = {n: clock.at_s(m.stop) - clock.at_s(m.start) for n, m in marks.items()}
    assert lengths == {name: pytest.approx(0.001) for name in marks}


def test_the_clocks_pair_is_the_tightest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three readings the one in which the host waited least: 11 to 12, not 0 to 10."""
    Cuda(monkeypatch)
    readings = iter([0.0, 10.0, 11.0, 12.0, 20.0, 25.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(readings))
    clock = _Clock(torch.device("cuda", 0))
    event: Any = torch.cuda.Event(enable_timing=True)
    event.ms = 102.0 + 4.0  # the second pair's event was at 102 ms
    assert clock.at_s(event) == pytest.approx(11.5 + 0.004)


# --- on a GPU


class Deep(nn.Module):
    """Layers large enough that copies and computes overlap."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2048, 2048) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()


@pytest.mark.gpu
def test_on_a_gpu_the_spans_keep_the_schedules_edges() -> None:
    """What an op waits for is over when it begins, across streams too (by 10 us of resolution)."""
    model = megacompile.megacompile(Deep(), lowering="eager", resident=0, activations="recompute")
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(4096, 2048, device="cuda")
    for _ in range(3):
        with trace(model) as t:
            model(x).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [run.graph for run in t.measured.runs] == ["forward", "backward", "update"]
    for i, run in enumerate(t.measured.runs[:2]):  # the update's are all of the host
        nodes = wanted(run.schedule, run.graph)
        by_name = {span.op.name: span for span in t.measured.of_run(i)}
        assert set(by_name) == {ops.label(n) for n in nodes}
        for node in nodes:
            for source in map(values.producer, node.all_input_nodes):
                if source in nodes:
                    earlier, later = by_name[ops.label(source)], by_name[ops.label(node)]
                    assert earlier.stop_s <= later.start_s + 1e-5, (earlier, later)
    updates = [span for span in t.spans if span.op.lane == HOST]
    assert len(updates) == len(schedules(model)[0].buckets)
    device = [span for span in t.spans if span.op.lane != HOST]
    assert min(u.start_s for u in updates) >= max(s.stop_s for s in device) - 1e-3, "one axis"
    total = sum(t.measured.busy_s(lane) for lane in ("h2d", "compute", "d2h"))
    assert total > 0
    peak = max(size for _, size in t.measured.memory())
    assert 0 < peak <= torch.cuda.max_memory_allocated()


@pytest.mark.gpu
def test_on_a_gpu_a_span_has_the_length_of_its_work() -> None:
    model = megacompile.megacompile(Deep(), lowering="eager", resident=0, activations="recompute")
    x = torch.randn(64, 2048, device="cuda")
    model(x).backward()
    (schedule,) = schedules(model)
    codes = schedule.stages[1].traced.code
    honest = codes[Code.FORWARD]

    def slow(inputs: Any) -> Any:
        torch.cuda._sleep(20_000_000)  # cycles: 10 ms and more at 2 GHz
        return honest(inputs)

    codes[Code.FORWARD] = slow
    with trace(model) as t:
        model(x)
    slept = [span for span in t.spans if span.op.name == "1F"]
    assert slept[0].duration_s > 5e-3
