"""A call of a captured graph that is like the one before."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from megacompile.ir.capture import Ambient
from megacompile.runtime.model.last_call import LastCall
from megacompile.runtime.params.proxies import StreamedParameter

AMBIENT = Ambient.current(torch.device("cpu"))
PROGRAM: Any = object()
MEMORY = torch.zeros(8)
STATISTIC, BATCH, ELSEWHERE = MEMORY[:4], torch.ones(2, 3), torch.zeros(4)
CHANGED = frozenset({0})  # the statistic


def call() -> list[Any]:
    return [STATISTIC, BATCH, 3, 0.5, True]


def last(changed: frozenset[int] = CHANGED) -> LastCall:
    made = LastCall(PROGRAM, AMBIENT, call(), changed)
    assert made.is_usable and made.program is PROGRAM
    return made


def put(position: int, value: object) -> Callable[[list[Any]], None]:
    def change(args: list[Any]) -> None:
        args[position] = value

    return change


@pytest.mark.parametrize(
    "change",
    [put(1, torch.zeros(2, 3)), put(2, 3), put(0, MEMORY[:4])],
    ids=["another batch", "the same number", "another view of the same memory"],
)
def test_a_call_is_like_the_last_one(change: Callable[[list[Any]], None]) -> None:
    args = call()
    change(args)
    assert last().is_like(AMBIENT, args, CHANGED)


@pytest.mark.parametrize(
    "change",
    [
        put(1, torch.zeros(2, 4)),
        put(1, torch.zeros(3, 2).t()),
        put(1, torch.zeros(2, 3, dtype=torch.float64)),
        put(1, torch.zeros(2, 3, requires_grad=True)),
        put(1, nn.Parameter(torch.zeros(2, 3), requires_grad=False)),
        put(1, MEMORY[2:].as_strided((2, 3), (3, 1))),
        put(0, ELSEWHERE),
        put(2, 4),
        put(2, 3.0),
        put(3, -0.5),
        put(4, 1),
        list.pop,
    ],
)
def test_a_call_is_another_one(change: Callable[[list[Any]], None]) -> None:
    args = call()
    change(args)
    assert not last().is_like(AMBIENT, args, CHANGED)


def test_what_is_around_a_call_and_what_it_changes_count() -> None:
    assert not last().is_like(replace(AMBIENT, grad_enabled=False), call(), CHANGED)
    assert not last().is_like(AMBIENT, call(), frozenset({0, 1}))
    moved = call()
    moved[0] = ELSEWHERE
    assert last(frozenset()).is_like(AMBIENT, moved, frozenset()), "nothing is changed in place"


@pytest.mark.parametrize("odd", [torch.zeros(3, requires_grad=True), "text", None, (1, 2)])
def test_a_call_of_other_kinds_of_inputs_has_its_key_made_each_time(odd: Any) -> None:
    assert not LastCall(PROGRAM, AMBIENT, [*call(), odd], CHANGED).is_usable


def streamed(param: nn.Parameter) -> StreamedParameter:
    proxy = StreamedParameter(param.detach(), torch.device("cpu"))
    proxy.param = param
    return proxy


def test_the_same_parameters_make_the_same_call() -> None:
    param, other = (nn.Parameter(torch.zeros(2)) for _ in range(2))
    proxy = streamed(param)
    made = LastCall(PROGRAM, AMBIENT, [proxy, BATCH], CHANGED)
    assert made.is_usable and made.is_like(AMBIENT, [proxy, BATCH], CHANGED)
    assert not made.is_like(AMBIENT, [streamed(other), BATCH], CHANGED)
    assert not made.is_like(AMBIENT, [BATCH, proxy], CHANGED)
    param.requires_grad_(False)
    assert not made.is_like(AMBIENT, [proxy, BATCH], CHANGED)


def test_nothing_is_kept_alive() -> None:
    args: list[Any] = [streamed(nn.Parameter(torch.zeros(2))), torch.zeros(2, 3)]
    gone = [weakref.ref(arg) for arg in args]
    made = LastCall(PROGRAM, AMBIENT, args, CHANGED)
    args.clear()
    assert [each() for each in gone] == [None, None]
    assert not made.is_like(AMBIENT, [BATCH, BATCH], CHANGED)
