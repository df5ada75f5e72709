"""A machine with more memory never gets a slower plan, whatever the plan for less is made of."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacompile.cost.hardware import H200
from megacompile.ir.placement import Placement
from megacompile.plan.abstract import AbstractProgram, abstract_options, abstract_programs
from megacompile.plan.choice import Choice
from megacompile.plan.planner import search
from megacompile.plan.problem import Problem
from tests.test_planner import problem

GIB = 2**30
WIDTH, LAYERS, TOKENS = 512, 5, 131072
LITTLE = 1.011  # what plans may differ by
FOR_TILES = 1.04  # the same, where one of them is in tiles: they must save 3 %


class Block(nn.Module):
    """Attention that takes most of the time, and an MLP that takes most of the memory."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.up = nn.Linear(WIDTH, 8 * WIDTH)
        self.down = nn.Linear(8 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (3, -1, 128)).transpose(1, 3)
        query, key, value = heads.unbind(2)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + mixed.transpose(1, 2).flatten(2)
        result: Tensor = x + self.down(F.silu(self.up(x)))
        return result


class Long(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@cache
def program(in_backward: bool) -> AbstractProgram:
    model = Long().to("meta", torch.bfloat16)
    given: dict[str, Any] = {"state_dtype": torch.float32}
    if in_backward:
        given["optimizer"] = torch.optim.AdamW(model.parameters())
    x = torch.empty(1, TOKENS, WIDTH, device="meta", dtype=torch.bfloat16)
    options = abstract_options(device="cpu", **given)
    (made,) = abstract_programs(model, (x,), options=options, hardware=H200)
    return made


def planned(made: AbstractProgram, device_bytes: int, host_bytes: int) -> tuple[float, Choice]:
    """What a step is expected to take, and its choice."""
    other = made.compiler.other(
        made.compiler.setting.options,
        hardware=H200.replace(host_bytes=host_bytes),
        budget_bytes=device_bytes,
    )
    each = made.planned()
    graphs = other.pipeline.differentiated(*each)
    found, _ = other.chooser.choose(each.stages, graphs, each.variant, Placement())
    return other.chooser.problem_of(graphs, each.variant).expected_s(found), found


def whole(made: AbstractProgram) -> Problem:
    """Without tiles."""
    each = made.planned()
    graphs = made.compiler.pipeline.differentiated(*each)
    return made.compiler.chooser.problem_of(graphs, each.variant)


@pytest.mark.parametrize("in_backward", [False, True])
def test_more_of_the_device(in_backward: bool) -> None:
    """Where it fits without tiles, and with all inputs on the device, less memory had neither."""
    made = program(in_backward)
    floor = whole(made).floor_bytes()
    times, tiles = [], []
    for factor in (0.6, 0.95, 1.05, 1.4, 2.5):
        step_s, choice = planned(made, int(factor * floor), 64 * GIB)
        times.append(step_s)
        tiles.append(choice.tiles)
    assert tiles[0] > 1, "it fits in tiles alone"
    assert tiles[-1] > 1, "and is faster so in any case"
    for less, more in itertools.pairwise(times):
        assert more <= less * FOR_TILES


@pytest.mark.parametrize(
    ("factor", "in_backward"), [(1.3, False), (1.3, True), (2.5, False), (2.5, True), (3.2, False)]
)
def test_more_of_the_host(factor: float, in_backward: bool) -> None:
    """With little of it, more buckets have to live on the device, and stages run again for that.
    With more of it they need not; where that is faster, they do."""
    tower = problem(GIB, in_backward=in_backward)
    floor, needed = tower.floor_bytes(), tower.host_bytes(Choice())
    times = []
    for share in (0.3, 0.45, 0.6, 3):
        made = replace(
            tower, budget_bytes=int(factor * floor), host_budget_bytes=int(share * needed)
        )
        if (found := search(made)) is not None:
            times.append(made.expected_s(found.choice))
    assert times
    for less, more in itertools.pairwise(times):
        assert more <= less * LITTLE


def test_where_all_is_kept_there_are_no_tiles() -> None:
    made = program(in_backward=False)
    step_s, choice = planned(made, 64 * GIB, 64 * GIB)
    assert choice.keep == whole(made).stages and choice.tiles == 1
    assert step_s == whole(made).expected_s(replace(choice, tiles=1))
