"""megacompile: train a model that does not fit on the GPU, with one line.

model = megacompile(model)
"""

from megacompile.api import Trace, accumulate, explain, megacompile, schedules, trace, updates
from megacompile.errors import (
    AnomalyError,
    BackwardError,
    DeviceMemoryError,
    HostMemoryError,
    MegacompileError,
    MissingExtraError,
    ModelError,
    OptimizerError,
    OptionError,
    ScheduleError,
    TraceError,
    UnsupportedGraphError,
)
from megacompile.ir.schedule import Schedule
from megacompile.lifetime import full_parameters, released, unmegacompile
from megacompile.options import Activations, Head, Lowering, Options
from megacompile.plan.explanation import Explanation

__version__ = "0.1.0"

__all__ = [
    "Activations",
    "AnomalyError",
    "BackwardError",
    "DeviceMemoryError",
    "Explanation",
    "Head",
    "HostMemoryError",
    "Lowering",
    "MegacompileError",
    "MissingExtraError",
    "ModelError",
    "OptimizerError",
    "OptionError",
    "Options",
    "Schedule",
    "ScheduleError",
    "Trace",
    "TraceError",
    "UnsupportedGraphError",
    "accumulate",
    "explain",
    "full_parameters",
    "megacompile",
    "released",
    "schedules",
    "trace",
    "unmegacompile",
    "updates",
]
