"""Ctrl-C at any bytecode of a call: the model is whole, can be saved, and works.

Real signal handlers run at fewer places: Python looks for signals behind calls and at jumps back.
"""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import megacompile
from megacompile import compat
from megacompile.runtime.params import undo
from megacompile.runtime.params.proxies import StreamedParameter
from tests.inside import streamed
from tests.zoo import WIDTH, assert_steps_same, batch, differences, stack, step, twins

_OURS = str(Path(megacompile.__file__).parent)
_SWALLOWED = "__del__"  # Python ignores what it raises


class Interrupted:
    """Runs a call with a KeyboardInterrupt at its n-th bytecode in some of our files; 0: none.

    `seen` is the number of those bytecodes that it came to.

    Args:
        files: their names, without .py. None: all of ours.
    """

    def __init__(self, *files: str) -> None:
        self.files = files
        self.left = 0
        self.seen = 0
        self.place = ""

    def __call__(self, call: Callable[[], object], at: int) -> None:
        self.left, self.seen, self.place = at, 0, ""
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            call()
        finally:
            sys.settrace(before)

    def _enter(self, frame: FrameType, event: str, arg: object) -> Any:
        del event, arg
        path = Path(frame.f_code.co_filename)
        ours = str(path).startswith(_OURS) or path.name == "contextlib.py"
        if not ours or (self.files and path.stem not in self.files):
            return None
        if frame.f_code.co_name == _SWALLOWED:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._opcode

    def _opcode(self, frame: FrameType, event: str, arg: object) -> Any:
        del arg
        if event == "opcode":
            self.seen += 1
            self.left -= 1
            if self.left == 0:
                self.place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self._opcode


