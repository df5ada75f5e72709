"""Optimizer states on a disk: the same numbers, checkpoints, limits and errors as in memory."""

from __future__ import annotations

import copy
import errno
import functools
import itertools
import os
import random
import sys
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW

from megacompile import explain, full_parameters, megacompile, save
from megacompile.errors import (
    DiskError,
    HostMemoryError,
    OptimizerError,
    OptionError,
    OptionTypeError,
)
from megacompile.options import Options
from megacompile.passes.schedule import disk
from megacompile.plan.findings import DiskTraffic
from megacompile.runtime.device.buffers import HostBuffer
from megacompile.runtime.disk import transfers
from megacompile.runtime.disk.transfers import Way
from megacompile.runtime.model.lookup import streamed_model
from megacompile.runtime.updates import staging
from tests.disks import no_host_memory
from tests.draws import drawn

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
@pytest.mark.parametrize("kind", drawn([AdamW], [SGD, Adam]))
def test_the_same_numbers(tmp_path: Path, mode: str, kind: Any) -> None:
    options = MODES[mode]
    if kind is SGD:
        kind = functools.partial(SGD, momentum=0.9)
    on_disk = trained(tmp_path, kind=kind, **options)
    assert same(on_disk, trained(None, kind=kind, **options))
    there = streamed_model(on_disk[0], "test").machine.disk
    assert there is not None and there.file.used_bytes > 0
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"optimizer": True},
        {"disk_weights": True},
        {"disk_weights": True, "optimizer": True},
        {"disk_saved": True, "activations": "offload"},
    ],
)
def test_a_step_moves_the_bytes_that_the_plan_says(tmp_path: Path, options: Any) -> None:
    """Of a tower whose layers are whole pages, so that nothing else goes along."""

    def settled() -> DiskTraffic:
        states(optimizer)
        [p.sum().item() for p in model.parameters()]
        found = explain(model, changes=False).disk_traffic
        assert found is not None
        return found

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(5)))
    optimizer = AdamW(model.parameters(), lr=0.01)
    if options.get("optimizer"):
        options = options | {"optimizer": optimizer}
    megacompile(model, device="cpu", lowering="eager", disk=tmp_path, **options)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(1024, 32)).square().mean().backward()
        optimizer.step()

    step()
    for k in range(1, 3):
        before = settled().so_far
        step()
        after = settled()
        assert before is not None and after.so_far is not None
        assert before.steps == k and after.so_far.steps == k + 1
        assert after.so_far.read_bytes - before.read_bytes == after.read_bytes > 0
        assert after.so_far.written_bytes - before.written_bytes == after.written_bytes > 0
    dictionary = explain(model, changes=False).to_dict()["disk_traffic"]
    assert dictionary["read_bytes"] == after.read_bytes
    assert dictionary["so_far"]["steps"] == 3
    assert "3 steps so far: " in str(explain(model, changes=False))


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
            {"disk": "/tmp", "disk_weights": True, "device_update": 0.5, "lowering": "inductor"},
            OptionError,
            "device_update=0.5 with disk_weights=True",
        ),
    ],
)
def test_options_that_are_refused(options: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        Options.resolve(device="cpu", **options)


def fail(monkeypatch: pytest.MonkeyPatch, way: Way, after: int) -> None:
    """An I/O error in the middle of a step: the drive serves so many calls of one direction."""
    real = transfers._transfer
    served = itertools.count()

    def transfer(file: Any, its: Way, *args: Any) -> None:
        if its is way and next(served) >= after:
            raise OSError(errno.EIO, "Input/output error")
        real(file, its, *args)

    monkeypatch.setattr(transfers, "_transfer", transfer)


READS = {  # that an update in the backward makes before it has updated some of the parameters
    "in the backward": 8,
    "8 bits, in the backward": 14,
}


def refused(model: Any, optimizer: Any, folder: Path) -> None:
    """Whatever saves or goes on says what is torn, each time."""
    uses = [
        model.state_dict,
        optimizer.state_dict,
        lambda: save(model, folder / "saved"),
        lambda: next(full_parameters(model)),
        lambda: model(torch.zeros(3, 8)),
        optimizer.step,
    ]
    for use in uses * 2:
        with pytest.raises(OptimizerError, match=r"_STATE of .*errno 5 \(Input/output error\)"):
            use()


@pytest.mark.parametrize("way", Way)
@pytest.mark.parametrize("mode", ["exact", "in the backward", "8 bits, in the backward"])
@pytest.mark.parametrize(("look", "first"), [("states", "model"), ("step", "optimizer")])
def test_an_error_in_the_middle_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, way: Way, look: str, first: str
) -> None:
    """Every use says what is torn; a checkpoint makes it whole, and training goes on."""
    model, optimizer = trained(tmp_path, **MODES[mode])
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    with monkeypatch.context() as patched:
        fail(patched, way, after=READS.get(mode, 2) if way is Way.READ else 2)
        with pytest.raises((OptimizerError, DiskError), match=r"errno 5 \(Input/output error\)"):
            run(model, optimizer, 5, first=4)
            if look == "states":
                states(optimizer)
            else:
                run(model, optimizer, 6, first=5)
    refused(model, optimizer, tmp_path)
    optimizer.zero_grad()
    weights, loaded = copy.deepcopy(before)  # whose tensors the optimizer takes
    if first == "optimizer":
        optimizer.load_state_dict(loaded)
    else:
        model.load_state_dict(weights)
    refused(model, optimizer, tmp_path)
    if first == "optimizer":
        model.load_state_dict(weights)
    else:
        optimizer.load_state_dict(loaded)
    run(model, optimizer, 8, first=4)
    assert same((model, optimizer), trained(None, 8, **MODES[mode]))


