"""Logging: the logger `megacompile` with a child for each subject, and MEGACOMPILE_LOG.

    MEGACOMPILE_LOG=schedule,plan     these subjects, at INFO, on stderr
    MEGACOMPILE_LOG=+passes           at DEBUG
    MEGACOMPILE_LOG=all               every subject; +all at DEBUG; later names win: all,+plan
    MEGACOMPILE_LOG=help              print the subjects

The variable is read by `megacompile()`. Where it is not set no handler is installed, and the logger
`megacompile` is at WARNING, unless the user has set its level: `logging.basicConfig(level=INFO)`
of a script shows none of it. A subject that is to be seen there gets a level, as any logger:
`logging.getLogger("megacompile.plan").setLevel(logging.INFO)`.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megacompile.errors import OptionError
from megacompile.ir.buckets import Bucket
from megacompile.ir.capture import Capture
from megacompile.ir.schedule import PassRecord, Schedule
from megacompile.text import format_bytes, source_line

VARIABLE = "MEGACOMPILE_LOG"
SUBJECTS = {
    "capture": "what Dynamo captured, and for which inputs schedules are made",
    "plan": "what a schedule keeps and recomputes, and why",
    "passes": "each pass with its time and nodes; at DEBUG the actions before and after it",
    "schedule": "a schedule's table; at DEBUG the Python that runs",
    "compile": "how much code was compiled, how long that took, and what came from caches",
    "memory": "what parameters take on the host and slots on the device",
    "update": "how optimizer.step() updates each bucket",
    "ranks": "which rank stops the others, and why",
    "time": "what takes seconds until the first step is done, and how long each took",
}
_LEAST_S = 0.01  # shorter is not logged
_FORMAT = "%(asctime)s %(name)s %(levelname)s: %(message)s"

_configured: str | None = None  # the variable as it was when it was last read
_levels: dict[str, int] = {}  # of the subjects that it named then
_handler: logging.Handler | None = None


@functools.cache
def logger(subject: str) -> logging.Logger:
    """The logger of a subject."""
    assert subject in SUBJECTS, subject
    return logging.getLogger(f"megacompile.{subject}")


class Lazy:
    """A text that is made when a handler wants it: `log.info("%s", Lazy(schedule.table))`."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make

    def __str__(self) -> str:
        return str(self.make())


def configure() -> None:
    """Do what MEGACOMPILE_LOG says; once for each value that it has.

    Raises:
        OptionError: it names a subject that there is not.
    """
    global _configured, _handler, _levels
    value = os.environ.get(VARIABLE, "")
    root = logging.getLogger("megacompile")
    if root.level == logging.NOTSET:
        root.setLevel(logging.WARNING)
    if value == (_configured or ""):
        return
    levels, wants_help = parse(value)
    _configured = value
    if wants_help:
        print(help_text(), file=sys.stderr)
    for subject in _levels.keys() | levels.keys():  # others may have the user's own level
        logger(subject).setLevel(levels.get(subject, logging.NOTSET))
    _levels = levels
    if _handler is not None:
        root.removeHandler(_handler)
        root.propagate, _handler = True, None
    if levels:
        _handler = logging.StreamHandler()
        _handler.setFormatter(logging.Formatter(_FORMAT))
        root.addHandler(_handler)
        root.propagate = False  # the root logger's handlers would print it again


def parse(value: str) -> tuple[dict[str, int], bool]:
    """(subject -> level, is help asked for) of the variable's value.

    Raises:
        OptionError: with the subjects that there are.
    """
    levels: dict[str, int] = {}
    wants_help = False
    for entry in value.split(","):
        name = entry.strip()
        level = logging.DEBUG if name.startswith("+") else logging.INFO
        name = name.removeprefix("+").strip()
        if name == "help":
            wants_help = True
        elif name == "all":
            levels |= dict.fromkeys(SUBJECTS, level)
        elif name in SUBJECTS:
            levels[name] = level
        elif name or entry.strip():
            raise OptionError(
                f"{VARIABLE}={value}: got {entry.strip()!r}; needed names among "
                f"{', '.join(SUBJECTS)}, all, help, separated by commas, with + for DEBUG"
            )
    return levels, wants_help


def help_text() -> str:
    """The subjects, one a line."""
    width = max(map(len, SUBJECTS))
    lines = [f"  {name:<{width}}  {text}" for name, text in SUBJECTS.items()]
    return "\n".join(
        [
            f"{VARIABLE}=NAME,+NAME,...  logs these subjects to stderr, + at DEBUG; all: every one",
            *lines,
        ]
    )


# The messages of each subject.


def captured(capture: Capture, stages: Schedule) -> None:
    """Dynamo's graph was bound to its inputs and partitioned."""
    logger("capture").info(
        "%s: %d inputs on %s, %d stages",
        capture.name,
        len(capture.inputs),
        capture.device,
        len(stages.stages),
    )


