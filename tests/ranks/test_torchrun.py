"""What ranks check by themselves (`tests.ranks.script`), next to the plain model in each of them.

A start of torchrun costs seconds, so one start runs many checks, up to the first that fails.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import processes

TIMEOUT_S = 900  # of a machine that does much else
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
        pytest.param("gpus", 2, "cuda", marks=pytest.mark.gpu(count=2)),
        pytest.param("replicas", 4, "cuda", marks=pytest.mark.gpu(count=4)),
    ],
)
def test_ranks(part: str, ranks: int, device: str, tmp_path: Path) -> None:
    processes.torchrun(
        "tests.ranks.script",
        *(part, str(tmp_path), device),
        ranks=ranks,
        timeout_s=TIMEOUT_S,
        device=device,
    )
