"""The C++ code of a rule, ready or being compiled.

A second process compiles it (see `cpp`). Until it is ready, the eager twin runs
(`optim.twin.apply`), with bitwise equal results. Nothing waits: the thread that calls
`optimizer.step()` polls `ready` once per kind of update, then loads the code from Inductor's caches
in less than half a second, without a compiler. The second process has already probed the vector
instructions.

Without caches, or if no process can be started, that thread compiles.

Background threads run the compiled code without Dynamo's frame caches, which do not support a
thread that runs while another one compiles or calls `torch.compiler.reset()`.
"""

from __future__ import annotations

import functools
import pickle
import subprocess
import sys
import time

from megacompile import compat, log, notices
from megacompile.beside.process import Process
from megacompile.log import KERNELS, UPDATES
from megacompile.runtime.device.background import at_fork
from megacompile.runtime.optim.registry import RULES
from megacompile.runtime.optim.rule import OptimizerRule, Update
from megacompile.runtime.optim.twin import arguments
from megacompile.runtime.updates.cpp import (
    REFUSED,
    Code,
    CompileRequest,
    Kind,
    compile_update,
    kind_of,
    options_now,
)


class Compiled:
    """The compiled updates of one rule, by kind."""

    def __init__(self, rule: OptimizerRule) -> None:
        self.rule = rule
        self._codes: dict[Kind, Code] = {}
        self._refused: set[Kind] = set()
        self._in_process: dict[Kind, tuple[CompileRequest, Process]] = {}  # being compiled
        at_fork(self)

    def expect(self, update: Update) -> None:
        """Start compiling updates of this kind, unless done already."""
        kind = kind_of(update)
        if kind not in self._codes and kind not in self._refused and kind not in self._in_process:
            request = self._request(update)
            if request is not None and not request.is_done:
                self._begin(kind, request)

    def ready(self, update: Update) -> bool:
        """True if the code for this kind of update is ready."""
        kind = kind_of(update)
        if kind in self._codes:
            return True
        if kind in self._refused:
            return False
        if kind in self._in_process:
            asked, process = self._in_process[kind]
            if process.status is None:
                return False
            del self._in_process[kind]
            refused, why = process.status == REFUSED, process.complaint()
            process.stop()
            if refused:
                self._refuse(kind, why)
                return False
            return self._take(kind, update, asked, by_process=True)
        request = self._request(update)
        if request is not None and not request.is_done and self._begin(kind, request):
            return False
        return self._take(kind, update, request)

    def __call__(self, update: Update) -> None:
        self._codes[kind_of(update)](*arguments(update))

    def wait(self) -> None:
        """Wait until all compilation has finished."""
        for _, process in list(self._in_process.values()):
            process.wait()

    def after_fork(self, *, in_child: bool) -> None:
        """Forget the parent's processes in a child of a fork, which compiles by itself."""
        if in_child:
            self._in_process.clear()

    def _request(self, update: Update) -> CompileRequest | None:
        """The request for the second process; None if it cannot be sent."""
        folder = compat.code_cache()
        if folder is None or not sys.executable:
            return None
        try:
            return CompileRequest.of(self.rule, update, folder)
        except (pickle.PicklingError, AttributeError, TypeError) as error:  # functions in options
            text = "%s: Inductor's options cannot be sent to another process: %s"
            log.logger("compile").info(text, self.rule.name, error)
            return None

    def _begin(self, kind: Kind, request: CompileRequest) -> bool:
        try:
            self._in_process[kind] = request, request.start()
        except (OSError, subprocess.SubprocessError) as error:
            text = "%s: the process that compiles to C++ could not be started: %s"
            log.logger("compile").info(text, self.rule.name, error)
            return False
        log.logger("compile").info("%s: compiling to C++ in the background", self.rule.name)
        return True

    def _take(
        self,
        kind: Kind,
        update: Update,
        request: CompileRequest | None,
        *,
        by_process: bool = False,
    ) -> bool:
        """Load the code from the caches, or compile it; returns False on failure.

        Args:
            kind: of the update.
            update: of this kind.
            request: None if it could not be sent.
            by_process: True if the second process has compiled it.
        """
        before, start = compat.cache_counts(), time.perf_counter()
        try:
            if request is None:
                self._codes[kind] = compile_update(self.rule, update, options_now())
            else:
                if request.is_done:
                    request.prepare_to_load()
                with compat.compile_settings_in_use(request.settings):
                    self._codes[kind] = compile_update(self.rule, update, request.options)
        except RuntimeError as error:
            self._refuse(kind, str(error).strip().partition("\n")[0])
            return False
        (found, made), time_s = compat.cache_counts().since(before), time.perf_counter() - start
        UPDATES.add(found=found, made=made, time_s=time_s, beside=found if by_process else 0)
        log.update_compiled(self.rule.name, found=found > 0, time_s=time_s)
        if request is not None and request.is_done and not request.agreed:
            notices.warn(
                f"megacompile: the {self.rule.name} update that is compiled to C++ rounds "
                "differently from the eager one, which runs until it is ready: the first steps of "
                "a run without a warm cache differ in the last bits",
                notices.Whose.RANK,
            )
        return True

    def _refuse(self, kind: Kind, why: str) -> None:
        self._refused.add(kind)
        notices.warn(
            f"megacompile: the {self.rule.name} update cannot be compiled to C++: {why}; it runs "
            "eagerly, with the same results but slower; install a C++ compiler that torch.compile "
            "can use",
            notices.Whose.HOST,
        )


def compiled(rule: OptimizerRule) -> Compiled:
    """The compiled updates of a rule. Thread-safe."""
    return _COMPILED.get(rule) or _COMPILED.setdefault(rule, Compiled(rule))


_COMPILED: dict[OptimizerRule, Compiled] = {}


@functools.cache
def count_kernels() -> None:
    """Count and log the Triton kernels of this package that this process uses."""
    compat.note_kernels(__name__.partition(".")[0], _note_kernel)


def _note_kernel(name: str, found: bool, time_s: float) -> None:
    KERNELS.add(found=int(found), made=int(not found), time_s=time_s)
    log.update_compiled(f"kernel {name}", found=found, time_s=time_s, what="Triton")


def wait_until_compiled() -> None:
    """Wait for all updates that the second process compiles; the next step uses them."""
    for rule in RULES:
        compiled(rule).wait()
