"""A refusal shows the plan that lacks the least memory, and the changes that would make it fit."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from megacompile.ir.plan import Choice
from megacompile.plan.planner import search
from megacompile.plan.problem import Problem
from megacompile.plan.searches import DEVICE, DISK, HOST, lacking, nearest
from tests.planning import Uneven, captured, problem_of


@cache
def problem() -> Problem:
    """With many tokens."""
    sizes = (2048, 4096, 2048, 4096)
    return problem_of(captured(Uneven(*sizes), 4096, 2048, state_dtype=torch.float32)[0])


def more(tower: Problem, lacks: dict[str, int]) -> Problem:
    """With what is lacking."""
    host, disk = tower.host_budget_bytes, tower.disk_budget_bytes
    return replace(
        tower,
        budget_bytes=tower.budget_bytes + lacks.get(DEVICE, 0),
        host_budget_bytes=None if host is None else host + lacks.get(HOST, 0),
        disk_budget_bytes=None if disk is None else disk + lacks.get(DISK, 0),
    )


def test_it_is_the_host_that_is_short() -> None:
    """On so small a device that inputs of stages must wait on the host, which has too little. The
    plan without anything there lacks much of the device, and is not what is shown."""
    tower = replace(
        problem(), budget_bytes=problem().peak_bytes(Choice(0, offload=problem().stages))
    )
    sizes = []
    for rerun in range(tower.stages):
        choice = Choice(0, rerun=rerun)
        few = tower.fewest_offloaded(choice)
        if few is not None:
            sizes.append(tower.host_bytes(replace(choice, offload=few)))
    tower = replace(tower, host_budget_bytes=min(sizes) - 2**20)
    assert search(tower) is None
    found = nearest(tower)
    lacks = lacking(tower, found)
    assert (found.offload or found.rerun) and [*lacks] == [HOST] and lacks[HOST] <= 2**20
    assert lacking(tower, Choice(0))[DEVICE] > lacks[HOST]
    assert search(more(tower, lacks)) is not None


@pytest.mark.parametrize("device", [0.05, 0.3])
@pytest.mark.parametrize(("host", "disk"), [(0.02, None), (0.3, 0.1), (None, 0.1)])
def test_with_what_is_lacking_it_fits(
    device: float, host: float | None, disk: float | None
) -> None:
    whole = problem()
    size = whole.host_bytes(Choice())
    tower = replace(
        whole,
        budget_bytes=int(device * whole.peak_bytes(Choice(0))),
        host_budget_bytes=None if host is None else int(host * size),
        disk_budget_bytes=None if disk is None else int(disk * size),
    )
    found = nearest(tower)
    lacks = lacking(tower, found)
    enough = more(tower, lacks)
    assert not lacking(enough, found)
    if search(tower) is None:
        assert lacks
        assert sum(lacks.values()) <= sum(lacking(tower, tower.tightest()).values())
        assert enough.fits_host(found) and enough.peak_bytes(found) <= enough.budget_bytes
