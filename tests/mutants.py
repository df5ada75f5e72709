"""Mutants of real schedules: an edge is dropped, an op moved, another value, slot or bucket taken.

Whether a mutant can produce a wrong result is decided by the interleavings of
`tests.symbolic_cycle`, and `verify` must report every one that can. Mutants of the update, and of
the edges between graphs, are made by `tests.mutants_step`. The passes make the schedules, for
random models, or lines of stages, and plans.
"""

from __future__ import annotations

import enum
import operator
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import fx

from megacompile.ir import ops
from megacompile.ir.buckets import Bucket, Slot
from megacompile.ir.schedule import Schedule
from tests import nets
from tests.capturing import capture, differentiated
from tests.draws import examples
from tests.nets import Choice, Net
from tests.planned import passed
from tests.planned import planned as planned_line
from tests.subject import plain_refuses
from tests.symbolic import Crash
from tests.symbolic_cycle import Cycle, Kind, kinds

Edit = Callable[[Schedule, fx.Graph, random.Random], str]


class Harm(enum.Enum):
    NONE = "harmless"
    WRONG = "wrong result"
    CRASH = "crash"


class Truth:
    """What a schedule gives in the interleavings of `tests.symbolic_cycle`; mutants of it are
    judged by that.

    Raises:
        AssertionError: the schedule itself gives more than one result.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        backward = schedule.backward
        self.accumulate = backward is not None and bool(ops.nodes_of(backward, ops.fetch_grad))
        self.cycles = {kind: self._cycle(kind) for kind in kinds(schedule)}

    def _cycle(self, kind: Kind) -> dict[object, int]:
        right, *others = Cycle(self.schedule, kind, accumulate=self.accumulate).results()
        assert all(other == right for other in others), f"{self.schedule.name}: {kind.value}"
        return right

    def judge(self, mutant: Schedule) -> tuple[Harm, str]:
        """Can some interleaving of `mutant` give something else than its original does, and why?"""
        for kind, right in self.cycles.items():
            try:
                cycle = Cycle(mutant, kind, accumulate=self.accumulate)
            except Crash as error:
                return Harm.CRASH, str(error)
            if any(result != right for result in cycle.results()):
                return Harm.WRONG, kind.value
        return Harm.NONE, ""


def tried(edit: Callable[..., Any], *args: Any) -> Any:
    """What an edit did; "" where it has nothing to choose from."""
    try:
        return edit(*args)
    except IndexError:
        return ""


# Edits. Each gives what it did. Where there is nothing to edit, it gives "", or it has nothing to
# choose from and raises IndexError.


def _waiting(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.kwargs.get("after")]


def _places(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that something can be put in front of: results stay behind their op."""
    return [n for n in graph.nodes if n.op != "placeholder" and n.target is not operator.getitem]


def _nearby(nodes: Sequence[fx.Node], node: fx.Node, rng: random.Random) -> fx.Node:
    """One of the nodes, more often one that is near."""
    if rng.random() < 0.5:
        return rng.choice(nodes)
    at = nodes.index(node)
    return nodes[max(0, min(len(nodes) - 1, at + rng.choice((-4, -3, -2, -1, 2, 3, 4, 5))))]


def drop_edge(schedule: Schedule, graph: fx.Graph, rng: random.Random) -> str:
    node = rng.choice(_waiting(graph))
    after: Any = node.kwargs["after"]
    lost = rng.choice(after)
    node.kwargs = {"after": tuple(n for n in after if n is not lost)}
    return f"{ops.label(node)} {node.name} no longer waits for {lost.name}"


def reroute_edge(schedule: Schedule, graph: fx.Graph, rng: random.Random) -> str:
    node = rng.choice(_waiting(graph))
    others = [n for n in graph.nodes if n.op == "call_function" and n is not node and n.users]
    other = rng.choice(others)
    after: Any = node.kwargs["after"]
    node.kwargs = {"after": (*after[1:], other)}
    return f"{ops.label(node)} {node.name} waits for {other.name}, not {after[0].name}"


def _move(node: fx.Node, graph: fx.Graph, rng: random.Random) -> str:
    places = _places(graph)
    goal = _nearby(places, node, rng)
    if goal is node:
        return ""
    results = [item for _, item in sorted(ops.items(node))]
    goal.prepend(node)
    for item in results:
        goal.prepend(item)
    return f"{ops.label(node)} {node.name} is issued before {ops.label(goal)} {goal.name}"


