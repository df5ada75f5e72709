"""Lists, tuples and dicts of a model's modules that hold parameters of it.

For the time of a call they hold the proxies, as the modules do. So `self.tied[0] is self.weight`
is true in a forward as it is outside, and what is computed with a parameter from a list is
streamed.
"""

from __future__ import annotations

import operator
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import nn

from megacompile.runtime.params.proxies import StreamedParameter

_DICTS = (dict, OrderedDict, defaultdict)
_OWN = frozenset(vars(nn.Module()))  # what torch has in every module


class Containers:
    """The containers that had parameters in them when this was made.

    Args:
        modules: all of a model's.
        proxy_of: returns what stands in for a parameter; None for any other object.
    """

    def __init__(
        self, modules: Sequence[nn.Module], proxy_of: Callable[[Any], StreamedParameter | None]
    ) -> None:
        self._places: list[tuple[Any, Any]] = []  # (container, key): what is there is exchanged
        self._tuples: dict[int, tuple[Any, Any]] = {}  # by its id, one with proxies: it, the real
        self._lists: list[tuple[dict[str, Any], str, list[Any]]] = []  # attributes of modules
        seen: set[int] = set()
        for module in modules:
            attributes = vars(module)
            own = [name for name in attributes if name not in _OWN]
            self._places += _places(attributes, own, seen, lambda x: proxy_of(x) is not None)
        held = {id(container) for container, _ in self._places}
        for module in modules:
            for name, value in vars(module).items():
                if id(value) in held:
                    self._lists.append((vars(module), name, value))

    def swap_in(self, proxy_of: Callable[[Any], StreamedParameter | None]) -> None:
        """Put proxies in the places of parameters. The function is not kept: it is of who keeps
        this object, and a cycle of the two would keep a bucket's memory until it is collected."""

        def inside(value: Any) -> Any:
            proxy = proxy_of(value)
            return value if proxy is None else proxy

        if self._places:
            self._exchange(inside)
            self._exchange_made(inside)

    def put_back(self) -> None:
        """Put the parameters in the places of proxies."""
        self._exchange(_outside, self._tuples)
        self._exchange_made(_outside)
        self._tuples.clear()

    def _exchange_made(self, other: Callable[[Any], Any]) -> None:
        """The same in lists that modules have made in a call, as nn.LSTM does."""
        for attributes, name, before in self._lists:
            now = attributes.get(name)
            if now is not before and type(now) is list:
                now[:] = map(other, now)

    def _exchange(self, other: Callable[[Any], Any], known: dict[int, Any] | None = None) -> None:
        for container, key in self._places:
            try:
                value = container[key]
            except (IndexError, KeyError):  # it has become shorter
                continue
            if type(value) is tuple:
                made = self._other_tuple(value, other, known)
            else:
                made = other(value)
            if made is not value:
                operator.setitem(container, key, made)

    def _other_tuple(
        self, value: tuple[Any, ...], other: Callable[[Any], Any], known: dict[int, Any] | None
    ) -> tuple[Any, ...]:
        if known is not None and id(value) in known:
            real: tuple[Any, ...] = known[id(value)][1]
            return real
        made = tuple(map(other, value))
        if all(map(operator.is_, made, value)):
            return value
        self._tuples[id(made)] = made, value
        return made


def _outside(value: Any) -> Any:
    if isinstance(value, StreamedParameter) and not value.is_view and value.param is not None:
        return value.param
    return value


def _places(
    container: Any, keys: Iterable[Any], seen: set[int], is_param: Callable[[Any], bool]
) -> Iterator[tuple[Any, Any]]:
    """The place of a parameter, or of a tuple with one: in a container, and in those that it
    holds."""
    if id(container) in seen:
        return
    seen.add(id(container))
    for key in keys:
        value = container[key]
        kind = type(value)
        if kind is list:
            yield from _places(value, range(len(value)), seen, is_param)
        elif kind in _DICTS:
            yield from _places(value, list(value), seen, is_param)
        elif is_param(value) or (kind is tuple and any(map(is_param, value))):
            yield container, key
