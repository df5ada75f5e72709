"""What passes make of captured graphs: what is saved, waits on the host, runs again, is merged.

Chains of stages are tested without a capture (`tests/unit/test_passes.py`); here are values that
several stages take, buffers that change in place, and the code of templates. Models that fit, whose
short stages run as one, train as the plain model does.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Collection
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megacompile import explain, megacompile, schedules
from megacompile.ir import ops
from megacompile.ir.schedule import Schedule
from megacompile.ir.stages import Code
from tests import inside, zoo
from tests.capturing import Net, capture, differentiated
from tests.equality import cells
from tests.equality.nets import Applies, from_config
from tests.planned import passed, rows

X = torch.linspace(-1, 1, 8).view(2, 4)


def build(graphs: Schedule, offload: Collection[int], **options: Any) -> Schedule:
    """The schedule of a plan by which these stages offload what they save, proved safe."""
    plan = rows(len(graphs.stages), offload=offload)
    schedule = passed(graphs, plan=plan, lookahead=1, **options)
    inside.prove(schedule)
    return schedule


def _skips(net: Net, x: Tensor) -> Tensor:
    """Like a U-Net: stage 1's output is read by stages 2 and 6, stage 2's by 3 and 5."""
    x = net.embed(x)
    down = [x := net.layers[0](x), x := net.layers[1](x)]
    x = net.layers[3](net.layers[2](x))
    x = net.layers[4](x * down[1])
    x = net.layers[5](x * down[0])
    return net.head(x).square().mean()


@functools.cache
def skips() -> Schedule:
    return differentiated(capture(Net(_skips, depth=6), X))


def on_host(schedule: Schedule) -> list[str]:
    return [node.name for node in ops.nodes_of(schedule.forward, ops.offload_saved)]


def test_a_value_that_several_stages_take_goes_once_and_is_back_for_the_first() -> None:
    """One that a stage on the device takes stays there: it must be there at the boundary anyway."""
    schedule = build(skips(), range(7))
    assert schedule.backward is not None
    offloads = ops.nodes_of(schedule.forward, ops.offload_saved)
    copies = [node.all_input_nodes[0].name for node in offloads]
    fetches = ops.nodes_of(schedule.backward, ops.fetch_saved)
    assert len(copies) == len(set(copies)) and len(fetches) <= len(copies)
    order = list(schedule.backward.nodes)
    several = 0
    for fetch in fetches:
        readers = [u for u in fetch.users if u.target in (ops.recompute, ops.backward)]
        several += len({ops.arguments(reader)[0].index for reader in readers}) > 1
        (release,) = (user for user in fetch.users if user.target is ops.free)
        places = [order.index(user) for user in fetch.users if user is not release]
        assert order.index(fetch) < min(places) and order.index(release) > max(places)
    assert several, "a skip"
    less = build(skips(), range(5))
    assert "y1_0_host" in set(on_host(schedule)) - set(on_host(less)), "stage 6 takes it"


def test_what_is_returned_to_the_user_stays() -> None:
    def both(net: Net, x: Tensor) -> tuple[Tensor, Tensor]:
        middle = net.layers[1](net.layers[0](net.embed(x)))
        return net.head(net.layers[2](middle)).mean(), middle

    schedule = build(differentiated(capture(Net(both), X)), range(4))
    outputs, _ = ops.returned(schedule.forward)
    taken = [node.all_input_nodes[0] for node in ops.nodes_of(schedule.forward, ops.offload_saved)]
    assert taken and outputs[1] not in taken


def test_what_changes_in_place_is_recomputed_from_its_copy_wherever_that_waits() -> None:
    """Each layer changes a buffer whose old value its backward needs."""

    def counting(layer: Any, x: Tensor) -> Tensor:
        out = layer.fc(x) * layer.scale.clone()
        layer.scale.add_(1)
        return out.tanh()

    layers = (Applies(counting, fc=nn.Linear(4, 4), scale=torch.ones(4)) for _ in range(3))
    graphs = differentiated(capture(nn.Sequential(*layers), X))
    schedule = passed(graphs, keep_last=False)
    assert schedule.backward is not None
    for node in ops.nodes_of(schedule.backward, ops.recompute):
        taken = [value.name for value in ops.arguments(node)[2] if value]
        assert taken[-1].endswith("_old")
    schedule = build(graphs, {0, 1}, keep_last=False)
    assert any(name.endswith("_old_host") for name in on_host(schedule))
    assert ops.actions(schedule.forward).count("SNAPSHOT") == 3


needs_compiler = pytest.mark.skipif(
    not inside.has_cpp_compiler(), reason="Inductor needs a C++ compiler"
)


def compare(sizes: list[int], **options: Any) -> list[int]:
    """Losses, statistics and parameters of steps of so many rows, with an evaluation in between,
    are those of the plain model; gives the numbers of stages."""
    torch.manual_seed(0)
    models = zoo.twins(cells.Net("batch norm"), progress=False, **options)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in models]
    generator, counts = torch.Generator().manual_seed(1), []
    for k, n in enumerate(sizes):
        x, y = torch.randn(2, n, cells.WIDTH, generator=generator)
        losses: list[Tensor] = []
        for model, optimizer in zip(models, optimizers, strict=True):
            loss, _ = model(x, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            if k == 2:
                model.eval()
                with torch.no_grad():
                    losses.append(model(x, y)[1])
                model.train()
        for mine, theirs in zip(losses, losses[len(losses) // 2 :], strict=False):
            close(mine, theirs)
        counts.append(len(schedules(models[1])[-1].stages))
    for mine, theirs in zip(*(model.state_dict().values() for model in models), strict=True):
        close(mine, theirs)
    if options.get("gpu_memory") and max(sizes) < 10:
        assert "short stages run as one" in str(explain(models[1], changes=False))
    return counts


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@needs_compiler
def test_what_grew_too_large_runs_in_stages() -> None:
    counts = compare([4, 6, 25_000], gpu_memory="100MiB", lowering="inductor")
    assert counts == [1, 1, 5]


BATCH, LENGTH, WIDTH, CLASSES = 3, 21, 16, 64
ROWS = BATCH * LENGTH


def decoder(*, tied: bool = False, bias: bool = False, frozen: bool = False) -> Any:
    torch.manual_seed(0)
    model = zoo.Language(CLASSES, WIDTH, [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH)])
    model.head = nn.Linear(WIDTH, CLASSES, bias=bias)
    if tied:
        model.head.weight = model.embed.weight
    model.head.requires_grad_(not frozen)
    return model


def ids(seed: int = 1, *, batch: int = BATCH, length: int = LENGTH) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, CLASSES, (batch, length), generator=generator)


def twins(model: nn.Module, **options: Any) -> tuple[Any, Any]:
    plain = copy.deepcopy(model)
    settings = {"device": "cpu", "head": "chunked", "progress": False, **options}
    return plain, megacompile(model, **settings)


def assert_near(plain: nn.Module, streamed: nn.Module, tolerance: float = 1e-5) -> None:
    """Every gradient within `tolerance` of the largest element of the plain one."""
    pairs = zip(plain.named_parameters(), streamed.parameters(), strict=True)
    for (name, p), q in pairs:
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None and q.grad is not None:
            atol = tolerance * float(p.grad.abs().max())
            torch.testing.assert_close(q.grad, p.grad, rtol=0, atol=atol, msg=name)


def step(plain: Any, streamed: Any, *args: Any, scale: float = 1.0, **kwargs: Any) -> None:
    want, got = plain(*args, **kwargs), streamed(*args, **kwargs)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=0)
    for loss in (want, got):
        (loss * scale).backward()
    assert_near(plain, streamed)


def is_chunked(streamed: nn.Module) -> bool:
    """Is there no value with a number for each token and class in the stages' graphs?"""
    stages = schedules(streamed)[-1].stages
    graphs = [module.graph for stage in stages for module in stage.traced.graphs.values()]
    values = [node.meta.get("val") for graph in graphs for node in graph.nodes]
    tensors = [value for value in values if isinstance(value, Tensor)]
    return not any(CLASSES in v.shape and v.numel() >= ROWS * CLASSES for v in tensors)


