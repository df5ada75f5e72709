"""Replaces known masks by `is_causal=True`, so that they are never materialized.

    before: mask = (kv[None, :] <= q[:, None])        after: y = attention(..., is_causal=True)
            y = attention(..., attn_mask=mask)

A captured model cannot inspect its mask, so Hugging Face models build one of queries by keys in
every layer. A mask is known if operators whose results have formulas compute it from constants and
lengths alone.

    torch.arange(n)[:, None] + 3        i2 + 3: the value at row i2 (i1 is the last dimension)
    keys <= queries                     i2 - i1 >= 0

An integer tensor is a linear formula of its indices. A bool tensor is a tuple of formulas, and true
where all are at least 0. A condition on a symbolic length (a window longer than the context) is
decided for the planned length and becomes a condition of the program.

The attention is the same up to rounding: another kernel computes it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import sympy
import torch
import torch.nn.functional as F
from torch import fx

from megacompile.ir.capture import Capture
from megacompile.ir.tensors import Number, TensorMeta, tensors_bytes
from megacompile.options import Lowering
from megacompile.passes.capture.propagate import Values
from megacompile.text import format_bytes

_ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
Shape = Sequence[Any]  # ints, and expressions of the symbols


def use_causal_attention(capture: Capture, *, values: Values, lowering: Lowering) -> Capture:
    """The capture without known attention masks, changed in place; `values` are of its graph, and
    get a line on the masks. Nothing changes with `EAGER`, which is bitwise."""
    graph, planned = capture.module.graph, capture.planned
    if lowering is Lowering.EAGER or not any(map(_mask_of, graph.nodes)):
        return capture
    known = _known(graph, values)
    sizes: dict[fx.Node, int] = {}
    count = 0
    for node in graph.nodes:
        mask = _mask_of(node)
        if mask is None:
            continue
        found = _attention(node, mask, known[mask], values, planned)
        if found is not None:
            named = _named(node) | {"attn_mask": None, "is_causal": found[0]}
            node.args = tuple(named.pop(name) for name in _ATTENTION[:3])
            node.kwargs = named
            sizes[mask] = tensors_bytes(values.meta(mask))
            values.require(found[1])
            count += 1
    if not count:
        line = "attention masks are materialized: they are not recognized for every size"
        values.reasons += [line] if planned else []
        return capture
    unused = set(sizes)  # masks without a reader, and the nodes that built them
    for node in reversed(graph.nodes):
        if node in unused and not node.users and node.op in ("call_function", "call_method"):
            unused.update(filter(_name, node.all_input_nodes))
            graph.erase_node(node)
    size = format_bytes(max(sizes.values()))
    values.reasons.append(f"{count} attentions are causal without a mask, which would take {size}")
    return capture


def _mask_of(node: fx.Node) -> fx.Node | None:
    if node.target is not F.scaled_dot_product_attention:
        return None
    named = _named(node)
    mask = named.get("attn_mask")
    return mask if isinstance(mask, fx.Node) and named.get("is_causal", False) is False else None


def _named(node: fx.Node) -> dict[str, Any]:
    """The arguments of an attention by name."""
    return dict(zip(_ATTENTION, node.args, strict=False)) | dict(node.kwargs)


def _name(node: fx.Node) -> str:
    """The name of a pure function of torch; "" for other nodes."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    function = node.op == "call_function"
    theirs = any(getattr(module, name, None) is node.target for module in (operator, torch))
    name = name.strip("_")  # torch 2.11's Dynamo captures some operators as methods: `__eq__`
    pure = name in _FORMULAS or name == "size"
    return name if pure and (theirs if function else node.op == "call_method") else ""


class Unknown(Exception):
    """Raised if no formula is known for a value."""


def _attention(
    node: fx.Node, mask: fx.Node, allows: Any, values: Values, planned: Mapping[Any, Any]
) -> tuple[bool, list[Any]] | None:
    """(True if a mask is causal, False if it allows everything; the relations between symbols that
    must hold for that). None if the mask is neither."""
    named, sizes = _named(node), values.meta(mask).sizes
    square = tuple(values.meta(named[name]).sizes[-2] for name in ("query", "key"))
    if not isinstance(allows, tuple) or sizes[-2:] != square:
        return None
    exact = {symbol: sympy.sympify(value) for symbol, value in planned.items()}
    relied_on: list[Any] = []

    def holds(relation: Any) -> bool:
        """True if a relation holds: for all values of the symbols, or for the planned ones."""
        found = bool(sympy.sympify(relation).xreplace(exact))
        if found and sympy.sympify(relation) is not sympy.true:
            relied_on.append(relation)
        return found

    is_causal = False
    for formula in allows:
        base, steps = _linear(formula)
        columns, rows = steps.pop(_INDEX[0], 0), steps.pop(_INDEX[1], 0)
        # at least 0 exactly for keys up to the query's own
        diagonal = not steps and rows > 0 and rows + columns == 0
        if diagonal and holds(base >= 0) and holds(base < rows):
            is_causal = True
        elif not holds(_end(formula, sizes, min) >= 0):
            return None
    return None if is_causal and square[0] != square[1] else (is_causal, relied_on)


