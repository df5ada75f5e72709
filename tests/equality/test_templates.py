"""Templates: what stages save, how much less they may save, and the code that is made and run."""

from __future__ import annotations

import math
import re
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from megacompile import schedules, trace
from megacompile.ir import ops
from megacompile.ir.schedule import Schedule
from megacompile.ir.stages import ArgRef, Code, Stage
from megacompile.ir.tensors import tensors_bytes
from tests import inside
from tests.capturing import Net
from tests.equality import nets
from tests.equality.nets import Applies, assert_alike
from tests.zoo import Tower, assert_same, batch, batchnorm, step, twins

X = torch.linspace(-1, 1, 64 * 4).view(64, 4)


def trained(model: nn.Module, x: Tensor = X, **options: Any) -> Schedule:
    _, streamed = twins(model, **options)
    loss = streamed(x)
    (loss[0] if isinstance(loss, tuple) else loss).backward()
    return schedules(streamed)[0]


def check_saved(stage: Stage) -> None:
    """No parameter is saved, nor a view or cast of one; and nothing that the stage gives shares
    memory with its parameters: slots are filled again."""
    template = stage.traced
    params = sum(not isinstance(ref, ArgRef) for ref in stage.primals)
    graph = template.graphs[Code.FORWARD_SAVING].graph
    saved = ops.returned(graph)[len(template.outputs) + len(template.mutated) :]
    assert len(saved) == len(template.saved)
    for node in saved:
        assert sources(node) - set(range(params)), f"stage {stage.name!r} saves {node}"
    primals = [meta.zeros() for meta in template.primals]
    held = {p.untyped_storage().data_ptr() for p in primals[:params]}
    for value in template.graphs[Code.FORWARD_SAVING](*primals):
        assert value.untyped_storage().data_ptr() not in held


def sources(node: fx.Node) -> set[int]:
    """The placeholders that a value is computed from; drawing random numbers counts as -1."""
    placeholders = node.graph.find_nodes(op="placeholder")
    found: set[int] = set()
    waiting, seen = [node], {node}
    while waiting:
        value = waiting.pop()
        if value.op == "placeholder":
            found.add(placeholders.index(value))
        elif not value.all_input_nodes:
            found.add(-1)
        waiting += [each for each in value.all_input_nodes if each not in seen]
        seen.update(value.all_input_nodes)
    return found


CONSTANTS = [(0.0, -0.0), (1, 1.0), (1, True), (0.1, math.nextafter(0.1, 1.0)), (2, 3)]
PAIRS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "order": (lambda x: x - x.sin(), lambda x: x.sin() - x),
    "item": (lambda x: x.max(-1)[0], lambda x: x.max(-1)[1]),
    "tuples": (lambda x: x.view((2, 128)).cumsum(0), lambda x: x.view((4, 64)).cumsum(0)),
    "types in tuples": (lambda x: x.clamp(*(0, 1)), lambda x: x.clamp(*(0.0, 1.0))),
    "slices": (lambda x: x[0:2], lambda x: x[0:3]),
    "windows": (lambda x: x.tril().triu(-4), lambda x: x.tril().triu(-8)),
    "keywords": (lambda x: F.dropout(x, p=0.1), lambda x: F.dropout(x, p=0.2)),
    "dtypes": (lambda x: x.to(dtype=torch.bfloat16), lambda x: x.to(dtype=torch.half)),
    "tensors": (lambda x: x * torch.tensor(2.0), lambda x: x * torch.tensor(3.0)),
    "branches": (  # Dynamo puts each into a graph module of its own
        lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)),
        lambda x: torch.cond(x.sum() > 0, torch.cos, torch.sin, (x,)),
    ),
    **{f"{a!r} or {b!r}": (lambda x, a=a: x * a, lambda x, b=b: x * b) for a, b in CONSTANTS},
}


