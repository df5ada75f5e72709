"""Every option: what is taken, what is filled in, and what is refused with which error."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest
import torch
from torch import nn

from megacompile import Activations, Head, Lowering, OptionError, Options, megacompile
from megacompile.errors import OptionTypeError
from tests import inside

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


# --- defaults


def test_defaults_on_the_cpu(no_cuda: None) -> None:
    assert Options.resolve() == Options(CPU, Lowering.EAGER, lookahead=2, slots=None, progress=None)


def test_options_are_those_of_the_front_door() -> None:
    """An option that `megacompile()` takes is an option, with the same default, and no other is."""
    taken = dict(inspect.signature(megacompile).parameters)
    del taken["model"], taken["checkpoint"], taken["removed"]  # no options
    resolved = dict(inspect.signature(Options.resolve).parameters)
    assert {n: p.default for n, p in taken.items()} == {n: p.default for n, p in resolved.items()}
    assert list(resolved) == [field.name for field in dataclasses.fields(Options)]
    assert all(p.kind is p.KEYWORD_ONLY for p in (*taken.values(), *resolved.values()))


NOT_ASKED = {"optimizer", "mesh"}  # of which an object of no known class may be one


@pytest.mark.parametrize("name", sorted(f.name for f in dataclasses.fields(Options)))
def test_the_front_door_hands_every_option_on(name: str) -> None:
    """One that it forgot would be at its default, unnoticed."""
    with pytest.raises((OptionError, TypeError, AttributeError)) as caught:
        given: dict[str, Any] = {name: object()}
        megacompile(nn.Linear(2, 2), **given)
    assert name in NOT_ASKED or name in str(caught.value)


# --- good values


@pytest.mark.parametrize(
    ("given", "field", "wanted"),
    [
        ({"lowering": "inductor"}, "lowering", Lowering.INDUCTOR),
        ({"lowering": Lowering.INDUCTOR}, "lowering", Lowering.INDUCTOR),
        ({}, "head", Head.AUTO),
        ({"head": "whole"}, "head", Head.WHOLE),
        ({"lookahead": 100}, "lookahead", 100),
        ({"lookahead": 5}, "least_slots", 6),  # slots follow the lookahead
        ({"lookahead": 1, "slots": 2}, "slots", 2),
        ({"slots": 9}, "least_slots", 9),
        ({}, "activations", Activations.AUTO),
        ({"activations": "selective"}, "activations", Activations.SELECTIVE),
        ({"progress": False}, "progress", False),
        ({"device": "cpu:0"}, "device", CPU),  # there is one CPU, however it is called
    ],
)
def test_good_values(no_cuda: None, given: dict[str, Any], field: str, wanted: object) -> None:
    assert getattr(Options.resolve(**given), field) == wanted


@pytest.mark.parametrize(
    ("given", "wanted"),
    [(None, 1), ("cuda", 1), ("cuda:0", 0), (torch.device("cuda", 1), 1), (0, 0)],
)
def test_cuda_devices_get_an_index(two_gpus: None, given: Any, wanted: int) -> None:
    """The current one, if none is named."""
    options = Options.resolve(device=given)
    assert options.device == torch.device("cuda", wanted)
    assert options.lowering is Lowering.INDUCTOR


def test_the_lowering_follows_the_device(two_gpus: None) -> None:
    assert Options.resolve(device="cpu").lowering is Lowering.EAGER
    assert Options.resolve(device="cuda", lowering="eager").lowering is Lowering.EAGER
    assert Options.resolve(device="cpu", lowering="inductor").lowering is Lowering.INDUCTOR


# --- refused


OUT_OF_RANGE: list[dict[str, Any]] = [
    {"lookahead": 0},
    *({"slots": n, "lookahead": k} for n, k in ((1, 1), (2, 2), (4, 4))),
    *({"lowering": text} for text in ("triton", "Eager", "")),
    {"activations": "host"},
    *({"device": text} for text in ("gpu", "", "meta", "mps", -1, "cuda", 0)),
    {"resident": "some"},
    {"head": "chunks"},
]
WRONG_TYPE: list[dict[str, Any]] = [
    *({"lookahead": value} for value in (2.0, "2", True, None)),
    *({"slots": value} for value in (3.0, True)),
    {"lowering": True},
    {"head": None},
    {"activations": 0.5},
    *({"device": value} for value in (1.0, True)),
    {"progress": 1},
    {"optimizer": torch.optim.AdamW},
]


@pytest.mark.parametrize("given", [*OUT_OF_RANGE, *WRONG_TYPE], ids=str)
def test_what_is_refused(no_cuda: None, given: dict[str, Any]) -> None:
    is_type = given in WRONG_TYPE
    with pytest.raises(OptionTypeError if is_type else OptionError) as caught:
        Options.resolve(**given)
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, TypeError) == is_type
    assert str(caught.value).startswith("megacompile(): ") and next(iter(given)) in str(
        caught.value
    )


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


def test_options_are_given_by_name() -> None:
    with pytest.raises(TypeError, match="positional"):
        megacompile(nn.Linear(2, 2), "cpu")  # type: ignore[call-arg]


# --- differences


def test_differences_name_what_changed(no_cuda: None) -> None:
    mine = Options.resolve(device="cpu")
    theirs = Options.resolve(device="cpu", lookahead=4, progress=False)
    assert mine.differences(theirs) == [
        "lookahead: 2 -> 4",
        "progress: None -> False",
    ]
    assert mine.differences(Options.resolve()) == []
