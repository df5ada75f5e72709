"""Heartbeats and status notes between ranks, in the store of the process group.

Every two seconds a thread writes its rank's progress, and whether its process is active. An exiting
process writes a last note; a killed one falls silent. A rank reads notes only while it waits.

    beat      grows with every note
    n         number of graphs with collectives it has started
    entered   number of collectives it has started in the last of them
    at        the same, in words
    idle_s    how long the process has been idle (below a twentieth of a processor)
    fault     why it has stopped; `by` is the rank that caused it, -1 if ranks disagree ended
    why its process has exited
"""

from __future__ import annotations

import atexit
import dis
import inspect
import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import asdict, astuple, dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from megacompile import compat, errors
from megacompile.errors import MegacompileError, RankError
from megacompile.runtime.device import forks

BEAT_S = 2.0
_BUSY = 0.05  # share of a processor


@dataclass(frozen=True, slots=True)
class Note:
    """The note of one rank."""

    beat: int = 0
    n: int = 0
    entered: int = 0
    at: str = "before its first graph"
    idle_s: float = 0.0
    fault: str = ""
    by: int = -1
    ended: str = ""
    pid: int = field(default_factory=os.getpid)
    host: str = field(default_factory=lambda: namespace())


class Notes:
    """The notes of several ranks; keeps this rank's note up to date.

    Args:
        ranks: global rank numbers, including this rank.
        rank: this rank.
        stores: clients of the store, one for callers and one for the thread.
        on_beat: called after every note, by the thread.
        at_end: called at process exit, while the thread still runs.
    """

    def __init__(
        self,
        ranks: tuple[int, ...],
        rank: int,
        stores: tuple[Any, Any],
        on_beat: Callable[[], None] = lambda: None,
        at_end: Callable[[], None] = lambda: None,
    ) -> None:
        self.ranks, self.rank = ranks, rank
        self._here, self._of_thread = stores
        self._on_beat, self._at_end = on_beat, at_end
        self._note = Note()
        self._over = threading.Event()
        self._writing = threading.Lock()
        self._process, self._script = os.getpid(), _script()
        self.working = 0  # busy, whether it uses a processor or not
        self.position: tuple[int, int, str] = (0, 0, self._note.at)  # n, entered, at
        self._begin()
        forks.tell(self)
        end = weakref.WeakMethod(self.end)
        atexit.register(lambda: (call := end()) and call())

    def _begin(self) -> None:
        self._put(self._here, self._note)
        target = weakref.WeakMethod(self._beat)
        thread = threading.Thread(
            target=_run, args=(target, self._over), name="megacompile-ranks", daemon=True
        )
        self._thread = thread
        thread.start()
        self._cpu_s, self._busy_at_s, self._beat_at_s = time.process_time(), _now(), _now()

    def say(self, **facts: Any) -> None:
        """Write the note at once."""
        n, entered, at = self.position
        with self._writing:
            self._note = replace(self._note, n=n, entered=entered, at=at, **facts)
        try:
            self._put(self._here, self._note)
        except compat.STORE_ERRORS:  # the other ranks cannot be reached
            pass

    def of(self, rank: int, *, thread: bool = False) -> Note | None:
        """The note of another rank; None if there is none yet.

        Raises:
            dist.DistError: the store is gone.
        """
        store = self._of_thread if thread else self._here
        if not store.check([f"note/{rank}"]):
            return None
        return Note(**json.loads(store.get(f"note/{rank}")))

    def others(self, *, thread: bool = False) -> dict[int, Note]:
        """The notes of the other ranks."""
        found = {r: self.of(r, thread=thread) for r in self.ranks if r != self.rank}
        return {r: note for r, note in found.items() if note is not None}

    def runs(self, note: Note) -> bool:
        """True if the note's process exists, or if this process cannot tell."""
        return note.host != namespace() or not note.host or _runs(note.pid)

    @property
    def are_written(self) -> bool:
        """True if the thread runs; it ends if the store is gone."""
        return self._thread.is_alive()

    def end(self) -> None:
        """Stop the thread and write the last note, at process exit."""
        if self._over.is_set() or self._process != os.getpid():
            return
        self._at_end()
        self._over.set()
        self._thread.join(5)
        self.say(ended=_why(self._script))

    def before_fork(self) -> None:
        """Do nothing: the child is not a rank."""

    def after_fork(self, *, in_child: bool) -> None:
        """Disable notes in a child of a fork, which is not a rank."""

    def _beat(self) -> None:
        now, cpu_s = _now(), time.process_time()
        if self.working or cpu_s - self._cpu_s > _BUSY * (now - self._beat_at_s):
            self._busy_at_s = now
        self._cpu_s, self._beat_at_s = cpu_s, now
        n, entered, at = self.position
        with self._writing:
            beat, idle_s = self._note.beat + 1, now - self._busy_at_s
            note = replace(self._note, beat=beat, idle_s=idle_s, n=n, entered=entered, at=at)
            self._note = note
        self._put(self._of_thread, note)
        self._on_beat()

    def _put(self, store: Any, note: Note) -> None:
        store.set(f"note/{self.rank}", json.dumps(asdict(note)))


