"""Tracing to ATen: fake tensors, functional tensors, make_fx, the strides of real kernels."""

from __future__ import annotations

import contextlib
import linecache
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch._functorch._aot_autograd.functional_utils import from_fun, to_fun
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.utils import _pytree
from torch.utils._python_dispatch import _disable_current_modes

from megacompile.compat.operators import CUDNN_BATCH_NORM, is_random
from megacompile.compat.symbols import UntraceableSymbols, expression_of, symbols_now
from megacompile.compat.tensors import dense_strides

Tensors = Sequence[torch.Tensor]

# Errors of tracing: an operator's results depend on data, or it has no fake kernel.
UNTRACEABLE = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedFakeTensorException,
    NotImplementedError,  # no kernel for these inputs
)


def fake_mode() -> FakeTensorMode:
    """A mode in which tensors have shapes, dtypes and devices but no data."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def _knowing_statistics(mode: Any, native: bool) -> Callable[..., Any]:
    """The dispatch of a functional mode, with the in-place update of statistics by cuDNN's batch
    norm. The operator's schema does not declare that update: torch would drop the new
    statistics."""
    stock = mode.__torch_dispatch__

    def dispatch(
        mode: Any, func: Any, kinds: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not torch.ops.aten.cudnn_batch_norm.default:
            return stock(func, kinds, args, kwargs)
        x, *_, means, variances, training, _, _ = args
        if not training or means is None or variances is None:
            return stock(func, kinds, args, kwargs)
        if native:
            results = stock(torch.ops.aten._native_batch_norm_legit.default, kinds, args)
            like = {"dtype": torch.uint8}
            return *results, stock(torch.ops.aten.new_empty.default, kinds, (x, (0,)), like)
        *results, new_means, new_variances = stock(CUDNN_BATCH_NORM, kinds, args)
        for old, new in ((means, new_means), (variances, new_variances)):
            stock(torch.ops.aten.copy_.default, kinds, (old, new))
        return tuple(results)

    return types.MethodType(dispatch, mode)


@contextmanager
def functional_mode(*, native: bool = False) -> Iterator[None]:
    """A context that turns in-place operations on tensors of `to_functional` into functional ones.
    Raises NotImplementedError if an operator has ordered side effects (a check, a print).

    `native`: cuDNN's batch norm becomes torch's own, which a compiler can decompose. Their results
    differ by rounding.
    """
    mode: Any = FunctionalTensorMode(_allow_token_discovery=True)
    # not a subclass: higher-order operators look for this class
    mode.__torch_dispatch__ = _knowing_statistics(mode, native)
    with mode:
        yield
    if mode._tokens:
        raise NotImplementedError("it has an operator with side effects, such as a check of data")


# Wrap a tensor for the active `functional_mode`; other values unchanged.
to_functional: Callable[[Any], Any] = to_fun


def from_functional(tensor: Any) -> Any:
    """The value of a wrapped tensor, a new object after each change; other values unchanged."""
    return from_fun(tensor) if isinstance(tensor, FunctionalTensor) else tensor


class _Result(torch.autograd.Function):
    """An operation of autograd's graph that computes nothing."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, made: list[torch.Tensor]) -> Any:
        return made.pop()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise NotImplementedError


def as_result(tensor: torch.Tensor, anchor: torch.Tensor) -> Any:
    """Make a tensor require grad, as a result of `anchor`, which does. In-place operations refuse
    one that requires grad by itself."""
    return _Result.apply(anchor, [tensor])  # type: ignore[no-untyped-call]


def is_constant(tensor: Any) -> bool:
    """True for a tensor of a trace whose value is known, and read by `item()`."""
    return getattr(from_functional(tensor), "constant", None) is not None


_OF_BACKWARD = "megacompile.of_backward"  # in a node's meta


@contextmanager
def in_backward() -> Iterator[None]:
    """A context in which `trace` marks nodes as the backward's. Random numbers stay there: in the
    forward, they would be drawn before those of later stages, and once for a retained graph."""
    mode = get_proxy_mode()
    nodes = () if mode is None else mode.tracer.graph.nodes
    before = set(nodes)
    yield
    for node in nodes:
        if node not in before:
            node.meta[_OF_BACKWARD] = True
            if is_random(node):
                node.meta["partitioner_tag"] = "must_be_in_backward"


def is_of_backward(node: fx.Node) -> bool:
    """True if `trace` recorded a node `in_backward`."""
    return _OF_BACKWARD in node.meta


def trace(
    function: Callable[..., Any],
    primals: Tensors,
    tangents: Tensors,
    decompositions: dict[Any, Callable[..., Any]],
) -> fx.GraphModule:
    """Trace `function(primals, tangents)` to ATen; placeholders are primals_1.., tangents_1.. The
    nodes' values are fake tensors of one mode."""

    def joint(primals: Tensors, tangents: Tensors) -> Any:  # the partitioner reads these names
        return function(primals, tangents)

    with contextlib.ExitStack() as modes:
        # it would read values, which fake tensors lack
        modes.enter_context(torch.autograd.set_detect_anomaly(False))
        if detect_fake_mode((*primals, *tangents)) is None:
            modes.enter_context(tracing(TracingContext(fake_mode())))
        modes.enter_context(_use_lazy_graph_module(True))  # the graph may never be called
        traced = make_fx(joint, decomposition_table=decompositions)(list(primals), list(tangents))
    traced.graph.set_codegen(fx.graph.CodeGen())  # the inputs as one list, and the output
    output = traced.graph.output_node()
    output.args = (tuple(_pytree.tree_leaves(output.args[0])),)
    traced.recompile()
    return traced


