"""Ranks that copy whole buckets, from memory that all of them map, against ranks that gather.

In every bit. One rank is late with what the others copy, or with its own copies. With a wait left
out (`Rows.settle`, `SharedWeights.copied`) the cases of "disturbed" differ.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests import processes

TIMEOUT_S = 400


def torchrun(part: str, ranks: int, folder: Path) -> list[dict[str, Any]]:
    """What each rank found of a part of `rank_copies`."""
    arguments = part, str(folder)
    processes.torchrun("tests.rank_copies", *arguments, ranks=ranks, timeout_s=TIMEOUT_S)
    return [torch.load(folder / f"{part}.{rank}") for rank in range(ranks)]


def wrong(found: dict[str, list[str]]) -> list[str]:
    return [f"{name}: {each}" for name, several in found.items() for each in several]


@pytest.mark.thorough
def test_two_ranks_copy_what_they_would_gather(tmp_path: Path) -> None:
    for found in torchrun("two", 2, tmp_path):
        failed = wrong(found["modes"]) + wrong(found["disturbed"])
        assert not failed, "\n".join(failed)
        memory = found["memory"]
        assert memory["held"] == memory["mine"], "a rank's budget has its own rows"
        assert memory["there"], "the rows of all ranks, as they lie in a slot"
        assert not memory["left"] and memory["fds"] <= 0
        assert found["refused"] == (
            "OptionError: megacompile(): got whole_buckets=True, and rank 1 cannot share memory "
            "with the ranks of other rows: rank 0 is on another host, or in another container; "
            "leave it out, and buckets are gathered"
        )
        some, every = found["planned"]["some"], found["planned"]["all"]
        assert not some["wrong"] and not every["wrong"]
        assert some["whole"] == [False, True, True, True]
        assert some["actions"].startswith("0PREFETCH_SHARD@0 0ALL_GATHER@0 1PREFETCH_WHOLE@1")
        assert all(every["whole"]) and "GATHER" not in every["actions"]


@pytest.mark.thorough
def test_four_ranks_and_two_rows_of_two(tmp_path: Path) -> None:
    for found in torchrun("four", 4, tmp_path):
        failed = [*wrong(found["modes"]), *found["late"]]
        assert not failed, "\n".join(failed)


@pytest.mark.thorough
def test_loops_and_checkpoints(tmp_path: Path) -> None:
    for found in torchrun("loops", 2, tmp_path):
        failed = [*wrong(found["loops"]), *found["checkpoint"], *found["saved and loaded"]]
        assert not failed, "\n".join(failed)


@pytest.mark.thorough
def test_two_ranks_in_more_modes(tmp_path: Path) -> None:
    for found in torchrun("more", 2, tmp_path):
        failed = wrong(found["modes"])
        assert not failed, "\n".join(failed)
