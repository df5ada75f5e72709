"""Processes next to this one that compile stages, so that Inductor's caches on disk have them.

Inductor compiles one graph after the other in a process: a minute of Python for the graphs of a
model, next to which most cores are idle. Here several processes compile a graph each, and this one
takes what they have made from the caches, within a few hundredths of a second for each.

    compiling   this process wants the code now: it compiles what no process has begun, and waits
    submit      this process does something else until all of it is in the caches

The first processes start while a model is captured, because they import torch for seconds, and end
when the graphs of its first plan have code: a graph on a GPU makes them take device memory, which
belongs to the first step. Those that start later, when a graph of many stages has been captured
(`expect`), load no kernel, and take none. Where anything is unusual (no caches, a graph or options
that cannot be sent, a process that ends or takes too long), this process compiles, as it would have
done.

MEGACOMPILE_COMPILE_PROCESSES=4 says how many; 0: none. Without it there are some on a machine with
a GPU and many cores.
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
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import fx

from megacompile import compat, log
from megacompile.beside.process import Process, end_with_the_pipe
from megacompile.errors import OptionError
from megacompile.host_memory import available_bytes
from megacompile.ir.symbols import Number
from megacompile.ir.tensors import TensorMeta
from megacompile.runtime.device import forks
from megacompile.runtime.device.background import fulfil

VARIABLE = "MEGACOMPILE_COMPILE_PROCESSES"
_MOST = 8  # processes, by default
_PROCESS_BYTES = 2 * 2**30  # of host memory, with the processes that compile its kernels
_SHARE = 8  # they take no more than one of so many parts of what is free
_THREADS = 4  # of each of them, for kernels
_PATIENCE_S = 300.0
_MANY = 8  # graphs: for fewer, no process is started
_IDLE_S = 20.0  # after the last graph
_EXPECTED_S = 90.0  # before the first one
_READY = "ready"  # for a job, the last of which is done

Take = Callable[[fx.GraphModule], None]


class GraphToCompile(NamedTuple):
    """A graph that is to be compiled."""

    part: fx.GraphModule  # of a template, which it is compiled for
    module: fx.GraphModule  # what Inductor gets
    inputs: Sequence[torch.Tensor]  # fake


class CompileJob(NamedTuple):
    """A graph that a process is asked to compile."""

    graph: bytes  # see `compat.packed_graph`
    inputs: bytes  # see `_described`
    settings: bytes  # see `compat.compile_settings`
    caches: dict[str, str]  # variables that say where they are
    cpu_threads: int  # that code for the CPU is made for
    loads: bool  # may the process load kernels, which takes device memory?


class Jobs:
    """Graphs that the processes of a pool are asked to compile."""

    def __init__(self, pool: CompilePool) -> None:
        self.pool = pool
        self.futures: dict[fx.GraphModule, Future[None]] = {}  # by `Graph.part`
        self._until_s = time.monotonic() + pool.patience_s

    def take(self, part: fx.GraphModule) -> None:
        """Called before a graph is compiled here: wait for the process that compiles it, if one
        has begun."""
        future = self.futures.pop(part, None)
        if future is None or future.cancel():
            return
        try:
            error = future.exception(self.pool.patience_s)
        except TimeoutError:
            error = TimeoutError(f"it takes more than {self.pool.patience_s:g} s")
        if error is None:
            _compiled[0] += 1
        else:
            log.logger("compile").info("no process compiled a graph: %s", error)

    def done(self) -> bool:
        """True if each graph is compiled, or cannot be."""
        if all(future.done() for future in self.futures.values()):
            return True
        return self.pool.is_over or time.monotonic() > self._until_s

    def withdraw(self) -> None:
        """Ask for nothing more that no process has begun."""
        for future in self.futures.values():
            future.cancel()


class CompilePool:
    """Some processes.

    Args:
        count: of processes.
        device: index of the GPU that they compile for; None: the CPU.
        threads: of each, for kernels.
        loads: they may take device memory.
        patience_s: with one graph.
    """

    def __init__(
        self,
        count: int,
        device: int | None,
        threads: int,
        *,
        loads: bool,
        patience_s: float = _PATIENCE_S,
    ) -> None:
        request = pickle.dumps((device, threads))
        self._jobs: queue.SimpleQueue[tuple[Future[None], CompileJob] | None] = queue.SimpleQueue()
        self._processes = [
            Process(__name__, request, sees_gpus=device is not None, answers=True)
            for _ in range(count)
        ]
        self._works = False
        self.loads = loads
        self.patience_s = patience_s
        self.kept = False  # do they wait for jobs, or compile some that are not waited for?
        self._idle_s = _IDLE_S
        forks.tell(self)

    def submit(self, graphs: Iterable[GraphToCompile]) -> Jobs:
        """Submits graphs to the workers, in this order."""
        settings = functools.cache(compat.compile_settings)
        jobs, self._idle_s = Jobs(self), _IDLE_S
        self._work()
        for graph in graphs:
            job = _job(graph, settings, self.loads)
            if job is not None:
                future = jobs.futures[graph.part] = Future()
                self._jobs.put((future, job))
        return jobs

    def wait(self, idle_s: float) -> None:
        """Jobs will come, within so long."""
        self.kept, self._idle_s = True, idle_s
        self._work()

    def _work(self) -> None:
        if self._works:
            return
        self._works = True
        for process in self._processes:
            threading.Thread(
                target=self._serve, args=(process,), name="megacompile-compile", daemon=True
            ).start()

    def _serve(self, process: Process) -> None:
        """Give one process job after job."""
        works = process.hear() == _READY
        while works:
            try:
                item = self._jobs.get(timeout=self._idle_s if self.kept else None)
            except queue.Empty:
                break
            if item is None:
                break
            future, job = item
            fulfil(future, functools.partial(_carry_out, process, job))
            works = process.status is None
        process.stop()
        if self.is_over:
            self._give_up()

    def _give_up(self) -> None:
        """Cancels the jobs that have not begun."""
        with contextlib.suppress(queue.Empty):
            while True:
                item = self._jobs.get_nowait()
                if item is not None:
                    fulfil(item[0], _no_process)

    @property
    def is_over(self) -> bool:
        """True if all of its processes have ended."""
        return all(process.status is not None for process in self._processes)

    def stop(self) -> None:
        """End them, and give their memory back."""
        while self._processes:
            self._processes.pop().stop()
            self._jobs.put(None)

    def before_fork(self) -> None:
        """Nothing: what compiles is no thread."""

    def after_fork(self, *, in_child: bool) -> None:
        """They work for the parent; the child compiles for itself."""
        if in_child:
            self._processes.clear()


def _no_process() -> None:
    raise RuntimeError("the processes have ended")


def _job(graph: GraphToCompile, settings: Callable[[], bytes], loads: bool) -> CompileJob | None:
    """The request for a worker process; None where the graph cannot be sent."""
    try:
        packed, inputs = compat.packed_graph(graph.module), _described(graph.inputs)
        given = settings()
    except Exception as error:  # whatever a class raises when it is pickled
        log.logger("compile").info("a graph is compiled here, since it cannot be sent: %s", error)
        return None
    caches = {name: os.environ[name] for name in compat.CACHE_VARIABLES if name in os.environ}
    return CompileJob(packed, inputs, given, caches, torch.get_num_threads(), loads)


def _described(inputs: Sequence[torch.Tensor]) -> bytes:
    """Bytes that describe the inputs, and the values that their symbols were traced for."""
    fakes = compat.fakes_in(inputs)
    metas = [
        replace(TensorMeta.of(value), requires_grad=False)
        if isinstance(value, torch.Tensor)
        else Number(compat.expression_of(value)[1], compat.expression_of(value)[0])
        if compat.is_number(value)
        else value
        for value in inputs
    ]
    return pickle.dumps(({} if fakes is None else fakes.hints, metas))


def _carry_out(process: Process, job: CompileJob) -> None:
    process.send(pickle.dumps(tuple(job)))
    answer = process.hear()
    if answer != _READY:
        raise RuntimeError(answer or "the process has ended")


# In one of the processes.


def main(request: bytes) -> None:
    """Entry point of a worker process."""
    device, threads = pickle.loads(request)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever else is printed
    jobs: queue.SimpleQueue[CompileJob] = queue.SimpleQueue()
    end_with_the_pipe(lambda message: jobs.put(CompileJob(*message)))
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


def _compile(job: CompileJob, device: int | None, threads: int) -> None:
    os.environ.update(job.caches)
    compat.use_compile_settings(job.settings)
    compat.use_compile_threads(threads)
    torch.set_num_threads(job.cpu_threads)
    if device is not None and (device or job.loads):
        torch.cuda.set_device(device)
    with contextlib.nullcontext() if job.loads else compat.without_device_memory():
        compat.compile_inductor(compat.unpacked_graph(job.graph), _made(job.inputs))


def _made(inputs: bytes) -> list[torch.Tensor]:
    """The inputs that `_described` has described."""
    hints, metas = pickle.loads(inputs)
    if not hints:
        with compat.fake_mode():
            return [meta.empty() if isinstance(meta, TensorMeta) else meta for meta in metas]
    fakes = compat.SymbolicFakes(hints)
    with fakes:
        return [
            meta.empty() if isinstance(meta, TensorMeta) else fakes.number(meta.expression)
            for meta in metas
        ]


# The pool of this process.

_pool: CompilePool | None = None
_compiled = [0]  # graphs, by processes for this one


def compiled() -> int:
    """Number of graphs that worker processes have compiled so far for this process."""
    return _compiled[0]


def start(device: torch.device, *, loads: bool = True) -> None:
    """Start processes, where there are none.

    Args:
        loads: they may take device memory: it is for a model's first graphs.

    Raises:
        OptionError: the environment says something else than a number of them.
    """
    global _pool
    if _pool is not None and not _pool.is_over:
        return
    _pool = None
    count = _count(device)
    if count and compat.compiles_in_processes() and sys.executable:
        index = (device.index or 0) if device.type == "cuda" else None
        try:
            _pool = CompilePool(count, index, _THREADS, loads=loads)
        except (OSError, subprocess.SubprocessError) as error:
            log.logger("compile").info("no processes compile stages: %s", error)


def expect(stages: int, device: torch.device, *, idle_s: float = _EXPECTED_S) -> None:
    """Starts processes for the code of so many stages, where that is much: they import torch for
    seconds. They end if no graph comes for so long."""
    if stages < _MANY or not compat.compiles_without_device():
        return
    start(device, loads=False)
    if _pool is not None and not _pool.loads:
        _pool.wait(idle_s)


def _count(device: torch.device) -> int:
    """As many as the environment says; else as many as cores and free memory allow."""
    value = os.environ.get(VARIABLE, "")
    if value:
        if not value.isdecimal():
            raise OptionError(f"{VARIABLE}={value}: needed a number of processes, such as 4, or 0")
        return int(value)
    if device.type != "cuda":
        return 0
    beside = os.environ.get("LOCAL_WORLD_SIZE", "")  # ranks on this machine, as torchrun says
    ranks = max(1, int(beside)) if beside.isdecimal() else 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    by_memory = available_bytes() // _SHARE // _PROCESS_BYTES
    count = min(_MOST, (cores or 1) // 2 // ranks, by_memory // ranks)
    return count if count > 1 else 0  # one alone is as fast as this process


def stop() -> None:
    """End the processes, if there are any."""
    global _pool
    if _pool is not None:
        _pool.stop()
        _pool = None


@contextlib.contextmanager
def compiling(
    graphs: Callable[[], Iterable[GraphToCompile]], count: int, device: torch.device
) -> Iterator[Take]:
    """Compiles graphs in worker processes, which end afterwards. Where there are none, starts some
    for many graphs.

    Yields `Jobs.take`.

    Args:
        graphs: called if there are processes.
        count: of graphs.
    """
    if count >= _MANY:
        start(device, loads=False)
    pool = _pool
    if pool is None or pool.is_over:
        yield lambda part: None
        return
    jobs = None
    try:
        jobs = pool.submit(graphs())
        yield jobs.take
    finally:
        if not pool.kept:
            stop()
        elif jobs is not None:
            jobs.withdraw()


def submit(graphs: Callable[[], Iterable[GraphToCompile]], device: torch.device) -> Jobs | None:
    """Compiles graphs in worker processes, while this one goes on; None where no process can be
    started."""
    if not compat.compiles_without_device():
        return None
    start(device, loads=False)
    if _pool is None:
        return None
    _pool.kept = True
    return _pool.submit(graphs())
