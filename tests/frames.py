"""Programs of frames: what Dynamo captures in several graphs, or around which user code runs.

    python -m tests.frames --cases 2000 --seed 0
    python -m tests.frames --cases 200 --jobs 12 --lowering inductor --device cuda
    python -m tests.frames --seed 0 --only 17        one case: its program, and how it differs

A case is a program in a file of its own, made of one to three parts (`tests.frames_parts`), and the
options of `megacompile()`. It trains a small model for a few steps. It runs plain and streamed, in
the same process. All that it shows, losses, outputs, gradients, parameters, buffers and where it
raises, must be equal in every bit, with Inductor but for rounding.

Three things are not mismatches. They are counted:

- refused: a `MegacompileError` where the plain program goes on;
- warned: what differs is an alias that was made before `megacompile()`, and a warning says so;
- not seen: the plain program raises because a tensor was changed between a forward and its
  backward, and the streamed one does as the plain program without that change.

A program that differs is made smaller: parts and options are left out while it still differs.
Needs nothing but torch: no hypothesis, no pytest.
"""

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
import sys
import tempfile
import textwrap
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
from tests import adversary
from tests.frames_parts import KINDS, Part

PROGRAM = '''
"""{title}"""

import collections
import copy

import torch
import torch.nn.functional as F
from torch import nn

from tests.frames_ops import eagerly, note, untraced

DEVICE = "cpu"

{tops}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
{inits}
        self.head = nn.Linear(4, 2)
{frozen}
    def forward(self, x, k=0, t=None):
        x0 = x
        x = torch.tanh(self.first(x))
{calls}
        y = torch.tanh(x)
        return self.head(y).square().mean(), y
{methods}

def build():
    torch.manual_seed({seed})
    return Net()


def prepare(model):
    kept = {{}}
{prepares}
    return kept


def make_optimizer(model):
    params = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.{optimizer}


def train(model, kept, see, now):
{setups}
    optimizer = make_optimizer(model)
{optimizers}
    for step, rows in enumerate({rows}):
        for micro in range({micro}):
            torch.manual_seed(10 * step + micro)
            x = torch.randn(rows, 4).to(DEVICE)
            t = torch.arange(rows + 1, device=DEVICE) % 3
{aheads}
            loss, y = model(x, step % {indices}, t)
            see("loss", loss)
            see("y", y)
{betweens}
            loss.backward()
{behinds}
        for name, p in model.named_parameters():
            see(f"{{name}}.grad", p.grad)
        optimizer.step()
        optimizer.zero_grad()
{steppeds}
    for name, value in model.state_dict().items():
        see(name, value)
{ends}
'''


@dataclass(frozen=True)
class Options:
    """How a model is streamed."""

    dynamic: bool | None = None
    lookahead: int = 2
    resident: str = "auto"  # "0", "some", "all"
    activations: str = "auto"
    device: int = -1  # the seed of an adversarial device; -1: none


