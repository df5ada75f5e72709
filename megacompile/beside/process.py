"""A helper process that runs the `main` of one of our modules.

It gets no Ctrl-C, because it has its own session. It ends when the pipe to it closes, even if this
process is killed. Forked children do not share it.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable
from typing import Any

from megacompile import compat
from megacompile.options import Lowering, Options
from megacompile.runtime.device.background import at_fork

_PROGRAM = (
    "import pickle, sys\n"
    "path, name, request = pickle.load(sys.stdin.buffer)\n"
    "sys.path[:] = path\n"
    "import importlib\n"
    "importlib.import_module(name).main(request)\n"
)
_HIDDEN = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")  # a CUDA context takes device memory


class Process:
    """A process that calls `main(request)` of a module. Unless it `sees_gpus`, all GPUs are hidden
    from it. `answers`: it writes lines to stdout, which `hear` reads. Raises OSError if it cannot
    be started."""

    def __init__(
        self, module: str, request: bytes, *, sees_gpus: bool = False, answers: bool = False
    ) -> None:
        # Without buffers: a buffer's lock, held by a thread that waits for an answer, would stay
        # locked in a child of a fork, which closes the pipes.
        self._errors: Any = tempfile.TemporaryFile(buffering=0)
        environment = {k: v for k, v in os.environ.items() if k != "MEGACOMPILE_LOG"}
        environment |= {} if sees_gpus else dict.fromkeys(_HIDDEN, "")
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if answers else subprocess.DEVNULL,
            stderr=self._errors,
            env=environment,
            start_new_session=True,
        )
        self._end = weakref.finalize(self, _stop, self._process, self._errors)  # at exit too
        at_fork(self)
        try:
            self.send(pickle.dumps((sys.path, module, request)))
        except BrokenPipeError:
            pass  # the process has ended; see `status`

    def send(self, message: bytes) -> None:
        """Send a pickle to the process. Raises BrokenPipeError if it has ended."""
        assert self._process.stdin is not None
        rest = memoryview(message)
        while rest:
            rest = rest[self._process.stdin.write(rest) :]

    def hear(self) -> str:
        """Wait for a line from its stdout; "" if it has ended."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().decode(errors="replace").strip()

    @property
    def status(self) -> int | None:
        """Its exit status; None while it runs."""
        return self._process.poll()

    def wait(self) -> None:
        """Wait until it has ended."""
        self._process.wait()

    def complaint(self) -> str:
        """The last line of its stderr."""
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it wrote nothing to stderr"

    def stop(self) -> None:
        """Kill it, with its own child processes."""
        self._end()

    def after_fork(self, *, in_child: bool) -> None:
        """Close the pipes in a child of a fork, which must not end the process."""
        if in_child:
            self._end.detach()
            self._process.returncode = 0  # the child cannot wait for it
            _stop(self._process, self._errors)


def _stop(process: subprocess.Popen[bytes], errors: Any) -> None:
    if process.poll() is None:
        with contextlib.suppress(OSError):  # it has ended
            os.killpg(process.pid, signal.SIGKILL)  # with its child processes
        process.wait()
    for pipe in (process.stdin, process.stdout, errors):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


def end_with_the_pipe(read: Callable[[Any], object] = lambda message: None) -> None:
    """End this helper process when the pipe from its parent closes. A thread calls `read` with each
    pickle from the pipe."""
    assert isinstance(sys.stdin, io.TextIOWrapper)
    pipe = sys.stdin.detach()  # or Python closes it at exit, and aborts if a thread reads it

    def until_it_closes() -> None:
        try:
            while True:
                read(pickle.load(pipe))
        finally:  # it is closed, maybe in the middle of a pickle, or one cannot be read here
            os.killpg(0, signal.SIGKILL)

    threading.Thread(target=until_it_closes, daemon=True).start()


# Host memory of helper processes, which a budget leaves free: those that run in the first step.
# Measured with `python -m benchmarks.beside_memory`; decision 33 has the figures.

_MIB = 2**20
_FIRST = 256 * _MIB  # the process that Inductor's workers are forked from, with torch and Triton
_WORKER = 48 * _MIB  # each worker's own memory, and ptxas
_UPDATE = 800 * _MIB  # the Python process that compiles an update, and the C++ compiler


def processes(options: Options) -> list[tuple[str, int]]:
    """Processes that may run next to a model on CUDA, with the host memory of each in bytes."""
    if options.lowering is not Lowering.INDUCTOR:
        return []
    helpers: list[tuple[str, int]] = []
    if (count := compat.compile_threads()) > 1:
        helpers.append((f"{count} processes that compile kernels", _FIRST + count * _WORKER))
    if options.optimizer is None and compat.has_cpp_compiler():
        # with int8, small tensors have wide states: a second kind of update, compiled concurrently
        kinds = 2 if options.state_dtype == "int8" else 1
        helpers.append(("processes that compile updates to C++", kinds * _UPDATE))
    return helpers
