"""What is recalled of a captured graph is what running all of it finds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import sympy
import torch
from torch import Tensor, fx

from megacompile.ir.buckets import Bucket
from megacompile.ir.capture import Ambient, Capture, NumberInput, ParamInput, TensorInput
from megacompile.ir.symbols import Number, SymbolicSizes
from megacompile.ir.tensors import TensorMeta
from megacompile.passes.capture import propagate as propagating
from megacompile.passes.capture.interpret import Interpreter, Values
from megacompile.passes.capture.propagate import propagate
from megacompile.passes.capture.recall import NotRecallableError, Recalling
from tests import whole
from tests.capturing import capture as dynamo

CPU = torch.device("cpu")
X = TensorMeta((4, 6), torch.float32, (6, 1), requires_grad=True)


def traced(function: Callable[..., Any], *metas: TensorMeta) -> Capture:
    module = fx.GraphModule(torch.nn.Module(), fx.Tracer().trace(function))
    return Capture("f", module, tuple(map(TensorInput, metas)), CPU, Ambient.current(CPU))


def told(values: Values) -> dict[str, Any]:
    """All of it, storages by who has them."""
    holders: dict[int, set[str]] = defaultdict(set)
    for node, keys in values.storages.items():
        for key in keys:
            holders[key].add(node.name)
    shared = {key: tuple(sorted(names)) for key, names in holders.items()}
    return {
        "of": {n.name: value for n, value in values.of.items()},
        "storages": sorted(shared.values()),
        "mutates": {n.name: {shared[k] for k in keys} for n, keys in values.mutates.items()},
        "same": {n.name: other.name for n, other in values.same_as.items()},
        "grad": {n.name: m.name for n, m in values.requires_grad_after.items()},
    }


def run(interpreter: Interpreter) -> tuple[dict[str, Any], int]:
    """What it found, and how many calls it ran."""
    ran: list[fx.Node] = []
    base = fx.Interpreter.run_node

    def counted(self: fx.Interpreter, n: fx.Node) -> Any:
        if n.op.startswith("call_"):
            ran.append(n)
        return base(self, n)

    with mock.patch.object(fx.Interpreter, "run_node", counted):
        return told(propagating._run(interpreter)), len(ran)


def layers(x: Tensor) -> Any:
    for _ in range(5):
        y = x.transpose(0, 1).contiguous()
        x = x + (y @ x).mean() + torch.relu(x)
    return x


def views(x: Tensor) -> Any:
    found = []
    for _ in range(3):
        a, b = (x * 2).chunk(2, 1)
        x = torch.cat([b.view(4, 3), a.reshape(4, 3)], 1)
        found += [a, x.view(-1), x.expand(2, 4, 6)]
    return found


def same(x: Tensor) -> Any:
    for _ in range(3):
        x = x.contiguous().to(torch.float32).contiguous() + 1
    return x


def in_place(x: Tensor) -> Any:
    total = torch.zeros_like(x)
    for _ in range(3):
        x = x * 2
        total.add_(x)
        x.mul_(3)
    return x + total


def view_of_changed(x: Tensor) -> Any:
    """The second view is known of the first, and its base is written to."""
    out = []
    for _ in range(3):
        y = x * 1
        flat = y.view(-1)
        y.add_(1)
        out.append(flat + 1)
    return out


def modes(x: Tensor) -> Any:
    out = []
    for on in (True, False, True, False):
        torch._C._set_grad_enabled(on)
        y = torch.relu(x)
        out += [y, y.view(-1), x.view(-1)]
    torch._C._set_grad_enabled(True)
    return out


def autocast(x: Tensor) -> Any:
    out = []
    for on in (True, False, True):
        context = torch.amp.autocast_mode._enter_autocast("cpu", torch.bfloat16, on, False)
        out.append(x @ x.t())
        torch.amp.autocast_mode._exit_autocast(context)
    return out


def twice(x: Tensor) -> Any:
    a, b = x * 1, x * 2
    return [torch.add(a, b), torch.add(a, a), torch.add(b, b), torch.stack([a, a]), a.view_as(a)]


def sizes(x: Tensor) -> Any:
    out = []
    for width in (2, 3, 2):
        part = x[:, :width]
        out.append(part.reshape(part.size(0) * part.size(1)))
    return out


def constants(x: Tensor) -> Any:
    return [x + k for k in (1, 1.0, True, 2)]


def late_grad(x: Tensor) -> Any:
    """What is made of zeros requires grad after a part of it was set."""
    out = []
    for _ in range(2):
        y = torch.zeros_like(x)
        part = y[0]
        part.copy_(x[0])
        out.append(y * 2)
    return out


FUNCTIONS = [layers, views, same, in_place, view_of_changed, modes, autocast, twice, sizes]
FUNCTIONS += [constants, late_grad]


def in_graph(function: Callable[..., Any]) -> Capture:
    """Captured by Dynamo's rules where tracing would carry out what changes the mode."""
    if function not in (modes, autocast):
        return traced(function, X)
    graph = fx.Graph()
    x = graph.placeholder("x")
    out = []
    for on in (True, False, True, False):
        if function is modes:
            graph.call_function(torch._C._set_grad_enabled, (on,))
        else:
            enter = torch.amp.autocast_mode._enter_autocast
            context = graph.call_function(enter, ("cpu", torch.bfloat16, on, False))
        y = graph.call_function(torch.mm, (x, graph.call_method("t", (x,))))
        out += [y, graph.call_method("view", (y, -1)), graph.call_method("view", (x, -1))]
        if function is autocast:
            graph.call_function(torch.amp.autocast_mode._exit_autocast, (context,))
    graph.call_function(torch._C._set_grad_enabled, (True,))
    graph.output(out)
    module = fx.GraphModule(torch.nn.Module(), graph)
    return Capture("f", module, (TensorInput(X),), CPU, Ambient.current(CPU))


