"""Mutants of the update graph, and of what joins graphs: tokens, and what a backward leaves.

`tests.mutants.Truth` says which of them are harmful.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import fx

from megacompile.ir import ops
from megacompile.ir.edges import Token, token_of
from megacompile.ir.ops import Part
from megacompile.ir.schedule import Schedule
from tests import mutants
from tests.edits import awaited, wait

Edit = Callable[[Schedule, random.Random], "Schedule | str"]

_UPDATES = (ops.update_host, ops.update_resident, ops.update)


def mutate(schedule: Schedule, rng: random.Random) -> tuple[Schedule, str, str]:
    """A schedule with one edit, seldom two, the name of the first, and what they were."""
    while True:
        mutant = schedule.copy()
        names, done = [], []
        for _ in range(rng.choice((1, 1, 1, 1, 2))):
            names.append(rng.choice(list(EDITS)))
            made = mutants.tried(EDITS[names[-1]], mutant, rng)
            if isinstance(made, Schedule):
                mutant, made = made, names[-1]
            done.append(made)
        if all(done):
            return mutant, names[0], "; ".join(done)


# Edits. Each gives what it did, or another schedule. Where there is nothing to edit, it gives "" or
# raises IndexError, as in `tests.mutants`.


def _named_by(schedule: Schedule) -> list[tuple[fx.Node, fx.Node]]:
    """Ops, and the tokens that they wait for."""
    return [
        (node, token)
        for graph in schedule.graphs.values()
        for node in graph.nodes
        for token in awaited(node)
        if token_of(token) is not None
    ]


def _inside(schedule: Schedule, *targets: Callable[..., Any]) -> list[fx.Node]:
    return [] if schedule.update is None else ops.nodes_of(schedule.update, *targets)


def other_token(schedule: Schedule, rng: random.Random) -> str:
    """An op waits for the token of something else."""
    node, token = rng.choice(_named_by(schedule))
    others = [n for n in node.graph.find_nodes(op="placeholder") if token_of(n) and n is not token]
    other = rng.choice(others)
    wait(node, [other if n is token else n for n in awaited(node)])
    return f"{ops.label(node)} {node.name} waits for {other.name}, not {token.name}"


def token_of_another(schedule: Schedule, rng: random.Random) -> str:
    """A placeholder stands for another part, or another bucket's."""
    node = rng.choice(_named_by(schedule))[1]
    was = token_of(node)
    assert was is not None
    bucket = rng.choice([was.bucket, *schedule.buckets])
    part = rng.choice([was.part, *Part])
    if (bucket.key, part) == was.place:
        return ""
    node.meta["token"] = Token(bucket, part)
    return f"{node.name} stands for {part.value} of {bucket.label}"


def _returning(schedule: Schedule) -> list[fx.Graph]:
    graphs = [schedule.backward, schedule.update]
    return [graph for graph in graphs if graph is not None and ops.returned(graph)[-1]]


def _return(graph: fx.Graph, tokens: tuple[fx.Node, ...]) -> None:
    graph.output_node().args = ((*ops.returned(graph)[:-1], tokens),)


def drop_returned(schedule: Schedule, rng: random.Random) -> str:
    graph = rng.choice(_returning(schedule))
    tokens = ops.returned(graph)[-1]
    lost = rng.choice(tokens)
    _return(graph, tuple(n for n in tokens if n is not lost))
    return f"{lost.name} is not returned"


def return_another(schedule: Schedule, rng: random.Random) -> str:
    """An earlier op is returned, or a later one."""
    graph = rng.choice(_returning(schedule))
    tokens = ops.returned(graph)[-1]
    lost = rng.choice(tokens)
    other = rng.choice([n for n in ops.nodes_of(graph) if n is not lost])
    if ops.op_of(other) is None or ops.effects(other).frees is not None:
        return ""
    _return(graph, tuple(other if n is lost else n for n in tokens))
    return f"{other.name} is returned, not {lost.name}"


def _erase(node: fx.Node) -> None:
    """Take an op out, with the frees of what it gives, and out of what waits for it."""
    for user in list(node.users):
        if ops.effects(user).frees is not None and user.args[0] is node:
            _erase(user)
        elif user.op == "output":
            _return(node.graph, tuple(n for n in ops.returned(node.graph)[-1] if n is not node))
        elif user.target is ops.help_host:
            updates: Any = user.args[0]
            user.args = (tuple(n for n in updates if n is not node),)
        elif node in awaited(user):
            wait(user, [n for n in awaited(user) if n is not node])
        else:
            _erase(user)
    node.graph.erase_node(node)


def drop_update(schedule: Schedule, rng: random.Random) -> str:
    """Or what returns it to the host."""
    node = rng.choice(_inside(schedule, *_UPDATES, ops.offload_state))
    text = f"{ops.label(node)} {node.name} is left out"
    _erase(node)
    return text


