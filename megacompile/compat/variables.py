"""Dynamo's variables for parameters of our classes, and for two containers."""

from __future__ import annotations

import collections
import functools
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

# --- tensors


_POINTERS = ("data_ptr", "untyped_storage", "storage", "numpy", "__dlpack__")
_KEYS = ("ConstDictKeySource", "NonSerializableSetGetItemSource")  # sources of keys
_shown: list[type[torch.Tensor]] = []


def show_classes(kind: type[torch.Tensor]) -> None:
    """Makes captured code see tensors of this class and its subclasses as the original parameters.

    Args:
        kind: `stands_for` is the class that captured code sees; `param` is the tensor whose id it
            sees.
    """
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
    variable: Any = TensorVariable
    builtin: Any = BuiltinVariable
    python_type, call_method = variable.python_type, variable.call_method
    var_getattr, call_type = variable.var_getattr, builtin.call_type

    @functools.wraps(python_type)
    def shown_type(self: Any) -> type:
        cls: type = python_type(self)
        return cls.stands_for if _is_shown(cls) else cls  # type: ignore[attr-defined]

    @functools.wraps(call_type)
    def shown_call_type(self: Any, tx: Any, obj: Any) -> Any:
        if not (isinstance(obj, TensorVariable) and _is_shown(obj.class_type)):
            return call_type(self, tx, obj)
        source = obj.source and AttrSource(obj.source, "__class__")  # the real type is another
        return VariableTracker.build(tx, obj.python_type(), source)

    @functools.wraps(var_getattr)
    def shown_getattr(self: Any, tx: Any, name: str) -> Any:
        if not _is_shown(self.class_type):
            return var_getattr(self, tx, name)
        if name in _POINTERS:
            _leave(self, name, "a parameter has no memory in captured code")
        if name == "_version":
            _leave(self, name, "only eager code counts updates")
        own: Any = _of_own_class(self.class_type, name)
        if isinstance(own, property):
            return _function(own.fget).call_function(tx, [self], {})
        if own is not None and not isinstance(own, types.FunctionType):
            _leave(self, name, "it is a class attribute")
        return var_getattr(self, tx, name)

    @functools.wraps(call_method)
    def shown_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name in _POINTERS and _is_shown(self.class_type):
            _leave(self, name, "a parameter has no memory in captured code")
        own = _of_own_class(self.class_type, name) if _is_shown(self.class_type) else None
        if name == "to" and "to" in vars(self.class_type) and len(args) == 1 and not kwargs:
            if args[0].is_python_constant() and args[0].as_python_constant() == self.device:
                return self  # code may assign it to the parameter
        if own is None:
            return call_method(self, tx, name, args, kwargs)
        if not isinstance(own, types.FunctionType):
            _leave(self, name, "it is not an instance method")
        return _function(own).call_function(tx, [self, *args], kwargs)

    builder: Any = VariableBuilder
    wrap_tensor = builder.wrap_tensor

    @functools.wraps(wrap_tensor)
    def shown_tensor(self: Any, value: Any) -> Any:
        if type(self.source).__name__ in _KEYS and isinstance(value, torch.nn.Parameter):
            _leave(self.source.name, "", "it is a key of a dict or set")
        return wrap_tensor(self, value)

    builder.wrap_tensor = shown_tensor
    builder._type_dispatch_impl.cache_clear()  # it may hold the stock function already
    variable.python_type, variable.call_method = shown_type, shown_method
    variable.var_getattr, builtin.call_type = shown_getattr, shown_call_type
    if hasattr(variable, "get_id"):  # since torch 2.13
        get_id = variable.get_id

        @functools.wraps(get_id)
        def shown_id(self: Any, tx: Any) -> Any:
            if not self.source or not _is_shown(self.class_type):
                return get_id(self, tx)
            value = tx.output.resolve_source_value(self.source)
            return id(value if value.param is None or value.is_view else value.param)

        variable.get_id = shown_id


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
    """Break the graph."""
    unimplemented(
        gb_type="An attribute of a parameter",
        context=f"{variable} {name}",
        explanation=f"`{name}` of a parameter is not captured: {why}.",
        hints=[],
    )


# --- containers


class _Longest(ConstantVariable):
    """The `maxlen` of a deque from outside a frame.

    Dynamo writes such a deque back only if its `maxlen` is None. It writes back the final items
    after `clear()`, which is right for any `maxlen`.
    """

    def is_constant_none(self) -> bool:
        return True


def follow_containers() -> None:
    """Makes Dynamo trace deques and ordered dicts from outside a frame as Python runs them.

    Dynamo ignores the `maxlen` of a deque: a full one gets too many items. It applies
    `OrderedDict.move_to_end` within the frame only, and traces `popitem` for the first order.
    """
    stock: Any = VariableBuilder.wrap_listlike
    if hasattr(stock, "follows"):
        return

    @functools.wraps(stock)
    def wrap_listlike(self: Any, value: Any) -> Any:
        found = stock(self, value)
        if type(value) is collections.deque and value.maxlen is not None:
            longest = AttrSource(self.get_source(), "maxlen")
            install_guard(longest.make_guard(GuardBuilder.CONSTANT_MATCH))
            found.maxlen = _Longest(value.maxlen)
        return found

    of_deque: Any = lists.DequeVariable.call_method

    @functools.wraps(of_deque)
    def call_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        found = of_deque(self, tx, name, args, kwargs)
        if name in ("copy", "__copy__") and isinstance(found, lists.DequeVariable):
            found.maxlen = self.maxlen
        return found

    lists.DequeVariable.call_method = call_method  # type: ignore[method-assign]

    wrap_listlike.follows = True  # type: ignore[attr-defined]
    VariableBuilder.wrap_listlike = wrap_listlike  # type: ignore[method-assign]
    VariableBuilder._type_dispatch_impl.cache_clear()  # it may hold the stock function already
    for module in (dicts, user_defined):
        for kind in {vars(module).get(name) for name in _DICTS} - {None}:
            if "call_method" in vars(kind):
                _follow_order(kind)


def _follow_order(kind: Any) -> None:
    """Makes the ordered methods of an OrderedDict use and keep Python's order."""
    stock = kind.call_method

    @functools.wraps(stock)
    def call_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        ordered = getattr(self, "_base_vt", None) or self
        if name in _ORDER and getattr(ordered, "user_cls", None) is collections.OrderedDict:
            if ordered.source is not None:
                tx.output.guard_on_key_order.add(ordered.source)
            ordered.install_dict_keys_match_guard()
            found = stock(self, tx, name, args, kwargs)
            ordered.should_reconstruct_all = True
            return found
        return stock(self, tx, name, args, kwargs)

    kind.call_method = call_method


_DICTS = ("ConstDictVariable", "OrderedDictVariable")
_ORDER = ("move_to_end", "popitem")
