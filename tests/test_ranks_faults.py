"""One rank does something else, or nothing: all ranks stop soon, and say which one and where.

The times are bounds on hanging: a rank that waits for another one by itself would wait for 30
minutes.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megacompile.errors import RankError
from megacompile.runtime.device.rank_faults import Faults, Limits
from megacompile.runtime.device.rank_notes import Note
from tests.ranks_faults import CASES

ROOT = Path(__file__).resolve().parent.parent
BOUND_S = 60.0  # from the fault to the error, by default
TIMEOUT_S = 400
WAITS = r"rank {rank} waits in \S+ALL_GATHER@0 of 'layers.0' \(.*\) of the forward of Net for rank "

# What the rank that goes wrong raises, and what the others do.
FAULTS = {
    "raises_between": ("ValueError", WAITS + r"1, which has ended \(ValueError: bad batch\)"),
    "raises_in_a_graph": ("ValueError", r"which raised ValueError: bad stage, in 0ALL_GATHER@0"),
    "raises_in_a_backward": ("RankError", r"their collectives differ, collective 1 is ALL_GATHER"),
    "is_killed": ("none", WAITS + r"2, which was killed \(process \d+\)"),
    "is_killed_in_a_save": (
        "none",
        r"waits in ALL_GATHER of a parameter of shape \(8,\) .* rank 1, which was killed",
    ),
    "saves_alone": (
        "RankError",
        r"about to run the (save\(\) of Net, rank 0|forward of Net, rank 1)",
    ),
    "saves_state_dicts_alone": (
        "RankError",
        r"about to run the (saving Net in one rank, rank 0|forward of Net, rank 1)",
    ),
    "is_killed_with_the_store": ("RankError", "store .* does not answer|which was killed"),
    "is_stopped": ("none", WAITS + r"1, which has given no sign of life for 6 s"),
    "is_stopped_by_default": ("none", WAITS + r"1, which has given no sign of life for 30 s"),
    "is_idle": ("none", WAITS + r"1, which has not come there .* has done nothing for"),
    "is_idle_by_default": ("none", WAITS + r"1, which has not come there .* has done nothing for"),
    "ends_early": ("", WAITS + r"1, which has ended \(it came to its end\)"),
    "exits": ("SystemExit", WAITS + r"1, which has ended \(SystemExit, as of sys.exit\(\)\)"),
    "other_micro_batches": ("RankError", r"has made \d steps of optimizers and rank \d \d"),
    "accumulates_alone": (
        "RankError",
        r"collective \d is \d(ALL_REDUCE|ALL_GATHER@\d|REDUCE_SCATTER) of .* in rank \d and "
        r".* in rank \d; needed the same graphs, .* as many micro-batches",
    ),
    "evaluates": (
        "RankError",
        r"rank \d .* the (forward of Net, rank \d the back|backward of Net, rank \d the for)ward",
    ),
    "does_not_clip": ("RankError", "which has (not come there|ended)"),
    "freezes_another": (
        "RankError",
        r"collective 2 is \dREDUCE_SCATTER of 'layers.1' \(256 B: layers.1.\w+.weight\) in rank \d "
        r"and \dREDUCE_SCATTER of 'layers.1' \(256 B: layers.1.\w+.weight\) in rank \d; needed the "
        r"same .* and the same parameters frozen \(requires_grad\)$",
    ),
    "other_model": ("RankError", r"collective 2 is \dREDUCE_SCATTER of .* in rank \d and \dREDUCE"),
    "raises_in_the_probe": (
        "ValueError",
        r"rank 1 raised ValueError: bad probe, in megacompile\(\) of Net",
    ),
    "raises_in_compare_ranks": (
        "ValueError",
        r"rank 2 raised ValueError: bad trace, in compare_ranks\(\) of a trace",
    ),
    "raises_in_a_trace_save": (
        "ValueError",
        r"rank 1 raised ValueError: bad trace, in save\(\) of a trace",
    ),
    "raises_before_buffers": (
        "ValueError",
        r"rank 0 waits in BROADCAST of \(8,\) of torch.float32 of the buffers of Beside for "
        r"rank 1, which has ended \(ValueError: bad batch\)",
    ),
    "skips_a_step": (
        "RankError",
        r"has made \d steps of optimizers and rank \d \d; .* the same parameters frozen",
    ),
    "is_interrupted": ("KeyboardInterrupt", WAITS + r"1, which has ended \(KeyboardInterrupt\)"),
    "all_are_interrupted": ("KeyboardInterrupt", ""),
    "other_shapes": ("", ""),
    "works_for_long": ("", ""),
    "saves_for_long": ("", ""),
}
ALWAYS = [
    "raises_between",
    "raises_in_a_graph",
    "raises_in_the_probe",
    "raises_in_compare_ranks",
    "raises_in_a_trace_save",
    "raises_before_buffers",
    "is_killed",
    "is_killed_with_the_store",
    "is_killed_in_a_save",
    "saves_for_long",
    "saves_alone",
    "saves_state_dicts_alone",
    "is_stopped",
    "is_idle",
    "exits",
    "accumulates_alone",
    "evaluates",
    "skips_a_step",
    "other_micro_batches",
    "is_interrupted",
    "all_are_interrupted",
]


def test_every_case_is_tried() -> None:
    assert FAULTS.keys() == CASES.keys() and set(ALWAYS) < CASES.keys()


def test_faults_stop_all_ranks(tmp_path: Path) -> None:
    check(run(ALWAYS, tmp_path))


@pytest.mark.thorough
def test_more_faults_stop_all_ranks(tmp_path: Path) -> None:
    check(run([case for case in CASES if case not in ALWAYS], tmp_path))


def test_a_rank_that_never_came_is_named() -> None:
    """With NCCL nobody waits for it when ranks get to know one another."""
    here = Note(n=1)
    notes: Any = SimpleNamespace(
        ranks=(0, 1, 2), rank=0, position=(1, 0, ""), others=lambda thread: {1: here}, runs=bool
    )
    faults = Faults(notes, Limits(45.0, 600.0), thread=False)
    faults.look("here", 599.0, failed=False)
    with pytest.raises(RankError, match=r"waits in here for rank 2, which has not called megac"):
        faults.look("here", 601.0, failed=False)


def run(cases: list[str], folder: Path) -> dict[str, list[dict[str, Any]]]:
    """What the ranks of each case did."""
    command = [sys.executable, "-m", "tests.ranks_faults", str(folder), *cases]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return {case: json.loads((folder / f"{case}.json").read_text()) for case in cases}


def check(found: dict[str, list[dict[str, Any]]]) -> None:
    """The errors are the right ones, came soon, and nothing is left."""
    for case, ranks in found.items():
        odd, expected = FAULTS[case]
        for rank, facts in enumerate(ranks):
            where = f"{case}, rank {rank}: {facts}"
            last = rank == len(ranks) - 1
            if last:
                assert facts["kind"] == odd, where
            elif facts["kind"] == "none":
                assert case == "is_killed_with_the_store", where
            elif case == "all_are_interrupted":
                assert facts["kind"] == "KeyboardInterrupt", where
            elif expected:
                assert facts["kind"] == "RankError", where
                assert re.search(expected.format(rank=rank), facts["error"]), where
            else:
                assert not facts["kind"], where
            assert facts.get("seconds", 0) < BOUND_S, where
            assert facts["ended_s"] < BOUND_S + 45, where  # with its start and its end
            assert not Path(f"/proc/{facts['pid']}").exists(), where
    pids = [str(facts["pid"]) for ranks in found.values() for facts in ranks]
    shared = [path.name for path in Path("/dev/shm").iterdir()]
    assert not [name for name in shared if any(pid in name.split("_") for pid in pids)]