def in_threes(m: Any, x: Tensor) -> Tensor:
    layers = zip(m.functions, m.layers, strict=True)
    return torch.stack([function(layer(x)).float().sum() for function, layer in layers]).sum()


def test_stages_share_a_template_where_nothing_changes_the_numbers() -> None:
    """Of the first function of a pair, of the same, and of the other one."""
    functions = [f for one, other in PAIRS.values() for f in (one, one, other)]
    layers = nn.ModuleList(nn.Linear(4, 4) for _ in functions)
    stages = trained(Applies(in_threes, functions=functions, layers=layers)).stages
    assert len(stages) >= 3 * len(PAIRS)
    for k, what in enumerate(PAIRS):
        one, same, other = (stages[3 * k + i].traced for i in range(3))
        assert one is same and one is not other, what


def autocast(net: Net, x: Tensor) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return net.chain(x).float()


def wide(function: Any = Net.chain, dropout: float = 0.0) -> Net:
    def forward(m: Any, x: Tensor) -> Tensor:
        hidden = F.dropout(torch.sigmoid(m.mid(torch.tanh(m.up(m.norm(x))))), dropout)
        return x + m.down(hidden)

    def layer() -> Applies:
        ends = {"up": nn.Linear(4, 16), "down": nn.Linear(16, 4)}
        return Applies(forward, norm=nn.LayerNorm(4), mid=nn.Linear(16, 16), **ends)

    net = Net(function)
    net.layers = nn.ModuleList(layer() for _ in range(3))
    return net


def test_a_template_is_for_one_autocast() -> None:
    """A stage takes and returns the same dtypes in all of them."""

    def forward(m: Any, x: Tensor) -> Tensor:
        return m.down(m.up(x).float()).float()

    models = twins(Applies(forward, up=nn.Linear(4, 8), down=nn.Linear(8, 4)))
    for dtype in (torch.bfloat16, torch.float16):
        for enabled in (False, True):
            with torch.autocast("cpu", dtype, enabled=enabled):
                assert_alike(models, nets.trained(torch.randn(2, 4)))


def test_half_of_what_a_stage_saves_is_computed_again() -> None:
    """In the stages of the plan alone; those of one template share the new one."""
    _, model = twins(wide(), activations="keep")
    inside.choose(model, keep=4, halves=True)
    model(X).backward()
    stages = schedules(model)[0].stages
    whole = trained(wide(), activations="keep").stages
    layers = [s.index for s in stages[1:4] if s.traced.saved_fraction < 1]
    assert layers
    for i in layers:
        cut, full = stages[i].traced, whole[i].traced
        assert tensors_bytes(cut.saved) < tensors_bytes(full.saved)
        nodes = [len(t.graphs[Code.BACKWARD].graph.nodes) for t in (cut, full)]
        assert nodes[0] > nodes[1]
    assert len({stages[i].traced for i in layers}) == 1


def leaks(net: Net, x: Tensor) -> Any:
    """A view of a parameter is given."""
    return net.head(net.layers[0](net.embed(x))).sum(), net.embed.weight.t()[:2]


@pytest.mark.parametrize("activations", ["keep", "selective"])
def test_what_is_never_saved_or_drawn_again(activations: str) -> None:
    """Parameters, with views and casts of them; random numbers."""
    for net in (wide(autocast), Net(leaks)):
        for stage in trained(net, activations=activations).stages:
            check_saved(stage)
    template = trained(wide(dropout=0.3), activations=activations).stages[1].traced
    backward = template.graphs[Code.BACKWARD].graph
    assert template.random and template.saved, "the mask"
    drawing = torch.Tag.nondeterministic_seeded
    assert not any(drawing in getattr(node.target, "tags", ()) for node in backward.nodes)


LABEL = re.compile(r"(\d[\d.]*)?[A-Z_]+(@\d+)?")


