"""A discrete-event simulation of queues whose rates depend on what else runs.

Each queue runs its work in order, one item at a time, and an item begins when everything that it
waits for is done. Copies take their bytes over the bandwidth, which is lower while both directions
run. The CPU's updates and the copies share host memory bandwidth; if they need more than there is,
each gets a fair share. A helping device takes updates from the CPU over the link, chosen as in
`runtime.updates.workers`. Times are in seconds.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from megacompile.cost.hardware import Hardware
from megacompile.ir.stream import Stream

STREAMS = tuple(Stream)  # a queue is the index of its stream
COMPUTE, H2D, D2H, HOST, DEVICE, READ, WRITE, COMM = range(len(STREAMS))
_NETWORK = len(STREAMS)  # bit of the busy mask: the running collective is between replicas
_IN_TURN = (COMPUTE, H2D, D2H, DEVICE, READ, WRITE, COMM, HOST)  # the device before the host


@dataclass(slots=True)
class Work:
    """An op of a step."""

    graph: str
    label: str
    queue: int
    amount: float  # seconds of a compute, bytes of a copy or an update
    waits: list[int]  # indices in `Queues.works`
    step: int
    helped: float = 0.0  # its amount on the device; 0: the device cannot help
    of_replicas: bool = False  # a collective between replicas


class Queues:
    """Queues of work, and the times when it ran."""

    def __init__(self, hardware: Hardware) -> None:
        self.works: list[Work] = []
        self.start_s: list[float] = []
        self.stop_s: list[float] = []
        self.before: list[int] = []  # index of the previous work on the same queue, or -1
        self.rates = _rates_of(hardware)
        self._host_s, self._device_s = (1 / self.rates[1 << k][k] for k in (HOST, DEVICE))

    def add(self, work: Work) -> int:
        """Append work; returns its index."""
        self.works.append(work)
        return len(self.works) - 1

    def go(self) -> None:
        """Run all work."""
        count = len(self.works)
        self.start_s, self.stop_s = [0.0] * count, [0.0] * count
        self.before = [-1] * count
        missing = [len(work.waits) for work in self.works]
        readers: list[list[int]] = [[] for _ in range(count)]
        queues: list[deque[int]] = [deque() for _ in STREAMS]
        for i, work in enumerate(self.works):
            queues[work.queue].append(i)
            for wait in work.waits:
                readers[wait].append(i)
        host = queues[DEVICE] = queues[HOST]  # the device takes updates of the host
        order = [k for k in _IN_TURN if queues[k]]
        runs, left, last_of = [-1] * len(STREAMS), [0.0] * len(STREAMS), [-1] * len(STREAMS)
        running, now, done = 0, 0.0, 0
        while done < count:
            for k in order:
                queue = queues[k]
                if running >> k & 1 or not queue:
                    continue
                i = queue[0]
                if queue is host:
                    i = self._next(k, queue, left[DEVICE] if running >> DEVICE & 1 else 0.0)
                if i < 0 or missing[i]:
                    continue
                queue.remove(i)
                running |= 1 << k | self.works[i].of_replicas << _NETWORK
                runs[k] = i
                left[k] = self.works[i].amount
                if k == DEVICE:
                    self.works[i].queue, left[k] = k, self.works[i].helped
                self.start_s[i] = now
                self.before[i] = last_of[k]
            assert running, "a schedule whose ops wait for each other"
            rates = self.rates[running]
            active = [k for k in order if running >> k & 1]
            times = [left[k] / rates[k] if left[k] else 0.0 for k in active]
            step = min(times)
            now += step
            for k, time_s in zip(active, times, strict=True):
                if time_s > step * (1 + 1e-12):
                    left[k] -= step * rates[k]
                    continue
                i = runs[k]
                self.stop_s[i] = now
                running &= ~(1 << k | self.works[i].of_replicas << _NETWORK)
                last_of[k] = i
                done += 1
                for reader in readers[i]:
                    missing[reader] -= 1

    def _next(self, k: int, queue: Iterable[int], device_left: float) -> int:
        """Index of the update that the host or the device would begin now, or -1; `device_left` is
        the rest of the device's current work."""
        if k == DEVICE:
            return next((i for i in self._of_a_step(queue) if self.works[i].helped), -1)
        device_s = device_left * self._device_s
        for i in self._of_a_step(queue):
            work = self.works[i]
            device_s += work.helped * self._device_s
            if not work.helped or work.amount * self._host_s <= device_s:
                return i
        return -1

    def _of_a_step(self, queue: Iterable[int]) -> Iterator[int]:
        """The waiting work of the first step."""
        step = -1
        for i in queue:
            if step not in (-1, self.works[i].step):
                return
            step = self.works[i].step
            yield i

    def critical(self, last: int, start_s: float) -> dict[Stream, float]:
        """Seconds by stream on the critical path, from an op back to a start time."""
        found = dict.fromkeys(STREAMS, 0.0)
        while last >= 0 and self.stop_s[last] > start_s:
            begin = max(self.start_s[last], start_s)
            found[STREAMS[self.works[last].queue]] += self.stop_s[last] - begin
            # the work whose end allowed this one to start
            before = [self.before[last]] if self.before[last] >= 0 else []
            waits = [*self.works[last].waits, *before]
            last = max(waits, key=self.stop_s.__getitem__, default=-1)
        return found


