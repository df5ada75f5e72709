"""Host memory and threads near a GPU: on a sysfs of files, and with calls that are written down."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megacompile import numa
from megacompile.numa import Node
from megacompile.runtime.device.buffers import HostBuffer

GPU = torch.device("cuda", 0)
ADDRESS = "0000:dc:00.0"
NODE = Node(1, 2, frozenset({2, 3}))


class Calls:
    """The C library: two system calls, which note what was asked for."""

    def __init__(self) -> None:
        self.error = self.policy = 0
        self.made: list[tuple[int, int, int, int, int]] = []  # address, size, mode, node, flags
        self.real = ctypes.CDLL(None, use_errno=True)
        calls = self

        def syscall(number: Any, *args: Any) -> int:
            return calls.call(numa._NUMBERS[platform.machine()].index(number.value), *args)

        self.syscall = syscall

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def call(self, which: int, *args: Any) -> int:
        if which == numa._GET_MEMPOLICY:
            args[0]._obj.value = self.policy
        else:
            address, size, mode, mask, bits, flags = args
            words = mask._obj
            assert bits.value == len(words) * 64 + 1
            (node,) = (64 * i + b for i, w in enumerate(words) for b in range(64) if w >> b & 1)
            self.made.append((address.value, size.value, mode.value, node, flags.value))
        ctypes.set_errno(self.error)
        return -1 if self.error else 0


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    made = Calls()
    monkeypatch.setattr(ctypes, "CDLL", lambda *args, **given: made)
    numa._syscall.cache_clear()
    yield made
    numa._syscall.cache_clear()


@pytest.fixture(autouse=True)
def allowed(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, frozenset[int]]]:
    """The cores of each thread, by its number; eight are there."""
    of = dict[int, frozenset[int]]()
    eight = frozenset(range(8))

    def set_cores(pid: int, cores: Any) -> None:
        assert pid == 0
        of[threading.get_native_id()] = frozenset(cores)

    monkeypatch.setattr(os, "sched_setaffinity", set_cores)
    monkeypatch.setattr(
        os, "sched_getaffinity", lambda pid: of.get(threading.get_native_id(), eight)
    )
    yield of


def sysfs(
    root: Path, *cores: str, near: int | str = 1, numbers: tuple[int, ...] = (0, 1, 2, 3)
) -> Path:
    """A tree with so many nodes, and a GPU at one of them."""
    for number, text in zip(numbers, cores, strict=False):
        node = root / "devices/system/node" / f"node{number}"
        node.mkdir(parents=True)
        (node / "cpulist").write_text(f"{text}\n")
    (root / "devices/system/node/possible").write_text("0-3\n")
    gpu = root / "bus/pci/devices" / ADDRESS
    gpu.mkdir(parents=True)
    (gpu / "numa_node").write_text(f"{near}\n")
    return root


def test_the_node_of_a_gpu_and_its_cores(
    tmp_path: Path, allowed: dict[int, frozenset[int]]
) -> None:
    root = sysfs(tmp_path / "a", "0-1,4", "2-3,5-6")
    assert numa.node_at(ADDRESS, root) == Node(1, 2, frozenset({2, 3, 5, 6}))
    assert str(numa.node_at(ADDRESS, root)) == "1 of 2 (cores 2-3,5-6)"
    assert numa.node_at("0000:01:00.0", root) is None
    # a GPU's own memory may be a node, which has no cores
    own = sysfs(tmp_path / "b", "0-3", "", "4-7", near=9, numbers=(0, 1, 9))
    found = numa.node_at(ADDRESS, own)
    assert found is not None and (found.number, found.count) == (9, 2)
    os.sched_setaffinity(0, {0, 5, 9})
    assert numa.node_at(ADDRESS, root) == Node(1, 2, frozenset({5})), "it may use no others"
    os.sched_setaffinity(0, {0, 1})
    assert numa.node_at(ADDRESS, root) is None, "the user has put the process elsewhere"
    os.sched_setaffinity(0, range(8))
    two: Any = ("0-3", "4-7")
    several: list[Any] = [(two, -1), (two, "?"), (two, 2), (("0-7", ""), 0), (("0-3", "x"), 0)]
    for k, (cores, near) in enumerate(several):  # there is one, or nobody knows
        assert numa.node_at(ADDRESS, sysfs(tmp_path / str(k), *cores, near=near)) is None


def test_the_address_is_what_torch_says(
    tmp_path: Path, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = sysfs(tmp_path, "0-3", "4-7")
    gpu = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xDC, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    found = numa.node_of(GPU, root)
    assert found is not None and found.number == 1
    for policy in (1, 2, 3):  # preferred, bound, interleaved: numactl's
        calls.policy = policy
        assert numa.node_of(GPU, root) is None, "the user has said where memory is to be"
    calls.policy, calls.error = 2, errno.EPERM
    assert numa.node_of(GPU, root) == found, "nobody can know"
    del gpu.pci_domain_id
    assert numa.node_of(GPU, root) is None, "torch does not say"


def test_buffers_that_are_copied_come_from_the_node(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = SimpleNamespace(
        cudaHostRegister=lambda address, size, flags: 0, cudaHostUnregister=lambda address: 0
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    copied = HostBuffer(3 * mmap.PAGESIZE, pin=True, node=NODE)
    start = torch.frombuffer(copied, dtype=torch.uint8).data_ptr()
    assert calls.made == [(start, len(copied), 1, 1, 0)]
    used = HostBuffer(2 * mmap.PAGESIZE, pin=False, node=NODE)
    assert len(calls.made) == 1, "it lies where the thread runs that uses it"
    used.lock()
    start = torch.frombuffer(used, dtype=torch.uint8).data_ptr()
    assert calls.made[1:] == [(start, len(used), 1, 1, 0)]
    assert HostBuffer(mmap.PAGESIZE, pin=True).locked and len(calls.made) == 2
    for number in (0, 63, 64):
        assert numa.prefer(4096, 8192, Node(number, 2, frozenset()))
        assert calls.made.pop() == (4096, 8192, 1, number, 0)
    calls.error = errno.EPERM
    assert not numa.prefer(4096, 8192, NODE)


def test_updates_run_there_if_all_their_threads_can(tmp_path: Path) -> None:
    """torch has a thread for each core; cpulist has each hardware thread."""
    for threads, processes, near in ((2, 1, True), (1, 2, True), (3, 1, False), (2, 2, False)):
        found = numa.cores_of_updates(NODE, threads, processes)
        assert found == (NODE.cores if near else frozenset())
    root = sysfs(tmp_path, "0-3", "4-7")
    for first, second in ((4, 6), (5, 7)):
        for core in (first, second):
            topology = root / f"devices/system/cpu/cpu{core}/topology"
            topology.mkdir(parents=True)
            (topology / "thread_siblings_list").write_text(f"{first},{second}\n")
    node = numa.node_at(ADDRESS, root)
    assert node == Node(1, 2, frozenset({4, 5, 6, 7}), 2)
    assert numa.cores_of_updates(node, 2, 1) == node.cores
    assert numa.cores_of_updates(node, 4, 1) == frozenset(), "half of them would be elsewhere"


def test_a_block_gives_its_cores_back(allowed: dict[int, frozenset[int]]) -> None:
    with numa.bound(NODE):
        assert allowed[threading.get_native_id()] == NODE.cores
    assert allowed[threading.get_native_id()] == frozenset(range(8))
