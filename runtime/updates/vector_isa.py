"""Which vector instructions code for the CPU may use, found beside the training.

Inductor asks before it loads code for the CPU, once in a process. To answer, it builds a program
for each set of instructions and runs it in a process that imports torch: 45 s on a machine with an
H100 and torch 2.11, also where caches on disk have the code. So a thread asks first.
"""

from __future__ import annotations

import threading

from megacompile import compat
from megacompile.runtime.device import forks


class VectorIsa:
    """The answer: there, or on its way."""

    def __init__(self) -> None:
        self._known = threading.Event()
        self._thread: threading.Thread | None = None
        forks.tell(self)

    def begin(self) -> None:
        """Let a thread ask, unless one does. Where none can be started, Inductor asks itself."""
        if self._thread is not None:
            return
        self._thread = threading.Thread(target=self._ask, name="megacompile-isa", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            self._known.set()

    def _ask(self) -> None:
        try:
            compat.find_vector_isa()
        except Exception:  # whoever compiles asks again, and says what is wrong
            pass
        finally:
            self._known.set()

    @property
    def known(self) -> bool:
        """Is the answer there?"""
        return self._known.is_set()

    def wait(self) -> None:
        """Until it is, if somebody asked."""
        if self._thread is not None:
            self._known.wait()

    def before_fork(self) -> None:
        """Nothing: it holds no lock that a child would take."""

    def after_fork(self, *, in_child: bool) -> None:
        """The child has no thread, and asks for itself."""
        if in_child and not self._known.is_set():
            self._known, self._thread = threading.Event(), None


ISA = VectorIsa()
