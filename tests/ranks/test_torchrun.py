"""What ranks check by themselves (`tests.ranks.script`), next to the plain model in each of them;
one start of torchrun runs many checks, up to the first that fails. And one rank does something
else, or nothing: all ranks stop soon, and say which one and where. The times are bounds on hanging.
Who is to blame when: `tests/unit/test_agreement.py`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests import processes
from tests.processes import python
from tests.ranks import others
from tests.ranks.faults import CASES

TIMEOUT_S = 900  # of a machine that does much else
NEEDED = {"trainer": "accelerate", "accelerate": "accelerate", "lightning": "lightning"}
NEEDED |= {"float8": "torchao"}
THOROUGH = pytest.mark.thorough


@pytest.mark.parametrize(
    ("part", "ranks", "device"),
    [
        ("two", 2, "cpu"),
        pytest.param("more", 2, "cpu", marks=THOROUGH),
        pytest.param("loops", 2, "cpu", marks=THOROUGH),
        pytest.param("four", 4, "cpu", marks=THOROUGH),
        pytest.param("replicas", 4, "cpu", marks=THOROUGH),
        pytest.param("more replicas", 4, "cpu", marks=THOROUGH),
        pytest.param("three replicas", 6, "cpu", marks=THOROUGH),
        *[(part, 2, "cpu") for part in NEEDED],
        *[pytest.param(loop, 2, "cuda", marks=pytest.mark.gpu(count=2)) for loop in others.LOOPS],
        pytest.param("gpus", 2, "cuda", marks=pytest.mark.gpu(count=2)),
        pytest.param("replicas", 4, "cuda", marks=pytest.mark.gpu(count=4)),
    ],
)
def test_ranks(part: str, ranks: int, device: str, tmp_path: Path) -> None:
    if part in NEEDED:
        pytest.importorskip(NEEDED[part])
    processes.torchrun(
        "tests.ranks.script",
        *(part, str(tmp_path), device),
        ranks=ranks,
        timeout_s=TIMEOUT_S,
        device=device,
    )


BOUND_S = 60.0  # from the fault to the error, by default
HANG_S = 500


@pytest.mark.parametrize("always", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_faults_stop_all_ranks(always: bool, tmp_path: Path) -> None:
    cases = [name for name, case in CASES.items() if case.always == always]
    python(
        *("-m", "tests.ranks.faults", str(tmp_path), *cases),
        timeout_s=HANG_S,
        OMP_NUM_THREADS="1",
        CUDA_VISIBLE_DEVICES="",
    )
    found: dict[str, list[dict[str, Any]]] = json.loads((tmp_path / "found.json").read_text())
    assert [*found] == cases
    for name, ranks in found.items():
        for rank, facts in enumerate(ranks):
            check(name, rank, facts, odd=rank == len(ranks) - 1)
    pids = [str(facts["pid"]) for ranks in found.values() for facts in ranks]
    shared = [path.name for path in Path("/dev/shm").iterdir()]
    assert not [name for name in shared if any(pid in name.split("_") for pid in pids)]


def check(name: str, rank: int, facts: dict[str, Any], *, odd: bool) -> None:
    """The error of a rank is the right one, came soon, and nothing is left of its process."""
    case, where = CASES[name], f"{name}, rank {rank}: {facts}"
    if odd:
        assert facts["kind"] == case.odd, where
    elif facts["kind"] == "none":
        assert name == "is_killed_with_the_store", where
    elif name == "all_are_interrupted":
        assert facts["kind"] == "KeyboardInterrupt", where
    else:
        assert facts["kind"] == "RankError", where
        assert re.search(case.others.format(rank=rank), facts["error"]), where
    assert facts.get("seconds", 0) < BOUND_S, where
    assert facts["ending_s"] < BOUND_S, where
    assert not Path(f"/proc/{facts['pid']}").exists(), where
