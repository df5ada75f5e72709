"""What compat takes for granted of Dynamo, tracing and Inductor."""

from __future__ import annotations

import gc
import inspect
import linecache
import sys
import types
import weakref
from collections.abc import Callable, Sequence
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import checkpoint

from megacompile import compat

aten = torch.ops.aten
VERSION = tuple(map(int, torch.__version__.split(".")[:2]))
needs_compiler = pytest.mark.skipif(not compat.has_cpp_compiler(), reason="needs a C++ compiler")


def captured(function: Callable[..., Any], *args: Any) -> list[fx.GraphModule]:
    """The graphs that Dynamo makes of a call."""
    graphs: list[fx.GraphModule] = []

    def backend(module: fx.GraphModule, examples: Sequence[Any]) -> Any:
        graphs.append(module)
        return module

    torch.compile(function, backend=backend)(*args)
    return graphs


def targets(module: fx.GraphModule) -> list[Any]:
    return [node.target for node in module.graph.nodes if node.op == "call_function"]


# --- captured graphs


def test_grad_mode_and_autocast_are_nodes() -> None:
    def f(x: Tensor) -> Tensor:
        with torch.no_grad():
            y = x * 2
        with torch.autocast("cpu"):
            return x @ y

    (module,) = captured(f, torch.ones(2, 2, requires_grad=True))
    assert targets(module).count(compat.SET_GRAD_ENABLED) == 2
    assert targets(module).count(compat.EXIT_AUTOCAST) == 1


def test_checkpoints_are_one_operator() -> None:
    def f(x: Tensor) -> Any:
        return checkpoint(torch.sin, x, use_reentrant=False, preserve_rng_state=False)

    (module,) = captured(f, torch.ones(2, requires_grad=True))
    (node,) = [n for n in module.graph.nodes if n.target is compat.CHECKPOINT]
    assert set(node.kwargs) <= compat.CHECKPOINT_OPTIONS
    assert isinstance(getattr(module, str(node.args[0])), fx.GraphModule)


def test_what_cross_entropy_calls() -> None:
    logits, ids = torch.randn(3, 5), torch.tensor([0, 2, -100])
    expected = nn.functional.cross_entropy(logits, ids, reduction="sum", label_smoothing=0.1)
    assert torch.equal(compat.CROSS_ENTROPY_LOSS(logits, ids, None, 2, -100, 0.1), expected)
    (module,) = captured(nn.functional.cross_entropy, logits, ids)
    assert targets(module) in ([compat.CROSS_ENTROPY_LOSS], [nn.functional.cross_entropy])


def test_transforms_are_found_in_graphs() -> None:
    (module,) = captured(lambda x: torch.func.vmap(torch.sin)(x), torch.ones(2, 2))
    assert compat.transforms(module) is not None
    (module,) = captured(torch.sin, torch.ones(2, 2))
    assert compat.transforms(module) is None


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.inner(x)) + 1  # type: ignore[no-any-return]


def test_nodes_know_the_modules_they_ran_in() -> None:
    model = Twice()
    around = nn.Sequential(model)
    (module,) = captured(compat.frame_of(around, "call"), torch.ones(1, 2))
    calls = [compat.module_calls(n) for n in module.graph.nodes if n.op == "call_function"]
    first, second, add = calls
    assert [i for i, _ in first] == [i for i, _ in second] == [id(model), id(model.inner)]
    assert first[0] == second[0] == add[0] and first[1] != second[1] and len(add) == 1


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
    seen: list[list[bool]] = []

    def look() -> None:
        frame: types.FrameType | None = sys._getframe(1)
        found = []
        while frame is not None:
            found.append(compat.is_of_capture(frame))
            frame = frame.f_back
        seen.append(found)

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            look()
            return func(*args, **(kwargs or {}))

    module = fx.symbolic_trace(lambda x: torch.sin(x))
    with Mode():
        module(torch.ones(1))
    assert any(seen[-1])

    def backend(module: fx.GraphModule, examples: Sequence[Any]) -> Any:
        look()
        return module

    torch.compile(torch.sin, backend=backend)(torch.ones(1))
    assert any(seen[-1])
    look()
    assert not any(seen[-1])


# --- Dynamo


