"""Optimizer states on a disk: the same numbers, checkpoints, limits and errors as in memory."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW

from megacompile import megacompile
from megacompile.errors import DiskError, OptionError, OptionTypeError
from megacompile.options import Options
from megacompile.runtime.model.lookup import streamed_model

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="scratch files are for Linux"),
    pytest.mark.filterwarnings("ignore:megacompile. disk=.* has no direct I/O"),
]

MODES: dict[str, dict[str, Any]] = {
    "exact": {},
    "in the backward": {"optimizer": True},
    "8 bits": {"state_dtype": "int8"},
    "8 bits, in the backward": {"state_dtype": "int8", "optimizer": True},
    "bfloat16 computed": {"compute_dtype": torch.bfloat16},
}


def trained(folder: Path | None, steps: int = 4, kind: Any = AdamW, **options: Any) -> Any:
    """A small model that took some steps, and its optimizer."""
    torch.manual_seed(0)
    layers = [nn.Linear(8, 64), *(nn.Linear(64, 64) for _ in range(3)), nn.Linear(64, 8)]
    model = nn.Sequential(*(m for layer in layers for m in (layer, nn.Tanh())))
    optimizer = kind(model.parameters(), lr=0.01)
    if options.pop("optimizer", False):
        options["optimizer"] = optimizer
    megacompile(model, device="cpu", lowering="eager", disk=folder, **options)
    run(model, optimizer, steps)
    return model, optimizer


def run(model: Any, optimizer: Any, steps: int, first: int = 0) -> None:
    for k in range(first, steps):
        optimizer.zero_grad()
        x = torch.randn(3, 8, generator=torch.Generator().manual_seed(k))
        model(x).square().mean().backward()
        optimizer.step()


def states(optimizer: Any) -> list[torch.Tensor]:
    found = optimizer.state_dict()["state"]
    return [v.clone() for s in found.values() for v in s.values() if isinstance(v, torch.Tensor)]


def same(one: Any, other: Any) -> bool:
    pairs = [*zip(one[0].parameters(), other[0].parameters(), strict=True)]
    pairs += [*zip(states(one[1]), states(other[1]), strict=True)]
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [AdamW, SGD, Adam])
def test_the_same_numbers(tmp_path: Path, mode: str, kind: Any) -> None:
    options = MODES[mode]
    if kind is SGD:
        kind = functools.partial(SGD, momentum=0.9)
    on_disk = trained(tmp_path, kind=kind, **options)
    assert same(on_disk, trained(None, kind=kind, **options))
    disk = streamed_model(on_disk[0], "test").machine.disk
    assert disk is not None and disk.file.used_bytes > 0 and disk.file.process == os.getpid()


def test_checkpoints_go_to_and_from_a_disk(tmp_path: Path) -> None:
    expected = trained(None, 8)
    for before, after in ((tmp_path, None), (None, tmp_path), (tmp_path, tmp_path)):
        model, optimizer = trained(before)
        torch.save((model.state_dict(), optimizer.state_dict()), tmp_path / "checkpoint.pt")
        weights, loaded = torch.load(tmp_path / "checkpoint.pt")
        other, its = trained(after, 0)
        other.load_state_dict(weights)
        its.load_state_dict(loaded)
        run(other, its, 8, first=4)
        assert same((other, its), expected)


@pytest.mark.parametrize("mode", MODES)
def test_states_that_the_user_changes(tmp_path: Path, mode: str) -> None:
    found = []
    for folder in (tmp_path, None):
        model, optimizer = trained(folder, **MODES[mode])
        for state in optimizer.state.values():
            state["exp_avg"].mul_(0.5)
        run(model, optimizer, 8, first=4)
        found.append((model, optimizer))
    assert same(*found)


def test_the_limit_is_found_at_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(DiskError, match="disk_memory=8 KiB is too small"):
        trained(tmp_path, disk_memory="8KiB")


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"disk": 3}, OptionTypeError, "option 'disk' got 3 .*needed None or the path"),
        ({"disk": "/absent/folder"}, OptionError, "got disk='/absent/folder'; needed a folder"),
        ({"disk_memory": 2**30}, OptionError, "got disk_memory=1073741824 without disk="),
        ({"disk": "/tmp", "disk_memory": -1}, OptionError, "got disk_memory=-1"),
        (
            {"disk": "/tmp", "device_update": 0.5, "lowering": "inductor"},
            OptionError,
            "device_update=0.5 with disk='/tmp'",
        ),
    ],
)
def test_options_that_are_refused(options: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        Options.resolve(device="cpu", **options)
