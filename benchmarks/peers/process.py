"""A child process with a limit of time and of host memory, which leaves no process behind."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import psutil

from benchmarks.peers.outcome import Outcome, Status, one_line

_POLL_S = 0.1
_LAST_BYTES = 4096  # of what it printed


def run(
    command: Sequence[str],
    folder: Path,
    *,
    limit_s: float,
    host_bytes: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> Outcome:
    """Run a command that appends its events to `folder/events` until it ends or a limit is met.

    Args:
        command: is given the path of the events as its last argument.
        folder: an empty one; what the process prints comes into `folder/printed`.
        limit_s: of wall time.
        host_bytes: of RAM that the process itself may have; None: no limit.
        environment: of the process; None: this one's.
    """
    events, printed = folder / "events", folder / "printed"
    start = time.perf_counter()
    with printed.open("wb") as file:
        process = subprocess.Popen(
            [*command, str(events)],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    family = Family(process.pid)
    stopped: Outcome | None = None
    try:
        while process.poll() is None and stopped is None:
            time.sleep(_POLL_S)
            family.look()
            stopped = _stopped(family, time.perf_counter() - start, limit_s, host_bytes, events)
    finally:
        family.kill()
        code = process.wait()
    taken = time.perf_counter() - start
    said = outcome_of(events)
    if said is None:
        said = stopped or _without_a_word(code, events, printed, family)
    return replace(said, process_s=taken)


class Family:
    """A process and whatever it has started, be it in another session."""

    def __init__(self, pid: int) -> None:
        self._members: dict[int, psutil.Process] = {}
        self.peak_bytes = 0  # of RAM, of the process itself
        with contextlib.suppress(psutil.Error):
            self._members[pid] = psutil.Process(pid)
        self._pid = pid

    def look(self) -> None:
        """Remember the processes that are there, and how much RAM the first one has."""
        for member in tuple(self._members.values()):
            with contextlib.suppress(psutil.Error):
                for child in member.children():
                    self._members.setdefault(child.pid, child)
        with contextlib.suppress(psutil.Error, KeyError):
            rss: int = self._members[self._pid].memory_info().rss
            self.peak_bytes = max(self.peak_bytes, rss)

    def kill(self) -> None:
        """End all of them; psutil does not take another process of the same number for one."""
        known = 0
        self.look()
        while len(self._members) > known:  # one may have started another meanwhile
            known = len(self._members)
            for member in self._members.values():
                with contextlib.suppress(psutil.Error):
                    member.kill()
            self.look()


def outcome_of(events: Path) -> Outcome | None:
    """The outcome that a process wrote; None: nothing, or nothing that can be read."""
    for line in reversed(_lines(events)):
        with contextlib.suppress(ValueError, KeyError, TypeError):
            return Outcome.of_json(json.loads(line)["outcome"])
    return None


def doing(events: Path) -> str:
    """The last phase of a process."""
    for line in reversed(_lines(events)):
        with contextlib.suppress(ValueError, KeyError, TypeError):
            return str(json.loads(line)["doing"])
    return "starts"


def _lines(events: Path) -> list[str]:
    return events.read_text(errors="replace").splitlines() if events.exists() else []


def _stopped(
    family: Family, taken_s: float, limit_s: float, host_bytes: int | None, events: Path
) -> Outcome | None:
    """The reason for which the process must end now."""
    if host_bytes is not None and family.peak_bytes > host_bytes:
        took = f"{family.peak_bytes / 2**30:.1f} GiB of host memory"
        reason = f"took {took}, of {host_bytes / 2**30:.1f} at most ({doing(events)})"
        return Outcome(Status.OUT_OF_MEMORY, reason)
    if taken_s > limit_s:
        return Outcome(Status.TIMED_OUT, f"more than {limit_s:.0f} s ({doing(events)})")
    return None


def _without_a_word(code: int, events: Path, printed: Path, family: Family) -> Outcome:
    """The outcome of a process that ended by itself and wrote nothing."""
    if code == -signal.SIGKILL:  # not ours: the system does that when memory runs out
        had = f"{family.peak_bytes / 2**30:.1f} GiB of host memory"
        reason = f"killed by the system, with {had} ({doing(events)})"
        return Outcome(Status.OUT_OF_MEMORY, reason)
    lines = printed.read_bytes()[-_LAST_BYTES:].decode(errors="replace").split("\n")
    last = next((line for line in reversed(lines) if line.strip()), "it printed nothing")
    ended = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    reason = f"no outcome, {ended} ({doing(events)}): {last}"
    return Outcome(Status.CRASHED, one_line(reason))
