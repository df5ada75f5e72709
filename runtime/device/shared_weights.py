"""Memory of a host that several ranks map: whole buckets, in which each rank writes its own rows.

    the file:  counters | bucket 0, as it lies in a slot | bucket 1 | ...

Each row is there once, and every rank can copy a whole bucket to its device.

[Note: who waits for whom] A rank copies what others write, and no collective lies in between. Two
kinds of writes are ordered by counters, which each rank writes for itself and all ranks read:

- *Those in the background* (updates, copies of new parameters from the device): a rank counts the
  work that it has begun on a bucket, and what of it is over. Who copies the bucket waits until all
  that was begun is over. What is begun is told where the next graph with whole copies is entered:
  in a backward that updates, a rank that runs ahead begins work behind a sum that needs the others,
  and they must not wait for that. A thread counts what is over: the rank that began it may wait for
  others.
- *All others* (the user's code, loading, what an update does at once): a rank says when it enters a
  graph with whole copies, and when its copies are done. All wait for all at both places. So what a
  rank did before a graph is seen in it, and what it does afterwards is not.

What was begun before a graph is known to all who have entered it. Within a graph a write comes
behind a collective that is behind the copies (`megacompile.verify.ranks`).

A wait looks at what the other ranks say of themselves, as that for a collective does: one that is
killed, or stops, ends it (`rank_faults`).

[Note: order in memory] Processors may show one rank's writes to another in another order. A lock
that is taken and released twice keeps what is before it in front of what is behind it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch

from megacompile.errors import HostMemoryError, MegacompileError
from megacompile.ir.ops import Part
from megacompile.runtime.device.background import Background, is_over
from megacompile.runtime.device.buffers import SharedFile
from megacompile.runtime.device.ranks import Ranks
from megacompile.runtime.device.shared_buffers import SharedBuffer, layout, shared_file
from megacompile.runtime.device.streams import Host

_SHORTEST_S, _LONGEST_S = 20e-6, 1e-3  # between two looks at a counter
_LOOK_S = 0.5e-3  # between two looks at what is under way here


class Work(Protocol):
    """Work on a bucket that goes on in the background (`runtime.params.pending.InFlight`)."""

    def event(self, part: Part) -> torch.cuda.Event | None:
        """What comes behind the copies of a part."""

    def ahead(self, part: Part) -> Host | None:
        """What is done with a part before all is over."""

    def done(self) -> bool:
        """Is it over?"""

    def wait(self) -> None:
        """Return when it is; raise if it failed."""


class SharedWeights:
    """Buckets in memory that the ranks of one host share.

    Args:
        file: that all of them have.
        ranks: those that map it.
        sizes: bytes of the whole buckets, by key; the same in all ranks.
    """

    def __init__(self, file: SharedFile, ranks: Ranks, sizes: Mapping[int, int]) -> None:
        self._file, self.ranks = file, ranks
        control, self._at, _ = layout(ranks.count, sizes)
        self._sizes = dict(sizes)
        self._control = SharedBuffer(file, 0, control, lambda: False)
        self._words = memoryview(self._control).cast("q")
        self._fence = threading.Lock()
        self._turn = 0  # graphs with whole copies that were entered
        self.begun: dict[int, int] = {}  # by this rank: counter -> its value, not told yet
        self._under_way: list[_UnderWay] = []
        self._thread = Background("megacompile-shared-weights")

    @staticmethod
    def of(ranks: Ranks, sizes: Mapping[int, int]) -> SharedWeights:
        """The same memory in each of the ranks that shard: a collective of all of the mesh.

        Raises:
            HostMemoryError: a rank cannot make it, or open it. In all ranks.
        """
        file, why = shared_file(ranks, sizes)
        if file is None:
            raise HostMemoryError(
                f"megacompile(): {why}; give whole_buckets=False, and buckets are gathered"
            )
        return SharedWeights(file, ranks, sizes)

    def rows(self, key: int) -> Rows:
        """The counters of a bucket."""
        first = 1 + self.ranks.count * (2 + 3 * list(self._at).index(key))
        return Rows(self, first)

    def buffer(self, key: int, gone: Callable[[], bool]) -> SharedBuffer:
        """A whole bucket, mapped here.

        Args:
            gone: notes that this rank does without it; is it the last one?
        """
        return SharedBuffer(self._file, self._at[key], self._sizes[key], gone)

    @contextmanager
    def copied(self, copies_are_done: Callable[[], None]) -> Iterator[None]:
        """For its duration this rank makes whole copies, and no rank writes but behind collectives.

        Args:
            copies_are_done: waits for those of this rank.

        Raises:
            RankError: another rank has stopped.
        """
        count, rank = self.ranks.count, self.ranks.rank
        self._turn += 1
        self.tell()
        self.write(1 + rank, self._turn)
        self.wait(lambda: all(self.read(1 + r) >= self._turn for r in range(count)))
        yield
        copies_are_done()
        self.ranks.note_op()
        self.write(1 + count + rank, self._turn)
        self.wait(lambda: all(self.read(1 + count + r) >= self._turn for r in range(count)))

    def tell(self) -> None:
        """Let the others know what this rank has begun."""
        for at, number in self.begun.items():
            self.write(at, number)

    def read(self, at: int) -> int:
        """A counter."""
        return self._words[at]

    def write(self, at: int, value: int) -> None:
        """Set a counter of this rank, behind what it has written elsewhere."""
        self._settle()
        self._words[at] = value

    def wait(self, there: Callable[[], bool]) -> None:
        """Wait for counters.

        Raises:
            RankError: another rank has stopped.
        """
        if not there():
            self.ranks.agreement.wait(_Counters(there))
        self._settle()

    def _settle(self) -> None:
        """See [Note: order in memory]."""
        for _ in range(2):
            with self._fence:
                pass

    def follow(self, work: Work, rows: Rows, number: int) -> None:
        """Count work when it is over."""
        self._under_way.append(_UnderWay(work, rows, number))
        self._thread.submit(self._count)

    def _count(self) -> None:
        """Of the thread: until nothing is under way."""
        while self._under_way and not is_over():
            for entry in tuple(self._under_way):
                over = _over(entry.work)
                if over is not None:
                    self._under_way.remove(entry)
                if over:
                    entry.rows.finish(entry.number)
            time.sleep(_LOOK_S)


@dataclass(frozen=True, slots=True, eq=False)
class _UnderWay:
    """Work in the background that other ranks wait for."""

    work: Work
    rows: Rows
    number: int  # of what was begun on its bucket


@dataclass(frozen=True, slots=True)
class Rows:
    """The counters of one bucket: what each rank does with its rows of it.

    Args:
        shared: where they lie.
        first: the first of them: what each rank has begun; then what is over, and who is gone.
    """

    shared: SharedWeights
    first: int

    def begin(self, work: Work) -> None:
        """Somebody begins to write this rank's rows, in the background."""
        self.shared.begun[self._mine] = number = self._begun + 1
        self.shared.follow(work, self, number)

    def finish(self, number: int | None = None) -> None:
        """Work is over, and all before it; by default all that was begun."""
        number = self._begun if number is None else number
        over = self._mine + self.shared.ranks.count
        if self.shared.read(over) < number:
            self.shared.write(over, number)

    def busy(self) -> bool:
        """Does somebody write the rows of some rank? Of others, what they have told."""
        read, count = self.shared.read, self.shared.ranks.count
        begun = [read(self.first + r) for r in range(count)]
        begun[self.shared.ranks.rank] = self._begun
        return any(read(self.first + count + r) < begun[r] for r in range(count))

    def settle(self) -> None:
        """Wait until nobody does.

        Raises:
            RankError: another rank has stopped.
        """
        self.shared.wait(lambda: not self.busy())

    @property
    def _mine(self) -> int:
        """The counter of what this rank has begun."""
        return self.first + self.shared.ranks.rank

    @property
    def _begun(self) -> int:
        return self.shared.begun.get(self._mine, 0)

    def leave(self) -> bool:
        """This rank does without the bucket; do all?"""
        gone, ranks = self.first + 2 * self.shared.ranks.count, self.shared.ranks
        self.shared.write(gone + ranks.rank, 1)
        return all(self.shared.read(gone + r) for r in range(ranks.count))


