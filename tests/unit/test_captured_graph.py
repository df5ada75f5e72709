"""A captured graph gets a program for each kind of call, and runs as it is where there can be none.

The compiler is a stand-in: its schedules are made by hand, and never run.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from megacompile import UnsupportedGraphError, megacompile
from megacompile.ir.capture import Capture, TensorInput, Variant
from megacompile.ir.schedule import Placement, Schedule
from megacompile.runtime.model.captured import SHAPES_AT_ONCE, CapturedGraph
from megacompile.runtime.model.plans import Plans
from megacompile.runtime.model.program import Program
from tests import inside
from tests.schedules import Spec, build
from tests.zoo import equal


class Compiler:
    """Notes what it is asked for; whatever else it is asked gives nothing."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.captures: list[Capture] = []
        self.built: list[Variant] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None

    def wants(self, placement: Placement) -> Placement:
        return placement

    def partition(self, capture: Capture) -> Schedule:
        self.captures.append(capture)
        if self.error is not None:
            raise self.error
        return build(Spec(training=False))

    def choose(self, *given: Any, again: bool = False) -> Any:
        return given[-1]

    def plan(self, stages: Schedule, capture: Capture, variant: Variant, _: Any) -> Schedule:
        self.built.append(variant)
        return stages

    def lower(self, schedule: Schedule) -> Schedule:
        return schedule


def captured(compiler: Compiler, *, doubles: bool = True) -> CapturedGraph:
    """x -> (2 x,), or x itself; the graph gives the program that it is run by."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.mul, (x, 2)) if doubles else x,))

    def run(program: Program, args: Sequence[Any]) -> Sequence[Any]:
        return [program]

    plans: Any = Plans(compiler, Placement())
    machine = inside.machine(megacompile(nn.Linear(1, 1), device="cpu", lowering="eager"))
    return CapturedGraph("Model.1", fx.GraphModule(nn.Module(), graph), lambda: plans, machine, run)


def test_a_program_is_made_once_and_knows_what_it_was_captured_with() -> None:
    compiler = Compiler()
    graph = captured(compiler)
    wide, tall = torch.ones(4, 6), torch.ones(6, 4).t()
    programs = [graph(x)[0] for x in (wide, tall, wide, wide, wide)]
    assert programs[0] is programs[2] is programs[4] is not programs[1]
    found = compiler.captures[0]
    (tensor,) = found.inputs
    assert (found.name, found.module) == ("Model.1", graph.module) and len(compiler.captures) == 2
    assert isinstance(tensor, TensorInput) and str(tensor.meta) == "f32[4, 6]"
    usual = Variant((), keep_last=True, accumulate=False, reuse=False, update=False)
    assert compiler.built == [usual] * 2
    other = Compiler()  # of new buckets
    plans: Any = Plans(other, Placement())
    graph.current_plans = lambda: plans
    assert graph(torch.ones(4, 6))[0] is not programs[0] and len(other.captures) == 1


def test_a_program_is_planned_again_where_buckets_have_moved() -> None:
    """A backward that is to come has the old one."""
    compiler = Compiler()
    graph = captured(compiler)
    before, *again = [graph(torch.ones(2))[0] for _ in range(4)]
    assert all(each is before for each in again), "found at once, as the last one"
    graph.stale = True
    (now,) = graph(torch.ones(2))
    assert now is not before and len(compiler.captures) == 1 and len(compiler.built) == 2
    assert before.executors and graph(torch.ones(2))[0] is now


def test_inference_on_ever_new_shapes_is_scheduled_when_a_shape_recurs() -> None:
    """As in generation, where each token makes the input longer."""
    compiler = Compiler()
    graph = captured(compiler)
    with torch.no_grad():
        for size in range(1, SHAPES_AT_ONCE + 4):
            (got,) = graph(torch.ones(size))
            assert isinstance(got, Program) is (size <= SHAPES_AT_ONCE)
        assert equal(got, torch.full((SHAPES_AT_ONCE + 3,), 2.0))
        assert isinstance(graph(torch.ones(SHAPES_AT_ONCE + 3))[0], Program)
        assert len(compiler.captures) == SHAPES_AT_ONCE + 1
    assert isinstance(graph(torch.ones(SHAPES_AT_ONCE + 2))[0], Program), "training at once"


def test_an_unsupported_graph_is_said_once_and_not_tried_for_each_size() -> None:
    compiler = Compiler(UnsupportedGraphError("no kernel for aten.odd"))
    graph = captured(compiler)
    with pytest.warns(UserWarning, match=r"aten\.odd") as said:
        assert equal(graph(torch.ones(2))[0], torch.full((2,), 2.0))
    assert len(said) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        graph(torch.ones(2))
    assert len(compiler.captures) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for n in range(3, 22):
            assert equal(graph(torch.ones(n))[0], torch.full((n,), 2.0))
    assert graph.made == 6  # the calls 1, 2, 3, 5, 9 and 17
    graph = captured(Compiler(ValueError("a bug of ours")))
    for _ in range(2):
        with pytest.raises(ValueError, match="a bug of ours"):
            graph(torch.ones(2))


def test_inputs_that_no_stage_can_take() -> None:
    for value in (torch.ones(2, 2).to_sparse(), nn.Linear(1, 1), 1j):
        graph = captured(Compiler(), doubles=False)
        assert isinstance(graph(torch.ones(2, 2))[0], Program)
        with pytest.warns(UserWarning, match="an input"):
            (found,) = graph(value)
        assert found is value and not isinstance(found, Tensor) or found.is_sparse
