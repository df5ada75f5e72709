"""Run a captured graph on fake tensors, node by node, and record each value."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from megacompile import compat
from megacompile.ir.capture import Capture, ConstantInput, NumberInput, ParamInput, TensorInput
from megacompile.ir.tensors import Number, Symbols, TensorMeta, has_numbers, parts_of, symbols_in
from megacompile.packed import is_wrapper, taken_apart
from megacompile.text import source_line

_CONSTANTS = (int, float, bool, complex, str, type(None), torch.dtype, torch.device)


@dataclass(slots=True)
class Values:
    """The results of `propagate` for each node of a captured graph."""

    of: dict[fx.Node, Any] = field(default_factory=dict)  # TensorMeta, constants, tuples of them
    storages: dict[fx.Node, frozenset[int]] = field(default_factory=dict)
    mutates: dict[fx.Node, frozenset[int]] = field(default_factory=dict)  # storages
    same_as: dict[fx.Node, fx.Node] = field(default_factory=dict)  # changed -> changing node
    wrappers: set[fx.Node] = field(default_factory=set)  # tensors derived from others
    # value created without requires_grad -> the in-place change that set it
    requires_grad_after: dict[fx.Node, fx.Node] = field(default_factory=dict)
    symbols: Symbols | None = None  # of the captured graph, if it has any

    def is_constant(self, node: fx.Node) -> bool:
        """True if the node's value can be a literal in the code."""
        return all(isinstance(part, _CONSTANTS) for part in parts_of(self.of[node]))

    def is_known(self, node: fx.Node) -> bool:
        """True if it consists of constants, and of numbers that change from call to call."""
        return all(isinstance(part, (*_CONSTANTS, Number)) for part in parts_of(self.of[node]))

    def is_number(self, node: fx.Node) -> bool:
        """True if the node's value is or contains a number that changes from call to call."""
        return has_numbers(self.of[node]) and self.is_known(node)

    def origin(self, node: fx.Node) -> fx.Node:
        """The node that created the tensor object that `node` returns: `x` for `x.add_(1)`."""
        while node in self.same_as:
            node = self.same_as[node]
        return node

    def is_tensor(self, node: fx.Node) -> bool:
        return isinstance(self.of[node], TensorMeta)

    def meta(self, node: fx.Node) -> TensorMeta:
        """The description of a tensor."""
        meta = self.of[node]
        assert isinstance(meta, TensorMeta), f"{node} is not a tensor"
        return meta


class Interpreter(fx.Interpreter):
    def __init__(self, capture: Capture, values: Values) -> None:
        super().__init__(capture.module, garbage_collect_values=False)
        planned = capture.planned
        self.symbols = Symbols(planned, compat.SymbolicFakes(planned)) if planned else None
        self.fakes = compat.fake_mode() if self.symbols is None else self.symbols.fakes
        self.capture = capture
        self.values = values
        self.constants: dict[str, torch.Tensor] = {}

    def fake_constants(self) -> dict[str, torch.Tensor]:
        """Fake tensors for the captured graph's own tensors."""
        nodes = self.capture.module.graph.find_nodes(op="get_attr")
        held = {node.target: self.fetch_attr(node.target) for node in nodes}
        return {k: TensorMeta.of(v).empty() for k, v in held.items() if isinstance(v, torch.Tensor)}

    def fake_input(self, item: Any) -> Any:
        if isinstance(item, ConstantInput):
            return item.value
        if isinstance(item, NumberInput):
            return item.number.zeros()
        return self.meta_of(item).empty()

    def meta_of(self, item: ParamInput | TensorInput) -> TensorMeta:
        """The description of an input that is a tensor."""
        if isinstance(item, TensorInput):
            return item.meta
        param = item.info
        return TensorMeta(
            param.shape, param.dtype, param.stride, item.requires_grad, self.capture.device
        )

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target in self.constants:
            return self.constants[target]
        return super().get_attr(target, args, kwargs)

    def value_of(self, node: fx.Node) -> Any:
        """The value of a node."""
        return self.env[node]

    def storage_of(self, tensor: torch.Tensor) -> int:
        """A key that is equal for tensors that share memory."""
        return compat.storage_key(tensor)

    def run_node(self, n: fx.Node) -> Any:
        # with their current values, which in-place changes replace
        taken = [t for source in n.all_input_nodes for t in tensors_in(self.value_of(source))]
        before = [(tensor, compat.from_functional(tensor)) for tensor in taken]
        value = super().run_node(n)
        self.values.of[n] = _describe(value)
        if self.symbols is not None:
            self.symbols.fakes.note_guards(lambda: source_line(str(n.meta.get("stack_trace", ""))))
        if is_wrapper(value):
            self.values.wrappers.add(n)
        for source in n.all_input_nodes if isinstance(value, torch.Tensor) else ():
            if self.value_of(source) is value:
                self.values.same_as[n] = source
        self.values.storages[n] = frozenset(map(self.storage_of, tensors_in(value)))
        self.values.mutates[n] = frozenset(
            self.storage_of(tensor)
            for tensor, old in before
            if compat.from_functional(tensor) is not old
        )
        changed, after = self.values.mutates[n], self.values.requires_grad_after
        # a tensor from `torch.zeros` requires grad once one that does is written into a part of it
        for holder in self.env if changed else ():  # not for most nodes: avoids quadratic time
            meta = self.values.of[holder]
            shared = holder not in after and self.values.storages[holder] & changed
            if shared and isinstance(meta, TensorMeta) and not meta.requires_grad:
                if TensorMeta.of(self.value_of(holder)).requires_grad:
                    after[holder] = n
        return value


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors of a value, with wrappers replaced by their components."""
    if is_wrapper(value):
        return taken_apart(value)[1]
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in tensors_in(item)]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in tensors_in(item)]
    return []


def number_of(value: Any) -> Any:
    """Convert a value that depends on symbols to a `Number`, any other to a plain number."""
    planned, expression = compat.expression_of(value)
    return Number(expression, planned) if symbols_in(expression) else planned


def _describe(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return TensorMeta.of(value)
    if isinstance(value, (tuple, list)):
        return (list if type(value) is list else tuple)(map(_describe, value))
    if isinstance(value, torch.SymBool):
        return bool(value)  # decided, under a condition on the symbols
    if compat.is_number(value):
        return number_of(value)
    if isinstance(value, slice):
        return slice(*map(_describe, (value.start, value.stop, value.step)))
    return value
