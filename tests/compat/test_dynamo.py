"""What compat takes for granted of Dynamo."""

from __future__ import annotations

import gc
import logging
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from megacompile import compat

VERSION = tuple(map(int, torch.__version__.split(".")[:2]))
needs_compiler = pytest.mark.skipif(not compat.has_cpp_compiler(), reason="needs a C++ compiler")


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


def targets(module: fx.GraphModule) -> list[Any]:
    return [node.target for node in module.graph.nodes if node.op == "call_function"]


# --- operators that refuse their inputs


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


def test_what_an_operator_refuses_is_one_error(caplog: pytest.LogCaptureFixture) -> None:
    """Before a line ran, or in a frame that was resumed; torch's own log of it is left out within
    calls of the code that is told."""

    def product(x: Tensor, breaks: bool) -> Tensor:
        if breaks:
            torch._dynamo.graph_break()
        return x @ torch.ones(3, 3)

    source = """
def within(*args):
    try:
        compiled(*args)
    except CAPTURE_ERRORS as error:
        return is_raised_first(error)
"""
    compiled = torch.compile(product, backend="eager")
    assert compat.uncompiled(compiled) is product
    names: dict[str, Any] = {"__name__": "torch.nothing", "compiled": compiled}
    names |= {"CAPTURE_ERRORS": compat.CAPTURE_ERRORS, "is_raised_first": compat.is_raised_first}
    exec(source, names)
    within = names["within"]
    logged = "failed while attempting to run meta"
    with heard(caplog, "ERROR", "torch._subclasses.fake_tensor"):
        assert within(torch.ones(2, 2), False) is True
        assert logged in caplog.text
        caplog.clear()
        compat.quiet_within(within.__code__)
        assert within(torch.ones(2, 2), True) is False
        assert logged not in caplog.text


# --- captured graphs


def test_what_a_captured_graph_calls() -> None:
    """Modes, checkpoints, cross-entropies, transforms, vmaps and loops."""

    def modes(x: Tensor) -> Tensor:
        with torch.no_grad():
            y = x * 2
        with torch.autocast("cpu"):
            return x @ y

    def around(x: Tensor) -> Any:
        return checkpoint(torch.sin, x, use_reentrant=False, preserve_rng_state=False)

    def counted(x: Tensor) -> Tensor:
        loop: Any = torch._higher_order_ops.while_loop
        return loop(lambda i: i.sum() < 3, lambda i: (i + 1,), (x,))[0]

    (module,) = captured(modes, torch.ones(2, 2, requires_grad=True))
    assert targets(module).count(compat.SET_GRAD_ENABLED) == 2
    assert targets(module).count(compat.EXIT_AUTOCAST) == 1
    (module,) = captured(around, torch.ones(2, requires_grad=True))
    (node,) = [n for n in module.graph.nodes if n.target is compat.CHECKPOINT]
    assert set(node.kwargs) <= compat.CHECKPOINT_OPTIONS
    assert isinstance(getattr(module, str(node.args[0])), fx.GraphModule)
    assert compat.transforms(module) is None and not compat.has_while_loop(module)

    def sum_of_sines(x: Tensor) -> Tensor:
        return x.sin().sum()

    logits, ids = torch.randn(3, 5), torch.tensor([0, 2, -100])
    expected = nn.functional.cross_entropy(logits, ids, reduction="sum", label_smoothing=0.1)
    assert torch.equal(compat.CROSS_ENTROPY_LOSS(logits, ids, None, 2, -100, 0.1), expected)
    (module,) = captured(nn.functional.cross_entropy, logits, ids)
    assert targets(module) in ([compat.CROSS_ENTROPY_LOSS], [nn.functional.cross_entropy])
    (module,) = captured(torch.func.grad(sum_of_sines), torch.ones(2))
    assert compat.transforms(module) is not None
    (module,) = captured(lambda x: torch.func.vmap(torch.sin)(x), torch.ones(2, 2))
    vmap = [compat.VMAP_LOAD, compat.VMAP_BEGIN, compat.VMAP_END]
    assert [t for t in targets(module) if t in vmap] == vmap
    assert compat.transforms(module) is None
    (module,) = captured(counted, torch.zeros(1))
    assert compat.has_while_loop(module)


