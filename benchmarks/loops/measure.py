"""Run a loop by an engine, and note of each step its time, its losses and what was captured."""

from __future__ import annotations

import contextlib
import logging
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.loops.loop import SIZES, Engine, Loop, Session
from megacompile import compat


@dataclass(slots=True)
class Step:
    """Time and captures of one step of the loop."""

    index: int
    time_s: float  # with whatever the loop does between two steps
    losses: list[float]  # its own, and those of other calls in it
    graphs: int  # that Dynamo has captured in it
    frames: int  # that Dynamo has looked at in it
    programs: int = 0  # of ours: schedules of captured graphs
    compiled: int = 0  # of ours: stages that Inductor compiled, or found in its caches
    why: list[str] = field(default_factory=list)  # what the logs say of captures

    @property
    def captured(self) -> bool:
        """True if anything was captured or compiled."""
        return bool(self.graphs or self.programs or self.compiled)


@dataclass(slots=True)
class Measured:
    """The steps so far, and the model as the engine left it."""

    steps: list[Step] = field(default_factory=list)
    model: Any = None

    @property
    def losses(self) -> list[list[float]]:
        """Captured graphs, by step."""
        return [step.losses for step in self.steps]

    @property
    def graphs(self) -> list[int]:
        """Captures of each step."""
        return [step.graphs for step in self.steps]


@dataclass(frozen=True, slots=True)
class _Counts:
    """The captures of a process so far."""

    graphs: int
    frames: int
    programs: int
    compiled: int

    @staticmethod
    def now(model: nn.Module | None, engine: Engine) -> _Counts:
        programs = compiled = 0
        if engine is Engine.OURS and model is not None and compat.compiled_call(model):
            from megacompile.runtime.model.streamed import streamed_model

            streamed = streamed_model(model, "benchmarks.loops")
            programs = sum(graph.made for graph in streamed.captures.graphs)
            compiled = streamed.machine.code.found + streamed.machine.code.made
        graphs, frames = compat.captured_so_far()
        return _Counts(graphs, frames, programs, compiled)


class _Log(logging.Handler):
    """Keeps the lines of the log that say what was captured, and why."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(shortened(record.getMessage()))


def shortened(text: str) -> str:
    """One line of a message; of Dynamo's the function and the guard that failed."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " ".join([lines[0], *lines[-1:]] if len(lines) > 2 else lines)[:300]


@contextlib.contextmanager
def _logged() -> Iterator[_Log]:
    """Reasons for new captures: Dynamo's (`TORCH_LOGS=recompiles`) and ours."""
    handler = _Log()
    before = {}
    names = {compat.log_recompiles(): logging.DEBUG, "megacompile.capture": logging.INFO}
    for name, level in names.items():
        logger = logging.getLogger(name)
        before[logger] = logger.level, logger.propagate
        logger.setLevel(level)
        logger.propagate = False
        logger.addHandler(handler)
    try:
        yield handler
    finally:
        for logger, (level, propagate) in before.items():
            logger.removeHandler(handler)
            logger.setLevel(level)
            logger.propagate = propagate


def _without_dropout(model: nn.Module) -> None:
    for module in model.modules():
        names = [name for name, value in vars(module).items() if isinstance(value, float)]
        for name in names:
            if "dropout" in name or (name == "p" and isinstance(module, nn.Dropout)):
                setattr(module, name, 0.0)


def run(
    loop: Loop,
    engine: Engine,
    *,
    size: str = "tiny",
    steps: int = 14,
    device: str = "cpu",
    lowering: str = "eager",
    dtype: torch.dtype = torch.float32,
    say: Callable[[Step], None] = lambda step: None,
    explain: bool = True,
    dropout: bool = True,
) -> Measured:
    """Take the steps of a loop.

    Args:
        say: is told of each step when it is over.
        explain: keep the lines of logs that say why something was captured.
        dropout: False sets all probabilities of dropout to 0, also those of attention.
    """
    torch.compiler.reset()
    torch.manual_seed(0)
    random.seed(0)
    measured = Measured()
    before = _Counts.now(None, engine)
    start_s = time.perf_counter()

    def begin(model: nn.Module) -> None:
        nonlocal start_s
        measured.model = model
        if not dropout:
            _without_dropout(model)
        start_s = time.perf_counter()

    def done(*losses: Any) -> None:
        nonlocal before, start_s
        numbers = [v.detach().item() if isinstance(v, Tensor) else float(v) for v in losses]
        now = time.perf_counter()
        counts = _Counts.now(measured.model, engine)
        step = Step(
            len(measured.steps),
            now - start_s,
            numbers,
            counts.graphs - before.graphs,
            counts.frames - before.frames,
            counts.programs - before.programs,
            counts.compiled - before.compiled,
            list(log.lines) if log else [],
        )
        if log:
            log.lines.clear()
        measured.steps.append(step)
        say(step)
        before, start_s = counts, time.perf_counter()

    session = Session(engine, SIZES[size], steps, device, lowering, dtype, begin, done)
    with _logged() if explain else contextlib.nullcontext() as log:
        loop.train(session)
    return measured