def state() -> tuple[Any, ...]:
    """What a call changes for its own time in this thread."""
    return (
        compat.dynamo_options(),
        compat.torch_function_state(),
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

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return found[0]


def assert_whole(model: Any, params: dict[str, nn.Parameter], place: str) -> None:
    """Its parameters are in their places, it can be saved, and nobody holds it."""
    now = dict(model.named_parameters())
    assert not any(isinstance(param, StreamedParameter) for param in now.values()), place
    assert list(now) == list(params) and all(now[k] is params[k] for k in params), place
    torch.save(model.state_dict(), io.BytesIO())
    assert is_free(streamed(model).buckets.alone), place


class Two(nn.Module):
    """As small as can be: every bytecode is a case."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        result: Tensor = (self.second(self.first(x)) - y).square().mean()
        return result


_CALL = ("streamed", "proxies", "undo", "compat", "contextlib", "guards")


def test_at_any_bytecode_of_a_call() -> None:
    torch.manual_seed(0)
    plain, model = twins(Two())
    assert_steps_same(plain, model, batch())
    params, before = dict(model.named_parameters()), state()
    interrupt = Interrupted(*_CALL)
    interrupt(lambda: model(**batch()), 0)
    count = interrupt.seen
    assert count > 500
    for at in range(1, count + 1):
        with pytest.raises(KeyboardInterrupt):
            interrupt(lambda: model(**batch()), at)
        assert_whole(model, params, interrupt.place)
        assert state() == before, interrupt.place
        if at % 7 == 0:
            model.zero_grad()
            step(model, batch())
            assert differences(plain, model) == [], interrupt.place


def test_at_any_bytecode_of_a_functional_call() -> None:
    torch.manual_seed(0)
    plain, model = twins(Two())
    assert_steps_same(plain, model, batch())
    params, before = dict(model.named_parameters()), state()
    weights = {"first.weight": params["first.weight"] * 2, "second.bias": torch.ones(WIDTH)}
    given = dict(weights)
    interrupt = Interrupted(*_CALL)

    def call() -> None:
        functional_call(model, weights, kwargs=batch())

    call()
    interrupt(call, 0)
    count = interrupt.seen
    for at in range(1, count + 1, 5):
        with pytest.raises(KeyboardInterrupt):
            interrupt(call, at)
        assert_whole(model, params, interrupt.place)
        assert state() == before, interrupt.place
        assert all(weights[name] is given[name] for name in given), interrupt.place
    model.zero_grad()
    step(model, batch())
    assert differences(plain, model) == []


def test_while_a_model_is_taken_over() -> None:
    """Parameters half in old buckets and half in new ones: the next call takes them over."""
    torch.manual_seed(0)
    plain, model = twins(Two())
    assert_steps_same(plain, model, batch())
    interrupt, before = Interrupted("streamed", "proxies", "host", "buffers"), state()

    def change() -> None:
        torch.manual_seed(at)
        weight = torch.randn(WIDTH, WIDTH)
        for each in (plain, model):
            each.first.weight = nn.Parameter(weight.clone())
            each.zero_grad()

    at = 0
    for _ in range(2):  # the first take-over says and imports what the next ones do not
        change()
        interrupt(lambda: model(**batch()), 0)
    count, stopped = interrupt.seen, 0
    for at in range(1, count + 1, 101):
        change()
        params = dict(model.named_parameters())
        try:
            interrupt(lambda: model(**batch()), at)
        except KeyboardInterrupt:
            stopped += 1
        else:  # caches have made it shorter than the first one
            assert interrupt.seen < at
        assert_whole(model, params, interrupt.place)
        assert state() == before, interrupt.place
        assert_steps_same(plain, model, batch())
    assert stopped > 5


def test_anywhere_else_in_a_step() -> None:
    """In the schedule, in what joins it to autograd, in the backward."""
    torch.manual_seed(0)
    plain, model = twins(stack()[0])
    assert_steps_same(plain, model, batch())
    params, before = dict(model.named_parameters()), state()
    interrupt = Interrupted()
    interrupt(lambda: model(**batch()), 0)
    count = interrupt.seen
    stopped = 0
    for at in range(1, count + 1, 61):
        try:
            interrupt(lambda: model(**batch()), at)
        except KeyboardInterrupt:
            stopped += 1
        else:  # it is shorter than the first; or what a weak reference calls, which raises nothing
            assert interrupt.seen < at or "device/live.py" in interrupt.place
        assert_whole(model, params, interrupt.place)
        assert state() == before, interrupt.place
    assert stopped > 5
    model.zero_grad()
    step(model, batch())
    assert differences(plain, model) == []


def test_what_two_interrupts_have_left_is_put_back() -> None:
    """The second of them where the first is made good."""
    plain, model = twins(stack()[0])
    streamed(model).buckets.proxies.swap_in([])
    assert_steps_same(plain, model, batch())
    assert not any(isinstance(param, StreamedParameter) for param in model.parameters())


# --- undoing


def test_undos_run_backwards_on_any_way_out() -> None:
    done: list[str] = []

    def body(undos: undo.Undos) -> str:
        undos += [lambda: done.append("first"), lambda: done.append("second")]
        if not fails:
            return "result"
        raise ValueError("in the body")

    for fails in (False, True):
        done.clear()
        if fails:
            with pytest.raises(ValueError, match="in the body"):
                undo.undone(body)
        else:
            assert undo.undone(body) == "result"
        assert done == ["second", "first"]


def test_an_undo_that_is_broken_off_runs_again() -> None:
    done: list[str] = []
    interrupts = [KeyboardInterrupt()]

    def broken_off() -> None:
        done.append("second")
        if interrupts:
            raise interrupts.pop()

    def body(undos: undo.Undos) -> None:
        undos += [lambda: done.append("first"), broken_off]

    with pytest.raises(KeyboardInterrupt):
        undo.undone(body)
    assert done == ["second", "second", "first"]


def test_exchange_changes_only_what_is_there() -> None:
    old, new, other = object(), object(), object()
    one, two = {"a": old, "b": other}, {"a": old}
    undo.exchange([one, one, one, two], ["a", "b", "gone", "a"], [old] * 4, [new] * 4)
    assert (one, two) == ({"a": new, "b": other}, {"a": new})


def test_a_lock_is_held_until_the_undos_run() -> None:
    lock = threading.RLock()

    def inner(undos: undo.Undos) -> None:
        undo.hold(lock, undos)
        assert not is_free(lock)

    def outer(undos: undo.Undos) -> None:
        undo.hold(lock, undos)
        undo.undone(inner)
        assert not is_free(lock)

    undo.undone(outer)
    assert is_free(lock)
