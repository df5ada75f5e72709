"""The queues that a schedule's ops run on."""

from __future__ import annotations

import enum


class Stream(enum.Enum):
    """The queues of a schedule's ops. Device queues run their ops in issue order. The two queues of
    `optimizer.step()` do not: host and helping device both take updates from one list, and their
    division is not known beforehand. The disk queues do not either: several requests are in flight
    at a time."""

    COMPUTE = "compute"  # the user's current stream: every compute, and updates on the device
    H2D = "h2d"  # host to device: weights, saved tensors, gradients so far, optimizer states
    D2H = "d2h"  # device to host: gradients, saved tensors, new parameters and states
    HOST = "host"  # host threads: updates in host memory
    DEVICE = "device"  # the device helping with host updates, in chunks over the link
    READ = "read"  # from a disk to host memory, several requests at a time
    WRITE = "write"  # and back
    COMM = "comm"  # collectives: the same on each rank, in the same order

    __hash__ = object.__hash__  # a member is one object; Enum hashes its name, in Python

    @property
    def in_order(self) -> bool:
        """True if each op finishes before the next op of its stream starts."""
        return self.in_every_step or self is Stream.COMM

    @property
    def in_every_step(self) -> bool:
        """True if the stream is shown even when idle: compute and copies."""
        return self in (Stream.COMPUTE, Stream.H2D, Stream.D2H)
