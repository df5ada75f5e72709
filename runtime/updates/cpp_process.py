"""A process beside this one that compiles an update, so that Inductor's caches on disk have it.

Not a thread: while Dynamo compiles, it changes the state of the whole process and restores it
afterwards. What the process has compiled is found in the caches within half a second.

It knows nothing of a GPU, hears no Ctrl-C (it is a session of its own), and ends when the pipe to
it closes, be it because this process is killed. A forked child has no part in it.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from typing import IO

from megacompile.runtime.device import forks
from megacompile.runtime.updates.cpp import Request

REFUSED = 3  # exit status: it began, and the compiler did not do it

_PROGRAM = (
    "import pickle, sys\n"
    "path, name, request = pickle.load(sys.stdin.buffer)\n"
    "sys.path[:] = path\n"
    "import importlib\n"
    "importlib.import_module(name).main(request)\n"
)
_HIDDEN = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")  # a context takes device memory


class CppProcess:
    """A process that carries out a request.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, request: Request) -> None:
        self._errors: IO[bytes] = tempfile.TemporaryFile()
        environment = {k: v for k, v in os.environ.items() if k != "MEGACOMPILE_LOG"}
        environment |= dict.fromkeys(_HIDDEN, "")
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            env=environment,
            start_new_session=True,
        )
        self._end = weakref.finalize(self, _stop, self._process, self._errors)  # at exit too
        forks.tell(self)
        message = (sys.path, __name__, pickle.dumps(request))
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(pickle.dumps(message))
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it is over already, and its status says so

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
        """The child must neither end it nor keep its pipe open."""
        if in_child:
            self._end.detach()
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._errors.close()
            self._process.returncode = 0  # it is not the child's to wait for


def _stop(process: subprocess.Popen[bytes], errors: IO[bytes]) -> None:
    errors.close()
    if process.poll() is None:
        try:
            os.killpg(process.pid, signal.SIGKILL)  # with the compilers that it started
        except (AttributeError, OSError):  # no groups here, or it is over
            process.kill()
        process.wait()
    if process.stdin is not None:
        process.stdin.close()


def main(request: bytes) -> None:
    """What the process does."""
    threading.Thread(target=_end_with_the_pipe, daemon=True).start()
    try:
        pickle.loads(request).carry_out()
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        print(f"{type(error).__name__}: {lines[0] if lines else ''}", file=sys.stderr)
        sys.stderr.flush()
        os._exit(REFUSED)


def _end_with_the_pipe() -> None:
    sys.stdin.buffer.read()  # nothing more comes
    if hasattr(os, "killpg"):
        os.killpg(0, signal.SIGKILL)
    os._exit(1)
