"""The executor: it runs the code that is printed, under the names that are printed."""

from __future__ import annotations

import inspect
import json
import re
import traceback
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from megacompile import compat, schedules
from megacompile.ir import ops
from megacompile.ir.schedule import Schedule
from megacompile.ir.stages import Code
from megacompile.ir.tensors import TensorMeta
from megacompile.runtime.device.streams import Handle
from megacompile.runtime.ops.bound import BoundOps
from megacompile.runtime.ops.compute import _conform
from megacompile.runtime.ops.executor import Executor
from megacompile.show import python
from tests.inside import executors
from tests.zoo import Made, batch, batchnorm, dropout, equal, step, twins

LABEL = re.compile(r"(\d[\d.]*)?[A-Z_]+(@\d+)?")
QUIET = ("BEGIN", "SNAPSHOT", "ASSIGN")  # labels that the table leaves out, with ALLOC_GRAD


LAST = 3  # stage of `Layers`


class Layers(nn.Module):
    """Four layers of one template, and the mean."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.sigmoid(layer(x))
        return x.mean()


def layers() -> Made:
    """`Layers` and the input of a call."""
    torch.manual_seed(0)
    return Layers(), {"x": batch()["x"]}


X = layers()[1]


def labels(graph: fx.Graph) -> Counter[str]:
    """What a graph does, `free` apart: that is a `del`, not a call."""
    return Counter(ops.label(n) for n in ops.nodes_of(graph) if n.target is not ops.free)


def table_labels(schedule: Schedule) -> set[str]:
    words = set(re.split(r"[\s|]+", schedule.table()))
    return {word for word in words if LABEL.fullmatch(word)}


def corrupt(monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> None:
    """Let `python.graph_code` give something else than the graph says."""
    honest = python.graph_code

    def edited(schedule: Schedule, graph_name: str) -> str:
        return honest(schedule, graph_name).replace(old, new)

    monkeypatch.setattr(python, "graph_code", edited)


# --- what is printed is what runs


def test_the_source_that_runs_is_printed() -> None:
    _, model = twins(layers()[0])
    for _ in range(2):
        step(model, X)
    made = executors(model)
    assert len(made) > 1, "one that writes and one that accumulates"
    for executor in made:
        assert set(executor._run) == {"forward", "backward", "update"}
        for name, function in executor._run.items():
            source = inspect.getsource(function)
            assert source in str(executor.schedule)
            assert source == python.graph_code(executor.schedule, name)


def test_an_edit_of_the_printed_forward_is_an_edit_of_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The code is compiled as it is: another bucket in a line, another weight in the layer."""
    corrupt(monkeypatch, "prefetch(bucket_2,", "prefetch(bucket_1,")
    plain, model = twins(layers()[0])
    with torch.no_grad():
        got = model(**X)
        assert not equal(got, plain(**X))
        plain.layers[2] = plain.layers[1]
        assert equal(got, plain(**X))
    assert "prefetch(bucket_2," not in str(schedules(model)[0])


def test_an_edit_of_the_printed_backward_is_an_edit_of_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without its OFFLOAD_GRAD, a layer's gradients stay the zeros of fresh memory."""
    corrupt(monkeypatch, "offload_grad(bucket_2, g2_2)", "begin()")
    plain, model = twins(layers()[0])
    for each in (plain, model):
        step(each, X)
    for i in range(4):
        wanted, got = plain.layers[i].weight.grad, model.layers[i].weight.grad
        assert wanted.any()
        assert equal(got, torch.zeros_like(wanted) if i == 2 else wanted)


def test_the_names_in_the_code_are_the_ops_and_the_schedules_objects() -> None:
    _, model = twins(layers()[0])
    step(model, X)
    known = {op.name for op in ops.OPS.values()} | {"wait"}
    for executor in executors(model):
        for function in executor._run.values():
            used = set(function.__code__.co_names) - {"clear"}
            assert used <= known | set(python.names(executor.schedule))


# --- tracebacks


@pytest.mark.parametrize(
    ("code", "graph", "line", "label"),
    [
        (Code.FORWARD, "forward", "y1_0, = forward(stage_1, (w1,), (y0_0,), False)", "1F"),
        (Code.RECOMPUTE, "backward", "s2_0_again, = recompute(stage_2,", "2RECOMPUTE"),
        (Code.BACKWARD, "backward", "d2_0, g2_2 = backward(stage_2, (w2,),", "2B"),
    ],
)
def test_a_traceback_shows_the_line_of_the_schedule(
    code: Code, graph: str, line: str, label: str
) -> None:
    def fail(inputs: Any) -> Any:
        raise ValueError("in the stage")

    _, model = twins(layers()[0])
    step(model, X)
    (schedule,) = schedules(model)
    schedule.stages[1].traced.code[code] = fail  # stages 1 and 2 share it
    with pytest.raises(ValueError, match="in the stage") as caught:
        model.zero_grad()
        step(model, X)
    frames = traceback.extract_tb(caught.value.__traceback__)
    (frame,) = [frame for frame in frames if frame.name == f"run_{graph}"]
    assert frame.filename.startswith(f"<megacompile Layers {graph} ")
    assert frame.line is not None and frame.line.startswith(line)
    assert re.search(rf"# compute +{label}\b", frame.line), "with its stream and printed name"
    assert frame.line in str(schedule)
    assert frame.line in "".join(traceback.format_exception(caught.value))


