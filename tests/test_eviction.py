"""What shapes, models and steps leave behind: nothing but what is in use."""

from __future__ import annotations

import gc
import linecache
from collections.abc import Callable
from typing import Any, cast
from weakref import ref

import pytest
import torch
from torch import fx

from megacompile import compat, megacompile, schedules
from megacompile.runtime.model import captured
from tests import inside
from tests.zoo import assert_steps_same, batch, stack, stacks

FEW = 3


def _sources() -> set[str]:
    """The sources of graph modules and schedules that Python keeps."""
    ours = {name for name in linecache.cache if name.startswith("<megacompile")}
    return ours | set(fx.graph_module._loader.eval_cache)


def _programs(model: Any) -> dict[Any, Any]:
    (graph,) = [g for g in inside.streamed(model).graphs if len(g.programs) > 1]
    programs: dict[Any, Any] = graph.programs
    return programs


def _run(model: Any, sizes: range) -> None:
    for size in sizes:
        model(**batch(size=size)).backward()


def test_programs_of_shapes_that_are_not_used_any_more_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured, "PROGRAMS", FEW)
    monkeypatch.setattr(compat, "described_inputs", lambda module: None)  # no size is a symbol
    plain, streamed, _ = stacks()
    compiler: Any = inside.streamed(streamed).buckets.plans.compiler
    _run(streamed, range(2, 5))
    first = [ref(program) for program in _programs(streamed).values()]
    made = [ref(executor) for p in first for executor in p().executors.values()]  # type: ignore[union-attr]
    templates = len(compiler.pipeline.templates)
    _run(streamed, range(5, 9))
    gc.collect()
    assert len(_programs(streamed)) == FEW
    assert [r() for r in first + made] == [None] * len(first + made)
    assert len(compiler.pipeline.templates) <= templates * 2
    after = len(compiler.pipeline.templates), len(_sources())
    _run(streamed, range(9, 15))
    gc.collect()
    assert (len(compiler.pipeline.templates), len(_sources())) == after
    plain.zero_grad()
    streamed.zero_grad()
    for size in (3, 14, 3):
        assert_steps_same(plain, streamed, batch(size=size))
    names = [t.index for s in schedules(streamed) for t in s.templates]
    assert len(set(names)) == len({id(t) for s in schedules(streamed) for t in s.templates})


def test_a_shape_that_is_used_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured, "PROGRAMS", FEW)
    monkeypatch.setattr(compat, "described_inputs", lambda module: None)  # no size is a symbol
    _, streamed, _ = stacks()
    _run(streamed, range(2, 8))
    kept = [ref(program) for program in _programs(streamed).values()]
    for size in range(8, 12):
        _run(streamed, range(size, size + 1))
        _run(streamed, range(7, 8))
    gc.collect()
    assert len(_programs(streamed)) == FEW
    assert [reference() is not None for reference in kept] == [False, False, True]


def test_a_backward_of_a_program_that_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured, "PROGRAMS", FEW)
    monkeypatch.setattr(compat, "described_inputs", lambda module: None)  # no size is a symbol
    plain, streamed, _ = stacks()
    mine, theirs = (model(**batch(size=3)) for model in (plain, streamed))
    for size in range(4, 9):
        streamed(**batch(size=size))
    mine.backward()
    theirs.backward()
    for a, b in zip(plain.parameters(), streamed.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad)


def _counts() -> tuple[int, int]:
    gc.collect()
    return len(gc.get_objects()), len(_sources())


def _growth(one: Callable[[], object]) -> float:
    """Objects that a call of `one` leaves behind, once there were some."""
    for _ in range(3):
        one()
    before, _ = _counts()
    for _ in range(3):
        one()
    return (_counts()[0] - before) / 3


def test_a_model_that_is_gone_leaves_nothing() -> None:
    def one() -> list[Any]:
        model, inputs = stack()
        streamed = megacompile(model, device="cpu", lowering="eager")
        streamed(**inputs).backward()
        held: Any = inside.streamed(streamed)
        return [
            *(ref(item) for item in (held, held.graphs[0], held.graphs[0].module)),
            *(ref(item) for item in (held.buckets, held.buckets.plans.compiler)),
            *(ref(f._torchdynamo_orig_callable.__code__) for f in held._compiled.values()),
        ]

    def compiled() -> None:
        model, inputs = stack()

        def call() -> Any:
            return model(**inputs)

        twin: Any = torch.compile(call, backend="eager")
        twin()
        torch._dynamo.reset_code(call.__code__)  # type: ignore[attr-defined]

    objects = min(_growth(one) for _ in range(2))  # what tests before left to caches is not ours
    _, sources = _counts()
    gone = [one() for _ in range(3)]
    assert _counts()[1] <= sources + 3  # Dynamo's own, of each captured graph
    assert all(reference() is None for references in gone for reference in references)
    assert objects < 200 + _growth(compiled)  # torch 2.11 keeps its guards of all that it compiled


class _Config:
    """What a model's options stand in."""


class _Asks(torch.nn.Module):
    """Dynamo guards on attributes that are not there."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.config = _Config()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if hasattr(self.config, "scale") or hasattr(self.layer, "scale"):
            x = x * 2
        return cast(torch.Tensor, self.layer(x).sum())


def test_a_model_that_asks_for_what_it_lacks_leaves_nothing() -> None:
    streamed = megacompile(_Asks(), device="cpu", lowering="eager")
    streamed(torch.ones(2, 4)).backward()
    gone: list[Any] = [ref(streamed.config), ref(streamed.layer)]
    gone += [ref(param) for param in streamed.parameters()]
    del streamed
    gc.collect()
    assert [reference() for reference in gone] == [None] * 4