def layers() -> Tower:
    """Four layers of one template, and the mean of the squares."""
    torch.manual_seed(0)
    return Tower((nn.Linear(16, 16) for _ in range(4)), lambda layer, x: torch.sigmoid(layer(x)))


INPUTS = {"x": batch()["x"]}


def test_a_traceback_shows_the_line_of_the_schedule() -> None:
    def fail(inputs: Any) -> Any:
        raise ValueError("in the stage")

    _, model = twins(layers())
    step(model, INPUTS)
    (schedule,) = schedules(model)
    codes = schedule.stages[1].traced.code  # stages 1 and 2 share it
    for code, graph, line, label in (
        (Code.FORWARD, "forward", "y1_0, = forward(stage_1, (w1,), (y0_0,), False)", "1F"),
        (Code.RECOMPUTE, "backward", "s2_0_again, = recompute(stage_2,", "2RECOMPUTE"),
        (Code.BACKWARD, "backward", "d2_0, g2_2 = backward(stage_2, (w2,),", "2B"),
    ):
        real, codes[code] = codes[code], fail
        with pytest.raises(ValueError, match="in the stage") as caught:
            model.zero_grad()
            step(model, INPUTS)
        codes[code] = real
        frames = traceback.extract_tb(caught.value.__traceback__)
        (frame,) = [frame for frame in frames if frame.name == f"run_{graph}"]
        assert frame.filename.startswith(f"<megacompile Tower {graph} ")
        assert frame.line is not None and frame.line.startswith(line)
        assert re.search(rf"# compute +{label}\b", frame.line), "with its stream and printed name"
        assert frame.line in str(schedule)
        assert frame.line in "".join(traceback.format_exception(caught.value))


def ranges(model: nn.Module) -> Counter[str]:
    """The ranges of a step that have the form of a label, after a space."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        step(model, batch())
    rows = profiled.key_averages()
    return Counter({r.key[1:]: r.count for r in rows if LABEL.fullmatch(r.key[1:])})


def test_profiler_ranges_are_the_printed_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """One range for each call of the code, under its label. None where nobody records."""
    _, model = twins(batchnorm()[0])
    found = ranges(model)
    (schedule,) = schedules(model)
    assert schedule.backward is not None
    nodes = [*ops.nodes_of(schedule.forward), *ops.nodes_of(schedule.backward)]
    # A `free` is a `del`, not a call; there are no optimizer steps.
    assert found == Counter(ops.label(n) for n in nodes if n.target is not ops.free)

    class Refused(torch.profiler.record_function):
        def __init__(self, name: str) -> None:
            raise AssertionError(f"a range {name} that nobody records")

    monkeypatch.setattr(torch.profiler, "record_function", Refused)
    step(model, batch())


def fetched(model: nn.Module, run: Callable[[], object]) -> int:
    with trace(model) as recorded:
        run()
    return sum(span.op.name.partition("@")[0].endswith("PREFETCH") for span in recorded.spans)


def test_a_backward_takes_what_its_forward_left_in_the_slots() -> None:
    """Three buckets, unless a run in between, of whatever kind, has used them."""
    _, model = twins(layers())
    x = [batch(i)["x"] for i in range(3)]
    loss = model(x[0])
    with torch.no_grad():
        model(x[2])
    assert fetched(model, loss.backward) == 3
    assert fetched(model, model(x[1]).backward) == 0
    once = model(x[1])
    assert fetched(model, lambda: once.backward(retain_graph=True)) == 0
    assert fetched(model, once.backward) == 3


def test_a_gradient_gets_the_looks_it_was_traced_with() -> None:
    chain = (nn.Sequential(layer, nn.Sigmoid()) for layer in layers().layers)
    plain, model = twins(nn.Sequential(*chain))
    for given in (torch.ones(()).expand(4, 16), torch.arange(64.0).reshape(16, 4).t()):
        for each in (plain, model):
            each(INPUTS["x"]).backward(given)
        assert_same(plain, model)
