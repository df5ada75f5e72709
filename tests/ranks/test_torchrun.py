"""What ranks check by themselves (`tests.ranks.script`), next to the plain model in each of them.

A start of torchrun costs seconds, so one start runs many checks, up to the first that fails.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import processes

TIMEOUT_S = 900  # of a machine that does much else


def torchrun(part: str, ranks: int, folder: Path, device: str = "cpu") -> None:
    """Run the checks of a part in several ranks.

    Raises:
        AssertionError: with all that they said; one of them failed.
    """
    arguments = part, str(folder), device
    processes.torchrun(
        "tests.ranks.script", *arguments, ranks=ranks, timeout_s=TIMEOUT_S, device=device
    )


def test_two_ranks(tmp_path: Path) -> None:
    torchrun("two", 2, tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize("part", ["more", "loops"])
def test_more_of_two_ranks(part: str, tmp_path: Path) -> None:
    torchrun(part, 2, tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize("part", ["four", "replicas", "more replicas"])
def test_four_ranks(part: str, tmp_path: Path) -> None:
    torchrun(part, 4, tmp_path)


@pytest.mark.thorough
def test_other_numbers_of_ranks_load_what_four_have_stored(tmp_path: Path) -> None:
    torchrun("store", 4, tmp_path)
    for ranks in (2, 1):
        torchrun("load", ranks, tmp_path)


@pytest.mark.gpu(count=2)
def test_two_gpus(tmp_path: Path) -> None:
    torchrun("gpus", 2, tmp_path, "cuda")


@pytest.mark.gpu(count=4)
def test_four_gpus(tmp_path: Path) -> None:
    torchrun("replicas", 4, tmp_path, "cuda")