def plainly(values: dict[str, Any]) -> dict[str, Any]:
    """Without what an autocast region is, which is a new object in each run."""
    known = {n: v for n, v in values["of"].items() if "autocast" not in n}
    return {**values, "of": known}


def of_params(capture: Capture) -> Capture:
    """The same, with parameters for inputs."""
    metas = [item.meta for item in capture.inputs if isinstance(item, TensorInput)]
    named = [(f"p{k}", meta.empty()) for k, meta in enumerate(metas)]
    bucket = Bucket.layout(0, "layer", named)
    inputs = [ParamInput(bucket, k, meta.requires_grad) for k, meta in enumerate(metas)]
    return replace(capture, inputs=tuple(inputs))


@pytest.mark.parametrize("params", [False, True])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_what_is_recalled_is_what_runs(function: Callable[..., Any], params: bool) -> None:
    capture = of_params(in_graph(function)) if params else in_graph(function)
    plain, _ = run(Interpreter(capture, Values()))
    assert plainly(told(propagate(capture))) == plainly(plain)
    if function in (view_of_changed, late_grad):
        with pytest.raises(NotRecallableError, match="changes what a view"):
            run(Recalling(capture, Values()))
    else:
        recalled, _ = run(Recalling(capture, Values()))
        assert plainly(recalled) == plainly(plain)


def test_equal_layers_run_once() -> None:
    capture = traced(layers, X)
    _, plain = run(Interpreter(capture, Values()))
    _, recalled = run(Recalling(capture, Values()))
    assert plain == 35 and recalled == 7, "the first layer"


def test_equal_layers_of_a_function_that_is_left_whole_run_once() -> None:
    """All but what makes their configurations, of which each has two."""
    captures = [dynamo(whole.Model(layers), torch.ones(2, 4)).capture for layers in (2, 5)]
    few, many = (run(Recalling(each, Values()))[1] for each in captures)
    assert many - few == 3 * 2


def test_parameters_are_made_for_the_layers_that_run() -> None:
    graph = fx.Graph()
    x, *weights = (graph.placeholder(f"x{k}") for k in range(6))
    for weight in weights:
        x = graph.call_function(torch.relu, (graph.call_function(torch.mm, (x, weight)),))
    graph.output(x)
    square = TensorInput(TensorMeta((6, 6), torch.float32, (6, 1), requires_grad=True))
    module = fx.GraphModule(torch.nn.Module(), graph)
    capture = of_params(Capture("f", module, (square,) * 6, CPU, Ambient.current(CPU)))
    with mock.patch.object(
        TensorMeta, "empty", autospec=True, side_effect=TensorMeta.empty
    ) as made:
        _, ran = run(Recalling(capture, Values()))
    assert ran == 2 and made.call_count == 3, "what the first layer takes, and the result"


