"""The executor runs the code that is printed, under the names that are printed, and gives memory
back as it goes."""

from __future__ import annotations

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

from megacompile import schedules, trace
from megacompile.ir import ops
from megacompile.ir.schedule import Schedule
from megacompile.ir.stages import Code
from tests.zoo import assert_same, batch, batchnorm, step, twins

LABEL = re.compile(r"(\d[\d.]*)?[A-Z_]+(@\d+)?")
LAST = 3  # stage of `Layers`


class Layers(nn.Module):
    """Four layers of one template, and the mean."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor, mean: bool = True) -> Tensor:
        for layer in self.layers:
            x = torch.sigmoid(layer(x))
        return x.mean() if mean else x


X = {"x": batch()["x"]}

# --- what is printed is what runs


def test_a_traceback_shows_the_line_of_the_schedule() -> None:
    def fail(inputs: Any) -> Any:
        raise ValueError("in the stage")

    _, model = twins(Layers())
    step(model, X)
    (schedule,) = schedules(model)
    codes = schedule.stages[1].traced.code  # stages 1 and 2 share it
    for code, graph, line, label in (
        (Code.FORWARD, "forward", "y1_0, = forward(stage_1, (w1,), (y0_0,), False)", "1F"),
        (Code.RECOMPUTE, "backward", "s2_0_again, = recompute(stage_2,", "2RECOMPUTE"),
        (Code.BACKWARD, "backward", "d2_0, g2_2 = backward(stage_2, (w2,),", "2B"),
    ):
        real, codes[code] = codes[code], fail
        with pytest.raises(ValueError, match="in the stage") as caught:
            model.zero_grad()
            step(model, X)
        codes[code] = real
        frames = traceback.extract_tb(caught.value.__traceback__)
        (frame,) = [frame for frame in frames if frame.name == f"run_{graph}"]
        assert frame.filename.startswith(f"<megacompile Layers {graph} ")
        assert frame.line is not None and frame.line.startswith(line)
        assert re.search(rf"# compute +{label}\b", frame.line), "with its stream and printed name"
        assert frame.line in str(schedule)
        assert frame.line in "".join(traceback.format_exception(caught.value))


# --- the profiler


def labels(graph: fx.Graph | None) -> Counter[str]:
    """What a graph does, `free` apart: that is a `del`, not a call."""
    nodes = ops.nodes_of(graph) if graph is not None else []
    return Counter(ops.label(n) for n in nodes if n.target is not ops.free)


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


def test_profiler_ranges_are_the_printed_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One range for each call of the code, under its label. None where nobody records."""
    _, model = twins(batchnorm()[0])
    found = ranges(model, tmp_path)
    (schedule,) = schedules(model)
    assert found == labels(schedule.forward) + labels(schedule.backward)  # no optimizer steps

    class Refused(torch.profiler.record_function):
        def __init__(self, name: str) -> None:
            raise AssertionError(f"a range {name} that nobody records")

    monkeypatch.setattr(torch.profiler, "record_function", Refused)
    step(model, batch())


# --- lifetimes


