"""Floats that change from call to call, for Inductor, which accepts only tensors and ints.

    before: x, t (a float) -> h = t / 2; y = x * h
    after:  numbers:   x, t -> h = t / 2                   in Python, before each call
            the graph: x, h (a 0-d tensor on the host) -> y = mul_of_other(x, h)

The same applies to bools (`(t > 0.5) * x`) and ints computed from floats. An operator that takes
such a number becomes one of ours that reads the tensor: a 0-d tensor in its place would promote
dtypes differently. An int computed from ints through a float (half of a size) is passed as an int.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode

from megacompile import compat
from megacompile.ir.tensors import TensorMeta, symbols_in
from megacompile.passes.edit import extracted, value_of

_ASK_THE_NUMBER: dict[str, Callable[..., torch.Tensor]] = {
    "pow": torch.pow,
    "__pow__": torch.pow,
    "__rpow__": torch.pow,
    "lerp": torch.lerp,
}
_WIDEST = {torch.SymFloat: torch.float64, torch.SymInt: torch.int64, torch.SymBool: torch.bool}
_COMPUTED_IN = {torch.bfloat16: torch.float32, torch.float16: torch.float32}


def check_floats(joint: fx.GraphModule) -> None:
    """Raise if a traced graph uses a float in a way that `compiled` does not support.

    Raises:
        UntraceableSymbols: a float determines a size, or an operator needs it in a list or as an
            int.
    """
    for node in joint.graph.nodes:
        sizes = [v for v in compat.leaves(value_of(node)) if isinstance(v, torch.Tensor)]
        if any(_of_floats(TensorMeta.of(size).symbolic) for size in sizes):
            raise compat.UntraceableSymbols("a changing float determines a size")
        if any(map(_comes_as_tensor, _numbers_taken(node))) and _by_tensors(node) is None:
            raise compat.UntraceableSymbols(f"{node.target} takes a changing float")


class PowersOfTensors(TorchFunctionMode):
    """Trace powers and `lerp` with a changing float like those with a tensor.

    Their backward reads the number, so the trace would be valid for that number only.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        symbolic = any(isinstance(arg, torch.SymFloat) for arg in args)
        if kwargs or not symbolic or name not in _ASK_THE_NUMBER:
            return func(*args, **(kwargs or {}))
        tensor = next(arg for arg in args if isinstance(arg, torch.Tensor))
        dtype = torch.result_type(tensor, 1.0)
        compute = _COMPUTED_IN.get(dtype, dtype)
        scalar: Any = functools.partial(torch.scalar_tensor, dtype=compute, device=tensor.device)
        operands = [
            scalar(arg) if isinstance(arg, torch.SymFloat) else arg.to(compute)
            for arg in (reversed(args) if name == "__rpow__" else args)
        ]
        made: torch.Tensor = _ASK_THE_NUMBER[name](*operands)
        return made.to(dtype)


def compiled(module: fx.GraphModule) -> Callable[..., Any]:
    """The code of a traced graph, by Inductor."""
    graph, values, wrapped = prepared(module)
    return wrapped(compat.compile_inductor(graph, values))


def prepared(
    module: fx.GraphModule,
) -> tuple[fx.GraphModule, Sequence[Any], Callable[[Callable[..., Any]], Callable[..., Any]]]:
    """The module that Inductor compiles for a traced graph, its fake inputs, and a function that
    wraps Inductor's code into the graph's."""
    inputs = module.graph.find_nodes(op="placeholder")
    traced = compat.fakes_in(map(value_of, inputs))
    if traced is None or not (traced.has_floats or any(map(_comes_as_tensor, module.graph.nodes))):
        return module, list(map(value_of, inputs)), lambda function: function
    kept = [k for k, node in enumerate(inputs) if not _comes_as_tensor(node)]
    graph, read = _taking_tensors(module.graph)
    numbers: Callable[..., Sequence[float]] = fx.GraphModule(
        {}, extracted(module.graph, read)
    ).forward
    dtypes = [_WIDEST[type(value_of(n))] if _comes_as_tensor(n) else None for n in read]
    fakes = traced.without_floats()  # torch reads existing ones
    with fakes:
        values = [_in(fakes, value_of(inputs[k])) for k in kept]
        values += [
            torch.empty((), dtype=dtype, device="cpu") if dtype else _in(fakes, value_of(node))
            for node, dtype in zip(read, dtypes, strict=True)
        ]

    def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
        traced.require_of(fakes)

        def run(*given: Any) -> Any:
            pairs = zip(numbers(*given), dtypes, strict=True)
            made = (
                torch.tensor(n, dtype=dtype, device="cpu") if dtype else n for n, dtype in pairs
            )
            return function(*(given[k] for k in kept), *made)

        return run

    return fx.GraphModule(module, graph), values, wrapped


def _in(fakes: compat.SymbolicFakes, value: Any) -> Any:
    """The same symbolic value, in this fake mode."""
    if isinstance(value, torch.Tensor):
        return replace(TensorMeta.of(value), requires_grad=False).empty()
    return fakes.number(compat.expression_of(value)[1])


def _numbers_taken(node: fx.Node) -> Iterable[fx.Node]:
    """The number operands of a node that computes tensors."""
    if node.op != "call_function" or compat.is_number(value_of(node)):
        return []
    return [source for source in node.all_input_nodes if compat.is_number(value_of(source))]


def _comes_as_tensor(node: fx.Node) -> bool:
    """True if a node's value is a float, a bool, or an int computed from floats."""
    value = value_of(node)
    if isinstance(value, torch.SymInt):
        return _of_floats(compat.expression_of(value)[1])
    return isinstance(value, (torch.SymFloat, torch.SymBool))


def _of_floats(expression: Any) -> bool:
    return any(not symbol.is_integer for symbol in symbols_in(expression))


def _by_tensors(node: fx.Node) -> Any:
    """The overload of a node's operator that takes tensors for such numbers; None if none does."""
    names = []
    for name, value in compat.arguments_of(node):
        if isinstance(value, fx.Node) and _comes_as_tensor(value):
            names.append(name)
        elif any(isinstance(v, fx.Node) and _comes_as_tensor(v) for v in compat.leaves(value)):
            return None
    return compat.taking_tensors(node.target, tuple(names)) if names else None


def _taking_tensors(old: fx.Graph) -> tuple[fx.Graph, list[fx.Node]]:
    """A copy of a graph with new inputs, after the others, for its floats and the values computed
    from them, and the nodes of these values."""
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    read: list[fx.Node] = []
    last: fx.Node | None = None  # input

    def taken(node: fx.Node) -> fx.Node:
        nonlocal last
        if node not in new:
            assert last is not None
            with graph.inserting_after(last):
                last = new[node] = graph.placeholder(f"number_{len(read)}")
            read.append(node)
        return new[node]

    for node in old.nodes:
        if any(map(_comes_as_tensor, _numbers_taken(node))):
            given = [fx.map_arg(value, taken) for _, value in compat.arguments_of(node)]
            new[node] = graph.call_function(_by_tensors(node), tuple(given))
        elif _comes_as_tensor(node):
            continue
        elif compat.is_number(value_of(node)) and not new.keys() >= set(node.all_input_nodes):
            taken(node)
        else:
            new[node] = graph.node_copy(node, new.__getitem__)
            new[node].meta.clear()  # set by its tracing mode and the partitioner
            last = new[node] if node.op == "placeholder" else last
    return graph, read
