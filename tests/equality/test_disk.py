"""What lies on a disk: faults in the middle of a step, limits, bytes, and who else looks at it.

The numbers of loops with states, parameters and saved tensors on a disk: test_table.py.
"""

from __future__ import annotations

import copy
import errno
import functools
import gc
import operator
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from megacompile import explain, full_parameters, megacompile, released, save, unmegacompile
from megacompile.errors import DiskError, HostMemoryError, OptimizerError
from tests import disks, inside, quantized, zoo
from tests.interrupts import profiled, traced
from tests.processes import in_child
from tests.stateful.late import AtCall

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="scratch files are for Linux"),
    pytest.mark.filterwarnings("ignore:megacompile. disk=.* has no direct I/O"),
]

MODES: dict[str, dict[str, Any]] = {
    "exact": {},
    "in the backward": {"optimizer": True},
}
WEIGHTS: dict[str, Any] = {"disk_weights": True}
SAVED: dict[str, Any] = {"disk_saved": True, "activations": "offload"}
Trained = tuple[Any, Any]


def net() -> nn.Module:
    """Bases with adapters beside them, in one bucket: of odd sizes, so that they share pages."""
    layers = [nn.Sequential(quantized.Adapted(nn.Linear(67, 67)), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(nn.Linear(8, 67), *layers, nn.Linear(67, 8))


def adapted(name: str) -> bool:
    return "up" in name or "down" in name


def trained(
    folder: Path | None, steps: int = 4, *, adapters: bool = False, **options: Any
) -> Trained:
    """A small model that took some steps, and its optimizer."""
    torch.manual_seed(0)
    model = net()
    for name, param in model.named_parameters():
        param.requires_grad_(adapted(name) or not adapters)
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    if options.get("optimizer"):
        options["optimizer"] = optimizer
    if folder is None:
        options = {k: v for k, v in options.items() if not k.startswith("disk_")}
    megacompile(model, device="cpu", lowering="eager", disk=folder, progress=False, **options)
    run(model, optimizer, steps)
    return model, optimizer


def loss_of(model: Any, k: int, rows: int = 50) -> Tensor:
    x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(k))
    return model(x).square().mean()


def run(model: Any, optimizer: Any, steps: int, first: int = 0) -> None:
    for k in range(first, steps):
        optimizer.zero_grad()
        loss_of(model, k).backward()
        optimizer.step()


def values(of: Trained) -> list[Tensor]:
    found = list(of[0].parameters())
    for state in of[1].state_dict()["state"].values():
        found += [value for value in state.values() if isinstance(value, Tensor)]
    return [value.detach().clone() for value in found]


def assert_same(one: list[Tensor], other: list[Tensor]) -> None:
    assert len(one) == len(other) and all(map(zoo.equal, one, other))


@functools.cache
def in_memory(mode: str, steps: int = 8) -> list[Tensor]:
    """What the same loop gives without a disk."""
    return values(trained(None, steps, **MODES[mode]))


def test_a_step_that_is_interrupted_returns_its_buffers(tmp_path: Path) -> None:
    """After the write of new parameters exists, before the update that it waits for is known."""
    model, optimizer = trained(tmp_path, 2, **WEIGHTS)
    loss_of(model, 2).backward()
    with pytest.raises(KeyboardInterrupt), traced(AtCall("then", 1, KeyboardInterrupt())):
        optimizer.step()
    until(lambda: not inside.lent_buffers(model))  # threads end reads that have begun
    run(model, optimizer, 5, first=3)


@contextmanager
def failing(way: str, first: int = 0, number: int = errno.EIO) -> Iterator[None]:
    """For its duration a drive that serves so many calls of one direction, and no more."""
    real, left = getattr(os, way), iter(range(first))

    def call(*args: Any) -> int:
        if next(left, None) is None:
            raise OSError(number, os.strerror(number))
        return int(real(*args))

    with mock.patch.object(os, way, call):
        yield


def refused(model: Any, optimizer: Any, folder: Path) -> None:
    """Whatever saves or goes on says what is torn, each time."""
    uses: list[Callable[[], Any]] = [
        model.state_dict,
        optimizer.state_dict,
        lambda: save(model, folder / "saved"),
        lambda: next(full_parameters(model)),
        lambda: model(torch.zeros(3, 8)),
        optimizer.step,
    ]
    for use in uses * 2:
        with pytest.raises(OptimizerError):
            use()


def kept(of: Trained) -> Any:
    return copy.deepcopy((of[0].state_dict(), of[1].state_dict()))


@pytest.mark.parametrize(
    ("mode", "way", "served", "weights", "first"),
    [
        ("exact", "preadv", 4, {}, "model"),
        ("exact", "pwritev", 2, {}, "optimizer"),
        ("in the backward", "pwritev", 2, {}, "model"),
        ("exact", "preadv", 9, WEIGHTS, ""),
        ("exact", "pwritev", 0, WEIGHTS, ""),
        ("in the backward", "preadv", 0, WEIGHTS, ""),
        ("in the backward", "pwritev", 9, WEIGHTS, ""),
        ("exact", "memory", 0, WEIGHTS, ""),
        ("in the backward", "memory", 0, {}, ""),
    ],
)
def test_an_error_in_the_middle_of_a_step(
    tmp_path: Path, mode: str, way: str, served: int, weights: Any, first: str
) -> None:
    """Every use says what is torn; a checkpoint makes it whole, and training goes on. That there is
    no memory for what is read, the thread that gives buffers finds: whoever waits is told."""
    model, optimizer = of = trained(tmp_path, **MODES[mode], **weights)
    weights, states = kept(of)
    if way == "memory":
        inside.drop_disk_buffers(model)
        fails: Any = disks.no_host_memory(inside.machine(model))
    else:
        fails = failing(way, served)
    with fails, pytest.raises((OptimizerError, DiskError, HostMemoryError)):
        run(model, optimizer, 5, first=4)
        kept(of)
    loads: list[Callable[[], Any]] = [
        lambda: model.load_state_dict(weights),
        lambda: optimizer.load_state_dict(states),
    ]
    for load in loads[:: -1 if first == "optimizer" else 1]:
        if first:
            refused(model, optimizer, tmp_path)
        optimizer.zero_grad()
        load()
    run(model, optimizer, 8, first=4)
    assert_same(values(of), in_memory(mode))


@pytest.mark.parametrize("way", ["preadv", "pwritev"])
def test_saved_tensors_that_cannot_be_written_or_read(tmp_path: Path, way: str) -> None:
    """In the forward or in the backward; the error names the op, and the model goes on."""
    model, optimizer = trained(tmp_path, **SAVED)
    values((model, optimizer))  # states are there
    for served, number in ((0, errno.ENOSPC), (1, errno.EIO)):
        with failing(way, served, number), pytest.raises(DiskError, match="_SAVED") as raised:
            loss_of(model, 0).backward()
        assert raised.value.errno == number
    model.zero_grad()
    gc.collect()
    run(model, optimizer, 8, first=4)
    assert_same(values((model, optimizer)), in_memory("exact"))


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[int]]:
    """Returns how many bytes were read from disks and written to them so far."""
    counts: dict[str, list[int]] = {"preadv": [], "pwritev": []}

    def counted(name: str, real: Callable[..., int], *args: Any) -> int:
        count = real(*args)
        counts[name].append(count)
        return count

    for name in counts:
        call = functools.partial(counted, name, getattr(os, name))
        monkeypatch.setattr(os, name, call)
    return lambda: [sum(found) for found in counts.values()]


