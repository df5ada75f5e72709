"""The C++ code of a rule's twin, ready or being compiled
(docs/decisions/0005-the-update-runs-in-the-background.md).

A second process, which sees no GPU, compiles it into Inductor's caches on disk. Until it is ready,
the eager twin runs (`optim.twin.apply`), with bitwise equal results. The thread that calls
`optimizer.step()` polls `ready`, then loads the code from the caches. Without caches, or if no
process can be started, that thread compiles, too: Dynamo changes process-wide state meanwhile.

The same code serves all sizes. It leaves one core to the issuing thread, which spins in many CUDA
calls (`loss.item()`). It runs without Dynamo's frame caches, which do not support a thread that
runs while another one compiles or calls `torch.compiler.reset()`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megacompile import compat, log, notices
from megacompile.beside.process import Process, end_with_the_pipe
from megacompile.log import UPDATES
from megacompile.runtime import optim
from megacompile.runtime.optim.blockwise import absmax_numel
from megacompile.runtime.optim.rule import OptimizerRule, Update
from megacompile.runtime.optim.rules import RULES
from megacompile.runtime.optim.twin import arguments, function_of

_TYPICAL = 2**22  # elements; by the first size, Inductor picks one thread or several
_REFUSED = 3  # exit status: the process started, but compilation failed
_NOTE = 4  # version of the note's format

Code = Callable[..., None]
Kind = tuple[str, ...]


class Compiled:
    """The C++ code of one kind of a rule's updates. A new object starts its compilation."""

    def __init__(self, rule: OptimizerRule, update: Update) -> None:
        self.rule = rule
        self.code: Code | None = None
        self.done = False  # True once the code is loaded or refused
        self._request: CompileRequest | None = None  # None: no process can be asked
        self._process: Process | None = None  # that compiles it
        folder = compat.code_cache()
        if folder is None or not sys.executable:
            return
        try:
            self._request = CompileRequest.of(rule, update, folder)
            if not os.path.exists(self._request.note):
                self._process = Process(__name__, pickle.dumps(self._request))
                log.logger("compile").info("%s: compiling to C++ in the background", rule.name)
        except Exception as error:  # no process, or functions in Inductor's options
            text = "%s: no process can compile to C++ in the background: %s"
            log.logger("compile").info(text, rule.name, error)
            self._request = None

    def ready(self, update: Update) -> bool:
        """True if the code is ready; `update` is of its kind."""
        if self._process is not None:
            if self._process.status is None:
                return False
            process, self._process = self._process, None
            if process.status == _REFUSED:
                self._refuse(process.complaint())
            process.stop()
        if not self.done:
            self._take(update)
        return self.code is not None

    def __call__(self, update: Update) -> None:
        assert self.code is not None
        self.code(*arguments(update))

    def wait(self) -> None:
        """Wait until the second process has ended."""
        if self._process is not None:
            self._process.wait()

    def _take(self, update: Update) -> None:
        """Load the code from the caches, or compile it here if the second process did not."""
        request, options = self._request, options_now()
        settings: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if request is not None:
            options, settings = request.options, compat.compile_settings_in_use(request.settings)
            if os.path.exists(request.note):
                # Inductor probes these before it loads code, which takes 45 s on some machines
                compat.use_vector_isas(json.loads(Path(request.note).read_text()))
        try:
            with UPDATES.counting(f"{self.rule.name} in C++"), settings:
                self.code = compile_update(self.rule, update, options)
        except RuntimeError as error:
            self._refuse(str(error).strip().partition("\n")[0])
            return
        self.done = True

    def _refuse(self, why: str) -> None:
        self.done = True
        notices.warn(
            f"megacompile: the {self.rule.name} update cannot be compiled to C++: {why}; it runs "
            "eagerly, with the same results but slower; install a C++ compiler that torch.compile "
            "can use",
            notices.Whose.HOST,
        )


def compiled(rule: OptimizerRule, update: Update) -> Compiled:
    """The code of this kind of update. Thread-safe."""
    key = rule, kind_of(update)
    return _COMPILED.get(key) or _COMPILED.setdefault(key, Compiled(rule, update))


_COMPILED: dict[tuple[OptimizerRule, Kind], Compiled] = {}


def wait_until_compiled() -> None:
    """Wait for all compilations in second processes; the next step uses their code."""
    for each in list(_COMPILED.values()):
        each.wait()


# The code.


def kind_of(update: Update) -> Kind:
    """The key of compiled code: dtypes, existing states, rounding."""
    parts = (update.param, update.grad, update.states, update.copy, update.seed is None)
    return tuple([str(compat.tree_map(lambda v: getattr(v, "dtype", v), part)) for part in parts])


def _like(update: Update, numel: int) -> Update:
    """The same kind of update for another size, with zeros."""

    def new(name: str, tensor: torch.Tensor) -> torch.Tensor:
        size = absmax_numel(numel) if name == "absmax" else numel
        return torch.zeros(size, dtype=tensor.dtype)

    return update.map(new)


def options_now() -> dict[str, Any]:
    """Inductor's options. The C++ wrapper runs without the GIL. Sets Triton autotuning although the
    code has no Triton kernels: its default depends on whether the process sees a GPU, and is part
    of cache keys (torch 2.11)."""
    return {
        "cpp_wrapper": True,
        "cpp.threads": max(1, torch.get_num_threads() - 1),
        "triton.autotune_at_compile_time": False,
    }


def compile_update(rule: OptimizerRule, update: Update, options: dict[str, Any]) -> Code:
    with torch.no_grad():
        typical = arguments(_like(update, _TYPICAL))
        return compat.compiled_function(function_of(rule), typical, {}, options)


# The second process.


@dataclass(frozen=True)
class CompileRequest:
    """A request to the second process, which fills the caches."""

    rule: str
    update: Update  # empty tensors
    options: dict[str, Any]
    settings: bytes  # see `compat.compile_settings`
    note: str  # path of a file that is written once the code is in the caches

    @staticmethod
    def of(rule: OptimizerRule, update: Update, folder: Path) -> CompileRequest:
        """Create a request for updates like this one; `folder` has Inductor's caches."""
        empty, options = _like(update, 0), options_now()
        settings = compat.compile_settings()
        key = (
            *(torch.__version__, torch.backends.cpu.get_cpu_capability(), _sources()),
            *(_NOTE, rule.name, kind_of(empty), tuple(options.items()), settings),
        )
        name = hashlib.sha256(pickle.dumps(key)).hexdigest()
        note = str(folder / "megacompile" / name[:40])
        return CompileRequest(rule.name, empty, options, settings, note)

    def carry_out(self) -> None:
        """Compile the code and write the note; called in the second process."""
        compat.use_compile_settings(self.settings)
        (rule,) = (rule for rule in RULES if rule.name == self.rule)
        compile_update(rule, self.update, self.options)
        note = Path(self.note)
        note.parent.mkdir(parents=True, exist_ok=True)
        draft = note.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps(compat.vector_isas()))
        draft.replace(note)


@functools.cache
def _sources() -> str:
    (folder,) = optim.__path__
    digest = hashlib.sha256()
    for path in sorted(Path(folder).glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def main(request: bytes) -> None:
    end_with_the_pipe()
    try:
        pickle.loads(request).carry_out()
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        print(f"{type(error).__name__}: {lines[0] if lines else ''}", file=sys.stderr)
        sys.stderr.flush()
        os._exit(_REFUSED)
