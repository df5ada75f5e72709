"""Ensures that ranks run the same collectives in the same order; if they do not, all ranks stop
with a reason (docs/decisions/0037-ranks-agree.md).

    rank 0    n=7  forward, 12 collectives, digest 4fe1...     written
    rank 1    n=7  forward, 12 collectives, digest 4fe1...     the same: it runs
    rank 2    n=7  backward, 9 collectives, digest 08c2...     not the same: RankError in every rank

With gloo, ranks also meet in the store before a graph; with NCCL a thread aborts collectives that
will never complete.

[Note: faults] A rank that raises, or finds a difference, writes the reason into the store; the
first reason counts. A rank that is killed or stopped cannot: each rank's thread writes a note every
two seconds, and an exiting process writes a last one. A rank reads these only while it waits.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch

from megacompile import compat
from megacompile.errors import RankError
from megacompile.ir.edges import Collectives, first_difference
from megacompile.log import logger

SILENT_S = 30.0  # no note for this long: the process or machine is gone or stopped
_BEAT_S = 2.0
_LOOK_S = 0.5  # between two looks at the other ranks' notes
_GAP_S = 5.0  # after a longer gap, earlier looks are stale
_KEPT = 64  # number of graphs whose keys are kept
_Flying = tuple[str, torch.cuda.Event]  # a collective, and its end
TALK = "exchange of values"  # the default name of a common action


class Note(NamedTuple):
    """The position of one rank; see [Note: faults]."""

    beat: int = 0  # grows with every note
    n: int = 0  # number of graphs with collectives it has started
    entered: int = 0  # number of collectives it has started in the last of them
    at: str = ""  # the same, in words
    ended: str = ""  # why its process has exited


_TOGETHER = "if only some ranks evaluate, generate or save, as in `if rank == 0:`, let all of them"


class Wait:
    """One wait of a rank for the others, up to `limit_s`; finds a rank that will not arrive."""

    def __init__(self, ranks: tuple[int, ...], rank: int, store: Any, limit_s: float) -> None:
        self._ranks, self._rank, self._store, self._limit_s = ranks, rank, store, limit_s
        self._began_s = self._looked_s = time.monotonic()
        self._beats: dict[tuple[int, int], float] = {}  # rank, beat -> seen since

    def look(self, where: str, here: tuple[int, int], *, failed: bool = False) -> None:
        """Raise a RankError with the rank and the reason if a rank will not arrive. `where` is the
        op in which this rank waits, or which has `failed`; `here` its graph and collective."""
        self.look_for_reports(where)
        now_s, store = time.monotonic(), self._store
        if now_s - self._looked_s > _GAP_S:  # this process was stopped, maybe all of them
            self._beats.clear()
        self._looked_s = now_s
        waited_s = now_s - self._began_s
        others = [rank for rank in self._ranks if rank != self._rank]
        there = [rank for rank in others if store.check([f"note/{rank}"])]
        notes = {rank: Note(*json.loads(store.get(f"note/{rank}"))) for rank in there}
        for rank, note in notes.items():
            silent_s = now_s - self._beats.setdefault((rank, note.beat), now_s)
            if note.ended and (failed or (note.n, note.entered) < here):
                self._blame(rank, f"has ended ({note.ended}), {note.at}", where)
            if not note.ended and silent_s > SILENT_S:
                self._blame(
                    rank,
                    f"has sent no sign of life for {SILENT_S:.0f} s (it was killed or stopped, or "
                    f"its machine is gone), last seen {note.at}",
                    where,
                )
        if waited_s > self._limit_s:
            for rank in sorted(set(others) - notes.keys()):
                why = f"has not called megacompile() with these ranks in {waited_s:.0f} s"
                self._blame(rank, why, where)
            rank = min(notes, key=lambda r: (notes[r].n, notes[r].entered))
            at = notes[rank].at
            why = f"has not arrived in {waited_s:.0f} s: it is {at} ({_TOGETHER})"
            self._blame(rank, why, where)

    def look_for_reports(self, where: str) -> None:
        if self._store.check(["fault"]):
            by, why = json.loads(self._store.get("fault"))
            if by < 0:  # ranks disagree: the text is complete
                raise RankError(why, why=why)
            self._blame(by, why, where)

    def _blame(self, rank: int, why: str, where: str) -> None:
        raise RankError(
            f"rank {self._rank} waits in {where} for rank {rank}, which {why}; all ranks stop; fix "
            "the error of that rank, or allow more time: init_process_group(timeout=...)",
            by=rank,
            why=why,
        )


class Agreement:
    """This rank among the ranks that share models."""

    def __init__(
        self,
        ranks: tuple[int, ...],  # their global numbers
        rank: int,  # the number of this one
        store: Callable[[], Any],  # creates a client of the process group's store
        limit_s: float,  # how long to wait for a rank that is alive
        *,
        meets: bool,  # ranks wait for one another before each graph; else a thread watches them
        abort: Callable[[], None] = lambda: None,  # aborts the collectives in flight
    ) -> None:
        self.ranks, self.rank, self.meets = ranks, rank, meets
        self.steps = 0  # optimizer steps so far
        self.doing = TALK  # the current common action; see `Ranks.together`
        self._store, self._of_thread = store(), store()  # a client serves one thread at a time
        self._limit_s, self._abort = limit_s, abort
        self._count = self._tidied = self._beat = 0
        self._now: Collectives | None = None  # the running graph
        self._position = (0, 0, "before its first graph")  # as in a `Note`
        self._said: set[str] = set()
        self._fault: RankError | None = None
        self._flying: deque[_Flying] = deque()  # collectives of a GPU, in order
        self._oldest: tuple[_Flying | None, Wait] = (None, self._wait(self._of_thread))
        self._process, self._over = os.getpid(), threading.Event()
        self._write_note()
        self._thread = threading.Thread(
            target=_run, args=(weakref.ref(self), self._over), name="megacompile-ranks", daemon=True
        )
        self._thread.start()
        end = weakref.WeakMethod(self.end)
        atexit.register(lambda: (call := end()) and call())

    @contextmanager
    def run(self, graph: Collectives) -> Iterator[None]:
        """A context in which this rank and all others run the same graph. Raises RankError: another
        rank runs a different graph, has stopped, or does not arrive."""
        if not graph.ops:
            yield
            return
        with self._in(graph):
            with self._store_there():
                key = self._agree(graph)
                if self.meets:
                    self._meet(key)
            yield
            self.check()

    @contextmanager
    def _in(self, graph: Collectives) -> Iterator[None]:
        """A context in which this rank is in a graph; an error inside is reported to the others."""
        outer, position = self._now, self._position
        self._now = graph
        try:
            yield
        except BaseException as error:
            self._stop(error)
            raise
        self._now = outer
        if outer is not None:  # a hook in the middle of a graph has read a parameter
            self._position = (self._count, *position[1:])
        else:
            self._at(len(graph.ops), f"after the {graph.graph} (graph {self._count})")

    def check(self) -> None:
        """Raise an error that the thread has found."""
        if self._fault is not None:
            raise RankError(str(self._fault), by=self._fault.by, why=self._fault.why)

    def _at(self, entered: int, words: str = "") -> None:
        self._position = (self._count, entered, words or self._position[2])

    def meet(self, what: str, raised: str = "") -> dict[int, str]:
        """Wait for all ranks in the store, for the action `what`; returns the reasons of ranks that
        cannot continue. Works with NCCL too, and after this rank's GPU has failed. Raises
        RankError: another rank does something different, has stopped, or does not arrive."""
        graph = Collectives(what, ("what each rank says",), f"meet-{what}")
        with self._in(graph), self._store_there():
            key = self._agree(graph)
            if raised:
                self._store.set(f"{key}/raised/{self.rank}", raised)
            self._meet(key)
            keys = {rank: f"{key}/raised/{rank}" for rank in self.ranks}
            those = {r: k for r, k in keys.items() if self._store.check([k])}
            return {r: self._store.get(k).decode() for r, k in those.items()}

    def _agree(self, graph: Collectives) -> str:
        """Compare a graph with the one that the first rank has announced; returns its key."""
        self.check()
        key = str(self._count)
        self._count += 1
        self._at(0, f"in the {graph.graph} (graph {self._count})")
        if graph.digest not in self._said:
            self._store.set(f"ops/{graph.digest}", json.dumps([graph.graph, graph.ops]))
            self._said.add(graph.digest)
        mine = f"{graph.digest} {self.steps}"
        first = self._store.compare_set(key, "", f"{mine} {self.rank}").decode()
        theirs, _, other = first.rpartition(" ")
        if theirs != mine:
            raise RankError(self._difference(graph, int(other), theirs))
        return key

    def _meet(self, key: str) -> None:
        if self._store.add(f"{key}/here", 1) == len(self.ranks):
            self._store.set(f"{key}/all", "")
            return
        wait, began_s = self._wait(self._store), time.monotonic()
        look_s = began_s + _LOOK_S
        while not self._store.check([f"{key}/all"]):
            now_s = time.monotonic()
            time.sleep(min(0.05, (now_s - began_s) / 8))
            if now_s > look_s:
                wait.look(self._op, self._position[:2])
                look_s = now_s + _LOOK_S

    @contextmanager
    def collective(self) -> Iterator[None]:
        """A context in which the graph's next collective is issued."""
        self._at(self._position[1] + 1)
        yield
        if not self.meets:
            event = torch.cuda.Event()
            event.record()
            while self._flying and self._flying[0][1].query():
                self._flying.popleft()
            self._flying.append((self._op, event))

    def wait(self, work: Any) -> None:
        """Wait for a host collective; Ctrl-C and faults of other ranks end the wait. Raises
        RankError: another rank has stopped."""
        wait = self._wait(self._store)
        while True:
            try:
                work.wait(timedelta(seconds=1))
                return
            except RuntimeError as error:
                if work.is_completed():
                    self._explain(error)
            with self._store_there():
                wait.look(self._op, self._position[:2])

    def _wait(self, store: Any) -> Wait:
        return Wait(self.ranks, self.rank, store, self._limit_s)

    @property
    def _op(self) -> str:
        _, entered, at = self._position
        return at if self._now is None else self._now.at(max(0, entered - 1))

    # The thread: notes, and with NCCL the watch.

    def beat(self) -> None:
        """Write a note, clean up, and abort collectives that will not complete."""
        self._write_note()
        if self.rank == self.ranks[0]:
            for n in range(self._tidied, self._count - _KEPT):
                for key in (f"{n}", f"{n}/here", f"{n}/all"):
                    self._of_thread.delete_key(key)
                self._tidied = n + 1
        if self.meets or self._fault is not None:
            return
        first = next((each for each in tuple(self._flying) if not each[1].query()), None)
        if first is not self._oldest[0]:
            self._oldest = (first, self._wait(self._of_thread))
        try:
            if first is not None:
                self._oldest[1].look(first[0], self._position[:2])
            else:  # the rank may be in a collective of the user's code
                self._oldest[1].look_for_reports(self._position[2])
        except RankError as fault:
            self._fault = fault
            _report(self._of_thread, fault)
            logger("ranks").error("%s", fault)
            self._abort()

    def _write_note(self, ended: str = "") -> None:
        self._beat += 1
        note = Note(self._beat, *self._position, ended)
        self._of_thread.set(f"note/{self.rank}", json.dumps(note))

    def end(self) -> None:
        """Abort collectives, which would block the process's exit, stop the thread, and write the
        last note."""
        if self._over.is_set() or self._process != os.getpid():  # a child of a fork is not a rank
            return
        with suppress(RuntimeError):  # the GPU has failed
            while self._fault is None and not all(event.query() for _, event in self._flying):
                if not self._thread.is_alive():  # it would have found the fault
                    self._abort()
                    break
                time.sleep(0.05)
        self._over.set()
        self._thread.join(5)
        error = getattr(sys, "last_value", None)  # Python keeps no SystemExit
        with suppress(*compat.STORE_ERRORS):
            self._write_note("its script ended" if error is None else described(error))

    # Errors.

    def _difference(self, graph: Collectives, other: int, theirs: str) -> str:
        digest, _, steps = theirs.rpartition(" ")
        name, shown = json.loads(self._store.get(f"ops/{digest}"))
        found, differ = first_difference(graph.ops, tuple(shown)), ""
        if found is not None:
            i, here, there = found
            differ = (
                f"; collective {i + 1} is {here} in rank {self.rank} and {there} in rank {other}"
            )
        return (
            f"graph {self._count}: rank {self.rank} is about to run the {graph.graph} after "
            f"{self.steps} optimizer steps, rank {other} the {name} after {steps}{differ}; needed "
            "the same graphs, in the same order, in all ranks: inputs of the same shapes (pad "
            "them, or use dynamic=True), the same number of micro-batches and steps, the same mode "
            "(train() or eval()) and the same frozen parameters (requires_grad)"
        )

    def _explain(self, error: BaseException) -> None:
        """Find the rank that caused a collective to fail."""
        wait, ends_s = self._wait(self._store), time.monotonic() + SILENT_S + 5
        try:
            while time.monotonic() < ends_s:
                with self._store_there():
                    wait.look(self._op, self._position[:2], failed=True)
                time.sleep(_LOOK_S)
        except RankError as fault:
            raise fault from error
        raise RankError(
            f"rank {self.rank}: {self._op} failed ({error}), but every other rank responds; see "
            "their output"
        ) from error

    @contextmanager
    def _store_there(self) -> Iterator[None]:
        try:
            yield
        except compat.STORE_ERRORS as error:
            raise RankError(
                f"rank {self.rank} in {self._op}: the store of the process group does not answer; "
                "the process that runs it (rank 0, or torchrun) has ended: see its output"
            ) from error

    def _stop(self, error: BaseException) -> None:
        """Report that this rank will not finish the graph, so that the others need not wait."""
        if isinstance(error, RankError):
            fault = RankError(str(error), by=error.by, why=error.why)  # without frames
            self._fault = self._fault or fault
        else:
            why = f"raised {described(error)}, in {self._op}"
            rest = "and the other ranks have stopped, or wait; restart all ranks"
            fault = RankError(f"rank {self.rank} {why}, {rest}", by=self.rank, why=why)
            self._fault = fault
        _report(self._store, fault)


def _report(store: Any, fault: RankError) -> None:
    """Write a fault for the other ranks, unless there is one already."""
    with suppress(*compat.STORE_ERRORS):  # else the other ranks cannot be reached
        store.compare_set("fault", "", json.dumps([fault.by, fault.why or str(fault)]))


def _run(target: weakref.ref[Agreement], over: threading.Event) -> None:
    """The thread's work, until the process exits, the agreement is freed, or the store is gone."""
    while not over.wait(_BEAT_S):
        agreement = target()
        if agreement is None:
            return
        try:
            agreement.beat()
        except compat.STORE_ERRORS:
            return
        del agreement


def described(error: BaseException) -> str:
    """An error as one line."""
    line = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {line}" if line else type(error).__name__
