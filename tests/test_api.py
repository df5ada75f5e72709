"""The front door: `megacompile()` and `schedules()`, and what they say."""

from __future__ import annotations

import inspect
import io
import re
import sys
import textwrap
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megacompile as package
from megacompile import ModelError, Schedule, api, compat, megacompile, schedules, updates
from megacompile.ir import ops
from megacompile.options import Options
from megacompile.runtime.model.streamed import StreamedModel
from megacompile.runtime.ops import executor
from megacompile.runtime.ops.executor import Executor
from tests import inside
from tests.zoo import WIDTH, batch, equal, stack, step, tied, twins

PASSES = [
    *("unpack", "numbers", "vmaps", "experts", "rebase", "causal", "chunk"),
    "partition",
    "strides",
    "templates",
    "differentiate",
    "plan",
    "split",
    "recompute",
    "rerun",
    "offload_saved",
    "offload_grad",
    "update_graph",
    "prefetch",
    "slots",
    "free",
    "tokens",
    "lower",
]


# --- the call


def test_the_model_is_changed_in_place_and_returned() -> None:
    model, _ = tied()
    kind, params, state = type(model), dict(model.named_parameters()), model.state_dict()
    keys = list(state)
    attributes = set(vars(model))
    assert megacompile(model, device="cpu") is model
    assert type(model) is kind
    assert list(model.state_dict()) == keys
    assert all(model.get_parameter(name) is param for name, param in params.items())
    assert all(equal(model.state_dict()[key], state[key]) for key in keys)
    assert set(vars(model)) - attributes <= {
        "_compiled_call_impl",
        "_apply",
        "_call_impl",
        "compile",
    }


def test_a_second_call_with_the_same_options_changes_nothing() -> None:
    _, model = twins(stack()[0])
    step(model, batch())
    before = schedules(model)
    assert megacompile(model, device="cpu", lowering="eager") is model
    assert all(a is b for a, b in zip(schedules(model), before, strict=True))


def test_the_example_of_the_docstring_runs() -> None:
    """As it stands there, on a model that takes (x, y) and gives a loss."""
    text = inspect.getdoc(megacompile)
    assert text is not None
    example = textwrap.dedent(text.split("Example::")[1])
    model, inputs = stack()
    before = model.state_dict()["head.weight"].clone()
    names: dict[str, Any] = {
        "model": model,
        "megacompile": megacompile,
        "torch": torch,
        "data": [(batch(i)["x"], batch(i)["y"]) for i in range(2)],
    }
    exec(compile(example, "<docstring>", "exec"), names)
    assert names["model"] is model
    assert schedules(model) != []
    assert not equal(model.state_dict()["head.weight"], before), "it trained"
    assert all(p.grad is None for p in model.parameters())
    assert float(model(**inputs).detach()) > 0


def test_the_docstring_names_every_option() -> None:
    text = inspect.getdoc(megacompile) or ""
    described = re.findall(
        r"^    (\w+): ", text.partition("Args:")[2].partition("Raises:")[0], re.M
    )
    assert described == list(inspect.signature(megacompile).parameters)
    raised = re.findall(r"^    (\w+Error): ", text.partition("Raises:")[2], re.M)
    assert {"ModelError", "OptionError", "HostMemoryError"} <= set(raised)
    assert all(hasattr(package, name) for name in raised)


def test_everything_public_is_there() -> None:
    assert sorted(package.__all__) == package.__all__
    for name in package.__all__:
        assert getattr(package, name).__doc__, name


# --- schedules()


@pytest.mark.parametrize("called", [False, True])
def test_schedules_of_a_plain_model_is_an_error(called: bool) -> None:
    model = nn.Linear(2, 2)
    if called:
        model(torch.ones(1, 2))
    with pytest.raises(ModelError, match=r"schedules\(\): Linear is not megacompiled; call model"):
        schedules(model)


def test_schedules_of_a_compiled_model_is_an_error() -> None:
    model = nn.Linear(2, 2)
    model.compile(backend="eager")
    with pytest.raises(ModelError, match="Linear is not megacompiled"):
        schedules(model)