def test_nodes_say_in_which_modules_they_ran() -> None:
    layers = [nn.Linear(2, 2), nn.ReLU()]
    (module,) = captured(nn.Sequential(*layers), torch.ones(1, 2))
    calls = [n for n in module.graph.nodes if n.op not in ("placeholder", "output")]
    ran_in = [compat.module_calls(node) for node in calls]
    assert [keys[-1][0] for keys in ran_in] == [id(layer) for layer in layers]


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


# --- Dynamo


@contextmanager
def options(given: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Set for a while; gives those from before."""
    before = compat.dynamo_options()
    compat.set_dynamo_options(given)
    try:
        yield before
    finally:
        compat.set_dynamo_options(before)
    assert compat.dynamo_options() == before


def test_options_are_read_by_dynamo_and_come_back() -> None:
    """They are those of a thread, on newer versions."""
    config: Any = torch._dynamo.config
    plain, known, seen = config.get_config_copy(), config.get_hash(), list[bool]()
    with options(compat.CALL_OPTIONS) as before:
        assert set(before) == set(compat.CALL_OPTIONS)
        assert config.get_config_copy() == {**plain, **compat.CALL_OPTIONS}
        assert config.get_hash() != known
    assert config.get_config_copy() == plain and config.get_hash() == known
    with options({name: not value for name, value in before.items()}):
        thread = Thread(target=lambda: seen.append(compat.dynamo_options() == before))
        thread.start()
        thread.join()
    assert seen == [VERSION >= (2, 12)]


def test_a_compiled_function_is_forgotten() -> None:
    class Backend:
        def __call__(self, module: fx.GraphModule, examples: Sequence[Any]) -> Any:
            return module

    backend = Backend()
    frame = compat.frame_of(nn.Linear(2, 2), "forgotten")
    torch.compile(frame, backend=backend)(torch.ones(1, 2))
    code, gone = frame.__code__, weakref.ref(backend)
    entries = torch._C._dynamo.eval_frame._debug_get_cache_entry_list
    assert len(entries(code)) == 1
    compat.forget_compiled(code, backend)
    assert entries(code) == []
    del backend, frame
    torch._dynamo.eval_frame.cached_backends.clear()
    gc.collect(1)  # what the test has made is young
    assert gone() is None


def test_what_is_missing_is_forgotten() -> None:
    table = torch._dynamo.guards._get_closure_vars()
    assert table is torch._dynamo.guards._get_closure_vars()
    before, seen = set(table), list[str]()

    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(1, 1)

        def forward(self, x: Tensor) -> Tensor:
            return x if hasattr(self.inner, "absent") else x + 1

    def keep(guards: Sequence[Any]) -> list[bool]:
        [guard.value for guard in guards]
        seen.extend(set(table) - before)
        return [True] * len(guards)

    model = Asks()
    torch.compile(model, backend="eager", options={"guard_filter_fn": keep})(torch.ones(1))
    assert (seen != []) == (VERSION < (2, 12))  # else forget_missing is not needed
    table["tmp7"] = model
    compat.forget_missing()
    assert set(table) == before and all(value is not model for value in table.values())


def test_other_tracers_are_seen() -> None:
    seen: list[str] = []

    class Asks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(compat.tracer_around())
            return x + 1

    Asks()(torch.ones(1))
    torch.jit.trace(Asks(), (torch.ones(1),), check_trace=False)
    torch.export.export(Asks(), (torch.ones(1),), strict=False)
    assert seen[:2] == ["", "torch.jit.trace"] and set(seen[2:]) == {"torch.export"}


def test_what_is_opaque_is_not_captured() -> None:
    told: list[Any] = []

    def double(x: Tensor) -> Tensor:
        told.append(torch.compiler.is_compiling())
        return x * 2

    opaque = compat.opaque(double, on_capture=lambda x: told.append(type(x)))
    assert torch.equal(opaque(torch.ones(2)), torch.full((2,), 2.0)) and told == [False]
    told.clear()
    graphs = captured(lambda x: opaque(x + 1) + 1, torch.ones(2))
    assert len(graphs) == 2 and told == [Tensor, False]
    with pytest.raises(Exception, match="megacompile"):
        torch.compile(lambda x: opaque(x), backend="eager", fullgraph=True)(torch.ones(2))


def _scale(tensors: list[Tensor], factor: float, *, shift: float = 0.0) -> None:
    for tensor in tensors:
        tensor.mul_(factor).add_(shift)


@needs_compiler
def test_a_compiled_function_runs_without_guards() -> None:
    made = [
        compat.compiled_function(_scale, ([torch.ones(64, dtype=dtype)], 3.0), {"shift": 1.0}, {})
        for dtype in (torch.float32, torch.float64)  # each has a code of its own
    ]
    torch.compiler.reset()
    for function, dtype in zip(made, (torch.float32, torch.float64), strict=True):
        tensor = torch.ones(1000, dtype=dtype)
        function([tensor], 3.0, shift=1.0)
        assert torch.equal(tensor, torch.full_like(tensor, 4.0))
    assert made[0].__code__ is not _scale.__code__


# --- fake tensors that Dynamo makes


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


def test_whether_a_line_of_a_user_comes_before() -> None:
    source = """
def outer(between=None):
    return inner() if between is None else between()

def inner():
    return is_called_first(outer.__code__), has_begun(outer.__code__, following.__code__)

def following():
    pass
"""
    names: dict[str, Any] = {"__name__": "torch.nothing", "is_called_first": compat.is_called_first}
    names["has_begun"] = compat.has_begun
    exec(source, names)
    assert names["outer"]() == (True, False)
    assert names["outer"](lambda: names["inner"]()) == (False, True), "the lambda is a user's"
    assert names["inner"]() == (False, False), "nobody has called it"
    code = names["following"].__code__
    names["following"].__code__ = code.replace(co_name="torch_dynamo_resume_in_f_at_3")
    assert names["outer"]() == (True, True), "what runs next has lines before it"
    assert names["inner"]() == (False, False)


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
    compat.capture_dropout_as(scaled, lambda: wanted[0])
    function = torch.compile(lambda x, rate: nn.functional.dropout(x, rate), backend=keeping(made))
    for wanted[0], rates in ((False, (0.1, 0.2, 0.3)), (True, (0.4, 0.5, 0.6))):
        for rate in rates:
            function(torch.ones(2), rate)
    found = ["functional.dropout" in str(module.graph) for module in made]
    assert found == [True, True, True, False]


def test_a_function_with_sizes_is_captured_as_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a size is a symbol; and not with arguments that the other has not."""
    made: list[fx.GraphModule] = []

    def spaced(start: float, end: float, steps: int) -> torch.Tensor:
        return torch.arange(steps) * (end - start)

    monkeypatch.setitem(handlers(), torch.linspace, None)
    del handlers()[torch.linspace]
    compat.capture_sized_as(torch.linspace, spaced, lambda: True)
    for given in ({}, {"dtype": torch.float64}):
        function = torch.compile(
            lambda x, given=given: torch.linspace(0, 1, x.shape[0], **given), backend=keeping(made)
        )
        for rows in (4, 6):
            function(torch.ones(rows))
    found = ["torch.arange" in str(module.graph) for module in made]
    assert found == [False, True, False, False]


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


def test_optimizers_that_take_hooks() -> None:
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

    optimizer = torch.optim.SGD([torch.zeros(2, requires_grad=True)], lr=0.1)
    assert compat.takes_hooks(optimizer)
    assert not compat.takes_hooks(Wrapper(optimizer))


def test_captures_are_counted_and_their_reasons_logged(caplog: pytest.LogCaptureFixture) -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    compiled = torch.compile(double, backend="eager", dynamic=False)
    graphs, frames = compat.captured_so_far()
    logged = set(torch._logging._internal.log_state.artifact_names)
    with compat.logging_captures() as name, heard(caplog, "DEBUG", name):
        for n in (3, 4):
            compiled(torch.ones(n))
    assert compat.captured_so_far() == (graphs + 2, frames + 2)
    (said,) = [r.getMessage() for r in caplog.records if r.name == name]
    assert "double" in said and "size mismatch" in said
    assert torch._logging._internal.log_state.artifact_names == logged
