"""Logging: the logger `megacompile` with a child for each subject, and MEGACOMPILE_LOG.

    MEGACOMPILE_LOG=schedule,plan     these subjects, at INFO, on stderr
    MEGACOMPILE_LOG=+passes           at DEBUG
    MEGACOMPILE_LOG=all               all subjects; +all at DEBUG; later names win: all,+plan

`megacompile()` reads the variable. If it is not set, no handler is installed, and the logger
`megacompile` is at WARNING unless the user has set its level, so `logging.basicConfig(level=INFO)`
shows nothing. To show a subject in the user's handlers, set its level:
`logging.getLogger("megacompile.plan").setLevel(logging.INFO)`.
"""

from __future__ import annotations

import functools
import logging
import operator
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from megacompile import compat
from megacompile.errors import OptionError
from megacompile.ir.buckets import Bucket
from megacompile.ir.capture import PassRecord
from megacompile.ir.schedule import Schedule
from megacompile.text import format_bytes, source_line

VARIABLE = "MEGACOMPILE_LOG"
SUBJECTS = {
    "capture": "captured graphs, and the inputs that get schedules",
    "plan": "the stages that a schedule keeps or recomputes, and why",
    "passes": "each pass with its time and nodes; at DEBUG the actions before and after it",
    "schedule": "a schedule's table; at DEBUG the Python that runs",
    "compile": "the amount of compiled code, its time, and the part from caches",
    "memory": "host memory of parameters, device memory of slots",
    "update": "the code that updates each bucket in optimizer.step()",
    "ranks": "the rank that stops the others, and why",
    "time": "the slow parts of the first step, and their times",
}
_FORMAT = "%(asctime)s %(name)s %(levelname)s: %(message)s"

_configured = ""  # the variable when it was last read
_handler: logging.Handler | None = None


@functools.cache
def logger(subject: str) -> logging.Logger:
    """The logger of a subject."""
    assert subject in SUBJECTS, subject
    return logging.getLogger(f"megacompile.{subject}")


def configure() -> None:
    """Apply MEGACOMPILE_LOG, once for each value. Raises an OptionError if it names an unknown
    subject."""
    global _configured, _handler
    value = os.environ.get(VARIABLE, "")
    root = logging.getLogger("megacompile")
    if root.level == logging.NOTSET:
        root.setLevel(logging.WARNING)
    if value == _configured:
        return
    levels = _parsed(value)
    for subject in _parsed(_configured) | levels:  # keeps levels that the user has set
        logger(subject).setLevel(levels.get(subject, logging.NOTSET))
    _configured = value
    if _handler is not None:
        root.removeHandler(_handler)
    root.propagate = not levels  # or the root logger's handlers would print it again
    if levels:
        _handler = logging.StreamHandler()
        _handler.setFormatter(logging.Formatter(_FORMAT))
        root.addHandler(_handler)


def _parsed(value: str) -> dict[str, int]:
    """The level of each subject that the variable's value names."""
    levels: dict[str, int] = {}
    for entry in filter(None, map(str.strip, value.split(","))):
        level = logging.DEBUG if entry.startswith("+") else logging.INFO
        name = entry.removeprefix("+").strip()
        if name == "all":
            levels |= dict.fromkeys(SUBJECTS, level)
        elif name in SUBJECTS:
            levels[name] = level
        else:
            raise OptionError(
                f"{VARIABLE}={value}: got {entry!r}; needed names among {', '.join(SUBJECTS)}, "
                "all, separated by commas, with + for DEBUG"
            )
    return levels


# Messages, by subject.


def pass_done(name: str, record: PassRecord, nodes_before: int) -> None:
    """Log that a pass ran on the schedule `name`."""
    ms = record.time_s * 1e3
    text = "%s: %s %.1f ms, %d -> %d nodes"
    logger("passes").info(text, name, record.name, ms, nodes_before, record.nodes)
    logger("passes").debug("before %s:\n%s", record.name, record.before)
    logger("passes").debug("after %s:\n%s", record.name, record.after)


def schedule_made(schedule: Schedule) -> None:
    """Log a schedule after its last pass."""
    plan = schedule.plan
    kept = ", ".join(map(str, sorted(plan.keep))) or "none"
    reasons = "".join(f"; {reason}" for reason in plan.reasons)
    logger("plan").info("%s: keeps saved tensors of stages: %s%s", schedule.name, kept, reasons)
    size = format_bytes(sum(slot.size_bytes for slot in schedule.slots))
    logger("memory").info("%s: %d slots of %s", schedule.name, len(schedule.slots), size)
    if logger("schedule").isEnabledFor(logging.INFO):
        logger("schedule").info("%s\n%s", schedule.name, schedule.table())
        logger("schedule").debug("%s", schedule.code())


def buckets_placed(name: str, buckets: Sequence[Bucket]) -> None:
    """Log the host buckets of a model."""
    total = format_bytes(sum(bucket.size_bytes for bucket in buckets))
    logger("memory").info("%s: %s in %d host buckets", name, total, len(buckets))
    for bucket in buckets:
        logger("memory").debug("%s: %d bytes", bucket.name, bucket.size_bytes)


def without_symbols(error: Exception, what: str) -> str:
    """The reason why each set of sizes, or each value of a float, gets its own code."""
    why, line = str(error).strip().split("\n")[0], source_line(str(error))
    return f"each {what} gets its own code: {why}{f' ({line})' if line else ''}"


def own_code(name: str, why: str) -> str:
    """Log why other sizes get their own code, and return the reason."""
    logger("capture").info("%s: %s", name, why)
    return why


def took(what: str, time_s: float) -> None:
    """Log the time of a finished wait, if it is long enough to matter."""
    if time_s >= 0.01:
        logger("time").info("%s took %.2f s", what, time_s)


@dataclass(slots=True)
class CodeCounts:
    """Counts of one kind of code that was compiled in this process or taken from caches."""

    found: int = 0  # graphs in caches, those compiled meanwhile by compile processes included
    made: int = 0  # compiled in this process
    time_s: float = 0.0  # spent by this process to load and compile them

    @contextmanager
    def counting(self, name: str) -> Iterator[None]:
        """A context that adds the code of a schedule or an update, and logs it."""
        before, start_s = compat.cache_counts(), time.perf_counter()
        yield
        found, made = map(operator.sub, compat.cache_counts(), before)
        time_s = time.perf_counter() - start_s
        if found or made:
            self.found += found
            self.made += made
            self.time_s += time_s
            text = "%s: compiled %d graphs in %.1f s (%d from the cache)"
            logger("compile").info(text, name, found + made, time_s, found)


UPDATES = CodeCounts()  # optimizers' updates on the host, in C++
