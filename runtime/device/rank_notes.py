"""The notes of each rank for the others, in the store of the process group.

Every two seconds a thread writes how far its rank is, and whether its process does anything. At its
end the process says so; one that is killed falls silent. No rank reads any of it unless it waits.

    beat      grows with every note
    n         how many graphs with collectives it has begun
    entered   how many collectives of the last one it has begun
    at        the same in words
    idle_s    for how long the process has used no processor (less than a twentieth of one)
    fault     why it has stopped; `by` is the rank that this comes from, -1 where ranks disagree
    ended     why its process ends
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
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

from megacompile import compat
from megacompile.runtime.device import forks

BEAT_S = 2.0
_BUSY = 0.05  # of a processor


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
    """The notes of some ranks; this one's is kept up to date.

    Args:
        ranks: of the world, this one among them.
        rank: this one.
        store: makes a client of the store.
        on_beat: called after every note, by the thread.
        at_end: called at the end of the process, while the thread still runs.
    """

    def __init__(
        self,
        ranks: tuple[int, ...],
        rank: int,
        store: Callable[[], Any],
        on_beat: Callable[[], None] = lambda: None,
        at_end: Callable[[], None] = lambda: None,
    ) -> None:
        self.ranks, self.rank = ranks, rank
        self._make_store = store
        self._here, self._behind = store(), store()  # for callers, and for the thread
        self._on_beat, self._at_end = on_beat, at_end
        self._note = Note()
        self._over = threading.Event()
        self._writing = threading.Lock()
        self._process, self._script = os.getpid(), _script()
        self.working = 0  # is it at work, whether it uses a processor or not?
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
        """Say something at once."""
        n, entered, at = self.position
        with self._writing:
            self._note = replace(self._note, n=n, entered=entered, at=at, **facts)
        try:
            self._put(self._here, self._note)
        except compat.STORE_ERRORS:  # no rank can be told
            pass

    def of(self, rank: int, *, thread: bool = False) -> Note | None:
        """The note of another rank; None if there is none yet.

        Raises:
            dist.DistError: the store is gone.
        """
        store = self._behind if thread else self._here
        if not store.check([f"note/{rank}"]):
            return None
        return Note(**json.loads(store.get(f"note/{rank}")))

    def others(self, *, thread: bool = False) -> dict[int, Note]:
        """The notes of the other ranks."""
        found = {r: self.of(r, thread=thread) for r in self.ranks if r != self.rank}
        return {r: note for r, note in found.items() if note is not None}

    def runs(self, note: Note) -> bool:
        """Is the process of a note there? True where this one cannot know."""
        return note.host != namespace() or not note.host or _runs(note.pid)

    @property
    def are_written(self) -> bool:
        """Does the thread run? It ends where the store is gone."""
        return self._thread.is_alive()

    def end(self) -> None:
        """The process ends: stop the thread, and say so."""
        if self._over.is_set() or self._process != os.getpid():
            return
        self._at_end()
        self._over.set()
        self._thread.join(5)
        self.say(ended=_why(self._script))

    def before_fork(self) -> None:
        """Nothing: the child has no part in it."""

    def after_fork(self, *, in_child: bool) -> None:
        """The child is no rank."""

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
        self._put(self._behind, note)
        self._on_beat()

    def _put(self, store: Any, note: Note) -> None:
        store.set(f"note/{self.rank}", json.dumps(asdict(note)))


def _run(target: weakref.WeakMethod[Callable[[], None]], over: threading.Event) -> None:
    """Beat until the process ends, the notes are not referenced any more, or the store is gone."""
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
    """The frame of the script that runs; None: this is another thread."""
    found, frame = None, inspect.currentframe()
    names = getattr(sys.modules.get("__main__"), "__dict__", None)
    while frame is not None:
        if frame.f_globals is names and frame.f_code.co_name == "<module>":
            found = frame
        frame = frame.f_back
    return found


def _why(script: FrameType | None) -> str:
    """The reason why the process ends. Python keeps no SystemExit: where that ended the script, its
    last instruction did not return."""
    error = getattr(sys, "last_value", None)
    if error is not None:
        return described(error)
    if script is None or script.f_lasti < 0:
        return "it came to its end"
    last = dis.opname[script.f_code.co_code[script.f_lasti]]
    return "it came to its end" if last.startswith("RETURN") else "SystemExit, as of sys.exit()"


def described(error: BaseException) -> str:
    """An error in one line."""
    line = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


def _now() -> float:
    return time.monotonic()


def namespace() -> str:
    """Identity of the machine, of which processes can see each other."""
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
