"""Every option: what is taken, what is filled in, and what is refused with which error.

And what megacompile says while it works: the log by subject, warnings, one line on stderr.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import io
import logging
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import megacompile as module
from megacompile import (
    Activations,
    Head,
    Lowering,
    Options,
    megacompile,
    notices,
    progress,
    schedules,
)
from megacompile.errors import OptionError
from tests.sources import ROOT
from tests.training import adamw, data, net

CPU = torch.device("cpu")


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with cuda:0 and cuda:1, the second of them current."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)


def parameters() -> dict[str, Any]:
    """The defaults of what a user can pass, by name, in the order of the signature."""
    taken = list(inspect.signature(megacompile).parameters.values())
    assert taken[0].name == "model"
    assert all(p.kind is p.KEYWORD_ONLY for p in taken[1:])
    return {p.name: p.default for p in taken[1:]}


def test_options_are_those_of_the_front_door_and_of_the_page() -> None:
    """With defaults, in the signature's order; each for experts has its docstring line."""
    taken = parameters()
    page = (ROOT / "docs" / "options.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| `([^`]+)` \| ", page, re.MULTILINE)
    assert [(name, ast.literal_eval(value)) for name, value in rows] == list(taken.items())
    text = inspect.cleandoc(megacompile.__doc__ or "").partition("\nArgs:\n")[2]
    lines = re.findall(r"^    (\w+): ", text.partition("\n\nRaises:")[0], re.MULTILINE)
    assert lines == ["model", *taken]
    experts = re.findall(r"^\| `(\w+)` ", page.partition("\n## For experts\n")[2], re.MULTILINE)
    assert experts == list(taken)[list(taken).index("resident") :]
    for name, following in zip(experts, experts[1:], strict=False):
        assert re.search(rf"^    {name}: .+\n    {following}: ", text, re.MULTILINE), name
    del taken["checkpoint"]  # values of the model
    assert list(taken) == [field.name for field in dataclasses.fields(Options)]
    assert Options.resolve(**taken) == Options.resolve()


def test_a_page_names_every_function() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    text = "\n".join(page.read_text() for page in pages if page.name != "design.md")
    names = [name for name in module.__all__ if inspect.isfunction(getattr(module, name))]
    assert [name for name in names if f"{name}(" not in text] == []


NOT_ASKED = {"optimizer", "mesh"}  # of which an object of no known class may be one


@pytest.mark.parametrize("name", sorted(f.name for f in dataclasses.fields(Options)))
def test_the_front_door_hands_every_option_on(name: str) -> None:
    """One that it forgot would be at its default, unnoticed."""
    with pytest.raises((OptionError, TypeError, AttributeError)) as caught:
        given: dict[str, Any] = {name: object()}
        megacompile(nn.Linear(2, 2), **given)
    assert name in NOT_ASKED or name in str(caught.value)


@pytest.mark.parametrize(
    ("given", "field", "wanted"),
    [
        ({}, "device", CPU),
        ({"device": "cpu:0"}, "device", CPU),  # there is one CPU, however it is called
        ({}, "lowering", Lowering.EAGER),
        ({"lowering": "inductor"}, "lowering", Lowering.INDUCTOR),
        ({"lowering": Lowering.INDUCTOR}, "lowering", Lowering.INDUCTOR),
        ({"head": "whole"}, "head", Head.WHOLE),
        ({"lookahead": 5}, "least_slots", 6),  # slots follow the lookahead
        ({"lookahead": 1, "slots": 2}, "slots", 2),
        ({"slots": 9}, "least_slots", 9),
        ({}, "activations", Activations.AUTO),
        ({"activations": "selective"}, "activations", Activations.SELECTIVE),
    ],
)
def test_good_values(no_cuda: None, given: dict[str, Any], field: str, wanted: object) -> None:
    assert getattr(Options.resolve(**given), field) == wanted


@pytest.mark.parametrize(
    ("given", "wanted"),
    [(None, 1), ("cuda", 1), ("cuda:0", 0), (torch.device("cuda", 1), 1), (0, 0)],
)
def test_cuda_devices_get_an_index(two_gpus: None, given: Any, wanted: int) -> None:
    """The current one, if none is named. The lowering follows the device."""
    options = Options.resolve(device=given)
    assert options.device == torch.device("cuda", wanted)
    assert options.lowering is Lowering.INDUCTOR
    assert Options.resolve(device=given, lowering="eager").lowering is Lowering.EAGER
    assert Options.resolve(device="cpu").lowering is Lowering.EAGER