def update_again(schedule: Schedule, rng: random.Random) -> str:
    node = rng.choice(_inside(schedule, ops.update_host, ops.update_resident, ops.offload_state))
    with node.graph.inserting_after(node):
        again = node.graph.node_copy(node)
    if rng.random() < 0.5:
        wait(again, [node])
    if rng.random() < 0.5:
        _return(node.graph, (*ops.returned(node.graph)[-1], again))
    return f"{ops.label(node)} {node.name} comes twice"


def reorder(schedule: Schedule, rng: random.Random) -> str:
    found = _inside(schedule, *_UPDATES, ops.offload_state, ops.help_host)
    if len(found) < 2:
        return ""
    node, goal = rng.sample(found, 2)
    goal.prepend(node)
    return f"{ops.label(node)} {node.name} is issued before {goal.name}"


def elsewhere(schedule: Schedule, rng: random.Random) -> str:
    """What lies on the host is updated as if it were on the device, or the other way round."""
    node = rng.choice(_inside(schedule, ops.update_host, ops.update_resident))
    node.target = ops.update_resident if node.target is ops.update_host else ops.update_host
    return f"{ops.label(node)} {node.name} is made elsewhere"


def keep_elsewhere(schedule: Schedule, rng: random.Random) -> str:
    """Gradients go to the host as if their bucket were there, or stay on the device."""
    backward = schedule.backward
    found = [] if backward is None else ops.nodes_of(backward, ops.keep_grad, ops.offload_grad)
    node = rng.choice([node for node in found if len(node.args) == 2 and not awaited(node)])
    was = ops.label(node)
    node.target = ops.offload_grad if node.target is ops.keep_grad else ops.keep_grad
    return f"{was} {node.name} is {ops.label(node)}"


def leave_another(schedule: Schedule, rng: random.Random) -> Schedule | str:
    """The backward leaves another value, which is like the right one or not."""
    backward, update = schedule.backward, schedule.update
    if backward is None or update is None or not schedule.left:
        return ""
    gradients, left, tokens = ops.returned(backward)
    was = rng.choice(left)
    values = [n for n in backward.nodes if n.op == "call_function" and n is not was]
    like = [n for n in values if n.meta.get("value") == was.meta.get("value") and n not in left]
    other = rng.choice(like)
    frees = [u for u in other.users if ops.effects(u).frees is not None and u.args[0] is other]
    if frees and rng.random() < 0.8:
        for free in frees:
            backward.erase_node(free)
    new = tuple(other if n is was else n for n in left)
    backward.output_node().args = ((gradients, new, tokens),)
    for node in update.find_nodes(op="placeholder"):
        if node.name == was.name:
            with update.inserting_after(node):
                replaced = update.create_node("placeholder", other.name, name=other.name)
            if replaced.name != other.name:
                return ""
            replaced.meta = dict(node.meta)
            node.replace_all_uses_with(replaced)
            update.erase_node(node)
    return replace(schedule, left=tuple(n.name for n in new))


def leave_less(schedule: Schedule, rng: random.Random) -> str:
    """The backward does not return what the update takes."""
    backward = schedule.backward
    if backward is None or not schedule.left:
        return ""
    gradients, left, tokens = ops.returned(backward)
    lost = rng.choice(left)
    backward.output_node().args = ((gradients, tuple(n for n in left if n is not lost), tokens),)
    return f"{lost.name} is not left"


def free_at_once(schedule: Schedule, rng: random.Random) -> str:
    """Memory goes without a wait, or without one of two."""
    node = rng.choice([n for n in _inside(schedule, ops.free, ops.defer_free) if awaited(n)])
    lost = rng.choice(awaited(node))
    wait(node, [n for n in awaited(node) if n is not lost])
    if rng.random() < 0.3:
        node.target = ops.free
    return f"{ops.label(node)} {node.name} does not wait for {lost.name}"


def help_with(schedule: Schedule, rng: random.Random) -> str:
    """The device helps with something else, too."""
    node = rng.choice(_inside(schedule, ops.help_host))
    updates: Any = node.args[0]
    others = [n for n in node.graph.nodes if n.op != "output" and n is not node]
    other = rng.choice(others)
    kept = updates[1:] if rng.random() < 0.5 else updates
    node.args = ((*kept, other),)
    return f"{ops.label(node)} is to help with {other.name}"


def _of_any_graph(edit: mutants.Edit) -> Edit:
    def made(schedule: Schedule, rng: random.Random) -> str:
        return edit(schedule, rng.choice(list(schedule.graphs.values())), rng)

    made.__name__ = edit.__name__
    return made


EDITS: dict[str, Edit] = {
    edit.__name__.replace("_", " "): edit
    for edit in (
        *(other_token, token_of_another, drop_returned, return_another, drop_update),
        *(update_again, reorder, elsewhere, keep_elsewhere, leave_another, leave_less),
        *(free_at_once, help_with),
        *map(_of_any_graph, mutants.EDITS),
    )
}
