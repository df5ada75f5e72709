"""Passes take time in proportion to the layers of a model; what each makes is in `passes.txt`.

And the code of a stage: constants that are equal, eager code without idle views.
"""

from __future__ import annotations

import functools
import gc
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megacompile.ir.capture import constant_key, function_key
from megacompile.ir.schedule import Schedule
from tests.actions import parse
from tests.capturing import Config, Kernel, Rounding
from tests.planned import PASSES, rows
from tests.zoo import twins


@functools.cache
def calls(stages: int) -> dict[str, int]:
    """By pass: the function calls that it makes, those of generators' items among them."""
    forward, backward = (range(stages), reversed(range(stages)))
    line = " ".join(f"{k}F" for k in forward) + " | " + " ".join(f"{k}B" for k in backward)
    which = frozenset(range(1, stages - 1, 2))
    schedule = replace(parse(line, saved=40), plan=rows(stages, {stages - 1}, rerun=which))
    counts = dict.fromkeys(LINEAR, 0)
    for name, function in LINEAR.items():

        def note(frame: Any, event: str, argument: Any, name: str = name) -> None:
            counts[name] += event in ("call", "c_call")

        gc.disable()  # finalizers of other tests' objects are calls, too
        sys.setprofile(note)
        try:
            schedule = function(schedule)
        finally:
            sys.setprofile(None)
            gc.enable()
    return counts


LINEAR: dict[str, Callable[[Schedule], Schedule]] = {
    "recompute": PASSES.insert_recompute,
    "rerun": PASSES.insert_reruns,
    "offload_grad": functools.partial(PASSES.offload_gradients, accumulate=False),
    "norms": PASSES.insert_norms,
    "update_graph": functools.partial(PASSES.insert_update_graph, helps=True),
    "prefetch": functools.partial(PASSES.insert_prefetch, lookahead=1),
    "slots": functools.partial(PASSES.assign_slots, slots=3, reuse=True),
    "free": PASSES.insert_free,
    "tokens": PASSES.insert_tokens,
}


def test_twice_the_layers_take_twice_the_time() -> None:
    """Those of 72 B have 80, and plans are many."""
    for name in LINEAR:
        small, middle, large = (calls(stages)[name] for stages in (10, 20, 40))
        assert large - middle < 2.15 * (middle - small), name


@dataclass
class Changeable:
    value: int = 1


EQUAL: list[Callable[[], Any]] = [
    lambda: (1, (2.0, None)),
    lambda: float("nan"),
    lambda: Rounding.HALVES,
    lambda: Kernel(False),
    lambda: Config(dtype=torch.bfloat16),
]
OTHERS = [
    (1, 1.0),
    (1, True),
    (0.0, -0.0),
    ((True,), Kernel(True)),
    (Rounding.HALVES, Rounding.QUARTERS),
    (Config(Rounding.HALVES), Config(Rounding.QUARTERS)),
]


def around(value: Any, default: int = 0) -> Callable[[], Any]:
    def function(given: int = default) -> Any:
        return value, given

    return function


def test_constants_and_closures_are_told_by_what_they_are() -> None:
    shared, other = [1], [1]
    for one, same in [
        *((constant_key(make()), constant_key(make())) for make in EQUAL),
        (function_key(around(shared)), function_key(around(shared))),
    ]:
        assert one == same and hash(one) == hash(same)
    for first, second in OTHERS:
        assert constant_key(first) != constant_key(second), (first, second)
    for value in (Changeable(), [1], torch.ones(2), (1, Changeable()), object()):
        with pytest.raises(TypeError):  # it can change
            constant_key(value)
    for another in (around(other), lambda: shared, around(shared, 2000)):
        assert function_key(around(shared)) != function_key(another)
    inner = around(1)
    assert isinstance(inner, types.FunctionType)
    hidden = types.FunctionType(inner.__code__, {}, closure=(types.CellType(),))
    for function in (torch.relu, around, functools.partial(around, 1), "relu", hidden):
        assert function_key(function) is function, "what is no closure is itself"


class Views(nn.Module):
    """Views that change nothing, and views that do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = x * self.weight
        return (
            x.view(6, 4).view(24) + 1,
            x.transpose(0, 1).view(3, 2, 2, 2).view(3, 2, 4) + 1,
            x.view(2, 3, 4).expand(2, 3, 4).detach() * 2,
            x.unsqueeze(0).expand(2, 2, 3, 4) * 2,
            x.transpose(0, 1).contiguous().view(6, 4) * 2,
            x.detach().view(torch.int32).view(24) + 1,
            *x.split(1, 0),
            *torch.max(x, -1),
            torch.full_like(x, float("inf")) + x.to(torch.float64),
        )


def test_eager_code_gives_the_same_results() -> None:
    plain, model = twins(Views())
    x = torch.linspace(-1, 1, 24).view(2, 3, 4)
    for wanted, got in zip(plain(x), model(x), strict=True):
        assert got.dtype == wanted.dtype and got.stride() == wanted.stride()
        assert torch.equal(got, wanted)