def _run(target: weakref.WeakMethod[Callable[[], None]], over: threading.Event) -> None:
    """Write heartbeats until the process exits, the notes are freed, or the store is gone."""
    while not over.wait(BEAT_S):
        beat = target()
        if beat is None:
            return
        try:
            beat()
        except compat.STORE_ERRORS:
            return
        del beat


def _script() -> FrameType | None:
    """The frame of the running script; None in another thread."""
    found, frame = None, inspect.currentframe()
    names = getattr(sys.modules.get("__main__"), "__dict__", None)
    while frame is not None:
        if frame.f_globals is names and frame.f_code.co_name == "<module>":
            found = frame
        frame = frame.f_back
    return found


def _why(script: FrameType | None) -> str:
    """The reason why the process exits. Python does not keep a SystemExit: if one ended the script,
    the script's last instruction was not a return."""
    error = getattr(sys, "last_value", None)
    if error is not None:
        return described(error)
    if script is None or script.f_lasti < 0:
        return "its script ended"
    last = dis.opname[script.f_code.co_code[script.f_lasti]]
    return "its script ended" if last.startswith("RETURN") else "SystemExit, as by sys.exit()"


def described(error: BaseException) -> str:
    """An error as one line."""
    line = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


def _now() -> float:
    return time.monotonic()


