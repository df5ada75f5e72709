"""The process of one loop and one engine: `python -m benchmarks.loops.child REQUEST EVENTS`.

REQUEST is JSON. Each step, and the outcome at the end, are lines of JSON in the file EVENTS.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import traceback
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def main(argv: Sequence[str]) -> None:
    """Run the loop."""
    request: Mapping[str, Any] = json.loads(argv[0])
    events = Path(argv[1])

    def write(**line: Any) -> None:
        with events.open("a") as file:
            file.write(json.dumps(line) + "\n")

    write(doing="imports")
    import torch

    if request["device"] == "cpu":
        torch.set_num_threads(1)

    from benchmarks.loops import measure
    from benchmarks.loops.catalogue import LOOPS
    from benchmarks.loops.loop import Engine
    from benchmarks.peers.outcome import Outcome, Status, one_line

    told: list[str] = []

    def show(message: Any, *args: Any, **kwargs: Any) -> None:
        if str(message).startswith("megacompile"):
            told.append(measure.shortened(str(message)))

    warnings.simplefilter("always")
    warnings.showwarning = show

    def say(step: measure.Step) -> None:
        step.why += told
        told.clear()
        write(step=dataclasses.asdict(step), doing=f"step {step.index + 1}")

    write(doing="step 0")
    outcome = Outcome(Status.OK, result={})
    try:
        measure.run(
            LOOPS[request["loop"]],
            Engine(request["engine"]),
            size=request["size"],
            steps=request["steps"],
            device=request["device"],
            lowering=request["lowering"],
            dtype=getattr(torch, request["dtype"]),
            say=say,
        )
        if request["device"] == "cuda":
            peak_bytes = torch.cuda.max_memory_allocated()
            outcome = Outcome(Status.OK, result={"peak_bytes": peak_bytes})
    except ModuleNotFoundError as error:
        outcome = Outcome(Status.NOT_INSTALLED, str(error))
    except Exception as error:
        traceback.print_exc()
        outcome = Outcome(Status.CRASHED, one_line(f"{type(error).__name__}: {error}"))
    write(outcome=outcome.as_json())


if __name__ == "__main__":
    main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
