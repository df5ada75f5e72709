"""Background threads for updates and blocking copies, `Completion`, the completion of work on a
thread or a stream, and callbacks around a fork.

Each is a daemon with its own queue, not a `concurrent.futures` pool: a pool rejects work once the
main thread has ended, although other threads may still train. At process exit, queued work is
finished; from then on, and if no thread can be started, the caller does the work itself.

[Note: interrupts] Ctrl-C may arrive between any two instructions of the main thread, even between
the end of a `with lock:` block and the release of the lock. So the main thread takes no lock:
putting a job into the queue is atomic, and a thread that was started twice ends itself.

[Note: forks of the process] Data loaders fork. A child has no other threads, and locks held by them
stay locked forever. So before a fork, work in flight is awaited, while the threads still accept
jobs; then the threads are idle, but for those that the child needs nothing of (`forks`). The child
gets new threads and new locks. Only processes with a model register callbacks.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import queue
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from typing import Any, Generic, TypeVar

import torch

Work = Callable[[], None]
T = TypeVar("T")


class WeakIdSet(Generic[T]):
    """A thread-safe weak set of objects, compared by identity. A `WeakSet` cannot be iterated while
    another thread adds to it. Models and buffers are created in several threads."""

    def __init__(self) -> None:
        self._of: weakref.WeakValueDictionary[int, T] = weakref.WeakValueDictionary()  # by id

    def add(self, one: T) -> None:
        self._of[id(one)] = one

    def discard(self, one: T) -> None:
        self._of.pop(id(one), None)

    def __len__(self) -> int:
        return len(self._of)

    def __contains__(self, one: object) -> bool:
        return id(one) in self._of

    def __iter__(self) -> Iterator[T]:
        """The live objects, in order of insertion."""
        for each in self._of.valuerefs():
            if (one := each()) is not None:
                yield one


def at_fork(who: Any, *, last: bool = False) -> None:
    """Register an object, by weak reference. If it has them, its `before_fork()` is called in the
    forking thread, after those of the others if `last`, and its `after_fork(in_child=)` once in the
    parent and once in the child. They return quickly and never raise."""
    _register()
    _LIVE[last].add(who)


def _call(name: str, groups: tuple[WeakIdSet[Any], ...], **given: bool) -> None:
    for group in groups:
        for each in group:
            if (call := getattr(each, name, None)) is not None:
                call(**given)


_LIVE: tuple[WeakIdSet[Any], WeakIdSet[Any]] = (WeakIdSet(), WeakIdSet())


@functools.cache
def _register() -> None:
    os.register_at_fork(
        before=functools.partial(_call, "before_fork", _LIVE),
        after_in_parent=functools.partial(_call, "after_fork", _LIVE[::-1], in_child=False),
        after_in_child=functools.partial(_call, "after_fork", _LIVE[::-1], in_child=True),
    )


def nothing() -> None:
    """Do nothing: the work of an op that only waits, and a request's default callbacks."""


class Completion:
    """The completion of work on a stream (`event`) or in a thread (`future`); with neither, it is
    complete."""

    def __init__(
        self, event: torch.cuda.Event | None = None, future: Future[Any] | None = None
    ) -> None:
        self.event, self.future = event, future

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
    """One thread that runs jobs in order. It ends with the last reference to this object. A fork
    waits for its jobs, unless `forks`."""

    def __init__(self, name: str, *, forks: bool = False) -> None:
        self.name = name
        self.forks = forks
        self._begin()
        at_fork(self, last=True)

    def _begin(self) -> None:
        self._queue = _Queue(self.name)
        self._end = weakref.finalize(self, self._queue.work.put, None)
        self._end.atexit = False

    def submit(self, work: Work) -> None:
        """Enqueue a job after the earlier jobs; it must not raise."""
        self._queue.work.put(work)
        self._queue.serve()

    def call(self, work: Callable[[], T]) -> T:
        future: Future[T] = Future()
        self.submit(functools.partial(fulfil, future, work))
        return future.result()

    def before_fork(self) -> None:
        """Finish all queued jobs; jobs added by other threads meanwhile may not be included."""
        if not self.forks and (not self._queue.work.empty() or self._queue.turn.locked()):
            self.call(lambda: None)

    def after_fork(self, *, in_child: bool) -> None:
        """Reset in a child of a fork, where the thread does not exist."""
        if in_child:
            self._end.detach()
            self._begin()


class _Queue:
    """The state that a thread references; it has no reference to the owner, which can be freed."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.work: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self.turn = threading.Lock()  # its holder does the work
        self.process = os.getpid()

    def serve(self) -> None:
        """Ensure that the jobs are done, by a thread if one can be started."""
        if self.turn.locked():
            return
        _at_exit(_finish)
        if not _ENDING.is_set():
            _OPEN.add(self)
            thread = threading.Thread(target=self._until_the_end, name=self.name, daemon=True)
            with contextlib.suppress(RuntimeError):  # no more threads, or the process is exiting
                thread.start()
                return
        self.drain()

    def drain(self) -> None:
        with self.turn:
            while not self.work.empty():
                work = self.work.get()
                if work is not None:
                    work()

    def _until_the_end(self) -> None:
        if not self.turn.acquire(blocking=False):
            return  # another thread holds it already
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


_at_exit = functools.cache(atexit.register)  # registers a function once


def _finish() -> None:
    """Finish all jobs at process exit: a thread inside C++ code would crash the process."""
    _ENDING.set()
    mine = os.getpid()  # not the parent's jobs
    here = [each for each in list(_OPEN) if each.process == mine]
    for each in here:
        each.work.put(None)
    for each in here:
        each.drain()
