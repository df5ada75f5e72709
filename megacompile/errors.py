"""Errors of megacompile. Each message names the place, what it got, what it needed, and the fix.

Errors that a user can cause derive from `MegacompileError` and from the built-in class that fits
(`ValueError`, `RuntimeError`, `MemoryError`), so existing `except` clauses keep working. An
`AssertionError` from this package is a bug in it. docs/troubleshooting.md lists all messages.
"""

from __future__ import annotations


class MegacompileError(Exception):
    """Base class of the errors that a user can cause or should read."""


class ModelError(MegacompileError, ValueError):
    """The model cannot be streamed: no parameters, meta, sparse or quantized ones, ..."""


class OptionError(MegacompileError, ValueError):
    """An option of `megacompile()` is out of range, of the wrong type, or contradicts another."""


class CheckpointError(MegacompileError, RuntimeError):
    """A checkpoint is incomplete, does not fit the model, or cannot be read or written."""


class HostMemoryError(MegacompileError, MemoryError):
    """The host has too little memory. Raised before anything is allocated."""


class DiskError(MegacompileError, OSError):
    """A scratch file cannot be created, read or written: a full disk, a limit, a faulty drive.

    `errno` is the system's. A failed read or write names its op, its offset and the folder.
    """


class DeviceMemoryError(MegacompileError, RuntimeError):
    """A step does not fit into device memory. The message has a table of memory by kind."""


class ScheduleError(MegacompileError, RuntimeError):
    """A schedule has a hazard or an inconsistency. The message marks it in the schedule."""


class BackwardError(MegacompileError, RuntimeError):
    """A backward cannot run: a second or double backward, changed parameters or inputs."""


class UnsupportedGraphError(MegacompileError, RuntimeError):
    """A captured graph cannot be scheduled. It runs in eager mode on streamed copies."""


class AnomalyError(MegacompileError, RuntimeError):
    """A gradient has NaN or inf, found with `detect_anomaly=True`. The message names the stage."""


class OptimizerError(MegacompileError, RuntimeError):
    """An optimizer step is not possible, or failed in the background."""


class RankError(MegacompileError, RuntimeError):
    """Another rank runs other operations, has stopped, or does not respond. All ranks stop.

    Attributes:
        by: the rank that is the cause; -1 if this rank and another one disagree.
        why: the reason.
    """

    def __init__(self, message: str, *, by: int = -1, why: str = "") -> None:
        super().__init__(message)
        self.by, self.why = by, why


class TraceError(MegacompileError, RuntimeError):
    """A trace cannot be taken or drawn."""


class MissingExtraError(MegacompileError, ImportError):
    """An optional package is not installed. The message names the extra to install."""
