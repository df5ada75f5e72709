"""What compat takes for granted of Dynamo."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from megacompile import compat


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
            lock: Any = compat.compile_lock()
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
