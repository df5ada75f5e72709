"""The backward graph: what it takes, norms of what leaves, what runs again for its outputs.

Passes take time in proportion to the layers of a model. Strings in, strings out; more rows are in
`passes.txt`. And the code of a stage: constants that are equal, eager code without idle views.
"""

from __future__ import annotations

import functools
import gc
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from megacompile.ir import ops
from megacompile.ir.capture import constant_key, function_key
from megacompile.ir.schedule import Schedule
from tests.actions import apply, frees, parse, text
from tests.capturing import Config, Kernel, Rounding
from tests.planned import PASSES, rows
from tests.zoo import twins


def backward(schedule: Schedule) -> fx.Graph:
    assert schedule.backward is not None
    return schedule.backward


def takes(schedule: Schedule) -> str:
    """What each backward takes: "1B(s1_0; d2_0)", saved tensors; tangents; carries."""
    words = []
    for node in ops.nodes_of(backward(schedule), ops.backward):
        _, _, args, saved, tangents, partial_gradients = ops.arguments(node)
        parts = [[a for a in args if a], saved, tangents, partial_gradients]
        shown = "; ".join(" ".join(value.name for value in part) for part in parts if part)
        words.append(f"{ops.label(node)}({shown})")
    return " ".join(words)


ALL = "2B(s2_0; t0) 1B(s1_0; d2_0) 0B(s0_0; d1_0"


@pytest.mark.parametrize(
    ("stubs", "after", "taken"),
    [
        ({}, "0F 1F 2F | 2B 1B 0B", ALL + ")"),
        ({"frozen": (0,)}, "0F 1F 2F | 2B 1B", "2B(s2_0; t0) 1B(s1_0; d2_0)"),
        # the generator's state is saved just before a random stage
        ({"random": (1,)}, "0F 1RNG 1F 2F | 2B 1B 0B", ALL + ")"),
        # gradients of a shared bucket are carried
        ({"reads": {2: "0"}}, "0F 1F 2F | 2B 1B 0B", ALL + "; g0_2)"),
    ],
)
def test_backwards_from_last_to_first(stubs: dict[str, Any], after: str, taken: str) -> None:
    """Residuals are what the backward takes, and every boundary: a backward for other outputs could
    be built later, from the boundaries alone."""
    schedule = apply(PASSES.differentiate, parse("0F 1F 2F", **stubs))
    assert text(schedule) == after and takes(schedule) == taken
    saving = [ops.arguments(n)[3] for n in ops.nodes_of(schedule.forward, ops.forward)]
    assert saving == [i not in stubs.get("frozen", ()) for i in range(3)]
    assert ("rng1" in schedule.saved_values) == ("random" in stubs)
    assert {"x", "y0_0", "y1_0", "s2_0"} <= {*schedule.saved_values}
    assert tuple(n.name for n in ops.returned(schedule.forward)[1]) == schedule.saved_values


# Stages that run again for their outputs.

CHAIN, LONG = "0F 1F 2F 3F | 3B 2B 1B 0B", "0F 1F 2F 3F 4F 5F 6F | 6B 5B 4B 3B 2B 1B 0B"


def rerun(line: str, which: Sequence[int], *, keep: Sequence[int] = (3,), **plan: Any) -> Schedule:
    schedule = parse(line, random=(1,) if "RNG" in line else ())
    planned = rows(len(schedule.stages), keep, rerun=which, **plan)
    return apply(PASSES.insert_reruns, PASSES.insert_recompute(replace(schedule, plan=planned)))


@pytest.mark.parametrize(
    ("line", "which", "keep", "after", "gone"),
    [
        (  # ahead of their first use
            CHAIN,
            (1,),
            (3,),
            "3B 1RERUN 2RECOMPUTE 2B 1RECOMPUTE 1B 0RECOMPUTE 0B",
            "1",
        ),
        (  # rows, each ahead of its last
            LONG,
            (1, 2, 4, 5),
            (),
            "4RERUN 5RERUN 6RECOMPUTE 6B 5RECOMPUTE 5B 4RECOMPUTE 4B 1RERUN 2RERUN 3RECOMPUTE 3B "
            "2RECOMPUTE 2B 1RECOMPUTE 1B 0RECOMPUTE 0B",
            "1245",
        ),
        (CHAIN, (), (3,), "3B 2RECOMPUTE 2B 1RECOMPUTE 1B 0RECOMPUTE 0B", ""),
    ],
)
def test_outputs_are_computed_again(
    line: str, which: Sequence[int], keep: Sequence[int], after: str, gone: str
) -> None:
    schedule = rerun(line, which, keep=keep)
    assert text(schedule).split(" | ")[1] == after
    boundaries = {f"y{k}_0" for k in range(line.count("F") - 1) if k not in keep}
    saved = {name for name in schedule.saved_values if name in boundaries}
    assert boundaries - saved == {f"y{k}_0" for k in gone}


def test_what_runs_again_draws_the_same_comes_in_time_and_dies_with_its_last_reader() -> None:
    assert text(rerun("0F 1F", (0,))) == "0F 1F"
    schedule = rerun("0F 1RNG 1F 2F 3F | 3B 2B 1B 0B", (1,))
    (node,) = ops.nodes_of(backward(schedule), ops.rerun)
    assert ops.arguments(node)[3].name == "rng1"
    assert "2RECOMPUTE -y1_0_again 2B" in frees(backward(PASSES.insert_free(schedule)))
    on_host = rerun(CHAIN, (1,), offload=frozenset({0, 1, 2}))
    assert text(apply(functools.partial(PASSES.offload_saved_tensors, lookahead=1), on_host)) == (
        "0F 1OFFLOAD_SAVED 1F 2F 3F | "
        "1FETCH_SAVED 3B 1RERUN 2RECOMPUTE 2B 1RECOMPUTE 1B 0RECOMPUTE 0B"
    )


# In proportion to the layers.


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
