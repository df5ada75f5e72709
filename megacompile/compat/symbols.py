"""Tracing with symbolic sizes and numbers.

A symbol is a `sympy.Symbol` of our own, with the same name in every graph: a size is a positive
integer, another int an integer, a float real. Nothing refers to Dynamo's symbols.
"""

from __future__ import annotations

import math
import operator
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from typing import Any, cast

import sympy
import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP, DimDynamic, ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.printers import PythonPrinter
from torch.utils._sympy.reference import PythonReferenceAnalysis

from megacompile.compat import kernels
from megacompile.errors import UnsupportedGraphError

_Value = int | float
_Values = Mapping[sympy.Symbol, _Value]

_ACTIVE: ContextVar[SymbolicFakes | None] = ContextVar("megacompile_symbols", default=None)
_BY_ENV: weakref.WeakKeyDictionary[ShapeEnv, SymbolicFakes] = weakref.WeakKeyDictionary()


# Tell a trace with symbols that a condition is true. Raises RuntimeError if it is false.
check: Callable[[bool], None] = torch._check


def _to_int(function: Callable[[Any], Any]) -> Any:
    def call(x: Any, dtype: Any) -> Any:
        if isinstance(x, fx.Proxy):
            return x.tracer.create_proxy("call_function", function, (x,), {})
        return function(x)

    return staticmethod(call)


class _Python(PythonReferenceAnalysis):
    """Python's functions for numbers, symbolic numbers, and proxies of both; torch's class returns
    sympy's for some, or functions that read a proxy's value."""

    trunc_to_int = staticmethod(lambda x, dtype: torch.sym_int(x))
    floor_to_int = _to_int(math.floor)
    ceil_to_int = _to_int(math.ceil)
    round_to_int = _to_int(round)
    int_truediv = staticmethod(operator.truediv)


class UntraceableSymbols(Exception):
    """A graph cannot be traced with these symbols; tracing with numbers may work."""


class _Fakes(FakeTensorMode):
    """Passes the results of fake kernels to `real_strides`, before a trace records them."""

    settle: Callable[[Any, Any, Any, Any], Any] | None = None

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = super().dispatch(func, types, args, kwargs)
        return found if self.settle is None else self.settle(func, args, kwargs or {}, found)


class SymbolicFakes:
    """A mode in which tensors have no data, and sizes are expressions of symbols. `hints`: these,
    with the values to use where code needs one."""

    def __init__(self, hints: _Values) -> None:
        self.hints = dict(hints)
        # a size that depends on data ends the trace, as it does without symbols
        self.env = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
        self.mode = _Fakes(shape_env=self.env, allow_non_fake_inputs=True)
        self.mode.cache_enabled = False  # equal nodes run once: `propagate`
        self._theirs: dict[Any, Any] = {}  # our symbol -> torch's
        self._ours: dict[Any, Any] = {}
        self._numbers: dict[Any, Any] = {}
        self._described: dict[Any, tuple[Any, Any]] = {}  # by torch's expression
        for symbol, hint in self.hints.items():
            self._add(symbol, hint)
        _BY_ENV[self.env] = self
        self._stack: list[tuple[ExitStack, Any]] = []
        self._guards = -1  # their number when `holds` was built
        self._holds: Callable[..., bool] = bool
        self._noted: list[tuple[Any, str]] = []  # guards seen by `note_guards`, with their code

    def _add(self, symbol: sympy.Symbol, hint: _Value) -> None:
        source = ConstantSource(f"megacompile_{symbol.name}")
        size = bool(symbol.is_positive)
        theirs = self.env.create_symbol(
            hint,
            source=source,
            dynamic_dim=DimDynamic.DYNAMIC,
            positive=True if size else None,
            do_not_specialize_zero_one=not size,
        )
        self._theirs[symbol] = theirs
        if theirs.is_symbol:
            self._ours[theirs] = symbol
        make = self.env.create_symintnode if symbol.is_integer else self.env.create_symfloatnode
        self._numbers[symbol] = make(theirs, hint=hint, source=source)

    def __enter__(self) -> SymbolicFakes:
        stack, fake_kernels = ExitStack(), cast("Any", _FakeKernels)
        for context in (self.mode, fake_kernels(), kernels._INCLUDE(kernels._KEY)):
            stack.enter_context(context)
        self._stack.append((stack, _ACTIVE.set(self)))
        return self

    def __exit__(self, *error: object) -> None:
        stack, token = self._stack.pop()
        _ACTIVE.reset(token)
        stack.close()

    def number(self, expression: Any) -> Any:
        """A SymInt or SymFloat for an expression of our symbols; a plain number unchanged. Raises
        UnsupportedGraphError for a size that no input has."""
        if not isinstance(expression, sympy.Basic):
            return expression
        if expression in self._numbers:
            return self._numbers[expression]
        # computed from the symbols, so that a trace records it
        try:
            return sympy_interp(_Python, self._numbers, expression)
        except KeyError as error:
            raise UnsupportedGraphError(f"no input has the size {error} of a value") from error

    def equal(self, number: Any, expression: Any) -> bool:
        """True if a number equals an expression; decided for the hints if it is not known."""
        mine, theirs = (
            n.node.expr if is_number(n) else sympy.sympify(n).xreplace(self._theirs)
            for n in (number, expression)
        )
        return bool(self.env.evaluate_expr(sympy.Eq(mine, theirs)))

    def require(self, conditions: Iterable[Any]) -> None:
        """Restrict the trace to values for which these relations of our symbols are true."""
        for condition in conditions:
            if not self.env.evaluate_expr(condition.xreplace(self._theirs)):
                raise AssertionError(f"{condition} is false for {self.hints}")

    def require_of(self, other: SymbolicFakes) -> None:
        """Restrict the trace to values for which the trace of another mode holds."""
        conditions = [guard.expr.xreplace(other._ours) for guard in other.env.guards]
        self.require(condition for condition in conditions if condition.free_symbols)

    def note_guards(self, where: Callable[[], str]) -> None:
        """Note the guards since the last call. `where` names the code."""
        if new := self.env.guards[len(self._noted) :]:
            place = where()
            self._noted += [(guard.expr, place) for guard in new]

    def broken(self, values: Sequence[_Value]) -> str:
        """The first noted guard that is false for these values of the symbols, with its code; "" if
        there is none."""
        for expression, where in self._noted:
            ours = expression.xreplace(self._ours)
            given = map(sympy.sympify, values)
            if ours.xreplace(dict(zip(self.hints, given, strict=True))) is sympy.false:
                return f"{where} relies on {ours}"
        return ""

    def described(self, number: Any) -> tuple[Any, Any]:
        """(value for the hints, expression in our symbols) of a SymInt or SymFloat."""
        theirs = number.node.expr
        if theirs not in self._described:
            found = theirs.xreplace(self._ours)
            if not found.free_symbols:
                found = int(found) if found.is_integer else float(found)
            self._described[theirs] = evaluated(found, self.hints), found
        return self._described[theirs]

    @property
    def holds(self) -> Callable[..., bool]:
        """A predicate of the symbols' values, in order: true if the trace so far is valid for
        them."""
        if len(self.env.guards) != self._guards:
            self._guards = len(self.env.guards)
            numbers = [self._numbers[symbol] for symbol in self.hints]
            text = self.env.produce_guards_expression(numbers, ignore_static=False) or "True"
            names = [f"t{k}" for k in range(len(numbers))]
            for name in names:
                text = text.replace(f"L['{name}']", name)
            scope = {"math": math, **SYMPY_INTERP}
            self._holds = eval(f"lambda {', '.join(names)}: {text}", scope)
        return self._holds