def flags(streamed: nn.Module, code: Code) -> tuple[bool, ...]:
    """Which gradients the head of the last stage computes."""
    graph = schedules(streamed)[-1].stages[-1].traced.graphs[code].graph
    operator = torch.ops.megacompile.linear_cross_entropy.default
    (node,) = graph.find_nodes(op="call_function", target=operator)
    return tuple(node.args[-3:])


@pytest.mark.parametrize(("tied", "bias", "frozen"), [(True, True, False), (False, False, True)])
def test_gradients_of_steps_and_their_sum(tied: bool, bias: bool, frozen: bool) -> None:
    """The second backward accumulates into the first's gradients; one loss has two backwards."""
    plain, streamed = twins(decoder(tied=tied, bias=bias, frozen=frozen))
    for seed in (1, 2):
        step(plain, streamed, ids(seed))
    assert is_chunked(streamed)
    for model in (plain, streamed):
        loss = model(ids())
        loss.backward(retain_graph=True)
        (3 * loss).backward()
    assert_near(plain, streamed)
    _, whole = twins(decoder(tied=tied, bias=bias, frozen=frozen), head="whole")
    whole(ids()).backward()
    assert not is_chunked(whole), "what the assertion above would find"


def test_half_precision() -> None:
    """In autocast, and of fp32 masters that the backward updates: the bf16 weight gradient."""
    plain, streamed = twins(decoder())
    with torch.autocast("cpu", torch.bfloat16):
        losses = [model(ids()) for model in (plain, streamed)]
    for loss in losses:
        loss.backward()
    assert_near(plain, streamed, 2e-2)
    assert is_chunked(streamed)

    model = decoder(tied=True)
    plain, before = copy.deepcopy(model).bfloat16(), model.head.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    options: Any = {"compute_dtype": torch.bfloat16, "optimizer": optimizer}
    megacompile(model, device="cpu", head="chunked", **options)
    want, got = plain(ids()), model(ids())
    torch.testing.assert_close(got, want, rtol=1e-3, atol=0)
    for loss in (want, got):
        loss.backward()
    optimizer.step()
    gradient = plain.head.weight.grad
    assert gradient is not None
    error = before - model.head.weight.detach() - gradient.float()
    assert error.norm() <= 2e-2 * gradient.float().norm()


