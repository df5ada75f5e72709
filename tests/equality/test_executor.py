"""The executor runs the code that is printed, under the names that are printed."""

from __future__ import annotations

import json
import re
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megacompile import schedules, trace
from megacompile.ir import ops
from megacompile.ir.stages import Code
from tests.zoo import assert_same, batch, batchnorm, step, twins

LABEL = re.compile(r"(\d[\d.]*)?[A-Z_]+(@\d+)?")


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
    assert schedule.backward is not None
    nodes = [*ops.nodes_of(schedule.forward), *ops.nodes_of(schedule.backward)]
    # A `free` is a `del`, not a call; there are no optimizer steps.
    assert found == Counter(ops.label(n) for n in nodes if n.target is not ops.free)

    class Refused(torch.profiler.record_function):
        def __init__(self, name: str) -> None:
            raise AssertionError(f"a range {name} that nobody records")

    monkeypatch.setattr(torch.profiler, "record_function", Refused)
    step(model, batch())


# --- what a backward takes over from its forward


def fetched(model: nn.Module, run: Callable[[], object]) -> int:
    """How many buckets are copied to the device."""
    with trace(model) as recorded:
        run()
    return sum(span.op.name.partition("@")[0].endswith("PREFETCH") for span in recorded.spans)


def test_a_backward_takes_what_its_forward_left_in_the_slots() -> None:
    """Three buckets, unless a run in between, of whatever kind, has used them."""
    _, model = twins(Layers())
    x = [batch(i)["x"] for i in range(3)]
    loss = model(x[0])
    with torch.no_grad():
        model(x[2])
    assert fetched(model, loss.backward) == 3
    assert fetched(model, model(x[1]).backward) == 0
    once = model(x[1])
    assert fetched(model, lambda: once.backward(retain_graph=True)) == 0
    assert fetched(model, once.backward) == 3


def test_a_gradient_gets_the_looks_it_was_traced_with() -> None:
    plain, model = twins(Layers())
    for given in (torch.ones(()).expand(4, 16), torch.arange(64.0).reshape(16, 4).t()):
        for each in (plain, model):
            each(**X, mean=False).backward(given)
        assert_same(plain, model)
