"""Parameters on a disk: the same numbers, looks, writes, checkpoints and errors as in memory."""

from __future__ import annotations

import copy
import errno
import functools
import itertools
import os
import random
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.test_fork import in_child
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from megacompile import accumulate, full_parameters, megacompile, released, unmegacompile
from megacompile.errors import (
    DiskError,
    HostMemoryError,
    OptimizerError,
    OptionError,
    OptionTypeError,
)
from megacompile.options import Options
from megacompile.runtime.disk import transfers
from megacompile.runtime.disk.transfers import Way
from tests import inside, quantized
from tests.disks import few_buffers, harsh, no_host_memory
from tests.draws import drawn, pairwise

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="scratch files are for Linux"),
    pytest.mark.filterwarnings("ignore:megacompile. disk=.* has no direct I/O"),
]

MODES: dict[str, dict[str, Any]] = {
    "exact": {},
    "in the backward": {"optimizer": True},
    "8 bits": {"state_dtype": "int8"},
    "8 bits, in the backward": {"state_dtype": "int8", "optimizer": True},
    "without states": {"kind": SGD},
    "without states, in the backward": {"kind": SGD, "optimizer": True},
}


class Layer(nn.Module):
    """A base with an adapter beside it, in one bucket: of odd sizes, so that they share pages."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down = nn.Linear(width, 3, bias=False)
        self.base = nn.Linear(width, width)
        self.up = nn.Linear(3, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


def adapted(name: str) -> bool:
    return "up" in name or "down" in name


TRAINED: dict[str, Callable[[str], bool]] = {
    "adapters": adapted,
    "all": lambda name: True,
    "some layers": lambda name: name[0] in "13",
    "biases": lambda name: "bias" in name,
}


def made(trained: Callable[[str], bool] = TRAINED["all"]) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 67), *(Layer(67) for _ in range(3)), nn.Linear(67, 8))
    for name, param in model.named_parameters():
        param.requires_grad_(trained(name))
    return model


def megacompiled(folder: Path | None, model: nn.Module, its: Any, **options: Any) -> None:
    if options.pop("optimizer", False):
        options["optimizer"] = its
    weights = folder is not None
    megacompile(model, device="cpu", lowering="eager", disk=folder, disk_weights=weights, **options)


def made_optimizer(model: nn.Module, kind: Any = AdamW) -> Any:
    return kind([param for param in model.parameters() if param.requires_grad], lr=0.01)


def trained(
    folder: Path | None, steps: int = 4, which: str = "all", kind: Any = AdamW, **options: Any
) -> Any:
    """A small model that took some steps, and its optimizer."""
    model = made(TRAINED[which])
    optimizer = made_optimizer(model, kind)
    megacompiled(folder, model, optimizer, **options)
    run(model, optimizer, steps)
    return model, optimizer


def loss_of(model: Any, k: int) -> Tensor:
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(k))
    loss: Tensor = model(x).square().mean()
    return loss


def run(model: Any, optimizer: Any, steps: int, first: int = 0) -> None:
    for k in range(first, steps):
        optimizer.zero_grad()
        loss_of(model, k).backward()
        optimizer.step()


def same(one: Any, other: Any) -> bool:
    """Parameters and states."""
    pairs = [*zip(one[0].parameters(), other[0].parameters(), strict=True)]
    states = [each[1].state_dict()["state"] for each in (one, other)]
    for mine, theirs in zip(*(state.values() for state in states), strict=True):
        pairs += [(v, theirs[k]) for k, v in mine.items() if isinstance(v, Tensor)]
    return all(torch.equal(a, b) for a, b in pairs)


def staging(model: Any) -> Any:
    return inside.machine(model).weight_staging


@pytest.mark.parametrize("which", drawn(["adapters", "some layers"], ["all", "biases"]))
@pytest.mark.parametrize("mode", MODES)
def test_the_same_numbers(tmp_path: Path, which: str, mode: str) -> None:
    on_disk = trained(tmp_path, which=which, **MODES[mode])
    assert same(on_disk, trained(None, which=which, **MODES[mode]))
    if mode == "exact":
        model = made(TRAINED[which])
        run(model, optimizer := made_optimizer(model), 4)
        assert same(on_disk, (model, optimizer))
    assert all(host.on_disk is not None for host in inside.machine(on_disk[0]).buckets.values())
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("mode", MODES)
def test_what_is_frozen_is_never_written(tmp_path: Path, mode: str) -> None:
    model, optimizer = trained(tmp_path, which="adapters", **MODES[mode])
    before = staging(model).written_bytes
    run(model, optimizer, 5, first=4)
    size = sum(p.nbytes for name, p in model.named_parameters() if adapted(name))
    padding = 6 * 256 + 3 * transfers_unit(model)  # between neighbours, and behind the last
    assert size <= staging(model).written_bytes - before <= size + padding


def transfers_unit(model: Any) -> int:
    found: int = staging(model).disk.file.alignment
    return found


def test_momentum_and_clipping_and_accumulation(tmp_path: Path) -> None:
    """The exact mode, in every bit as the plain loop."""
    found = []
    for folder in (tmp_path, None, "plain"):
        model = made()
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        if not isinstance(folder, str):
            megacompiled(folder, model, optimizer)
        for k in range(6):
            loss_of(model, k).backward()
            if k % 2:
                nn.utils.clip_grad_norm_(model.parameters(), 0.01)
                optimizer.step()
                optimizer.zero_grad()
        found.append((model, optimizer))
    assert same(found[0], found[2]) and same(found[1], found[2])


def test_accumulation_with_updates_in_the_backward(tmp_path: Path) -> None:
    found = []
    for folder in (tmp_path, None):
        model, optimizer = trained(folder, 1, optimizer=True)
        for k in range(6):
            if k % 2:
                loss_of(model, k).backward()
                optimizer.step()
                optimizer.zero_grad()
            else:
                with accumulate(model):
                    loss_of(model, k).backward()
        found.append((model, optimizer))
    assert same(*found)


def tampered(model: Any, rng: random.Random, *, plain: bool = False) -> list[Tensor]:
    """What a user sees who looks and writes at random; the same for equal seeds."""
    seen: list[Tensor] = []
    params = list(model.parameters())
    for _ in range(rng.randrange(4)):
        param = rng.choice(params)
        kind, value = rng.randrange(6), rng.uniform(0.9, 1.1)
        with torch.no_grad():
            if kind == 0:
                seen.append(param.clone())
            elif kind == 1:
                param.mul_(value)
            elif kind == 2:
                param.data.copy_(param.data * value)
            elif kind == 3:
                param.data = param.data * value
            elif kind == 4:
                model.load_state_dict({k: v * value for k, v in model.state_dict().items()})
            else:
                seen.append(loss_of(model, 77).clone())
    return seen


@pytest.mark.parametrize("which", ["adapters", "all"])
@pytest.mark.parametrize("mode", MODES)
def test_looks_and_writes_between_steps(tmp_path: Path, which: str, mode: str) -> None:
    found, seen = [], []
    for folder in (tmp_path, None):
        rng = random.Random(0)
        model, optimizer = trained(folder, 1, which, **MODES[mode])
        seen.append([tampered(model, rng)])
        for k in range(1, 8):
            run(model, optimizer, k + 1, first=k)
            seen[-1].append(tampered(model, rng))
        found.append((model, optimizer))
    for one, other in zip(*seen, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert same(*found)


@pytest.mark.parametrize("mode", MODES)
def test_another_name_for_a_parameter(tmp_path: Path, mode: str) -> None:
    """What was taken before a step shows what the step made."""
    model, optimizer = trained(tmp_path, **MODES[mode])
    names = model.state_dict()
    with harsh(random.Random(0)):
        for k in range(4, 8):
            run(model, optimizer, k + 1, first=k)
            seen = {name: value.clone() for name, value in names.items()}
            assert all(torch.equal(seen[name], p) for name, p in model.named_parameters())


@pytest.mark.parametrize("options", [{}, {"activations": "recompute"}, {"slots": 4}])
def test_forwards_alone(tmp_path: Path, options: dict[str, Any]) -> None:
    """Evaluation between steps, and several in a row."""
    found = []
    for folder in (tmp_path, None):
        model, optimizer = trained(folder, 2, **options)
        outputs = []
        for k in range(2, 5):
            with torch.no_grad():
                outputs += [loss_of(model, k), loss_of(model, k)]
            run(model, optimizer, k + 1, first=k)
        with torch.inference_mode():
            outputs.append(loss_of(model, 9).clone())
        found.append(outputs)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


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


def test_a_model_that_is_made_on_the_disk(tmp_path: Path) -> None:
    """Of the values of a checkpoint, without ever being in memory as a whole."""
    save_file = pytest.importorskip("safetensors.torch").save_file
    expected, _ = trained(None)
    save_file(
        {name: value.clone() for name, value in expected.state_dict().items()},
        tmp_path / "model.safetensors",
    )
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 67), *(Layer(67) for _ in range(3)), nn.Linear(67, 8))
    megacompile(
        model,
        device="cpu",
        lowering="eager",
        disk=tmp_path,
        disk_weights=True,
        checkpoint=tmp_path / "model.safetensors",
    )
    pairs = zip(model.parameters(), expected.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert torch.equal(loss_of(model, 1), loss_of(expected, 1))


@pytest.mark.parametrize("mode", ["exact", "in the backward"])
def test_what_a_child_of_a_fork_does_is_its_own(tmp_path: Path, mode: str) -> None:
    model, optimizer = trained(tmp_path, **MODES[mode])

    def go_on() -> list[Any]:
        run(model, optimizer, 12, first=4)
        with torch.no_grad():
            next(iter(model.parameters())).fill_(3.0)
        return [param.detach().clone().numpy() for param in list(model.parameters())[1:]]

    theirs = in_child(go_on)
    run(model, optimizer, 12, first=4)
    expected = trained(None, 12, **MODES[mode])
    assert same((model, optimizer), expected)
    mine = [param.detach().numpy() for param in list(model.parameters())[1:]]
    assert all((a == b).all() for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("mode", MODES)
def test_a_plain_model_again(tmp_path: Path, mode: str) -> None:
    found = []
    for folder in (tmp_path, None):
        model, optimizer = trained(folder, **MODES[mode])
        unmegacompile(model, device="cpu")
        found.append((model, optimizer))
    assert same(*found)
    for folder in (tmp_path, None):
        run(*found[folder is None], 6, first=4)
    assert same(*found)


def test_released_and_full_parameters(tmp_path: Path) -> None:
    model, optimizer = trained(tmp_path)
    other, its = trained(None)
    with released(model):
        for (name, value), (also, its_value) in zip(
            full_parameters(model), full_parameters(other), strict=True
        ):
            assert name == also and torch.equal(value, its_value)
    run(model, optimizer, 6, first=4)
    run(other, its, 6, first=4)
    assert same((model, optimizer), (other, its))


@pytest.mark.parametrize("resident", [0, "20KiB", "all"])
@pytest.mark.parametrize("mode", ["exact", "in the backward"])
def test_with_residents(tmp_path: Path, mode: str, resident: Any) -> None:
    on_disk = trained(tmp_path, **MODES[mode], resident=resident)
    there = [host.on_disk is not None for host in inside.machine(on_disk[0]).buckets.values()]
    assert all(there) == (resident == 0) and any(there) == (resident != "all")
    assert same(on_disk, trained(None, **MODES[mode], resident=resident))


@pytest.mark.parametrize("mode", ["exact", "in the backward"])
def test_parameters_that_are_frozen_and_trained_later(tmp_path: Path, mode: str) -> None:
    found = []
    for folder in (tmp_path, None):
        model, optimizer = trained(folder, 2, **MODES[mode])
        for frozen in (True, False):
            for name, param in model.named_parameters():
                param.requires_grad_(not frozen or adapted(name))
            run(model, optimizer, 4 if frozen else 6, first=2 if frozen else 4)
        found.append((model, optimizer))
    assert same(*found)


@pytest.mark.parametrize("kind", [quantized.wrapped, quantized.stateful])
def test_a_packed_base(tmp_path: Path, kind: Any) -> None:
    found = []
    for folder in (tmp_path, None):
        model = quantized.model(kind)
        weights = folder is not None
        megacompile(model, device="cpu", lowering="eager", disk=folder, disk_weights=weights)
        found.append(quantized.trained(model))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"disk_weights": True}, OptionError, "got disk_weights=True without disk="),
        ({"disk": "/tmp", "disk_weights": 1}, OptionTypeError, "option 'disk_weights' got 1"),
        (
            {"disk": "/tmp", "disk_weights": True, "compute_dtype": torch.bfloat16},
            OptionError,
            "got disk_weights=True with compute_dtype=torch.bfloat16; masters do not",
        ),
    ],
)
def test_options_that_are_refused(options: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        Options.resolve(device="cpu", **options)


def test_a_disk_that_is_too_small_is_found_before_anything_moves(tmp_path: Path) -> None:
    model = made()
    before = [param.data_ptr() for param in model.parameters()]
    with pytest.raises(DiskError, match="disk_memory=16 KiB is too small: 0 B lie in .* 80 KiB"):
        megacompiled(tmp_path, model, None, disk_memory="16KiB")
    assert [param.data_ptr() for param in model.parameters()] == before
    megacompile(model, device="cpu", lowering="eager")


def fail(monkeypatch: pytest.MonkeyPatch, way: Way, after: int) -> None:
    """An I/O error in the middle of a step: the drive serves so many calls of one direction."""
    real = transfers._transfer
    served = itertools.count()

    def transfer(file: Any, its: Way, *args: Any) -> None:
        if its is way and next(served) >= after:
            raise OSError(errno.EIO, "Input/output error")
        real(file, its, *args)

    monkeypatch.setattr(transfers, "_transfer", transfer)


@pytest.mark.parametrize(
    ("where", "mode", "way"),
    pairwise([("parameters", 2), ("step", 0), ("step", 9)], ["exact", "in the backward"], Way),
)
def test_an_error_in_the_middle_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, way: Way, where: tuple[str, int]
) -> None:
    """The next use says what is torn; a checkpoint makes it whole, and training goes on."""
    look, after = where
    model, optimizer = trained(tmp_path, **MODES[mode])
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    with monkeypatch.context() as patched:
        fail(patched, way, after)
        with pytest.raises((OptimizerError, DiskError), match=r"errno 5 \(Input/output error\)"):
            run(model, optimizer, 5, first=4)
            if look == "parameters":
                copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            else:
                run(model, optimizer, 6, first=5)
    optimizer.zero_grad()
    weights, loaded = copy.deepcopy(before)  # whose tensors the optimizer takes
    model.load_state_dict(weights)
    optimizer.load_state_dict(loaded)
    run(model, optimizer, 8, first=4)
    assert same((model, optimizer), trained(None, 8, **MODES[mode]))


@pytest.mark.parametrize("mode", ["exact", "in the backward"])
@pytest.mark.parametrize("kind", ["prefetches", "updates"])
def test_no_host_memory_for_what_is_read(tmp_path: Path, mode: str, kind: str) -> None:
    """Found by the thread that lends: whoever waits for a buffer is told, and nobody hangs."""
    model, optimizer = trained(tmp_path, **MODES[mode])
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    machine = inside.machine(model)
    for bucket in machine.buckets.values():
        bucket.pending.settle()
    loans = getattr(staging(model), kind)
    loans._free = deque((None, None) for _ in loans._free)
    errors, wanted = (OptimizerError, HostMemoryError), "which lies on a disk, needs .* more"
    with no_host_memory(machine), pytest.raises(errors, match=f"a buffer for .* {wanted}"):
        run(model, optimizer, 6, first=4)
    optimizer.zero_grad()
    weights, loaded = copy.deepcopy(before)
    model.load_state_dict(weights)
    optimizer.load_state_dict(loaded)
    run(model, optimizer, 8, first=4)
    assert same((model, optimizer), trained(None, 8, **MODES[mode]))


def test_a_run_that_is_cut_off_gives_its_buffers_back(tmp_path: Path) -> None:
    model, optimizer = trained(tmp_path)
    host = next(iter(inside.machine(model).buckets.values()))
    for _ in range(5):  # more than there are
        prefetched = staging(model).read(host, [], "a read")
        updated = staging(model).read_trained(host, [0], [], "another")
        staging(model).give_up()
        prefetched.settle()  # a copy that was issued already, and is for nobody
        with pytest.raises(OptimizerError, match="the run that these parameters were read for"):
            updated.settle()
    run(model, optimizer, 6, first=4)
    assert same((model, optimizer), trained(None, 6))


@functools.cache
def on_the_host(which: str, mode: str) -> Any:
    """What each seed is compared with: plain copies, which keep nothing of the run alive."""
    model, optimizer = trained(None, 6, which, **MODES[mode])
    state = copy.deepcopy(optimizer.state_dict())
    return copy.deepcopy(model), SimpleNamespace(state_dict=lambda: state)


@pytest.mark.parametrize(("mode", "which", "seed"), pairwise(MODES, ["adapters", "all"], range(2)))
def test_delays_torn_writes_and_memory_that_is_used_again(
    tmp_path: Path, which: str, mode: str, seed: int
) -> None:
    """Threads go on in any order; what is not read or written whole yet is NaN."""
    rng = random.Random(seed)
    expected = on_the_host(which, mode)
    with harsh(rng), few_buffers(rng):
        on_disk = trained(tmp_path, 6, which, **MODES[mode])
        assert same(on_disk, expected)
