"""A case run both ways and compared; and many cases, in several processes."""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import dataclasses
import gc
import importlib.util
import io
import multiprocessing
import os
import random
import re
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megacompile import megacompile
from megacompile.errors import MegacompileError
from tests import adversary, frames
from tests.frames.case import Case, Options, draw

# Parts of which docs/limits.md says that they differ.
LIMITS = tuple(f"asks ({what}, in eager code" for what in ("type is", "type of data", "id"))
ALIASED = re.compile(r"shares? (its |their )?memory|alias|view|another name|other tensor")


@dataclass
class Seen:
    """What a run showed."""

    values: dict[str, Any] = field(default_factory=dict)
    raised: BaseException | None = None
    trace: str = ""
    warned: list[str] = field(default_factory=list)

    def see(self, name: str, value: object) -> None:
        if isinstance(value, Tensor):
            value = value.detach().clone().cpu()
        self.values[f"{len(self.values)} {name}"] = value


@dataclass(frozen=True)
class Setting:
    """Where cases run."""

    lowering: str = "eager"
    device: str = "cpu"

    @property
    def rtol(self) -> float:
        return 0.0 if self == EAGER else 1e-3


EAGER = Setting()


def _load(path: Path, device: str) -> ModuleType:
    """The program, as a module of its own: classes of another run are others."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    module.DEVICE = device  # type: ignore[attr-defined]
    return module


def _train(program: Any, start: Callable[[Any], Any], now: bool) -> Seen:
    seen = Seen()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            model = program.build()
            kept = program.prepare(model)
            program.train(start(model), kept, seen.see, now)
        except Exception as error:
            seen.raised, seen.trace = error, traceback.format_exc()
    seen.warned = [str(w.message) for w in caught if issubclass(w.category, UserWarning)]
    return seen


def plain(path: Path, setting: Setting, *, now: bool = True) -> Seen:
    """Run a program alone; `now`: its changes in place come between a forward and its backward."""
    program = _load(path, setting.device)
    return _train(program, lambda model: model.to(setting.device), now)


def streamed(path: Path, setting: Setting, options: Options) -> Seen:
    """Run a program with its model megacompiled."""
    torch.compiler.reset()
    program = _load(path, setting.device)
    on_gpu = {"gpu_memory": "1GiB", "host_memory": "1GiB"} if setting.device != "cpu" else {}

    def start(model: Any) -> Any:
        some = sum(p.nbytes for p in model.parameters()) // 2
        resident = {"some": str(some)}.get(options.resident, options.resident)
        arguments: dict[str, Any] = dict(
            lowering=setting.lowering,
            lookahead=options.lookahead,
            dynamic=options.dynamic,
            activations=options.activations,
            **on_gpu,
        )
        megacompile(model, device=setting.device, progress=False, resident=resident, **arguments)
        if options.device >= 0:
            adversary.attach(model).policy = adversary.Random(options.device)
        return model

    with adversary.adversarial() if options.device >= 0 else contextlib.nullcontext():
        return _train(program, start, True)


def _equal(a: Any, b: Any, rtol: float) -> bool:
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return type(a) is type(b) and bool(a == b)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if rtol and a.dtype.is_floating_point:
        return torch.allclose(a, b, rtol=rtol, atol=rtol / 10, equal_nan=True)
    return torch.equal(a, b) or torch.equal(a.nan_to_num(7.5), b.nan_to_num(7.5))


def _differences(wanted: Seen, got: Seen, rtol: float) -> list[str]:
    names = [*dict.fromkeys([*wanted.values, *got.values])]
    missing = object()
    pairs = ((n, wanted.values.get(n, missing), got.values.get(n, missing)) for n in names)
    return [f"{name}{_distance(a, b)}" for name, a, b in pairs if not _equal(a, b, rtol)]


def _distance(a: Any, b: Any) -> str:
    if isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape and a.numel():
        return f" (by {(a.double() - b.double()).abs().max().item():.1g})"
    return ""


@dataclass(frozen=True)
class Verdict:
    """How a streamed program compares with the plain one."""

    kind: str  # "equal", "raises too", "refused", "warned", "not seen", "mismatch"
    why: str = ""


def judge(case: Case, setting: Setting = EAGER) -> Verdict:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"frames_{abs(hash((case, os.getpid()))):x}.py")
        path.write_text(case.text())
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                return _judge(path, case, setting)
        finally:
            sys.modules.pop(path.stem, None)


def _judge(path: Path, case: Case, setting: Setting) -> Verdict:
    wanted = plain(path, setting)
    got = streamed(path, setting, case.options)
    rtol = max(setting.rtol, 1e-5 * case.rounds)
    differ = _differences(wanted, got, rtol)
    if got.raised is not None:
        if wanted.raised is not None and wanted.values.keys() == got.values.keys():
            return _explained(case, differ, got) if differ else Verdict("raises too")
        shown = {name: value for name, value in wanted.values.items() if name in got.values}
        early = _differences(Seen(shown), got, rtol)
        known = not early or _explained(case, early, got).kind != "mismatch"
        if isinstance(got.raised, MegacompileError) and known:
            return Verdict("refused", f"{type(got.raised).__name__}: {got.raised}")
        return Verdict("mismatch", f"raises, unlike the plain program:\n{got.trace}")
    if wanted.raised is not None:
        later = plain(path, setting, now=False)
        differ = _differences(later, got, rtol)
        if later.raised is None and not differ:
            return Verdict("not seen")
        explained = _explained(case, differ, got)
        if later.raised is None and explained.kind != "mismatch":
            return explained
        why = f"does not raise {type(wanted.raised).__name__} ({wanted.raised}), and is not right: "
        return Verdict("mismatch", why + ", ".join(differ[:6]))
    return _explained(case, differ, got) if differ else Verdict("equal")


def _explained(case: Case, differ: list[str], got: Seen) -> Verdict:
    """Why values differ: an alias that a warning tells of, a known limit, or a mismatch."""
    if said := _warned_of_aliases(case, differ, got):
        return Verdict("warned", said)
    why = f"{len(differ)} differ: {', '.join(differ[:6])}"
    known = any(label.startswith(LIMITS) for label in case.labels())
    if any("is not scheduled" in text for text in got.warned):  # what torch's eager code of it does
        saved = (label for label in case.labels() if label.endswith("read by a function)"))
        known |= any(label.startswith("changed") for label in saved)
    return Verdict("a known limit" if known else "mismatch", why)


def _warned_of_aliases(case: Case, differ: list[str], got: Seen) -> str:
    """The warning, if an alias explains what differs."""
    read = all(" alias " in name for name in differ)
    used = any(
        ("alias" in label and "written" in label) or label.startswith("kept view (of a parameter")
        for label in case.labels()
    )
    of_aliases = (text for text in got.warned if ALIASED.search(text))
    return next(of_aliases, "") if read or used else ""


@dataclass
class Counts:
    kinds: collections.Counter[str] = field(default_factory=collections.Counter)
    found: list[str] = field(default_factory=list)  # the programs that differ, and how

    @property
    def mismatches(self) -> int:
        return self.kinds["mismatch"]

    def add(self, number: int, case: Case, setting: Setting) -> None:
        verdict = judge(case, setting)
        self.kinds[verdict.kind] += 1
        if verdict.kind == "mismatch":
            alone = [Case((part,)) for part in case.parts]
            judged = ((each, judge(each, setting)) for each in alone if each != case)
            smaller = (each for each in judged if each[1].kind == "mismatch")
            small, verdict = next(smaller, (case, verdict))
            text = f"--- case {number}\n{small.text()}\n# {verdict.why.strip()}"
            self.found.append(text)
            print(text, flush=True)

    def __str__(self) -> str:
        lines = [f"{self.kinds.total()} programs, {self.mismatches} mismatches"]
        return "\n".join(lines + [f"  {n} {kind}" for kind, n in sorted(self.kinds.items())])


def numbered(seed: int, number: int, setting: Setting = EAGER) -> Case:
    case = draw(random.Random(f"{seed}/{number}"))
    if setting.rtol:  # an adversarial device is simulated, and its code eager
        case = dataclasses.replace(case, options=dataclasses.replace(case.options, device=-1))
    return case


@contextlib.contextmanager
def quickly() -> Iterator[None]:
    """Without the time that Dynamo takes to say in its log how long guards take."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with mock.patch("torch._dynamo.guards.profile_guard_manager", lambda *_: 0.0):
            yield
    finally:
        torch.set_num_threads(threads)


