"""Integer tensors with symbolic sizes, as formulas of their indices.

    torch.arange(n)[:, None] + 3        base 3, steps (1, 0): the value at [i, j] is 3 + i

A mask of unknown length is built from such tensors. The formulas determine the result of a
comparison: `keys <= queries` is causal if it is `j <= i` for all lengths. If the result depends on
the length (a window longer than the context), it is decided for the planned length and becomes a
condition of the program.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch

from megacompile.ir.symbols import Values

_INTEGERS = (torch.int64, torch.bool)


@dataclass(frozen=True, slots=True)
class Affine:
    """The value at an index is `base` plus the sum of step times coordinate."""

    base: Any  # an int, or an expression of the symbols
    steps: tuple[int, ...]

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


class Unknown(Exception):
    """Raised if no formula is known for a value."""


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


def of_tensor(tensor: torch.Tensor) -> Affine:
    """The formula of a known tensor.

    Raises:
        Unknown: it has none.
    """
    if tensor.dtype not in _INTEGERS or not tensor.numel():
        raise Unknown
    numbers = tensor.long()
    base = numbers[(0,) * numbers.dim()]
    steps, made = [], base
    for dim, size in enumerate(numbers.shape):
        step = numbers.select(dim, 1)[(0,) * (numbers.dim() - 1)] - base if size > 1 else base * 0
        shape = [-1 if d == dim else 1 for d in range(numbers.dim())]
        made = made + step * torch.arange(size).view(shape)
        steps.append(int(step))
    if not torch.equal(made.expand(numbers.shape), numbers):
        raise Unknown
    return Affine(int(base), tuple(steps))


def computed(name: str, args: Sequence[Any], kwargs: dict[str, Any], rank: int) -> Affine:
    """The formula of the result of a function of formulas and numbers.

    Args:
        name: of the function, without underscores around it.
        args: formulas, ints, expressions of symbols, and other call arguments.
        rank: dimensions of the result.

    Raises:
        Unknown: no formula exists or is known.
    """
    named = {k: v for k, v in kwargs.items() if k not in ("device", "dtype", "pin_memory")}
    make = _FUNCTIONS.get(name)
    if make is None:
        raise Unknown
    try:
        found: Affine = make(rank, *args, **named)
    except (TypeError, IndexError, ValueError) as error:  # an unknown form of the call
        raise Unknown from error
    return found


def as_affine(value: Any) -> Affine:
    """A formula unchanged; the formula of a number.

    Raises:
        Unknown: it is neither.
    """
    if isinstance(value, Affine):
        return value
    if isinstance(value, sympy.Basic) and value.is_integer:
        return Affine(value, ())
    if type(value) is int:
        return Affine(value, ())
    raise Unknown


def _literal(value: Any) -> int:
    if isinstance(value, (int, sympy.Integer)):
        return int(value)
    raise Unknown


def _arange(rank: int, *args: Any, **named: Any) -> Affine:
    start, step = named.pop("start", 0), named.pop("step", 1)
    named.pop("end", None)
    if len(args) > 1:
        start, step = args[0], args[2] if len(args) > 2 else step
    if named:
        raise Unknown
    return Affine(as_affine(start).base, (_literal(step),))


def _sum(times: int) -> Callable[..., Affine]:
    def make(rank: int, left: Any, right: Any) -> Affine:
        return as_affine(left).plus(as_affine(right), times)

    return make


def _product(rank: int, left: Any, right: Any) -> Affine:
    one, other = (as_affine(left), as_affine(right))
    if one.constant is None:
        one, other = other, one
    if one.constant is None:
        raise Unknown
    factor = one.constant
    return Affine(factor * other.base, tuple(factor * s for s in other.steps)).of_rank(rank)


def _same(rank: int, x: Any, *_: Any, **__: Any) -> Affine:
    return as_affine(x)


def _expand(rank: int, x: Affine, *_: Any) -> Affine:
    return x.of_rank(rank)  # a broadcast dimension has size 1 and step 0


def _unsqueeze(rank: int, x: Affine, dim: int) -> Affine:
    steps = list(x.steps)
    steps.insert(dim % rank, 0)
    return Affine(x.base, tuple(steps))


def _getitem(rank: int, x: Affine, index: Any) -> Affine:
    given = list(index) if isinstance(index, tuple) else [index]
    if any(type(entry) is bool for entry in given):
        raise Unknown
    if any(isinstance(entry, Affine) for entry in given):
        return _gathered(rank, x, given)
    missing = len(x.steps) - sum(entry is not None and entry is not Ellipsis for entry in given)
    at = given.index(Ellipsis) if Ellipsis in given else len(given)
    whole = [slice(None)] * missing
    base, steps, dims = x.base, [], iter(x.steps)
    for entry in [*given[:at], *whole, *given[at + 1 :]]:
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
        elif step and _literal(entry) < 0:
            raise Unknown
        else:
            base = base + step * entry if step else base
    return Affine(base, tuple(steps))


def _gathered(rank: int, x: Affine, index: Sequence[Any]) -> Affine:
    """`x[i, j]`, with a formula for each dimension; unknown for negative indices."""
    if len(index) != len(x.steps):
        raise Unknown
    found = Affine(x.base, ())
    for step, entry in zip(x.steps, map(as_affine, index), strict=True):
        if not step:
            continue
        if _literal(entry.base) < 0 or any(s < 0 for s in entry.steps):
            raise Unknown
        found = found.plus(entry, step)
    return found.of_rank(rank)


def _diff(rank: int, x: Affine, n: int = 1, dim: int = -1, prepend: Any = None) -> Affine:
    if n != 1 or (prepend is not None and not isinstance(prepend, Affine)):
        raise Unknown
    step, others = x.steps[dim], list(x.steps)
    others[dim] = 0
    if prepend is not None:
        first = x.plus(prepend, -1)
        before = list(prepend.of_rank(rank).steps)
        before[dim] = 0
        if before != others or first.base != step:
            raise Unknown
    return Affine(step, (0,) * rank)


def _cumsum(rank: int, x: Affine, dim: int) -> Affine:
    if x.constant is None:
        raise Unknown
    steps = [0] * rank
    steps[dim] = x.constant
    return Affine(x.constant, tuple(steps))


def _filled(value: int) -> Callable[..., Affine]:
    return lambda rank, *args, **named: Affine(value, (0,) * rank)


_FUNCTIONS: dict[str, Callable[..., Affine]] = {
    "arange": _arange,
    "add": _sum(1),
    "sub": _sum(-1),
    "mul": _product,
    "neg": lambda rank, x: _product(rank, -1, x),
    **dict.fromkeys(("long", "contiguous", "clone", "to", "cpu", "cuda"), _same),
    **dict.fromkeys(("expand", "expand_as"), _expand),
    "unsqueeze": _unsqueeze,
    "getitem": _getitem,
    "diff": _diff,
    "cumsum": _cumsum,
    **dict.fromkeys(("ones", "new_ones", "ones_like"), _filled(1)),
    **dict.fromkeys(("zeros", "new_zeros"), _filled(0)),
}


@dataclass(frozen=True, slots=True)
class Compared:
    """`compare(left, right)`, with its shape."""

    compare: Callable[[Any, Any], Any]
    left: Affine
    right: Affine
    shape: tuple[Any, ...]  # ints and expressions

    def constant(self) -> bool | None:
        """The value of all elements, if they are the same for all values of the symbols."""
        difference = self.left.plus(self.right, -1).constant
        return None if difference is None else bool(self.compare(difference, 0))

    def is_causal(self, conditions: Conditions) -> bool:
        """True if each query (second-to-last dimension) sees the keys up to its own."""
        found = self._seen()
        if found is None or len(found.steps) < 2:
            return False
        *others, rows, columns = found.steps
        if any(others) or rows <= 0 or rows + columns:
            return False
        first = sympy.sympify(found.base)
        return conditions.decide(first >= 0) and conditions.decide(first < rows)

    def allows_all(self, conditions: Conditions) -> bool:
        """True if the comparison holds everywhere."""
        found = self._seen()
        if found is None:
            return False
        pairs = zip(found.steps, self.shape, strict=True)
        least = found.base + sum(min(0, step) * (size - 1) for step, size in pairs)
        return conditions.decide(sympy.sympify(least) >= 0)

    def _seen(self) -> Affine | None:
        """An expression that is non-negative exactly where the comparison is true."""
        if self.compare in (operator.le, operator.lt):
            found = self.right.plus(self.left, -1)
        elif self.compare in (operator.ge, operator.gt):
            found = self.left.plus(self.right, -1)
        else:
            return None
        strict = self.compare in (operator.lt, operator.gt)
        return Affine(found.base - int(strict), found.of_rank(len(self.shape)).steps)
