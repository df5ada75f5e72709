"""Temporary changes of a call, undone on every exit, even if a signal handler raises.

Ctrl-C may arrive between any two bytecodes: right after a change, or inside the `finally` that
undoes it. So an undo is appended to the list before its change; it may run without the change, and
twice; and two nested `finally` blocks run the list. An operation that must not be interrupted is
one C call, inside which no signal handler runs.
"""

from __future__ import annotations

import functools
import operator
import threading
from collections import deque
from collections.abc import Callable, Sequence
from itertools import compress, repeat, starmap
from typing import Any, TypeVar

from megacompile import compat

T = TypeVar("T")
Undos = list[Callable[[], object]]


def undone(body: Callable[[Undos], T]) -> T:
    """Call `body` with an empty list, then the undos that it appended, in reverse order."""
    undos: Undos = []
    try:
        try:
            return body(undos)
        finally:
            _run(undos)
    finally:
        _run(undos)


def _run(undos: Undos) -> None:
    while undos:
        undos[-1]()
        undos.pop()


def exchange(
    holders: Sequence[dict[str, Any]],
    names: Sequence[str],
    before: Sequence[object],
    after: Sequence[object],
) -> None:
    """Set `holder[name] = after` where it is `before`; one C call."""
    places = zip(holders, names, after, strict=True)
    there = map(operator.is_, map(dict.get, holders, names), before)
    deque(starmap(operator.setitem, compress(places, there)), maxlen=0)


def replace(
    holders: Sequence[dict[str, Any]],
    names: Sequence[str],
    before: Sequence[object],
    after: Sequence[object],
    undos: Undos,
) -> None:
    """Exchange, until the undos run."""
    undos.append(functools.partial(exchange, holders, names, after, before))
    exchange(holders, names, before, after)


def hold(lock: threading.RLock, undos: Undos) -> None:
    """Hold a lock until the undos run."""
    held: list[tuple[()]] = []

    def release() -> None:
        deque(starmap(lock.release, map(held.pop, repeat(0, len(held)))), maxlen=0)

    undos.append(release)
    held.extend(compress([()], map(lock.acquire, [True])))


def use_unguarded(undos: Undos) -> None:
    """Bypass guards in this thread until the undos run (see `guards`)."""
    undos.append(functools.partial(compat.set_torch_function_state, compat.torch_function_state()))
    compat.set_torch_function_state(compat.NO_SUBCLASSES)