def move_copy(schedule: Schedule, graph: fx.Graph, rng: random.Random) -> str:
    copies = (ops.prefetch, ops.fetch_grad, ops.offload_grad, ops.fetch_state, ops.offload_state)
    return _move(rng.choice(ops.nodes_of(graph, *copies)), graph, rng)


def move_free(schedule: Schedule, graph: fx.Graph, rng: random.Random) -> str:
    node = rng.choice(ops.nodes_of(graph, ops.free, ops.defer_free))
    done = _move(node, graph, rng)
    if done and node.kwargs.get("after") and rng.random() < 0.5:
        node.kwargs = {}
        done += " and waits for nothing"
    return done


def move_compute(schedule: Schedule, graph: fx.Graph, rng: random.Random) -> str:
    quiet = (ops.assign, ops.snapshot, ops.save_rng, ops.alloc_grad, ops.alloc_state, ops.begin)
    runs = (ops.recompute, ops.rerun)
    computes = (ops.reuse, ops.add_grad, ops.norm_grad, ops.keep_grad, ops.update_in_place)
    return _move(rng.choice(ops.nodes_of(graph, *runs, *computes, *quiet)), graph, rng)


def delete(schedule: Schedule, graph: fx.Graph, rng: random.Random) -> str:
    ends = (ops.keep_grad, ops.offload_grad, ops.offload_state)
    effects = (ops.free, ops.defer_free, ops.assign, *ends)
    node = rng.choice([node for node in ops.nodes_of(graph, *effects) if not node.users])
    graph.erase_node(node)
    return f"{ops.label(node)} {node.name} is left out"


def change_slot(schedule: Schedule, graph: fx.Graph, rng: random.Random) -> str:
    node = rng.choice(ops.nodes_of(graph, ops.prefetch, ops.reuse))
    was: Any = node.args[1]
    slots = [slot for slot in schedule.slots if slot.index != was.index]
    slots.append(Slot(len(schedule.slots), was.size_bytes))  # one that is not there
    slot = rng.choice(slots)
    node.args = (node.args[0], slot)  # type: ignore[assignment]
    return f"{ops.label(node)} {node.name} was at {was!r}"


def change_bucket(schedule: Schedule, graph: fx.Graph, rng: random.Random) -> str:
    of_bucket = [n for n in ops.nodes_of(graph) if n.args and isinstance(n.args[0], Bucket)]
    node = rng.choice(of_bucket)
    was: Any = node.args[0]
    bucket: Any = rng.choice([b for b in schedule.buckets if b.key != was.key])
    node.args = (bucket, *node.args[1:])
    return f"{ops.label(node)} {node.name} was of bucket {was.label}"


def change_value(schedule: Schedule, graph: fx.Graph, rng: random.Random) -> str:
    """An op takes another value: a data edge is rerouted."""
    readers = [n for n in ops.nodes_of(graph) if any(isinstance(v, fx.Node) for v in _flat(n.args))]
    node = rng.choice(readers)
    taken = node.args[1] if node.target is ops.forward else node.args  # what it computes stays
    was = rng.choice([v for v in _flat(taken) if isinstance(v, fx.Node)])
    others = [n for n in graph.nodes if n.op != "output" and n is not was and n is not node]
    like = [n for n in others if _kind(n) == _kind(was)]
    if not like and rng.random() < 0.7:
        return ""
    other = rng.choice(like or others)
    node.args = fx.map_arg(node.args, lambda n: other if n is was else n)
    return f"{ops.label(node)} {node.name} takes {other.name}, not {was.name}"


def drop_value(schedule: Schedule, graph: fx.Graph, rng: random.Random) -> str:
    """A stage is not given something."""
    updates = (ops.update, ops.update_in_place)
    stages = (ops.forward, ops.recompute, ops.rerun, ops.backward)
    node = rng.choice(ops.nodes_of(graph, *stages, *updates))
    was = rng.choice([v for v in _flat(node.args) if isinstance(v, fx.Node)])
    node.args = _without(node.args, was)
    return f"{ops.label(node)} {node.name} is not given {was.name}"


def swap(schedule: Schedule, graph: fx.Graph, rng: random.Random) -> str:
    """Two neighbours that do not need one another change places."""
    found = [n for n in _places(graph) if n.op == "call_function"]
    first = rng.choice(found)
    at = found.index(first)
    if at + 1 == len(found) or first in found[at + 1].all_input_nodes:
        return ""
    second = found[at + 1]
    results = [item for _, item in sorted(ops.items(second))]
    if any(item in second.all_input_nodes for _, item in ops.items(first)):
        return ""
    for node in (second, *results):
        first.prepend(node)
    return f"{ops.label(second)} {second.name} comes before {ops.label(first)} {first.name}"


