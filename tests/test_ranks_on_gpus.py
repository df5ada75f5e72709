"""Ranks with a GPU each, and NCCL between them, against one process on one GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rank_cases import ON_GPUS, REPLICATED
from tests.test_ranks import torchrun, wrong_modes
from tests.test_ranks_replicas import wrong_loops, wrong_refusals


@pytest.mark.gpu(count=2)
def test_two_ranks_train_as_one_process_does(tmp_path: Path) -> None:
    failed = wrong_modes(ON_GPUS, torchrun("gpus", 2, tmp_path, "cuda"), "cuda")
    assert not failed, "\n".join(failed)


@pytest.mark.gpu(count=4)
def test_the_sum_over_replicas_waits_for_the_last_micro_batch(tmp_path: Path) -> None:
    ranks = torchrun("replicas", 4, tmp_path, "cuda")
    # with Inductor both calls of a loss wait for their sum
    failed = wrong_modes(REPLICATED, ranks, "cuda") + wrong_loops(ranks, calls=[6, 0])
    failed += wrong_refusals(ranks)
    assert not failed, "\n".join(failed)
