"""Threads that work after the caller has gone on: on updates, and on copies that must be waited
for; and `Completion`, the end of work of a thread or of a stream.

Each is a daemon with a queue of its own, not a pool of `concurrent.futures`: a pool takes no more
work once the main thread has ended, though other threads may still train. At the end of the process
what was given is finished; from then on the caller does the work itself. So it does where no thread
can be started.

[Note: interrupts] Ctrl-C may come between any two instructions of the main thread, also between the
end of a `with lock:` block and the release of the lock. So there is no lock that it takes: what is
put into the queue is there or not, and a thread that was started twice ends itself.
"""

from __future__ import annotations

import atexit
import functools
import os
import queue
import sys
import threading
import weakref
from collections.abc import Callable, Collection
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

import torch

from megacompile import numa
from megacompile.runtime.device import forks

Work = Callable[[], None]
T = TypeVar("T")


class Completion:
    """The end of some work. Without an event and a future it is over.

    Args:
        event: recorded after the work on a stream.
        future: of the work of a thread.
    """

    def __init__(
        self, event: torch.cuda.Event | None = None, future: Future[Any] | None = None
    ) -> None:
        self.event = event
        self.future = future

    def done(self) -> bool:
        """True if it is over, well or not."""
        if self.future is not None:
            return self.future.done()
        return self.event is None or bool(self.event.query())

    def wait(self) -> None:
        """Wait on the host, and raise what went wrong. Cancelled work has changed nothing."""
        if self.event is not None:
            self.event.synchronize()
        if self.future is None:
            return
        try:
            error = self.future.exception()
        except CancelledError:
            return
        if error is not None:
            raise error

    def wait_on(self, stream: torch.cuda.Stream) -> None:
        """Makes a stream wait; the host, where no stream can: for a thread."""
        if self.event is None:
            self.wait()
        else:
            stream.wait_event(self.event)


OVER = Completion()


def fulfil(future: Future[T], work: Callable[[], T]) -> None:
    """Do the work of a future, unless that was cancelled; what goes wrong is the future's."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = work()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)


def is_over() -> bool:
    """Does the process end? Work without a waiter need not be done then."""
    return _ENDING.is_set()


class Background:
    """One thread that does what it is given, in order. It ends with the last reference to this.

    Args:
        name: of the thread.
        cores: on which it runs, and threads that it starts; none: on any.
    """

    def __init__(self, name: str, cores: Collection[int] = ()) -> None:
        self.name = name
        self.cores = cores
        self._begin()
        forks.tell(self, last=True)

    def _begin(self) -> None:
        self._queue = _Queue()
        self._end = weakref.finalize(self, self._queue.work.put, None)
        self._end.atexit = False

    def submit(self, work: Work) -> None:
        """Enqueues a job after those that were given before; it must not raise."""
        self._queue.work.put(work)
        self._queue.serve(self.name, self.cores)

    def call(self, work: Callable[[], T]) -> T:
        """Enqueues a job after those that were given before, and waits; returns and raises what it
        does."""
        future: Future[T] = Future()
        self.submit(functools.partial(fulfil, future, work))
        return future.result()

    def before_fork(self) -> None:
        """Finish what there is; what another thread adds meanwhile is its own risk."""
        if not self._queue.work.empty() or self._queue.turn.locked():
            over = threading.Event()
            self.submit(over.set)
            over.wait()

    def after_fork(self, *, in_child: bool) -> None:
        """The thread is not in the child, which gets another one."""
        if in_child:
            self._end.detach()
            self._begin()


class _Queue:
    """The work of one thread, which knows nothing else, so that its owner can go."""

    def __init__(self) -> None:
        self.work: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self.turn = threading.Lock()  # whose holder does the work
        self.process = os.getpid()

    def serve(self, name: str, cores: Collection[int]) -> None:
        """See to it that the work is done, by a thread wherever there can be one."""
        if self.turn.locked():
            return
        _finish_at_exit()
        if not _ENDING.is_set():
            _OPEN.add(self)
            work = functools.partial(self._until_the_end, cores)
            thread = threading.Thread(target=work, name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no more threads, or none at the end of the process
                pass
            else:
                return
        self.drain()

    def drain(self) -> None:
        """Do in this thread what there is."""
        with self.turn:
            while not self.work.empty():
                work = self.work.get()
                if work is not None:
                    work()

    def _until_the_end(self, cores: Collection[int]) -> None:
        if not self.turn.acquire(blocking=False):
            return  # another one was started first
        numa.bind(cores)
        while (work := self.work.get()) is not None:
            try:
                work()
            except BaseException:  # a fault of ours: said, and what is after it is done
                threading.excepthook(
                    threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread()))
                )
            del work  # it may hold memory
        _OPEN.discard(self)
        self.turn.release()


_OPEN: set[_Queue] = set()  # those whose threads have not ended
_ENDING = threading.Event()  # the process ends


@functools.cache
def _finish_at_exit() -> None:
    atexit.register(_finish)


def _finish() -> None:
    """At the end of the process: a thread in the middle of C++ would crash it."""
    _ENDING.set()
    mine = os.getpid()  # not those of the one that forked
    here = [each for each in list(_OPEN) if each.process == mine]
    for each in here:
        each.work.put(None)
    for each in here:
        each.drain()
