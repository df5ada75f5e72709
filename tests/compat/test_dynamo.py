"""What compat takes for granted of Dynamo."""

from __future__ import annotations

import logging
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

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


def test_loops_in_captured_graphs_are_seen() -> None:
    def counted(x: Tensor) -> Tensor:
        loop: Any = torch._higher_order_ops.while_loop
        return loop(lambda i: i.sum() < 3, lambda i: (i + 1,), (x,))[0]

    (module,) = captured(counted, torch.zeros(1))
    assert compat.has_while_loop(module)
    (module,) = captured(torch.sin, torch.zeros(1))
    assert not compat.has_while_loop(module)


def test_a_vmap_that_fails_is_left() -> None:
    before = torch._C._functorch.maybe_current_level()
    with pytest.raises(ZeroDivisionError), compat.keeping_nesting():
        compat.VMAP_BEGIN(2, "error")
        compat.VMAP_BEGIN(2, "error")
        raise ZeroDivisionError
    assert torch._C._functorch.maybe_current_level() == before


class Pair(Tensor):
    """A wrapper subclass that Dynamo takes apart."""

    host: Tensor

    @staticmethod
    def __new__(cls, host: Tensor) -> Pair:
        made: Pair = compat.wrapper(cls, host, host.device)
        made.host = host
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["host"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> Pair:
        return Pair(inner["host"])

    __torch_function__ = compat.NO_TORCH_FUNCTION  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        plain = compat.tree_map(lambda v: v.host if isinstance(v, Pair) else v, (args, kwargs))
        return func(*plain[0], **(plain[1] or {}))


def test_guards_that_take_a_subclass_apart() -> None:
    seen: list[Any] = []

    def keep(guards: Sequence[Any]) -> list[bool]:
        seen.extend(guards)
        return [True] * len(guards)

    pair = Pair(torch.ones(2))
    torch.compile(lambda x: x + 1, backend="eager", options={"guard_filter_fn": keep})(pair)
    kinds = [g for g in seen if g.guard_type == compat.SUBCLASS_GUARD]
    names = [g for g in seen if g.name.endswith(compat.INNER_NAMES)]
    assert [g.value is pair for g in kinds] == [True]
    assert [g.value for g in names] == [["host"]]


def test_frames_of_captures() -> None:
    """Where a backend runs, and where a captured graph's code does; not elsewhere."""
    seen: list[bool] = []

    def look(*args: Any) -> Any:
        frame: types.FrameType | None = sys._getframe(1)
        found = []
        while frame is not None:
            found.append(compat.is_of_capture(frame))
            frame = frame.f_back
        seen.append(any(found))
        return args[0]

    graph = fx.Graph()
    graph.output(graph.call_function(look, (graph.placeholder("x"),)))
    fx.GraphModule(nn.Module(), graph)(torch.ones(1))
    torch.compile(torch.sin, backend=look)(torch.ones(1))
    look(0)
    assert seen == [True, True, False]


def test_properties_that_a_fake_is_made_from() -> None:
    seen: list[bool] = []

    class Asked(Pair):
        @property
        def grad(self) -> Any:  # type: ignore[override]
            seen.append(compat.is_described())
            return None

    asked = Asked(torch.ones(2))
    assert asked.grad is None and seen == [False]
    seen.clear()
    torch.compile(lambda x: x + 1, backend="eager")(asked)
    assert True in seen


def test_code_of_users() -> None:
    """A hook is a user's, and torch calls it; and whose code asks."""
    found: list[bool] = []

    def note(module: object, args: object) -> None:
        frame = sys._getframe()
        assert frame.f_back is not None
        found.extend(map(compat.is_of_user, (frame, frame.f_back)))

    def asked() -> bool:
        return compat.is_called_by_user()

    def user() -> bool:
        return asked()

    model = torch.nn.Linear(1, 1)
    model.register_forward_pre_hook(note)
    model(torch.ones(1))
    assert found == [True, False]
    assert user()
    assert not eval("asked()", {"asked": asked, "__name__": "torch.nn.modules.linear"})


def handlers() -> dict[Any, Any]:
    """What Dynamo captures functions by."""
    return torch._dynamo.variables.torch.TorchInGraphFunctionVariable._get_handlers()


def test_dropout_is_captured_with_its_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, made = [False], list[fx.GraphModule]()

    def scaled(x: torch.Tensor, rate: float) -> torch.Tensor:
        return x * rate

    monkeypatch.setitem(handlers(), nn.functional.dropout, None)  # put back behind the test
    del handlers()[nn.functional.dropout]
    stock = nn.functional.dropout
    compat.capture_symbolic_as(stock, scaled, lambda: wanted[0], of_sizes=False)
    function = torch.compile(lambda x, rate: nn.functional.dropout(x, rate), backend=keeping(made))
    for wanted[0], rates in ((False, (0.1, 0.2, 0.3)), (True, (0.4, 0.5, 0.6))):
        for rate in rates:
            function(torch.ones(2), rate)
    found = ["functional.dropout" in str(module.graph) for module in made]
    assert found == [True, True, True, False]


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
