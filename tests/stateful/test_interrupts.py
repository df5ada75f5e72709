"""Ctrl-C anywhere in a call: the model is whole, can be saved, and works.

`make thorough` takes every place where Python runs a signal handler.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from tests import inside
from tests.draws import drawn
from tests.interrupts import Places, traced
from tests.processes import in_threads
from tests.zoo import WIDTH, assert_steps_same, batch, differences, step, twins

LIBRARY: Any = torch  # its stubs do not know all of it
CALL = ("streamed", "proxies", "undo", "compat", "contextlib", "guards", "swap")


class Two(nn.Module):
    """As small as can be: every place is a case."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.second(self.first(x)) - y).square().mean()


def state() -> tuple[Any, ...]:
    """What a call changes for its own time in this thread."""
    return (
        torch._dynamo.config.recompile_limit,
        torch._dynamo.config.allow_rnn,
        LIBRARY._C._get_torch_function_state(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
    )


def is_free(lock: Any) -> bool:
    """Can another thread acquire a lock?"""
    found: list[bool] = []

    def look() -> None:
        found.append(lock.acquire(blocking=False))
        if found[0]:
            lock.release()

    in_threads([look])
    return found[0]


def interrupted(call: Callable[[], object], at: int, *files: str) -> Places:
    """A call with a Ctrl-C at a place of it, if it comes to it."""
    places = Places(at, *files)
    with contextlib.suppress(KeyboardInterrupt), traced(places):
        call()
    return places


def assert_whole(model: Any, params: dict[str, nn.Parameter], before: Any, place: str) -> None:
    """Its parameters are in their places, it can be saved, and nobody holds it."""
    now = dict(model.named_parameters())
    assert not inside.has_proxies(model), place
    assert list(now) == list(params) and all(now[k] is params[k] for k in params), place
    torch.save(model.state_dict(), io.BytesIO())
    assert is_free(inside.streamed(model).buckets.alone), place
    assert state() == before, place


@pytest.mark.parametrize("stride", drawn([3], [1]))
def test_anywhere_in_a_call(stride: int) -> None:
    """Of the model, and by `functional_call` with parameters of the caller's."""
    torch.manual_seed(0)
    plain, model = twins(Two())
    assert_steps_same(plain, model, batch())
    params, before = dict(model.named_parameters()), state()
    weights = {"first.weight": params["first.weight"] * 2, "second.bias": torch.ones(WIDTH)}
    given = dict(weights)
    calls: list[Callable[[], object]] = [
        lambda: model(**batch()),
        lambda: functional_call(model, weights, kwargs=batch()),
    ]
    for call in calls:
        call()
        count = interrupted(call, 0, *CALL).passed
        assert count > 200
        for at in range(1, count + 1, stride):
            places = interrupted(call, at, *CALL)
            assert places.stopped
            assert_whole(model, params, before, places.stopped)
            assert all(weights[name] is given[name] for name in given), places.stopped
            if at % (7 * stride) == 1:
                model.zero_grad()
                step(model, batch())
                assert differences(plain, model) == [], places.stopped


def test_while_a_model_is_taken_over() -> None:
    """Parameters half in old buckets and half in new ones: the next call takes them over."""
    torch.manual_seed(0)
    plain, model = twins(Two())
    assert_steps_same(plain, model, batch())
    files, before = ("streamed", "proxies", "host", "buffers", "swap"), state()

    def change(seed: int) -> None:
        torch.manual_seed(seed)
        weight = torch.randn(WIDTH, WIDTH)
        for each in (plain, model):
            each.first.weight = nn.Parameter(weight.clone())
            each.zero_grad()

    for _ in range(2):  # the first take-over says and imports what the next ones do not
        change(0)
        count = interrupted(lambda: model(**batch()), 0, *files).passed
    stopped = 0
    for at in range(1, count + 1, count // 15):
        change(at)
        params = dict(model.named_parameters())
        places = interrupted(lambda: model(**batch()), at, *files)
        stopped += bool(places.stopped)
        assert_whole(model, params, before, places.stopped)
        assert_steps_same(plain, model, batch())
    assert stopped > 10


def test_what_two_interrupts_have_left_is_put_back() -> None:
    """The second of them where the first is made good."""
    torch.manual_seed(0)
    plain, model = twins(Two())
    inside.streamed(model).buckets.proxies.swap_in([])
    assert_steps_same(plain, model, batch())
    assert not inside.has_proxies(model)