def pass_done(name: str, record: PassRecord, nodes_before: int) -> None:
    """A pass has run on the schedule `name`."""
    ms = record.time_s * 1e3
    text = "%s: %s %.1f ms, %d -> %d nodes"
    logger("passes").info(text, name, record.name, ms, nodes_before, record.nodes)
    logger("passes").debug("before %s:\n%s", record.name, record.before)
    logger("passes").debug("after %s:\n%s", record.name, record.after)


def schedule_made(schedule: Schedule) -> None:
    """The last pass has run."""
    plan = schedule.plan
    kept = ", ".join(map(str, sorted(plan.keep))) or "none"
    reasons = "".join(f"; {reason}" for reason in plan.reasons)
    logger("plan").info("%s: keeps saved tensors of stages: %s%s", schedule.name, kept, reasons)
    size = Lazy(lambda: format_bytes(sum(slot.size_bytes for slot in schedule.slots)))
    logger("memory").info("%s: %d slots of %s", schedule.name, len(schedule.slots), size)
    logger("schedule").info("%s\n%s", schedule.name, Lazy(schedule.table))
    logger("schedule").debug("%s", Lazy(schedule.code))


def host_budget(name: str, size_bytes: int, beside: Sequence[tuple[str, int]]) -> None:
    """Logs the host memory that a model may take where the user says nothing, and what is left to
    processes next to this one: (what, bytes)."""
    left = "; ".join(f"{format_bytes(size)} for {what}" for what, size in beside)
    logger("memory").info(
        "%s: may take %s of host memory; left to processes beside it: %s",
        name,
        format_bytes(size_bytes),
        left or "none",
    )


def buckets_placed(name: str, buckets: Sequence[Bucket], node: str = "") -> None:
    """A model's parameters were moved to host buckets."""
    total = Lazy(lambda: format_bytes(sum(bucket.size_bytes for bucket in buckets)))
    logger("memory").info("%s: %s in %d host buckets", name, total, len(buckets))
    if node:
        logger("memory").info("%s: host memory near the GPU: NUMA node %s", name, node)
    for bucket in buckets:
        logger("memory").debug("%s: %d bytes", bucket.name, bucket.size_bytes)


def without_symbols(name: str, error: Exception, what: str = "set of sizes") -> str:
    """Logs that each set of sizes, or each value of a float, gets its own code; returns why."""
    why = str(error).strip().split("\n")[0]
    if line := source_line(str(error)):
        why = f"{why} ({line})"
    text = f"each {what} gets its own code: {why}"
    logger("capture").info("%s: %s", name, text)
    return text


def fixed_sizes(name: str, fixed: Mapping[int | float, str]) -> str:
    """Logs which changing sizes and numbers are constants in the code, and the lines that ask for
    them; returns why."""
    for value, where in fixed.items():
        text = "%s: each value of a size gets its own code, as %s did now: %s asks for it"
        logger("capture").info(text, name, value, where)
    wheres = dict.fromkeys(fixed.values())
    return f"each value of a size gets its own code: {', '.join(wheres)}" if wheres else ""


def other_way(name: str, broken: str) -> str:
    """Logs the relation of sizes that another program relies on; returns why this one was made."""
    if not broken:
        return ""
    logger("capture").info("%s: other sizes need code of their own: %s", name, broken)
    return f"other sizes need code of their own: {broken}"


def compiled(name: str, found: int, made: int, time_s: float, beside: int = 0) -> None:
    """A schedule has its code.

    Args:
        found: graphs whose code was in a cache.
        made: graphs that were compiled.
        beside: of those found: graphs that processes next to this one have compiled meanwhile.
    """
    if found or made:
        text = "%s: compiled %d templates in %.1f s (%d from the cache%s)"
        more = f", {beside} of them compiled by processes beside this one" if beside else ""
        logger("compile").info(text, name, found + made, time_s, found, more)


def update_compiled(name: str, *, found: bool, time_s: float, what: str = "C++") -> None:
    """The code of an update is there."""
    text = "%s: compiled to %s in %.1f s%s"
    logger("compile").info(text, name, what, time_s, " (from the cache)" if found else "")


def took(what: str, time_s: float) -> None:
    """Something that is waited for has ended."""
    if time_s >= _LEAST_S:
        logger("time").info("%s took %.2f s", what, time_s)


# Code that was compiled in this process, or taken from caches, and the time it took.


@dataclass(slots=True)
class CodeCounts:
    """Counts of one kind of code: graphs, or kernels."""

    found: int = 0  # in caches, those of another process that compiled them meanwhile included
    beside: int = 0  # of these: compiled meanwhile by processes next to this one, for this one
    made: int = 0  # compiled in this process
    time_s: float = 0.0  # that this process took to find and to compile them

    def add(self, *, found: int, made: int, time_s: float, beside: int = 0) -> None:
        """Some more."""
        self.found += found
        self.made += made
        self.beside += min(beside, found)
        self.time_s += time_s

    @property
    def is_none(self) -> bool:
        """True if no code of this kind was needed."""
        return not self.found and not self.made


UPDATES = CodeCounts()  # of this process: optimizers' updates on the host, in C++
KERNELS = CodeCounts()  # of this process: our own kernels in Triton, most of them updates