class _FakeKernels(TorchDispatchMode):
    """Finds fake kernels that some operators have only in torch's Python dispatcher, which is off
    above this mode: it would decompose operators differently than C++."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with enable_python_dispatcher():
            return func(*args, **(kwargs or {}))


# The active mode of this thread, if any.
symbols_now: Callable[[], SymbolicFakes | None] = _ACTIVE.get


def expression_of(number: Any) -> tuple[Any, Any]:
    """(value for the hints, expression) of a size or number of `SymbolicFakes`."""
    if not isinstance(number, (torch.SymInt, torch.SymFloat)):
        return number, number
    return fakes_of(number).described(number)


def fakes_of(value: Any) -> SymbolicFakes:
    """The mode of a SymInt, SymFloat or SymBool."""
    return _BY_ENV[value.node.shape_env]


def fakes_in(values: Iterable[Any]) -> SymbolicFakes | None:
    """The mode of the first fake tensor or symbolic number that has one."""
    for value in values:
        env = value.node.shape_env if is_number(value) else None
        if isinstance(value, FakeTensor):
            env = value.fake_mode.shape_env
        if env is not None and env in _BY_ENV:
            return _BY_ENV[env]
    return None


def evaluated(expression: Any, values: _Values) -> Any:
    """An expression's value for these values of its symbols."""
    if not isinstance(expression, sympy.Basic):
        return expression
    value = expression.xreplace({symbol: sympy.sympify(v) for symbol, v in values.items()})
    return int(value) if expression.is_integer else float(value)


def as_function(expressions: Any, symbols: Sequence[sympy.Symbol]) -> Callable[..., Any]:
    """A Python function of symbols that returns nested tuples of integer expressions."""
    scope = {"math": math, **SYMPY_INTERP}
    function: Callable[..., Any] = sympy.lambdify(symbols, expressions, scope, PythonPrinter)
    return function


def reified(graph: fx.Graph, expression: Any, nodes: Mapping[sympy.Symbol, fx.Node]) -> Any:
    """A node at the graph's end that computes an integer expression; an int for a constant."""
    if not isinstance(expression, sympy.Basic) or not expression.free_symbols:
        return int(expression)
    tracer = fx.proxy.GraphAppendingTracer(graph)
    proxies = {symbol: fx.Proxy(node, tracer) for symbol, node in nodes.items()}
    found = sympy_interp(_Python, proxies, expression)
    return found.node if isinstance(found, fx.Proxy) else int(found)


def is_number(value: Any) -> bool:
    """True for a symbolic number."""
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


kernels._define_composites(lambda: symbols_now() is not None)
kernels._define_fakes(lambda mode: mode.shape_env in _BY_ENV)
