"""Replaces known masks by `is_causal=True`, so that they are never materialized.

    before: mask = (kv[None, :] <= q[:, None])        after: y = attention(..., is_causal=True)
            y = attention(..., attn_mask=mask)

A captured model cannot inspect its mask, so Hugging Face models build one where the plain loop
passes `is_causal=True`. A mask takes memory quadratic in the context length in every layer, and its
kernels cannot skip half of the work. Such a mask is known: it is computed from constants. Small
constants are computed here. For the large masks derived from them, with a row per query and a
column per key, it is enough to know whether they allow everything or exactly what is_causal allows.

The attention is the same up to rounding: another kernel computes it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import sympy
import torch
from torch import fx

from megacompile.ir.capture import Capture, ConstantInput
from megacompile.ir.symbols import Number, symbols_in
from megacompile.ir.tensors import TensorMeta, tensors_bytes
from megacompile.options import Lowering
from megacompile.passes.capture.affine import (
    Affine,
    Compared,
    Conditions,
    Unknown,
    as_affine,
    computed,
    of_tensor,
)
from megacompile.passes.capture.attention import (
    ANDS,
    COMPARES,
    INTEGERS,
    KEEP,
    ONES,
    PURE,
    RESHAPES,
    TRILS,
    bound_of,
    mask_of,
    set_mask,
)
from megacompile.passes.capture.calls import inline_checkpoints
from megacompile.passes.capture.propagate import Values, propagate
from megacompile.text import format_bytes

SMALL_NUMEL = 2**22  # for computed tensors


class _Allows(Enum):
    """The keys that a (..., queries, keys) mask allows."""

    ALL = "everything"
    CAUSAL = "each query the keys up to its own"


_UNKNOWN = object()


def use_causal_attention(
    capture: Capture, *, lowering: Lowering, small_numel: int = SMALL_NUMEL
) -> tuple[Capture, tuple[str, ...]]:
    """The capture without known attention masks, and a log line on them.

    An unchanged capture is returned as the same object; with `EAGER`, which is bitwise, always.

    Args:
        small_numel: tensors with at most this many elements are computed.
    """
    if lowering is Lowering.EAGER:
        return capture, ()
    own = inline_checkpoints(capture)
    if not any(map(mask_of, own.module.graph.nodes)):
        return capture, ()
    own = own.fresh()
    known = _Known(own, propagate(own), small_numel)
    sizes: dict[fx.Node, int] = {}
    count = 0
    for node in own.module.graph.nodes:
        mask = mask_of(node)
        if mask is None:
            continue
        allows = known.attention(node, mask)
        if allows is None:
            continue
        set_mask(node, causal=allows is _Allows.CAUSAL)
        sizes[mask] = tensors_bytes(known.meta(mask))
        count += 1
    if not count:
        line = "attention masks are materialized: they are not recognized for every size"
        return capture, ((line,) if capture.planned else ())
    _erase_unused(own.module.graph, list(sizes))
    own.module.recompile()
    size = format_bytes(max(sizes.values()))
    line = f"{count} attentions are causal without a mask, which would take {size}"
    return own.under(known.conditions.relied_on), (line,)


def _erase_unused(graph: fx.Graph, masks: Sequence[fx.Node]) -> None:
    """Remove masks without a reader, and the nodes that built them."""
    made = set(masks)
    for node in reversed(graph.nodes):
        if node in made and not node.users and node.op in ("call_function", "call_method"):
            made.update(source for source in node.all_input_nodes if source.target in PURE)
            graph.erase_node(node)


@dataclass(slots=True)
class _Known:
    """Statically known values of a captured graph."""

    capture: Capture
    values: Values
    small_numel: int
    found: dict[fx.Node, Any] = field(default_factory=dict)
    computed: dict[str, Any] = field(default_factory=dict)  # by operation
    changed: frozenset[int] = field(init=False)  # storages that any node writes
    conditions: Conditions = field(init=False)  # conditions on symbols for the known values

    def __post_init__(self) -> None:
        self.conditions = Conditions(self.capture.planned)
        self.changed = frozenset().union(*self.values.mutates.values())
        for node, item in self.capture.bound.items():
            if isinstance(item, ConstantInput):
                self.found[node] = item.value

    def meta(self, node: fx.Node) -> TensorMeta:
        meta = self.values.of[node]
        assert isinstance(meta, TensorMeta)
        return meta

    def attention(self, node: fx.Node, mask: fx.Node) -> _Allows | None:
        """The keys that its mask allows; None if unknown or inexpressible."""
        bound = bound_of(node)
        query, key = bound["query"], bound["key"]
        if not isinstance(query, fx.Node) or not isinstance(key, fx.Node):
            return None
        square = _sizes(self.meta(query))[-2], _sizes(self.meta(key))[-2]
        meta = self.meta(mask)
        if meta.dtype is not torch.bool or len(meta.shape) < 2 or _sizes(meta)[-2:] != square:
            return None
        allows = self.of(mask)
        if isinstance(allows, torch.Tensor):
            allows = _look(allows)
        if isinstance(allows, Affine) and allows.constant == 1:
            allows = _Allows.ALL
        if allows is _Allows.CAUSAL and square[0] != square[1]:
            return None
        return allows if isinstance(allows, _Allows) else None

    def of(self, node: fx.Node) -> Any:
        """A value on the CPU, an `_Allows`, or `_UNKNOWN`."""
        stack = [node]
        while stack:  # no recursion, because graphs are deep
            last = stack[-1]
            missing = [n for n in last.all_input_nodes if n not in self.found]
            if last in self.found:
                pass
            elif self.values.is_constant(last):
                self.found[last] = self.values.of[last]
            elif isinstance(self.values.of[last], Number):
                self.found[last] = self.values.of[last].expression
            elif not self._pure(last):
                self.found[last] = _UNKNOWN
            elif missing:
                stack += missing
                continue
            else:
                self.found[last] = self._make(last)
            stack.pop()
        return self.found[node]

    def _pure(self, node: fx.Node) -> bool:
        called = node.op in ("call_function", "call_method") and node.target in PURE
        return called and not self.values.storages[node] & self.changed

    def _make(self, node: fx.Node) -> Any:
        given = [self.found[source] for source in node.all_input_nodes]
        if any(value is _UNKNOWN for value in given):
            return _UNKNOWN
        meta = self.values.of[node]
        if symbols_in(meta) or any(isinstance(v, (Affine, sympy.Basic)) for v in given):
            return self._formula(node, meta) if isinstance(meta, TensorMeta) else _UNKNOWN
        small = not isinstance(meta, TensorMeta) or math.prod(meta.shape) <= self.small_numel
        if small and not any(isinstance(value, _Allows) for value in given):
            return self._compute(node)
        return self._allowed(node, meta) if isinstance(meta, TensorMeta) else _UNKNOWN

    def _formula(self, node: fx.Node, meta: TensorMeta) -> Any:
        """The value of a node whose size or elements change from call to call."""
        try:
            args: Any = fx.map_arg(node.args, self._as_formula)
            named = dict(fx.map_arg(node.kwargs, self._as_formula))
            if node.target in COMPARES and len(args) == 2 and not named:
                return self._compared(COMPARES[node.target], args[0], args[1], meta)
            if node.target in ANDS:
                return self._both(node, [*args, *named.values()], meta)
            if node.target in TRILS:
                whole = isinstance(args[0], Affine) and args[0].constant == 1
                plain = list((*args[1:], *named.values())) in ([], [0])
                return _Allows.CAUSAL if whole and plain else _UNKNOWN
            if args and args[0] is _Allows.CAUSAL:
                return args[0] if self._keeps(node, meta) else _UNKNOWN
            if not self._of_integers(node, meta, args):
                return _UNKNOWN
            name = str(getattr(node.target, "__name__", node.target)).strip("_")
            found = computed(name, args, named, len(meta.shape))
        except Unknown:
            return _UNKNOWN
        pairs = zip(found.of_rank(len(meta.shape)).steps, _sizes(meta), strict=True)
        return Affine(found.base, tuple(0 if size == 1 else step for step, size in pairs))

    def _as_formula(self, source: fx.Node) -> Any:
        value = self.found[source]
        return of_tensor(value) if isinstance(value, torch.Tensor) else value

    def _of_integers(self, node: fx.Node, meta: TensorMeta, args: Sequence[Any]) -> bool:
        """True for integer arithmetic, and for bools that are only rearranged."""
        metas = [self.values.of[source] for source in node.all_input_nodes]
        dtypes = [given.dtype for given in metas if isinstance(given, TensorMeta)]
        if not {meta.dtype, *dtypes} <= {torch.int64, torch.bool}:
            return False
        if node.target in (torch.diff, "diff") and _sizes(meta) != _sizes(metas[0]):
            return False  # adds several leading dimensions
        if node.target in (operator.getitem, "__getitem__") and torch.bool in dtypes[1:]:
            return False
        if meta.dtype is torch.int64:
            return True
        if node.target in ONES:
            return True
        known = [a.constant in (0, 1) for a in args if isinstance(a, Affine)]
        placed = node.target in KEEP | RESHAPES | {operator.getitem}
        return placed and (dtypes[:1] == [torch.bool] or all(known[:1]))

    def _compared(self, compare: Any, left: Any, right: Any, meta: TensorMeta) -> Any:
        """The value of a comparison: a single truth value, or the keys it allows as a mask."""
        if isinstance(left, _Allows) or isinstance(right, _Allows):
            return _UNKNOWN
        found = Compared(compare, as_affine(left), as_affine(right), _sizes(meta))
        truth = found.constant()
        if truth is None and found.is_causal(self.conditions):
            return _Allows.CAUSAL
        if truth is None and found.allows_all(self.conditions):
            truth = True
        return _UNKNOWN if truth is None else Affine(int(truth), (0,) * len(meta.shape))

    def _compute(self, node: fx.Node) -> Any:
        """The value on the CPU; shared by equal nodes, such as those of equal layers."""

        def named(source: fx.Node) -> Any:
            value = self.found[source]
            return f"%{id(value)}" if isinstance(value, torch.Tensor) else value

        key = repr((node.target, fx.map_arg(node.args, named), fx.map_arg(node.kwargs, named)))
        if key not in self.computed:
            self.computed[key] = self._run(node)
        return self.computed[key]

    def _run(self, node: fx.Node) -> Any:
        args = list(fx.map_arg(node.args, self.found.__getitem__))
        kwargs = dict(fx.map_arg(node.kwargs, self.found.__getitem__))
        kwargs.pop("pin_memory", None)
        if kwargs.get("device") is not None:
            kwargs["device"] = "cpu"
        for i, item in enumerate(args):  # string arguments of these functions are always devices
            index = node.target == "to" and type(item) is int
            if index or isinstance(item, (torch.device, str)):
                args[i] = "cpu"
        if node.target == "cuda":
            return args[0]
        try:
            with torch.device("cpu"):  # independent of the default
                if node.op == "call_method":
                    return getattr(args[0], str(node.target))(*args[1:], **kwargs)
                assert callable(node.target)
                return node.target(*args, **kwargs)
        except Exception:  # unsupported on the CPU
            return _UNKNOWN

    def _allowed(self, node: fx.Node, meta: TensorMeta) -> Any:
        """The keys that a large mask allows."""
        if len(meta.shape) < 2:
            return _UNKNOWN
        named = dict(node.kwargs)
        first = (named.pop("input"),) if "input" in named else ()  # positional or keyword
        given = (*node.args, *first, *named.values())
        values = [self.found[item] if isinstance(item, fx.Node) else item for item in given]
        if node.target in COMPARES and len(values) == 2:
            return _compared(node.target, values[0], values[1], meta.shape)
        values = [_seen(value, meta.shape) for value in values]
        masks = [value for value in values if isinstance(value, _Allows)]
        if node.target in ANDS and len(values) == 2:
            return self._both(node, values, meta)
        if node.target in ONES and meta.dtype is torch.bool:
            return _Allows.ALL
        if node.target in TRILS and masks and values[1:] in ([], [0]):
            return _Allows.CAUSAL
        if masks and values[0] is masks[0] and self._keeps(node, meta):
            return masks[0]  # not the shape argument of `a.expand_as(b)`
        return _UNKNOWN

    def _both(self, node: fx.Node, values: Sequence[Any], meta: TensorMeta) -> Any:
        sides, square = [], _sizes(meta)[-2:]
        for source, value in zip(node.all_input_nodes, values, strict=False):
            if isinstance(value, torch.Tensor) and value.dtype is torch.bool and bool(value.all()):
                value = _Allows.ALL  # of any shape, because it is broadcast
            elif isinstance(value, Affine) and value.constant == 1:
                value = _Allows.ALL
            elif not isinstance(value, _Allows) or _sizes(self.meta(source))[-2:] != square:
                return _UNKNOWN
            sides.append(value)
        if len(sides) != 2:
            return _UNKNOWN
        if _Allows.CAUSAL not in sides and symbols_in(meta):
            return Affine(1, (0,) * len(meta.shape))
        return _Allows.CAUSAL if _Allows.CAUSAL in sides else _Allows.ALL

    def _keeps(self, node: fx.Node, meta: TensorMeta) -> bool:
        """True if the last two dimensions are those of its mask argument."""
        before = self.meta(node.all_input_nodes[0])
        if meta.dtype is not torch.bool or _sizes(meta)[-2:] != _sizes(before)[-2:]:
            return False
        if node.target in KEEP:
            return True
        if node.target in RESHAPES:  # both last sizes exist and are not 1
            return min(meta.shape[-2:]) > 1
        if node.target is operator.getitem:
            return _keeps_rows(node.args[1], len(before.shape))
        return False


def _sizes(meta: TensorMeta) -> tuple[Any, ...]:
    """A tensor's sizes, with changing sizes as expressions."""
    return meta.shape if meta.symbolic is None else meta.symbolic.shape


