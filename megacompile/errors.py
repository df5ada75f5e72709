"""Errors of megacompile: each says where, what it got, what it needed, and what to do.

User faults derive from `MegacompileError` and from the built-in class that fits (`ValueError`,
`RuntimeError`, `MemoryError`), so existing `except` clauses keep working. An `AssertionError` out
of this package is a bug in it.
"""

from __future__ import annotations


class MegacompileError(Exception):
    """Base of every error that a user of megacompile can cause or should read."""


class ModelError(MegacompileError, ValueError):
    """The model cannot be streamed: no parameters, meta, sparse or quantized ones, ..."""


class OptionError(MegacompileError, ValueError):
    """An option of `megacompile()` is out of range, of the wrong type, or contradicts another."""


class OptionTypeError(OptionError, TypeError):
    """An option of `megacompile()` has the wrong type."""


class HostMemoryError(MegacompileError, MemoryError):
    """The host has too little memory; raised before anything is allocated."""


class DeviceMemoryError(MegacompileError, RuntimeError):
    """A step does not fit into device memory; the message has the table of what needs what."""


class ScheduleError(MegacompileError, RuntimeError):
    """A schedule has a hazard or an inconsistency; the message marks it in the schedule."""


class BackwardError(MegacompileError, RuntimeError):
    """A backward that cannot be run: second time, double backward, changed parameters or inputs."""


class UnsupportedGraphError(MegacompileError, RuntimeError):
    """A captured graph that cannot be scheduled; it runs in eager mode on streamed copies."""


class AnomalyError(MegacompileError, RuntimeError):
    """A gradient with NaN or inf, found with `detect_anomaly=True`; names the stage."""


class OptimizerError(MegacompileError, RuntimeError):
    """An optimizer step that cannot be done as asked for, or that failed in the background."""


class TraceError(MegacompileError, RuntimeError):
    """A trace that cannot be taken or drawn."""


class MissingExtraError(MegacompileError, ImportError):
    """A package that an optional part needs is not installed; the message names the extra."""
