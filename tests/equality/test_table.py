"""Streamed training is the plain one in every bit: models x loops x options, each pair of them.

A model is captured once and trained in several loops, in interleavings that an adversarial device
and a slow disk choose. A cell that cannot be must say so."""

from __future__ import annotations

import gc
import sys
from collections import OrderedDict
from pathlib import Path

import pytest
from allpairspy import AllPairs

from megacompile.errors import BackwardError, OptimizerError, OptionError
from tests import adversary, inside
from tests.equality import cells
from tests.equality.cells import Cell
from tests.zoo import unlike

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="scratch files are for Linux"),
    pytest.mark.filterwarnings("ignore:megacompile. disk=.* has no direct I/O"),
    pytest.mark.filterwarnings("ignore:megacompile. .* ignores "),
]

AXES = OrderedDict(
    model=list(cells.MODELS),
    optimizer=list(cells.OPTIMIZERS),
    numbers=list(cells.NUMBERS),
    saved=list(cells.SAVED),
    weights=list(cells.WEIGHTS),
    states=list(cells.STATES),
    updater=list(cells.UPDATERS),
    slots=list(cells.SLOTS),
)


def makes_sense(row: list[str]) -> bool:
    cell = Cell(*row)
    own = cell.optimizer not in cells.BY_RULE  # torch.optim's steps, in the parameters' dtype
    if own and (cell.in_backward or cell.numbers not in ("exact", "autocast", "masters")):
        return False
    if cell.model == "batch norm" and "masters" in cell.numbers:
        return False  # torch has no batch norm of bfloat16 with statistics of float32 on a CPU
    return True


def loops_of(k: int) -> list[str]:
    """A quarter of the loops, others in each of the next three cells."""
    return [name for i, name in enumerate(cells.LOOPS) if (i + k // 4) % 4 == k % 4]


CELLS = [Cell(*row) for row in AllPairs(AXES, filter_func=makes_sense)]
ALWAYS = 20  # the first cells have most of the pairs


def vars_of(cell: Cell) -> list[str]:
    return [getattr(cell, name).replace(" ", "_") for name in AXES]


NAMED = [
    pytest.param(k, id=name, marks=[pytest.mark.thorough] if k >= ALWAYS else [])
    for k, name in enumerate("-".join(vars_of(cell)) for cell in CELLS)
]


@pytest.mark.parametrize("k", NAMED)
def test_every_bit(k: int, tmp_path: Path) -> None:
    cell = CELLS[k]
    if cell.weights == "disk" and "masters" in cell.numbers:
        with pytest.raises(OptionError):
            cells.build(cell, tmp_path)
        return
    run = cells.build(cell, tmp_path)
    adversary.attach(run.model)
    for seed, loop in enumerate(loops_of(k), k):
        cells.on(run, loop)
        if cell.in_backward and loop in cells.OF_SEVERAL:
            with cells.adversarial(run, seed), pytest.raises((BackwardError, OptimizerError)):
                cells.trained(run)
            run.model.zero_grad()
            continue
        want = cells.expected(run.cell)
        with cells.adversarial(run, seed):
            got = cells.trained(run)
        assert unlike(want, got) == [], (loop, seed)
    run.reset()
    gc.collect()
    assert inside.machine(run.model).activations.lent_bytes == 0