def test_states_go_to_the_disk_and_leave_it(tmp_path: Path, moved: Callable[[], list[int]]) -> None:
    model, optimizer = of = trained(tmp_path, 0)
    names = list(inside.buckets(model))
    for first, on_disk in ((0, []), (3, names), (6, [])):
        inside.want(model, on_disk=on_disk)
        run(model, optimizer, first + 2, first)
        values(of)  # it is over
        before = moved()
        run(model, optimizer, first + 3, first + 2)
        values(of)
        assert (moved() > before) == bool(on_disk)
    assert_same(values(of), in_memory("exact", 9))


@contextmanager
def standing() -> Iterator[threading.Event]:
    """For its duration a drive writes nothing before an event."""
    go, real = threading.Event(), os.pwritev

    def late(*args: Any) -> int:
        go.wait(100)
        return real(*args)

    with mock.patch.object(os, "pwritev", late):
        yield go


def let_go(go: threading.Event, frame: FrameType, event: str, argument: object) -> None:
    """When this thread waits for something."""
    if frame.f_code.co_name == "wait":
        go.set()


def replaced(state: dict[str, Any]) -> Tensor:
    """By the user; the next backward waits for something."""
    state["exp_avg"] = torch.full(state["exp_avg"].shape, 0.5)
    return state["exp_avg"]


