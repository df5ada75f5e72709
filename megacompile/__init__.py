"""Train a PyTorch model that does not fit on the GPU, with one line.

model = megacompile(model)
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megacompile.api import Checkpoint, accumulate, megacompile, save
    from megacompile.errors import *
    from megacompile.inspection import Metrics, Trace, explain, metrics, schedules, trace, updates
    from megacompile.ir.schedule import Schedule
    from megacompile.lifetime import eager, full_parameters, released, unmegacompile
    from megacompile.options import Activations, Head, Lowering, Options
    from megacompile.plan.explanation import Explanation

__version__ = "0.1.0"

__all__ = [
    "Activations",
    "AnomalyError",
    "BackwardError",
    "Checkpoint",
    "CheckpointError",
    "DeviceMemoryError",
    "DiskError",
    "Explanation",
    "Head",
    "HostMemoryError",
    "Lowering",
    "MegacompileError",
    "Metrics",
    "MissingExtraError",
    "ModelError",
    "OptimizerError",
    "OptionError",
    "Options",
    "RankError",
    "Schedule",
    "ScheduleError",
    "Trace",
    "TraceError",
    "UnsupportedGraphError",
    "accumulate",
    "eager",
    "explain",
    "full_parameters",
    "megacompile",
    "metrics",
    "released",
    "save",
    "schedules",
    "trace",
    "unmegacompile",
    "updates",
]

_HOMES = (  # modules that define the names above, which are imported on first use
    "megacompile.errors",
    "megacompile.api",
    "megacompile.inspection",
    "megacompile.lifetime",
    "megacompile.ir.schedule",
    "megacompile.options",
    "megacompile.plan.explanation",
)


def __getattr__(name: str) -> Any:
    """Import a public name or a submodule on first use: the command line must start without
    torch."""
    if name in __all__:
        for home in map(importlib.import_module, _HOMES):
            if hasattr(home, name):
                globals()[name] = getattr(home, name)
                return globals()[name]
    path = f"{__name__}.{name}"
    if not name.startswith("_"):
        try:
            return importlib.import_module(path)
        except ModuleNotFoundError as error:
            if error.name != path:
                raise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