REFUSED: list[dict[str, Any]] = [
    *({"slots": n, "lookahead": k} for n, k in ((1, 1), (4, 4), (True, 1))),
    *({"lookahead": value} for value in (0, 2.0, "2", True, None)),
    *({"lowering": value} for value in ("Eager", "", True)),
    *({"activations": value} for value in ("host", 0.5)),
    *({"head": value} for value in ("chunks", None)),
    *({"device": value} for value in ("gpu", "", "meta", "mps", -1, "cuda", 0, 1.0, True)),
    *({"resident": "some"}, {"progress": 1}, {"optimizer": torch.optim.AdamW}),
]


@pytest.mark.parametrize("given", REFUSED, ids=str)
def test_what_is_refused(no_cuda: None, given: dict[str, Any]) -> None:
    with pytest.raises(OptionError) as caught:
        Options.resolve(**given)
    assert isinstance(caught.value, ValueError) and next(iter(given)) in str(caught.value)


@pytest.mark.parametrize("given", [2, torch.device("cuda", 7), 128, 256, 2**40])
def test_an_index_that_torch_would_wrap(two_gpus: None, given: int) -> None:
    """torch.device("cuda", 256) is cuda:0: an index of 8 bits."""
    with pytest.raises(OptionError, match=str(given)):
        Options.resolve(device=given)


WRITTEN: dict[Any, int] = {
    17: 17,
    1: 1,
    "20GiB": 20 * 2**30,
    "1.5 MiB": 3 * 2**19,
    "2GB": 2 * 10**9,
    "512 kib": 2**19,
    "7": 7,
    "7B": 7,
}


def taken(value: Any) -> int:
    found = Options.resolve(device="cpu", host_memory=value).host_memory
    assert isinstance(found, int)
    return found


def test_sizes() -> None:
    for value, size in WRITTEN.items():
        assert taken(value) == size, value
    assert taken(0.25) == taken(1.0) // 4 > 2**20, "of what there is"
    nothing = (True, [1], 1j)
    for wrong in (-1, -0.5, 1.5, float("nan"), "20 bananas", "", "GiB", "-3GiB", *nothing):
        with pytest.raises(OptionError, match="host_memory"):
            taken(wrong)


VARIABLE, INFO, DEBUG = "MEGACOMPILE_LOG", logging.INFO, logging.DEBUG


