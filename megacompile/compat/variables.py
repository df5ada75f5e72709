"""Dynamo's variables for parameters of our classes, and for two containers."""

from __future__ import annotations

import collections
import types
from typing import Any

import torch
from torch._dynamo.eval_frame import skip_code
from torch._dynamo.exc import unimplemented
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import AttrSource
from torch._dynamo.variables import ConstantVariable, dicts, lists, user_defined
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.builtin import BuiltinVariable
from torch._dynamo.variables.functions import UserFunctionVariable
from torch._dynamo.variables.tensor import TensorVariable

from megacompile.compat.patches import replace

_POINTERS = ("data_ptr", "untyped_storage", "storage", "numpy", "__dlpack__")
_KEYS = ("ConstDictKeySource", "NonSerializableSetGetItemSource")  # sources of keys
_shown: list[type[torch.Tensor]] = []


def show_classes(kind: type[torch.Tensor]) -> None:
    """Makes captured code see tensors of this class and its subclasses as the original parameters:
    of the class `kind.stands_for`, with the id of their `param`."""
    if not _shown:
        _patch()
    if kind not in _shown:
        _shown.append(kind)
        for base in kind.__mro__:
            if (base.__module__ or "").partition(".")[0] == "megacompile":
                _leave_alone(base)


def _leave_alone(base: type) -> None:
    """Stop Dynamo from capturing this class's methods by themselves when eager code calls them."""
    for member in vars(base).values():
        functions = [member.fget, member.fset] if isinstance(member, property) else [member]
        for function in functions:
            if isinstance(function, types.FunctionType):
                skip_code(function.__code__)


def _patch() -> None:
    def shown_type(stock: Any, self: Any) -> type:
        cls: type = stock(self)
        return cls.stands_for if _is_shown(cls) else cls  # type: ignore[attr-defined]

    def shown_call_type(stock: Any, self: Any, tx: Any, obj: Any) -> Any:
        if not (isinstance(obj, TensorVariable) and _is_shown(obj.class_type)):
            return stock(self, tx, obj)
        source = obj.source and AttrSource(obj.source, "__class__")  # the real type is another
        return VariableTracker.build(tx, obj.python_type(), source)

    def shown_getattr(stock: Any, self: Any, tx: Any, name: str) -> Any:
        if not _is_shown(self.class_type):
            return stock(self, tx, name)
        if name in _POINTERS:
            _leave(self, name, "a parameter has no memory in captured code")
        if name == "_version":
            _leave(self, name, "only eager code counts updates")
        own: Any = _of_own_class(self.class_type, name)
        if isinstance(own, property):
            return _function(own.fget).call_function(tx, [self], {})
        if own is not None and not isinstance(own, types.FunctionType):
            _leave(self, name, "it is a class attribute")
        return stock(self, tx, name)

    def shown_method(stock: Any, self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name in _POINTERS and _is_shown(self.class_type):
            _leave(self, name, "a parameter has no memory in captured code")
        own = _of_own_class(self.class_type, name) if _is_shown(self.class_type) else None
        if name == "to" and "to" in vars(self.class_type) and len(args) == 1 and not kwargs:
            if args[0].is_python_constant() and args[0].as_python_constant() == self.device:
                return self  # code may assign it to the parameter
        if own is None:
            return stock(self, tx, name, args, kwargs)
        if not isinstance(own, types.FunctionType):
            _leave(self, name, "it is not an instance method")
        return _function(own).call_function(tx, [self, *args], kwargs)

    def shown_tensor(stock: Any, self: Any, value: Any) -> Any:
        if type(self.source).__name__ in _KEYS and isinstance(value, torch.nn.Parameter):
            _leave(self.source.name, "", "it is a key of a dict or set")
        return stock(self, value)

    def shown_id(stock: Any, self: Any, tx: Any) -> Any:
        if not self.source or not _is_shown(self.class_type):
            return stock(self, tx)
        value = tx.output.resolve_source_value(self.source)
        return id(value if value.param is None or value.is_view else value.param)

    replace(VariableBuilder, "wrap_tensor", shown_tensor)
    VariableBuilder._type_dispatch_impl.cache_clear()  # it may hold the stock function already
    replace(TensorVariable, "python_type", shown_type)
    replace(TensorVariable, "call_method", shown_method)
    replace(TensorVariable, "var_getattr", shown_getattr)
    replace(BuiltinVariable, "call_type", shown_call_type)
    if hasattr(TensorVariable, "get_id"):  # since torch 2.13
        replace(TensorVariable, "get_id", shown_id)


_function: Any = UserFunctionVariable


def _is_shown(cls: type) -> bool:
    return issubclass(cls, tuple(_shown))


def _of_own_class(cls: type, name: str) -> Any:
    """The attribute that a parameter class defines by that name; None for one of torch's."""
    of = next((base for base in cls.__mro__ if name in vars(base)), None)
    own = (
        of is not None
        and of is not cls
        and issubclass(of, torch.nn.Parameter)
        and of is not torch.nn.Parameter
    )
    return vars(of)[name] if own else None


def _leave(variable: Any, name: str, why: str) -> None:
    unimplemented(
        gb_type="An attribute of a parameter",
        context=f"{variable} {name}",
        explanation=f"`{name}` of a parameter is not captured: {why}.",
        hints=[],
    )


class _Longest(ConstantVariable):
    """The `maxlen` of a deque from outside a frame, which Dynamo writes back only if it is None."""

    def is_constant_none(self) -> bool:
        return True


def follow_containers() -> None:
    """Makes Dynamo trace deques and ordered dicts from outside a frame as Python runs them. It
    ignores `maxlen`, and applies `OrderedDict.move_to_end` and `popitem` to the first order."""

    def wrap_listlike(stock: Any, self: Any, value: Any) -> Any:
        found = stock(self, value)
        if type(value) is collections.deque and value.maxlen is not None:
            longest = AttrSource(self.get_source(), "maxlen")
            install_guard(longest.make_guard(GuardBuilder.CONSTANT_MATCH))
            found.maxlen = _Longest(value.maxlen)
        return found

    def of_deque(stock: Any, self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        found = stock(self, tx, name, args, kwargs)
        if name in ("copy", "__copy__") and isinstance(found, lists.DequeVariable):
            found.maxlen = self.maxlen
        return found

    def of_dict(stock: Any, self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        ordered = getattr(self, "_base_vt", None) or self
        is_ordered = getattr(ordered, "user_cls", None) is collections.OrderedDict
        if name not in ("move_to_end", "popitem") or not is_ordered:
            return stock(self, tx, name, args, kwargs)
        if ordered.source is not None:
            tx.output.guard_on_key_order.add(ordered.source)
        ordered.install_dict_keys_match_guard()
        found = stock(self, tx, name, args, kwargs)
        ordered.should_reconstruct_all = True
        return found

    replace(VariableBuilder, "wrap_listlike", wrap_listlike)
    VariableBuilder._type_dispatch_impl.cache_clear()  # it may hold the stock function already
    replace(lists.DequeVariable, "call_method", of_deque)
    for module in (dicts, user_defined):
        for kind in {vars(module).get(name) for name in _DICTS} - {None}:
            if "call_method" in vars(kind):
                replace(kind, "call_method", of_dict)


_DICTS = ("ConstDictVariable", "OrderedDictVariable")