def test_there_are_no_schedules_before_the_first_call() -> None:
    _, model = twins(stack()[0])
    assert schedules(model) == []


class Broken(nn.Module):
    """Two layers, and a graph break between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).relu()
        torch._dynamo.graph_break()
        result: Tensor = self.second(hidden).square().mean()
        return result


def test_each_captured_graph_and_kind_of_call_has_a_schedule() -> None:
    _, model = twins(Broken())
    step(model, {"x": batch()["x"]})
    found = schedules(model)
    assert [schedule.name for schedule in found] == ["Broken", "Broken.1"]
    with torch.no_grad():
        model(batch()["x"])
    assert [schedule.backward is None for schedule in schedules(model)].count(True) == 2
    assert len(schedules(model)) == 4


# --- the history


@pytest.fixture(scope="module")
def accumulating() -> Schedule:
    """The schedule of a second step, which adds to the gradients of the first."""
    _, model = twins(stack()[0])
    step(model, batch())
    assert "fetch_grad" not in str(schedules(model)[0]), "the newest is shown"
    step(model, batch())
    (schedule,) = schedules(model)
    return schedule


def test_the_history_has_every_pass(accumulating: Schedule) -> None:
    schedule, history = accumulating, accumulating.history
    assert [record.name for record in history] == PASSES
    assert all(record.time_s >= 0 for record in history)
    assert sum(record.time_s for record in history) > 0
    captured, made = history[:7], history[7:]
    assert captured[0].before.split(), "the captured graph"
    assert made[0].before == "", "partition starts from nothing"
    for earlier, later in [
        *zip(captured, captured[1:], strict=False),
        *zip(made, made[1:], strict=False),
    ]:
        assert later.before == earlier.after, f"{later.name} goes on where {earlier.name} stopped"
    final = [ops.actions(graph) for graph in schedule.graphs.values()]
    assert history[-1].after.splitlines() == final
    assert history[-1].nodes == sum(len(graph.nodes) for graph in schedule.graphs.values())


def test_the_history_shows_what_each_pass_did(accumulating: Schedule) -> None:
    after = {record.name: record.after for record in accumulating.history}
    assert after["partition"] == "0F 1F 2F 3F 4F"
    assert after["templates"] == after["partition"]
    assert after["differentiate"] == "0F 1F 2F 3F 4F\n4B 3B 2B 1B 0B"
    assert after["plan"] == after["differentiate"]
    assert after["recompute"].splitlines()[1].startswith("4B 3RECOMPUTE 3B 2RECOMPUTE 2B ")
    assert "3FETCH_GRAD 3RECOMPUTE 3B 3ADD_GRAD 3OFFLOAD_GRAD" in after["offload_grad"]
    assert "2PREFETCH@? 0F 3PREFETCH@? 1F" in after["prefetch"]
    assert "2PREFETCH@2 0F 3PREFETCH@0 1F" in after["slots"]
    assert "4REUSE@1 3REUSE@0 2REUSE@2" in after["slots"]
    assert after["free"] == after["lower"] == after["slots"], "frees are left out of the actions"


def test_options_reach_the_passes() -> None:
    _, model = twins(stack()[0], lookahead=1, slots=4)
    with torch.no_grad():
        model(**batch())
    (schedule,) = schedules(model)
    assert len(schedule.slots) == 4
    assert ops.actions(schedule.forward).startswith("0PREFETCH@2 1PREFETCH@0 0F 2PREFETCH@3 1F")
    assert inside.streamed(model).options == Options.resolve(
        device="cpu", lowering="eager", lookahead=1, slots=4
    )


# --- what is printed


def test_print_shows_what_ran(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lines of ops that are printed are, one by one, the calls that were made."""
    calls: list[str] = []
    plain = executor._ranged

    def noted(function: Any, op: ops.Op) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            calls.append(op.label(args))
            return function(*args, **kwargs)

        return plain(run, op)

    monkeypatch.setattr(executor, "_ranged", noted)
    monkeypatch.setattr(compat, "profiler_enabled", lambda: True)
    _, model = twins(stack()[0])
    step(model, batch())
    (schedule,) = schedules(model)
    print(schedule)
    printed = capsys.readouterr().out
    shown = re.findall(r"# (?:compute|h2d|d2h) +(\S+)", printed)
    assert calls == [label for label in shown if label not in ("FREE", "WAIT")]


