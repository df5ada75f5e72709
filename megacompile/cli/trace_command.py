"""The command `trace`: runs a script and traces a step, or reads a saved trace."""

from __future__ import annotations

import argparse
import contextlib
import runpy
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from megacompile import api, inspection
from megacompile.cli.commands import print_json
from megacompile.errors import MegacompileError
from megacompile.inspection import Trace
from megacompile.views import perfetto, plot
from megacompile.views.critical_path import period
from megacompile.views.timeline import Timeline, cut, table, totals


class StepIsOver(BaseException):
    """Ends the script after the traced step; not an Exception, so that `except Exception` does not
    catch it."""


class TooFewSteps(MegacompileError, RuntimeError):
    """The script ended before the requested step."""


class StepTracer:
    """Traces all megacompiled models during the N-th step of the first one to reach it."""

    def __init__(self, step: int, *, stop: bool) -> None:
        self.step = step
        self.stop = stop
        self.models: list[nn.Module] = []
        self.counts: dict[nn.Module, int] = {}  # calls of optimizer.step()
        self.first: nn.Module | None = None  # the model whose step is traced
        self.trace: Trace | None = None
        self.done = False

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Observes models and steps inside the block."""
        api.LISTENERS.append(self._made)
        hooks = [
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        ]
        try:
            yield
        finally:
            api.LISTENERS.remove(self._made)
            for hook in hooks:
                hook.remove()
            if self.trace is not None and not self.done:
                self.trace.__exit__(None, None, None)

    def _made(self, model: nn.Module) -> None:
        self.models.append(model)
        if self.step == 1 and self.trace is None:
            self._begin(model)

    def _before(self, optimizer: Optimizer, *_: Any) -> None:
        params = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for model in self.models:
            if not any(id(p) in params for p in model.parameters()):
                continue
            count = self.counts[model] = self.counts.get(model, 0) + 1
            if self.trace is None and count == self.step - 1:
                self._begin(model)
            elif model is self.first and count == self.step and not self.done:
                assert self.trace is not None
                self.done = True
                self.trace.__exit__(None, None, None)

    def _after(self, *_: Any) -> None:
        if self.done and self.stop:
            raise StepIsOver

    def _begin(self, model: nn.Module) -> None:
        self.first = model
        self.trace = inspection.trace(*self.models)
        self.trace.__enter__()


def run(args: argparse.Namespace) -> int:
    """Run the script, then print and save the trace."""
    if not args.module and args.script.endswith(".json"):
        return _again(args)
    tracer = StepTracer(args.step, stop=not args.go_on)
    there = contextlib.redirect_stdout(sys.stderr) if args.json else contextlib.nullcontext()
    with tracer.watching(), there:
        _run_script(args)
    if not tracer.models:
        raise TooFewSteps(
            f"{args.script} ended and megacompiled no model; it needs model = megacompile(model)"
        )
    if not tracer.done:
        raise TooFewSteps(
            f"{args.script} ended after {max(tracer.counts.values(), default=0)} optimizer steps "
            f"of megacompiled models; needed {args.step}: lower --step, or let the script train "
            "longer"
        )
    assert tracer.trace is not None
    return _show(tracer.trace.measured, tracer.trace.predicted, args)


def _again(args: argparse.Namespace) -> int:
    """Print and save the last whole step of a saved trace."""
    measured, predicted = perfetto.load(args.script)
    whole = period(measured, measured.models[0], last=1)
    if whole is not None:
        measured = cut(measured, whole.start_s, whole.stop_s)
        predicted = predicted and cut(predicted, whole.start_s, whole.stop_s)
    return _show(measured, predicted, args)


def _show(measured: Timeline, predicted: Timeline | None, args: argparse.Namespace) -> int:
    if args.json:
        print_json(totals(measured, predicted))
    else:
        print(table(measured, predicted))
    write(measured, predicted, args.save)
    return 0


def _run_script(args: argparse.Namespace) -> None:
    """Run the script like `python SCRIPT ...` or `python -m MODULE ...` until it ends or the step
    is traced."""
    before = sys.argv[:], sys.path[:]
    try:
        sys.argv[:] = [args.script, *args.args]
        if args.module:
            sys.path.insert(0, str(Path.cwd()))
            runpy.run_module(args.script, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(args.script).resolve().parent))
            runpy.run_path(args.script, run_name="__main__")
    except StepIsOver:
        pass
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    finally:
        sys.argv[:], sys.path[:] = before


def write(measured: Timeline, predicted: Timeline | None, paths: Sequence[Path]) -> None:
    """Write each file and report it on stderr."""
    for path in paths:
        save = perfetto.save if path.suffix == ".json" else plot.draw
        save(path, measured, predicted)
        print(f"wrote {path}", file=sys.stderr)