# --- the profiler


def ranges(model: nn.Module, folder: Path) -> Counter[str]:
    """The ranges of a step that have the form of a label.

    In the trace and in the profiler's tables, which take "1F" for a mangled C++ name and would say
    "F": hence the space before it.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        step(model, batch())
    path = folder / "trace.json"
    profiled.export_chrome_trace(str(path))
    events = json.loads(path.read_text())["traceEvents"]
    names = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    traced = Counter(name.strip() for name in names if LABEL.fullmatch(name.strip()))
    tabled = {row.key.strip(): row.count for row in profiled.key_averages()}
    assert traced == {name: n for name, n in tabled.items() if LABEL.fullmatch(name)}
    assert all(f" {name} " in profiled.key_averages().table(row_limit=-1) for name in traced)
    return traced


@pytest.mark.parametrize("made", [dropout, batchnorm], ids=lambda made: made.__name__)
def test_profiler_ranges_are_the_printed_names(made: Callable[[], Made], tmp_path: Path) -> None:
    """One range for each call of the code, under its label; all of the table's among them."""
    _, model = twins(made()[0])
    for accumulate in (False, True):
        found = ranges(model, tmp_path)
        (schedule,) = schedules(model)
        ran = (schedule.forward, schedule.backward)  # no optimizer steps here
        assert found == sum((labels(graph) for graph in ran if graph is not None), Counter())
        assert any(name.endswith("FETCH_GRAD") for name in found) is accumulate
        shown = {n for n in found if n not in QUIET and not n.endswith("ALLOC_GRAD")}
        updates = labels(schedule.update) if schedule.update is not None else Counter()
        assert shown == table_labels(schedule) - updates.keys()


def test_without_a_profiler_there_are_no_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refused(torch.profiler.record_function):
        def __init__(self, name: str) -> None:
            raise AssertionError(f"a range {name} that nobody records")

    monkeypatch.setattr(torch.profiler, "record_function", Refused)
    _, model = twins(layers()[0])
    step(model, X)


# --- lifetimes