def test_options_are_known_and_come_back() -> None:
    before = compat.dynamo_options()
    assert set(before) == set(compat.CALL_OPTIONS)
    compat.set_dynamo_options(compat.CALL_OPTIONS)
    assert compat.dynamo_options() == compat.CALL_OPTIONS
    compat.set_dynamo_options(before)
    assert compat.dynamo_options() == before


def test_options_are_those_of_a_thread() -> None:
    before, seen = compat.dynamo_options(), list[bool]()
    other = {name: not value for name, value in before.items()}
    compat.set_dynamo_options(other)
    try:
        thread = Thread(target=lambda: seen.append(compat.dynamo_options() == before))
        thread.start()
        thread.join()
    finally:
        compat.set_dynamo_options(before)
    assert seen == [VERSION >= (2, 12)]


def test_options_capture_anew_for_hooks() -> None:
    before = compat.dynamo_options()
    compat.set_dynamo_options(compat.CALL_OPTIONS)
    try:
        model, graphs = nn.Linear(2, 2), []

        def backend(module: fx.GraphModule, examples: Sequence[Any]) -> Any:
            graphs.append(module)
            return module

        call = torch.compile(compat.frame_of(model, "hooked"), backend=backend)
        call(torch.ones(1, 2))
        model.register_forward_hook(lambda module, args, output: output * 2)
        doubled = call(torch.ones(1, 2))
    finally:
        compat.set_dynamo_options(before)
    assert len(graphs) == 2 and torch.equal(doubled, model(torch.ones(1, 2)))


def test_a_compiled_function_is_forgotten() -> None:
    class Backend:
        def __call__(self, module: fx.GraphModule, examples: Sequence[Any]) -> Any:
            return module

    model, backend = nn.Linear(2, 2), Backend()
    frame = compat.frame_of(model, "forgotten")
    torch.compile(frame, backend=backend)(torch.ones(1, 2))
    code, gone = frame.__code__, weakref.ref(backend)
    entries = torch._C._dynamo.eval_frame._debug_get_cache_entry_list
    assert len(entries(code)) == 1
    compat.forget_compiled(code, backend)
    assert entries(code) == []
    del backend, frame
    torch._dynamo.eval_frame.cached_backends.clear()
    gc.collect()
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

    opaque = compat.opaque(double, told=lambda x: told.append(type(x)))
    assert torch.equal(opaque(torch.ones(2)), torch.full((2,), 2.0)) and told == [False]
    told.clear()
    graphs = captured(lambda x: opaque(x + 1) + 1, torch.ones(2))
    assert len(graphs) == 2 and told == [Tensor, False]
    with pytest.raises(Exception, match="a part of megacompile"):
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


# --- tracing


def test_fake_tensors_have_looks_and_no_data() -> None:
    with compat.fake_mode():
        fake = torch.ones(())
        made = torch.ones(2, 3) @ torch.ones(3, 4)
    assert made.shape == (2, 4) and isinstance(made, FakeTensor)
    for ask in (lambda: fake.item(), lambda: fake.nonzero()):
        with pytest.raises(compat.UNTRACEABLE), compat.fake_mode():
            ask()
    with pytest.raises(compat.UNTRACEABLE), compat.fake_mode():
        torch.ones(2).nonzero()


def test_changes_in_place_become_values() -> None:
    tensor = torch.ones(2)
    with compat.functional_mode():
        wrapped = compat.to_functional(tensor)
        before = compat.from_functional(wrapped)
        wrapped.add_(1)
        after = compat.from_functional(wrapped)
    assert before is not after and torch.equal(before, torch.ones(2)) and after[0] == 2
    assert torch.equal(tensor, torch.ones(2)) and compat.from_functional(3) == 3


def test_operators_with_effects_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="side effects"), compat.functional_mode():
        torch.ops.aten._print("x")


def test_a_trace_has_flat_names() -> None:
    def f(primals: Sequence[Tensor], tangents: Sequence[Tensor]) -> Any:
        return [primals[0] * primals[1], (tangents[0],)]

    ones = torch.ones(2)
    module = compat.trace(f, [ones, ones], [ones], {})
    names = [node.name for node in module.graph.find_nodes(op="placeholder")]
    assert names == ["primals_1", "primals_2", "tangents_1"]
    assert targets(module) == [aten.mul.Tensor] and len(module(ones, ones, ones)) == 2
    again = compat.flatten_signature(module)
    assert isinstance(again(ones, ones, ones), tuple)


