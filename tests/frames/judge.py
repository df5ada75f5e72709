"""A case run both ways, compared, and made smaller."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import io
import os
import re
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from megacompile import megacompile
from megacompile.errors import MegacompileError
from tests import adversary
from tests.frames.case import Case, Options

# Features of a part of which docs/limits.md says that the streamed program differs.
LIMITS = (("asks", "type is, in eager code"),)
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


def judge(case: Case, setting: Setting = EAGER, folder: str | None = None) -> Verdict:
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
    return Verdict("a known limit" if _is_limit(case) else "mismatch", why)


def _is_limit(case: Case) -> bool:
    return any(
        label.startswith(f"{kind} ({features}")
        for label in case.labels()
        for kind, features in LIMITS
    )


def _warned_of_aliases(case: Case, differ: list[str], got: Seen) -> str:
    """The warning, if an alias explains what differs."""
    read = all(" alias " in name for name in differ)
    used = any(
        ("alias" in label and "written" in label) or label.startswith("kept view (of a parameter")
        for label in case.labels()
    )
    of_aliases = (text for text in got.warned if ALIASED.search(text))
    return next(of_aliases, "") if read or used else ""


def _smaller(case: Case) -> Iterator[Case]:
    """Cases with less, those with the least first."""
    alone = [dataclasses.replace(case, parts=(part,)) for part in case.parts]
    rest = [
        dataclasses.replace(case, parts=case.parts[:i] + case.parts[i + 1 :])
        for i in range(len(case.parts))
    ]
    shorter = alone if len(case.parts) > 1 else []
    yield from (Case(each.parts) for each in [*shorter, case])
    yield from shorter
    yield from rest if len(case.parts) > 2 else ()
    for f in dataclasses.fields(Options):
        options = dataclasses.replace(case.options, **{f.name: getattr(Options(), f.name)})
        yield dataclasses.replace(case, options=options)
    for f in dataclasses.fields(Case):
        if f.name not in ("parts", "options"):
            yield dataclasses.replace(case, **{f.name: getattr(Case(()), f.name)})
    if len(case.rows) > 2:
        yield dataclasses.replace(case, rows=case.rows[:-1])


def shrink(case: Case, setting: Setting) -> Case:
    """The smallest that is found to differ."""
    for smaller in _smaller(case):
        less = smaller.sound and smaller.size < case.size
        if less and judge(smaller, setting).kind == "mismatch":
            return shrink(smaller, setting)
    return case
