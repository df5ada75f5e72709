"""Host memory of the processes that megacompile has beside a training process, on the CPU.

    python -m benchmarks.beside_memory --workers 16

The C++ of an update, of each kind of states, compiled with empty caches; and Inductor's compile
workers, before their first kernel. Anonymous memory alone, at its most: pages of files are free
whenever others need them. What several processes map counts in parts. What budgets leave to them
is in `megacompile/beside/process.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

from megacompile import compat
from megacompile.beside.process import processes
from megacompile.options import Options
from megacompile.runtime.optim.blockwise import absmax_numel
from megacompile.runtime.optim.rule import Update
from megacompile.runtime.optim.rules import ADAM
from megacompile.runtime.updates.compiled import Compiled
from megacompile.text import columns, format_bytes

_NUMEL = 1000
_EVERY_S = 0.02


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=16)
    workers = parser.parse_args().workers
    rows = [["what", "most", "what of it"]]
    for name in ("float32", "bfloat16", "int8"):
        with tempfile.TemporaryDirectory() as folder, _most() as most:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
            Compiled(ADAM, _update(name)).wait()
        rows.append([f"update, {name}", *most])
    compat.use_compile_threads(workers)
    with _most() as most:
        compat.start_compile_workers()
        time.sleep(30)
    rows.append([f"{workers} compile workers", *most])
    print(columns(rows, left=(0, 2)))
    for what, size in processes(Options.resolve(device="cpu", lowering="inductor")):
        print(f"left to {what}: {format_bytes(size)}")


def _update(name: str) -> Update:
    """Cost for bfloat16 parameters, also with states in 8 bits."""
    dtype = torch.float32 if name == "float32" else torch.bfloat16
    param, grad, m, v = (torch.rand(_NUMEL).to(dtype) for _ in range(4))
    group = torch.optim.AdamW([torch.nn.Parameter(param)]).param_groups[0]
    update = Update(param, grad, (m, v, None), ADAM.hyper(group, step=3))
    codes = torch.zeros(_NUMEL, dtype=torch.uint8), torch.zeros(absmax_numel(_NUMEL))
    return update._replace(states=(codes, codes, None)) if name == "int8" else update


@contextlib.contextmanager
def _most() -> Iterator[list[str]]:
    """The most memory that child processes take, and which ones; known at the end."""
    found: list[str] = []
    over, peak = threading.Event(), dict[str, int]()

    def watch() -> None:
        nonlocal peak
        while not over.wait(_EVERY_S):
            now = _children()
            peak = max(peak, now, key=lambda sizes: sum(sizes.values()))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()
        parts = [f"{name} {format_bytes(size)}" for name, size in peak.items() if size > 2**20]
        found += [format_bytes(sum(peak.values())), ", ".join(parts)]


def _children() -> dict[str, int]:
    """Anonymous memory of the processes below this one, by name, bytes."""
    found: dict[str, int] = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(OSError, psutil.Error, StopIteration):
            lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
            size = next(int(line.split()[1]) for line in lines if line.startswith("Pss_Anon:"))
            name = process.name()
            found[name] = found.get(name, 0) + 1024 * size
    return found


if __name__ == "__main__":
    main()
