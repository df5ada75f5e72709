"""A process next to this one that compiles an update, so that Inductor's caches on disk have it.

Not a thread: while Dynamo compiles, it changes the state of the whole process and restores it
afterwards. What the process has compiled is found in the caches within half a second. It knows
nothing of a GPU.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys

from megacompile.beside.process import Process, end_with_the_pipe
from megacompile.runtime.updates.cpp import CompileRequest

REFUSED = 3  # exit status: it began, and the compiler did not do it


class CppProcess(Process):
    """A process that carries out a request.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, request: CompileRequest) -> None:
        super().__init__(__name__, pickle.dumps(request))


def main(request: bytes) -> None:
    """Entry point of the process."""
    end_with_the_pipe()
    try:
        pickle.loads(request).carry_out()
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        print(f"{type(error).__name__}: {lines[0] if lines else ''}", file=sys.stderr)
        sys.stderr.flush()
        os._exit(REFUSED)
