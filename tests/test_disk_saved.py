"""Saved tensors that go on from the host to a disk: numbers, buffers, places and errors."""

from __future__ import annotations

import errno
import gc
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.test_fork import in_child
from torch import Tensor, nn
from torch.optim import AdamW

from megacompile import accumulate, megacompile, schedules
from megacompile.errors import DiskError, OptionError, OptionTypeError
from megacompile.ir import ops
from megacompile.ir.tensors import TensorMeta
from megacompile.options import Options
from megacompile.passes.schedule import disk_saved
from megacompile.runtime.device.activations import HostPool, OnHost, taken
from megacompile.runtime.device.disk_buffers import Disk
from megacompile.runtime.device.saved_on_disk import OnDisk, SavedDisk
from megacompile.runtime.disk import transfers
from megacompile.runtime.disk.scratch import ScratchFile
from megacompile.runtime.disk.transfers import Way
from tests import inside, zoo
from tests.disks import few_buffers, harsh
from tests.draws import drawn

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="scratch files are for Linux"),
    pytest.mark.filterwarnings("ignore:megacompile. disk=.* has no direct I/O"),
]

LAYERS, WIDTH, ROWS = 9, 67, 50
SIZE = 4 * WIDTH * ROWS  # bytes of what a layer takes: three pages, and a part of one


def made() -> Any:
    torch.manual_seed(0)
    layers = (m for _ in range(LAYERS) for m in (nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)))
    return nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH))


def pair(folder: Path, **options: Any) -> tuple[Any, Any]:
    """A plain model, and the same one megacompiled."""
    plain, model = made(), made()
    megacompile(model, **{**settings(folder), **options})
    return plain, model


def settings(folder: Path) -> dict[str, Any]:
    return {
        **{"device": "cpu", "lowering": "eager", "activations": "offload"},
        **{"disk": folder, "disk_saved": True},
    }


def loss_of(model: Any, k: int, rows: int = ROWS) -> Tensor:
    x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(k))
    loss: Tensor = model(x).square().mean()
    return loss


def store(model: Any) -> SavedDisk:
    found = inside.machine(model).saved_disk
    assert isinstance(found, SavedDisk)
    return found


def one_backward(model: Any, k: int) -> None:
    loss_of(model, k).backward()


def several_forwards(model: Any, k: int) -> None:
    sum((loss_of(model, 10 * k + i) for i in range(3)), torch.zeros(())).backward()


def in_the_order_of_the_forwards(model: Any, k: int) -> None:
    first, second = loss_of(model, k), loss_of(model, k + 10)
    first.backward()
    second.backward()


def with_an_evaluation_between(model: Any, k: int) -> None:
    loss = loss_of(model, k)
    with torch.no_grad():
        loss_of(model, k + 1)
    loss.backward()


def twice(model: Any, k: int) -> None:
    loss = loss_of(model, k)
    loss.backward(retain_graph=True)
    loss.backward()


def one_is_lost(model: Any, k: int) -> None:
    loss = loss_of(model, k)
    loss_of(model, k + 20)
    loss.backward()


def of_other_sizes(model: Any, k: int) -> None:
    loss_of(model, k, rows=30 + 7 * k).backward()


LOOPS: dict[str, Callable[[Any, int], None]] = {
    each.__name__: each
    for each in (
        *(one_backward, several_forwards, in_the_order_of_the_forwards, one_is_lost),
        *(with_an_evaluation_between, twice, of_other_sizes),
    )
}


def train(model: Any, loop: Callable[[Any, int], None], steps: int = 3) -> None:
    optimizer = AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(1)
    for k in range(steps):
        optimizer.zero_grad()
        loop(model, k)
        optimizer.step()


@pytest.mark.parametrize("loop", LOOPS)
def test_the_same_numbers(tmp_path: Path, loop: str) -> None:
    plain, model = pair(tmp_path)
    for each in (plain, model):
        train(each, LOOPS[loop])
    zoo.assert_same(plain, model)
    assert store(model).written_bytes and store(model).read_bytes
    assert os.listdir(tmp_path) == []


def test_with_everything_on_the_disk(tmp_path: Path) -> None:
    plain, model = pair(tmp_path, disk_weights=True)
    for each in (plain, model):
        train(each, several_forwards)
    zoo.assert_same(plain, model)