def prove(seed: int, numbers: range, setting: Setting = EAGER) -> Counts:
    counts = Counts()
    with quickly(), contextlib.ExitStack() as stack:
        for number in numbers:
            counts.add(number, numbered(seed, number, setting), setting)
            gc.collect()
            if not gc.get_freeze_count():  # what torch has made is much to look through
                gc.freeze()
                stack.callback(gc.unfreeze)
    return counts


def prove_in(jobs: int, cases: int, seed: int, setting: Setting) -> Counts:
    """The same in several processes; each takes every `jobs`-th case."""
    counts = Counts()
    shares = [range(job, cases, jobs) for job in range(jobs)]
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context) as pool:
        for each in pool.map(prove, [seed] * jobs, shares, [setting] * jobs):
            counts.kinds.update(each.kinds)
    return counts


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.frames", description=frames.__doc__)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--only", type=int, help="the number of one case")
    parser.add_argument("--lowering", choices=("eager", "inductor"), default="eager")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args(argv)
    setting = Setting(args.lowering, args.device)
    start = time.perf_counter()
    if args.only is not None:
        case = numbered(args.seed, args.only, setting)
        with quickly():
            verdict = judge(case, setting)
        print(f"{case.text()}\n{verdict.kind}\n{verdict.why}")
        return int(verdict.kind == "mismatch")
    counts = prove_in(args.jobs, args.cases, args.seed, setting)
    taken = time.perf_counter() - start
    print(f"{counts}\n{taken:.0f} s, {args.cases / taken:.1f} programs a second")
    return int(counts.mismatches > 0)