def test_the_newest_schedule_is_shown(accumulating: Schedule) -> None:
    """The first backward writes, the second adds; the code that is shown is that of the second."""
    assert "fetch_grad" in str(accumulating)


def test_schedules_are_verified_before_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    verified: list[Schedule] = []
    made: list[Schedule] = []
    monkeypatch.setattr("megacompile.plan.compiler.verify", verified.append)
    plain = Executor.__init__

    def init(self: Executor, schedule: Schedule, machine: Any) -> None:
        made.append(schedule)
        plain(self, schedule, machine)

    monkeypatch.setattr(Executor, "__init__", init)
    _, model = twins(stack()[0])
    step(model, batch())
    step(model, batch())
    assert len(verified) == len(made) > 1
    for mine, theirs in zip(verified, made, strict=True):
        assert mine.code().splitlines()[2:] == theirs.code().splitlines()[2:]  # but for `lower`


# --- progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(monkeypatch: pytest.MonkeyPatch, stderr: io.StringIO, **options: Any) -> str:
    """What `megacompile()` and a step write to stderr."""
    monkeypatch.setattr(sys, "stderr", stderr)
    model, inputs = stack()
    step(megacompile(model, device="cpu", **options), inputs)
    return stderr.getvalue()


def test_nothing_is_shown_where_stderr_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shown(monkeypatch, io.StringIO()) == ""
    assert capsys.readouterr().out == ""


def test_progress_is_shown_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(monkeypatch, Terminal())
    assert "megacompile: moving parameters to the host" in text


@pytest.mark.parametrize(("progress", "terminal"), [(True, io.StringIO), (False, Terminal)])
def test_progress_is_an_option(
    monkeypatch: pytest.MonkeyPatch, progress: bool, terminal: type[io.StringIO]
) -> None:
    text = shown(monkeypatch, terminal(), progress=progress)
    assert ("moving parameters to the host" in text) is progress


def test_eager_stages_need_no_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are traced at once; a bar would only flicker."""
    text = shown(monkeypatch, Terminal(), lowering="eager")
    assert "compiling stages" not in text


# --- numbers


@pytest.mark.parametrize(
    "device, lowering", [("cuda", "inductor"), ("cuda", "eager"), ("cpu", "inductor")]
)
def test_the_workers_that_compile_start_before_parameters_move(
    device: str, lowering: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of Inductor, for a GPU; then they are ready when stages are compiled."""
    events = []

    class Moving(StreamedModel):
        def __init__(self, *args: Any) -> None:
            events.append("parameters")
            raise StopIteration

    options = Options.resolve(device="cpu", lowering=lowering, resident=0)
    options = replace(options, device=torch.device(device))
    monkeypatch.setattr(Options, "resolve", lambda **_: options)
    monkeypatch.setattr(compat, "start_compile_workers", lambda: events.append("workers"))
    monkeypatch.setattr(api, "StreamedModel", Moving)
    with pytest.raises(StopIteration):
        megacompile(stack()[0])
    started = (device, lowering) == ("cuda", "inductor")
    assert events == (["workers", "parameters"] if started else ["parameters"])


def test_a_step_has_the_plain_numbers() -> None:
    plain, model = twins(stack()[0])
    losses: list[Tensor] = [step(each, batch()) for each in (plain, model)]
    assert equal(*losses)
    for mine, theirs in zip(plain.parameters(), model.parameters(), strict=True):
        assert equal(mine.grad, theirs.grad)


def test_how_the_last_step_was_carried_out() -> None:
    model = megacompile(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), device="cpu")
    optimizer = torch.optim.AdamW(model.parameters())
    assert updates(model) == {}
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert set(updates(model).values()) == {"torch.optim"}
    with pytest.raises(ModelError, match=r"updates\(\): Linear is not megacompiled"):
        updates(nn.Linear(2, 2))