def test_an_update_in_the_backward(tmp_path: Path) -> None:
    losses: list[list[float]] = []
    for saved in (None, True):
        model = made()
        optimizer = AdamW(model.parameters(), lr=0.01)
        options = {**settings(tmp_path), "disk_saved": saved, "optimizer": optimizer}
        megacompile(model, **options)
        torch.manual_seed(1)
        losses.append([])
        for k in range(4):
            with accumulate(model) if k % 2 == 0 else nullcontext():
                loss = loss_of(model, k)
                loss.backward()
            if k % 2:
                optimizer.step()
                optimizer.zero_grad()
            losses[-1].append(loss.item())
        assert bool(store(model).written_bytes) is bool(saved)
    assert losses[0] == losses[1]


@pytest.mark.parametrize("seed", drawn(range(2), range(2, 4)))
def test_a_harsh_disk(tmp_path: Path, seed: int) -> None:
    """Threads go on in any order, torn and stale memory is NaN, there are few buffers."""
    rng = random.Random(seed)
    with harsh(rng), few_buffers(rng):
        plain, model = pair(tmp_path, disk_weights=bool(seed % 2))
        for each in (plain, model):
            train(each, several_forwards, steps=2)
            train(each, one_is_lost, steps=2)
        zoo.assert_same(plain, model)


def test_a_lost_forward_leaves_its_places_when_they_are_written(tmp_path: Path) -> None:
    """A disk that stands still writes to them later, and to nobody else's."""
    go, real = threading.Event(), transfers._transfer

    def transfer(*args: Any) -> None:
        go.wait()
        real(*args)

    disk = SavedDisk(Disk(ScratchFile(tmp_path)), pool := HostPool(pin=False))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfers, "_transfer", transfer)
        lost = OnDisk(disk, "lost")
        lost.write(pool.store(torch.randn(2000), None))
        del lost
        gc.collect()
        assert pool.lent_bytes == 8000 and disk.places.lent_bytes == 8192
        kept = OnDisk(disk, "kept")
        kept.write(pool.store(value := torch.randn(2000), None))
        go.set()
        assert torch.equal(kept.to_host().back(None), value)
    _until(lambda: pool.lent_bytes == 0 and disk.places.lent_bytes == 8192)


def _until(true: Callable[[], bool]) -> None:
    """Wait for the disk's threads: they forget what they have written when they come to it."""
    for _ in range(1000):
        if true():
            return
        time.sleep(0.01)
    raise AssertionError("the disk's threads have kept it for ten seconds")


def test_the_host_has_few_of_them_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_saved, "SAVED_SETS", 2)
    _, model = pair(tmp_path)
    for k in range(3):
        several_forwards(model, k)
    pool, writes = inside.machine(model).activations, _writes(model)
    assert len(writes) > 4
    assert 0 < pool.peak_bytes <= 4 * SIZE
    assert pool.lent_bytes == 0


def _writes(model: Any) -> list[Any]:
    return ops.nodes_of(schedules(model)[0].forward, ops.write_saved)


def test_bytes_are_counted(tmp_path: Path) -> None:
    _, model = pair(tmp_path)
    loss_of(model, 0).backward()
    count = len(_writes(model))
    assert store(model).written_bytes == store(model).read_bytes == count * SIZE
    assert f"each step writes {count * SIZE / 1024:.1f} KiB there" in str(schedules(model)[0])


def test_places_are_used_again(tmp_path: Path) -> None:
    _, model = pair(tmp_path)
    places = store(model).places
    for k in range(4):
        loss_of(model, k).backward()
        _until(lambda: places.lent_bytes == 0)
        lost = loss_of(model, k)
        del lost
        _until(lambda: places.lent_bytes == 0)
    assert places.held_bytes == len(_writes(model)) * places.file.round_up(SIZE)


def test_nothing_goes_there_unless_it_is_asked_for(tmp_path: Path) -> None:
    _, model = pair(tmp_path, disk_saved=None)
    loss_of(model, 0).backward()
    assert not _writes(model) and not store(model).written_bytes
    assert inside.machine(model).activations.peak_bytes


# --- errors


def failing(monkeypatch: pytest.MonkeyPatch, way: Way, number: int, first: int = 0) -> None:
    """From a call on, a disk that does not do what it is asked to."""
    real, calls = transfers._transfer, iter(range(10**9))

    def transfer(file: Any, of: Way, *args: Any) -> None:
        if of is way and next(calls) >= first:
            raise OSError(number, os.strerror(number))
        real(file, of, *args)

    monkeypatch.setattr(transfers, "_transfer", transfer)


