"""What shapes, models and steps leave behind: nothing but what is in use."""

from __future__ import annotations

import gc
import linecache
from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
from torch import Tensor, fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from megacompile import megacompile, schedules
from tests import inside
from tests.equality.nets import in_a_row
from tests.zoo import assert_same, twins

FEW = 3
WIDTH = 4


class Config:
    """What a model's options stand in."""


def guarded(m: Any, x: Tensor) -> Tensor:
    """Dynamo guards on attributes that are not there."""
    if hasattr(m.config, "scale") or hasattr(m.first, "scale"):
        x = x * 2
    return m.last(m.first(x).tanh()).square().mean()


def tiny() -> Any:
    return in_a_row(guarded, config=Config())


X = torch.linspace(-1, 1, 3 * WIDTH).view(3, WIDTH)
KERNELS = (
    *(SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION),
    *(SDPBackend.MATH, SDPBackend.CUDNN_ATTENTION),
)


def loss_of(model: Any, number: int) -> Tensor:
    """A kind of call, which the same captured graph serves: which kernels are allowed."""
    with sdpa_kernel([each for i, each in enumerate(KERNELS) if (number + 1) >> i & 1]):
        loss: Tensor = model(X)
    return loss


def sources() -> set[str]:
    """The sources of graph modules and schedules that Python keeps."""
    ours = {name for name in linecache.cache if name.startswith("<megacompile")}
    return ours | set(fx.graph_module._loader.eval_cache)


def run(model: Any, kinds: range) -> None:
    for number in kinds:
        loss_of(model, number).backward()


def test_programs_that_are_not_used_any_more_go() -> None:
    plain, model = twins(tiny())
    run(model, range(1))
    (graph,) = inside.graphs(model)
    graph.most = FEW
    compiler: Any = inside.streamed(model).buckets.plans.compiler
    templates = compiler.pipeline.templates
    run(model, range(1, FEW))
    assert len(graph.programs) == FEW
    gone: list[Any] = [ref(each) for each in inside.programs(model) + inside.executors(model)]
    count = len(templates)
    run(model, range(3, 6))
    gc.collect()
    assert len(graph.programs) == FEW and len(templates) <= count * 2
    assert [r() for r in gone] == [None] * len(gone)
    after = len(templates), len(sources())
    run(model, range(7, 9))
    gc.collect()
    assert (len(templates), len(sources())) == after
    for each in (plain, model):
        each.zero_grad()
    # a backward whose program has gone meanwhile
    losses = [loss_of(each, 11) for each in (plain, model)]
    for number in range(12, 15):
        loss_of(model, number)
    for loss, each in zip(losses, (plain, model), strict=True):
        loss.backward()
        run(each, range(1, 2))
    assert_same(plain, model)
    names = [t.index for s in schedules(model) for t in s.templates]
    assert len(set(names)) == len({id(t) for s in schedules(model) for t in s.templates})
    # one that is used stays
    kept = [ref(program) for program in inside.programs(model)]
    for number in range(2, 5):
        run(model, range(number, number + 1))
        run(model, range(1, 2))
    gc.collect()
    assert sum(reference() is not None for reference in kept) == 1


def counts() -> tuple[int, int]:
    gc.collect()
    return len(gc.get_objects()), len(sources())


def growth(one: Callable[[], object]) -> float:
    """Objects that a call of `one` leaves behind, once there were some."""
    one()
    before, _ = counts()
    for _ in range(2):
        one()
    return (counts()[0] - before) / 2


def test_a_model_that_is_gone_leaves_nothing() -> None:
    def one() -> list[Any]:
        model: Any = megacompile(tiny(), device="cpu", lowering="eager")
        model(X).backward()
        held: Any = inside.streamed(model)
        return [
            *(
                ref(item)
                for item in (held, held.captures.graphs[0], held.captures.graphs[0].module)
            ),
            *(ref(item) for item in (held.buckets, held.buckets.plans.compiler)),
            *(ref(f._torchdynamo_orig_callable.__code__) for f in held._compiled.values()),
            *(ref(item) for item in (model.config, *model.modules(), *model.parameters())),
        ]

    def compiled() -> None:
        model = tiny()

        def call() -> Any:
            return model(X)

        twin: Any = torch.compile(call, backend="eager")
        twin()
        torch._dynamo.reset_code(call.__code__)  # type: ignore[attr-defined]

    one()
    objects = min(growth(one) for _ in range(2))  # what tests before left to caches is not ours
    _, before = counts()
    gone = [one() for _ in range(2)]
    assert counts()[1] <= before + 2  # Dynamo's own, of each captured graph
    assert all(reference() is None for references in gone for reference in references)
    assert objects < 200 + growth(compiled)  # torch 2.11 keeps its guards of all that it compiled
