"""Find the value of every node of a captured graph: its meta, its memory, its in-place changes.

The captured graph runs once, node by node, on fake tensors under functionalization, so nothing is
computed and no user tensor is changed. Passes that change the graph afterwards keep its values:
they add those of new nodes (`Values.add`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from megacompile import compat
from megacompile.errors import UnsupportedGraphError
from megacompile.ir.capture import Ambient, Capture, ConstantInput
from megacompile.ir.tensors import Number, Symbols, TensorMeta, has_numbers, parts_of, symbols_in
from megacompile.packed import is_wrapper, taken_apart
from megacompile.text import source_line

_CONSTANTS = (int, float, bool, complex, str, type(None), torch.dtype, torch.device)


@dataclass(slots=True)
class Values:
    """The values of a captured graph's nodes."""

    of: dict[fx.Node, Any] = field(default_factory=dict)  # TensorMeta, constants, tuples of them
    storages: dict[fx.Node, frozenset[int]] = field(default_factory=dict)
    mutates: dict[fx.Node, frozenset[int]] = field(default_factory=dict)  # storages
    same_as: dict[fx.Node, fx.Node] = field(default_factory=dict)  # changed -> changing node
    wrappers: set[fx.Node] = field(default_factory=set)  # tensors derived from others
    # value created without requires_grad -> the in-place change that set it
    requires_grad_after: dict[fx.Node, fx.Node] = field(default_factory=dict)
    symbols: Symbols | None = None  # of the captured graph, if it has any
    reasons: list[str] = field(default_factory=list)  # lines of passes, for the plan

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

    def require(self, conditions: Iterable[Any]) -> None:
        """Restrict the values to those for which these relations of the symbols are true."""
        if self.symbols is not None:
            self.symbols.fakes.require(conditions)

    def add(self, node: fx.Node, *, requires_grad: bool) -> None:
        """Find the value of a new node, which changes nothing in place. `requires_grad`: the
        result requires grad if an argument does."""
        fakes = compat.fake_mode() if self.symbols is None else self.symbols.fakes
        storages: dict[int, frozenset[int]] = {}

        def given(source: fx.Node) -> Any:
            value = self.of[source]
            if isinstance(value, Number) and self.symbols is not None:
                return self.symbols.fakes.number(value.expression)
            if isinstance(value, TensorMeta):
                value = value.empty()
                storages[compat.storage_key(value)] = self.storages[source]
            return value

        with fakes, torch.set_grad_enabled(requires_grad):
            args, kwargs = fx.map_arg((node.args, node.kwargs), given)
            target: Any = node.target
            function = getattr(args[0], target) if node.op == "call_method" else target
            value = function(*args[node.op == "call_method" :], **kwargs)
            self.of[node], self.mutates[node] = _describe(value), frozenset()
        new = frozenset({-len(self.of)})
        keys = map(compat.storage_key, tensors_in(value))
        self.storages[node] = frozenset().union(*(storages.get(key, new) for key in keys))


def propagate(capture: Capture) -> Values:
    """Run `capture` on fake tensors.

    Raises:
        UnsupportedGraphError: an operator has no fake kernel, or a shape that depends on data.
    """
    interpreter = Interpreter(capture)
    try:
        with capture.ambient.apply(), compat.keeping_nesting(), interpreter.fakes:
            inputs = interpreter.fake_inputs()
            with compat.functional_mode():
                for name, constant in interpreter.constants.items():
                    interpreter.constants[name] = compat.to_functional(constant)
                interpreter.anchor = torch.empty(0, requires_grad=True)
                interpreter.run(*map(compat.to_functional, inputs), enable_io_processing=False)
    except compat.UNTRACEABLE as error:
        raise UnsupportedGraphError(f"{capture.name}: {error}") from error
    return interpreter.values


