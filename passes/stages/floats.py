"""Floats that change from call to call, for Inductor, which accepts only tensors and ints.

    before: x, t (a float) -> h = t / 2; y = x * h
    after:  numbers:   x, t -> h = t / 2                   in Python, before each call
            the graph: x, h (a 0-d tensor) -> y = x * h

The same applies to bools (`(t > 0.5) * x`) and ints computed from floats. An int computed from ints
through a float (half of a size) is passed as an int.

[Note: as a number promotes] A 0-d tensor may determine a dtype where a Python float does not: with
ints, or with another 0-d tensor. So an operator's operands are cast to its computation dtype for a
number, and its result to its result dtype for a number. An operator without a tensor overload for
the number is called by a wrapper that reads the tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.overrides import TorchFunctionMode

from megacompile import compat
from megacompile.ir.symbols import symbols_in
from megacompile.ir.tensors import TensorMeta
from megacompile.passes.edit import extracted, value_of

aten = torch.ops.aten

_SUMS = {
    aten.add.Tensor: aten.add.Tensor,
    aten.add.Scalar: aten.add.Tensor,
    aten.sub.Tensor: aten.sub.Tensor,
    aten.sub.Scalar: aten.sub.Tensor,
}
_ARITHMETIC = {
    aten.mul.Tensor: aten.mul.Tensor,
    aten.mul.Scalar: aten.mul.Tensor,
    aten.div.Tensor: aten.div.Tensor,
    aten.div.Scalar: aten.div.Tensor,
    aten.div.Tensor_mode: aten.div.Tensor_mode,
    aten.div.Scalar_mode: aten.div.Tensor_mode,
    aten.pow.Tensor_Scalar: aten.pow.Tensor_Tensor,
    aten.pow.Scalar: aten.pow.Tensor_Tensor,
    aten.remainder.Scalar: aten.remainder.Tensor,
    aten.remainder.Scalar_Tensor: aten.remainder.Tensor,
    aten.fmod.Scalar: aten.fmod.Tensor,
    aten.clamp_min.default: aten.maximum.default,
    aten.clamp_max.default: aten.minimum.default,
    aten.copysign.Scalar: aten.copysign.Tensor,
}
_COMPARISONS = {
    getattr(aten, name).Scalar: getattr(aten, name).Tensor
    for name in ("eq", "ne", "lt", "le", "gt", "ge")
}
_FILLS = (aten.full.default, aten.scalar_tensor.default)

_ASK_THE_NUMBER: dict[str, Callable[..., torch.Tensor]] = {
    "pow": torch.pow,
    "__pow__": torch.pow,
    "__rpow__": torch.pow,
    "lerp": torch.lerp,
}
_WIDEST = {torch.SymFloat: torch.float64, torch.SymInt: torch.int64, torch.SymBool: torch.bool}
_LIKE = {torch.SymFloat: 1.0, torch.SymInt: 1, torch.SymBool: True}
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
        if any(map(_comes_as_tensor, _numbers_taken(node))) and not _is_known(node):
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
        compute = _computed_in(dtype)
        scalar: Any = functools.partial(torch.scalar_tensor, dtype=compute, device=tensor.device)
        operands = [
            scalar(arg) if isinstance(arg, torch.SymFloat) else arg.to(compute)
            for arg in (reversed(args) if name == "__rpow__" else args)
        ]
        made: torch.Tensor = _ASK_THE_NUMBER[name](*operands)
        return made.to(dtype)


class Prepared(NamedTuple):
    """The module that Inductor compiles for a traced graph, and its wrapper code."""

    module: fx.GraphModule
    values: Sequence[Any]  # its inputs, fake
    wrapped: Callable[
        [Callable[..., Any]], Callable[..., Any]
    ]  # Inductor's code -> the graph's code


def compiled(module: fx.GraphModule) -> Callable[..., Any]:
    """The code of a traced graph, by Inductor."""
    graph, values, wrapped = prepared(module)
    return wrapped(compat.compile_inductor(graph, values))


def prepared(module: fx.GraphModule) -> Prepared:
    """The module that `compiled` compiles."""
    inputs = module.graph.find_nodes(op="placeholder")
    traced = compat.fakes_in(map(value_of, inputs))
    if traced is None or not (traced.has_floats or any(map(_comes_as_tensor, module.graph.nodes))):
        return Prepared(module, list(map(value_of, inputs)), lambda function: function)
    kept = [k for k, node in enumerate(inputs) if not _comes_as_tensor(node)]
    taking = _Taking(module.graph)
    part = extracted(module.graph, [node for node, _ in taking.numbers])
    numbers: Callable[..., Sequence[float]] = fx.GraphModule({}, part).forward
    dtypes = [dtype for _, dtype in taking.numbers]
    fakes = traced.without_floats()  # torch reads existing ones
    with fakes:
        values = [_in(fakes, value_of(inputs[k])) for k in kept]
        values += [
            torch.empty((), dtype=dtype, device="cpu") if dtype else _in(fakes, value_of(node))
            for node, dtype in taking.numbers
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

    return Prepared(fx.GraphModule(module, taking.graph), values, wrapped)


def _in(fakes: compat.SymbolicFakes, value: Any) -> Any:
    """A symbolic value, in another fake mode."""
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


def _is_known(node: fx.Node) -> bool:
    known = (*_SUMS, *_ARITHMETIC, *_COMPARISONS, *_FILLS)
    return node.target in known or _by_tensors(node) is not None


def _by_tensors(node: fx.Node) -> Any:
    """The overload that takes tensors in place of such numbers, or None."""
    names = []
    for name, value in compat.arguments_of(node):
        if isinstance(value, fx.Node) and _comes_as_tensor(value):
            names.append(name)
        elif any(isinstance(v, fx.Node) and _comes_as_tensor(v) for v in compat.leaves(value)):
            return None
    return compat.taking_tensors(node.target, tuple(names)) if names else None


class _Taking:
    """Copies a graph with tensors for its float inputs and the values computed from them."""

    def __init__(self, old: fx.Graph) -> None:
        self.graph = fx.Graph()
        self.new: dict[fx.Node, fx.Node] = {}
        # its last inputs: a number, and the dtype of its tensor
        self.numbers: dict[tuple[fx.Node, torch.dtype | None], fx.Node] = {}
        for node in old.nodes:
            if any(map(_comes_as_tensor, _numbers_taken(node))):
                self.new[node] = self._with_tensors(node)
            elif _comes_as_tensor(node):
                continue
            elif compat.is_number(value_of(node)) and not self.new.keys() >= set(
                node.all_input_nodes
            ):
                self.new[node] = self._number(node, None)
            else:
                self._copy(node)
                if node.op == "placeholder":
                    self.last = self.new[node]

    def _copy(self, node: fx.Node) -> None:
        self.new[node] = self.graph.node_copy(node, self.new.__getitem__)
        self.new[node].meta.clear()  # set by its tracing mode and the partitioner

    def _with_tensors(self, node: fx.Node) -> fx.Node:
        if node.target in _FILLS:
            return self._filled(node)
        if node.target in _COMPARISONS:
            return self._compared(node)
        if node.target in _SUMS:
            return self._summed(node)
        if node.target in _ARITHMETIC:
            compute = _computed_in(value_of(node).dtype)
            operands = [self._operand(arg, compute) for arg in node.args]
            made = self._call(_target(_ARITHMETIC, node), *operands, **node.kwargs)
            return self._cast(made, compute, value_of(node).dtype)
        given = [fx.map_arg(value, self._as_it_is) for _, value in compat.arguments_of(node)]
        return self._call(_by_tensors(node), *given)

    def _summed(self, node: fx.Node) -> fx.Node:
        compute = _computed_in(value_of(node).dtype)
        left, right = (self._operand(arg, compute) for arg in node.args[:2])
        alpha = self._operand(
            node.args[2] if len(node.args) > 2 else node.kwargs.get("alpha", 1), compute
        )
        if alpha != 1:
            right = self._call(aten.mul.Tensor, right, alpha)
        made = self._call(_target(_SUMS, node), left, right)
        return self._cast(made, compute, value_of(node).dtype)

    def _compared(self, node: fx.Node) -> fx.Node:
        """Round a number to the dtype of the compared tensor; compared with a float, ints become
        floats."""
        compared: Any = node.args[0]
        number: Any = node.args[1]
        common = torch.result_type(value_of(compared), _LIKE[type(value_of(number))])
        operands = [self._operand(arg, common) for arg in node.args]
        return self._call(_target(_COMPARISONS, node), *operands)

    def _filled(self, node: fx.Node) -> fx.Node:
        """`torch.full` on the device: a host tensor broadcasts only with a device tensor."""
        value = value_of(node)
        number: Any
        size, number = node.args if node.target is aten.full.default else ((), node.args[0])
        compute = value.dtype
        if isinstance(value_of(number), torch.SymFloat):
            compute = torch.promote_types(_computed_in(value.dtype), torch.float32)
        sizes = fx.map_arg(size, self.new.__getitem__)
        ones = self._call(aten.full.default, sizes, 1, dtype=compute, device=value.device)
        made = self._call(aten.mul.Tensor, ones, self._operand(number, compute))
        return self._cast(made, compute, value.dtype)

    def _operand(self, old: Any, dtype: torch.dtype) -> Any:
        if not isinstance(old, fx.Node):
            return old
        if _comes_as_tensor(old):
            return self._number(old, dtype)
        if compat.is_number(value_of(old)):
            return self.new[old]
        return self._cast(self.new[old], value_of(old).dtype, dtype)

    def _as_it_is(self, old: fx.Node) -> fx.Node:
        if not _comes_as_tensor(old):
            return self.new[old]
        return self._number(old, _WIDEST[type(value_of(old))])

    def _number(self, old: fx.Node, dtype: torch.dtype | None) -> fx.Node:
        """An input for a number: rounded like a number combined with a tensor of this dtype; ints
        unchanged."""
        if (old, dtype) not in self.numbers:
            with self.graph.inserting_after(self.last):
                self.last = self.graph.placeholder(f"number_{len(self.numbers)}")
            self.numbers[old, dtype] = self.last
        return self.numbers[old, dtype]

    def _cast(self, new: fx.Node, given: torch.dtype, wanted: torch.dtype) -> fx.Node:
        if given == wanted:
            return new
        return self._call(torch.ops.prims.convert_element_type.default, new, wanted)

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self.graph.call_function(target, args, kwargs)


def _target(table: dict[Any, Any], node: fx.Node) -> Any:
    return table[node.target]


def _computed_in(dtype: torch.dtype) -> torch.dtype:
    return _COMPUTED_IN.get(dtype, dtype)