class Lifetimes:
    """What of each stage is alive at the entry of each backward: "output 1", "saved 2"."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: dict[str, list[weakref.ref[Tensor]]] = {}
        self.at: dict[int, set[str]] = {}
        run_forward, run_backward = BoundOps.forward, BoundOps.backward
        run_recompute = BoundOps.recompute

        def forward(self_: BoundOps, stage: Any, *args: Any) -> tuple[Handle, ...]:
            handles = run_forward(self_, stage, *args)
            self._note(f"output {stage.index}", handles[: len(stage.outputs)])
            self._note(f"saved {stage.index}", handles[len(stage.outputs) :])
            return handles

        def recompute(self_: BoundOps, stage: Any, *args: Any) -> tuple[Handle, ...]:
            handles = run_recompute(self_, stage, *args)
            self._note(f"saved {stage.index}", handles)
            return handles

        def backward(self_: BoundOps, stage: Any, *args: Any) -> tuple[Handle, ...]:
            self.at[stage.index] = self.alive()
            handles = run_backward(self_, stage, *args)
            self._note(f"gradients {stage.index}", handles[:1])
            return handles

        monkeypatch.setattr(BoundOps, "forward", forward)
        monkeypatch.setattr(BoundOps, "recompute", recompute)
        monkeypatch.setattr(BoundOps, "backward", backward)

    def _note(self, name: str, handles: tuple[Handle, ...]) -> None:
        self.made[name] = [weakref.ref(h.value) for h in handles if isinstance(h.value, Tensor)]

    def alive(self) -> set[str]:
        return {name for name, refs in self.made.items() if any(ref() is not None for ref in refs)}


def test_memory_is_given_back_as_the_backward_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """At each backward only what it and those after it need is alive, and nothing at the end.

    Without a garbage collection: on a GPU it would come too late.
    """
    lifetimes = Lifetimes(monkeypatch)
    _, model = twins(layers()[0])
    step(model, X)
    assert set(lifetimes.at) == set(range(LAST + 1))
    for stage, alive in lifetimes.at.items():
        names = {f"output {i}" for i in range(stage)} | {f"saved {stage}"}
        names |= {f"gradients {stage + 1}"} if stage < LAST else set()
        assert alive - {f"output {LAST}"} <= names, f"at {stage}B"
    assert {"output 0", "saved 2", "gradients 3"} <= lifetimes.at[2], "it is used"
    assert lifetimes.alive() == set()


def test_memory_is_given_back_while_the_user_keeps_the_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lifetimes = Lifetimes(monkeypatch)
    _, model = twins(layers()[0])
    loss = model(**X)
    assert {f"output {i}" for i in range(LAST)} <= lifetimes.alive()
    loss.backward()
    assert lifetimes.alive() <= {f"output {LAST}"}
    assert float(loss.detach()) > 0


def test_a_loss_that_is_dropped_frees_what_its_backward_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lifetimes = Lifetimes(monkeypatch)
    _, model = twins(layers()[0])
    loss = model(**X)
    del loss
    assert lifetimes.alive() == set()


def test_retain_graph_keeps_what_the_next_backward_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    lifetimes = Lifetimes(monkeypatch)
    plain, model = twins(layers()[0])
    losses = [each(**X) for each in (plain, model)]
    outputs = {f"output {i}" for i in range(LAST)}
    for retain in (True, True, False):
        for loss in losses:
            loss.backward(retain_graph=retain)
        kept = outputs | {f"saved {LAST}"} if retain else set()
        assert lifetimes.alive() - {f"output {LAST}"} == kept
    assert equal(plain.layers[1].weight.grad, model.layers[1].weight.grad)


def test_a_forward_without_gradients_keeps_one_output_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lifetimes = Lifetimes(monkeypatch)
    seen: list[set[str]] = []
    counted = BoundOps.forward

    def forward(self: BoundOps, *args: Any) -> tuple[Handle, ...]:
        seen.append(lifetimes.alive())
        return counted(self, *args)

    monkeypatch.setattr(BoundOps, "forward", forward)
    _, model = twins(layers()[0])
    with torch.no_grad():
        model(**X)
    assert seen == [set(), {"output 0"}, {"output 1"}, {"output 2"}]


def test_the_inputs_of_a_run_are_handed_over() -> None:
    """Nobody else holds them while it runs."""
    _, model = twins(layers()[0])
    with torch.no_grad():
        model(**X)
    (executor,) = executors(model)
    inputs: dict[str, Tensor] = {name: X["x"] for name in executor.inputs("forward")}
    outputs, saved_values = executor.forward(inputs)
    assert (inputs, saved_values) == ({}, {})
    assert [type(value) for value in outputs] == [Tensor]


# --- what a backward takes over from its forward


def holds(executor: Executor) -> int:
    backward = executor.schedule.backward
    return 0 if backward is None else len(ops.nodes_of(backward, ops.reuse))


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Executor]:
    """The executors whose backward ran, in order."""
    found: list[Executor] = []
    run = Executor.backward

    def backward(self: Executor, inputs: dict[str, Any]) -> dict[str, Tensor]:
        found.append(self)
        return run(self, inputs)

    monkeypatch.setattr(Executor, "backward", backward)
    return found


def test_the_next_run_takes_what_is_in_the_slots(ran: list[Executor]) -> None:
    _, model = twins(layers()[0])
    step(model, X)
    assert [holds(executor) for executor in ran] == [3]


def test_a_run_in_between_has_used_the_slots(ran: list[Executor]) -> None:
    """Of this model, in a forward or in a backward: what it left there is another bucket's."""
    plain, model = twins(layers()[0])
    for each in (plain, model):
        loss = each(**X)
        with torch.no_grad():
            each(batch(2)["x"])
        loss.backward()
    assert [holds(executor) for executor in ran] == [0]
    for each in (plain, model):
        losses = [each(batch(i)["x"]) for i in range(2)]
        for loss in losses:
            loss.backward()
    assert [holds(executor) for executor in ran[1:]] == [0, 0]
    assert equal(plain.layers[1].weight.grad, model.layers[1].weight.grad)


def test_a_second_backward_finds_other_buckets(ran: list[Executor]) -> None:
    _, model = twins(layers()[0])
    loss = model(**X)
    loss.backward(retain_graph=True)
    loss.backward()
    assert [holds(executor) for executor in ran] == [3, 0]


# --- gradients of the user


@pytest.mark.parametrize(
    "given",
    [
        torch.ones(()).expand(4, 6),
        torch.arange(24.0).reshape(6, 4).t(),
        torch.arange(24.0, dtype=torch.float64).reshape(4, 6),
    ],
    ids=["expanded", "transposed", "double"],
)
def test_a_gradient_gets_the_looks_it_was_traced_with(given: Tensor) -> None:
    meta = TensorMeta((4, 6), torch.float32, (6, 1))
    got = _conform(given, meta, meta.stride)
    assert TensorMeta.of(got) == meta
    assert equal(got, given.float().contiguous())


def test_a_gradient_that_fits_is_not_copied() -> None:
    given = torch.ones(4, 6)
    meta = TensorMeta.of(given)
    assert _conform(given, meta, meta.stride) is given


# --- what tuning leaves behind


def test_page_locked_memory_goes_back_behind_the_first_backward(
    ran: list[Executor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each schedule: its kernels are tuned in it."""
    devices: list[torch.device] = []
    monkeypatch.setattr(compat, "give_pinned_cache_back", devices.append)
    _, model = twins(layers()[0])
    for _ in range(4):
        step(model, X)
    assert len(ran) == 4
    assert len(devices) == len({id(executor) for executor in ran}) < 4
