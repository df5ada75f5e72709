"""The passes on schedules: strings in, strings out; the results are verified.

The cases are rows of `passes.txt`: the passes that run, a reason and the options; the schedule that
they get (`tests.actions`); what is seen afterwards, in which "..." is anything. `VIEWS` says what
each view shows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from functools import partial as part
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from megacompile import Activations
from megacompile.cost.hardware import H200
from megacompile.cost.memory import MemoryKind
from megacompile.cost.optimizer import OptimizerCost
from megacompile.cost.places import host_memory
from megacompile.cost.simulate import simulate
from megacompile.ir import ops
from megacompile.ir.edges import take, token_of
from megacompile.ir.schedule import Schedule
from megacompile.ir.stream import Stream
from megacompile.verify.proof import verify
from tests.actions import Stubs, apply, frees, parse, waits
from tests.mutants import any_plan
from tests.planned import PASSES, planned, rows, without_gradients

Pass = Callable[[Schedule], Schedule]
STATES = {"updated_bytes": lambda item_bytes: 10.0, "state_bytes": lambda item_bytes: 8.0}


@dataclass(frozen=True)
class Case:
    """A row of the table."""

    passes: str
    reason: str
    options: dict[str, Any]
    line: str
    seen: dict[str, str] = field(default_factory=dict)  # view -> what it shows

    def schedule(self) -> Schedule:
        """What the passes make."""
        if self.passes == "planned":
            return planned(self.line, **self.options)
        options = {**self.options}
        plan: dict[str, Any] = {name: options[name] for name in _PLAN if name in options}
        options = {name: value for name, value in options.items() if name not in plan}
        stubs = {f.name: options.pop(f.name) for f in fields(Stubs) if f.name in options}
        schedule = without_gradients(parse(self.line, **stubs), options.pop("still", ()))
        schedule = replace(schedule, plan=rows(len(schedule.stages), **plan))
        for name in self.passes.split(", "):
            for function in CHAINS[name](**options):
                schedule = apply(function, schedule)
        return schedule


_PLAN = ("keep", "resident", "device_update", "offload", "on_disk", "saved_delay", "state_delay")


def _rows(table: str) -> Iterator[Case]:
    without_headings = re.sub(r"(?m)^==.*\n", "", table).strip()
    for row in re.split(r"\n+(?=\w)", without_headings):
        title, _, rest = row.partition("\n")
        head, _, options = title.partition(" | ")
        passes, _, reason = head.partition(": ")
        line, *views = re.split(r"    (?=\w+> )", rest)
        seen = {name: " ".join(what.split()) for name, what in (v.split("> ", 1) for v in views)}
        yield Case(passes, reason, eval(f"dict({options})"), line, seen)


CASES = list(_rows(Path(__file__).with_name("passes.txt").read_text()))

# The passes of a row, by its name. Options that a pass does not take are another's.


def _update_graph(accumulate: bool = False, helps: bool = False) -> list[Pass]:
    give = part(PASSES.updates.insert_device_update, state_bytes=STATES["updated_bytes"])
    insert = part(PASSES.updates.insert_update_graph, helps=helps)
    return [part(PASSES.updates.offload_gradients, accumulate=accumulate), give, insert]


def _step(accumulate: bool = False, in_backward: bool = False) -> list[Pass]:
    made = CHAINS["updates" if in_backward else "update_graph"](accumulate=accumulate)
    slots = part(PASSES.assign_slots, slots=3, reuse=False)
    return [*made, PASSES.insert_prefetch, slots, PASSES.insert_free, PASSES.insert_tokens]


CHAINS: dict[str, Callable[..., list[Pass]]] = {
    "prefetch": lambda lookahead=1, **_: [part(PASSES.insert_prefetch, lookahead=lookahead)],
    "slots": lambda slots=3, reuse=False: [part(PASSES.assign_slots, slots=slots, reuse=reuse)],
    "recompute": lambda: [PASSES.insert_recompute],
    "offload_saved": lambda lookahead=1: [
        PASSES.insert_recompute,
        part(PASSES.offload_saved_tensors, lookahead=lookahead),
    ],
    "norms": lambda **_: [PASSES.updates.insert_norms],
    "offload_grad": lambda accumulate=False, **_: [
        part(PASSES.updates.offload_gradients, accumulate=accumulate)
    ],
    "updates": lambda delay=1, **given: [
        part(
            PASSES.updates.insert_updates,
            **{"accumulate": False, "lookahead": 1, "masters": False, **STATES, **given},
        )
    ],
    "update_graph": _update_graph,
    "free": lambda **_: [PASSES.insert_free],
    "tokens": lambda: [PASSES.insert_tokens],
    "step": _step,
}


def _calls(graph: fx.Graph, names: str, shown: Callable[[fx.Node], Any]) -> str:
    """Of some ops, their label and some values: "2B(w2)"."""
    found = [n for n in ops.nodes_of(graph) if re.fullmatch(names, _name(n))]
    return " ".join(f"{ops.label(n)}({' '.join(map(str, shown(n)))})" for n in found)


def _name(node: fx.Node) -> str:
    op = ops.op_of(node)
    return "" if op is None else op.name


def _saved(node: fx.Node) -> list[object]:
    if node.target is ops.backward:
        return list(ops.arguments(node)[3])
    return [item for k, item in ops.items(node) if k > 0]


def _values(node: fx.Node) -> list[object]:
    taken = ops.arguments(node)
    return list(taken[0] if node.target is ops.help_host else taken[1:])


def _sizes(graph: fx.Graph) -> str:
    found = ops.nodes_of(graph, ops.alloc_state, ops.fetch_state, ops.update)
    return " ".join(f"{ops.label(n)}:{n.meta['value'].size_bytes}" for n in found)


def _placeholders(graph: fx.Graph, *, tokens: bool) -> str:
    found = graph.find_nodes(op="placeholder")
    return " ".join(n.name for n in found if bool(token_of(n)) is tokens)


_MOVES = "(fetch|add|norm|keep|offload)_grad|(fetch|offload)_state|update.*|help_host"
OF_GRAPHS: dict[str, Callable[[fx.Graph], str]] = {
    "text": ops.actions,
    "waits": waits,  # each with its `after=`
    "frees": frees,  # where values die
    "takes": lambda graph: _calls(graph, "forward|recompute|backward", lambda n: n.args[1]),
    "draws": lambda graph: _calls(graph, "recompute", lambda n: n.args[3:4]),
    "saves": lambda graph: _calls(graph, "forward|backward", _saved),
    "gives": lambda graph: _calls(graph, _MOVES, _values),
    "bytes": _sizes,
    "names": lambda graph: " ".join(map(_name, ops.nodes_of(graph))),
    "inputs": part(_placeholders, tokens=False),
    "tokens": part(_placeholders, tokens=True),
}
OF_SCHEDULES: dict[str, Callable[[Schedule], str]] = {
    "saved": lambda schedule: " ".join(schedule.saved_values),
    "left": lambda schedule: " ".join(schedule.left),
    "slots": lambda schedule: " ".join(f"{s.index}:{s.size_bytes}" for s in schedule.slots),
    "reused": lambda schedule: " ".join(f"{i}:{b.label}" for i, b in schedule.reused),
    "returns": lambda schedule: " | ".join(
        "" if name == "forward" else " ".join(map(ops.label, ops.returned(graph)[-1]))
        for name, graph in schedule.graphs.items()
    ),
}


def _view(schedule: Schedule, name: str) -> str:
    if name in OF_SCHEDULES:
        return OF_SCHEDULES[name](schedule).strip()
    return " | ".join(map(OF_GRAPHS[name], schedule.graphs.values())).strip()


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.passes}: {case.reason}")
def test_a_pass_makes_what_the_table_says(case: Case) -> None:
    """`apply` also checks that the input schedule is unchanged."""
    schedule = case.schedule()
    assert case.seen
    for name, wanted in case.seen.items():
        shown = _view(schedule, name)
        if "..." not in wanted:
            assert shown == wanted, name
        else:
            pattern = ".*".join(map(re.escape, re.split(r" ?\.\.\. ?", wanted)))
            assert re.fullmatch(pattern, shown), f"{name}> {shown}"


@st.composite
def chains(draw: st.DrawFn) -> dict[str, Any]:
    """Stages with no, many or shared buckets, without saved tensors, or with random numbers."""
    count = draw(st.integers(1, 5))
    stages = range(count)
    known: list[str] = []
    reads = {}
    for i in stages:
        fresh = [str(i), f"{i}.1", f"{i}.2"][: draw(st.sampled_from([0, 1, 1, 1, 2, 3]))]
        again = draw(st.lists(st.sampled_from(known), unique=True, max_size=2)) if known else []
        known += fresh
        reads[i] = " ".join(again + fresh)
    some = st.sets(st.sampled_from(stages), max_size=2)
    frozen = range(draw(st.integers(0, count - 1)))
    kinds = {name: draw(some) for name in ("blind", "unsaved", "random")}
    return {"reads": reads, "frozen": frozen, **kinds}


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(chains(), st.randoms(use_true_random=False))
def test_any_plan_of_any_chain_is_safe(stubs: dict[str, Any], rng: Random) -> None:
    plan = {**any_plan(rng, buckets=6), "ranks": rng.choice((1, 1, 1, 3)), "device_update": 0.0}
    if plan["ranks"] > 1:  # they share no disk
        plan |= {"on_disk": (), "saved_on_disk": 0}
    elif rng.random() < 0.5:
        plan |= {"disk_weights": True, "compute_dtype": None}
    verify(planned(" ".join(f"{i}F" for i in stubs["reads"]), **stubs, **plan))


def test_a_stage_that_changes_a_buffer_runs_once() -> None:
    each = [planned("0F 1F 2F 3F 4F", rerun=True, changes={changing}) for changing in (1, 2)]
    assert ["1RERUN" in schedule.code() for schedule in each] == [False, True]


def test_the_same_line_gives_the_same_schedule() -> None:
    """The order of sets must not decide anything. A token is made once, and survives a copy."""
    given: dict[str, Any] = {"on_disk": frozenset({0, 8, 16}), "disk_weights": True, "offload": 3}
    line = " ".join(f"{i}F" for i in range(18))
    first, second = (planned(line, **given).code().splitlines()[2:] for _ in range(2))
    assert first == second
    schedule = parse("0F 1F")
    (bucket, other), graph = schedule.buckets, schedule.forward
    token = take(graph, bucket, ops.Part.WEIGHTS)
    assert take(graph, bucket, ops.Part.WEIGHTS) is token
    assert take(graph, bucket, ops.Part.STATES) is not token
    assert take(graph, other, ops.Part.WEIGHTS) is not token
    for each in (schedule, schedule.copy()):
        assert _placeholders(each.forward, tokens=True) == "weights_0 states_0 weights_1"


def test_a_mean_has_the_rows_of_its_rank() -> None:
    for ranks, rank, count in ((3, 0, 3), (3, 2, 2), (16, 8, 0)):  # of 8
        schedule = PASSES.insert_reduce_scatter(parse("0F | 0B", ranks=ranks), rank=rank)
        (mean,) = ops.nodes_of(schedule.backward, ops.reduce_scatter)
        assert mean.meta["value"][0].shape == (count, 8)


# A disk takes its time and its memory.

LINE = "0F 1F 2F 3F 4F 5F"
RATES = ("disk_read_gb_s", "disk_write_gb_s", "disk_read_both_gb_s", "disk_write_both_gb_s")
DISKS: dict[str, dict[str, Any]] = {
    "states": {"on_disk": frozenset(range(6))},
    "states, in the backward": {"on_disk": frozenset(range(6)), "update": True},
    "weights": {"on_disk": frozenset(range(6)), "disk_weights": True},
    "saved": {"activations": Activations.OFFLOAD, "disk_saved": True},
}


@pytest.mark.parametrize("name", DISKS)
def test_a_disk_takes_its_time(name: str) -> None:
    """Reads and writes do not overlap on a drive that does one at a time."""
    schedule = planned(LINE, **DISKS[name])
    cost = OptimizerCost(in_backward=schedule.update is None)
    found = {}
    for rate in (None, 1e-4, 1e-5):
        machine = H200.replace(**dict.fromkeys(RATES, rate))
        found[rate] = simulate(schedule, machine, optimizer=cost, steps=3)
    nodes = [node for graph in schedule.graphs.values() for node in ops.nodes_of(graph)]
    for stream in (Stream.READ, Stream.WRITE):
        moved = sum(ops.moved_bytes(n) for n in nodes if ops.stream_of(n) is stream)
        assert found[None].busy_s(stream) == 0.0
        assert moved and found[1e-5].busy_s(stream) == pytest.approx(moved / 1e4)
    assert found[1e-5].step_s > 2 * found[1e-4].step_s
    shares = found[1e-5].critical_s
    assert max(shares, key=shares.__getitem__) in (Stream.READ, Stream.WRITE)
    at = {event.label: event for event in found[1e-5].events}
    for write in [label for label in at if "WRITE_SAVED" in label]:
        read, fetch = (at[write.replace("WRITE", word)] for word in ("READ", "FETCH"))
        assert at[write].stop_s <= read.start_s <= read.stop_s <= fetch.start_s


def test_a_read_waits_for_one_of_the_sets_of_buffers() -> None:
    schedule = planned(LINE, **DISKS["states"])
    machine = H200.replace(**dict.fromkeys(RATES, 1e-5))
    steps_s = {}
    for sets in (1, 2, 4):
        fewer = replace(schedule, plan=replace(schedule.plan, state_sets=sets))
        timeline = simulate(fewer, machine, optimizer=OptimizerCost(), steps=3)
        steps_s[sets] = timeline.step_s
        if sets == 1:
            spans = sorted(
                (e.start_s, e.stop_s)
                for e in timeline.events
                if e.stream in (Stream.READ, Stream.WRITE)
            )
            assert all(a[1] <= b[0] * (1 + 1e-9) for a, b in zip(spans, spans[1:], strict=False))
    assert steps_s[1] > 1.5 * steps_s[4] and steps_s[2] >= steps_s[4]


def test_what_lies_on_a_disk_is_counted() -> None:
    states = planned(LINE, **DISKS["states"])
    sets, staged = states.plan.state_sets, host_memory(states, OptimizerCost())
    assert sets >= 3 and staged[MemoryKind.STAGED] == sets * 2 * 4096
    ahead = planned(LINE + " 6F 7F", on_disk=frozenset(range(8)), update=True, lookahead=4)
    assert ahead.plan.state_sets == 6, "five are in use, and one more is written"
    saved = planned(LINE, **DISKS["saved"])
    assert MemoryKind.ACTIVATIONS not in host_memory(saved) and saved.plan.saved_sets == 3
    assert host_memory(saved)[MemoryKind.STAGED] == 2 * 3 * 128, "there and back"
    weights = planned(LINE, **DISKS["weights"])
    assert (weights.plan.weight_sets, weights.plan.new_weight_sets) == (3, 4)
