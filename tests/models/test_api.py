"""The front door: `megacompile()`, `schedules()`, `updates()`, and what they show."""

from __future__ import annotations

import inspect
import platform
import re
import textwrap
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megacompile as package
from megacompile import Schedule, errors, megacompile, schedules, trace, updates
from megacompile.ir import ops
from tests import inside
from tests.interrupts import watched
from tests.processes import python
from tests.zoo import WIDTH, batch, equal, stack, step, tied, twins


def test_the_model_is_changed_in_place_and_returned() -> None:
    model, _ = tied()
    kind, params, state = type(model), dict(model.named_parameters()), model.state_dict()
    attributes = set(vars(model))
    assert megacompile(model, device="cpu", lowering="eager") is model
    assert type(model) is kind and list(model.state_dict()) == list(state)
    assert all(model.get_parameter(name) is param for name, param in params.items())
    assert all(equal(model.state_dict()[key], state[key]) for key in state)
    changed = set(vars(model)) - attributes
    assert changed <= {"_compiled_call_impl", "_apply", "_call_impl", "compile"}
    assert schedules(model) == [] and updates(model) == {}
    assert megacompile(model, device="cpu", lowering="eager") is model, "again, with the same"


def test_the_docstring_names_every_option_and_its_example_runs() -> None:
    """As it stands there, on a model that takes (x, y) and gives a loss."""
    text = inspect.getdoc(megacompile) or ""
    args = text.partition("Args:")[2].partition("Raises:")[0]
    described = re.findall(r"^    (\w+): ", args, re.M)
    assert described == list(inspect.signature(megacompile).parameters)
    raised = re.findall(r"^    (\w+Error): ", text.partition("Raises:")[2], re.M)
    assert {"ModelError", "OptionError", "HostMemoryError"} <= set(raised)
    assert all(hasattr(package, name) for name in raised)
    model, inputs = stack()
    before = model.state_dict()["head.weight"].clone()
    names: dict[str, Any] = {
        "model": model,
        "megacompile": megacompile,
        "torch": torch,
        "data": [(batch(i)["x"], batch(i)["y"]) for i in range(2)],
    }
    exec(compile(textwrap.dedent(text.split("Example::")[1]), "<docstring>", "exec"), names)
    assert names["model"] is model and schedules(model) != []
    assert not equal(model.state_dict()["head.weight"], before), "it trained"
    assert all(p.grad is None for p in model.parameters())
    assert sorted(package.__all__) == package.__all__
    assert all(getattr(package, name).__doc__ for name in package.__all__)
    assert {name for name in vars(errors) if name.endswith("Error")} <= set(package.__all__)


class Broken(nn.Module):
    """Two layers, and a graph break between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).relu()
        torch._dynamo.graph_break()
        return self.second(hidden).square().mean()


def test_each_captured_graph_and_kind_of_call_has_a_schedule() -> None:
    _, model = twins(Broken())
    step(model, {"x": batch()["x"]})
    assert [schedule.name for schedule in schedules(model)] == ["Broken", "Broken.1"]
    with torch.no_grad():
        model(batch()["x"])
    assert [schedule.backward is None for schedule in schedules(model)].count(True) == 2
    assert len(schedules(model)) == 4


# One model, that makes two steps: the second adds to the gradients of the first.


class Watched:
    """What was verified and run of it."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Schedule]] = []
        _, self.model = twins(stack()[0])
        looks = {
            vars(inside)["proof"].verify: self._look("verified"),
            vars(inside)["Executor"].__init__: self._look("made"),
        }
        with watched(looks):
            step(self.model, batch())
            self.first = schedules(self.model)[0]
            with trace(self.model) as self.traced:
                step(self.model, batch())
        (self.schedule,) = schedules(self.model)

    def _look(self, what: str) -> Any:
        def look(frame: FrameType) -> None:
            self.events.append((what, frame.f_locals["schedule"]))

        return look


@pytest.fixture(scope="module")
def stepped() -> Watched:
    return Watched()


def test_schedules_are_verified_before_they_run(stepped: Watched) -> None:
    kinds = [what for what, _ in stepped.events]
    assert kinds == ["verified", "made"] * (len(kinds) // 2) and len(kinds) > 2
    verified, made = ([s for what, s in stepped.events if what == k] for k in ("verified", "made"))
    for mine, theirs in zip(verified, made, strict=True):
        assert mine.code().splitlines()[2:] == theirs.code().splitlines()[2:]  # but for `lower`


def test_print_shows_what_ran(stepped: Watched, capsys: pytest.CaptureFixture[str]) -> None:
    """The newest schedule; its ops are, one by one, the spans that were traced."""
    assert "fetch_grad" not in str(stepped.first) and "fetch_grad" in str(stepped.schedule)
    print(stepped.schedule)
    printed = capsys.readouterr().out
    shown = re.findall(r"# (?:compute|h2d|d2h) +(\S+)", printed)
    ran = [span.op.name for span in stepped.traced.spans]
    assert ran == [label for label in shown if label not in ("BEGIN", "FREE", "WAIT")]


def test_the_history_has_every_pass_and_what_it_did(stepped: Watched) -> None:
    schedule, history = stepped.schedule, stepped.schedule.history
    names = [record.name for record in history]
    assert names[0] == "checkpoints" and names[-1] == "lower" and len(set(names)) == len(names)
    first = names.index("partition")
    for part in (history[:first], history[first:]):
        for earlier, later in zip(part, part[1:], strict=False):
            assert later.before == earlier.after, f"{later.name} goes on behind {earlier.name}"
    final = [ops.actions(graph) for graph in schedule.graphs.values()]
    assert history[-1].after.splitlines() == final
    after = {record.name: record.after for record in history}
    assert after["partition"] == "0F 1F 2F 3F 4F"
    assert after["plan"] == "0F 1F 2F 3F 4F\n4B 3B 2B 1B 0B"
    assert "2PREFETCH@2 0F 3PREFETCH@0 1F" in after["slots"]


TAKEN = """
import gc, torch
from pathlib import Path
from torch import nn
from megacompile import megacompile

def resident():
    gc.collect()
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(x.split()[1]) for x in lines if x.startswith("VmRSS:")) * 1024

megacompile(nn.Linear(2, 2), device="cpu", progress=False)  # imports
torch.zeros(2**23 - 2**10)  # malloc's threshold rises when a mapping is freed
before = resident()
model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(16)))
size = sum(p.nbytes for p in model.parameters())
megacompile(model, device="cpu", progress=False)
print((resident() - before) / size)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="about the GNU C library's malloc")
def test_what_parameters_leave_goes_back_to_the_system() -> None:
    """They take their memory once."""
    assert float(python("-c", TAKEN).stdout) < 1.3


# Progress.