class Interpreter(fx.Interpreter):
    """Runs a captured graph on fake tensors, and records each value."""

    def __init__(self, capture: Capture) -> None:
        super().__init__(capture.module, garbage_collect_values=False)
        planned = capture.planned
        symbols = Symbols(planned, compat.SymbolicFakes(planned)) if planned else None
        self.fakes: Any = compat.fake_mode() if symbols is None else symbols.fakes
        self.capture = capture
        self.values = Values(symbols=symbols)
        self.constants: dict[str, torch.Tensor] = {}
        self.anchor = torch.empty(0)  # makes other tensors require grad
        grads = capture.module.graph.find_nodes(op="call_function", target=torch.autograd.grad)
        self._recalls = symbols is not None and not grads  # what is recalled has no autograd graph
        self._made: dict[Any, TensorMeta] = {}  # what equal nodes return, by `_key`

    def fake_inputs(self) -> list[Any]:
        """Fake tensors or numbers for the inputs; the graph's own tensors become fake, too."""
        for node in self.capture.module.graph.find_nodes(op="get_attr"):
            if isinstance(value := self.fetch_attr(node.target), torch.Tensor):
                self.constants[node.target] = TensorMeta.of(value).empty()
        return list(map(self._fake_input, self.capture.inputs))

    def _fake_input(self, item: Any) -> Any:
        if isinstance(item, ConstantInput):
            return item.value
        if isinstance(item, Number):
            return item.zeros()
        if isinstance(item, TensorMeta):
            return item.empty()
        param, device = item.info, self.capture.device
        meta = TensorMeta(param.shape, param.dtype, param.stride, item.requires_grad, device)
        return meta.empty()

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target in self.constants:
            return self.constants[target]
        return super().get_attr(target, args, kwargs)

    def run_node(self, n: fx.Node) -> Any:
        # with their current values, which in-place changes replace
        taken = [tensor for source in n.all_input_nodes for tensor in tensors_in(self.env[source])]
        before = [(tensor, compat.from_functional(tensor)) for tensor in taken]
        values, key = self.values, self._key(n, before)
        if key in self._made:  # equal layers consist of equal nodes
            meta = values.of[n] = self._made[key]
            value = replace(meta, requires_grad=False).empty()
            if meta.requires_grad:
                value = compat.as_result(value, self.anchor)
            values.storages[n] = frozenset({compat.storage_key(value)})
            values.mutates[n] = frozenset()
            return value
        value = super().run_node(n)
        values.of[n] = _describe(value)
        if values.symbols is not None:
            values.symbols.fakes.note_guards(
                lambda: source_line(str(n.meta.get("stack_trace", "")))
            )
        if is_wrapper(value):
            values.wrappers.add(n)
        for source in n.all_input_nodes if isinstance(value, torch.Tensor) else ():
            if self.env[source] is value:
                values.same_as[n] = source
        values.storages[n] = frozenset(map(compat.storage_key, tensors_in(value)))
        values.mutates[n] = changed = frozenset(
            compat.storage_key(tensor)
            for tensor, old in before
            if compat.from_functional(tensor) is not old
        )
        # a tensor from `torch.zeros` requires grad once one that does is written into a part of it
        for holder in self.env if changed else ():  # not for most nodes: avoids quadratic time
            meta = values.of[holder]
            shared = values.storages[holder] & changed and holder not in values.requires_grad_after
            if shared and isinstance(meta, TensorMeta) and not meta.requires_grad:
                if TensorMeta.of(self.env[holder]).requires_grad:
                    values.requires_grad_after[holder] = n
        if key is None or changed:
            return value
        if values.storages[n].isdisjoint(map(compat.storage_key, taken)):
            plain = isinstance(value, torch.Tensor) and not is_wrapper(value)
            is_leaf = plain and value.requires_grad and value.is_leaf
            if plain and not is_leaf and not compat.is_constant(value):
                self._made[key] = values.meta(n)
        return value

    def _key(self, n: fx.Node, taken: list[tuple[torch.Tensor, Any]]) -> Any:
        """A key that nodes share if each would return a new tensor of the same meta, or None. A
        node without tensors may be a constant, whose value later nodes read. Without symbols, the
        fake mode itself remembers equal operations."""
        known = n.op in ("call_function", "call_method") and not compat.in_transform()
        known = known and self._recalls
        if not known or not taken or any(compat.is_constant(tensor) for tensor, _ in taken):
            return None

        def described(value: Any) -> Any:
            if isinstance(value, fx.Node):
                return described(self.env[value])
            if isinstance(value, (tuple, list)):
                return type(value), *map(described, value)
            if isinstance(value, torch.Tensor) and not is_wrapper(value):
                if value.is_conj() or value.is_neg():
                    raise TypeError("a meta does not tell what its values stand for")
                return TensorMeta.of(value), value.requires_grad  # see `_cut_off`
            found = _describe(value)
            if isinstance(found, slice):
                return slice, *map(described, (found.start, found.stop, found.step))
            if not isinstance(found, (*_CONSTANTS, Number)):
                raise TypeError(f"{type(found)} has no description")
            return type(found), found

        try:
            given = described(n.args), *((name, described(n.kwargs[name])) for name in n.kwargs)
        except TypeError:
            return None
        return n.target, given, Ambient.current(self.capture.device)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors of a value, with wrappers replaced by their components."""
    each = [leaf for leaf in compat.leaves(value) if isinstance(leaf, torch.Tensor)]
    return [t for leaf in each for t in (taken_apart(leaf)[1] if is_wrapper(leaf) else [leaf])]


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
