"""Background threads for updates and blocking copies; and `Completion`, the completion of work on a
thread or a stream.

Each is a daemon with its own queue, not a `concurrent.futures` pool: a pool rejects work once the
main thread has ended, although other threads may still train. At process exit, queued work is
finished; from then on, and if no thread can be started, the caller does the work itself.

[Note: interrupts] Ctrl-C may arrive between any two instructions of the main thread, even between
the end of a `with lock:` block and the release of the lock. So the main thread takes no lock:
putting a job into the queue is atomic, and a thread that was started twice ends itself.
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
    """The completion of some work. Without an event and a future the work is complete.

    Args:
        event: recorded after the work on a stream.
        future: the future of a thread's work.
    """

    def __init__(
        self, event: torch.cuda.Event | None = None, future: Future[Any] | None = None
    ) -> None:
        self.event = event
        self.future = future

    def done(self) -> bool:
        """True if the work has ended, successfully or not."""
        if self.future is not None:
            return self.future.done()
        return self.event is None or bool(self.event.query())

    def wait(self) -> None:
        """Wait on the host; raises the work's error. Cancelled work has changed nothing."""
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
        """Make a stream wait; if the work is a thread's, the host waits instead."""
        if self.event is None:
            self.wait()
        else:
            stream.wait_event(self.event)


OVER = Completion()


def fulfil(future: Future[T], work: Callable[[], T]) -> None:
    """Do the work of a future unless it was cancelled; an error is stored in the future."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = work()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)


def is_over() -> bool:
    """True if the process is exiting. Work whose result nothing waits for can then be skipped."""
    return _ENDING.is_set()


class Background:
    """One thread that runs jobs in order. It ends with the last reference to this object.

    Args:
        name: the thread's name.
        cores: the cores for the thread and the threads that it starts; empty: any.
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
        """Enqueue a job after the earlier jobs; it must not raise."""
        self._queue.work.put(work)
        self._queue.serve(self.name, self.cores)

    def call(self, work: Callable[[], T]) -> T:
        """Enqueue a job after the earlier jobs and wait; returns its result or raises its error."""
        future: Future[T] = Future()
        self.submit(functools.partial(fulfil, future, work))
        return future.result()

    def before_fork(self) -> None:
        """Finish all queued jobs; jobs added by other threads meanwhile may not be included."""
        if not self._queue.work.empty() or self._queue.turn.locked():
            over = threading.Event()
            self.submit(over.set)
            over.wait()

    def after_fork(self, *, in_child: bool) -> None:
        """Reset in a child of a fork: the thread does not exist there, and the child starts
        another."""
        if in_child:
            self._end.detach()
            self._begin()


class _Queue:
    """The state that a thread references. It has no reference to the owner, so the owner can be
    freed."""

    def __init__(self) -> None:
        self.work: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self.turn = threading.Lock()  # its holder does the work
        self.process = os.getpid()

    def serve(self, name: str, cores: Collection[int]) -> None:
        """Ensure that the jobs are done, by a thread if one can be started."""
        if self.turn.locked():
            return
        _finish_at_exit()
        if not _ENDING.is_set():
            _OPEN.add(self)
            work = functools.partial(self._until_the_end, cores)
            thread = threading.Thread(target=work, name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no more threads, or the process is exiting
                pass
            else:
                return
        self.drain()

    def drain(self) -> None:
        """Run all queued jobs in this thread."""
        with self.turn:
            while not self.work.empty():
                work = self.work.get()
                if work is not None:
                    work()

    def _until_the_end(self, cores: Collection[int]) -> None:
        if not self.turn.acquire(blocking=False):
            return  # another thread holds it already
        numa.bind(cores)
        while (work := self.work.get()) is not None:
            try:
                work()
            except BaseException:  # a bug in megacompile: log it and continue with later jobs
                threading.excepthook(
                    threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread()))
                )
            del work  # the job may hold memory
        _OPEN.discard(self)
        self.turn.release()


_OPEN: set[_Queue] = set()  # queues whose threads have not ended
_ENDING = threading.Event()  # the process is exiting


@functools.cache
def _finish_at_exit() -> None:
    atexit.register(_finish)


def _finish() -> None:
    """Finish all jobs at process exit: a thread inside C++ code would crash the process."""
    _ENDING.set()
    mine = os.getpid()  # not the parent's jobs
    here = [each for each in list(_OPEN) if each.process == mine]
    for each in here:
        each.work.put(None)
    for each in here:
        each.drain()
