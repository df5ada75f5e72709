"""Programs of frames with every kind of part, a few cases of budgets, and that the draws see what
they are to see.

`python -m tests.frames` and `python -m tests.budgets` do more. Planted faults stand in for
`megacompile()` in the first.
"""

from __future__ import annotations

import random
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch import nn

from tests.draws import drawn
from tests.frames import command
from tests.frames.case import Case
from tests.frames.parts import KINDS
from tests.sources import ROOT

Part = tuple[str, int]


def part(kind: str, *features: str) -> Part:
    for seed in range(2000):
        found = KINDS[kind](random.Random(seed)).features
        if all(feature in found for feature in features):
            return kind, seed
    raise AssertionError(f"{kind} never has {features}")


def every_pick() -> list[Case]:
    """Programs of a part of each kind, which pick between them all that a kind has to pick from."""
    seeds: dict[str, list[int]] = {}
    for kind, make in KINDS.items():
        draws = {seed: make(random.Random(seed)).features for seed in range(400)}
        often = kind == "asks"  # captured, and in eager code
        firsts = {
            (of[0], often and of[1] == "in eager code"): seed
            for seed, of in draws.items()
            if f"{kind} ({', '.join(of[:2])}" not in command.LIMITS
        }
        seeds[kind] = [seed for _, seed in sorted(firsts.items())]
    alone = [Case((("changed", seed),)) for seed in seeds.pop("changed")]  # which ends a step
    count = len(seeds["exchanged"])  # the most that do not go together
    kinds = sorted(seeds.items())
    return [
        Case(tuple((kind, seed) for kind, of in kinds for seed in of[k::count]))
        for k in range(count)
    ] + alone


@pytest.mark.parametrize("case", every_pick(), ids=lambda case: " ".join(sorted(case.labels())))
def test_every_kind_of_part(case: Case) -> None:
    verdict = command.judge(case)
    assert verdict.kind in ("equal", "warned" if len(case.parts) > 1 else "raises too"), verdict


@pytest.mark.parametrize("numbers", drawn([range(2, 4)], [range(4, 60)]), ids=str)
def test_programs_equal_the_plain_ones(numbers: range) -> None:
    counts = command.prove(0, numbers)
    assert counts.mismatches == 0, "\n".join(counts.found)
    assert counts.kinds.total() == len(numbers)


def plain_model(model: Any, **_: object) -> Any:
    return model


def another_model(model: Any, **_: object) -> None:
    """Its tensors get other memory."""
    for value in [*model.parameters(), *model.buffers()]:
        value.data = value.data.clone()


def copied_input(model: Any, **_: object) -> None:
    """It does not see that an input changes."""

    def copies(_: Any, args: Any, inputs: dict[str, Any]) -> Any:
        return args, {name: value.clone() for name, value in inputs.items()}

    model.register_forward_pre_hook(copies, with_kwargs=True)


def bits(model: Any, **_: object) -> None:
    """It rounds otherwise."""
    model.register_forward_hook(lambda m, args, out: (out[0] * (1 + 2e-7), out[1]))


def raises(model: nn.Module, **_: object) -> None:
    raise RuntimeError("planted")


def warns(model: Any, **_: object) -> None:
    another_model(model)
    warnings.warn("p0.o.weight shares its memory with another tensor", stacklevel=1)


ALIAS, WRITTEN = part("alias", "detach", "read"), part("alias", "detach", "written")
CHANGED = part("changed", "input", "read by a product")
VIEW = part("kept view", "of a buffer", "made in __init__")


@pytest.mark.parametrize(
    ("fault", "parts", "kind"),
    [
        (plain_model, (part("asks", "shape"),), "equal"),
        (plain_model, (CHANGED,), "raises too"),
        (copied_input, (CHANGED,), "not seen"),
        (raises, (part("changed", "buffer", "read by a product"),), "mismatch"),
        (bits, (part("helper", "in a loop"),), "mismatch"),
        (warns, (WRITTEN,), "warned"),  # which is enough for an alias
        (warns, (VIEW,), "mismatch"),
        (another_model, (ALIAS, CHANGED), "mismatch"),
    ],
)
def test_a_planted_fault_is_seen(fault: Any, parts: tuple[Part, ...], kind: str) -> None:
    with mock.patch.object(command, "megacompile", fault):
        assert command.judge(Case(parts)).kind == kind


linux = pytest.mark.skipif(sys.platform != "linux", reason="forks, and limits a child's memory")

LIES = {  # code that is run first: what `python -m tests.budgets` says then
    "": "0 killed",
    # as if gradients and states were free: a budget that the plan meets is passed by the run
    "from megacompile.cost import places\nplaces.flat_bytes = lambda *_: 0": "FAULT",
}


@linux
@pytest.mark.thorough
@pytest.mark.parametrize("lie", LIES)
def test_each_runs_or_is_refused(tmp_path: Path, lie: str) -> None:
    """In a process of its own, which has no threads when it forks."""
    code = f"{lie}\nimport sys\nfrom tests import budgets\nsys.exit(budgets.main(sys.argv[1:]))"
    cases = ["--cases", "1" if lie else "3", "--scale", "4", "--seed", "2" if lie else "0"]
    whole = [sys.executable, "-c", code, *cases, "--folder", str(tmp_path)]
    done = subprocess.run(whole, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == bool(lie), done.stdout + done.stderr
    assert LIES[lie] in done.stdout and ("FAULT" in done.stdout) == bool(lie)