def _keeps_rows(index: Any, dims: int) -> bool:
    """True if an index at most adds leading dimensions."""
    given = list(index) if isinstance(index, tuple) else [index]
    if not all(entry is None or entry is Ellipsis or entry == slice(None) for entry in given):
        return False
    missing = [slice(None)] * (dims - given.count(slice(None)))
    at = given.index(Ellipsis) if Ellipsis in given else len(given)
    return None not in (given[:at] + missing + given[at + 1 :])[-2:]


def _seen(value: Any, shape: Sequence[int]) -> Any:
    """The keys allowed by a computed small mask that is part of a larger one."""
    is_mask = isinstance(value, torch.Tensor) and value.dtype is torch.bool and value.dim() > 1
    if not is_mask or value.shape[-2:] != shape[-2:]:
        return value
    allows = _look(value)
    return allows if isinstance(allows, _Allows) else value


def _look(mask: torch.Tensor) -> Any:
    """The keys that a computed mask allows."""
    if bool(mask.all()):
        return _Allows.ALL
    square = torch.ones(mask.shape[-2:], dtype=torch.bool).tril()
    return _Allows.CAUSAL if bool((mask == square).all()) else _UNKNOWN


def _compared(target: Any, left: Any, right: Any, shape: Sequence[int]) -> Any:
    """The keys allowed by comparing a number per key with a number per query."""
    compare = COMPARES[target]
    if not isinstance(left, torch.Tensor) or not isinstance(right, torch.Tensor):
        return _UNKNOWN
    dtype = torch.result_type(left, right)  # in the comparison's dtype
    if dtype not in INTEGERS or compare is operator.ne:
        return _UNKNOWN
    left, right = (
        v.to(dtype).long().reshape((1,) * (len(shape) - v.dim()) + v.shape) for v in (left, right)
    )
    if compare is operator.eq:
        numbers = {int(end) for value in (left, right) for end in value.aminmax()}
        return _Allows.ALL if len(numbers) == 1 else _UNKNOWN
    keys, queries = (left, right) if compare in (operator.le, operator.lt) else (right, left)
    within = operator.lt if compare in (operator.lt, operator.gt) else operator.le
    if keys.shape[-2] != 1 or queries.shape[-1] != 1:
        return _UNKNOWN  # reversed, or not one number each
    keys, queries = keys[..., 0, :].expand(*keys.shape[:-2], shape[-1]), queries[..., 0]
    if bool(within(keys.amax(), queries.amin())):
        return _Allows.ALL
    if queries.shape[-1] != keys.shape[-1]:
        return _UNKNOWN
    # A query sees the largest key up to its own, and does not see the smallest one after it.
    seen = within(keys.cummax(-1).values, queries)
    later = within(keys.flip(-1).cummin(-1).values.flip(-1)[..., 1:], queries[..., :-1])
    return _Allows.CAUSAL if bool(seen.all()) and not bool(later.any()) else _UNKNOWN
