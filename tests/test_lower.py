"""`lower`: which pieces of code are made, how often, and by whom."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from megacompile import compat
from megacompile.ir import ops
from megacompile.ir.schedule import Schedule
from megacompile.ir.stages import Code, Template
from megacompile.options import Lowering
from megacompile.passes.stages import lower as code
from megacompile.passes.stages.lower import lower
from megacompile.passes.stages.templates import TemplateCache
from tests.actions import parse, text
from tests.capturing import Net, capture

X = torch.linspace(-1, 1, 8).view(2, 4)


class Progress:
    """Notes what is worked on."""

    def __init__(self) -> None:
        self.work: list[tuple[Template, Code]] = []
        self.totals: list[int] = []

    def __call__(
        self, work: Iterable[tuple[Template, Code]], total: int
    ) -> Iterable[tuple[Template, Code]]:
        self.totals.append(total)
        for item in work:
            self.work.append(item)
            yield item


def lowered(schedule: Schedule, lowering: Lowering = Lowering.EAGER) -> Progress:
    progress = Progress()
    assert lower(schedule, lowering=lowering, progress=progress) is schedule
    return progress


def codes(schedule: Schedule) -> list[str]:
    """What each template has code for, in the order of first use."""
    return [" ".join(sorted(c.value for c in t.code)) for t in schedule.templates]


def test_what_the_schedule_runs_is_lowered_once_a_template() -> None:
    schedule = capture(Net(Net.chain), X).build()
    progress = lowered(schedule)
    assert len(progress.work) == len(set(progress.work)) == progress.totals[0]
    assert codes(schedule) == [
        "backward forward",  # embed saves nothing
        "backward forward recompute",
        "backward forward_saving",  # the head is kept
    ]


def test_a_second_schedule_lowers_only_what_is_new() -> None:
    cache: TemplateCache = {}
    captured = capture(Net(Net.chain), X)
    kept = captured.build(cache=cache)
    assert lowered(kept).totals == [7]
    assert lowered(kept).totals == [0]
    recomputed = captured.build(cache=cache, keep_last=False)
    new = [(t.index, code.value) for t, code in lowered(recomputed).work]
    assert new == [(0, "forward"), (0, "recompute")], "of the head, which was traced first"


def test_the_code_of_each_node() -> None:
    schedule = parse("0F 1F | 1B 0RECOMPUTE 0B")
    nodes = [
        node
        for graph in schedule.graphs.values()
        for node in ops.nodes_of(graph, ops.forward, ops.recompute, ops.backward)
    ]
    assert [ops.code_of(node) for node in nodes] == [
        Code.FORWARD,
        Code.FORWARD_SAVING,
        Code.BACKWARD,
        Code.RECOMPUTE,
        Code.BACKWARD,
    ]


def test_eager_code_computes_the_graph() -> None:
    schedule = capture(Net(Net.chain), X).build()
    lowered(schedule)
    template = schedule.stages[1].traced
    primals = [meta.zeros().add(1) for meta in template.primals]
    want = template.graphs[Code.FORWARD](*primals)
    (got,) = template.code[Code.FORWARD](primals)
    assert isinstance(got, Tensor) and torch.equal(got, want[0])


def test_inductor_compiles_what_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With inputs like those that the graph was traced with; a graph that only passes is not."""
    compiled: list[list[tuple[int, ...]]] = []

    def compile_inductor(module: fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Any]:
        compiled.append([tuple(value.shape) for value in inputs])
        return module.forward

    monkeypatch.setattr(compat, "compile_inductor", compile_inductor)
    schedule = capture(Net(Net.chain), X).build()
    progress = lowered(schedule, Lowering.INDUCTOR)
    assert len(compiled) == len(progress.work)
    template = schedule.stages[1].traced
    assert [meta.shape for meta in template.primals] in compiled

    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = X
    graph.output((x,))
    template.graphs[Code.RECOMPUTE] = fx.GraphModule(torch.nn.Module(), graph)
    del template.code[Code.RECOMPUTE]
    compiled.clear()
    lowered(schedule, Lowering.INDUCTOR)
    assert compiled == []
    assert template.code[Code.RECOMPUTE]([X]) == (X,)


def test_the_graphs_stay_as_they_are() -> None:
    schedule = capture(Net(Net.chain), X).build()
    before = text(schedule)
    graphs = {t: dict(t.graphs) for t in schedule.templates}
    lowered(schedule)
    assert text(schedule) == before
    assert {t: dict(t.graphs) for t in schedule.templates} == graphs


# What Inductor gives.


def test_results_have_the_strides_that_they_were_traced_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Inductor pads matrix products, and gives a part of what it has padded."""
    x = torch.arange(12.0).reshape(3, 4)

    def function(primals: Sequence[Tensor], tangents: Sequence[Tensor]) -> Any:
        (x,) = primals
        return x * 2, (x * 3).t(), x.sum(0, keepdim=True), (x * 4)[:, :2], None

    module = compat.trace(function, [x], [], {})
    traced = module(x)
    padded = [torch.nn.functional.pad(t, (0, 4))[:, : t.shape[1]] for t in traced[:2]]
    given = [*padded, *traced[2:]]
    monkeypatch.setattr(code, "compiled", lambda module: lambda *inputs: given)
    found = code._lowered(module, code._function)([x])
    for plain, result, before in zip(traced[:4], found, given, strict=False):
        assert plain is not None and before is not None and result is not None
        assert torch.equal(plain, result) and plain.stride() == result.stride()
        assert (result is before) == (before.stride() == plain.stride())
    assert len(found) == 5 and found[4] is None


def test_strides_of_what_has_one_element_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(1, 4)
    module = compat.trace(lambda primals, _: [primals[0] * 2], [x], [], {})
    given = torch.empty_strided((1, 4), (64, 1))
    monkeypatch.setattr(code, "compiled", lambda module: lambda *inputs: [given])
    assert code._lowered(module, code._function)([x])[0] is given
