"""Worker processes that compile stages into Inductor's caches on disk.

Inductor compiles the graphs of a process one by one. Here several processes compile a graph each,
and this process loads each result from the caches in tens of milliseconds.

    with submit(...)   this process needs the code now: it compiles graphs that no worker has
                       started, and waits for the others
    submit(...)        this process continues with other work until all graphs are in the caches

Workers start while a model is captured, because importing torch takes seconds. They load no
kernels, so they take no device memory and tune nothing, and end when they have been idle. This
process compiles what they cannot (a graph that cannot be sent, a worker that ends).

MEGACOMPILE_COMPILE_PROCESSES sets their number; by default some with a GPU and many cores.
"""

from __future__ import annotations

import functools
import os
import pickle
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, NamedTuple, Self

import torch
from torch import fx

from megacompile import compat, log
from megacompile.beside.process import Process, end_with_the_pipe
from megacompile.errors import OptionError
from megacompile.host_memory import available_bytes, usable_cores
from megacompile.ir.tensors import Number, TensorMeta
from megacompile.option_values import torchrun_count
from megacompile.runtime.device.background import at_fork, fulfil

VARIABLE = "MEGACOMPILE_COMPILE_PROCESSES"
_MOST = 8  # default maximum of processes
_PROCESS_BYTES = 2 * 2**30  # host memory of a process and of its own kernel compilers
_SHARE = 8  # all processes take at most 1 / _SHARE of the free host memory
_THREADS = 4  # for kernels, per process
_PATIENCE_S = 300.0  # per graph
_MANY = 8  # graphs; no process is started for fewer
_IDLE_S = 60.0  # a process ends this long after the last graph
_READY = "ready"  # the answer of a process that is ready for the next job


class GraphToCompile(NamedTuple):
    part: fx.GraphModule  # the template's graph that needs the code
    module: fx.GraphModule  # the graph for Inductor
    inputs: Sequence[torch.Tensor]  # fake


class CompileJob(NamedTuple):
    """The request to compile a graph in a worker process."""

    graph: bytes  # see `compat.packed_graph`
    hints: Mapping[Any, int | float]  # of the inputs' symbols
    inputs: Sequence[Any]  # `TensorMeta`s, `Number`s and plain values
    settings: bytes  # see `compat.compile_settings`
    caches: dict[str, str]  # environment variables with the caches' folders
    cpu_threads: int


class Jobs:
    """Graphs submitted to a pool; a context withdraws those that no process has started."""

    def __init__(self, pool: CompilePool | None) -> None:
        self.pool = pool
        self.futures: dict[fx.GraphModule, Future[None]] = {}  # by `GraphToCompile.part`
        self.patience_s = _PATIENCE_S if pool is None else pool.patience_s
        self._until_s = time.monotonic() + self.patience_s

    def take(self, part: fx.GraphModule) -> None:
        """Wait for a worker that has started compiling a graph; otherwise withdraw it. Called
        before this process compiles the graph."""
        future = self.futures.pop(part, None)
        if future is None or future.cancel():
            return
        try:
            error = future.exception(self.patience_s)
        except TimeoutError:
            error = TimeoutError(f"it takes more than {self.patience_s:g} s")
        if error is not None:
            log.logger("compile").info("no process compiled a graph: %s", error)

    def done(self) -> bool:
        """True if every graph has been compiled or has failed."""
        if self.pool is None or all(future.done() for future in self.futures.values()):
            return True
        return self.pool.is_over or time.monotonic() > self._until_s

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for future in self.futures.values():
            future.cancel()


class CompilePool:
    """A pool of `count` worker processes that compile for the GPU of an index (`device`; None: for
    the CPU), with `threads` for kernels each. They end when idle for `idle_s` after the first
    graphs. `patience_s`: time limit of one graph."""

    def __init__(
        self,
        count: int,
        device: int | None,
        threads: int,
        *,
        patience_s: float = _PATIENCE_S,
        idle_s: float = _IDLE_S,
    ) -> None:
        request = pickle.dumps((device, threads))
        self.patience_s = patience_s
        self._idle_s = idle_s
        self._used = False  # were graphs submitted?
        self._jobs: queue.SimpleQueue[tuple[Future[None], bytes] | None] = queue.SimpleQueue()
        self._processes = [
            Process(__name__, request, sees_gpus=device is not None, answers=True)
            for _ in range(count)
        ]
        at_fork(self)
        for process in self._processes:
            serve = functools.partial(self._serve, process)
            threading.Thread(target=serve, name="megacompile-compile", daemon=True).start()

    def submit(self, graphs: Iterable[GraphToCompile]) -> Jobs:
        """Submit graphs to the workers, in this order."""
        jobs, self._used = Jobs(self), True
        settings = functools.cache(compat.compile_settings)
        for graph in graphs:
            try:
                job = pickle.dumps(_job(graph, settings))
            except Exception as error:  # pickling user classes may raise anything
                log.logger("compile").info("a graph cannot be sent to a worker process: %s", error)
                continue
            future = jobs.futures[graph.part] = Future()
            self._jobs.put((future, job))
        return jobs

    def _serve(self, process: Process) -> None:
        """Send jobs to one process, one by one."""

        def carry_out(job: bytes) -> None:
            process.send(job)
            if (answer := process.hear()) != _READY:
                raise RuntimeError(answer or "the process has ended")

        works = process.hear() == _READY
        while works:
            try:
                item = self._jobs.get(timeout=self._idle_s)
            except queue.Empty:
                if self._used:
                    break
                continue
            if item is None:
                break
            fulfil(item[0], functools.partial(carry_out, item[1]))
            works = process.status is None
        process.stop()
        if self.is_over:
            while not self._jobs.empty():
                if (item := self._jobs.get()) is not None:
                    item[0].cancel()
            self._jobs.put(None)  # the other threads end too

    @property
    def is_over(self) -> bool:
        """True if all processes have ended."""
        return all(process.status is not None for process in self._processes)

    def stop(self) -> None:
        """End the processes, which frees their memory."""
        while self._processes:
            self._processes.pop().stop()
            self._jobs.put(None)

    def after_fork(self, *, in_child: bool) -> None:
        """Forget the parent's processes in a child of a fork, which compiles by itself."""
        if in_child:
            self._processes.clear()


