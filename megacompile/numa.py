"""The NUMA node of a GPU: placement of host memory and threads near it.

A copy between a GPU and another socket's memory crosses the link between sockets, which is slower
than PCIe and shared. A page is placed on the node of the thread that touches it first. Therefore

    threads that touch memory for copies   run on the cores of the GPU's node
    threads that update                    run there, if the node has a core for each of them

Nothing is done on a machine with one node, if the system does not name the GPU's node (most virtual
machines), or if the user has chosen only cores of other nodes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_SYSFS = Path("/sys")


@dataclass(frozen=True, slots=True)
class Node:
    """One of several nodes of a machine."""

    number: int
    count: int  # of nodes that have cores
    cores: frozenset[int]  # of this node, usable by the process; the system's numbers
    siblings: int = 1  # hardware threads that share a physical core

    def __str__(self) -> str:
        return f"{self.number} of {self.count}"


def node_of(device: torch.device, root: Path = _SYSFS) -> Node | None:
    """Find the node that a GPU is attached to; None if memory and threads should be left alone: see
    above. sysfs is mounted at `root`."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    names = ("pci_domain_id", "pci_bus_id", "pci_device_id")
    place: list[Any] = [getattr(properties, name, None) for name in names]
    if None in place:
        return None
    return node_at("{:04x}:{:02x}:{:02x}.0".format(*place), root)


def node_at(address: str, root: Path = _SYSFS) -> Node | None:
    """Find the node of a PCI device by its address ("0000:dc:00.0"); None as for `node_of`."""
    try:
        number = int((root / "bus/pci/devices" / address / "numa_node").read_text())
        lists = [
            (int(path.parent.name.removeprefix("node")), path.read_text())
            for path in (root / "devices/system/node").glob("node[0-9]*/cpulist")
        ]
        nodes = {node: _cores(text) for node, text in lists}
    except (OSError, ValueError):
        return None
    nodes = {node: cores for node, cores in nodes.items() if cores}  # others only have memory
    if number not in nodes or len(nodes) < 2:  # -1: the system does not know
        return None
    cores = nodes[number] & os.sched_getaffinity(0)
    return Node(number, len(nodes), cores, _siblings(cores, root)) if cores else None


def _siblings(cores: Collection[int], root: Path) -> int:
    """Number of hardware threads of a core."""
    places = (root / f"devices/system/cpu/cpu{n}/topology/thread_siblings_list" for n in cores)
    try:
        return max(1, *(len(_cores(place.read_text())) for place in places))
    except (OSError, ValueError):
        return 1


def cores_of_updates(node: Node | None, threads: int, processes: int) -> frozenset[int]:
    """The cores for threads of updates, of which each of `processes` with GPUs on the node has
    `threads`: the node's if it has a core for each; else none, and the system decides."""
    if node is None or threads * processes * node.siblings > len(node.cores):
        return frozenset()
    return node.cores


def usable_cores() -> int:
    """The number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def bind(cores: Collection[int]) -> None:
    """Bind this thread, and threads that it starts, to cores. Without cores, do nothing."""
    if cores:
        with contextlib.suppress(OSError):  # others may have been taken away since
            os.sched_setaffinity(0, cores)


@contextmanager
def bound(node: Node | None) -> Iterator[None]:
    """A context in which this thread runs on a node's cores; None: unchanged. OpenMP must not start
    inside: its threads would stay on these cores."""
    if node is None:
        yield
        return
    before = os.sched_getaffinity(0)
    bind(node.cores)
    try:
        yield
    finally:
        bind(before)


def _cores(text: str) -> frozenset[int]:
    """Parse "0-3,8" to 0, 1, 2, 3, 8."""
    found = set[int]()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)
