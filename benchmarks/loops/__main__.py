"""Real loops over real models: seconds, captures and losses, beside eager code and torch.compile.

    python -m benchmarks.loops --lowering eager --size tiny              CPU, seconds a loop
    python -m benchmarks.loops --device cuda --size small --jobs 6       GPU, Inductor

Each loop and engine is a process of its own, without compiled code from before. Each step is a line
of JSON in `--out` when it is over; the table is printed at the end, and made again of such a file
by `--table FILE`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.loops.catalogue import LOOPS
from benchmarks.loops.loop import SIZES, Engine
from benchmarks.loops.table import Record, records, rows
from benchmarks.peers import process
from benchmarks.report import environment, measure_alone, table


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    args = _arguments(argv)
    if args.table:
        _print(records(Path(args.table).read_text().splitlines()))
        return 0
    chosen = [
        loop
        for loop in LOOPS.values()
        if re.search(args.only, loop.name)
        and (args.list == "all" or loop.first == (args.list == "first"))
    ]
    engines = [Engine(name) for name in args.engines.split(",")]
    lines: list[str] = []
    lock = threading.Lock()
    file = open(args.out, "a") if args.out else None

    def note(line: dict[str, Any]) -> None:
        with lock:
            lines.append(json.dumps(line))
            if file:
                file.write(lines[-1] + "\n")
                file.flush()

    def one(point: tuple[str, Engine]) -> None:
        name, engine = point
        began_s = time.perf_counter()
        outcome = _run(name, engine, args, note)
        took_s = time.perf_counter() - began_s
        made = Record.of(name, engine, records(lines))
        print(f"{name:22} {engine:8} {took_s:6.1f} s  {outcome}  {made.short()}", flush=True)

    note({"environment": environment()})
    if args.device == "cuda":
        measure_alone()
    with ThreadPoolExecutor(args.jobs) as pool:
        points = [(loop.name, engine) for loop in chosen for engine in engines]
        for _ in pool.map(one, points):
            pass
    if file:
        file.close()
    _print(records(lines))
    return 0


def _print(of: Iterable[Record]) -> None:
    every = list(of)
    print(table(rows(every)))
    for record in every:
        for reason, count in record.reasons().items():
            print(f"{record.loop}: {count} x {reason}")


def _run(name: str, engine: Engine, args: argparse.Namespace, note: Any) -> str:
    """One process; gives how it ended."""
    request = {
        "loop": name,
        "engine": engine,
        "size": args.size,
        "steps": args.steps,
        "device": args.device,
        "lowering": args.lowering,
        "dtype": args.dtype,
    }
    command = [sys.executable, "-m", "benchmarks.loops.child", json.dumps(request)]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    if args.device == "cpu":
        environment["OMP_NUM_THREADS"] = "1"
    else:
        environment.setdefault("CUDA_VISIBLE_DEVICES", "0")  # Trainer takes all that it sees
    with tempfile.TemporaryDirectory() as folder:
        for cache in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
            environment[cache] = f"{folder}/{cache.lower()}"
        follower = _Follower(Path(folder) / "events", name, engine, note)
        with follower:
            outcome = process.run(
                command, Path(folder), limit_s=args.timeout, environment=environment
            )
        printed = (Path(folder) / "printed").read_text(errors="replace")
        if args.logs:
            (Path(args.logs) / f"{name}.{engine}.log").write_text(printed)
    note({"loop": name, "engine": engine, "outcome": outcome.as_json()})
    return f"{outcome.status.value} {outcome.reason}".strip()


class _Follower:
    """Hands on the lines of a file of events while it grows."""

    def __init__(self, events: Path, name: str, engine: Engine, note: Any) -> None:
        self._events, self._name, self._engine, self._note = events, name, engine, note
        self._read = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._take()

    def _follow(self) -> None:
        while not self._over.wait(0.5):
            self._take()

    def _take(self) -> None:
        if not self._events.exists():
            return
        text = self._events.read_text()
        whole = text[: text.rfind("\n") + 1].splitlines()
        for line in whole[self._read :]:
            event = json.loads(line)
            if "step" in event:
                self._note({"loop": self._name, "engine": self._engine, "step": event["step"]})
        self._read = len(whole)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loops", description=__doc__)
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--only", default="", help="a regular expression: the loops to run")
    parser.add_argument("--list", choices=("first", "second", "all"), default="all")
    parser.add_argument("--engines", default="plain,compile,ours")
    parser.add_argument("--size", choices=sorted(SIZES), default="tiny")
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if on_gpu else "cpu")
    parser.add_argument("--lowering", choices=("eager", "inductor"), help="default: for the device")
    parser.add_argument("--jobs", type=int, default=1, help="processes beside one another")
    parser.add_argument("--timeout", type=float, default=300, help="seconds of a process")
    parser.add_argument("--out", help="add lines of JSON to this file")
    parser.add_argument("--logs", help="a folder for what the processes print")
    parser.add_argument("--table", metavar="FILE", help="print the table of such a file, and end")
    args = parser.parse_args(argv)
    args.lowering = args.lowering or ("inductor" if args.device == "cuda" else "eager")
    return args


if __name__ == "__main__":
    sys.exit(main())