@pytest.mark.parametrize("mode", ["exact", "in the backward"])
def test_no_host_memory_for_what_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """Found by the thread that gives buffers: whoever waits for one is told, and nobody hangs."""
    model, optimizer = trained(tmp_path, **MODES[mode])
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    machine = streamed_model(model, "test").machine
    assert machine.staging is not None
    for bucket in machine.buckets.values():
        bucket.pending.settle()
    machine.staging._sets = deque(None for _ in machine.staging._sets)
    wanted = "a buffer for the states of .* which lie on a disk, needs .* more; raise host_memory="
    errors = (OptimizerError, HostMemoryError)
    with no_host_memory(machine), pytest.raises(errors, match=wanted):
        run(model, optimizer, 6, first=4)
    optimizer.zero_grad()
    weights, loaded = copy.deepcopy(before)
    model.load_state_dict(weights)
    optimizer.load_state_dict(loaded)
    run(model, optimizer, 8, first=4)
    assert same((model, optimizer), trained(None, 8, **MODES[mode]))


def test_a_set_is_as_large_as_the_largest_bucket_needs_from_the_start(tmp_path: Path) -> None:
    """To let one grow would take the memory of both for a while, over the budget."""
    model, _ = trained(tmp_path)
    staging = streamed_model(model, "test").machine.staging
    assert staging is not None and staging.sets
    for bucket in streamed_model(model, "test").machine.buckets.values():
        bucket.pending.settle()  # a set comes back behind its write
    sizes = {len(memory) for memory in staging._sets if memory is not None}
    assert sizes == {staging.set_bytes}


@functools.cache
def on_the_host(mode: str) -> Any:
    """What each seed is compared with: plain copies, which keep nothing of the run alive."""
    model, optimizer = trained(None, 6, **MODES[mode])
    state = copy.deepcopy(optimizer.state_dict())
    return copy.deepcopy(model), SimpleNamespace(state_dict=lambda: state)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(3))
def test_delays_torn_writes_and_memory_that_is_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, seed: int
) -> None:
    """Threads go on in any order; what is not read or written whole yet is NaN."""
    rng = random.Random(seed)
    real, release = transfers._transfer, staging.Staging._release
    monkeypatch.setattr(transfers, "CHUNK_BYTES", 4096)
    monkeypatch.setattr(disk, "STATE_SETS", rng.choice((1, 2, 4)))

    def transfer(file: Any, way: Way, at: int, whole: torch.Tensor, *place: int) -> None:
        start, size = place
        if way is Way.READ:
            whole[start : start + size].fill_(255)
        else:
            torn = torch.full_like(whole, 255)
            real(file, way, at, _aligned(torn), start, size)
        for _ in range(rng.choice((0, 1, 10, 1000))):
            os.sched_yield()
        real(file, way, at, whole, start, size)

    def poison(self: staging.Staging, staged: staging.Staged) -> None:
        if staged.memory is not None:
            staged.memory.bytes(len(staged.memory)).fill_(255)
        release(self, staged)

    expected = on_the_host(mode)
    monkeypatch.setattr(transfers, "_transfer", transfer)
    monkeypatch.setattr(staging.Staging, "_release", poison)
    assert same(trained(tmp_path, 6, **MODES[mode]), expected)


def _aligned(like: torch.Tensor) -> torch.Tensor:
    memory = HostBuffer(like.numel(), pin=False).bytes(like.numel())
    return memory.copy_(like)