def namespace() -> str:
    """Identity of the machine; processes on one machine can see each other."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not on Linux
        return ""


def _runs(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


# Finds the faulty rank when a rank waits for others, by the notes that they write or fail to write.
#
#     raised, disagreed      its note reports it at once
#     ended                  its last note says so, if Python exits normally
#     killed                 its process is gone (on this machine), or silent for 30 s (elsewhere)
#     stopped                silent for 30 s
#     idle                   behind, and its process used no processor for 45 s
#     busy                   behind until the timeout of the process group has passed
# A rank that saves a checkpoint or compiles is busy, which is no reason to stop it.

SILENT_S = 30.0  # no note for this long: the process or machine is gone or stopped
PATIENCE_S = 45.0  # for a rank that is behind and idle
_ONE_LOOK_S = 5.0  # after a longer gap, earlier observations are stale


@dataclass(frozen=True, slots=True)
class Limits:
    """Time limits of a rank that waits for another rank."""

    patience_s: float  # how long to wait for a rank that is behind and idle
    limit_s: float  # how long to wait for a rank that is behind, idle or not

    @staticmethod
    def of(group: Any, device: torch.device) -> Limits:
        """The limits of a process group: its timeout, if one was set."""
        timeout_s, default = compat.group_timeout_s(group, device)
        return Limits(min(PATIENCE_S, timeout_s) if default else timeout_s, timeout_s)


class Faults:
    """Detects faults of the other ranks; used by one thread."""

    def __init__(self, notes: Notes, limits: Limits, *, thread: bool) -> None:
        self._notes, self._limits, self._thread = notes, limits, thread
        self._beats: dict[int, tuple[int, float]] = {}  # rank -> its last note, since when
        self._looked_s = 0.0

    def look(self, where: str, waited_s: float, *, failed: bool) -> None:
        """Raise if a rank will not arrive.

        Args:
            where: the op in which this rank waits.
            waited_s: the time waited so far.
            failed: True if the op has failed.

        Raises:
            RankError: with the rank and the reason.
            dist.DistError: the store is gone.
        """
        others = self._notes.others(thread=self._thread)
        here = self._notes.position[:2]
        now_s = time.monotonic()
        if now_s - self._looked_s > _ONE_LOOK_S:
            self._beats.clear()
        self._looked_s = now_s
        self._look_for_reports(others, where)
        for rank, note in others.items():
            behind = (note.n, note.entered) < here
            why = self._why(rank, note, waited_s, behind=behind, failed=failed)
            if why:
                self._blame(rank, why, where)
        if waited_s > self._limits.limit_s:
            for rank in self._notes.ranks:
                if rank != self._notes.rank and rank not in others:
                    why = f"has not called megacompile() with these ranks in {waited_s:.0f} s"
                    self._blame(rank, why, where)
            rank = min(others, key=lambda r: (others[r].n, others[r].entered))
            self._blame(rank, _late(others[rank], waited_s), where)

    def look_for_reports(self, where: str) -> None:
        """Raise if a rank says that it has stopped."""
        self._look_for_reports(self._notes.others(thread=self._thread), where)

    def _look_for_reports(self, others: Mapping[int, Note], where: str) -> None:
        for note in others.values():
            if note.fault and note.by < 0:  # ranks disagree: the text is complete
                raise RankError(note.fault, why=note.fault)
            if note.fault:
                self._blame(note.by, note.fault, where)

    def _why(self, rank: int, note: Note, waited_s: float, *, behind: bool, failed: bool) -> str:
        """The fault of a rank; "" if there is none."""
        if note.ended:
            return f"has ended ({note.ended}), {note.at}" if behind or failed else ""
        if not self._notes.runs(note):
            return f"was killed (process {note.pid}), last seen {note.at}"
        if self._silent_s(rank, note) > SILENT_S:
            return (
                f"has sent no sign of life for {SILENT_S:.0f} s (process {note.pid} is stopped, or "
                f"its machine is gone), last seen {note.at}"
            )
        if behind and min(waited_s, note.idle_s) > self._limits.patience_s:
            return _late(note, waited_s)
        return ""

    def _silent_s(self, rank: int, note: Note) -> float:
        beat, since_s = self._beats.get(rank, (-1, 0.0))
        if beat != note.beat:
            since_s = self._looked_s
        self._beats[rank] = (note.beat, since_s)
        return self._looked_s - since_s

    def _blame(self, rank: int, why: str, where: str) -> None:
        raise RankError(
            f"rank {self._notes.rank} waits in {where} for rank {rank}, which {why}; all ranks "
            "stop; fix the error of that rank, or allow more time: "
            "init_process_group(timeout=...)",
            by=rank,
            why=why,
        )


def _late(note: Note, waited_s: float) -> str:
    idle = note.idle_s > waited_s / 2
    does = f"has been idle for {note.idle_s:.0f} s" if idle else "works"
    return f"has not arrived in {waited_s:.0f} s: it is {note.at}, and {does}"


# Errors of a rank that cannot continue, as the other ranks raise them.

_KNOWN = "_megacompile_known_to_ranks"


@dataclass(frozen=True, slots=True)
class Raised:
    """An error of one rank, reported to the others."""

    kind: str  # its class
    message: str
    ours: bool  # True for an error class of megacompile

    @staticmethod
    def of(error: Exception) -> Raised:
        """The text of an error for the other ranks."""
        ours = isinstance(error, MegacompileError) and hasattr(errors, type(error).__name__)
        return Raised(type(error).__name__, str(error) if ours else described(error), ours)

    def text(self) -> str:
        """Serialize it for the store."""
        return json.dumps(astuple(self))

    @staticmethod
    def read(text: str) -> Raised:
        """Parse the result of `text`."""
        return Raised(*json.loads(text))

    def error(self, rank: int, what: str) -> MegacompileError:
        """The error that the other ranks raise.

        Args:
            rank: the rank that raised it.
            what: their common action.
        """
        if not self.ours:
            why = f"raised {self.message}, in {what}"
            return RankError(
                f"rank {rank} {why}; all ranks stop there; fix the error of that rank",
                by=rank,
                why=why,
            )
        raised: MegacompileError = getattr(errors, self.kind)(f"rank {rank}: {self.message}")
        make_known(raised)
        return raised


def is_known(error: Exception) -> bool:
    """True if all ranks know of the error, so that it need not be reported again."""
    return isinstance(error, RankError) or getattr(error, _KNOWN, False)


def make_known(error: Exception) -> None:
    """Mark an error that all ranks have raised or will raise."""
    setattr(error, _KNOWN, True)
