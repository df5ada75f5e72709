"""A new op is one declaration, one method of the runtime, and the pass that inserts it.

All three are in this file: everything else (the proof, the memory and cost models, the printed
forms, traces) learns of the op from its declaration.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from megacompile import megacompile, schedules, trace
from megacompile.cost.hardware import H200
from megacompile.cost.memory import device_memory
from megacompile.cost.simulate import simulate
from megacompile.ir import ops
from megacompile.ir.ops.op import NO_OP, OPS, Show, Takes, Value, by_subject, op, unbound
from megacompile.ir.ops.sizes import of_argument
from megacompile.ir.schedule import Schedule
from megacompile.ir.stream import Stream
from megacompile.passes.schedule.prefetch import insert_prefetch
from megacompile.plan import pipeline
from megacompile.runtime.ops.bound import BoundOps
from megacompile.verify.proof import HazardKind, hazards, verify
from tests.zoo import assert_steps_same, stack, twins


def insert_largest(schedule: Schedule, **options: Any) -> Schedule:
    """Note the largest weight of each bucket, behind its prefetch.

    before: 0PREFETCH 0F      after: 0PREFETCH 0LARGEST 0F
    """
    new = insert_prefetch(schedule, **options)
    for node in ops.nodes_of(new.forward, ops.prefetch):
        with new.forward.inserting_after(node):
            ops.call(new.forward, largest, node.args[0], node)
    return new


def largest(bucket: Any, weights: Any) -> Any:
    """The largest absolute value among the weights of a bucket."""
    unbound(largest)


NOTED: list[float] = []


def _largest(self: BoundOps, bucket: Any, weights: Any) -> Any:
    def note() -> None:
        NOTED.append(max(float(w.abs().max()) for w in weights.value if w is not None))

    return self._issue(Stream.COMPUTE, (weights,), note)


@pytest.fixture(autouse=True)
def declared(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The op, for the duration of a test."""
    NOTED.clear()
    monkeypatch.setitem(OPS, largest, NO_OP)  # which is taken back at the end
    op(
        Stream.COMPUTE,
        by_subject,
        gives=Value.DONE,
        takes=(Takes(1, Value.WEIGHTS),),
        show=Show.CELL,
        traffic=of_argument(1),
    )(largest)
    monkeypatch.setattr(BoundOps, "largest", _largest, raising=False)
    monkeypatch.setattr(pipeline, "insert_prefetch", insert_largest)
    yield


def made() -> Schedule:
    model, inputs = stack()
    streamed = megacompile(model, device="cpu", lowering="eager")
    streamed(**inputs).backward()
    return schedules(streamed)[0]


def test_it_runs_and_changes_no_number() -> None:
    model, inputs = stack()
    plain, streamed = twins(model)
    assert_steps_same(plain, streamed, inputs)
    assert NOTED


def test_it_is_shown() -> None:
    schedule = made()
    assert "0LARGEST" in schedule.table()
    assert "largest(bucket_0, w0)" in schedule.code()
    assert "LARGEST" in schedule.to_dot()
    assert "LARGEST" in schedule.diff(schedules(_without())[0])


def _without() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "insert_prefetch", insert_prefetch)
        model, inputs = stack()
        streamed = megacompile(model, device="cpu", lowering="eager")
        streamed(**inputs).backward()
    return streamed


def test_it_is_proved() -> None:
    schedule = made()
    verify(schedule)
    node, *_ = ops.nodes_of(schedule.forward, largest)
    other = ops.nodes_of(schedule.forward, ops.prefetch)[1]
    node.args = (node.args[0], other)
    assert HazardKind.WRONG_WEIGHTS in {hazard.kind for hazard in hazards(schedule)}


def test_a_slot_is_not_filled_while_it_reads() -> None:
    schedule = made()
    node, *_ = ops.nodes_of(schedule.forward, largest)
    schedule.forward.output_node().prepend(node)
    found = {hazard.kind for hazard in hazards(schedule)}
    assert HazardKind.SLOT_REFILLED in found or HazardKind.SLOT_OVERWRITTEN in found


def test_it_costs_and_is_traced() -> None:
    model, inputs = stack()
    streamed = megacompile(model, device="cpu", lowering="eager")
    streamed(**inputs).backward()
    with trace(streamed) as traced:
        streamed(**inputs)
    assert "0LARGEST" in {span.op.name for span in traced.spans}
    schedule = schedules(streamed)[0]
    assert "0LARGEST" in {event.label for event in simulate(schedule, H200).events}
    assert device_memory(schedule).peak.total_bytes > 0


def test_the_runtime_knows_it_by_name() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(BoundOps, "largest")
        with pytest.raises(AttributeError, match="largest"):
            made()
