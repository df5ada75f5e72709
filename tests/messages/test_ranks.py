"""What is said of ranks that share a model: the full text of each error, and how to provoke it."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adafactor, AdamW

from megacompile import Explanation, explain, megacompile
from megacompile.cli import main
from megacompile.errors import (
    MegacompileError,
    ModelError,
    OptimizerError,
    OptionError,
)
from tests import quantized
from tests.configs import CONFIG
from tests.equality.nets import net
from tests.messages.said import assert_says, heard
from tests.processes import group_of_one


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    with group_of_one(datetime.timedelta(seconds=20)):
        yield init_device_mesh("cpu", (1,))


def shared(mesh: Any, model: nn.Module | None = None, **options: Any) -> Any:
    return megacompile(model or net(), mesh=mesh, device="cpu", **options)


def step(model: Any) -> None:
    model(torch.ones(3, 4)).square().mean().backward()


def scalar() -> nn.Module:
    model = nn.Linear(2, 2)
    model.scale = nn.Parameter(torch.tensor(1.0))
    return model


def hooked() -> nn.Module:
    model = nn.Linear(2, 2)
    model.weight.register_hook(lambda gradient: gradient)
    return model


def trained() -> nn.Module:
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    return model


def with_another_bias(mesh: DeviceMesh, make: Callable[[], torch.Tensor]) -> None:
    model = shared(mesh)
    step(model)
    model[0].bias = nn.Parameter(make())
    step(model)


def divided_before(mesh: DeviceMesh) -> None:
    """States that go by no rows."""
    model = net()
    optimizer = Adafactor(model.parameters())
    step(model)
    optimizer.step()
    optimizer.zero_grad()
    shared(mesh, model)


def steps_over_means(mesh: DeviceMesh) -> None:
    model = shared(mesh)
    optimizer = Adafactor(model.parameters())
    step(model)
    optimizer.step()


def wrapped_with_update(mesh: DeviceMesh) -> None:
    model = net()
    DistributedDataParallel(megacompile(model, optimizer=AdamW(model.parameters())))


DIVIDED = (
    "and mesh= divides its rows among ranks; needed one dimension or more (param.reshape(1)), "
    "values (checkpoint=, or a model built on the CPU), no hooks (register them after "
    "megacompile()) and no gradient (optimizer.zero_grad())"
)
ERRORS: dict[str, tuple[Callable[[DeviceMesh], object], type[MegacompileError], str]] = {
    "no mesh": (lambda mesh: shared("cpu"), OptionError,
     "megacompile(): got mesh='cpu'; needed a DeviceMesh: "
     'init_device_mesh("cpu", (world_size,)), after torch.distributed.init_process_group()'),
    "three dimensions": (lambda mesh: shared(init_device_mesh("cpu", (1, 1, 1))), OptionError,
     "megacompile(): got a mesh of 3 dimensions; needed one, which shards, or two: the first "
     "replicates, the second shards"),
    "other devices": (
     lambda mesh: shared(DeviceMesh("meta", [0], _init_backend=False)), OptionError,
     "megacompile(): got a mesh of 'meta' devices with device='cpu'; needed "
     'init_device_mesh("cpu", (world_size,)), after torch.distributed.init_process_group()'),
    "disk_weights": (lambda mesh: shared(mesh, disk=".", disk_weights=True), OptionError,
     "megacompile(): got disk_weights=True with mesh=...; shards of parameters cannot be on a "
     "disk; leave one of them out (disk= alone stores optimizer states)"),
    "no dimension": (lambda mesh: shared(mesh, scalar()), ModelError,
     f"megacompile(): parameter Linear.scale has no dimension, {DIVIDED}"),
    "meta": (lambda mesh: shared(mesh, nn.Linear(2, 2, device="meta")), ModelError,
     f"megacompile(): parameter Linear.weight has no values (it is on meta), {DIVIDED}"),
    "packed": (lambda mesh: shared(mesh, quantized.model(quantized.OWN["state"])), ModelError,
     "megacompile(): {}packed{}"),
    "hooks": (lambda mesh: shared(mesh, hooked()), ModelError,
     f"megacompile(): parameter Linear.weight has hooks, {DIVIDED}"),
    "a gradient": (lambda mesh: shared(mesh, trained()), ModelError,
     f"megacompile(): parameter Linear.weight has a gradient, {DIVIDED}"),
    "a whole parameter": (lambda mesh: with_another_bias(mesh, lambda: torch.zeros(6)), ModelError,
     "megacompile(): parameter Sequential.0.bias is whole, and ranks share this model; needed "
     "placements (Shard(dim=0),) over its mesh: "
     "nn.Parameter(torch.distributed.tensor.distribute_tensor(param, mesh, placements)), and an "
     "optimizer that has it"),
    "another DTensor": (
     lambda mesh: with_another_bias(
         mesh, lambda: distribute_tensor(torch.zeros(6), mesh, [Replicate()])
     ), ModelError,
     "megacompile(): parameter Sequential.0.bias is a DTensor of placements (Replicate(),) over "
     "{mesh}, and ranks share this model; needed placements (Shard(dim=0),) over its mesh: "
     "nn.Parameter(torch.distributed.tensor.distribute_tensor(param, mesh, placements)), and an "
     "optimizer that has it"),
    "states by no rows": (divided_before, OptionError,
     "megacompile(): Adafactor has a state 'row_var' of shape (6, 1) for parameter '0.weight' "
     "of shape (6, 4), and mesh= divides states by rows; needed the parameter's shape; call "
     "megacompile() before the first step, and load a checkpoint afterwards"),
    "means over whole tensors": (steps_over_means, OptimizerError,
     "Adafactor.step() computes means over whole parameters, but each rank has only a part of "
     "them (mesh=), and its own step does not support DTensors; nothing was updated: use AdamW "
     "with state_dtype='int8', or leave out mesh="),
    "DDP and optimizer=": (wrapped_with_update, ModelError,
     "DistributedDataParallel(): Sequential is megacompiled with optimizer=, so that the "
     "backward updates and gradients never leave the device, but DistributedDataParallel would "
     "have to reduce them first; leave out optimizer= of megacompile()"),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str, mesh: DeviceMesh) -> None:
    provoke, error, text = ERRORS[name]
    assert_says(lambda: provoke(mesh), error, text.replace("{mesh}", str(mesh)))


def test_processes_that_train_copies(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Started by torchrun, without `mesh=` and without a DistributedDataParallel (which needs the
    process group of `mesh`)."""
    text = (
        "megacompile: each of 2 processes trains its own copy of Sequential: nothing sums their "
        "gradients. Wrap it, DistributedDataParallel(megacompile(model)), or let the processes "
        "share it, megacompile(model, mesh=...). If your loop sums gradients itself, ignore this "
        "(shown once)"
    )

    def train(wrap: bool = False) -> None:
        model = megacompile(net(), device="cpu", lowering="eager")
        optimizer = AdamW(model.parameters())
        called = DistributedDataParallel(model) if wrap else model
        step(called)
        optimizer.step()

    assert heard(train) == []
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert_says(train, UserWarning, text)
    assert heard(lambda: train(wrap=True)) == []
    monkeypatch.setenv("RANK", "1")
    assert heard(train) == []  # the first one says it


