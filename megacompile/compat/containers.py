"""Containers in Dynamo: a `deque` with a `maxlen`, and the order of an `OrderedDict`."""

from __future__ import annotations

import collections
import functools
from typing import Any

from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import AttrSource
from torch._dynamo.variables import ConstantVariable, dicts, lists, user_defined
from torch._dynamo.variables.builder import VariableBuilder


class _Longest(ConstantVariable):  # torch 2.11 to 2.15
    """The `maxlen` of a deque that a frame was given.

    Dynamo refuses to write such a deque back unless this is None. It writes back what is in it at
    the end, after `clear()`, which is right for any `maxlen`.
    """

    def is_constant_none(self) -> bool:
        return True


def follow_containers() -> None:  # torch 2.11 to 2.15
    """Makes Dynamo trace two containers from outside of a frame as Python has them.

    It forgets the `maxlen` of a deque, which then has too many items, from the call on in which it
    is full. `OrderedDict.move_to_end` changes the order within the frame alone; `popitem` is traced
    for the first order that it meets.
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


def _follow_order(kind: Any) -> None:  # torch 2.11 to 2.15
    """Makes the ordered methods of an OrderedDict see, and keep, Python's order."""
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
