"""What compat takes for granted of Dynamo: frames and why it captured nothing, its containers.

As `compat` finds them; containers, as Dynamo traces them, beside plain Python. And the caches of
the allocator.
"""

from __future__ import annotations

import logging
import traceback
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Thread
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, fx, nn

from megacompile import compat
from tests.zoo import equal


def eager(module: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
    del examples
    return module.forward


def test_what_cannot_be_traced_is_skipped_behind_lines_that_have_run() -> None:
    """Within calls of the code that is named; the third time in a row, for good."""

    def product(x: Tensor, width: int) -> Tensor:
        torch._dynamo.graph_break()
        ran.append(width)
        return x @ torch.ones(width, width)

    names: dict[str, Any] = {"__name__": "torch.nothing"}
    exec("def within(function, *args):\n    return function(*args)", names)
    within, ran, x = names["within"], list[int](), torch.ones(2, 2)
    traced = mock.Mock(side_effect=eager)
    compiled = torch.compile(product, backend=traced)
    with pytest.raises(compat.CAPTURE_ERRORS) as raised:
        within(compiled, x, 3)
    found: compat.Uncaptured = compat.untraced_by(raised.value)
    assert found.place == f"{__file__}:{product.__code__.co_firstlineno + 3} (product)"
    assert found.why.startswith("<built-in function matmul>: RuntimeError(")
    unknown = compat.untraced_by(AssertionError("no line"))
    assert (unknown.place, unknown.why) == ("it", "no line")
    for _ in range(2):  # once
        compat.skip_untraced(within.__code__)
    with pytest.raises(compat.CAPTURE_ERRORS):
        compiled(x, 3)
    assert not ran

    before, wrong = compat.uncaptured(), 0
    for width in (3, 2, 3, 3, 3, 2):
        begun = traced.call_count
        if width == 2:
            assert torch.equal(within(compiled, x, 2), torch.full((2, 2), 2.0))
            continue
        wrong += 1
        with pytest.raises(RuntimeError, match="cannot be multiplied") as caught:
            within(compiled, x, 3)
        assert not isinstance(caught.value, compat.CAPTURE_ERRORS)
        codes = [frame.f_code for frame, _ in traceback.walk_tb(caught.value.__traceback__)]
        resumed = next(c for c in codes if c.co_name.startswith("torch_dynamo_resume"))
        assert compat.users_name(resumed.co_name) == product.__name__
        assert compat.graph_breaks()[0].place.endswith(" (product)")
        assert compat.uncaptured() >= before + wrong
    assert traced.call_count == begun, "the last one was not tried"
    assert ran == [3, 2, 3, 3, 3, 2]


def test_why_it_was_captured_again() -> None:
    def grows(x: Tensor, name: str) -> Tensor:
        return x + len(name)

    compiled = torch.compile(grows, backend=eager)
    for i in range(12):
        compiled(torch.ones(2), f"case {i}")
        why = compat.why_captured_again(compiled)
        assert (f"case {min(i, 8) - 1}" in why) if i else why == "", "until Dynamo gives up"
        assert "#" not in why and "\n" not in why


@pytest.mark.gpu
def test_page_locked_memory_is_given_back() -> None:
    torch.cuda.init()  # there are no figures before
    compat.release_pinned_cache(torch.device("cuda"))
    held = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    torch.empty(64 * 2**20, dtype=torch.uint8, pin_memory=True)
    assert torch.cuda.host_memory_stats()["allocated_bytes.current"] > held
    compat.release_pinned_cache(torch.device("cuda"))
    assert torch.cuda.host_memory_stats()["allocated_bytes.current"] == held


@pytest.mark.gpu
def test_caches_are_given_back() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    held = torch.cuda.memory_allocated()  # by the tests before
    a = torch.ones(2048, 2048, device=device)
    (a @ a).sum().item()  # makes a workspace
    del a
    reserved = torch.cuda.memory_reserved()
    compat.release_device_cache(device)
    assert torch.cuda.memory_allocated() <= held
    assert torch.cuda.memory_reserved() <= reserved - 16 * 2**20  # that of `a` at least


class Keeps(nn.Module):
    """Has a full deque, and an ordered dict; `change` uses them in each call."""

    def __init__(self, change: Callable[[Any, Tensor], Tensor], longest: int | None) -> None:
        super().__init__()
        self.change = change
        self.last: deque[Tensor] = deque([torch.ones(2), torch.ones(2) * 2], longest)
        self.named = OrderedDict((name, torch.ones(2) * (i + 1)) for i, name in enumerate("abc"))

    def forward(self, x: Tensor) -> Tensor:
        return self.change(self, x)


def weighted(values: Any) -> Tensor:
    """Depends on the order."""
    found = torch.zeros(2)
    for i, value in enumerate(values):
        found = found + value * (i + 1)
    return found


def pop_and_append(m: Any, x: Tensor) -> Tensor:
    first = m.last.popleft()
    m.last.append(x)
    m.last.append(x + first)
    return weighted(m.last)


def copied(m: Any, x: Tensor) -> Tensor:
    copy = m.last.copy()
    copy.append(x)
    return weighted(copy)


def in_turn(m: Any, x: Tensor) -> Tensor:
    name, value = m.named.popitem(last=False)
    m.named[name] = value
    return x * value


def cache(m: Any, x: Tensor) -> Tensor:
    m.named["new"] = x
    m.named.move_to_end("new", last=False)
    while len(m.named) > 2:
        m.named.popitem()
    return weighted(m.named.values())


CHANGES: dict[str, Callable[[Any, Tensor], Any]] = {
    "append": lambda m, x: (m.last.append(x), weighted(m.last))[1],
    "extendleft": lambda m, x: (m.last.extendleft([x, x + 1]), weighted(m.last))[1],
    "append, unseen": lambda m, x: (m.last.append(x), x * 2)[1],
    "pop and append": pop_and_append,
    "a copy": copied,
    "the longest": lambda m, x: x * m.last.maxlen,
    "in turn": in_turn,
    "a cache": cache,
}


@pytest.mark.parametrize("change", CHANGES)
def test_containers_are_those_of_python(change: str) -> None:
    """A deque of another length is another case."""
    for _ in range(2):  # once
        compat.follow_containers()
    torch._dynamo.reset()
    for longest in (2, 3, None) if change == "append" else (2,):
        plain, traced = (Keeps(CHANGES[change], longest) for _ in range(2))
        compiled = torch.compile(traced, backend="eager", fullgraph=True)
        for i in range(4):
            x = torch.full((2,), float(i))
            assert equal(plain(x), compiled(x)), i
            assert len(plain.last) == len(traced.last) and all(map(equal, plain.last, traced.last))
            assert list(plain.named) == list(traced.named)
            assert all(map(equal, plain.named.values(), traced.named.values()))
        assert traced.last.maxlen == longest


def keeping(graphs: list[fx.GraphModule]) -> Callable[..., Any]:
    """A backend that notes what it is given, and runs it as it is."""

    def backend(module: fx.GraphModule, examples: Sequence[Any]) -> Any:
        graphs.append(module)
        return module

    return backend


def captured(function: Callable[..., Any], *args: Any) -> list[fx.GraphModule]:
    """The graphs that Dynamo makes of a call."""
    graphs: list[fx.GraphModule] = []
    torch.compile(function, backend=keeping(graphs))(*args)
    return graphs


@contextmanager
def heard(caplog: pytest.LogCaptureFixture, level: str, name: str) -> Iterator[None]:
    """For its duration a logger that does not propagate is captured, by any pytest."""
    logger = logging.getLogger(name)
    heard_by: logging.Logger | None = logger
    while heard_by is not None and caplog.handler not in heard_by.handlers:
        heard_by = heard_by.parent if heard_by.propagate else None
    if heard_by is None:
        logger.addHandler(caplog.handler)
    try:
        with caplog.at_level(level, name):
            yield
    finally:
        if heard_by is None:
            logger.removeHandler(caplog.handler)


def test_a_vmap_that_fails_is_left() -> None:
    before = torch._C._functorch.maybe_current_level()
    with pytest.raises(ZeroDivisionError), compat.keeping_nesting():
        compat.VMAP_BEGIN(2, "error")
        compat.VMAP_BEGIN(2, "error")
        raise ZeroDivisionError
    assert torch._C._functorch.maybe_current_level() == before


def test_dynamo_compiles_under_the_lock() -> None:
    """Another thread cannot take it while a backend runs. No garbage is collected, if told so."""
    taken: list[bool] = []

    def backend(module: torch.fx.GraphModule, examples: Any) -> Any:
        def attempt() -> None:
            lock: Any = compat.compile_lock
            taken.append(lock.acquire(blocking=False))
            if taken[-1]:
                lock.release()

        thread = Thread(target=attempt)
        thread.start()
        thread.join()
        return module.forward

    before = torch._dynamo.config.run_gc_after_compile
    with compat.without_collecting():
        assert torch._dynamo.config.run_gc_after_compile is False
        torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    assert taken == [False] and torch._dynamo.config.run_gc_after_compile is before


@compat.within_callers
def _twice(x: Tensor) -> Tensor:
    return _once(_once(x))


def _once(x: Tensor) -> Tensor:
    return x.sin()


def test_a_function_within_its_callers_has_no_frame_of_its_own() -> None:
    torch.compiler.reset()
    (graph,) = captured(lambda x: _twice(x) + 1, torch.ones(2))
    assert [n.target for n in graph.graph.nodes if n.op == "call_method"] == ["sin", "sin"]


def test_captures_are_counted_and_their_reasons_logged(caplog: pytest.LogCaptureFixture) -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    compiled = torch.compile(double, backend="eager", dynamic=False)
    graphs, frames = compat.captured_so_far()
    name = compat.log_recompiles()
    with heard(caplog, "DEBUG", name):
        for n in (3, 4):
            compiled(torch.ones(n))
    assert compat.captured_so_far() == (graphs + 2, frames + 2)
    (said,) = [r.getMessage() for r in caplog.records if r.name == name]
    assert "double" in said and "size mismatch" in said