def change_held(schedule: Schedule, graph: fx.Graph, rng: random.Random) -> str:
    """The backward takes from a slot what it fetched before."""
    backward = schedule.backward
    found = [] if backward is None else ops.nodes_of(backward, ops.prefetch)
    node = rng.choice(found)
    node.target = ops.reuse
    return f"{ops.label(node)} {node.name} was a prefetch"


EDITS: tuple[Edit, ...] = (
    *(drop_edge, reroute_edge, move_copy, move_free, move_compute, delete),
    *(change_slot, change_bucket, change_value, drop_value, swap, change_held),
)


def _flat(value: Any) -> list[Any]:
    if isinstance(value, (tuple, list)):
        return [leaf for item in value for leaf in _flat(item)]
    return [value]


def _without(value: Any, lost: fx.Node) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(_without(item, lost) for item in value)
    return None if value is lost else value


def _kind(node: fx.Node) -> object:
    """Values of a kind can be taken for one another without a mistake in their types."""
    if node.target is operator.getitem:
        source: Any = node.args[0]
        group = isinstance(node.meta.get("value"), tuple)
        return (source.target is ops.backward and group) or "tensor"
    if node.op == "placeholder" or node.target in (ops.snapshot, ops.assign):
        return "tensor"
    if node.target in (ops.prefetch, ops.reuse):
        return "weights"
    if node.target in (ops.alloc_grad, ops.fetch_grad, ops.add_grad):
        return True
    if node.target in (ops.alloc_state, ops.fetch_state, ops.update):
        return "state"
    return node.target


def planned(count: int, seed: int) -> list[Schedule]:
    """`count` schedules that the passes make for random models and plans; none of them is run.

    Their code is not compiled, so they have what is only made with Inductor, too: norms, and
    updates on the device.
    """
    found: list[Schedule] = []

    def one(net: Net, chosen: int) -> None:
        if len(found) >= count or plain_refuses(net, Choice()):
            return
        rng = random.Random(chosen)
        inputs: dict[str, Any] = {**nets.data(net, 0)}
        graphs = differentiated(capture(nets.build(net), **inputs))
        for _ in range(2):  # tracing takes most of the time
            found.append(passed(graphs, **any_plan(rng, len(graphs.buckets))))

    examples(one, nets.nets(), st.integers(0, 2**30), count=2 * count, seed=seed, shrink=False)
    return found


def lined(count: int, seed: int) -> list[Schedule]:
    """`count` schedules that the passes make of random lines and plans; nothing is captured."""
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        stages = rng.randint(2, 4)
        stubs: dict[str, Any] = {
            "reads": {stages - 1: f"{stages - 1} 0"} if rng.random() < 0.3 else {},
            "random": _some(rng, stages, 0.3),
            "changes": _some(rng, stages, 0.2),
            "saved": rng.choice((1, 2)),
            "helps": rng.random() < 0.3,
        }
        line = " ".join(f"{i}F" for i in range(stages))
        found.append(planned_line(line, **stubs, **any_plan(rng, stages)))
    return found


def _some(rng: random.Random, count: int, share: float) -> frozenset[int]:
    return frozenset(i for i in range(count) if rng.random() < share)


def any_plan(rng: random.Random, buckets: int) -> dict[str, Any]:
    """Options of the passes, for a model of so many buckets."""
    update, lookahead, offload = rng.random() < 0.3, rng.randint(1, 3), rng.random() < 0.4
    resident = _some(rng, buckets, 0.25)
    return {
        "accumulate": rng.random() < 0.35,
        "keep_last": rng.random() < 0.7,
        "keep": rng.randint(0, buckets),
        "reuse": rng.random() < 0.4,
        "lookahead": lookahead,
        "slots": lookahead + 1 + rng.randint(0, 2),
        "update": update,
        "compute_dtype": torch.bfloat16 if update and rng.random() < 0.3 else None,  # masters
        "device_update": 0.0 if update else rng.choice((0.0, 0.3, 0.6, 1.0)),
        "resident": resident,
        "on_disk": _some(rng, buckets, 0.3) - resident,
        "state_delay": rng.choice((1, 1, 2)),
        "rerun": rng.random() < 0.5,
        "activations": "offload" if offload else "auto",
        "offload": buckets if offload else 0,
        "saved_on_disk": buckets if offload and rng.random() < 0.7 else 0,
        "saved_on_host": rng.choice((0, 0, 2, 3)),
        "inductor": rng.random() < 0.5,
    }
