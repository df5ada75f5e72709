"""The ops of `megacompile.ir.ops`, bound to the machine that they run on.

Each is a method of the op's name, in the file of the name that its declaration is in.
"""

from __future__ import annotations

from megacompile.runtime.ops.collectives import CollectiveOps
from megacompile.runtime.ops.compute import ComputeOps
from megacompile.runtime.ops.device_updates import DeviceUpdateOps
from megacompile.runtime.ops.disk import DiskOps
from megacompile.runtime.ops.gradients import GradientOps
from megacompile.runtime.ops.lifetimes import LifetimeOps
from megacompile.runtime.ops.saved_tensors import SavedTensorOps
from megacompile.runtime.ops.updates import UpdateOps
from megacompile.runtime.ops.weights import WeightOps


class BoundOps(
    WeightOps,
    CollectiveOps,
    ComputeOps,
    SavedTensorOps,
    GradientOps,
    DeviceUpdateOps,
    UpdateOps,
    DiskOps,
    LifetimeOps,
):
    """The ops of one graph of a schedule, on a machine."""