@dataclass(frozen=True)
class Case:
    """A program, and how its model is streamed."""

    parts: tuple[tuple[str, int], ...]  # kinds, and their seeds
    rows: tuple[int, ...] = (3, 3, 3)  # of each step
    micro: int = 1  # backwards in a step
    indices: int = 2  # values of the index argument
    frozen: str = ""  # a part, or "first"
    optimizer: str = "SGD(params, lr=0.1, momentum=0.9)"
    options: Options = Options()
    seed: int = 0

    def made(self) -> list[Part]:
        """Its parts, each with its own name."""
        made = [KINDS[kind](random.Random(seed)) for kind, seed in self.parts]
        return [_named(part, i) for i, part in enumerate(made)]

    def labels(self) -> frozenset[str]:
        """What was drawn, a label for each part."""
        parts = zip(self.parts, self.made(), strict=True)
        return frozenset(
            f"{kind} ({', '.join(filter(None, part.features))})" for (kind, _), part in parts
        )

    def text(self) -> str:
        """The program."""
        parts = self.made()

        def lines(name: str, depth: int, wrap: str = "") -> str:
            texts = [textwrap.dedent(getattr(p, name)).strip("\n") for p in parts]
            body = "\n".join(filter(None, texts))
            if body and wrap:
                body = f"{wrap}\n{textwrap.indent(body, ' ' * 4)}"
            return textwrap.indent(body, " " * 4 * depth)

        frozen = f"        self.{self.frozen}.requires_grad_(False)\n" if self.frozen else ""
        between = lines("between", 3, "if now and step == 1:")
        late = lines("between", 3, "if not now and step == 1:")
        text = PROGRAM.format(
            title=f"{', '.join(sorted(self.labels()))}; {self.options}",
            tops="\n\n\n".join(part.top for part in parts),
            inits=lines("init", 2),
            frozen=frozen,
            calls=lines("call", 2),
            methods="\n" + lines("methods", 1) + "\n" if any(p.methods for p in parts) else "",
            seed=self.seed,
            prepares=lines("prepare", 1),
            optimizer=self.optimizer,
            setups=lines("setup", 1),
            optimizers=lines("optimizer", 1),
            rows=self.rows,
            micro=self.micro,
            indices=self.indices,
            aheads=lines("ahead", 3),
            betweens=between,
            behinds="\n".join(filter(None, [late, lines("behind", 3)])),
            steppeds=lines("stepped", 2),
            ends=lines("end", 1),
        )
        return "\n".join(line.rstrip() for line in text.strip().splitlines()) + "\n"


def _named(part: Part, i: int) -> Part:
    texts = {f.name: getattr(part, f.name) for f in dataclasses.fields(part)}
    del texts["features"]
    names = {k: v.replace("p0", f"p{i}").replace("P0", f"P{i}") for k, v in texts.items()}
    return dataclasses.replace(part, **names)


def draw(rng: random.Random, *, adversarial: bool = True) -> Case:
    """Any case."""
    kinds = [rng.choice([*KINDS, "helper"]) for _ in range(rng.choice((1, 1, 2, 3)))]
    parts = tuple((kind, rng.randrange(2**20)) for kind in kinds)
    length = rng.choice((3, 3, 4))
    rows = (3,) * length if rng.random() < 0.4 else tuple(rng.randint(2, 6) for _ in range(length))
    sgd, adamw = "SGD(params, lr=0.1, momentum=0.9)", "AdamW(params, lr=0.01)"
    options = Options(
        dynamic=rng.choice((None, None, True, False)),
        lookahead=rng.choice((1, 2, 3)),
        resident=rng.choice(("auto", "auto", "some", "all")),
        activations=rng.choice(("auto", "auto", "keep", "recompute", "offload")),
        device=rng.randrange(2**16) if adversarial and rng.random() < 0.25 else -1,
    )
    return Case(
        parts=parts,
        rows=rows,
        micro=rng.choice((1, 1, 2)),
        indices=rng.choice((2, 3)),
        frozen=rng.choice(("", "", "", "first", "p0")),
        optimizer=rng.choice((sgd, adamw)),
        options=options,
        seed=rng.randrange(2**16),
    )


# Running it.


@dataclass
class Seen:
    """What a run showed."""

    values: dict[str, Any] = field(default_factory=dict)
    raised: BaseException | None = None
    trace: str = ""
    warned: list[str] = field(default_factory=list)

    def see(self, name: str, value: object) -> None:
        """Note a value."""
        if isinstance(value, Tensor):
            value = value.detach().clone().cpu()
        self.values[f"{len(self.values)} {name}"] = value


@dataclass(frozen=True)
class Setting:
    """Where cases run."""

    lowering: str = "eager"
    device: str = "cpu"
    rtol: float = 0.0

    @staticmethod
    def of(lowering: str, device: str) -> Setting:
        return Setting(lowering, device, 0.0 if (lowering, device) == ("eager", "cpu") else 1e-3)


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
    """Run a program without megacompile.

    Args:
        now: its changes in place come between a forward and its backward, not after it.
    """
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
    return [name for name, a, b in pairs if not _equal(a, b, rtol)]


