"""Host memory of the processes next to this one, which a budget has to leave to them.

They are there when a first step fills the host with gradients and states. Measured with
`python -m benchmarks.beside_memory`; decision 33 has the figures. Those of `compile_pool` are not
counted: they end before a step.
"""

from __future__ import annotations

from megacompile import compat
from megacompile.options import Lowering, Options

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
