"""Every option: what is taken, what is filled in, and what is refused with which error."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from typing import Any

import pytest
import torch
from torch import nn

import megacompile as module
from megacompile import Activations, Head, Lowering, Options, megacompile
from megacompile.errors import OptionError
from tests import inside
from tests.sources import ROOT

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
    {"lookahead": 0},
    *({"slots": n, "lookahead": k} for n, k in ((1, 1), (4, 4))),
    *({"lowering": text} for text in ("Eager", "")),
    {"activations": "host"},
    *({"device": text} for text in ("gpu", "", "meta", "mps", -1, "cuda", 0)),
    {"resident": "some"},
    {"head": "chunks"},
    *({"lookahead": value} for value in (2.0, "2", True, None)),
    {"slots": True},
    {"lowering": True},
    {"head": None},
    {"activations": 0.5},
    *({"device": value} for value in (1.0, True)),
    {"progress": 1},
    {"optimizer": torch.optim.AdamW},
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


def test_a_refused_option_leaves_the_model_as_it_was() -> None:
    model = nn.Linear(2, 2)
    before = model.weight.data_ptr()
    with pytest.raises(OptionError):
        megacompile(model, lookahead=0)
    assert not inside.is_streamed(model)
    assert model.weight.data_ptr() == before


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