class Lifetimes:
    """What of each stage is alive at the entry of each of its codes: "output 1", "saved 2"."""

    def __init__(self, model: nn.Module) -> None:
        self.made: dict[str, list[weakref.ref[Tensor]]] = {}
        self.at: list[set[str]] = []  # each backward, from the last stage on
        self.forwards: list[set[str]] = []
        self.again = LAST  # the stage that is recomputed next
        (schedule,) = schedules(model)
        for traced in {id(stage.traced): stage.traced for stage in schedule.stages}.values():
            for code, function in list(traced.code.items()):
                traced.code[code] = self._noted(code, function, schedule)

    def reset(self) -> None:
        self.made, self.at, self.forwards, self.again = {}, [], [], LAST

    def _noted(self, code: Code, function: Any, schedule: Schedule) -> Any:
        def run(inputs: Any) -> Any:
            backward = code is Code.BACKWARD
            index = LAST - len(self.at) if backward else len(self.forwards) % (LAST + 1)
            if backward:
                self.at.append(self.alive())
            elif code is not Code.RECOMPUTE:
                self.forwards.append(self.alive())
            results = function(inputs)
            if backward:
                self._note(f"gradients {index}", results)
            elif code is Code.RECOMPUTE:
                self._note(f"saved {LAST - len(self.at)}", results)
            else:
                count = len(schedule.stages[index].outputs)
                self._note(f"output {index}", results[:count])
                self._note(f"saved {index}", results[count:])
            return results

        return run

    def _note(self, name: str, values: Any) -> None:
        self.made[name] = [weakref.ref(value) for value in values if isinstance(value, Tensor)]

    def alive(self) -> set[str]:
        return {name for name, refs in self.made.items() if any(ref() is not None for ref in refs)}


def test_memory_is_given_back_as_a_step_goes() -> None:
    """At each backward only what it and those after it need is alive, and nothing at the end.

    Without a garbage collection: on a GPU it would come too late.
    """
    plain, model = twins(Layers())
    for each in (plain, model):
        step(each, X)
        each.zero_grad()
    lives = Lifetimes(model)
    loss = model(**X)
    assert {f"output {i}" for i in range(LAST)} <= lives.alive()
    loss.backward()
    assert lives.alive() <= {f"output {LAST}"}, "though the user keeps the loss"
    assert len(lives.at) == LAST + 1
    for stage, alive in zip(range(LAST, -1, -1), lives.at, strict=True):
        names = {f"output {i}" for i in range(stage)} | {f"saved {stage}", f"saved {LAST}"}
        names |= {f"gradients {stage + 1}"} if stage < LAST else set()
        assert alive - {f"output {LAST}"} <= names, f"at {stage}B"
    assert {"output 0", "gradients 3"} <= lives.at[LAST - 2], "it is used"
    del loss
    lives.reset()
    lost = model(**X)
    del lost
    assert lives.alive() == set(), "a loss that is dropped frees what its backward needed"
    lives.reset()
    plain(**X).backward()
    losses = [each(**X) for each in (plain, model)]
    outputs = {f"output {i}" for i in range(LAST)}
    for retain in (True, True, False):
        lives.at = []
        for each in losses:
            each.backward(retain_graph=retain)
        kept = outputs | {f"saved {LAST}"} if retain else set()
        assert lives.alive() - {f"output {LAST}"} == kept


# --- what a backward takes over from its forward


def fetched(model: nn.Module, run: Callable[[], object]) -> int:
    """How many buckets are copied to the device."""
    with trace(model) as recorded:
        run()
    return sum(span.op.name.partition("@")[0].endswith("PREFETCH") for span in recorded.spans)


def test_a_backward_takes_what_its_forward_left_in_the_slots() -> None:
    """Three buckets, unless a run in between, of whatever kind, has used them."""
    plain, model = twins(Layers())
    x = [batch(i)["x"] for i in range(3)]
    for each in (plain, model):
        losses = [each(x[0])]
        with torch.no_grad():
            each(x[2])
        count = fetched(model, losses[0].backward) if each is model else losses[0].backward()
    assert count == 3
    assert fetched(model, model(x[1]).backward) == 0
    once = model(x[1])
    assert fetched(model, lambda: once.backward(retain_graph=True)) == 0
    assert fetched(model, once.backward) == 3
    for _ in range(3):
        plain(x[1]).backward()
    torch.testing.assert_close(plain.layers[1].weight.grad, model.layers[1].weight.grad)


def test_a_gradient_gets_the_looks_it_was_traced_with() -> None:
    plain, model = twins(Layers())
    for given in (torch.ones(()).expand(4, 16), torch.arange(64.0).reshape(16, 4).t()):
        for each in (plain, model):
            each(**X, mean=False).backward(given)
        assert_same(plain, model)
