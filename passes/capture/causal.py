"""Replaces known masks by `is_causal=True`, so that they are never materialized.

    before: mask = (kv[None, :] <= q[:, None])        after: y = attention(..., is_causal=True)
            y = attention(..., attn_mask=mask)

A captured model cannot inspect its mask, so Hugging Face models build one where the plain loop
passes `is_causal=True`. A mask takes memory quadratic in the context length in every layer, and its
kernels cannot skip half of the work. Such a mask is known: it is computed from constants and
lengths alone, by operators whose results have formulas (see `affine`).

The attention is the same up to rounding: another kernel computes it.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from megacompile.ir.capture import Capture, ConstantInput
from megacompile.ir.tensors import Number, TensorMeta, tensors_bytes
from megacompile.options import Lowering
from megacompile.passes.capture.affine import (
    CAUSAL,
    COMPARISONS,
    FORMULAS,
    Affine,
    Conditions,
    Unknown,
    compared,
    computed,
)
from megacompile.passes.capture.propagate import Values, propagate
from megacompile.text import format_bytes

_ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
# Names of pure functions. torch 2.11's Dynamo captures some operators as methods (`__eq__`).
_ANDS = frozenset({"and", "bitwise_and", "logical_and"})
_KEEPS = frozenset({"to", "bool", "contiguous", "clone", "expand", "expand_as"})
_RESHAPES = frozenset({"view", "reshape", "unsqueeze"})
_PURE = COMPARISONS | _ANDS | FORMULAS.keys() | {"tril", "size"}


def use_causal_attention(
    capture: Capture, *, lowering: Lowering
) -> tuple[Capture, tuple[str, ...]]:
    """The capture without known attention masks, and a log line on them.

    An unchanged capture is returned as the same object; with `EAGER`, which is bitwise, always.
    """
    if lowering is Lowering.EAGER:
        return capture, ()
    if not any(map(_mask_of, capture.module.graph.nodes)):
        return capture, ()
    own = capture.fresh()
    known = _Known(own, propagate(own))
    sizes: dict[fx.Node, int] = {}
    count = 0
    for node in own.module.graph.nodes:
        mask = _mask_of(node)
        allows = None if mask is None else known.attention(node, mask)
        if mask is None or allows is None:
            continue
        named = _named(node) | {"attn_mask": None, "is_causal": allows is CAUSAL}
        node.args = tuple(named.pop(name) for name in _ATTENTION[:3])
        node.kwargs = named
        sizes[mask] = tensors_bytes(known.values.meta(mask))
        count += 1
    if not count:
        line = "attention masks are materialized: they are not recognized for every size"
        return capture, ((line,) if capture.planned else ())
    _erase_unused(own.module.graph, list(sizes))
    size = format_bytes(max(sizes.values()))
    line = f"{count} attentions are causal without a mask, which would take {size}"
    return own.under(known.conditions.relied_on), (line,)


def _mask_of(node: fx.Node) -> fx.Node | None:
    """The mask that an attention takes."""
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
    name = name.strip("_")
    return name if name in _PURE and (theirs if function else node.op == "call_method") else ""


def _erase_unused(graph: fx.Graph, masks: Sequence[fx.Node]) -> None:
    """Remove masks without a reader, and the nodes that built them."""
    made = set(masks)
    for node in reversed(graph.nodes):
        if node in made and not node.users and node.op in ("call_function", "call_method"):
            made.update(filter(_name, node.all_input_nodes))
            graph.erase_node(node)


@dataclass(slots=True)
class _Known:
    """Statically known values of a captured graph."""

    capture: Capture
    values: Values
    # formulas, `CAUSAL`, expressions and constants; `Unknown` for other values
    found: dict[fx.Node, Any] = field(default_factory=dict)
    changed: frozenset[int] = field(init=False)  # storages that any node writes
    conditions: Conditions = field(init=False)  # conditions on symbols for the known values

    def __post_init__(self) -> None:
        self.conditions = Conditions(self.capture.planned)
        self.changed = frozenset().union(*self.values.mutates.values())
        for node, item in self.capture.bound.items():
            if isinstance(item, ConstantInput):
                self.found[node] = item.value

    def attention(self, node: fx.Node, mask: fx.Node) -> Any:
        """The value of its mask if it is `CAUSAL` or allows everything; None otherwise."""
        named, meta = _named(node), self.values.meta(mask)
        square = tuple(self.values.meta(named[name]).sizes[-2] for name in ("query", "key"))
        if meta.dtype is not torch.bool or meta.sizes[-2:] != square:
            return None
        allows = self.of(mask)
        if allows is CAUSAL and square[0] != square[1]:
            return None
        return allows if allows is CAUSAL or _is_all(allows) else None

    def of(self, node: fx.Node) -> Any:
        """A known value, or `Unknown`."""
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
                self.found[last] = Unknown
            elif missing:
                stack += missing
                continue
            else:
                try:
                    self.found[last] = self._made(last, self.values.meta(last))
                except Unknown:
                    self.found[last] = Unknown
            stack.pop()
        return self.found[node]

    def _pure(self, node: fx.Node) -> bool:
        called = bool(_name(node)) and self.values.is_tensor(node)
        return called and not self.values.storages[node] & self.changed

    def _made(self, node: fx.Node, meta: TensorMeta) -> Any:
        """The value of a pure function of known values."""
        if any(self.found[source] is Unknown for source in node.all_input_nodes):
            raise Unknown
        args: Any = fx.map_arg(node.args, self.found.__getitem__)
        named = dict(fx.map_arg(node.kwargs, self.found.__getitem__))
        args = (*args, *(named.pop(name) for name in ("input", "other") if name in named))
        name = _name(node)
        if name in COMPARISONS and len(args) == 2:
            return compared(name, args[0], args[1], meta.sizes, self.conditions)
        if name in _ANDS:
            return self._both(node, args, meta)
        if name == "tril":
            if _is_all(args[0]) and [*args[1:], *named.values()] in ([], [0]):
                return CAUSAL
            raise Unknown
        if args and args[0] is CAUSAL:
            if self._keeps(node, name, meta):
                return CAUSAL
            raise Unknown
        return self._computed(node, name, args, named, meta)

    def _computed(
        self, node: fx.Node, name: str, args: Sequence[Any], named: dict[str, Any], meta: TensorMeta
    ) -> Affine:
        """The formula of integer arithmetic, or of bools that are only rearranged."""
        metas = [self.values.of[source] for source in node.all_input_nodes]
        dtypes = [given.dtype for given in metas if isinstance(given, TensorMeta)]
        if not {meta.dtype, *dtypes} <= {torch.int64, torch.bool}:
            raise Unknown
        if name == "diff" and meta.sizes != metas[0].sizes:
            raise Unknown  # adds several leading dimensions
        if name == "getitem" and torch.bool in dtypes[1:]:
            raise Unknown
        found = computed(name, args, named, meta.sizes)
        rearranged = name in _KEEPS | _RESHAPES | {"getitem"} and dtypes[:1] == [torch.bool]
        if meta.dtype is torch.bool and not rearranged and found.constant not in (0, 1):
            raise Unknown
        return found

    def _both(self, node: fx.Node, sides: Sequence[Any], meta: TensorMeta) -> Any:
        if meta.dtype is not torch.bool or not all(s is CAUSAL or _is_all(s) for s in sides):
            raise Unknown
        for source in node.all_input_nodes:  # one that allows everything may be broadcast
            before = self.values.meta(source).sizes
            if self.found[source] is CAUSAL and before[-2:] != meta.sizes[-2:]:
                raise Unknown
        return CAUSAL if CAUSAL in sides else Affine(1, (0,) * len(meta.shape))

    def _keeps(self, node: fx.Node, name: str, meta: TensorMeta) -> bool:
        """True if the last two dimensions are those of its mask argument."""
        before = self.values.meta(node.all_input_nodes[0])
        if meta.dtype is not torch.bool or meta.sizes[-2:] != before.sizes[-2:]:
            return False
        if name in _RESHAPES:  # both last sizes exist and are not 1
            return min(meta.shape[-2:]) > 1
        if name == "getitem":
            return _keeps_rows(node.args[1], len(before.shape))
        return name in _KEEPS


def _is_all(value: Any) -> bool:
    """True for a mask that allows everything."""
    return isinstance(value, Affine) and value.constant == 1


def _keeps_rows(index: Any, dims: int) -> bool:
    """True if an index at most adds leading dimensions."""
    given = list(index) if isinstance(index, tuple) else [index]
    if not all(entry is None or entry is Ellipsis or entry == slice(None) for entry in given):
        return False
    missing = [slice(None)] * (dims - given.count(slice(None)))
    at = given.index(Ellipsis) if Ellipsis in given else len(given)
    return None not in (given[:at] + missing + given[at + 1 :])[-2:]
