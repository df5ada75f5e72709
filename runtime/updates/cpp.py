"""Compiles a rule's twin to C++: the code, its key on disk, and the compiling process.

The same code serves all sizes. It is compiled for a typical size, because Inductor decides by the
first size whether to use several threads. It leaves one core to the issuing thread, which spins in
many CUDA calls (`loss.item()`): a team of threads is as fast as its slowest thread, and a thread
that shares its core runs at half speed.
"""

from __future__ import annotations

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

from megacompile import compat
from megacompile.beside.process import Process, end_with_the_pipe
from megacompile.runtime import optim
from megacompile.runtime.optim.blockwise import absmax_numel
from megacompile.runtime.optim.registry import RULES
from megacompile.runtime.optim.rule import OptimizerRule, Update
from megacompile.runtime.optim.twin import apply, arguments, function_of

TYPICAL = 2**22  # Inductor's size hint for a parameter, in elements
REFUSED = 3  # exit status: the process started, but compilation failed
_NOTE = 2  # version of the note's format
_SAMPLE = 2**16 + 37  # elements for comparing code with its twin

Code = Callable[..., None]
Kind = tuple[object, ...]


def kind_of(update: Update) -> Kind:
    """The key of compiled code: dtypes and existing states."""
    return tuple(str(compat.tree_map(_dtype_of, a)) for a in arguments(update))


def like(
    update: Update,
    numel: int,
    make: Callable[[int, torch.dtype], torch.Tensor] = lambda n, dtype: torch.zeros(n, dtype=dtype),
) -> Update:
    """The same kind of update for another size, with zeros or the tensors that `make` returns."""

    def new(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return make(absmax_numel(numel) if name == "absmax" else numel, tensor.dtype)

    return update.map(new)


def options_now() -> dict[str, Any]:
    """Inductor's options. The C++ wrapper runs without the GIL.

    Sets Triton autotuning although the code has no Triton kernels: its default depends on whether
    the process sees a GPU, and is part of cache keys (torch 2.11).
    """
    return {
        "cpp_wrapper": True,
        "cpp.threads": max(1, torch.get_num_threads() - 1),
        "triton.autotune_at_compile_time": False,
    }


def compile_update(rule: OptimizerRule, update: Update, options: dict[str, Any]) -> Code:
    """Compile updates of this kind, without Dynamo's frame caches."""
    with torch.no_grad():
        return compat.compiled_function(
            function_of(rule), arguments(like(update, TYPICAL)), {}, options
        )


def agrees(rule: OptimizerRule, update: Update, code: Code) -> bool:
    """True if the code's results are bitwise equal to the eager twin's."""
    generator = torch.Generator().manual_seed(0)

    def values(numel: int, dtype: torch.dtype) -> torch.Tensor:
        if not dtype.is_floating_point:
            return torch.randint(256, (numel,), generator=generator).to(dtype)
        return (torch.rand(numel, generator=generator) * 1e-3).to(dtype)

    compiled = like(update, _SAMPLE, values)
    eager = compiled.map(lambda _, tensor: tensor.clone())
    with torch.no_grad():
        code(*arguments(compiled))
        apply(rule, eager)
    pairs = zip(compiled.tensors(), eager.tensors(), strict=True)
    return all(torch.equal(a.nan_to_num(), b.nan_to_num()) for (_, a), (_, b) in pairs)


@dataclass(frozen=True)
class CompileRequest:
    """A request to the other process, which fills the caches."""

    rule: str
    update: Update  # empty tensors
    options: dict[str, Any]
    settings: bytes  # see `compat.compile_settings`
    note: str  # path of a file that is written at completion

    @staticmethod
    def of(rule: OptimizerRule, update: Update, folder: Path) -> CompileRequest:
        """Create a request for updates like this one.

        Args:
            folder: the folder of Inductor's caches.
        """
        empty, options = like(update, 0), options_now()
        settings = compat.compile_settings()
        key = (
            *(torch.__version__, torch.backends.cpu.get_cpu_capability(), _sources()),
            *(_NOTE, rule.name, kind_of(empty), tuple(options.items()), settings),
        )
        name = hashlib.sha256(pickle.dumps(key)).hexdigest()
        return CompileRequest(
            rule.name, empty, options, settings, str(folder / "megacompile" / name[:40])
        )

    @property
    def is_done(self) -> bool:
        """True if the code is in the caches."""
        return os.path.exists(self.note)

    @property
    def agreed(self) -> bool:
        """True if the finished code agrees with its twin."""
        return bool(self._noted()["agrees"])

    def prepare_to_load(self) -> None:
        """Adopt the vector instructions that the compiling process found.

        Inductor probes them before it loads code, which takes 45 s on some machines.
        """
        compat.use_vector_isas(self._noted()["vector ISAs"])

    def _noted(self) -> dict[str, Any]:
        noted: dict[str, Any] = json.loads(Path(self.note).read_text())
        return noted

    def start(self) -> Process:
        """Start the second process.

        Raises:
            OSError: it cannot be started.
        """
        return Process(__name__, pickle.dumps(self))

    def carry_out(self) -> None:
        """Compile the code and write the note; called in the second process."""
        compat.use_compile_settings(self.settings)
        (rule,) = (rule for rule in RULES if rule.name == self.rule)
        code = compile_update(rule, self.update, self.options)
        note = Path(self.note)
        note.parent.mkdir(parents=True, exist_ok=True)
        draft = note.with_suffix(f".{os.getpid()}")
        noted = {
            "rule": self.rule,
            "agrees": agrees(rule, self.update, code),
            "vector ISAs": compat.vector_isas(),
        }
        draft.write_text(json.dumps(noted))
        draft.replace(note)


@functools.cache
def _sources() -> str:
    """A hash of the twins' source text."""
    (folder,) = optim.__path__
    digest = hashlib.sha256()
    for path in sorted(Path(folder).glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _dtype_of(value: Any) -> Any:
    return value.dtype if isinstance(value, torch.Tensor) else value


# The second process compiles an update into Inductor's caches on disk, and sees no GPU. A thread
# would not do: Dynamo changes process-wide state while it compiles.


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
