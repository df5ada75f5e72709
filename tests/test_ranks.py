"""Ranks that share a model against one process that has all of their micro-batches.

Each start of torchrun costs seconds, so one start runs many cases, and a test names all that fail.
Losses, norms, parameters and states are compared relative to each tensor's norm.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import processes, rank_checkpoints, rank_loops
from tests.rank_cases import FOUR, MORE, ROUGH, TWO
from tests.rank_modes import Mode, Record, differences, reference
from tests.rank_script import STATES

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 400
EXACT = 1e-11  # of float64


def test_two_ranks_train_as_one_process_does(tmp_path: Path) -> None:
    ranks = torchrun("two", 2, tmp_path)
    failed = wrong_modes(TWO, ranks)
    again = differences(ranks[0]["exact, again"], ranks[0]["exact"], 0.0)
    assert not failed and not again, "\n".join([*failed, *again])
    for said in (each["refusals"] for each in ranks):
        for other in ("another shape", "frozen in one"):
            assert "ModelError: megacompile(): Linear is another model in rank 1" in said[other]
        assert said["is as it was"]
        assert "OptionError: megacompile(): got a mesh of 2 x 1 ranks" in said["only replicas"]
        assert said["collectives"] == {"clip_grad_norm_": 1, "step": 0}
    assert "rank 1 is not in the mesh" in ranks[1]["refusals"]["not in the mesh"]


def test_loops_of_two_ranks_are_those_of_one_process(tmp_path: Path) -> None:
    failed = wrong_loops(torchrun("loops", 2, tmp_path))
    assert not failed, "\n".join(failed)


def test_four_ranks_and_what_two_and_one_load_of_them(tmp_path: Path) -> None:
    four = torchrun("four", 4, tmp_path)
    failed = wrong_modes(FOUR, four)
    two = torchrun("load", 2, tmp_path)
    for states in STATES:
        saved = four[0][f"save, {states}"]
        for name in ("load", "load_full", "load_plainly"):
            failed += wrong_checkpoint(f"two: {name}, {states}", two[0], saved)
        for load in (rank_checkpoints.load, rank_checkpoints.load_full):
            name = f"{load.__name__}, {states}"
            plain = {name: load(None, 1, tmp_path / states)}
            failed += wrong_checkpoint(f"plain: {name}", plain, saved)
    assert not failed, "\n".join(failed)


@pytest.mark.thorough
def test_two_ranks_in_every_mode(tmp_path: Path) -> None:
    failed = wrong_modes(MORE, torchrun("more", 2, tmp_path))
    assert not failed, "\n".join(failed)


@pytest.mark.thorough
def test_compiled_loops_of_two_ranks(tmp_path: Path) -> None:
    failed = wrong_loops(torchrun("compiled", 2, tmp_path))
    assert not failed, "\n".join(failed)


@pytest.mark.thorough
def test_one_rank_loads_what_two_have(tmp_path: Path) -> None:
    torchrun("save", 2, tmp_path)
    one = torchrun("load", 1, tmp_path)
    failed = []
    for states in STATES:
        saved = torch.load(tmp_path / "save.0")[f"save, {states}"]
        for name in ("load", "load_full"):
            failed += wrong_checkpoint(f"one: {name}, {states}", one[0], saved)
    assert not failed, "\n".join(failed)


def wrong_modes(modes: Mapping[str, Mode], ranks: list[dict[str, Record]]) -> list[str]:
    """What differs between ranks and one process, and between ranks."""
    failed = []
    for name, mode in modes.items():
        ours = ranks[0][name]
        found = differences(ours, reference(mode, len(ranks)), mode.tolerance)
        for rank, other in enumerate(ranks):
            found += [f"rank {rank}: {each}" for each in differences(other[name], ours, 0.0)]
        failed += [f"{name}: {each}" for each in found]
    return failed


def wrong_loops(ranks: list[dict[str, Record]]) -> list[str]:
    """The same of loops."""
    failed = []
    for name in rank_loops.LOOPS:
        plain = rank_loops.run(name, None, len(ranks))
        failed += [f"{name}: {each}" for each in differences(ranks[0][name], plain, EXACT)]
    return failed


def wrong_checkpoint(title: str, found: dict[str, Any], saved: dict[str, Any]) -> list[str]:
    """What is not as it was saved, bit by bit, or does not go on as the run that saved it."""
    name = title.partition(": ")[2]
    ours, narrow = found[name], "8 bits" in title
    near = ROUGH if narrow else EXACT
    bitwise = 0.0 if "plainly" not in name else near  # that run was not the one that was saved
    wrong = differences(ours["loaded"], saved["saved"], bitwise)
    wrong += differences(ours["trained"], saved["trained"], near)
    return [f"{title}: {each}" for each in wrong]


def torchrun(part: str, ranks: int, folder: Path) -> list[dict[str, Any]]:
    """What each rank found of a part of `rank_script`."""
    arguments = part, str(folder)
    processes.torchrun("tests.rank_script", *arguments, ranks=ranks, timeout_s=TIMEOUT_S)
    return [torch.load(folder / f"{part}.{rank}") for rank in range(ranks)]
