"""Ensures that ranks run the same collectives in the same order; if they do not, all ranks stop
with a reason.

Before a rank runs a graph, it writes the graph's digest into the store of the process group. The
first rank to write decides; a rank with another digest raises before any of its collectives. So
mismatched collectives are never issued.

    rank 0    n=7  forward, 12 collectives, digest 4fe1...     written
    rank 1    n=7  forward, 12 collectives, digest 4fe1...     the same: it runs
    rank 2    n=7  backward, 9 collectives, digest 08c2...     not the same: RankError in every rank

With gloo, collectives run on the host, and a started one cannot be aborted. So ranks meet in the
store, where faults can be reported, before a graph starts its collectives. With NCCL the GPU waits
and the host continues: a late rank delays no other host, and a thread aborts collectives that will
never complete (docs/decisions/0037-ranks-agree.md).
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from megacompile import compat
from megacompile.errors import RankError
from megacompile.ir.collective_order import Collectives, first_difference
from megacompile.log import logger
from megacompile.runtime.device.rank_notes import SILENT_S, Faults, Limits, Notes, described

_KEPT = 64  # number of graphs whose keys are kept
_LOOK_S = 0.5  # between two polls of the other ranks' notes
_SAME = (
    "needed the same graphs, in the same order, in all ranks: inputs of the same shapes (pad "
    "them, or use dynamic=True), the same number of micro-batches and steps, the same mode "
    "(train() or eval()) and the same frozen parameters (requires_grad)"
)


@dataclass(frozen=True, slots=True, eq=False)
class _Flying:
    op: str
    event: torch.cuda.Event


TALK = "an exchange between ranks"  # the default name of a common action


class Agreement:
    """This rank among the ranks that share models.

    Args:
        ranks: the global numbers of the ranks.
        rank: the number of this rank.
        store: creates a client of the process group's store.
        limits: how long to wait.
        meets: True: ranks wait for one another before each graph. False: a thread watches them.
        abort: aborts the collectives in flight.
    """

    def __init__(
        self,
        ranks: tuple[int, ...],
        rank: int,
        store: Callable[[], Any],
        limits: Limits,
        *,
        meets: bool,
        abort: Callable[[], None] = lambda: None,
    ) -> None:
        self.ranks, self.rank, self.meets = ranks, rank, meets
        self.steps = 0  # optimizer steps so far
        self.doing = TALK  # the current common action; see `Ranks.together`
        self._store, self._tidier = store(), store()  # one for callers, one for the notes thread
        self._abort = abort
        self._count = self._tidied = 0
        self._now: Collectives | None = None  # the running graph
        self._said: set[str] = set()
        self._fault: RankError | None = None
        self._flying: deque[_Flying] = deque()  # collectives of a GPU, in order
        self._since: tuple[_Flying | None, float] = (None, 0.0)  # the oldest one, and its start
        self.notes = Notes(ranks, rank, (self._store, self._tidier), self._watch, self._finish)
        self._faults = Faults(self.notes, limits, thread=False)
        self._seen_by_thread = Faults(self.notes, limits, thread=True)

    @contextmanager
    def run(self, graph: Collectives) -> Iterator[None]:
        """A context in which this rank and all others run the same graph.

        Raises:
            RankError: another rank runs a different graph, has stopped, or does not arrive.
        """
        if not graph.ops:
            yield
            return
        with self._in(graph):
            self._begin(graph)
            yield
            self.check()

    @contextmanager
    def _in(self, graph: Collectives) -> Iterator[None]:
        """A context in which this rank is in a graph; an error inside is reported to the others."""
        outer, position = self._now, self.notes.position
        self._now = graph
        try:
            yield
        except BaseException as error:
            self._stop(error)
            raise
        if outer is not None:  # a hook in the middle of a graph has read a parameter
            self._now, self.notes.position = outer, (self._count, *position[1:])
        else:
            self._now = None
            self._at(len(graph.ops), f"after the {graph.graph} (graph {self._count})")

    @contextmanager
    def working(self) -> Iterator[None]:
        """A context that marks this rank as busy, even if it only waits for a disk."""
        self.notes.working += 1
        try:
            yield
        finally:
            self.notes.working -= 1

    def check(self) -> None:
        """Raise an error that the thread has found."""
        if self._fault is not None:
            raise RankError(str(self._fault), by=self._fault.by, why=self._fault.why)

    def _at(self, entered: int, words: str = "") -> None:
        self.notes.position = (self._count, entered, words or self.notes.position[2])

    def meet(self, what: str, raised: str = "") -> dict[int, str]:
        """Wait for all ranks in the store; works with NCCL too, and after this rank's GPU has
        failed.

        Args:
            what: names the common action.
            raised: the reason why this rank cannot continue, if it cannot.

        Returns:
            The reasons of the ranks that cannot continue, by rank.

        Raises:
            RankError: another rank does something different, has stopped, or does not arrive.
        """
        graph = Collectives(what, ("what each rank says",), f"meet-{what}")
        with self._in(graph):
            key = self._agree(graph)
            with self._store_there():
                if raised:
                    self._store.set(f"{key}/raised/{self.rank}", raised)
                    self._store.set(f"{key}/raised", "")
                self._meet(key)
                return self._raised(key)

    def _raised(self, key: str) -> dict[int, str]:
        if not self._store.check([f"{key}/raised"]):
            return {}
        keys = {rank: f"{key}/raised/{rank}" for rank in self.ranks}
        return {r: self._store.get(k).decode() for r, k in keys.items() if self._store.check([k])}

    def _begin(self, graph: Collectives) -> None:
        key = self._agree(graph)
        if self.meets:
            with self._store_there():
                self._meet(key)

    def _agree(self, graph: Collectives) -> str:
        """Compare a graph with the one that the first rank has announced; returns its key."""
        self.check()
        key = str(self._count)
        self._count += 1
        self._at(0, f"in the {graph.graph} (graph {self._count})")
        with self._store_there():
            if graph.digest not in self._said:
                self._store.set(f"ops/{graph.digest}", json.dumps([graph.graph, graph.ops]))
                self._said.add(graph.digest)
            mine = f"{graph.digest} {self.steps}"
            first = self._store.compare_set(key, "", f"{mine} {self.rank}").decode()
            theirs, _, other = first.rpartition(" ")
            if theirs != mine:
                raise RankError(self._difference(graph, int(other), theirs))
        return key

    @contextmanager
    def _store_there(self) -> Iterator[None]:
        try:
            yield
        except compat.STORE_ERRORS as error:
            self._gone(error)

    def _meet(self, key: str) -> None:
        """Wait until all ranks have arrived."""
        if self._store.add(f"{key}/here", 1) == len(self.ranks):
            self._store.set(f"{key}/all", "")
            return
        began_s = time.monotonic()
        look_s = began_s + _LOOK_S
        while not self._store.check([f"{key}/all"]):
            now_s = time.monotonic()
            time.sleep(min(0.05, (now_s - began_s) / 8))
            if now_s > look_s:
                self._look(now_s - began_s)
                look_s = now_s + _LOOK_S

    @contextmanager
    def collective(self) -> Iterator[None]:
        """A context in which the graph's next collective is issued."""
        self._at(self.notes.position[1] + 1)
        yield
        if not self.meets:
            event = torch.cuda.Event()
            event.record()
            while self._flying and self._flying[0].event.query():
                self._flying.popleft()
            self._flying.append(_Flying(self._op, event))

    def wait(self, work: Any) -> None:
        """Wait for a host collective; Ctrl-C and faults of other ranks end the wait.

        Raises:
            RankError: another rank has stopped.
        """
        began_s = time.monotonic()
        while True:
            try:
                work.wait(timedelta(seconds=1))
                return
            except RuntimeError as error:
                if work.is_completed():
                    self._explain(error)
            self._look(time.monotonic() - began_s)

    @property
    def _op(self) -> str:
        """The op that this rank is in."""
        _, entered, at = self.notes.position
        return at if self._now is None else self._now.at(max(0, entered - 1))

    def _look(self, waited_s: float, *, failed: bool = False) -> None:
        try:
            self._faults.look(self._op, waited_s, failed=failed)
        except compat.STORE_ERRORS as error:
            self._gone(error)

    def _watch(self) -> None:
        """Clean up and abort collectives that will not complete; the thread calls this with every
        note."""
        if self.rank == self.ranks[0]:
            for n in range(self._tidied, self._count - _KEPT):
                for key in (f"{n}", f"{n}/here", f"{n}/all"):
                    self._tidier.delete_key(key)
                self._tidied = n + 1
        if self.meets or self._fault is not None:
            return
        first = next((each for each in tuple(self._flying) if not each.event.query()), None)
        if first is not self._since[0]:
            self._since = (first, time.monotonic())
        try:
            if first is not None:
                waited_s = time.monotonic() - self._since[1]
                self._seen_by_thread.look(first.op, waited_s, failed=False)
            else:  # the rank may be in a collective of the user's code
                self._seen_by_thread.look_for_reports(self.notes.position[2])
        except RankError as fault:
            self._fault = fault
            self.notes.say(fault=fault.why, by=fault.by)
            logger("ranks").error("%s", fault)
            self._abort()

    def _finish(self) -> None:
        """Abort collectives at process exit; otherwise they would block it."""
        with suppress(RuntimeError):  # the GPU has failed
            while self._fault is None and not all(each.event.query() for each in self._flying):
                if not self.notes.are_written:
                    self._abort()  # the thread would have reported it
                    return
                time.sleep(0.05)

    # Errors.

    def _difference(self, graph: Collectives, other: int, theirs: str) -> str:
        digest, _, steps = theirs.rpartition(" ")
        name, shown = json.loads(self._store.get(f"ops/{digest}"))
        n = self._count
        where = f"graph {n}: rank {self.rank} is about to run the {graph.graph}, rank {other} "
        found = first_difference(graph.ops, tuple(shown))
        if found is not None:
            i, here, there = found
            return (
                f"{where}the {name}; their collectives differ, collective {i + 1} is {here} in "
                f"rank {self.rank} and {there} in rank {other}; {_SAME}"
            )
        if digest != graph.digest:
            return f"{where}the {name}, whose first collective is {shown[0]}; {_SAME}"
        return (
            f"{where}too, before {graph.at(0)}; rank {self.rank} has run {self.steps} optimizer "
            f"steps and rank {other} {steps}; {_SAME}"
        )

    def _explain(self, error: BaseException) -> None:
        """Find the rank that caused a collective to fail."""
        began_s = time.monotonic()
        try:
            while time.monotonic() < began_s + SILENT_S + 5:
                self._look(0, failed=True)
                time.sleep(_LOOK_S)
        except RankError as fault:
            raise fault from error
        raise RankError(
            f"rank {self.rank}: {self._op} failed ({error}), but every other rank responds; see "
            "their output"
        ) from error

    def _gone(self, error: BaseException) -> None:
        raise RankError(
            f"rank {self.rank} in {self._op}: the store of the process group does not answer; the "
            "process that runs it (rank 0, or torchrun) has ended: see its output"
        ) from error

    def _stop(self, error: BaseException) -> None:
        """Report that this rank will not finish the graph, so that the others need not wait."""
        if isinstance(error, RankError):
            why, by = error.why or str(error), error.by
            self._fault = self._fault or RankError(str(error), by=by, why=why)  # without frames
        else:
            why, by = f"raised {described(error)}, in {self._op}", self.rank
            self._fault = RankError(
                f"rank {self.rank} {why}, and the other ranks have stopped, or wait; restart all "
                "ranks",
                by=by,
                why=why,
            )
        self.notes.say(fault=why, by=by)
