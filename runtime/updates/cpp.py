"""A rule's twin as C++: what is compiled, the key under which that is known on disk, and the
process that compiles it.

One code serves all sizes. It is compiled on a typical size, because Inductor decides by the first
size that it sees whether to use more than one thread. It leaves one core to the thread that issues
work, which spins in many of CUDA's calls (`loss.item()`): a team of threads is as fast as the
slowest of them, and one that shared its core would halve it.
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

TYPICAL = 2**22  # elements of a parameter that Inductor should have in mind
REFUSED = 3  # exit status of a process: it began, and the compiler did not do it
_NOTE = 2  # the version of what a note says
_SAMPLE = 2**16 + 37  # elements that the codes are compared on

Code = Callable[..., None]
Kind = tuple[object, ...]


def kind_of(update: Update) -> Kind:
    """The key that a rule is compiled for: the dtypes, and the states that exist."""
    return tuple(str(compat.tree_map(_dtype_of, a)) for a in arguments(update))


def like(
    update: Update,
    numel: int,
    make: Callable[[int, torch.dtype], torch.Tensor] = lambda n, dtype: torch.zeros(n, dtype=dtype),
) -> Update:
    """An update of a parameter of another size: on zeros, or what `make` returns."""

    def new(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return make(absmax_numel(numel) if name == "absmax" else numel, tensor.dtype)

    return update.map(new)


def options_now() -> dict[str, Any]:
    """Options for Inductor. The C++ wrapper runs without Python's lock.

    Whether Triton is tuned with it is said, though there is none: by itself that depends on whether
    the process sees a GPU, and is part of the keys of caches (torch 2.11).
    """
    return {
        "cpp_wrapper": True,
        "cpp.threads": max(1, torch.get_num_threads() - 1),
        "triton.autotune_at_compile_time": False,
    }


def compile_update(rule: OptimizerRule, update: Update, options: dict[str, Any]) -> Code:
    """Code for updates of this kind, without Dynamo before it."""
    with torch.no_grad():
        return compat.compiled_function(
            function_of(rule), arguments(like(update, TYPICAL)), {}, options
        )


def agrees(rule: OptimizerRule, update: Update, code: Code) -> bool:
    """True if code rounds as its eager twin, in every bit."""
    generator = torch.Generator().manual_seed(0)

    def values(numel: int, dtype: torch.dtype) -> torch.Tensor:
        if not dtype.is_floating_point:
            return torch.randint(256, (numel,), generator=generator).to(dtype)
        return (torch.rand(numel, generator=generator) * 1e-3).to(dtype)

    mine = like(update, _SAMPLE, values)
    its = mine.map(lambda _, tensor: tensor.clone())
    with torch.no_grad():
        code(*arguments(mine))
        apply(rule, its)
    pairs = zip(mine.tensors(), its.tensors(), strict=True)
    return all(torch.equal(a.nan_to_num(), b.nan_to_num()) for (_, a), (_, b) in pairs)


@dataclass(frozen=True)
class CompileRequest:
    """The request for a process to compile, so that its caches have it."""

    rule: str
    update: Update  # of no elements
    options: dict[str, Any]
    settings: bytes  # see `compat.compile_settings`
    note: str  # a file that is written when it is done

    @staticmethod
    def of(rule: OptimizerRule, update: Update, folder: Path) -> CompileRequest:
        """For updates like this one.

        Args:
            folder: of Inductor's caches.
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
        """True if the caches have it."""
        return os.path.exists(self.note)

    @property
    def agreed(self) -> bool:
        """Did its code round as the twin? Ask when it is done."""
        return bool(self._noted()["agrees"])

    def prepare_to_load(self) -> None:
        """Take over which vector instructions the compiling process found.

        Inductor looks for them before it loads code, which takes 45 s on some machines.
        """
        compat.use_vector_isas(self._noted()["vector ISAs"])

    def _noted(self) -> dict[str, Any]:
        noted: dict[str, Any] = json.loads(Path(self.note).read_text())
        return noted

    def carry_out(self) -> None:
        """Compile it, in a process of its own, and note that it is done."""
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
    """Sources that the twins are made of."""
    (folder,) = optim.__path__
    made = hashlib.sha256()
    for path in sorted(Path(folder).glob("*.py")):
        made.update(path.read_bytes())
    return made.hexdigest()


def _dtype_of(value: Any) -> Any:
    return value.dtype if isinstance(value, torch.Tensor) else value


# A process next to this one that compiles an update, so that Inductor's caches on disk have it.
#
# Not a thread: while Dynamo compiles, it changes the state of the whole process and restores it
# afterwards. What the process has compiled is found in the caches within half a second. It knows
# nothing of a GPU.


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
