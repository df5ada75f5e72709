"""A call of a captured graph: inputs that share memory, calls alike."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megacompile.ir.capture import Ambient
from megacompile.runtime.model.input_keys import LastCall
from megacompile.runtime.params.proxies import StreamedParameter
from megacompile.runtime.params.shared_memory import moved, overlaps


def text(seed: int = 0) -> Tensor:
    return torch.randint(12, (4, 9), generator=torch.Generator().manual_seed(seed))


def test_inputs_move_once_and_stay_what_they_are() -> None:
    x, stays = torch.ones(3), torch.zeros(3)
    around, beside = {"x": [x, stays]}, [stays]
    called, named = (x, around, beside), {"labels": x}
    args, kwargs = moved(called, named, lambda t: t if t is stays else t + 1)
    assert args[0] is args[1]["x"][0] is kwargs["labels"] and args[0] is not x
    assert args[1]["x"][1] is stays and args[2] is beside, "only what moves is another one"
    assert around["x"][0] is x, "the caller's is as it was"


def test_overlaps_are_those_of_what_is_changed() -> None:
    tokens, x = text(), torch.ones(4)
    args = [tokens[:, :-1], x, tokens[:, 1:], x[:2]]
    assert overlaps(args, frozenset({2}), []) == ((0, 2),)
    assert overlaps([x, x[1:2], x[3:]], frozenset({2}), []) == ((0, 1, 2),), "within the first"
    assert overlaps(args, frozenset(), []) == ()
    assert overlaps(args, frozenset({3}), []) == ((3, 1),)
    assert overlaps([x[::3], x[3:]], frozenset({1}), []) == ((0, 1),), "the last element"


AMBIENT = Ambient.current(torch.device("cpu"))
PROGRAM: Any = object()
MEMORY = torch.zeros(8)
STATISTIC, BATCH, ELSEWHERE = MEMORY[:4], torch.ones(2, 3), torch.zeros(4)
CHANGED = frozenset({0})  # the statistic


def call(position: int | None = None, value: object = None) -> list[Any]:
    """The inputs of a call, or of one with another value of one of them."""
    args: list[Any] = [STATISTIC, BATCH, 3, 0.5, True]
    if position is not None:
        args[position] = value
    return args


@pytest.mark.parametrize(
    ("args", "is_like"),
    [
        (call(1, torch.zeros(2, 3)), True),
        (call(0, MEMORY[:4]), True),  # another view of the same memory
        (call(1, torch.zeros(2, 4)), False),
        (call(1, torch.zeros(3, 2).t()), False),
        (call(1, torch.zeros(2, 3, dtype=torch.float64)), False),
        (call(1, torch.zeros(2, 3, requires_grad=True)), False),
        (call(1, nn.Parameter(torch.zeros(2, 3), requires_grad=False)), False),
        (call(1, MEMORY[2:].as_strided((2, 3), (3, 1))), False),
        (call(1, torch.from_numpy(MEMORY.numpy()[2:]).view(2, 3)), False),  # a storage of its own
        (call(0, ELSEWHERE), False),
        (call(2, 4), False),
        (call(2, 3.0), False),
        (call(3, -0.5), False),
        (call(4, 1), False),
        (call()[:-1], False),
    ],
)
def test_what_makes_a_call_another_one(args: list[Any], is_like: bool) -> None:
    last = LastCall(PROGRAM, AMBIENT, call(), CHANGED)
    assert last.is_usable and last.program is PROGRAM
    assert last.is_like(AMBIENT, args, CHANGED) is is_like
    assert not last.is_like(replace(AMBIENT, grad_enabled=False), args, CHANGED)
    assert not last.is_like(AMBIENT, args, frozenset({0, 1}))
    if args[0] is ELSEWHERE:
        in_place = LastCall(PROGRAM, AMBIENT, call(), frozenset())
        assert in_place.is_like(AMBIENT, args, frozenset()), "nothing is changed in place"


@pytest.mark.parametrize("odd", [torch.zeros(3, requires_grad=True), "text", None, (1, 2)])
def test_a_call_of_other_kinds_of_inputs_has_its_key_made_each_time(odd: Any) -> None:
    assert not LastCall(PROGRAM, AMBIENT, [*call(), odd], CHANGED).is_usable


def streamed(param: nn.Parameter) -> StreamedParameter:
    proxy = StreamedParameter(param.detach(), torch.device("cpu"))
    proxy.param = param
    return proxy


def test_the_same_parameters_make_the_same_call_and_nothing_is_kept_alive() -> None:
    param, other = (nn.Parameter(torch.zeros(2)) for _ in range(2))
    args: list[Any] = [streamed(param), torch.zeros(2, 3)]
    made = LastCall(PROGRAM, AMBIENT, args, CHANGED)
    assert made.is_usable and made.is_like(AMBIENT, args, CHANGED)
    assert not made.is_like(AMBIENT, [streamed(other), BATCH], CHANGED)
    assert not made.is_like(AMBIENT, [BATCH, args[0]], CHANGED)
    gone = [weakref.ref(arg) for arg in args]
    args.clear()
    assert [each() for each in gone] == [None, None]
    assert not made.is_like(AMBIENT, [BATCH, BATCH], CHANGED)