@dataclass(frozen=True, slots=True)
class _Counters:
    """Counters that reach some values, as `Agreement.wait` waits for a collective."""

    there: Callable[[], bool]

    def wait(self, limit: timedelta) -> None:
        """Raise RuntimeError where they have not by then."""
        end_s, pause_s = time.monotonic() + limit.total_seconds(), _SHORTEST_S
        while not self.there():
            if time.monotonic() > end_s:
                raise RuntimeError("other ranks have not come there")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_S)

    def is_completed(self) -> bool:
        """Has it failed? It cannot."""
        return False


def await_weights(work: Work) -> None:
    """Wait for the new parameters of some work; raise if it failed."""
    event, ahead = work.event(Part.WEIGHTS), work.ahead(Part.WEIGHTS)
    if event is not None:
        event.synchronize()
    elif ahead is not None:
        ahead.settle()
    else:
        work.wait()


def _over(work: Work) -> bool | None:
    """Are the new parameters of some work where they are to be? None: not yet. False: it failed,
    which whoever uses its bucket in this rank raises."""
    event, ahead = work.event(Part.WEIGHTS), work.ahead(Part.WEIGHTS)
    try:
        if event is not None:
            return True if event.query() else None
        if ahead.busy() if ahead is not None else not work.done():
            return None
        await_weights(work)
    except (MegacompileError, RuntimeError):  # CUDA's errors are of the second kind
        return False
    return True