@pytest.mark.parametrize("way", Way)
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_an_error_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: Way, number: int
) -> None:
    plain, model = pair(tmp_path)
    with monkeypatch.context() as patch:
        failing(patch, way, number, first=4)
        with pytest.raises(DiskError) as raised:
            loss_of(model, 0).backward()
    assert raised.value.errno == number
    text = str(raised.value)
    assert f"{way.name}_SAVED of " in text and os.strerror(number) in text, text
    model.zero_grad()
    for each in (plain, model):  # it goes on where the disk does
        train(each, one_backward)
    zoo.assert_same(plain, model)


def test_the_last_write_fails_in_the_backward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, model = pair(tmp_path)
    loss_of(model, 0).backward()
    with monkeypatch.context() as patch:
        chunks = 2 * len(_writes(model))  # the whole pages, and the rest
        failing(patch, Way.WRITE, errno.EIO, first=chunks - 1)
        loss = loss_of(model, 0)
        with pytest.raises(DiskError, match=r"WRITE_SAVED of .* failed"):
            loss.backward()


def test_a_full_disk(tmp_path: Path) -> None:
    for size in ("40KiB", "90KiB"):
        plain, model = pair(tmp_path, disk_memory=size)
        with pytest.raises(DiskError) as raised:
            loss_of(model, 0).backward()
        assert "WRITE_SAVED of " in str(raised.value) and "disk_memory=" in str(raised.value)
        assert raised.value.errno == errno.EDQUOT
        del plain, model


def test_a_child_has_its_own(tmp_path: Path) -> None:
    plain, model = pair(tmp_path)

    def child() -> None:
        with pytest.raises(DiskError, match="run the forward in the child too"):
            loss.backward()
        for each in (plain, model):
            each.zero_grad()
            torch.manual_seed(2)
            loss_of(each, 1).backward()
        zoo.assert_same(plain, model)
        assert store(model).written_bytes == before

    torch.manual_seed(1)
    wanted = loss_of(plain, 0)
    torch.manual_seed(1)
    loss = loss_of(model, 0)
    before = store(model).written_bytes
    in_child(child)
    plain.zero_grad()
    for each in (wanted, loss):
        each.backward()
    zoo.assert_same(plain, model)


def test_options() -> None:
    with pytest.raises(OptionError, match="disk_saved=True without disk="):
        Options.resolve(device="cpu", disk_saved=True)
    with pytest.raises(OptionError, match="with activations='recompute'; only what waits"):
        Options.resolve(device="cpu", disk="/tmp", disk_saved=True, activations="recompute")
    with pytest.raises(OptionTypeError, match="disk_saved"):
        Options.resolve(device="cpu", disk="/tmp", disk_saved=1)  # type: ignore[arg-type]


# --- the parts


def test_a_backward_that_was_planned_otherwise_finds_what_it_needs(tmp_path: Path) -> None:
    pool = HostPool(pin=False)
    disk = SavedDisk(Disk(ScratchFile(tmp_path)), pool)
    value = torch.randn(70, 40).t()
    written = OnDisk(disk, "1WRITE_SAVED")
    written.write(pool.store(value, None))
    names = {"host": "y", "disk": "y"}
    assert taken({"disk": written}, "disk", names, pool, None) is written
    on_device = taken({"disk": written}, "y", names, pool, None)
    assert torch.equal(on_device, value) and on_device.stride() == value.stride()
    on_host = taken({"disk": written}, "host", names, pool, None)
    assert isinstance(on_host, OnHost) and torch.equal(on_host.back(None), value)
    for left in ({"y": value}, {"host": pool.store(value, None)}):
        found = taken(left, "disk", names, pool, None)
        assert isinstance(found, OnHost) and found.meta == TensorMeta.of(value)
    del on_host, found, left
    assert pool.lent_bytes == 0


@pytest.mark.parametrize("shape", [(0, 3), (1,), (1024,), (1025,), (3, 5000)])
def test_any_size_comes_back(tmp_path: Path, shape: tuple[int, ...]) -> None:
    pool = HostPool(pin=False)
    disk = SavedDisk(Disk(ScratchFile(tmp_path)), pool)
    with harsh(random.Random(0)):
        values = [torch.randn(shape) for _ in range(5)]
        each = [OnDisk(disk, f"{k}WRITE_SAVED") for k in range(5)]
        for value, written in zip(values, each, strict=True):
            written.write(pool.store(value, None))
        for value, written in zip(values, each, strict=True):
            assert torch.equal(written.to_host().back(None), value)
    del each, written
    _until(lambda: disk.places.lent_bytes == pool.lent_bytes == 0)
