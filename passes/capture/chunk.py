"""Compute the head of a language model in chunks, without materializing all logits.

    before: logits = linear(x, weight)               after: x = x[:, :-1]
            logits = logits.float()[:, :-1]                 x = x.reshape(-1, H)
            logits = logits.reshape(-1, C)                  loss = linear_cross_entropy(
            loss = cross_entropy(logits, y)                     x, weight, y, chunk_rows=...)

Slices and reshapes of the leading dimensions between the linear layer and the loss are applied to
the layer's input instead. Casts to float32 between them are dropped, because the operator sums in
float32. Any other use of the logits leaves the graph unchanged, and the returned line states why.
The new code replaces the loss and belongs to the module of the linear layer.

Sizes may be symbols. The operator computes the number of chunks at run time. The size limit for
chunking is a condition on the symbols: a call on the other side of the limit gets another program.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
import torch.nn.functional as F
from torch import fx

from megacompile import compat, notices
from megacompile.ir.capture import Capture
from megacompile.ir.head import ALIGNED_ROWS, equal_chunks, linear_cross_entropy
from megacompile.ir.tensors import Number, TensorMeta
from megacompile.options import Head, Lowering
from megacompile.passes.capture.calls import widened
from megacompile.passes.capture.propagate import Values
from megacompile.passes.edit import put, written
from megacompile.text import format_bytes

CHUNK_BYTES = 2**30  # of logits at a time; "auto" keeps smaller heads whole

_CASTS = {"float", "to", "type", widened}
_COPIES = {"contiguous", "clone", torch.clone}
_RESHAPES = {"view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze"} | {
    *(torch.reshape, torch.flatten, torch.unflatten, torch.squeeze, torch.unsqueeze)
}
_PERMUTES = {"permute", torch.permute}
_TRANSPOSES = {"transpose", torch.transpose, "swapaxes", torch.swapaxes, *_PERMUTES}
_LOSS = (  # the arguments of `F.cross_entropy`
    *("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction"),
    "label_smoothing",
)
_EVERY_CLASS = slice(None), slice(0, None)


def chunk_head(
    capture: Capture,
    *,
    values: Values,
    head: Head,
    lowering: Lowering,
    chunk_bytes: int = CHUNK_BYTES,
) -> Capture:
    """The capture with every possible head in chunks, changed in place; `values` are of its graph,
    and get a line on each loss. `chunk_bytes`: of logits per chunk."""
    losses = capture.module.graph.find_nodes(op="call_function", target=F.cross_entropy)
    finder, reasons = _Finder(capture, values, chunk_bytes), values.reasons
    if not losses and head is Head.CHUNKED:
        reasons.append("no head: no cross_entropy was captured")
    for loss in losses:
        try:
            if head is Head.WHOLE:
                raise _Whole("head='whole'")
            if head is Head.AUTO and lowering is Lowering.EAGER:
                raise _Whole("lowering='eager' is bitwise; head='chunked' is equal up to rounding")
            found = finder.find(loss)
            if head is Head.AUTO:
                if isinstance(found.any_rows, sympy.Basic):  # valid on this side of the limit
                    most = chunk_bytes // found.row_bytes
                    side = sympy.Le if found.rows <= most else sympy.Gt
                    values.require([side(found.any_rows, most)])
                if found.logits_bytes <= chunk_bytes:
                    size, least = format_bytes(found.logits_bytes), format_bytes(chunk_bytes)
                    raise _Whole(f"its logits take {size}, no more than {least}")
        except _Whole as why:
            reasons.append(f"the head is whole: {why}")
            if head is Head.CHUNKED:
                notices.warn(f"megacompile(): {capture.name}: head='chunked', but {reasons[-1]}")
            continue
        finder.rewrite(found)
        reasons.append(f"the head of {found}")
    return capture


class _Whole(Exception):
    """The reason why a head stays whole."""


@dataclass(frozen=True, slots=True)
class _Head:
    """A linear layer, the operations on its logits, and their loss."""

    linear: fx.Node
    chain: tuple[fx.Node, ...]  # from the linear layer's user to the loss's input
    loss: fx.Node
    given: tuple[Any, ...]  # hidden states, weight, bias, target, class weight
    options: dict[str, Any]  # of `linear_cross_entropy`
    rows: int  # planned
    any_rows: Any  # an expression of the symbols, or `rows`
    classes: int
    row_bytes: int

    @property
    def logits_bytes(self) -> int:
        return self.rows * self.row_bytes

    def __str__(self) -> str:
        size = format_bytes(self.logits_bytes)
        changes = isinstance(self.any_rows, sympy.Basic)
        planned, most = (f", planned for {self.rows}", "at most ") if changes else ("", "")
        return (
            f"{self.any_rows} tokens by {self.classes} classes ({size} of logits{planned}) is "
            f"computed in chunks of {most}{self.options['chunk_rows']} tokens"
        )


def rows_of_a_chunk(rows: int | None, row_bytes: int, limit_bytes: int) -> int:
    """Rows per chunk, for the fewest chunks within the limit, of equal size and in whole tiles if
    possible; if the number of rows changes (None), as many as the limit allows."""
    most = max(1, limit_bytes // row_bytes)
    most -= most % ALIGNED_ROWS if most > ALIGNED_ROWS else 0
    return most if rows is None else equal_chunks(rows, most)


@dataclass(frozen=True, slots=True)
class _Finder:
    capture: Capture
    values: Values
    limit_bytes: int  # of logits at a time

    def find(self, loss: fx.Node) -> _Head:
        """The head of a loss; raises `_Whole` if it cannot be chunked."""
        of = self._bind(loss, _LOSS)
        reduction = self.literal(of.get("reduction", "mean"))
        if reduction not in ("mean", "sum") or {of.get("size_average"), of.get("reduce")} != {None}:
            raise _Whole(f"{loss} has reduction={reduction!r}, size_average or reduce")
        chain, linear = self._walk(loss, of["input"])
        parts = self._bind(linear, ("input", "weight", "bias"))
        read = (parts["input"], parts["weight"], parts.get("bias"))
        rows, any_rows = self._rows([linear, *chain], of["target"])
        classes = self.meta(linear).shape[-1]
        row_bytes = classes * self.meta(linear).dtype.itemsize
        known = rows if any_rows == rows else None
        options = {
            "ignore_index": int(self.literal(of.get("ignore_index", -100))),
            "label_smoothing": float(self.literal(of.get("label_smoothing", 0.0))),
            "mean": reduction == "mean",
            "chunk_rows": rows_of_a_chunk(known, row_bytes, self.limit_bytes),
            "dtype": self.meta(loss).dtype,
        }
        # moving the linear layer down to its loss must not change its inputs or their state
        nodes = list(self.capture.module.graph.nodes)
        held = {key for node in read if node is not None for key in self.values.storages[node]}
        for node in nodes[nodes.index(linear) : nodes.index(loss)]:
            changes = self.values.mutates[node] & held or node.target is compat.SET_GRAD_ENABLED
            if changes or "_autocast" in _target(node):
                raise _Whole(f"{node} changes its input, weight, grad mode or autocast in between")
        given = (*read, of["target"], of.get("weight"))
        return _Head(linear, chain, loss, given, options, rows, any_rows, classes, row_bytes)

    def literal(self, value: Any) -> Any:
        """A value in which known numbers replace the nodes that compute them."""

        def number(node: fx.Node) -> Any:
            if not self.values.is_known(node):
                raise _Whole(f"{node} is a tensor where a number was expected")
            return self.values.of[node]

        return fx.map_arg(value, number)

    def _bind(self, node: fx.Node, names: Sequence[str]) -> dict[str, Any]:
        bound: dict[str, Any] = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
        if bound.keys() - set(names) or len(node.args) > len(names):
            raise _Whole(f"{node} has unknown arguments")
        return bound

    def meta(self, node: Any) -> TensorMeta:
        meta = self.values.of.get(node) if isinstance(node, fx.Node) else None
        if not isinstance(meta, TensorMeta):
            raise _Whole(f"{node} is not a tensor")
        return meta

    def _walk(self, loss: fx.Node, source: Any) -> tuple[tuple[fx.Node, ...], fx.Node]:
        """(nodes between the linear layer and the loss, linear layer)."""
        chain: list[fx.Node] = []
        node, user = source, loss
        while True:
            self.meta(node)
            for other in node.users:
                if other.op == "output":
                    raise _Whole(f"the logits ({node}) are returned to the caller; return the loss")
                looks = self.values.of[other] is not None and not self.values.mutates[other]
                if other is not user and not (looks and self.values.is_known(other)):  # for a size
                    raise _Whole(f"the logits ({node}) are also used by {other}")
            if node.target is F.linear:
                return tuple(reversed(chain)), node
            if not self._commutes(node, last=user is loss or user.target is widened):
                raise _Whole(f"its logits come through {node} ({_target(node)})")
            chain.append(node)
            node, user = _source(node), node

    def _commutes(self, node: fx.Node, *, last: bool) -> bool:
        """True if a node between the head and its loss commutes with the linear layer."""
        meta, before = self.meta(node), self.meta(_source(node))
        if node.target in _TRANSPOSES:
            return last and self._is_class_first(node)
        if meta.sizes[-1:] != before.sizes[-1:] or meta.device != before.device:
            return False
        if node.target is operator.getitem:
            return self._keeps_classes(node, len(before.shape))
        if node.target in _CASTS and meta.dtype == torch.float32:
            return before.dtype.itemsize <= meta.dtype.itemsize
        return node.target in _RESHAPES | _COPIES | _CASTS and meta.dtype == before.dtype

    def _keeps_classes(self, node: fx.Node, dims: int) -> bool:
        """True for an index that keeps all classes, the last dimension."""
        if not all(map(self.values.is_known, node.all_input_nodes[1:])):
            return False
        index = self.literal(node.args[1])
        entries = index if isinstance(index, tuple) else (index,)
        if not all(e is Ellipsis or type(e) in (int, slice, Number) for e in entries):
            return False
        count = sum(e is not Ellipsis for e in entries)
        reaches_last = entries[-1] is not Ellipsis and (count == dims or Ellipsis in entries)
        return not reaches_last or entries[-1] in _EVERY_CLASS

    def _is_class_first(self, node: fx.Node) -> bool:
        """True if it transposes (N, L, C) to (N, C, L), the layout for cross_entropy."""
        given = self.literal((*node.args[1:], *node.kwargs.values()))
        order = given[0] if len(given) == 1 and isinstance(given[0], (tuple, list)) else given
        if len(self.meta(node).shape) != 3 or not all(type(d) is int for d in order):
            return False
        dims = [d % 3 for d in order]
        return dims == [0, 2, 1] if node.target in _PERMUTES else sorted(dims) == [1, 2]

    def _rows(self, chain: Sequence[fx.Node], target: Any) -> tuple[int, Any]:
        """The rows of the loss's input: the planned number, and an expression of the symbols."""
        logits = next(node for node in reversed(chain) if node.target is not widened)
        shape, meta = self.meta(logits).shape, self.meta(target)
        leading = (shape[0], *shape[2:]) if len(shape) > 1 else ()
        rows = math.prod(leading)
        if len(shape) > 2 and logits.target not in _TRANSPOSES:
            raise _Whole(f"the second dimension of {list(shape)} is not that of the classes")
        if meta.dtype != torch.int64 or meta.shape != leading:
            raise _Whole(f"the targets are {meta}, not i64{list(leading)} class indices")
        if rows == 0 or self.meta(logits).device != self.capture.device:
            raise _Whole("there are no tokens, or they are on another device")
        return rows, math.prod(meta.sizes)

    def rewrite(self, found: _Head) -> None:
        """Replace a loss by the chunked loss and remove the logits, in the capture's graph."""
        graph = self.capture.module.graph
        for node in (found.linear, *found.chain):
            for user in list(node.users):
                if user not in found.chain and user is not found.loss:  # it reads a size
                    with graph.inserting_before(user):
                        number = written(graph, self.values.of[user], self.capture.symbols)
                    put(user, number)
                    graph.erase_node(user)
        with graph.inserting_before(found.loss):
            given = (self._hidden(graph, found), *found.given[1:])
            loss = graph.call_function(linear_cross_entropy, given, found.options)
        found.loss.replace_all_uses_with(_placed_like(found.linear, loss))
        for node in (found.loss, *reversed(found.chain), found.linear):
            graph.erase_node(node)
        needs_grad = self.meta(found.loss).requires_grad
        for node in graph.nodes:
            if node not in self.values.of:
                self.values.add(node, requires_grad=needs_grad)

    def _hidden(self, graph: fx.Graph, found: _Head) -> fx.Node:
        """The linear layer's input with the slices and reshapes of the logits applied."""
        hidden: fx.Node = found.given[0]
        width = self.values.meta(hidden).shape[-1]
        for node in found.chain:
            if node.target is operator.getitem:
                index = fx.map_arg(node.args[1], self.values.of.__getitem__)
                index = written(graph, index, self.capture.symbols)
                made = graph.call_function(operator.getitem, (hidden, index))
            elif node.target in _RESHAPES:
                meta = self.values.meta(node)  # changing sizes are computed from numbers
                pairs = zip(meta.sizes[:-1], meta.shape[:-1], strict=True)
                leading = [Number(e, n) if isinstance(e, sympy.Basic) else n for e, n in pairs]
                shape = (*written(graph, leading, self.capture.symbols), width)
                made = graph.call_method("reshape", (hidden, shape))
            else:
                continue
            hidden = _placed_like(found.linear, made)
        return hidden


def _placed_like(linear: fx.Node, node: fx.Node) -> fx.Node:
    """A new node, in the modules of the linear layer."""
    node.meta = {k: v for k, v in linear.meta.items() if k in ("nn_module_stack", "stack_trace")}
    return node


def _source(node: fx.Node) -> Any:
    return node.args[0] if node.args else node.kwargs.get("input")


def _target(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target))
