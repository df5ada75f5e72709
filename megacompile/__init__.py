"""megacompile: train a model that does not fit on the GPU, with one line.

model = megacompile(model)
"""

from megacompile.api import accumulate, megacompile, schedules, updates
from megacompile.errors import (
    BackwardError,
    HostMemoryError,
    MegacompileError,
    ModelError,
    OptimizerError,
    OptionError,
    ScheduleError,
    UnsupportedGraphError,
)
from megacompile.ir import Schedule
from megacompile.options import Activations, Lowering, Options

__version__ = "0.1.0"

__all__ = [
    "Activations",
    "BackwardError",
    "HostMemoryError",
    "Lowering",
    "MegacompileError",
    "ModelError",
    "OptimizerError",
    "OptionError",
    "Options",
    "Schedule",
    "ScheduleError",
    "UnsupportedGraphError",
    "accumulate",
    "megacompile",
    "schedules",
    "updates",
]
