"""A Python process next to this one, which does what a module of ours says.

It hears no Ctrl-C (it is a session of its own), and ends when the pipe to it closes, also because
this process is killed. A forked child has no part in it.
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
from typing import IO, Any

from megacompile import compat
from megacompile.options import Lowering, Options
from megacompile.runtime.device import forks

_PROGRAM = (
    "import pickle, sys\n"
    "path, name, request = pickle.load(sys.stdin.buffer)\n"
    "sys.path[:] = path\n"
    "import importlib\n"
    "importlib.import_module(name).main(request)\n"
)
_HIDDEN = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")  # a context takes device memory


class Process:
    """A process that calls `main(request)` of a module.

    Args:
        module: its name.
        request: a pickle, of whatever that `main` wants.
        sees_gpus: else it knows nothing of a GPU.
        answers: it writes lines to stdout, which `hear` reads.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(
        self, module: str, request: bytes, *, sees_gpus: bool = False, answers: bool = False
    ) -> None:
        self._errors: IO[bytes] = tempfile.TemporaryFile()
        environment = {k: v for k, v in os.environ.items() if k != "MEGACOMPILE_LOG"}
        environment |= {} if sees_gpus else dict.fromkeys(_HIDDEN, "")
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if answers else subprocess.DEVNULL,
            stderr=self._errors,
            env=environment,
            start_new_session=True,
        )
        self._end = weakref.finalize(self, _stop, self._process, self._errors)  # at exit too
        forks.tell(self)
        try:
            self.send(pickle.dumps((sys.path, module, request)))
        except BrokenPipeError:
            pass  # it is over already, and its status says so

    def send(self, message: bytes) -> None:
        """Sends one more pickle to the process.

        Raises:
            BrokenPipeError: it is over.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(message)
        self._process.stdin.flush()

    def hear(self) -> str:
        """Wait for a line that it writes to stdout; "": it is over, and says nothing more."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().decode(errors="replace").strip()

    @property
    def status(self) -> int | None:
        """Its exit status; None while it works."""
        return self._process.poll()

    def wait(self) -> None:
        """Until it is over."""
        self._process.wait()

    def complaint(self) -> str:
        """The last line that it wrote to stderr."""
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    def stop(self) -> None:
        """End it."""
        self._end()

    def before_fork(self) -> None:
        """Nothing: it is no thread of this process."""

    def after_fork(self, *, in_child: bool) -> None:
        """The child must neither end it nor keep its pipes open."""
        if in_child:
            self._end.detach()
            _close(self._process, self._errors)
            self._process.returncode = 0  # it is not the child's to wait for


def _stop(process: subprocess.Popen[bytes], errors: IO[bytes]) -> None:
    if process.poll() is None:
        try:
            os.killpg(process.pid, signal.SIGKILL)  # with what it started
        except (AttributeError, OSError):  # no groups here, or it is over
            process.kill()
        process.wait()
    _close(process, errors)


def _close(process: subprocess.Popen[bytes], errors: IO[bytes]) -> None:
    for pipe in (process.stdin, process.stdout, errors):
        if pipe is not None:
            with contextlib.suppress(OSError):  # of what was not read
                pipe.close()


def end_with_the_pipe(read: Callable[[bytes], object] = lambda message: None) -> None:
    """In the process: end it when the pipe to it closes.

    Args:
        read: called with each pickle that comes before that, in a thread.
    """
    assert isinstance(sys.stdin, io.TextIOWrapper)
    pipe = sys.stdin.detach()  # else Python closes it at its end, and aborts where a thread reads
    threading.Thread(target=_until_it_closes, args=(pipe, read), daemon=True).start()


def _until_it_closes(pipe: Any, read: Callable[[bytes], object]) -> None:
    try:
        while True:
            read(pickle.load(pipe))
    except (EOFError, pickle.UnpicklingError):  # nothing more comes, or half of it
        if hasattr(os, "killpg"):
            os.killpg(0, signal.SIGKILL)
        os._exit(1)


# Host memory of the processes next to this one, which a budget has to leave to them.
#
# They are there when a first step fills the host with gradients and states. Measured with
# `python -m benchmarks.beside_memory`; decision 33 has the figures. Those of `compile_pool` are not
# counted: they end before a step.

_MIB = 2**20
_FIRST = 256 * _MIB  # what Inductor's workers are forked of, with torch and Triton in it
_WORKER = 48 * _MIB  # what each of them has of its own, and ptxas
_UPDATE = 800 * _MIB  # Python that compiles the code of an update, and the C++ compiler


def processes(options: Options) -> list[tuple[str, int]]:
    """Processes that may run next to a model on CUDA, and the host memory that each takes,
    bytes."""
    found: list[tuple[str, int]] = []
    if options.lowering is not Lowering.INDUCTOR:
        return found
    if (count := compat.compile_threads()) > 1:
        found.append((f"{count} processes that compile kernels", _FIRST + count * _WORKER))
    if options.optimizer is None and compat.has_cpp_compiler():
        # small tensors have wide states: another kind of update, compiled at the same time
        kinds = 2 if options.state_dtype == "int8" else 1
        found.append(("what compiles updates to C++", kinds * _UPDATE))
    return found