def eager_decompositions() -> dict[Any, Callable[..., Any]]:
    """Decompositions of operators whose functional form returns other numbers than in place."""
    return {torch.ops.aten.bernoulli.p: _bernoulli}


def _bernoulli(like: torch.Tensor, p: float, generator: Any = None) -> Any:
    """Draw in `like`'s memory order, as `bernoulli_` does for the mask of a dropout."""
    order = sorted(range(like.dim()), key=like.stride, reverse=True)
    if generator is not None or order == list(range(like.dim())):
        return NotImplemented
    drawn = torch.bernoulli(like.permute(order), p)
    return drawn.permute([order.index(d) for d in range(like.dim())])


def symbolic_decompositions() -> dict[Any, Callable[..., Any]]:
    """`eager_decompositions`, and those that drop slices which exist only with symbolic sizes. With
    numbers as sizes, indexing records no operator for a slice of a whole dimension."""
    aten = torch.ops.aten
    return {
        **eager_decompositions(),
        aten.slice.Tensor: lambda x, dim=0, start=None, end=None, step=1: (
            x if _takes_all(x.shape[dim], start, end, step) else NotImplemented
        ),
        aten.slice_backward.default: lambda grad, sizes, dim, start, end, step: (
            grad if _takes_all(sizes[dim], start, end, step) else NotImplemented
        ),
    }


def _takes_all(size: Any, start: Any, end: Any, step: int) -> bool:
    if step != 1 or (start is not None and (type(start) is not int or start != 0)):
        return False
    if end is None or (type(end) is int and end == sys.maxsize):
        return True
    return bool(expression_of(end)[1] == expression_of(size)[1])


def is_described() -> bool:
    """True if torch reads the caller's property to make a fake copy of the tensor."""
    return sys._getframe(2).f_code.co_name in ("safe_grad", "safe_has_grad")


@contextmanager
def without_sources() -> Iterator[None]:
    """A context that drops torch.fx's sources of the graph modules made in it, which torch.fx keeps
    for the whole process, for tracebacks."""
    sources = fx.graph_module._loader.eval_cache
    before = set(sources)
    try:
        yield
    finally:
        for name in [name for name in sources if name not in before]:
            sources.pop(name, None)
            linecache.cache.pop(name, None)


_CANNOT_RUN = (RuntimeError, IndexError, ValueError, ArithmeticError, TypeError)


@contextmanager
def real_strides() -> Iterator[None]:
    """A context, inside `SymbolicFakes`, that also runs each operator that can on zeros, at the
    hints' sizes: a few kernels return other strides than their fake kernels."""
    fakes = symbols_now()
    assert fakes is not None
    fakes.mode.settle = _settled
    try:
        yield
    finally:
        fakes.mode.settle = None


def _settled(func: Any, args: Any, kwargs: Any, found: Any) -> Any:
    """The results of an operator, with the strides of its real kernel."""
    schema = getattr(func, "_schema", None)
    if schema is None or schema.is_mutable or any(result.alias_info for result in schema.returns):
        return found  # it returns no new memory, or changes an argument
    flat, spec = _pytree.tree_flatten(found)
    if not any(isinstance(value, FakeTensor) and value.dim() > 1 for value in flat):
        return found
    with _disable_current_modes(), torch.no_grad():
        try:
            zeros, named = _pytree.tree_map(_zeros, (args, kwargs))
            real = _pytree.tree_leaves(func(*zeros, **named))
        except torch.OutOfMemoryError:
            raise
        except _CANNOT_RUN:
            return found
    if len(real) != len(flat):
        return found
    fakes = symbols_now()
    assert fakes is not None
    with fakes.mode:
        settled = [_with_strides(f, r) for f, r in zip(flat, real, strict=True)]
    return _pytree.tree_unflatten(settled, spec)


def _zeros(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        shape, stride = ([expression_of(n)[0] for n in s] for s in (value.shape, value.stride()))
        empty = torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)
        return empty.zero_()
    return expression_of(value)[0]


def _with_strides(fake: Any, real: Any) -> Any:
    """The fake result, with its dimensions in the order of the real strides if they differ."""
    if not isinstance(fake, FakeTensor) or not isinstance(real, torch.Tensor):
        return fake
    shape = tuple(expression_of(n)[0] for n in fake.shape)
    stride = tuple(expression_of(n)[0] for n in fake.stride())
    if (shape, stride) == (tuple(real.shape), real.stride()) or 0 in shape:
        return fake
    order = sorted(range(real.dim()), key=lambda d: (real.stride(d), real.shape[d]))
    if shape != tuple(real.shape) or dense_strides(real.shape, order) != real.stride():
        raise UntraceableSymbols(f"a kernel returns strides {real.stride()} for {list(real.shape)}")
    return torch.empty_strided(
        fake.shape, dense_strides(fake.shape, order), dtype=fake.dtype, device=fake.device
    )