def configured(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """The variable is read when a model is made."""
    monkeypatch.setenv(VARIABLE, value)
    megacompile(nn.Linear(2, 2), device="cpu")


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test begins and ends without the variable."""
    configured(monkeypatch, "")
    yield
    configured(monkeypatch, "")


def levels() -> dict[str, int]:
    """Of the subjects that have one."""
    found = logging.root.manager.loggerDict.items()
    subjects = {k.partition(".")[2]: v for k, v in found if k.startswith("megacompile.")}
    return {k: v.level for k, v in subjects.items() if isinstance(v, logging.Logger) and v.level}


def one_step(**options: Any) -> tuple[nn.Module, list[Any]]:
    model = megacompile(net(), device="cpu", lowering="eager", **options)
    optimizers: list[Any] = list(adamw(model))
    step(model, optimizers)
    return model, optimizers


def step(model: nn.Module, optimizers: list[Any]) -> None:
    model(**data(0)).backward()
    for optimizer in optimizers:
        optimizer.step()


VALUES: dict[str, dict[str, int]] = {
    "": {},
    "schedule,": {"schedule": INFO},
    " +passes , plan ": {"passes": DEBUG, "plan": INFO},
}


@pytest.mark.parametrize("value", VALUES)
def test_the_variable_sets_levels_and_the_handler(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the subjects that it names; and takes them back."""
    root, memory = logging.getLogger("megacompile"), logging.getLogger("megacompile.memory")
    memory.setLevel(DEBUG)  # the user's own
    configured(monkeypatch, value)
    assert levels() == {**VALUES[value], "memory": DEBUG}
    assert len(root.handlers) == bool(value) and root.propagate == (not value)
    configured(monkeypatch, "")
    assert levels() == {"memory": DEBUG} and root.handlers == [] and root.propagate
    memory.setLevel(logging.NOTSET)


def test_an_unknown_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("schedule,plans", "+", "-plan", "schedule;plan"):
        with pytest.raises(OptionError, match="schedule"):
            configured(monkeypatch, value)
    assert levels() == {}


def test_what_is_asked_for_is_printed_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(VARIABLE, "schedule,plan")
    for value, subjects in (
        ("", set[str]()),
        ("plan,schedule", {"plan", "schedule"}),
        ("all,+schedule", {"capture", "plan", "passes", "schedule", "memory", "update", "time"}),
    ):
        monkeypatch.setenv(VARIABLE, value)
        (schedule,) = schedules(one_step()[0])
        printed = capsys.readouterr().err
        words = (line.split() for line in printed.splitlines() if " megacompile." in line)
        assert {each[2] for each in words} == {f"megacompile.{each}" for each in subjects}
        assert (schedule.table() in printed) == ("schedule" in subjects)
        assert (schedule.code() in printed) == ("+" in value), "that is DEBUG"


def shared(model: nn.Module) -> None:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    kept = [value.view(-1) for value in state.values()]
    model(torch.ones(2, 8))  # the line
    del kept


def compiled(model: nn.Module) -> None:
    model.compile()  # the line


CASES: dict[Callable[[nn.Module], None], str] = {shared: "shares its memory", compiled: "compile()"}


@pytest.mark.parametrize("run", CASES)
def test_it_points_at_the_users_line(run: Callable[[nn.Module], None]) -> None:
    model = megacompile(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), device="cpu")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(model)
    (said,) = [each for each in caught if CASES[run] in str(each.message)]
    assert said.filename == __file__
    assert "# the line" in Path(__file__).read_text().splitlines()[said.lineno - 1]


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_ranks_say_once_what_is_the_same(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 is the first one of another host. Without the process group, it is no rank."""
    monkeypatch.setenv("LOCAL_RANK", {0: "0", 1: "0", 2: "1"}[rank])
    there = True
    notices.in_rank(rank, is_first=rank == 0, is_there=lambda: there)
    notices.in_rank(rank, is_first=False, is_there=lambda: there)  # of another mesh

    def said() -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for whose in notices.Whose:
                notices.warn(whose.name, whose)
        return [str(each.message) for each in caught]

    of_ranks, there = said(), False
    assert of_ranks == ["ALL", "HOST", "RANK"][rank:2] + [f"rank {rank}: RANK"]
    assert said() == ["ALL", "HOST", "RANK"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[str]]]:
    """What the line has said since it was asked last, "" where it was gone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # without rates, so without predictions
    made, before = Terminal(), sys.stderr

    def shown() -> list[str]:
        texts = [t.partition("megacompile: ")[2] for t in made.getvalue().split("\r\x1b[K")[1:]]
        made.seek(0)
        made.truncate(0)
        sys.stderr = made  # pytest puts its own there when a test begins
        return texts

    yield shown
    sys.stderr = before


FIRST = (
    *("capturing the model", "planning the step", "running the first step"),
    *("running the first backward", "allocating host memory", "preparing the update"),
)


SHORT = ("moving parameters to the host", "compiling stages")  # seen on a busy machine alone


def test_the_first_step_says_what_it_waits_for(
    terminal: Callable[[], list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    """Each in its turn; the next step says nothing, nor one that may not: its log has times."""
    terminal()
    model, optimizers = one_step()
    texts = terminal()
    said = dict.fromkeys(text.removesuffix(" ...") for text in texts if text)
    assert [text for text in said if text not in SHORT] == [*FIRST]
    assert texts[-1] == ""
    step(model, optimizers)
    with caplog.at_level(INFO, "megacompile.time"):
        one_step(progress=False)
    assert terminal() == []
    sys.stderr = io.StringIO()
    one_step(progress=True)  # which is asked for
    assert "moving parameters to the host" in sys.stderr.getvalue()
    took = [record.getMessage() for record in caplog.records if record.name == "megacompile.time"]
    names = [text.partition(" took ")[0] for text in took]
    assert names.count(FIRST[0]) == 1 and {*names} <= {*FIRST, *SHORT}, names
    sys.stderr = io.StringIO()
    one_step()
    assert "\r" not in sys.stderr.getvalue(), "off a terminal"


def test_a_later_capture_says_what_it_waits_for(terminal: Callable[[], list[str]]) -> None:
    """On a terminal alone, and not the calls after it."""
    terminal()
    model, optimizers = one_step(dynamic=False)
    terminal()
    longer = {name: torch.cat([value, value]) for name, value in data(0).items()}
    model(**longer)
    texts = terminal()
    assert [*filter(None, dict.fromkeys(texts))] == [
        "capturing the model ...",
        "planning the step ...",
    ]
    assert texts[-1] == ""
    model(**longer)
    step(model, optimizers)
    assert terminal() == []
    sys.stderr = io.StringIO()
    model(**{name: torch.cat([value] * 3) for name, value in data(0).items()})
    assert "\r" not in sys.stderr.getvalue(), "off a terminal"


def test_off_a_terminal_long_work_has_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the first rank alone, and with its time when it is over."""
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        with progress.line("this", None):
            time.sleep(1.7)
            progress.now("that")
    begins, ends = capsys.readouterr().err.splitlines()
    assert begins == "megacompile: this ..." and ends.startswith("megacompile: this took ")


def test_it_is_gone_when_the_step_fails(terminal: Callable[[], list[str]]) -> None:
    terminal()
    model = megacompile(net(), device="cpu", lowering="eager")

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    model.layers[1].register_forward_hook(torch.compiler.disable(interrupt))
    with pytest.raises(KeyboardInterrupt):
        model(**data(0))
    assert terminal()[-1] == ""
