"""The queues that a schedule's ops run on."""

from __future__ import annotations

import enum


class Stream(enum.Enum):
    """The queues of a schedule's ops.

    Those of the device run their ops in the order in which they are issued. The two of
    `optimizer.step()` do not: the host takes the first update that waits, the device that helps it
    takes the last one, and it is not known beforehand where they meet. Nor do those of a disk,
    which has several of its requests at a time.
    """

    COMPUTE = "compute"  # the user's current stream: every compute, and updates on the device
    H2D = "h2d"  # host to device: weights, saved tensors, gradients so far, optimizer states
    D2H = "d2h"  # device to host: gradients, saved tensors, new parameters and states
    HOST = "host"  # threads of the host: updates in its memory
    DEVICE = "device"  # which helps the host with updates, in chunks over the link
    READ = "read"  # from a disk to host memory, several requests at a time
    WRITE = "write"  # and back
    COMM = "comm"  # collectives of several ranks: they are the same on each, in the same order

    __hash__ = object.__hash__  # a member is one object; Enum hashes its name, in Python

    @property
    def in_order(self) -> bool:
        """True if an op is done before the next one of its stream begins."""
        return self.in_every_step or self is Stream.COMM

    @property
    def in_every_step(self) -> bool:
        """True if the stream is shown when it is idle too: computes and copies."""
        return self in (Stream.COMPUTE, Stream.H2D, Stream.D2H)
