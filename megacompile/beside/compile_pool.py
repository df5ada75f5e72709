"""Processes beside this one that compile stages, so that Inductor's caches on disk have them.

Inductor compiles one graph after the other in a process: a minute of Python for the few graphs of a
large model, beside which most cores are idle. Here several processes compile a graph each, and this
one takes what they have made from the caches, within a few hundredths of a second for each. What
they have not begun yet it compiles itself.

MEGACOMPILE_COMPILE_PROCESSES=4 says how many; without it there are none. They start while the model
is captured, because they import torch for seconds, and end when the graphs of the first plan have
code: a graph on a GPU makes them take device memory, which belongs to the first step. Where
anything is unusual (no caches, a graph or options that cannot be sent, a process that ends or takes
too long), this process compiles, as it would have done.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import queue
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import torch
from torch import fx

from megacompile import compat, log
from megacompile.beside.process import Process, end_with_the_pipe
from megacompile.errors import OptionError
from megacompile.runtime.device import forks
from megacompile.runtime.device.background import fulfil

VARIABLE = "MEGACOMPILE_COMPILE_PROCESSES"
_THREADS = 4  # of each of them, for kernels
_PATIENCE_S = 300.0  # with one graph
_READY = "ready"  # for a job, the last of which is done

Graph = tuple[fx.GraphModule, Sequence[torch.Tensor]]  # and its inputs, which are fake
Take = Callable[[fx.GraphModule], None]


class Job(NamedTuple):
    """A graph that a process is asked to compile."""

    graph: bytes  # see `compat.packed_graph`
    settings: bytes  # see `compat.compile_settings`
    caches: dict[str, str]  # variables that say where they are
    cpu_threads: int  # that code for the CPU is made for


class CompilePool:
    """Some processes.

    Args:
        count: of processes.
        device: index of the GPU that they compile for; None: the CPU.
        threads: of each, for kernels.
    """

    def __init__(self, count: int, device: int | None, threads: int) -> None:
        request = pickle.dumps((device, threads))
        self._processes = [
            Process(__name__, request, sees_gpus=device is not None, answers=True)
            for _ in range(count)
        ]
        forks.tell(self)

    @contextlib.contextmanager
    def compiling(self, graphs: Sequence[Graph]) -> Iterator[Take]:
        """Let them compile graphs, in this order.

        Yields a function to be called before a graph is compiled here: it waits for the process
        that compiles it, if one has begun.
        """
        jobs: deque[tuple[Future[None], Job]] = deque()
        futures: dict[fx.GraphModule, Future[None]] = {}
        for module, inputs in graphs:
            job = _job(module, inputs)
            if job is not None:
                futures[module] = Future()
                jobs.append((futures[module], job))
        for process in self._processes:
            threading.Thread(
                target=_work, args=(process, jobs), name="megacompile-compile", daemon=True
            ).start()

        def take(module: fx.GraphModule) -> None:
            future = futures.get(module)
            if future is None or future.cancel():
                return
            try:
                error = future.exception(_PATIENCE_S)
            except TimeoutError:
                error = TimeoutError(f"it takes more than {_PATIENCE_S:g} s")
            if error is None:
                _compiled[0] += 1
            else:
                log.logger("compile").info("no process compiled a graph: %s", error)

        try:
            yield take
        finally:
            while jobs:
                with contextlib.suppress(IndexError):
                    jobs.popleft()[0].cancel()

    def stop(self) -> None:
        """End them, and give their memory back."""
        while self._processes:
            self._processes.pop().stop()

    def before_fork(self) -> None:
        """Nothing: what compiles is no thread."""

    def after_fork(self, *, in_child: bool) -> None:
        """They work for the parent; the child compiles for itself."""
        if in_child:
            self._processes.clear()


def _job(module: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Job | None:
    """What a process is asked to do; None where that cannot be said."""
    try:
        graph, settings = compat.packed_graph(module, inputs), compat.compile_settings()
    except Exception as error:  # whatever somebody's classes raise when they are pickled
        log.logger("compile").info("a graph is compiled here, since it cannot be sent: %s", error)
        return None
    caches = {name: os.environ[name] for name in compat.CACHE_VARIABLES if name in os.environ}
    return Job(graph, settings, caches, torch.get_num_threads())


def _work(process: Process, jobs: deque[tuple[Future[None], Job]]) -> None:
    """Give one process job after job."""
    if process.hear() != _READY:
        return
    while jobs:
        try:
            future, job = jobs.popleft()
        except IndexError:  # another one was faster
            return
        fulfil(future, functools.partial(_carry_out, process, job))


def _carry_out(process: Process, job: Job) -> None:
    process.send(pickle.dumps(tuple(job)))
    answer = process.hear()
    if answer != _READY:
        raise RuntimeError(answer or "the process has ended")


# In one of the processes.


def main(request: bytes) -> None:
    """What a process does."""
    device, threads = pickle.loads(request)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever else is printed
    jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
    end_with_the_pipe(lambda message: jobs.put(Job(*message)))
    compat.use_compile_threads(threads)
    compat.start_compile_workers()
    answer = _READY
    while True:
        print(answer, file=answers, flush=True)
        job = jobs.get()
        try:
            _compile(job, device, threads)
        except Exception as error:
            first, _, _ = str(error).strip().partition("\n")
            answer = f"{type(error).__name__}: {first}"
        else:
            answer = _READY


def _compile(job: Job, device: int | None, threads: int) -> None:
    os.environ.update(job.caches)
    compat.use_compile_settings(job.settings)
    compat.use_compile_threads(threads)
    torch.set_num_threads(job.cpu_threads)
    if device is not None:
        torch.cuda.set_device(device)
    compat.compile_inductor(*compat.unpacked_graph(job.graph))


# The pool of this process.

_pool: CompilePool | None = None
_compiled = [0]  # graphs, by processes for this one


def compiled() -> int:
    """How many graphs such processes have compiled so far that this one has asked for."""
    return _compiled[0]


def start(device: torch.device) -> None:
    """Start as many processes for a model's first graphs as the environment says.

    Raises:
        OptionError: it says something else.
    """
    global _pool
    stop()
    value = os.environ.get(VARIABLE, "") or "0"
    if not value.isdecimal():
        raise OptionError(f"{VARIABLE}={value}: needed a number of processes, such as 4, or 0")
    if int(value) and compat.compiles_in_processes() and sys.executable:
        index = (device.index or 0) if device.type == "cuda" else None
        try:
            _pool = CompilePool(int(value), index, _THREADS)
        except (OSError, subprocess.SubprocessError) as error:
            log.logger("compile").info("no processes compile stages: %s", error)


def stop() -> None:
    """End the processes, if there are any."""
    global _pool
    if _pool is not None:
        _pool.stop()
        _pool = None


@contextlib.contextmanager
def compiling(graphs: Callable[[], Sequence[Graph]]) -> Iterator[Take]:
    """Let the processes that there are compile graphs, and end them behind that.

    Yields what `CompilePool.compiling` does.

    Args:
        graphs: called if there are processes.
    """
    if _pool is None:
        yield lambda module: None
        return
    try:
        with _pool.compiling(graphs()) as take:
            yield take
    finally:
        stop()
