"""Tracing to ATen: fake tensors, functional tensors, make_fx, strides as the kernels give them."""

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
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.utils import _pytree
from torch.utils._python_dispatch import _disable_current_modes

from megacompile.compat.operators import CUDNN_BATCH_NORM, is_random
from megacompile.compat.symbols import UntraceableSymbols, expression_of, symbols_now

Tensors = Sequence[torch.Tensor]

# What tracing raises for operators whose results depend on data, or that have no fake kernel.
UNTRACEABLE = (  # torch 2.11 to 2.15
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    NotImplementedError,  # no kernel for what it was given
)


def fake_mode() -> FakeTensorMode:  # torch 2.11 to 2.15
    """A mode in which tensors have shapes, dtypes and devices but no data."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def _knowing_statistics(mode: Any, native: bool) -> Callable[..., Any]:
    """The handling of operators by a functional mode, where cuDNN's batch norm changes its
    statistics.

    Its schema does not say so, and torch takes them for inputs alone: their new values would be
    of no user.
    """
    stock = mode.__torch_dispatch__

    def dispatch(
        mode: Any, func: Any, kinds: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not torch.ops.aten.cudnn_batch_norm.default or not _changes_statistics(*args):
            return stock(func, kinds, args, kwargs)
        x, *_, means, variances, _, _, _ = args
        if native:
            results = stock(torch.ops.aten._native_batch_norm_legit.default, kinds, args)
            like = {"dtype": torch.uint8}
            return *results, stock(torch.ops.aten.new_empty.default, kinds, (x, (0,)), like)
        *results, new_means, new_variances = stock(CUDNN_BATCH_NORM, kinds, args)
        for old, new in ((means, new_means), (variances, new_variances)):
            stock(torch.ops.aten.copy_.default, kinds, (old, new))
        return tuple(results)

    return types.MethodType(dispatch, mode)


def _changes_statistics(
    x: Any, weight: Any, bias: Any, means: Any, variances: Any, training: bool, *_: Any
) -> bool:
    return training and means is not None and variances is not None


@contextmanager
def functional_mode(*, native: bool = False) -> Iterator[None]:  # torch 2.11 to 2.15
    """In-place operations on tensors made by `to_functional` become values and are recorded.

    Args:
        native: cuDNN's batch norm becomes torch's own, which a compiler can take apart. Their
            numbers are equal but for rounding.

    Raises:
        NotImplementedError: an operator has effects in an order (it checks, it prints).
    """
    mode: Any = FunctionalTensorMode(_allow_token_discovery=True)
    # not a class of our own: higher-order operators ask for this very one
    mode.__torch_dispatch__ = _knowing_statistics(mode, native)
    with mode:
        yield
    if mode._tokens:
        raise NotImplementedError("it has an operator with side effects, such as a check of data")


def to_functional(value: Any) -> Any:  # torch 2.11 to 2.15
    """Wrap a tensor for the `functional_mode` that is active; anything else as it is."""
    return to_fun(value)


def from_functional(tensor: Any) -> Any:  # torch 2.11 to 2.15
    """The value of a wrapped tensor, another object after each change; anything else as it is."""
    return from_fun(tensor) if isinstance(tensor, FunctionalTensor) else tensor


_OF_BACKWARD = "megacompile.of_backward"  # in a node's meta


@contextmanager
def in_backward() -> Iterator[None]:  # torch 2.11 to 2.15
    """Marks what `trace` sees for its duration as the backward's; random numbers are drawn there
    too.

    The partitioner takes what depends on no tangent for a part of the forward. There it would be
    drawn before what later stages draw, and once where a graph is retained.
    """
    mode = get_proxy_mode()
    graph = None if mode is None else mode.tracer.graph
    before = set() if graph is None else set(graph.nodes)
    yield
    for node in () if graph is None else graph.nodes:
        if node not in before:
            node.meta[_OF_BACKWARD] = True
            if is_random(node):
                node.meta["partitioner_tag"] = "must_be_in_backward"


def is_of_backward(node: fx.Node) -> bool:  # torch 2.11 to 2.15
    """True if `trace` saw a node `in_backward`."""
    return _OF_BACKWARD in node.meta


def set_functional_value(tensor: Any, value: Any) -> None:  # torch 2.11 to 2.15
    """Give a tensor made by `to_functional`, and its views, another value; autograd does not know.

    Its version stays: to autograd, nothing was changed in place.
    """
    new = from_functional(value)
    tensor.replace_(new)
    tensor.commit_update()
    tensor.sync()


def has_known_data(tensor: torch.Tensor) -> bool:  # torch 2.11 to 2.15
    """True if a fake tensor remembers its elements, as one made of numbers does."""
    return getattr(from_functional(tensor), "constant", None) is not None


def trace(
    function: Callable[..., Any],
    primals: Tensors,
    tangents: Tensors,
    decompositions: dict[Any, Callable[..., Any]],
) -> fx.GraphModule:  # torch 2.11 to 2.15
    """Trace `function(primals, tangents)` to ATen; placeholders are primals_1.., tangents_1..

    Each value's description is a fake tensor. Where the tensors are real, torch would make a mode
    for each of them, and each mode keeps the stack that it was made on.
    """

    def joint(primals: Tensors, tangents: Tensors) -> Any:  # the partitioner reads these names
        return function(primals, tangents)

    with contextlib.ExitStack() as modes:
        # it reads values, which are not there yet
        modes.enter_context(torch.autograd.set_detect_anomaly(False))
        if detect_fake_mode((*primals, *tangents)) is None:
            modes.enter_context(tracing(TracingContext(fake_mode())))
        modes.enter_context(_use_lazy_graph_module(True))  # it may never be called
        traced = make_fx(joint, decomposition_table=decompositions)(list(primals), list(tangents))
    return flatten_signature(traced)


def flatten_signature(module: fx.GraphModule) -> fx.GraphModule:  # torch 2.11 to 2.15
    """Give a traced function of two lists a flat signature and a flat output."""
    graph = module.graph
    graph.set_codegen(fx.graph.CodeGen())
    output = next(iter(reversed(graph.nodes)))
    flat: list[Any] = []

    def collect(value: Any) -> None:
        if isinstance(value, (tuple, list)):
            for item in value:
                collect(item)
        else:
            flat.append(value)

    collect(output.args[0])
    output.args = (tuple(flat),)
    module.recompile()
    return module


def eager_decompositions() -> dict[Any, Callable[..., Any]]:  # torch 2.11 to 2.15
    """For operators whose functional form returns other numbers than the in-place form does."""
    return {torch.ops.aten.bernoulli.p: _bernoulli}


def _bernoulli(like: torch.Tensor, p: float, generator: Any = None) -> Any:
    """Draw in the order of `like`'s memory, as `bernoulli_` does: the mask of a dropout."""
    order = sorted(range(like.dim()), key=like.stride, reverse=True)
    if generator is not None or order == list(range(like.dim())):
        return NotImplemented
    drawn = torch.bernoulli(like.permute(order), p)
    return drawn.permute([order.index(d) for d in range(like.dim())])