def test_gradients_are_computed_where_they_are_needed() -> None:
    """And saved, not logits: a forward that saves nothing computes none."""
    plain, streamed = twins(decoder(bias=True))
    streamed(ids()).backward()
    schedule = schedules(streamed)[-1]
    last = schedule.stages[-1].traced
    assert flags(streamed, Code.FORWARD) == (False, False, False)
    assert flags(streamed, Code.FORWARD_SAVING) == (True, True, True)
    saved = [meta.shape for meta in last.saved]
    assert (CLASSES, WIDTH) in saved and (ROWS, WIDTH) in saved
    backward = last.graphs[Code.BACKWARD].graph
    operator = torch.ops.megacompile.linear_cross_entropy.default
    assert not backward.find_nodes(op="call_function", target=operator)
    assert schedule.plan.keep == {schedule.stages[-1].index}
    for model in (plain, streamed):
        model.eval().requires_grad_(False)
    torch.testing.assert_close(streamed(ids()), plain(ids()), rtol=1e-6, atol=0)
    assert schedules(streamed)[-1].backward is None and is_chunked(streamed)
    assert flags(streamed, Code.FORWARD) == (False, False, False)


@pytest.mark.skipif(not inside.has_cpp_compiler(), reason="no C++ compiler here")
def test_inductor_compiles_a_head_in_chunks() -> None:
    model = decoder(tied=True)
    model.layers = nn.ModuleList()
    plain, streamed = twins(model, lowering="inductor")
    step(plain, streamed, ids())
    assert is_chunked(streamed)
    assert flags(streamed, Code.FORWARD_SAVING) == (True, True, False)


def test_returned_logits_are_returned() -> None:
    """Bitwise; the user and the printed schedule say so. "auto" stands back in silence."""

    def both(m: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
        scores = m.model.head(m.model.embed(ids))
        return F.cross_entropy(scores.flatten(0, 1), ids.flatten()), scores

    plain, streamed = twins(Applies(both, model=decoder()))
    with pytest.warns(UserWarning, match="logits"):
        got = streamed(ids())
    assert all(map(torch.equal, got, plain(ids())))
    (reason, *_) = schedules(streamed)[-1].plan.reasons
    assert f"# plan: {reason}" in str(schedules(streamed)[-1])
    plain, streamed = twins(decoder(), head="auto")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert torch.equal(streamed(ids()), plain(ids()))


def test_a_model_of_transformers() -> None:
    """Its loss alone, of a mean, or divided by a count that Trainer gives as a tensor."""
    inner = from_config("tied", _attn_implementation="eager")

    def loss(m: Any, ids: Tensor, **options: Any) -> Tensor:
        return m.model(input_ids=ids, labels=ids, **options).loss

    plain, streamed = twins(Applies(loss, model=inner), dynamic=False)  # a count would be a symbol
    for count in (None, torch.tensor(200), 200):
        given: Any = {} if count is None else {"num_items_in_batch": count}
        step(plain, streamed, ids(), **given)
        assert is_chunked(streamed)
