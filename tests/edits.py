"""Edits of schedules as text, for tables of faults.

    forward: 2PREFETCH@0 waits for 0F           its `after=` is this; also "for nothing"
    forward: 2PREFETCH@0 waits also for 1F
    forward: 2PREFETCH@0 waits for tokens       of its `after=`, only these stay
    forward: 2PREFETCH@0 forgets weights_2      of its `after=`, this goes
    backward: 2B before 2RECOMPUTE              it is issued there, with its items; or "behind"
    backward: 2B[3] = (None, s2_1)              an argument: nodes, None, bucket 3, a tuple of these
    backward: erase free(s1_0)                  out of the graph, of `after=` and of what it returns
    backward: 2OFFLOAD_GRAD again               a second one behind it, which waits for nothing
    backward: add free(s3_0)                    any op, at the end; "... waits for tokens": for all
    backward: 2OFFLOAD_GRAD becomes keep_grad   another op
    backward: y0_0 is called y7_0
    forward: weights_2 is of bucket 9           a token
    backward: return without 2OFFLOAD_GRAD      of the tokens; "return[1]": of what is left
    backward: return 3OFFLOAD_GRAD for 2OFFLOAD_GRAD
    update: return also 0OFFLOAD_STATE#1
    schedule: reused = reused[1:]               a field of the schedule; Python

A node goes by its label or its name; `free(x)` is what gives x back, `2UPDATE#1` the second of a
label. Several edits are parted by ";".
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import fx

from megacompile.ir import ops
from megacompile.ir.buckets import Bucket, Slot
from megacompile.ir.edges import Token, token_of
from megacompile.ir.plan import Places, Tier
from megacompile.ir.schedule import Schedule

_NAMES = {"Places": Places, "Slot": Slot, "Tier": Tier, "replace": replace}


def edited(schedule: Schedule, edits: str) -> Schedule:
    """A copy of the schedule with some edits made, in their order."""
    schedule = schedule.copy()
    for edit in edits.split(";"):
        where, _, what = edit.strip().partition(": ")
        if where == "schedule":
            schedule = _with_field(schedule, *what.split(" = "))
        else:
            _Graph(schedule, where).edit(what)
    return schedule


def find(schedule: Schedule, graph: str, label: str, nth: int = 0) -> fx.Node:
    """The nth node of a graph with a printed name; a value goes by its own name."""
    return [n for n in schedule.graphs[graph].nodes if label in (ops.label(n), n.name)][nth]


def free_of(graph: fx.Graph, value: str) -> fx.Node:
    """The free, deferred or not, of a value."""
    frees = ops.nodes_of(graph, ops.free, ops.defer_free)
    return next(n for n in frees if ops.arguments(n)[0].name == value)


def wait(node: fx.Node, after: list[fx.Node]) -> None:
    node.kwargs = {"after": tuple(after)} if after else {}


def awaited(node: fx.Node) -> list[fx.Node]:
    """Everything that a node names in `after=`."""
    after: Any = node.kwargs.get("after", ())
    return list(after)


def _with_field(schedule: Schedule, field: str, value: str) -> Schedule:
    known = {name: getattr(schedule, name) for name in (field, "slots", "plan", "saved_values")}
    return replace(schedule, **{field: eval(value, {**known, **_NAMES})})


class _Graph:
    def __init__(self, schedule: Schedule, name: str) -> None:
        self.schedule, self.name, self.graph = schedule, name, schedule.graphs[name]

    def edit(self, what: str) -> None:
        for pattern, method in _EDITS.items():
            if match := re.fullmatch(pattern, what):
                method(self, *match.groups())
                return
        raise AssertionError(f"no edit: {what!r}")

    def node(self, text: str) -> fx.Node:
        if match := re.fullmatch(r"free\((\w+)\)", text):
            return free_of(self.graph, match[1])
        label, _, nth = text.partition("#")
        return find(self.schedule, self.name, label, int(nth or 0))

    def nodes(self, text: str) -> list[fx.Node]:
        return [self.node(each) for each in text.split(", ")]

    def value(self, text: str) -> Any:
        if text.startswith("("):
            return tuple(self.value(each) for each in re.findall(r"[^\s(),]+", text))
        return None if text == "None" else self.bucket(text) or self.node(text)

    def bucket(self, text: str) -> Bucket | None:
        """Of "bucket 3"; of one that is none of the schedule's too."""
        if not text.startswith("bucket "):
            return None
        key, buckets = int(text.removeprefix("bucket ")), self.schedule.buckets
        return buckets[key] if key < len(buckets) else replace(buckets[0], key=key, label=str(key))

    def waits(self, node: str, also: str | None, others: str) -> None:
        found = self.node(node)
        if others == "nothing":
            wait(found, [])
        elif others == "tokens":
            assert any(token_of(n) is None for n in awaited(found)), "it has other edges"
            wait(found, [n for n in awaited(found) if token_of(n) is not None])
        else:
            wait(found, (awaited(found) if also else []) + self.nodes(others))

    def forgets(self, node: str, other: str) -> None:
        found, lost = self.node(node), self.node(other)
        assert lost in awaited(found)
        wait(found, [n for n in awaited(found) if n is not lost])

    def before(self, node: str, goal: str) -> None:
        found, place = self.node(node), self.node(goal)
        for moved in (found, *(item for _, item in ops.items(found))):
            place.prepend(moved)

    def behind(self, node: str, goal: str) -> None:
        self.node(goal).append(self.node(node))

    def argument(self, node: str, position: str, value: str) -> None:
        found = self.node(node)
        args = list(ops.arguments(found))
        args[int(position)] = self.value(value)
        found.args = tuple(args)

    def erase(self, node: str) -> None:
        found = self.node(node)
        for user in list(found.users):
            if user.op == "output":
                self.returns(-1, lambda nodes: [n for n in nodes if n is not found])
            else:
                wait(user, [n for n in awaited(user) if n is not found])
        self.graph.erase_node(found)

    def again(self, node: str) -> None:
        found = self.node(node)
        with self.graph.inserting_after(found):
            ops.call(self.graph, getattr(ops, found.target.__name__), *found.args)  # type: ignore[union-attr]

    def add(self, op: str, value: str, waits: str | None) -> None:
        tokens = [n for n in self.graph.find_nodes(op="placeholder") if token_of(n)]
        with self.graph.inserting_before(self.graph.output_node()):
            made = ops.call(self.graph, getattr(ops, op), self.value(value))
        if waits:
            wait(made, tokens)

    def becomes(self, node: str, op: str) -> None:
        self.node(node).target = getattr(ops, op)

    def called(self, node: str, name: str) -> None:
        self.node(node).name = name

    def stands_for(self, node: str, bucket: str) -> None:
        token, other = token_of(self.node(node)), self.bucket(bucket)
        assert token is not None and other is not None
        self.node(node).meta["token"] = Token(other, token.part)

    def returns(self, at: int, change: Callable[[list[fx.Node]], list[fx.Node]]) -> None:
        returned = list(ops.returned(self.graph))
        returned[at] = tuple(change(returned[at]))
        self.graph.output_node().args = (tuple(returned),)

    def without(self, at: str | None, node: str) -> None:
        lost = self.node(node)
        self.returns(int(at or -1), lambda nodes: [n for n in nodes if n is not lost])

    def instead(self, at: str | None, new: str, old: str) -> None:
        other, lost = self.node(new), self.node(old)
        self.returns(int(at or -1), lambda nodes: [other if n is lost else n for n in nodes])

    def also(self, node: str) -> None:
        self.returns(-1, lambda nodes: [*nodes, self.node(node)])


_N = r"([\w@#.()]+)"  # a node
_EDITS: dict[str, Callable[..., None]] = {
    rf"{_N} waits (also )?for (.+)": _Graph.waits,
    rf"{_N} forgets {_N}": _Graph.forgets,
    rf"{_N} before {_N}": _Graph.before,
    rf"{_N} behind {_N}": _Graph.behind,
    rf"{_N}\[(\d)\] = (.+)": _Graph.argument,
    rf"erase {_N}": _Graph.erase,
    rf"{_N} again": _Graph.again,
    r"add (\w+)\((.+)\)( waits for tokens)?": _Graph.add,
    rf"{_N} becomes (\w+)": _Graph.becomes,
    rf"{_N} is called (\w+)": _Graph.called,
    rf"{_N} is of (bucket \d+)": _Graph.stands_for,
    rf"return(?:\[(\d)\])? without {_N}": _Graph.without,
    rf"return(?:\[(\d)\])? {_N} for {_N}": _Graph.instead,
    rf"return also {_N}": _Graph.also,
}