# The command line.

REFUSED: dict[tuple[str, ...], str] = {
    ("--hosts", "2"): "--interconnect, --hosts: needed --gpus 2 or more, which share the model",
    ("--gpus", "2", "--network", "3"): "--network: needed --hosts 2 or more",
    ("--hosts", "0"): "argument --hosts: invalid positive value: '0' (see --help)",
    ("--gpus", "2", "--hosts", "2", "--network", "nan"): "Hardware.replace(): got "
    "network_gb_s=nan; needed a positive number",
}


@pytest.mark.parametrize("options", REFUSED)
def test_hosts_that_are_refused(
    options: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    try:
        code = main(["plan", str(path), *options])
    except SystemExit as end:  # argparse's
        code = end.code  # type: ignore[assignment]
    assert code == 2
    assert capsys.readouterr().err == f"megacompile plan: {REFUSED[options]}\n"


# What `explain` says of a slow rank: who it is, is found out by tests/unit/test_agreement.py.


@pytest.fixture(scope="module")
def explained() -> Explanation:
    model = megacompile(net(), device="cpu", lowering="eager", progress=False)
    step(model)
    return explain(model, changes=False)


LAST: dict[str, Any] = {"rank": 1, "host": "b", "step_s": 1.0, "lane": "h2d"}
LAST |= {"busy_s": 0.9, "others_busy_s": 0.3, "waited_s": 0.2}


def last(**changed: Any) -> dict[str, Any]:
    return {"last_rank": SimpleNamespace(**LAST | changed)}


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (last(), "- 1 (host b) came last in the traced steps: its h2d is busy for 900 ms a "
         "step, the others' for 300 ms; the others wait 200 ms a step longer in collectives"),
        (last(lane="none of them"), "- 1 (host b) came last in the traced steps: none of its "
         "recorded ops takes longer than the others': its host has other work; the others wait "
         "200 ms a step longer in collectives"),
        (last(waited_s=0.02), ""),
    ],
    ids=["last", "for no reason", "by little"],
)  # fmt: skip
def test_a_slow_rank(explained: Explanation, found: dict[str, Any], text: str) -> None:
    page = str(replace(explained, **{"ranks": 2, **found}))
    section = page.partition("\nthe slowest rank\n")[2].partition("\n\n")[0]
    assert " ".join(section.split()) == text