def _job(graph: GraphToCompile, settings: Callable[[], bytes]) -> CompileJob:
    """The request for a worker process. Raises errors of any kind if the graph cannot be sent."""

    def described(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return replace(TensorMeta.of(value), requires_grad=False)
        if compat.is_number(value):
            hint, expression = compat.expression_of(value)
            return Number(expression, hint)
        return value

    fakes = compat.fakes_in(graph.inputs)
    hints = {} if fakes is None else fakes.hints
    caches = {name: os.environ[name] for name in compat.CACHE_VARIABLES if name in os.environ}
    packed, inputs = compat.packed_graph(graph.module), list(map(described, graph.inputs))
    return CompileJob(packed, hints, inputs, settings(), caches, torch.get_num_threads())


# In a worker process.


def main(request: bytes) -> None:
    """Entry point of a worker process."""
    device, threads = pickle.loads(request)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # other output goes to stderr
    jobs: queue.SimpleQueue[CompileJob] = queue.SimpleQueue()
    end_with_the_pipe(jobs.put)
    compat.use_compile_threads(threads)
    compat.start_compile_workers()
    answer = _READY
    while True:
        print(answer, file=answers, flush=True)
        job = jobs.get()
        try:
            _compile(job, device, threads)
            answer = _READY
        except Exception as error:
            first, _, _ = str(error).strip().partition("\n")
            answer = f"{type(error).__name__}: {first}"


def _compile(job: CompileJob, device: int | None, threads: int) -> None:
    os.environ.update(job.caches)
    compat.use_compile_settings(job.settings)
    compat.use_compile_threads(threads)
    torch.set_num_threads(job.cpu_threads)
    if device:
        torch.cuda.set_device(device)

    def fake(value: Any) -> Any:
        if isinstance(value, TensorMeta):
            return value.empty()
        return value.zeros() if isinstance(value, Number) else value

    with compat.without_device_memory():
        with compat.SymbolicFakes(job.hints) if job.hints else compat.fake_mode():
            inputs = list(map(fake, job.inputs))
        compat.compile_inductor(compat.unpacked_graph(job.graph), inputs)


# The pool of this process.

_pool: CompilePool | None = None


def start(device: torch.device) -> None:
    """Start the pool for a device, if it is not running. Raises an OptionError if
    MEGACOMPILE_COMPILE_PROCESSES is not a number."""
    global _pool
    if _pool is not None and not _pool.is_over:
        return
    _pool = None
    count = _count(device)
    if count and sys.executable and compat.compiles_in_processes():
        index = (device.index or 0) if device.type == "cuda" else None
        try:
            _pool = CompilePool(count, index, _THREADS)
        except (OSError, subprocess.SubprocessError) as error:
            log.logger("compile").info("worker processes could not be started: %s", error)


def _count(device: torch.device) -> int:
    """The number of processes: from the environment, or as cores and free memory allow."""
    value = os.environ.get(VARIABLE, "")
    if value:
        if not value.isdecimal():
            raise OptionError(f"{VARIABLE}={value}: needed a number of processes, such as 4, or 0")
        return int(value)
    if device.type != "cuda":
        return 0
    ranks = max(1, torchrun_count("LOCAL_WORLD_SIZE"))  # on this machine
    by_memory = available_bytes() // _SHARE // _PROCESS_BYTES
    count = min(_MOST, usable_cores() // 2 // ranks, by_memory // ranks)
    return count if count > 1 else 0  # one worker is not faster than this process


def stop() -> None:
    """End the pool, if it is running."""
    global _pool
    if _pool is not None:
        _pool.stop()
        _pool = None


def submit(
    graphs: Callable[[], Iterable[GraphToCompile]], device: torch.device, *, count: int = _MANY
) -> Jobs:
    """Compile `count` graphs in worker processes in the background, if there are any. Starts
    processes for many graphs."""
    if not compat.compiles_in_processes():
        return Jobs(None)
    if count >= _MANY:
        start(device)
    return Jobs(None) if _pool is None or _pool.is_over else _pool.submit(graphs())
