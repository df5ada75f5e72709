"""Replace a head and its loss by the chunked loss.

Sizes that change from call to call are computed from the graph's own numbers.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx

from megacompile.ir.capture import Capture
from megacompile.ir.head import linear_cross_entropy
from megacompile.ir.symbols import Number
from megacompile.ir.tensors import TensorMeta
from megacompile.passes.capture.propagate import Values
from megacompile.passes.edit import put, written
from megacompile.text import format_bytes

_COPIES = {"contiguous", "clone", torch.clone}
RESHAPES = {"view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", *_COPIES} | {
    torch.reshape,
    torch.flatten,
    torch.unflatten,
    torch.squeeze,
    torch.unsqueeze,
}


@dataclass(frozen=True, slots=True)
class FoundHead:
    """A linear layer, the operations on its logits, and their loss."""

    linear: fx.Node
    chain: tuple[fx.Node, ...]  # from the linear layer's user to the loss's input
    loss: fx.Node
    hidden: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    target: fx.Node
    class_weight: fx.Node | None
    mean: bool
    ignore_index: int
    label_smoothing: float
    rows: int  # planned
    any_rows: Any  # an expression of the symbols, or `rows`
    classes: int
    row_bytes: int
    chunk_rows: int  # maximum per chunk if the number of rows changes

    @property
    def logits_bytes(self) -> int:
        """Bytes of the logits for the planned number of rows."""
        return self.rows * self.row_bytes

    @property
    def is_symbolic(self) -> bool:
        """True if the number of rows changes from call to call."""
        return isinstance(self.any_rows, sympy.Basic)

    @property
    def chunks(self) -> str:
        """The size of a chunk, in words."""
        return f"{'at most ' if self.is_symbolic else ''}{self.chunk_rows} tokens"

    def __str__(self) -> str:
        size = format_bytes(self.logits_bytes)
        planned = f", planned for {self.rows}" if self.is_symbolic else ""
        return f"{self.any_rows} tokens by {self.classes} classes ({size} of logits{planned})"


def rewrite_head(capture: Capture, values: Values, found: FoundHead) -> None:
    """Replace the loss by the chunked loss and remove the logits, in the capture's graph.

    Args:
        values: the values of the graph's nodes.
    """
    _Rewriter(capture, values, found).rewrite()


@dataclass(slots=True)
class _Rewriter:
    capture: Capture
    values: Values
    found: FoundHead
    graph: fx.Graph = field(init=False)
    symbols: dict[sympy.Symbol, fx.Node] = field(init=False)

    def __post_init__(self) -> None:
        self.graph = self.capture.module.graph
        self.symbols = self.capture.symbols

    def rewrite(self) -> None:
        """Change the graph."""
        found = self.found
        self._replace_questions()
        with self.graph.inserting_before(found.loss):
            hidden = self._hidden()
            loss = self.graph.call_function(
                linear_cross_entropy,
                (hidden, found.weight, found.bias, found.target, found.class_weight),
                {
                    "ignore_index": found.ignore_index,
                    "label_smoothing": found.label_smoothing,
                    "mean": found.mean,
                    "chunk_rows": found.chunk_rows,
                    "dtype": self._meta(found.loss).dtype,
                },
            )
        found.loss.replace_all_uses_with(self._like_linear(loss))
        for node in (found.loss, *reversed(found.chain), found.linear):
            self.graph.erase_node(node)

    def _replace_questions(self) -> None:
        """Replace reads of the logits' sizes by numbers."""
        found = self.found
        for node in (found.linear, *found.chain):
            for user in list(node.users):
                if user not in found.chain and user is not found.loss:
                    with self.graph.inserting_before(user):
                        number = written(self.graph, self.values.of[user], self.symbols)
                    put(user, number)
                    self.graph.erase_node(user)

    def _hidden(self) -> fx.Node:
        """The linear layer's input with the slices and reshapes of the logits applied."""
        hidden = self.found.hidden
        width = self._meta(hidden).shape[-1]
        for node in self.found.chain:
            if node.target is operator.getitem:
                index = fx.map_arg(node.args[1], self.values.of.__getitem__)
                index = written(self.graph, index, self.symbols)
                made = self.graph.call_function(operator.getitem, (hidden, index))
            elif node.target in RESHAPES - _COPIES:
                shape = (*written(self.graph, self._leading(node), self.symbols), width)
                made = self.graph.call_method("reshape", (hidden, shape))
            else:
                continue
            hidden = self._like_linear(made)
        return hidden

    def _meta(self, node: fx.Node) -> TensorMeta:
        meta = self.values.of[node]
        assert isinstance(meta, TensorMeta)
        return meta

    def _leading(self, node: fx.Node) -> tuple[Any, ...]:
        """All sizes of a tensor except the last; changing sizes as numbers."""
        meta = self._meta(node)
        if meta.symbolic is None:
            return meta.shape[:-1]
        pairs = zip(meta.symbolic.shape[:-1], meta.shape[:-1], strict=True)
        return tuple(Number(e, n) if isinstance(e, sympy.Basic) else n for e, n in pairs)

    def _like_linear(self, node: fx.Node) -> fx.Node:
        """A new node in the modules of the linear layer."""
        meta = self.found.linear.meta
        node.meta = {k: v for k, v in meta.items() if k in ("nn_module_stack", "stack_trace")}
        return node
