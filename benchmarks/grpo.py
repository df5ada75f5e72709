"""TRL's GRPO with and without the one line: examples/grpo_trl.py, timed step by step.

    python -m benchmarks.grpo --steps 60 --rounds 3

Each run is a process of its own; those of a round come one after another, so that a machine that is
busy with something else is so for all. The first step captures and compiles; "a step" is the median
of those behind the first third. Processor seconds, by one thread, are what a busy machine changes
least. `torch.compile` is the plain model with that around its forward (`backend="eager"`: capture
alone). Needs `trl`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import publish

ROOT = Path(__file__).parent.parent
MODES = ("plain", "megacompile", "torch.compile")


def main(argv: Sequence[str] | None = None) -> list[dict[str, object]]:
    """Run and print; gives the table's rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", choices=MODES, help="this run alone, in this process")
    parser.add_argument("--out", help="write the table here")
    args = parser.parse_args(argv)
    if args.one:
        print(json.dumps(_run(args.one, args.steps)))
        return []
    runs: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}
    for _ in range(args.rounds):
        for mode in MODES:
            runs[mode].append(_process(mode, args.steps))
    rows = [_row(mode, runs[mode], runs["plain"]) for mode in MODES]
    publish(f"GRPO of TRL, {args.steps} steps, {args.rounds} rounds", rows, args.out)
    return rows


def _process(mode: str, steps: int) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.grpo", "--one", mode, "--steps", str(steps)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _row(
    mode: str, runs: Sequence[dict[str, Any]], plain: Sequence[dict[str, Any]]
) -> dict[str, object]:
    def of(name: str, among: Sequence[dict[str, Any]]) -> float:
        return statistics.median(float(run[name]) for run in among)

    return {
        "run": mode,
        "a step, processor ms": f"{1e3 * of('cpu_s', runs):.1f}",
        "to plain": f"{of('cpu_s', runs) / of('cpu_s', plain):.2f}",
        "a step, ms": f"{1e3 * of('wall_s', runs):.1f}",
        "first step, processor s": f"{of('first_cpu_s', runs):.2f}",
        "all steps, processor s": f"{of('all_cpu_s', runs):.2f}",
        "losses as plain": all(
            run["losses"] == other["losses"] for run, other in zip(runs, plain, strict=True)
        ),
    }


def _run(mode: str, steps: int) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    sys.path.insert(0, str(ROOT / "examples"))
    import torch
    from transformers import TrainerCallback

    grpo_trl: Any = importlib.import_module("grpo_trl")
    wall: list[float] = []
    cpu: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.began = time.perf_counter(), time.process_time()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            wall.append(time.perf_counter() - self.began[0])
            cpu.append(time.process_time() - self.began[1])

    class Timed(grpo_trl.GRPOTrainer):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.add_callback(Clock())

    grpo_trl.GRPOTrainer = Timed
    if mode == "torch.compile":
        made = grpo_trl.language_model

        def compiled() -> Any:
            model = made()
            model.forward = torch.compile(model.forward, backend="eager")
            return model

        grpo_trl.language_model = compiled
    plain = [] if mode == "megacompile" else ["--plain"]
    losses = grpo_trl.main(["--device", "cpu", "--steps", str(steps), *plain])
    behind = steps // 3
    return {
        "cpu_s": statistics.median(cpu[behind:]),
        "wall_s": statistics.median(wall[behind:]),
        "first_cpu_s": cpu[0],
        "all_cpu_s": sum(cpu),
        "losses": losses,
    }


if __name__ == "__main__":
    main()
