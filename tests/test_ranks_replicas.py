"""Micro-batches of 2 x 2 ranks: the sum over replicas comes once a step. One start of torchrun."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import rank_replicas
from tests.rank_cases import MORE_REPLICATED, REPLICATED
from tests.rank_modes import differences
from tests.test_ranks import torchrun, wrong_modes

WAITING = {  # how many of 6 gradients lacked their sum behind each backward
    "every": [0, 6, 6, 0],
    "another_graph": [6, 0],
    "hook": [2, 0],  # the other graph's
    "hook_at_last": [6, 0],
    "penalty": [0, 0],
    "penalty_at_last": [6, 0],
    "calls": [0, 0],
    "asks": [5, 0],
    "zeroes": [6, 0, 6, 0, 0],
}


@pytest.mark.thorough
def test_the_sum_over_replicas_waits_for_the_last_micro_batch(tmp_path: Path) -> None:
    ranks = torchrun("replicas", 4, tmp_path)
    failed = wrong_modes(REPLICATED, ranks)
    for name in ("2 x 2, exact", "2 x 2, in the backward"):
        again = differences(ranks[0][f"{name}, again"], ranks[0][name], 0.0)
        failed += [f"{name}, again: {each}" for each in again]
    failed += wrong_loops(ranks)
    failed += wrong_refusals(ranks)
    assert not failed, "\n".join(failed)
    first = [f"{k}REDUCE_SCATTER" for k in (2, 1, 0)]
    last = [label for k in (2, 1, 0) for label in (f"{k}REDUCE_SCATTER", f"{k}ALL_REDUCE")]
    for rank in ranks:
        for in_backward, labels in rank["traced"].items():
            assert labels[:3] == first and sorted(labels[3:]) == sorted(last), in_backward
        assert rank["announced"]["updated"] == 6


def wrong_loops(ranks: list[dict[str, Any]], **others: list[int]) -> list[str]:
    """The loops whose gradients are not those of one process, or that summed at other times.

    Args:
        others: counts in place of those in `WAITING`.
    """
    failed = []
    for name, counts in {**WAITING, **others}.items():
        plain = rank_replicas.looped(name, None)
        for kind in rank_replicas.kinds(name):
            for rank, found in enumerate(each[f"{name}, {kind}"] for each in ranks):
                where = f"{name}, {kind}, rank {rank}"
                if found["counts"] != counts:
                    failed.append(f"{where}: {found['counts']}")
                failed += [f"{where}: {each}" for each in unlike(found, plain)]
    return failed


def unlike(found: dict[str, Any], plain: dict[str, Any]) -> list[str]:
    """The gradients that differ, and what hooks saw."""
    names = found["gradients"].keys() ^ plain["gradients"].keys()
    pairs = {name: (found["gradients"][name], value) for name, value in plain["gradients"].items()}
    pairs |= {
        f"seen {k}": pair for k, pair in enumerate(zip(found["seen"], plain["seen"], strict=True))
    }
    close = {name: torch.allclose(*pair, rtol=1e-11, atol=1e-14) for name, pair in pairs.items()}
    return [*names, *(name for name, is_close in close.items() if not is_close)]


def wrong_refusals(ranks: list[dict[str, Any]]) -> list[str]:
    """What was said of gradients that lack their sum, and what came of it."""
    return [f"rank {i}: {each}" for i, rank in enumerate(ranks) for each in _of_rank(rank)]


def _of_rank(rank: dict[str, Any]) -> list[str]:
    plain = rank_replicas.Loop(None)
    plain.loss(0).backward()
    plain.loss(1).backward()
    expected = {"gradients": plain.gradients(), "seen": []}
    why = r".*: its last backward ran inside of megacompile.accumulate\(model\), or a loop"
    step = "the gradient of 'layers.0.weight' is not summed over the 2 replicas yet"
    words = dict.fromkeys(
        ("clip", "norm", "part", "multiply", "print", "penalty"),
        "OptimizerError: p.grad of 'layers.0.weight' is not summed over replicas yet" + why,
    )
    words["step"] = rf"OptimizerError: AdamW.step\(\): {step} \(nothing was updated\)" + why
    words["unmegacompile"] = r"ModelError: unmegacompile\(\): Net has gradients that are not summed"
    failed = []
    for kind, said in rank["refusals"].items():
        failed += [f"{k}, {kind}: {said[k]}" for k, v in words.items() if not re.match(v, said[k])]
        if said["updated"] or said["shape"] != (5, 5):
            failed.append(f"{kind}: it was updated, or has shape {said['shape']}")
        found = {"gradients": said["gradients"], "seen": []}
        failed += [f"{kind}, behind errors: {each}" for each in unlike(found, expected)]
    if not re.match(words["step"], rank["announced"]["step"]):
        failed.append(f"announced: {rank['announced']['step']}")
    return failed


@pytest.mark.thorough
def test_more_micro_batches_of_replicas(tmp_path: Path) -> None:
    failed = wrong_modes(MORE_REPLICATED, torchrun("more replicas", 4, tmp_path))
    assert not failed, "\n".join(failed)