@dataclass(frozen=True)
class Verdict:
    """How a streamed program compares with the plain one."""

    kind: str  # "equal", "raises too", "refused", "warned", "not seen", "mismatch"
    why: str = ""


def judge(case: Case, setting: Setting = EAGER, folder: str | None = None) -> Verdict:
    """Run a case both ways."""
    with contextlib.ExitStack() as stack:
        place = folder or stack.enter_context(tempfile.TemporaryDirectory())
        path = Path(place, f"frames_{abs(hash((case, os.getpid()))):x}.py")
        path.write_text(case.text())
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                return _judge(path, case, setting)
        finally:
            sys.modules.pop(path.stem, None)


def _judge(path: Path, case: Case, setting: Setting) -> Verdict:
    wanted = plain(path, setting)
    got = streamed(path, setting, case.options)
    if got.raised is not None:
        error = f"{type(got.raised).__name__}: {got.raised}"
        differ = _differences(wanted, got, setting.rtol)
        if wanted.raised is not None and not differ:
            return Verdict("raises too")
        early = [name for name in differ if name in got.values]
        if isinstance(got.raised, MegacompileError) and not early:
            return Verdict("refused", error)
        return Verdict("mismatch", f"raises, unlike the plain program:\n{got.trace}")
    if wanted.raised is not None:
        later = plain(path, setting, now=False)
        if later.raised is None and not _differences(later, got, setting.rtol):
            return Verdict("not seen")
        why = f"does not raise {type(wanted.raised).__name__} ({wanted.raised}), and is not right: "
        return Verdict("mismatch", why + ", ".join(_differences(later, got, setting.rtol)[:6]))
    if differ := _differences(wanted, got, setting.rtol):
        if all(" alias " in name for name in differ) and got.warned:
            return Verdict("warned", "\n".join(got.warned))
        return Verdict("mismatch", f"{len(differ)} differ: {', '.join(differ[:6])}")
    return Verdict("equal")


# A smaller one.


def _smaller(case: Case) -> Iterator[Case]:
    """Cases with a little less."""
    for i in range(len(case.parts)):
        if len(case.parts) > 1:
            yield dataclasses.replace(case, parts=case.parts[:i] + case.parts[i + 1 :])
    first = Case(parts=case.parts)
    for f in dataclasses.fields(Options):
        value = getattr(Options(), f.name)
        if getattr(case.options, f.name) != value:
            options = dataclasses.replace(case.options, **{f.name: value})
            yield dataclasses.replace(case, options=options)
    for f in dataclasses.fields(Case):
        value = getattr(first, f.name)
        if f.name not in ("parts", "options", "seed") and getattr(case, f.name) != value:
            yield dataclasses.replace(case, **{f.name: value})
    if len(case.rows) > 2:
        yield dataclasses.replace(case, rows=case.rows[:-1])


def shrink(case: Case, setting: Setting) -> Case:
    """The smallest that is found to differ."""
    for smaller in _smaller(case):
        if smaller.frozen.startswith("p") and smaller.frozen[1:] >= str(len(smaller.parts)):
            continue
        if judge(smaller, setting).kind == "mismatch":
            return shrink(smaller, setting)
    return case


# Many.