@pytest.mark.parametrize(
    "use", [replaced, lambda state: state["exp_avg"].clone()], ids=["replaced", "read"]
)
def test_who_uses_a_state_waits_for_the_write_of_the_last_one(tmp_path: Path, use: Any) -> None:
    """Which would overwrite a new one."""
    found = []
    for folder in (tmp_path, None):
        torch.manual_seed(0)
        model = nn.Linear(8, 8)
        optimizer = AdamW(model.parameters(), lr=0.01)
        megacompile(model, device="cpu", lowering="eager", disk=folder, optimizer=optimizer)
        run(model, optimizer, 2)
        values((model, optimizer))  # it is over
        with standing() as go:
            run(model, optimizer, 3, first=2)
            loss = loss_of(model, 3)
            with profiled(functools.partial(let_go, go)):
                used = list(map(use, optimizer.state.values()))
                loss.backward()
        optimizer.step()
        found.append(used + values((model, optimizer)))
    assert_same(*found)


def test_a_disk_that_is_too_small(tmp_path: Path) -> None:
    """For parameters before anything moves; for states and saved tensors when they first go."""
    model = net()
    before = [param.data_ptr() for param in model.parameters()]
    with pytest.raises(DiskError) as raised:
        megacompile(
            model, device="cpu", lowering="eager", disk=tmp_path, disk_memory="16KiB", **WEIGHTS
        )
    assert raised.value.errno == errno.EDQUOT
    assert [param.data_ptr() for param in model.parameters()] == before
    megacompile(model, device="cpu", lowering="eager")
    for options in ({}, SAVED):
        with pytest.raises(DiskError) as raised:
            trained(tmp_path, disk_memory="8KiB", **options)
        assert raised.value.errno == errno.EDQUOT


@pytest.mark.parametrize(
    "options", [{}, {"optimizer": True}, WEIGHTS, {**WEIGHTS, "optimizer": True}, SAVED], ids=str
)
def test_a_step_moves_the_bytes_that_the_plan_says(
    tmp_path: Path, options: Any, moved: Callable[[], list[int]]
) -> None:
    """Of a tower whose layers are whole pages, so that nothing else goes along."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(5)))
    optimizer = AdamW(model.parameters(), lr=0.01)
    if "optimizer" in options:
        options = options | {"optimizer": optimizer}
    megacompile(model, device="cpu", lowering="eager", disk=tmp_path, progress=False, **options)

    def stepped() -> Any:
        optimizer.zero_grad()
        model(torch.randn(1024, 32)).square().mean().backward()
        optimizer.step()
        values((model, optimizer))  # it is over
        return moved()

    before = stepped()
    planned = explain(model, changes=False).disk_traffic
    assert planned is not None
    for _ in range(2):
        after = stepped()
        found = [b - a for a, b in zip(before, after, strict=True)]
        assert found == [planned.read_bytes, planned.written_bytes] and all(found)
        before = after


def test_what_is_frozen_is_never_written(tmp_path: Path, moved: Callable[[], list[int]]) -> None:
    model, optimizer = trained(tmp_path, adapters=True, **WEIGHTS)
    machine = inside.machine(model)
    values((model, optimizer))
    _, before = moved()
    run(model, optimizer, 5, first=4)
    values((model, optimizer))
    of_states = [sum(map(len, host.states.on_disk())) for host in machine.buckets.values()]
    written = moved()[1] - before - sum(of_states)
    size = sum(p.nbytes for name, p in model.named_parameters() if adapted(name))
    padding = 6 * 256 + 3 * 4096  # between neighbours, and behind the last
    assert size <= written <= size + padding
    assert_same(values((model, optimizer)), values(trained(None, 5, adapters=True)))


def test_saved_tensors_have_few_buffers_and_give_their_places_back(
    tmp_path: Path, moved: Callable[[], list[int]]
) -> None:
    model, optimizer = trained(tmp_path, **SAVED)
    machine = inside.machine(model)
    store: Any = machine.saved_disk
    optimizer.state_dict()  # waits for the writes of states

    def idle() -> list[int]:
        until(lambda: store.lent_bytes == 0)
        return moved()

    first = idle()
    loss_of(model, 0)
    before = idle()
    for k in range(3):
        losses = [loss_of(model, 10 * k + i) for i in range(3)]
        torch.stack(losses).sum().backward()
        lost = loss_of(model, k)
        del lost, losses
    read, written = (now - then for now, then in zip(idle(), before, strict=True))
    assert before[0] == first[0] and before[1] > first[1], "a lost forward reads nothing"
    assert written == 12 * (before[1] - first[1]), "each forward writes as much"
    assert read == 9 * (before[1] - first[1])
    assert machine.activations.lent_bytes == 0
    assert machine.activations.peak_bytes < 3 * 4 * 50 * 67 * 4, "not those of three forwards"
    assert os.listdir(tmp_path) == []


def until(true: Callable[[], bool]) -> None:
    """Wait for the disk's threads: they forget what they have written when they come to it."""
    end_s = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end_s
        os.sched_yield()


