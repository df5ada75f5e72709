"""Host memory and threads near a GPU: on a sysfs of files, and with calls that are written down."""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import platform
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megacompile import numa
from megacompile.numa import Node
from megacompile.runtime.device import touch as touching
from megacompile.runtime.device.background import Background
from megacompile.runtime.device.buffers import HostBuffer
from megacompile.runtime.device.host_budget import HostBudget
from megacompile.runtime.device.touch import CHUNK_BYTES, touch

GPU = torch.device("cuda", 0)
ADDRESS = "0000:dc:00.0"
NODE = Node(1, 2, frozenset({2, 3}))
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="calls Linux")


class Calls:
    """The C library: two system calls and `madvise`, which note what was asked for."""

    def __init__(self) -> None:
        self.error = self.policy = 0
        self.made: list[tuple[int, int, int, int, int]] = []  # address, size, mode, node, flags
        self.advised: list[tuple[int, int, frozenset[int]]] = []  # address, size, where
        self.real = ctypes.CDLL(None, use_errno=True)
        calls = self

        def syscall(number: Any, *args: Any) -> int:
            return calls.call(numa._NUMBERS[platform.machine()].index(number.value), *args)

        def madvise(start: int, size_bytes: int, advice: int) -> int:
            calls.advised.append((start, size_bytes, frozenset(os.sched_getaffinity(0))))
            return 0

        self.syscall, self.madvise = syscall, madvise

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
    cached = (numa._syscall, numa._say_refused, touching._madvise)
    monkeypatch.setattr(ctypes, "CDLL", lambda *args, **given: made)
    for each in cached:
        each.cache_clear()
    yield made
    monkeypatch.undo()
    for each in cached:
        each.cache_clear()


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = SimpleNamespace(
        cudaHostRegister=lambda address, size, flags: 0, cudaHostUnregister=lambda address: 0
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)


@pytest.fixture(autouse=True)
def allowed(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, frozenset[int]]]:
    """The cores of each thread, by its number; eight are there."""
    of = dict[int, frozenset[int]]()

    def set_cores(pid: int, cores: Any) -> None:
        assert pid == 0
        of[threading.get_native_id()] = frozenset(cores)

    eight = frozenset(range(8))
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


def test_the_node_of_a_gpu_and_its_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = sysfs(tmp_path / "a", "0-1,4", "2-3,5-6")
    assert numa.node_at(ADDRESS, root) == Node(1, 2, frozenset({2, 3, 5, 6}))
    assert str(numa.node_at(ADDRESS, root)) == "1 of 2 (cores 2-3,5-6)"
    assert numa.node_at("0000:01:00.0", root) is None
    # a GPU's own memory may be a node, which has no cores
    found = numa.node_at(
        ADDRESS, sysfs(tmp_path / "b", "0-3", "", "4-7", near=9, numbers=(0, 1, 9))
    )
    assert found is not None and (found.number, found.count) == (9, 2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 5, 9})
    assert numa.node_at(ADDRESS, root) == Node(1, 2, frozenset({5})), "it may use no others"
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    assert numa.node_at(ADDRESS, root) is None, "the user has put the process elsewhere"


def test_no_node_where_there_is_one_or_nobody_knows(tmp_path: Path) -> None:
    two: Any = ("0-3", "4-7")
    several: list[Any] = [(two, -1), (two, "?"), (two, 2), (("0-7", ""), 0), (("0-3", "x"), 0)]
    for k, (cores, near) in enumerate(several):
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


def test_a_node_is_preferred_and_a_refusal_said_once(
    calls: Calls, caplog: pytest.LogCaptureFixture
) -> None:
    for number in (0, 63, 64):
        assert numa.prefer(4096, 8192, Node(number, 2, frozenset()))
        assert calls.made.pop() == (4096, 8192, 1, number, 0)
    calls.error = errno.EPERM
    with caplog.at_level(logging.INFO, "megacompile.memory"):
        assert not numa.prefer(4096, 8192, NODE) and not numa.prefer(0, 8192, NODE)
    assert len(caplog.messages) == 1


@linux
def test_the_system_takes_it() -> None:
    """Where it may be asked: shared and private memory, and which node has the policy."""
    node = Node(0, 1, frozenset({0}))
    for pin in (True, False):
        buffer = HostBuffer(3 * mmap.PAGESIZE, pin=pin, touch=False)
        start = torch.frombuffer(buffer, dtype=torch.uint8).data_ptr()
        if not numa.prefer(start, len(buffer), node):
            pytest.skip("mbind is refused here")
        mode, mask = ctypes.c_int(-1), ctypes.c_ulong(0)
        error = numa._syscall()(
            numa._GET_MEMPOLICY,
            ctypes.byref(mode),
            ctypes.byref(mask),
            ctypes.c_ulong(64),
            ctypes.c_void_p(start + mmap.PAGESIZE),
            ctypes.c_ulong(2),  # MPOL_F_ADDR
        )
        assert (error, mode.value, mask.value) == (0, 1, 1)
        buffer.bytes(len(buffer)).fill_(7)
    assert not numa.prefer(1, 4096, node), "which is no address of a page"
    assert not numa._has_policy()


# --- what uses it


def test_buffers_that_are_copied_come_from_the_node(calls: Calls, cudart: None) -> None:
    budget = HostBudget(node=NODE)
    copied = budget.make(3 * mmap.PAGESIZE, "a test", pin=True)
    start = torch.frombuffer(copied, dtype=torch.uint8).data_ptr()
    assert calls.made == [(start, len(copied), 1, 1, 0)]
    used = budget.make(2 * mmap.PAGESIZE, "a test", pin=False)
    assert len(calls.made) == 1, "it lies where the thread runs that uses it"
    used.lock()
    start = torch.frombuffer(used, dtype=torch.uint8).data_ptr()
    assert calls.made[1:] == [(start, len(used), 1, 1, 0)]
    plain = HostBudget().make(mmap.PAGESIZE, "a test", pin=True)
    assert len(calls.made) == 2 and plain.locked


def test_pages_are_made_by_threads_of_the_node_or_the_caller(
    calls: Calls, allowed: dict[int, frozenset[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    touch(torch.frombuffer(mmap.mmap(-1, 3 * CHUNK_BYTES), dtype=torch.uint8), NODE)
    assert len({start for start, _, _ in calls.advised}) == len(calls.advised) == 3
    assert {where for _, _, where in calls.advised} == {NODE.cores}
    assert threading.get_native_id() not in allowed, "the caller stays where it is"

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    calls.advised.clear()
    touch(torch.frombuffer(mmap.mmap(-1, 4096), dtype=torch.uint8), NODE)
    assert [size for _, size, _ in calls.advised] == [4096]


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


def test_a_thread_stays_on_its_cores_and_a_block_gives_them_back(
    allowed: dict[int, frozenset[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, thread = threading.get_native_id(), Background("test-numa", NODE.cores)
    for _ in range(2):
        assert thread.call(lambda: allowed.get(threading.get_native_id())) == NODE.cores
    assert here not in allowed
    with numa.bound(NODE):
        assert allowed[here] == NODE.cores
    assert allowed[here] == frozenset(range(8))

    def refuse(pid: int, cores: Any) -> None:
        raise OSError(errno.EINVAL, "no such cores")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    numa.bind(NODE.cores)  # cores that are gone bind nobody