def symbolic_decompositions() -> dict[Any, Callable[..., Any]]:  # torch 2.11 to 2.15
    """`eager_decompositions`, and for what an index does only where its tensor has symbols.

    A slice of all of a dimension is no operator where sizes are numbers.
    """
    aten = torch.ops.aten
    return {
        **eager_decompositions(),
        aten.slice.Tensor: _slice,
        aten.slice_backward.default: _slice_backward,
    }


def _slice(x: torch.Tensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    return x if _takes_all(x.shape[dim], start, end, step) else NotImplemented


def _slice_backward(grad: Any, sizes: Any, dim: int, start: Any, end: Any, step: int) -> Any:
    return grad if _takes_all(sizes[dim], start, end, step) else NotImplemented


def _takes_all(size: Any, start: Any, end: Any, step: int) -> bool:
    if step != 1 or (start is not None and (type(start) is not int or start != 0)):
        return False
    if end is None or (type(end) is int and end == sys.maxsize):
        return True
    return bool(expression_of(end)[1] == expression_of(size)[1])


def is_described() -> bool:  # torch 2.11 to 2.15
    """True if the caller's property is read for a fake tensor to be made like this one."""
    return sys._getframe(2).f_code.co_name in ("safe_grad", "safe_has_grad")


@contextmanager
def without_sources() -> Iterator[None]:  # torch 2.11 to 2.15
    """For its duration, torch.fx keeps no source of the graph modules that are made.

    It would keep each for good, though most are gone in a moment: for tracebacks alone.
    """
    sources = fx.graph_module._loader.eval_cache
    before = set(sources)
    try:
        yield
    finally:
        for name in [name for name in sources if name not in before]:
            sources.pop(name, None)
            linecache.cache.pop(name, None)


# --- strides as the kernels give them, for tensors that have no data


_CANNOT_RUN = (RuntimeError, IndexError, ValueError, ArithmeticError, TypeError)


@contextmanager
def real_strides() -> Iterator[None]:  # torch 2.11 to 2.15
    """Run each operator on zeros too, at the hints' sizes, for the strides it returns.

    A few kernels give other strides than their fake kernels say. What cannot run on zeros keeps
    what the fake kernel says. To be entered inside of `SymbolicFakes`.
    """
    fakes = symbols_now()
    assert fakes is not None
    fakes.mode.settle = _settled
    try:
        yield
    finally:
        fakes.mode.settle = None


def _settled(func: Any, args: Any, kwargs: Any, found: Any) -> Any:
    """The results of an operator, with the strides that its kernel returns."""
    if not _makes_tensors(func):
        return found
    flat, spec = _pytree.tree_flatten(found)
    if not any(isinstance(value, FakeTensor) and value.dim() > 1 for value in flat):
        return found
    real = _run(func, args, kwargs)
    if real is None or len(real) != len(flat):
        return found
    fakes = symbols_now()
    assert fakes is not None
    with fakes.mode:
        settled = [_with_strides(f, r) for f, r in zip(flat, real, strict=True)]
    return _pytree.tree_unflatten(settled, spec)


def _makes_tensors(func: Any) -> bool:
    """True if an operator's results are memory of their own, and it changes nothing."""
    schema = getattr(func, "_schema", None)
    if schema is None or schema.is_mutable:
        return False
    return all(result.alias_info is None for result in schema.returns)


def _run(func: Any, args: Any, kwargs: Any) -> list[Any] | None:
    with _disable_current_modes(), torch.no_grad():
        try:
            zeros = _pytree.tree_map(_zeros, (args, kwargs))
            flat: list[Any] = _pytree.tree_flatten(func(*zeros[0], **zeros[1]))[0]
        except torch.OutOfMemoryError:
            raise
        except _CANNOT_RUN:
            return None
    return flat


def _zeros(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        shape, stride = ([expression_of(n)[0] for n in s] for s in (value.shape, value.stride()))
        empty = torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)
        return empty.zero_()
    return expression_of(value)[0]


def _with_strides(fake: Any, real: Any) -> Any:
    """The fake result, or one in the order of the real one's strides where these are others."""
    if not isinstance(fake, FakeTensor) or not isinstance(real, torch.Tensor):
        return fake
    shape = tuple(expression_of(n)[0] for n in fake.shape)
    stride = tuple(expression_of(n)[0] for n in fake.stride())
    if (shape, stride) == (tuple(real.shape), real.stride()) or 0 in shape:
        return fake
    order = sorted(range(real.dim()), key=lambda d: (real.stride(d), real.shape[d]))
    if shape != tuple(real.shape) or _dense(real.shape, order) != real.stride():
        raise UntraceableSymbols(f"a kernel gives strides {real.stride()} for {list(real.shape)}")
    return torch.empty_strided(
        fake.shape, _dense(fake.shape, order), dtype=fake.dtype, device=fake.device
    )


def _dense(shape: Sequence[Any], order: Sequence[int]) -> tuple[Any, ...]:
    """Strides of a tensor without gaps, whose dimension `order[0]` is the innermost."""
    found: list[Any] = [1] * len(shape)
    step: Any = 1
    for dim in order:
        found[dim] = step
        step = step * shape[dim]
    return tuple(found)
