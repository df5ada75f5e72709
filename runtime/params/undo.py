"""The changes of a call for its own time, undone on any way out, also when a signal handler raises.

Python runs signal handlers between bytecodes: Ctrl-C may come right after a change, and in the
`finally` that would undo it. So nothing depends on how far a call has got:

    undos.append(undo)   before the change; `undo` may run where nothing was changed, and twice
    change()
    ...
    finally: run them    in a `finally` around another one: an interrupt in the first leaves the
                         second

What must not be left half done is one call of C code, in which no signal handler runs.
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
    """Call `body` with an empty list; what it puts there is called after it, the last first."""
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
    """`holder[name] = after` wherever `before` is there; one call of C code."""
    places = zip(holders, names, after, strict=True)
    there = map(operator.is_, map(dict.get, holders, names), before)
    deque(starmap(operator.setitem, compress(places, there)), maxlen=0)


def hold(lock: threading.RLock, undos: Undos) -> None:
    """Acquire a lock until the undos run."""
    held: list[tuple[()]] = []
    undos.append(functools.partial(_release, lock, held))
    held.extend(compress([()], map(lock.acquire, [True])))


def _release(lock: threading.RLock, held: list[tuple[()]]) -> None:
    deque(starmap(lock.release, map(held.pop, repeat(0, len(held)))), maxlen=0)


def use_unguarded(undos: Undos) -> None:
    """Until the undos run, this thread uses guarded tensors without asking (see `guards`)."""
    undos.append(functools.partial(compat.set_torch_function_state, compat.torch_function_state()))
    compat.set_torch_function_state(compat.NO_SUBCLASSES)
