"""The device memory that plans may use, and less of it."""

from __future__ import annotations

from typing import Any

import pytest

from megacompile.cost.hardware import H200
from megacompile.plan.abstract import abstract_options
from megacompile.plan.budget import Budget
from megacompile.plan.setting import Setting

GIB = 2**30


class Floor:
    """A problem of which no more is asked than what its smallest plan needs."""

    def __init__(self, floor_bytes: int) -> None:
        self.floor = floor_bytes

    def floor_bytes(self) -> int:
        return self.floor


def budget(*plans: tuple[int, int], **options: Any) -> Budget:
    """After plans with these floors and peaks."""
    given = abstract_options(device="cpu", **options)
    made = Budget(Setting(given, H200.replace(device_bytes=10 * GIB)))
    for floor, peak in plans:
        problem: Any = Floor(floor)
        made.note(problem, peak)
    return made


def test_the_user_comes_first() -> None:
    assert budget().size_bytes() == pytest.approx(9.5 * GIB)
    assert budget(gpu_memory=GIB).size_bytes() == GIB
    given = Budget(Setting(abstract_options(device="cpu", gpu_memory=GIB)), 2 * GIB)
    assert given.size_bytes() == 2 * GIB


@pytest.mark.parametrize(
    ("plans", "limit"),
    [
        ([(1000, 5000)], 4500),
        ([(1000, 5000), (2000, 3000)], 4500),  # the largest plan was too much
        ([(4800, 5000)], 4800),  # less than that is not possible
        ([(4800, 5000), (1000, 2000)], 4500),  # for one graph it is
    ],
)
def test_less_is_nine_tenths_of_what_was_needed(plans: list[tuple[int, int]], limit: int) -> None:
    made = budget(*plans, gpu_memory=GIB)
    assert made.step_down() == f"at most {made.size_bytes() / 1024:.3g} KiB of device memory"
    assert made.size_bytes() == limit
    assert made.step_down() == "", "nothing was planned with it yet"
    assert made.size_bytes() == limit


@pytest.mark.parametrize(
    ("plans", "options"),
    [
        ([], {"gpu_memory": GIB}),
        ([(5000, 5000)], {"gpu_memory": GIB}),  # the smallest plan
        ([(1000, 5000)], {}),  # on the CPU nothing is planned
    ],
)
def test_where_nothing_is_left_to_give(
    plans: list[tuple[int, int]], options: dict[str, Any]
) -> None:
    made = budget(*plans, **options)
    before = made.size_bytes()
    assert made.step_down() == ""
    assert made.size_bytes() == before
