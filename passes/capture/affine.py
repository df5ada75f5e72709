"""Integer tensors as formulas of their indices.

    torch.arange(n)[:, None] + 3        base 3, steps (1, 0): the value at [i, j] is 3 + i

Attention masks are made of such tensors. The formulas determine the result of a comparison:
`keys <= queries` is causal if it is `j <= i`, for one length or for all. If the result depends on a
symbolic length (a window longer than the context), it is decided for the planned length and becomes
a condition of the program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy

from megacompile.ir.tensors import Values

Shape = tuple[Any, ...]  # ints, and expressions of the symbols
CAUSAL = object()  # a mask that allows each query (second-to-last dimension) the keys up to its own
COMPARISONS = frozenset({"le", "lt", "ge", "gt", "eq", "ne"})


class Unknown(Exception):
    """Raised if no formula is known for a value."""


@dataclass(frozen=True, slots=True)
class Affine:
    """The value at an index is `base` plus the sum of step times coordinate."""

    base: Any  # an int, or an expression of the symbols
    steps: tuple[int, ...] = ()

    @staticmethod
    def of(value: Any) -> Affine:
        """A formula unchanged; the formula of a number. Raises `Unknown` for anything else."""
        if isinstance(value, Affine):
            return value
        if isinstance(value, int) or (isinstance(value, sympy.Basic) and value.is_integer):
            return Affine(value)
        raise Unknown

    @property
    def constant(self) -> int | None:
        """The common value of all elements."""
        known = not any(self.steps) and isinstance(self.base, (int, sympy.Integer))
        return int(self.base) if known else None

    def of_rank(self, rank: int) -> Affine:
        """Broadcast to more leading dimensions."""
        return Affine(self.base, (0,) * (rank - len(self.steps)) + self.steps)

    def plus(self, other: Affine, times: int = 1) -> Affine:
        """`self + times * other`, broadcast together."""
        rank = max(len(self.steps), len(other.steps))
        pairs = zip(self.of_rank(rank).steps, other.of_rank(rank).steps, strict=True)
        base = sympy.expand(self.base + times * other.base)
        return Affine(base, tuple(a + times * b for a, b in pairs))

    def end(self, shape: Shape, side: Callable[[int, int], int]) -> Any:
        """The least (`side` is min) or largest (max) value of a tensor of this shape."""
        pairs = zip(self.steps, shape[len(shape) - len(self.steps) :], strict=True)
        return self.base + sum(side(0, step) * (size - 1) for step, size in pairs)


@dataclass(slots=True)
class Conditions:
    """Facts about the symbols: valid for all values, or recorded as conditions.

    Args:
        planned: the values that decide otherwise.
    """

    planned: Values
    relied_on: list[Any] = field(default_factory=list)

    def decide(self, relation: Any) -> bool:
        """True if a relation holds: for all values, or under a recorded condition."""
        relation = sympy.sympify(relation)
        if relation in (sympy.true, sympy.false):
            return bool(relation)
        exact = {symbol: sympy.sympify(value) for symbol, value in self.planned.items()}
        if not bool(relation.xreplace(exact)):
            return False
        self.relied_on.append(relation)
        return True


def compared(name: str, left: Any, right: Any, shape: Shape, conditions: Conditions) -> Any:
    """The value of a comparison of formulas or numbers: a constant, or `CAUSAL`.

    Raises:
        Unknown: it is neither for all values of the symbols.
    """
    # non-negative exactly where the comparison is true; for equality, the difference
    large, small = (left, right) if name in ("ge", "gt") else (right, left)
    seen = Affine.of(large).plus(Affine.of(small), -1).of_rank(len(shape))
    if name in ("lt", "gt"):
        seen = Affine(seen.base - 1, seen.steps)
    if name in ("eq", "ne"):
        if seen.constant is None:
            raise Unknown
        return _filled(shape, (seen.constant == 0) == (name == "eq"))
    if len(shape) > 1:
        *others, rows, columns = seen.steps
        if not any(others) and rows > 0 and rows + columns == 0:
            first = sympy.sympify(seen.base)
            if conditions.decide(first >= 0) and conditions.decide(first < rows):
                return CAUSAL
    if conditions.decide(seen.end(shape, min) >= 0):
        return _filled(shape, 1)
    if seen.constant is not None:
        return _filled(shape, 0)
    raise Unknown


def computed(name: str, args: Sequence[Any], kwargs: dict[str, Any], shape: Shape) -> Affine:
    """The formula of the result of a function of formulas and numbers.

    Args:
        name: of the function, without underscores around it.
        args: formulas, ints, expressions of symbols, and other call arguments.
        shape: of the result.

    Raises:
        Unknown: no formula exists or is known.
    """
    named = {k: v for k, v in kwargs.items() if k not in ("device", "dtype", "pin_memory")}
    try:
        found = FORMULAS[name](shape, *args, **named).of_rank(len(shape))
    except (KeyError, TypeError, IndexError, ValueError) as error:  # an unknown form of the call
        raise Unknown from error
    pairs = zip(found.steps, shape, strict=True)
    return Affine(found.base, tuple(0 if size == 1 else step for step, size in pairs))


def _literal(value: Any) -> int:
    if isinstance(value, (int, sympy.Integer)):
        return int(value)
    raise Unknown


def _constant(value: Any) -> int:
    constant = Affine.of(value).constant
    if constant is None:
        raise Unknown
    return constant


def _filled(shape: Shape, value: int) -> Affine:
    return Affine(int(value), (0,) * len(shape))


def _arange(shape: Shape, *args: Any, start: Any = 0, end: Any = None, step: Any = 1) -> Affine:
    if len(args) > 1:
        start, step = args[0], args[2] if len(args) > 2 else step
    return Affine(Affine.of(start).base, (_literal(step),))


def _product(shape: Shape, left: Any, right: Any) -> Affine:
    one, other = Affine.of(left), Affine.of(right)
    if one.constant is None:
        one, other = other, one
    factor = _constant(one)
    return Affine(factor * other.base, tuple(factor * s for s in other.steps))


def _floordiv(shape: Shape, left: Any, right: Any) -> Affine:
    x, by = Affine.of(left), _constant(right)
    if by == 1:
        return x
    ends = {_literal(x.end(shape, side)) // by for side in (min, max)} if by > 0 else set()
    if len(ends) != 1:
        raise Unknown
    return _filled(shape, ends.pop())


def _same(shape: Shape, x: Any, *_: Any, **__: Any) -> Affine:
    return Affine.of(x)  # of an expanded tensor too: a broadcast dimension has step 0


def _reshape(shape: Shape, x: Any, *_: Any) -> Affine:
    return _filled(shape, _constant(x))


def _unsqueeze(shape: Shape, x: Affine, dim: int) -> Affine:
    steps = list(x.steps)
    steps.insert(dim % len(shape), 0)
    return Affine(x.base, tuple(steps))


def _getitem(shape: Shape, x: Affine, index: Any) -> Affine:
    given = list(index) if isinstance(index, tuple) else [index]
    if any(type(entry) is bool for entry in given):
        raise Unknown
    if any(isinstance(entry, Affine) for entry in given):
        return _gathered(x, given)
    missing = len(x.steps) - sum(entry is not None and entry is not Ellipsis for entry in given)
    at = given.index(Ellipsis) if Ellipsis in given else len(given)
    base, steps, dims = x.base, [], iter(x.steps)
    for entry in [*given[:at], *[slice(None)] * missing, *given[at + 1 :]]:
        if entry is None:
            steps.append(0)
            continue
        step = next(dims)
        if isinstance(entry, slice):
            start = _literal(entry.start or 0)
            if start < 0 or entry.step not in (None, 1):
                raise Unknown
            base = base + step * start
            steps.append(step)
        elif step:
            if _literal(entry) < 0:
                raise Unknown
            base = base + step * entry
    return Affine(base, tuple(steps))


def _gathered(x: Affine, index: Sequence[Any]) -> Affine:
    """`x[i, j]`, with a formula for each dimension; unknown for negative indices."""
    if len(index) != len(x.steps):
        raise Unknown
    found = Affine(x.base)
    for step, entry in zip(x.steps, map(Affine.of, index), strict=True):
        if step:
            if _literal(entry.base) < 0 or any(s < 0 for s in entry.steps):
                raise Unknown
            found = found.plus(entry, step)
    return found


def _diff(shape: Shape, x: Affine, n: int = 1, dim: int = -1, prepend: Any = None) -> Affine:
    """The difference along a dimension, after a first value that fits."""
    first = x.plus(Affine.of(prepend), -1)
    step = x.steps[dim]
    before, others = ([*each.of_rank(len(shape)).steps] for each in (Affine.of(prepend), x))
    before[dim] = others[dim] = 0
    if n != 1 or before != others or first.base != step:
        raise Unknown
    return _filled(shape, step)


def _cumsum(shape: Shape, x: Affine, dim: int) -> Affine:
    steps = [0] * len(shape)
    steps[dim] = _constant(x)
    return Affine(steps[dim], tuple(steps))


FORMULAS: dict[str, Callable[..., Affine]] = {
    "arange": _arange,
    "add": lambda shape, x, y: Affine.of(x).plus(Affine.of(y)),
    "sub": lambda shape, x, y: Affine.of(x).plus(Affine.of(y), -1),
    "mul": _product,
    "neg": lambda shape, x: _product(shape, -1, x),
    "floordiv": _floordiv,
    **dict.fromkeys(("long", "bool", "contiguous", "clone", "to", "cpu", "cuda"), _same),
    **dict.fromkeys(("expand", "expand_as"), _same),
    **dict.fromkeys(("view", "reshape", "flatten", "squeeze"), _reshape),
    "unsqueeze": _unsqueeze,
    "getitem": _getitem,
    "diff": _diff,
    "cumsum": _cumsum,
    **dict.fromkeys(("ones", "new_ones", "ones_like"), lambda shape, *_, **__: _filled(shape, 1)),
    **dict.fromkeys(("zeros", "new_zeros"), lambda shape, *_, **__: _filled(shape, 0)),
    "full": lambda shape, size, fill_value: _filled(shape, _constant(fill_value)),
    "new_full": lambda shape, x, size, fill_value: _filled(shape, _constant(fill_value)),
}