def _known(graph: fx.Graph, values: Values) -> dict[fx.Node, Any]:
    """The statically known values of a captured graph; `Unknown` for other nodes."""
    changed = frozenset().union(*values.mutates.values())
    found: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        value = found[node] = values.of[node]
        if isinstance(value, Number):
            found[node] = value.expression
        elif not values.is_constant(node):
            found[node] = Unknown
            if _name(node) and values.is_tensor(node) and not values.storages[node] & changed:
                # an unknown form of the call
                with suppress(Unknown, LookupError, TypeError, ValueError, ArithmeticError):
                    found[node] = _made(node, found, values)
    return found


def _made(node: fx.Node, found: Mapping[fx.Node, Any], values: Values) -> Any:
    if any(found[source] is Unknown for source in node.all_input_nodes):
        raise Unknown
    args: Any = fx.map_arg(node.args, found.__getitem__)
    named = dict(fx.map_arg(node.kwargs, found.__getitem__))
    args = (*args, *(named.pop(name) for name in ("input", "other") if name in named))
    named = {k: v for k, v in named.items() if k not in ("device", "dtype", "pin_memory")}
    taken = list(filter(values.is_tensor, node.all_input_nodes))
    meta, name = values.meta(node), _name(node)
    before = values.meta(taken[0]).sizes if taken else ()
    if name == "getitem" and len(taken) > 1:
        name = "gather"
    return _fitted(_FORMULAS[name]((meta.sizes, before), *args, **named), meta)


_INDEX = sympy.symbols("i1:9", integer=True)  # of the last dimension, of the one before it, ...
Shapes = tuple[Shape, Shape]  # of the result, and of the first tensor


def _fitted(value: Any, meta: TensorMeta) -> Any:
    """A value as its tensor's dtype requires, a formula or a tuple of formulas. In a dimension of
    size 1 the index is 0."""
    if meta.dtype not in (torch.int64, torch.bool):
        raise Unknown
    if meta.dtype is torch.int64:
        value = _int(value)
    elif not isinstance(value, tuple):
        value = () if _literal(value) else (sympy.Integer(-1),)
    sizes = zip(_INDEX, reversed(meta.sizes), strict=False)
    return _each(value, {index: sympy.Integer(0) for index, size in sizes if size == 1})


def _each(value: Any, new: dict[Any, Any]) -> Any:
    if isinstance(value, tuple):
        return tuple(_each(formula, new) for formula in value)
    return sympy.expand(_int(value).xreplace(new))


def _int(value: Any) -> Any:
    """The formula of an integer. A bool counts as 0 or 1, if it is the same everywhere."""
    if isinstance(value, tuple):
        known = [_literal(formula) >= 0 for formula in value if not formula.free_symbols]
        if len(known) < len(value) and all(known):
            raise Unknown
        return sympy.Integer(all(known))
    if isinstance(value, int) or (isinstance(value, sympy.Basic) and value.is_integer):
        return sympy.sympify(int(value) if isinstance(value, bool) else value)
    raise Unknown


def _literal(value: Any) -> int:
    value = _int(value)
    if value.free_symbols:
        raise Unknown
    return int(value)


def _linear(formula: Any) -> tuple[Any, dict[Any, int]]:
    """The value where all indices are 0, and the steps along each index."""
    steps = {index: int(formula.coeff(index)) for index in _INDEX if formula.has(index)}
    return formula.xreplace(dict.fromkeys(steps, sympy.Integer(0))), steps


def _end(formula: Any, shape: Shape, side: Callable[[int, int], int]) -> Any:
    """The least (`side` is min) or largest (max) value in a tensor of this shape."""
    base, steps = _linear(formula)
    return base + sum(
        side(0, step) * (shape[-1 - _INDEX.index(i)] - 1) for i, step in steps.items()
    )


def _both(shapes: Shapes, left: Any, right: Any) -> Any:
    if not (isinstance(left, tuple) and isinstance(right, tuple)):
        raise Unknown
    return left + right


def _arange(shapes: Shapes, *args: Any, start: Any = 0, end: Any = None, step: Any = 1) -> Any:
    if len(args) > 1:
        start, step = args[0], args[2] if len(args) > 2 else step
    return _int(start) + _literal(step) * _INDEX[0]


def _product(shapes: Shapes, left: Any, right: Any) -> Any:
    one, other = _int(left), _int(right)
    return one * _literal(other) if one.free_symbols else _literal(one) * other