def test_data_that_fake_tensors_remember_is_not_recalled() -> None:
    graph = fx.Graph()
    made = [graph.call_function(torch.tensor, (k,)) for k in (1, 2)]
    graph.output([graph.call_method("item", (tensor,)) for tensor in made])
    module = fx.GraphModule(torch.nn.Module(), graph)
    capture = Capture("f", module, (), CPU, Ambient.current(CPU))
    items = [value for n, value in propagate(capture).of.items() if n.target == "item"]
    assert items == [1, 2]


def test_what_recall_cannot_do_is_run() -> None:
    capture = traced(layers, X)
    plain = told(propagate(capture, recall=False))
    with mock.patch.object(Recalling, "_recalled", side_effect=RuntimeError):
        assert told(propagate(capture)) == plain


def test_a_view_that_is_cut_off_is_not_like_one_without_grad() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(torch._C._set_grad_enabled, (False,))
    cut = graph.call_method("view", (x, -1))
    graph.call_function(torch._C._set_grad_enabled, (True,))
    without = graph.call_method("view", (graph.call_method("detach", (x,)), -1))
    graph.output([graph.call_function(torch.relu, (each,)) for each in (without, cut)])
    module = fx.GraphModule(torch.nn.Module(), graph)
    capture = Capture("f", module, (TensorInput(X),), CPU, Ambient.current(CPU))
    plain, _ = run(Interpreter(capture, Values()))
    recalled, _ = run(Recalling(capture, Values()))
    assert recalled == plain


ROWS = sympy.Symbol("n0", integer=True, positive=True)
Y = replace(X, symbolic=SymbolicSizes((ROWS, 6), (6, 1)))  # X, with any number of rows


def numbered(x: Tensor, n: Any) -> Any:
    """What layers do with numbers: computed, asked for, in slices and in sizes of what is made."""
    for _ in range(5):
        half = x[: x.size(0) - n // 2]
        x = torch.cat([half, x[: n // 2]]) * n + torch.arange(n)[:, None]
        x = x.reshape(-1).view(n, 6)
    return x


def with_numbers(function: Callable[..., Any]) -> Capture:
    """A capture that takes a tensor with symbols, and the symbol if the function asks for it."""
    module = fx.GraphModule(torch.nn.Module(), fx.Tracer().trace(function))
    number = NumberInput(Number(ROWS, 4))
    inputs = (TensorInput(Y), number)
    if function is not numbered:  # as Dynamo has it: every symbol is an input
        with module.graph.inserting_after(next(iter(module.graph.nodes))):
            module.graph.placeholder("n")
    return Capture("f", module, inputs, CPU, Ambient.current(CPU))


def conditions(interpreter: Interpreter) -> list[str]:
    assert interpreter.symbols is not None
    return sorted({str(guard.expr) for guard in interpreter.symbols.fakes.env.guards})


@pytest.mark.parametrize("function", [numbered, *FUNCTIONS[:5], twice, sizes, constants])
def test_with_symbols_the_same_is_found_for_the_same_sizes(function: Callable[..., Any]) -> None:
    capture = with_numbers(function)
    plain = Interpreter(capture, Values())
    expected, _ = run(plain)
    assert told(propagate(capture)) == expected
    if function is view_of_changed:
        return
    recalling = Recalling(capture, Values())
    recalled, _ = run(recalling)
    assert recalled == expected and conditions(recalling) == conditions(plain)


def test_equal_layers_with_symbols_run_once() -> None:
    _, plain = run(Interpreter(with_numbers(layers), Values()))
    _, recalled = run(Recalling(with_numbers(layers), Values()))
    assert plain == 35 and recalled == 7, "the first layer"
    _, plain = run(Interpreter(with_numbers(numbered), Values()))
    _, recalled = run(Recalling(with_numbers(numbered), Values()))
    assert recalled < plain / 2
    with mock.patch.object(propagating, "Interpreter", side_effect=AssertionError):
        propagate(with_numbers(numbered))


def test_another_number_is_another_operation() -> None:
    def several(x: Tensor, n: Any) -> Any:
        return [x.expand(k, 4, 6) for k in (n, n + 1, n * 2, n + 1)]

    module = fx.GraphModule(torch.nn.Module(), fx.Tracer().trace(several))
    inputs = (TensorInput(X), NumberInput(Number(ROWS, 4)))
    capture = Capture("f", module, inputs, CPU, Ambient.current(CPU))
    values = Values()
    propagating._run(Recalling(capture, values))
    first = [value.symbolic.shape[0] for n, value in values.of.items() if n.target == "expand"]
    assert first == [ROWS, ROWS + 1, 2 * ROWS, ROWS + 1]
