"""The in-order queues of a device."""

from __future__ import annotations

import enum


class Stream(enum.Enum):
    """The in-order queues a schedule's ops run on."""

    COMPUTE = "compute"  # the user's current stream: every forward, recompute and backward
    H2D = "h2d"  # host to device: weights, activations, gradients that are accumulated into
    D2H = "d2h"  # device to host: gradients, and activations until their backward
