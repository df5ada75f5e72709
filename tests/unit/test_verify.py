"""`verify` finds and names every kind of fault in every graph, and accepts correct schedules.

The faults are rows of `faults.txt`; `tests.edits` defines the edits. Random mutants, of
ranks too: it reports each that can go wrong, which `tests.symbolic_cycle` decides, and no other.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from torch import fx

from megacompile import Activations
from megacompile.errors import ScheduleError
from megacompile.ir import ops
from megacompile.ir.edges import Collectives
from megacompile.ir.schedule import Schedule
from megacompile.ir.stream import Stream
from megacompile.verify.proof import HazardKind, hazards, verify
from tests import mutants, prove
from tests.edits import edited, find
from tests.mutants import Harm
from tests.planned import SPECS, built, planned

LINE = "0F 1F 2F 3F 4F"
PLANS: dict[str, Callable[[], Schedule]] = {
    "ranks": lambda: planned("0F 1F 2F", ranks=3),
    "ranks, adding": lambda: planned("0F 1F 2F", ranks=3, accumulate=True, inductor=True),
    "ranks, few slots": lambda: planned("0F 1F 2F 3F", ranks=3, lookahead=1),
    "replicas": lambda: planned("0F 1F 2F", ranks=2, replicas=2),
    "replicas, adding": lambda: planned("0F 1F 2F", ranks=2, replicas=2, accumulate=True),
    "replicas, updating": lambda: planned("0F 1F 2F", ranks=2, replicas=2, update=True),
    "replicas, resident": lambda: planned("0F 1F 2F", ranks=2, replicas=2, resident={1}),
    "rerunning": lambda: planned(LINE, rerun=True),
    "resident, updating": lambda: planned("0F 1F 2F", resident=frozenset({1}), update=True),
    "disk": lambda: planned(LINE, on_disk=frozenset(range(5))),
    "disk, updating": lambda: planned(LINE, on_disk=frozenset(range(5)), update=True),
    "weights on disk": lambda: planned(LINE, on_disk=frozenset(range(5)), disk_weights=True),
    "weights on disk, updating": lambda: planned(
        LINE, on_disk=frozenset(range(5)), disk_weights=True, update=True
    ),
    "saved on disk": lambda: planned(
        "0F 1F 2F 3F 4F 5F 6F 7F", activations=Activations.OFFLOAD, disk_saved=True
    ),
}


@functools.cache
def right(name: str) -> Schedule:
    """A correct schedule; edits are made in copies."""
    return built(**SPECS[name]) if name in SPECS else PLANS[name]()


@dataclass(frozen=True)
class Fault:
    """A row of the table."""

    name: str
    of: str  # the schedule that it is planted in
    edits: str
    found: tuple[str, ...]  # all that `verify` says, in any order

    def planted(self) -> Schedule:
        schedule = right(self.of)
        if self.edits == "the update of plain, too":
            return replace(schedule, update=right("plain").update)
        return edited(schedule, self.edits)


def rows(text: str) -> list[Fault]:
    """Of the table: "name | schedule | edits", or these on lines below; lines "! found; found"."""
    faults = []
    for row in re.split(r"\n(?=[^\s])", text):
        if not row.startswith("=="):
            title, *lines = row.strip().splitlines()
            name, of, *edits = title.split(" | ")
            edits += [line.strip() for line in lines if not line.startswith("    ! ")]
            found = [line.removeprefix("    ! ") for line in lines if line.startswith("    ! ")]
            faults.append(Fault(name, of, " ".join(edits), tuple("; ".join(found).split("; "))))
    return faults


FAULTS = rows(Path(__file__).with_name("faults.txt").read_text())


def said(schedule: Schedule) -> list[str]:
    """A hazard in short: "slot refilled: forward 0F, 2PREFETCH@0"."""
    return [
        f"{h.kind.value}: {h.message.partition(':')[0]} {', '.join(map(ops.label, h.nodes))}"
        for h in hazards(schedule)
    ]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_found_and_named_and_nothing_else_is(fault: Fault) -> None:
    """Each message begins with the graph, and a fix follows a semicolon."""
    schedule = fault.planted()
    assert sorted(said(schedule)) == sorted(fault.found)
    for hazard in hazards(schedule):
        graph, _, message = hazard.message.partition(": ")
        assert graph in schedule.graphs and "; " in message
        assert len(hazard.message) < 300
    with pytest.raises(ScheduleError):
        verify(schedule)


def test_the_table_has_every_kind_of_hazard_once_at_least() -> None:
    kinds = {found.partition(":")[0] for fault in FAULTS for found in fault.found}
    assert kinds == {kind.value for kind in HazardKind}
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


def test_it_ends_on_values_that_are_made_of_one_another() -> None:
    schedule = built(accumulate=True)
    total, fetched = (find(schedule, "backward", label) for label in ("2ADD_GRAD", "2FETCH_GRAD"))
    fetched.args = (ops.arguments(fetched)[0], total)
    assert HazardKind.USE_BEFORE_MADE in {hazard.kind for hazard in hazards(schedule)}
    schedule = built(changes={1})
    assign = find(schedule, "forward", "ASSIGN")
    assign.args = (ops.arguments(assign)[0], ops.arguments(assign)[0])
    assert HazardKind.LOST in {hazard.kind for hazard in hazards(schedule)}


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two slots": {"lookahead": 1, "slots": 2, "reuse": True, "accumulate": True},
    "resident": {"resident": frozenset({1}), "update": True, "slots": 5},
}
REPLICATED: dict[str, dict[str, Any]] = {  # each has another taker of the sum
    "accumulate": {"accumulate": True},
    "update": {"update": True, "slots": 5},
    "norms": {"inductor": True, "device_update": 0.5, "accumulate": True},
    "resident": {"resident": frozenset({1})},
}
DEFERRED = {"reuse": True, "accumulate": True, "defers": True}


@functools.cache
def _built(options: tuple[tuple[str, Any], ...]) -> Schedule:
    return planned("0F 1F 2F 3F 4F", **dict(options))


def ranks_built(*, ranks: int = 2, **options: Any) -> Schedule:
    """A schedule of five stages, to be spoilt."""
    options = {"lookahead": 2, "slots": 3, "ranks": ranks, **options}
    return _built(tuple(options.items())).copy()


def collectives(graph: fx.Graph) -> list[fx.Node]:
    return ops.nodes_that(graph, lambda op: op.stream is Stream.COMM)


def digests(schedule: Schedule) -> list[str]:
    """Of each graph's collectives: ranks compare these before they run it."""
    return [Collectives.of(graph, name, "").digest for name, graph in schedule.graphs.items()]


