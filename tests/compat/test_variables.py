"""Containers that a forward keeps between calls, as Dynamo traces them: beside plain Python."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megacompile import compat
from tests.zoo import equal


class Keeps(nn.Module):
    """Has a full deque, and an ordered dict; `change` uses them in each call."""

    def __init__(self, change: Callable[[Any, Tensor], Tensor], longest: int | None) -> None:
        super().__init__()
        self.change = change
        self.last: deque[Tensor] = deque([torch.ones(2), torch.ones(2) * 2], longest)
        self.named = OrderedDict((name, torch.ones(2) * (i + 1)) for i, name in enumerate("abc"))

    def forward(self, x: Tensor) -> Tensor:
        return self.change(self, x)


def weighted(values: Any) -> Tensor:
    """Depends on the order."""
    found = torch.zeros(2)
    for i, value in enumerate(values):
        found = found + value * (i + 1)
    return found


def pop_and_append(m: Any, x: Tensor) -> Tensor:
    first = m.last.popleft()
    m.last.append(x)
    m.last.append(x + first)
    return weighted(m.last)


def copied(m: Any, x: Tensor) -> Tensor:
    copy = m.last.copy()
    copy.append(x)
    return weighted(copy)


def in_turn(m: Any, x: Tensor) -> Tensor:
    name, value = m.named.popitem(last=False)
    m.named[name] = value
    found: Tensor = x * value
    return found


def cache(m: Any, x: Tensor) -> Tensor:
    m.named["new"] = x
    m.named.move_to_end("new", last=False)
    while len(m.named) > 2:
        m.named.popitem()
    return weighted(m.named.values())


CHANGES: dict[str, Callable[[Any, Tensor], Any]] = {
    "append": lambda m, x: (m.last.append(x), weighted(m.last))[1],
    "extendleft": lambda m, x: (m.last.extendleft([x, x + 1]), weighted(m.last))[1],
    "append, unseen": lambda m, x: (m.last.append(x), x * 2)[1],
    "pop and append": pop_and_append,
    "a copy": copied,
    "the longest": lambda m, x: x * m.last.maxlen,
    "in turn": in_turn,
    "a cache": cache,
}


@pytest.mark.parametrize("change", CHANGES)
def test_containers_are_those_of_python(change: str) -> None:
    """A deque of another length is another case."""
    for _ in range(2):  # once
        compat.follow_containers()
    torch._dynamo.reset()
    for longest in (2, 3, None) if change == "append" else (2,):
        plain, traced = (Keeps(CHANGES[change], longest) for _ in range(2))
        compiled = torch.compile(traced, backend="eager", fullgraph=True)
        for i in range(4):
            x = torch.full((2,), float(i))
            assert equal(plain(x), compiled(x)), i
            assert len(plain.last) == len(traced.last) and all(map(equal, plain.last, traced.last))
            assert list(plain.named) == list(traced.named)
            assert all(map(equal, plain.named.values(), traced.named.values()))
        assert traced.last.maxlen == longest