@functools.lru_cache(maxsize=16)
def _rates_of(hardware: Hardware) -> tuple[tuple[float, ...], ...]:
    """Work per second of each queue, by the mask of busy queues."""
    return tuple(_rates(hardware, busy) for busy in range(2 << len(STREAMS)))


def _rates(hardware: Hardware, busy: int) -> tuple[float, ...]:
    """Work per second of each queue while the queues in the mask are busy.

    The device's updates use both directions of the link to the host, and so do collectives if GPUs
    have no other interconnect or reach the network; each direction is divided among its users.
    Every copy to or from the host also takes host memory bandwidth; collectives are assumed to take
    none, which was not measured.
    """
    h2d, d2h, host, device, comm = (busy >> k & 1 for k in (H2D, D2H, HOST, DEVICE, COMM))
    if busy >> _NETWORK & 1:
        gather = hardware.replicas_gb_s
        over_link = comm and gather <= hardware.h2d_gb_s
    else:
        gather = hardware.interconnect_gb_s
        over_link = comm and hardware.gathers_over_pcie > 0
    down = hardware.h2d_both_gb_s if d2h or device or over_link else hardware.h2d_gb_s
    up = hardware.d2h_both_gb_s if h2d or device or over_link else hardware.d2h_gb_s
    gathers = gather if over_link else 0.0
    ways = ((h2d, down), (d2h, up))  # a gather alone gets its measured rate
    (down, helps_down, comes), (up, helps_up, goes) = (
        _shares([copies * rate, device * rate, gathers], max(rate, gathers))
        for copies, rate in ways
    )
    if over_link:
        gather = min(comes, goes)
    host_gb_s = hardware.update_gb_s if host else 0.0
    given = _shares([down, up, host_gb_s, 2 * min(helps_down, helps_up)], hardware.host_memory_gb_s)
    disk = [hardware.disk_read_gb_s, hardware.disk_write_gb_s]
    if busy >> READ & busy >> WRITE & 1:
        disk = [hardware.disk_read_both_gb_s, hardware.disk_write_both_gb_s]
    of_disk = (math.inf if rate is None else rate for rate in disk)  # unmeasured: it takes no time
    return (1.0, *(rate * 1e9 for rate in (*given, *of_disk, gather)))


def _shares(wanted: Sequence[float], total: float) -> list[float]:
    """Max-min fair shares: demands below an equal share are met, and the others divide the rest."""
    given = [0.0] * len(wanted)
    left = total
    order = sorted((k for k in range(len(wanted)) if wanted[k]), key=wanted.__getitem__)
    for position, k in enumerate(order):
        given[k] = min(wanted[k], left / (len(order) - position))
        left -= given[k]
    return given
