"""Find the value of every node of a captured graph: its meta, its memory, its in-place changes.

The captured graph runs once on fake tensors under functionalization, so nothing is computed and no
user tensor is changed. Operations of equal layers run once and are recalled for the others: an
operation with the same metas, constants and grad mode returns the same metas. A recalled result has
its meta at once, and its tensor is created only when needed.

    before: y = linear(x, w0), z = linear(y, w1)        after: y is run, z is recalled

Some operations are always run: those that change a tensor in place or read a changed one, those
whose result is a data-dependent number, those that take anything but tensors, numbers and plain
constants, and all inside transforms. Numbers are identified by their expressions: an operation on
the same expressions adds no new conditions on the symbols.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from megacompile import compat
from megacompile.errors import UnsupportedGraphError
from megacompile.ir.capture import Ambient, Capture, ParamInput, constant_key, function_key, key_of
from megacompile.ir.tensors import TensorMeta
from megacompile.packed import is_wrapper
from megacompile.passes.capture.interpret import Interpreter, Values, tensors_in

__all__ = ["Values", "propagate"]


def propagate(capture: Capture, *, recall: bool = True) -> Values:
    """Run `capture` on fake tensors; with `recall`, equal operations only once. Raises
    UnsupportedGraphError if an operator has no fake kernel, or a shape that depends on data."""
    if recall:
        try:
            return _run(Recalling(capture, Values()))
        except Exception:  # run everything instead, which raises the proper error, if any
            pass
    try:
        return _run(Interpreter(capture, Values()))
    except compat.UNTRACEABLE as error:
        raise UnsupportedGraphError(f"{capture.name}: {error}") from error


def _run(interpreter: Interpreter) -> Values:
    capture, values = interpreter.capture, interpreter.values
    values.symbols = interpreter.symbols
    with capture.ambient.apply(), compat.keeping_nesting(), interpreter.fakes:
        if values.symbols is not None:
            values.symbols.fakes.require(capture.conditions)
        inputs = [interpreter.fake_input(item) for item in capture.inputs]
        constants = interpreter.fake_constants()
        with compat.functional_mode():
            interpreter.constants = {k: compat.to_functional(v) for k, v in constants.items()}
            wrapped = [compat.to_functional(value) for value in inputs]
            interpreter.run(*wrapped, enable_io_processing=False)
    return values


_NUMBERS = frozenset({torch.SymInt, torch.SymFloat})
# Non-tensor functions that read only a tensor's metadata.
_LOOKS = frozenset({"size", "dim", "stride", "numel", "is_contiguous", "element_size"})
_ATTRIBUTES = frozenset({"shape", "dtype", "device", "ndim"})


class NotRecallableError(Exception):
    """Raised if a recalled result is invalid in this graph."""


class _MustRun(Exception):
    """Raised if an operation must be run."""


@dataclass(slots=True, eq=False)
class _Later:
    """A known tensor, created when needed."""

    meta: TensorMeta
    storage: int
    make: Callable[[], torch.Tensor]
    made: torch.Tensor | None = None


def _now(value: Any) -> Any:
    """The tensor, if it is created; any other value unchanged."""
    return value.made if isinstance(value, _Later) and value.made is not None else value


@dataclass(frozen=True, slots=True)
class _Outcome:
    """A part of an operation's result: a tensor with its own memory, a view of an argument, or an
    argument itself (without a meta); otherwise a constant."""

    meta: TensorMeta | None = None
    taken: int | None = None  # position of the argument
    path: tuple[int, ...] = ()  # to the tensor in the result
    value: Any = None


# The tensors that an operation takes, created or not, each once, with their metas and storages.
_Taken = list[tuple[Any, TensorMeta, int]]


class Recalling(Interpreter):
    """Recalls results of equal layers; `run` raises the errors of data-dependent operations."""

    def __init__(self, capture: Capture, values: Values) -> None:
        super().__init__(capture, values)
        self._known: dict[Hashable, tuple[Any, Any]] = {}  # outcome, description
        self._names: dict[int, int] = {}  # real storage -> its name before creation
        self._fresh = 0  # assigned names
        self._seen: set[int] = set()  # storages of run operations
        self._changed: set[int] = set()  # storages that were written
        self._viewed: set[int] = set()  # storages with possibly uncreated views
        self._epoch = 0  # counts possible changes of thread state
        self._mode: Hashable = None
        self._set_mode()

    def fake_input(self, item: Any) -> Any:
        """Parameters are created only for layers that run."""
        if not isinstance(item, ParamInput):
            return super().fake_input(item)
        meta = self.meta_of(item)
        self._fresh += 1
        return _Later(meta, -self._fresh, meta.empty)

    def value_of(self, node: fx.Node) -> Any:
        return self._made(self.env[node])

    def storage_of(self, tensor: torch.Tensor) -> int:
        key = super().storage_of(tensor)
        return self._names.get(key, key)

    def map_nodes_to_values(self, args: Any, n: fx.Node) -> Any:
        return fx.map_arg(args, self.value_of)

    def run_node(self, n: fx.Node) -> Any:
        key, taken = self._call(n)
        if key in self._known:
            return self._recalled(n, taken, *self._known[key])
        value = super().run_node(n)
        if isinstance(value, _Later):  # a parameter
            self.values.of[n] = value.meta
            self.values.storages[n] = frozenset((value.storage,))
        self._note_changes(n, value)
        is_unchanged = not self.values.mutates[n] and all(
            not isinstance(tensor := _now(given), _Later) and TensorMeta.of(tensor) == meta
            for given, meta, _ in taken
        )
        if key is not None and is_unchanged:
            outcome = self._outcome(n, value, taken, ())
            if outcome is not None:
                self._known[key] = outcome, self.values.of[n]
        self._seen |= self.values.storages[n]
        return value

    def _call(self, n: fx.Node) -> tuple[Hashable, _Taken]:
        """A key that is equal for equal operations, or None if the node must be run; and the
        tensors that it takes."""
        taken: _Taken = []
        if n.op not in ("call_function", "call_method") or self._mode is None:
            return None, []
        try:
            given = key_of((n.args, n.kwargs), functools.partial(self._other_key, taken))
        except _MustRun:
            return None, []
        if not taken:
            return None, []
        _, metas, storages = zip(*taken, strict=True)
        what = n.op, function_key(n.target), given
        return (*what, metas, tuple(map(storages.index, storages)), self._mode, self._epoch), taken

    def _other_key(self, taken: _Taken, value: Any) -> Hashable:
        """The key of a node, a number or a tensor; for a tensor, its position in `taken`."""
        if isinstance(value, fx.Node):
            return key_of(self.env[value], functools.partial(self._other_key, taken))
        if type(value) in _NUMBERS:
            return type(value), compat.expression_of(value)[1]
        if not isinstance(value, (_Later, torch.Tensor)):
            raise _MustRun
        value = _now(value)
        for k, (other, *_) in enumerate(taken):
            if other is value:
                return "tensor", k
        later = isinstance(value, _Later)
        meta = value.meta if later else _plain(value)
        storage = value.storage if later else self.storage_of(value)
        if meta is None or storage in self._changed:
            raise _MustRun
        taken.append((value, meta, storage))
        return "tensor", len(taken) - 1

    def _note_changes(self, n: fx.Node, value: Any) -> None:
        """Record the possible changes of a node that was run."""
        changed = self.values.mutates[n]
        if changed & self._viewed:
            raise NotRecallableError(f"{n} changes a tensor with a recalled view")
        self._changed |= changed
        taken = (tensors_in(self.value_of(source)) for source in n.all_input_nodes)
        if n.op.startswith("call_") and not any(taken):
            known = n.target in (compat.SET_GRAD_ENABLED, compat.EXIT_AUTOCAST)
            known |= getattr(n.target, "__name__", "") == "_enter_autocast"
            if not known and (value is None or not _is_data(value)):
                self._epoch += 1
            self._set_mode()

    def _set_mode(self) -> None:
        self._mode = None if compat.in_transform() else Ambient.current(self.capture.device)

    def _outcome(self, n: fx.Node, value: Any, taken: _Taken, path: tuple[int, ...]) -> Any:
        """The result of an operation for others with the same key; None if they must be run."""
        storages = [storage for *_, storage in taken]
        if type(value) in (tuple, list):
            items = [self._outcome(n, item, taken, (*path, k)) for k, item in enumerate(value)]
            found = [tensor for item in value for tensor in tensors_in(item)]
            own = {self.storage_of(tensor) for tensor in found} - set(storages)
            fresh = [i for i in items if isinstance(i, _Outcome) and i.meta and i.taken is None]
            if None in items or len(own) != len(fresh):
                return None  # or results share new memory
            return type(value)(items)
        if not isinstance(value, torch.Tensor):
            looks = _looks(n) or (value is None and path != ())
            return _Outcome(value=value) if looks and _is_data(value) else None
        if (meta := _plain(value)) is None:
            return None
        for k, (given, *_) in enumerate(taken):
            if value is _now(given):
                return _Outcome(taken=k) if not path else None
        storage = self.storage_of(value)
        if storage in storages:
            return _Outcome(meta, storages.index(storage), path)
        return None if storage in self._seen else _Outcome(meta)

    def _recalled(self, n: fx.Node, given: _Taken, outcome: Any, description: Any) -> Any:
        self.values.of[n] = description
        grad_enabled, storages = torch.is_grad_enabled(), set[int]()

        @functools.cache
        def run_once() -> Any:
            with torch.set_grad_enabled(grad_enabled):
                return fx.Interpreter.run_node(self, n)

        def result(outcome: Any) -> Any:
            if not isinstance(outcome, _Outcome):
                return type(outcome)(map(result, outcome))
            meta, taken = outcome.meta, outcome.taken
            if taken is None:
                if meta is None:
                    return outcome.value
                self._fresh += 1
                storages.add(-self._fresh)
                return _Later(meta, -self._fresh, functools.partial(_new, meta))
            value, _, storage = given[taken]
            storages.add(storage)
            if meta is None:
                return value
            self._viewed.add(storage)
            path = outcome.path
            return _Later(
                meta, storage, lambda: functools.reduce(operator.getitem, path, run_once())
            )

        value = result(outcome)
        for source in n.all_input_nodes if isinstance(value, (_Later, torch.Tensor)) else ():
            if _now(self.env[source]) is value:  # the argument itself
                self.values.same_as[n] = source
        self.values.storages[n] = frozenset(storages)
        self.values.mutates[n] = frozenset()
        return value

    def _made(self, value: Any) -> Any:
        """A value with all its tensors created."""
        if type(value) in (tuple, list):
            items = [self._made(item) for item in value]
            same = all(map(operator.is_, items, value))
            return value if same else type(value)(items)
        if not isinstance(value, _Later):
            return value
        if value.made is None:
            value.made = value.make()
            if TensorMeta.of(value.made) != value.meta:
                raise NotRecallableError(f"{TensorMeta.of(value.made)} is not {value.meta}")
            self._names.setdefault(compat.storage_key(value.made), value.storage)
        return value.made


def _new(meta: TensorMeta) -> torch.Tensor:
    """A computed tensor: not a leaf if it requires grad."""
    with torch.enable_grad():
        tensor = replace(meta, requires_grad=False).empty()
        if meta.requires_grad:
            one = torch.zeros((), dtype=meta.dtype, device=meta.device, requires_grad=True)
            tensor.add_(one)
    return tensor


def _plain(tensor: torch.Tensor) -> TensorMeta | None:
    """The meta of a tensor that is fully described by it; None for others."""
    plain = (
        tensor.layout is torch.strided
        and not tensor.is_complex()
        and not tensor.is_quantized
        and not is_wrapper(tensor)
        and not compat.has_known_data(tensor)
    )
    meta = TensorMeta.of(tensor) if plain else None
    return meta if meta is not None and meta.requires_grad == tensor.requires_grad else None


def _is_data(value: Any) -> bool:
    """True if it consists only of tensors, numbers and constants."""
    if isinstance(value, (tuple, list)):
        return all(map(_is_data, value))
    if isinstance(value, torch.Tensor) or type(value) in _NUMBERS:
        return True
    try:
        constant_key(value)
    except TypeError:
        return False
    return True


def _looks(n: fx.Node) -> bool:
    """True if a node reads a tensor's metadata but not its data."""
    if n.op == "call_method":
        return n.target in _LOOKS
    return n.target is getattr and len(n.args) > 1 and n.args[1] in _ATTRIBUTES