def test_a_lost_forward_leaves_its_places_when_they_are_written(tmp_path: Path) -> None:
    """A disk that stands still writes to them later, and to nobody else's."""
    model, _ = trained(tmp_path, 1, **SAVED)
    plain, _ = trained(None, 1)
    store: Any = inside.machine(model).saved_disk
    until(lambda: store.lent_bytes == 0)
    for each in (plain, model):
        each.zero_grad()
    with standing() as go:
        threading.Timer(0.2, go.set).start()
        lost = loss_of(model, 1)
        del lost
        gc.collect()
        loss_of(model, 2).backward()
    loss_of(plain, 2).backward()
    zoo.assert_same(plain, model)
    until(lambda: store.lent_bytes == 0)


def test_a_child_of_a_fork_reads_and_does_not_train(tmp_path: Path) -> None:
    """What it writes is its own; a forward and a backward that need the disk are refused."""
    wanted = in_memory("exact")
    model, optimizer = trained(tmp_path, **WEIGHTS, **SAVED)
    seen, losses = values((model, optimizer)), [loss_of(model, 0)]

    def reads() -> None:
        assert_same(values((model, optimizer)), seen)
        for use in (losses.pop().backward, lambda: loss_of(model, 0)):
            with pytest.raises(DiskError, match="a child"):
                use()
        with torch.no_grad():
            next(iter(model.parameters())).fill_(3.0)

    in_child(reads)
    losses.clear()
    run(model, optimizer, 8, first=4)
    assert_same(values((model, optimizer)), wanted)


@pytest.mark.parametrize(
    ("mode", "place"), [("exact", WEIGHTS), ("in the backward", {"resident": "40KiB"})], ids=str
)
def test_everything_comes_back(tmp_path: Path, mode: str, place: dict[str, Any]) -> None:
    """Into other memory and again, for whoever asks, with frozen parameters, and for good."""

    def addresses() -> list[int]:
        states = [optimizer.state[param] for param in residents]
        return [value.data_ptr() for state in states for value in state.values() if value.dim()]

    found = []
    both: list[dict[str, Any]] = [{}, place]
    for options in both:
        folder = tmp_path if options is WEIGHTS else None
        model, optimizer = trained(folder, 2, **MODES[mode], **options)
        names = inside.residents(model)
        assert bool(names) == ("resident" in options)
        residents = [param for name in names for param in inside.buckets(model)[name].params]
        before = addresses()
        with released(model):
            assert not any(map(operator.eq, addresses(), before)), "their memory is free"
            seen = [value.clone() for _, value in full_parameters(model)]
        run(model, optimizer, 3, first=2)
        for name, param in model.named_parameters():
            param.requires_grad_(adapted(name))
        run(model, optimizer, 4, first=3)
        model.requires_grad_(True)
        run(model, optimizer, 5, first=4)
        unmegacompile(model, device="cpu")
        if mode == "exact":
            run(model, optimizer, 6, first=5)
        found.append(seen + values((model, optimizer)))
    assert_same(*found)


def test_a_packed_base(tmp_path: Path) -> None:
    found = []
    both: list[dict[str, Any]] = [{"disk": tmp_path, **WEIGHTS}, {}]
    for options in both:
        model = quantized.model(quantized.wrapped)
        megacompile(model, device="cpu", lowering="eager", **options)
        found.append(quantized.trained(model))
    assert all(map(torch.equal, *found))