@pytest.mark.parametrize("options", [*OPTIONS.values(), *REPLICATED.values(), DEFERRED], ids=str)
def test_what_the_passes_make_is_right(options: dict[str, Any]) -> None:
    for kind in ({"ranks": 3}, {"replicas": 2}):
        schedules = [
            ranks_built(**kind, rank=rank, **options) for rank in range(kind.get("ranks", 2))
        ]
        for schedule in schedules:
            assert hazards(schedule) == []
            sums = ops.nodes_of(schedule.graphs["backward"], ops.all_reduce)
            assert len(sums) == (5 if "replicas" in kind and not options.get("defers") else 0)
        assert all(digests(schedule) == digests(schedules[0]) for schedule in schedules)
    keeps = ("keep", "recompute", "selective", "offload")  # ranks may keep other stages
    kept = [ranks_built(rank=i % 2, activations=how) for i, how in enumerate(keeps)]
    assert all(digests(schedule) == digests(kept[0]) for schedule in kept)


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_swapped_collectives_are_reported(name: str) -> None:
    """Every two neighbours, in one of three ranks; that rank alone may be right."""
    right_alone = 0
    for k in range(len(collectives(ranks_built().graphs[name])) - 1):
        mutant = ranks_built(rank=1, ranks=3)
        first, second = collectives(mutant.graphs[name])[k : k + 2]
        second.append(first)
        right_alone += not hazards(mutant)
        assert digests(mutant) != digests(ranks_built(ranks=3))
    assert right_alone > 0, "only several ranks show it"


OTHER: dict[str, tuple[Schedule, Schedule]] = {
    "another lookahead": (ranks_built(), ranks_built(rank=1, lookahead=1)),
    "no backward": (ranks_built(), replace(ranks_built(rank=1), backward=None)),
    "a later backward sums": (ranks_built(replicas=2), ranks_built(replicas=2, rank=1, **DEFERRED)),
}


@pytest.mark.parametrize("name", OTHER)
def test_what_another_rank_runs_differs(name: str) -> None:
    one, other = OTHER[name]
    assert digests(one) != digests(other)


def test_every_harmful_mutant_is_reported_and_nothing_else() -> None:
    """Mutants of graphs, of updates and of what joins graphs."""
    counts = prove.prove_verify(300, 1, mutants.lined(32, seed=1))
    assert counts.missed == [] and counts.false_alarms == 0, str(counts)
    assert counts.of(Harm.WRONG, reported=True) > 50
    assert counts.of(Harm.NONE, reported=False) > 30, "it does not report everything"
    assert len({name for name, _ in counts.edits}) > 24, "of every kind"
    # Without one kind of check, some would be missed: the mutants need what `verify` proves.
    for blind in (
        {HazardKind.RACE, HazardKind.HANDED_ON},
        {HazardKind.WRONG_UPDATE},
        {HazardKind.SLOT_REFILLED},
        {HazardKind.FREED_TOO_EARLY, HazardKind.USE_AFTER_FREE, HazardKind.WRONG_FREE},
        {HazardKind.LOST, HazardKind.WRONG_ARGUMENT, HazardKind.USE_BEFORE_MADE},
    ):
        assert any(kinds <= blind for kinds in counts.kinds), blind