def _floordiv(shapes: Shapes, left: Any, right: Any) -> Any:
    x, by = _int(left), _literal(right)
    if by == 1:
        return x
    ends = {_literal(_end(x, shapes[1], side)) // by for side in (min, max)} if by > 0 else set()
    if len(ends) != 1:
        raise Unknown
    return ends.pop()


def _viewed(shapes: Shapes, x: Any, *_: Any) -> Any:
    """A value in another shape, if only dimensions of size 1 are added or removed, or if it is the
    same everywhere."""
    new, old = (
        [(i, n) for i, n in zip(_INDEX, reversed(shape), strict=False) if n != 1]
        for shape in shapes
    )
    if [n for _, n in new] == [n for _, n in old]:
        return _each(x, {a: b for (a, _), (b, _) in zip(old, new, strict=True)})
    return _literal(x)


def _unsqueeze(shapes: Shapes, x: Any, dim: int) -> Any:
    first = _position(shapes, dim)
    return _each(x, dict(zip(_INDEX[first:], _INDEX[first + 1 :], strict=False)))


def _getitem(shapes: Shapes, x: Any, index: Any) -> Any:
    given = list(index) if isinstance(index, tuple) else [index]
    if any(type(entry) is bool for entry in given):
        raise Unknown
    missing = len(shapes[1]) - sum(entry is not None and entry is not Ellipsis for entry in given)
    at = given.index(Ellipsis) if Ellipsis in given else len(given)
    left, made, new = len(shapes[1]), len(shapes[0]), {}
    for entry in [*given[:at], *[slice(None)] * missing, *given[at + 1 :]]:
        made -= entry is None or isinstance(entry, slice)
        if entry is None:
            continue
        left -= 1
        first = entry.start or 0 if isinstance(entry, slice) else entry
        if isinstance(entry, slice) and entry.step not in (None, 1):
            raise Unknown
        if not _has(x, _INDEX[left]):
            continue
        if _literal(first) < 0:
            raise Unknown
        new[_INDEX[left]] = _literal(first) + (_INDEX[made] if isinstance(entry, slice) else 0)
    return _each(x, {index: sympy.sympify(value) for index, value in new.items()})


def _gathered(shapes: Shapes, x: Any, index: Any) -> Any:
    """`x[i, j]`, with a formula for each dimension; unknown for negative indices."""
    new = dict(zip(_INDEX, reversed([*map(_int, index)]), strict=False))
    if len(index) != len(shapes[1]):
        raise Unknown
    for base, steps in (_linear(new[i]) for i in new if _has(x, i)):
        if _literal(base) < 0 or any(step < 0 for step in steps.values()):
            raise Unknown
    return _each(x, new)


def _position(shapes: Shapes, dim: int) -> int:
    """The number of dimensions of the result after `dim`."""
    return len(shapes[0]) - 1 - dim % len(shapes[0])


def _has(value: Any, index: Any) -> bool:
    return any(f.has(index) for f in (value if isinstance(value, tuple) else (_int(value),)))


def _diff(shapes: Shapes, x: Any, n: int = 1, dim: int = -1, prepend: Any = None) -> Any:
    """`torch.diff` along a dimension, if the prepended value continues the formula."""
    index = _INDEX[_position(shapes, dim)]
    first = _each(x, {index: sympy.Integer(-1)})
    if n != 1 or tuple(shapes[0]) != tuple(shapes[1]) or first != _int(prepend):
        raise Unknown
    return _int(x) - _each(x, {index: index - 1})


_FORMULAS: dict[str, Callable[..., Any]] = {
    "le": lambda shapes, x, y: (_int(y) - _int(x),),
    "lt": lambda shapes, x, y: (_int(y) - _int(x) - 1,),
    "ge": lambda shapes, x, y: (_int(x) - _int(y),),
    "gt": lambda shapes, x, y: (_int(x) - _int(y) - 1,),
    "eq": lambda shapes, x, y: (_int(y) - _int(x), _int(x) - _int(y)),
    "ne": lambda shapes, x, y: _literal(_int(y) - _int(x)),
    **dict.fromkeys(("and", "bitwise_and", "logical_and"), _both),
    "tril": lambda shapes, x, diagonal=0: _both(
        shapes, x, (_INDEX[1] - _INDEX[0] + _literal(diagonal),)
    ),
    "arange": _arange,
    "add": lambda shapes, x, y: _int(x) + _int(y),
    "sub": lambda shapes, x, y: _int(x) - _int(y),
    "mul": _product,
    "neg": lambda shapes, x: -_int(x),
    "floordiv": _floordiv,
    # a broadcast dimension has no index
    **dict.fromkeys(
        ("long", "bool", "contiguous", "clone", "to", "cpu", "cuda", "expand", "expand_as"),
        lambda shapes, x, *_, **__: x,
    ),
    **dict.fromkeys(("view", "reshape", "flatten", "squeeze"), _viewed),
    "unsqueeze": _unsqueeze,
    "getitem": _getitem,
    "gather": _gathered,
    "diff": _diff,
    "cumsum": lambda shapes, x, dim: _literal(x) * (_INDEX[_position(shapes, dim)] + 1),
    **dict.fromkeys(("ones", "new_ones", "ones_like"), lambda *_, **__: 1),
    **dict.fromkeys(("zeros", "new_zeros"), lambda *_, **__: 0),
    "full": lambda shapes, size, fill_value: _literal(fill_value),
    "new_full": lambda shapes, x, size, fill_value: _literal(fill_value),
}