@dataclass
class Counts:
    """What was proved."""

    cases: int = 0
    kinds: collections.Counter[str] = field(default_factory=collections.Counter)
    drawn: collections.Counter[str] = field(default_factory=collections.Counter)
    verdicts: collections.Counter[tuple[str, str]] = field(default_factory=collections.Counter)
    found: dict[tuple[str, ...], tuple[int, int, str]] = field(default_factory=dict)

    @property
    def mismatches(self) -> int:
        return self.kinds["mismatch"]

    def add(self, number: int, case: Case, setting: Setting) -> None:
        """Run one more."""
        verdict = judge(case, setting)
        self.cases += 1
        self.kinds[verdict.kind] += 1
        labels = case.labels()
        self.drawn.update(kind for kind, _ in case.parts)
        if verdict.kind != "mismatch":
            self.verdicts.update((verdict.kind, label) for label in labels)
            return
        key = next((k for k in self.found if labels.issuperset(k)), None)
        if key is None:
            small = shrink(case, setting)
            key = tuple(sorted(small.labels()))
            text = f"{small.text()}\n# {judge(small, setting).why.strip()}".replace("\n# ", "\n# ")
            if key not in self.found:
                self.found[key] = number, 0, text
        at, count, text = self.found[key]
        self.found[key] = at, count + 1, text

    def join(self, other: Counts) -> None:
        """Add what another process counted."""
        self.cases += other.cases
        for name in ("kinds", "drawn", "verdicts"):
            getattr(self, name).update(getattr(other, name))
        for key, (at, count, text) in other.found.items():
            before = self.found.get(key, (at, 0, text))
            self.found[key] = (min(at, before[0]), before[1] + count, min(before, (at, 0, text))[2])

    def __str__(self) -> str:
        lines = [f"{self.cases} programs, {self.mismatches} mismatches"]
        lines += [f"  {count} {kind}" for kind, count in sorted(self.kinds.items())]
        lines += ["  parts drawn: " + ", ".join(f"{c} {k}" for k, c in sorted(self.drawn.items()))]
        refused = [(v, n) for (kind, v), n in sorted(self.verdicts.items()) if kind == "refused"]
        lines += [f"  refused {n} times with {label}" for label, n in refused]
        lines += ["  mismatches   first case   parts of the smallest program"] if self.found else []
        for key, (at, count, _) in sorted(self.found.items(), key=lambda item: item[1][0]):
            lines.append(f"  {count:10} {at:12}   {' and '.join(key)}")
        return "\n".join(lines)


def numbered(seed: int, number: int, setting: Setting = EAGER) -> Case:
    """The case of that number."""
    rng = random.Random(f"{seed}/{number}")
    return draw(rng, adversarial=setting.device == "cpu" and setting.lowering == "eager")


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


def prove(seed: int, numbers: range, setting: Setting = EAGER, *, tell: bool = False) -> Counts:
    """Run the cases of these numbers."""
    counts = Counts()
    with quickly():
        for number in numbers:
            known = set(counts.found)
            counts.add(number, numbered(seed, number, setting), setting)
            for key in set(counts.found) - known if tell else ():
                print(f"--- case {number}\n{counts.found[key][2]}", flush=True)
            gc.collect()
    return counts


def prove_in(jobs: int, cases: int, seed: int, setting: Setting) -> Counts:
    """The same in several processes; each takes every `jobs`-th case."""
    if jobs == 1:
        return prove(seed, range(cases), setting, tell=True)
    counts = Counts()
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context) as pool:
        shares = [range(job, cases, jobs) for job in range(jobs)]
        for each in pool.map(_share, [seed] * jobs, shares, [setting] * jobs):
            counts.join(each)
    for at, _, text in sorted(counts.found.values()):
        print(f"--- case {at}\n{text}")
    return counts


def _share(seed: int, numbers: range, setting: Setting) -> Counts:
    return prove(seed, numbers, setting)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.frames", description=__doc__)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--only", type=int, help="the number of one case")
    parser.add_argument("--lowering", choices=("eager", "inductor"), default="eager")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args(argv)
    setting = Setting.of(args.lowering, args.device)
    start = time.perf_counter()
    if args.only is not None:
        case = numbered(args.seed, args.only, setting)
        with quickly():
            verdict = judge(case, setting)
        print(f"{case.text()}\n{verdict.kind}\n{verdict.why}")
        return int(verdict.kind == "mismatch")
    counts = prove_in(args.jobs, args.cases, args.seed, setting)
    taken = time.perf_counter() - start
    print(f"{counts}\n{taken:.0f} s, {counts.cases / taken:.1f} programs a second")
    return int(counts.mismatches > 0)


if __name__ == "__main__":
    sys.exit(main())