def test_dropout_masks_are_drawn_in_the_order_of_memory() -> None:
    like = torch.empty(3, 4).t()
    table = compat.eager_decompositions()
    torch.manual_seed(0)
    expected = torch.empty_like(like).bernoulli_(0.5)
    torch.manual_seed(0)
    assert torch.equal(table[aten.bernoulli.p](like, 0.5), expected)
    torch.manual_seed(0)
    assert not torch.equal(torch.bernoulli(like, 0.5), expected)  # else the table is not needed


def test_properties_that_a_fake_is_made_from() -> None:
    seen: list[bool] = []

    class Asked(Pair):
        @property
        def grad(self) -> Any:  # type: ignore[override]
            seen.append(compat.is_described())
            return None

        @staticmethod
        def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> Any:
            made = compat.wrapper(Asked, inner["host"], inner["host"].device)
            made.host = inner["host"]
            return made

    asked = compat.wrapper(Asked, torch.ones(2), torch.device("cpu"))
    asked.host = torch.ones(2)
    assert asked.grad is None and seen == [False]
    seen.clear()
    torch.compile(lambda x: x + 1, backend="eager")(asked)
    assert True in seen


def test_sources_of_graphs_are_not_kept() -> None:
    def count() -> tuple[int, int]:
        return len(fx.graph_module._loader.eval_cache), len(linecache.cache)

    before = count()
    with compat.without_sources():
        module = fx.symbolic_trace(lambda x: torch.sin(x))
        assert count() != before
    assert count() == before and module(torch.zeros(1)) == 0
    fx.symbolic_trace(lambda x: torch.sin(x))
    assert count() != before  # else nothing need be forgotten


# --- the partitioner and Inductor


def saved(
    function: Callable[[Tensor], Tensor],
    target: Any = None,
    mark: Callable[[fx.Node], None] | None = None,
    **options: Any,
) -> list[str]:
    """What is saved for a function's backward, where the first node of `target` is marked."""

    def f(primals: Sequence[Tensor], tangents: Sequence[Tensor]) -> Any:
        leaf = primals[0].requires_grad_()
        with torch.enable_grad():
            out = function(leaf)
        return [out, *torch.autograd.grad(out, leaf, tangents[0])]

    module = compat.trace(f, [torch.ones(8)], [torch.ones(8)], {})
    if mark is not None:
        mark(module.graph.find_nodes(op="call_function", target=target)[0])
    forward, backward = compat.split_joint(module, outputs=1, static_primals=(), **options)
    (output,) = forward.graph.find_nodes(op="output")
    _, *kept = forward(torch.ones(8))
    (gradient,) = backward(*kept, torch.ones(8))
    leaf = torch.ones(8, requires_grad=True)
    function(leaf).sum().backward()
    assert leaf.grad is not None and torch.allclose(gradient, leaf.grad), "a wrong gradient"
    return [value.name for value in output.args[0][1:]]


def test_what_the_partitioner_saves() -> None:
    def exp(x: Tensor) -> Tensor:
        return x.exp().sin()

    def double(x: Tensor) -> Tensor:
        return (x * 2).sin()

    assert saved(exp) == ["exp"] and saved(exp, memory_budget=0.0) == ["primals_1"]
    assert saved(exp, aten.exp.default, compat.mark_must_recompute) == ["primals_1"]
    assert saved(double) == ["primals_1"]
    assert "primals_1" not in saved(double, aten.mul.Tensor, compat.mark_must_save)


@needs_compiler
def test_inductor_compiles_graphs() -> None:
    module = fx.symbolic_trace(lambda x: (aten.add.Tensor(aten.sin.default(x), 1),))
    with compat.fake_mode():
        fake = torch.ones(8)
    for node in module.graph.nodes:
        node.meta["val"] = fake
    code = compat.compile_inductor(module, [fake])
    (found,) = code(torch.ones(8))
    assert torch.allclose(found, torch.ones(8).sin() + 1)


def test_inductors_decompositions() -> None:
    table = compat.inductor_decompositions()
    assert aten.native_layer_norm.default in table and aten.mm.default in table
    table.clear()
    assert compat.inductor_decompositions() != {}


def test_a_compiler_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(compat.has_cpp_compiler(), bool)
    builder = inspect.getmodule(compat.has_cpp_compiler).cpp_builder  # type: ignore[union-attr]

    def fail() -> str:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(builder, "get_cpp_compiler", fail)
    assert not compat.has_cpp_compiler()
