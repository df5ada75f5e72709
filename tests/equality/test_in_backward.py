"""The update in the backward: near the plain loop, and what it refuses in time. `p.grad` on the
host takes the factor of `clip_grad_norm_` without a pass over its memory, and answers for its norm
(on the device: test_resident.py). Loops in every bit: test_table.py."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from megacompile import accumulate, megacompile, updates
from megacompile.errors import BackwardError, OptimizerError
from tests import inside, zoo
from tests.equality import cells
from tests.equality.cells import Cell
from tests.equality.nets import said
from tests.stateful.late import late
from tests.training import Lion, groups
from tests.zoo import WIDTH, batch, equal, mixed, uncompiled

Model = Any


@pytest.mark.parametrize("optimizer", ["adamw", "nesterov", "lion"])
def test_near_the_plain_loop(optimizer: str) -> None:
    """Also in micro-batches and with a schedule. Of Lion the sign of nearly 0 may be another."""
    run = cells.build(Cell(optimizer=optimizer, updater="backward"))
    for loop in ("once", "accumulated", "scheduled"):
        want = cells.expected(Cell(optimizer=optimizer, loop=loop))
        got = cells.trained(cells.on(run, loop))
        assert set(updates(run.model).values()) == {"in the backward"}
        held = [bucket.grads for bucket in inside.buckets(run.model).values()]
        assert loop != "once" or not any(held), "no gradient comes to the host"
        wants = {name.rpartition(" (")[0]: value for name, value in want.items()}
        for name, value in got.items():
            want_value = wants[name.rpartition(" (")[0]]
            if not name.startswith(("loss", "prediction", "drawn")) and value.numel() > 1:
                near = torch.isclose(value, want_value, rtol=1e-3, atol=1e-5)
                assert near.double().mean() > 0.99, (loop, name)
                if optimizer != "lion":
                    assert near.all() or (value - want_value).norm() < 1e-3 * want_value.norm()
    spare = run.model.spare.weight
    assert torch.equal(spare, run.start["spare.weight"]) and spare not in run.optimizers[0].state


def pair() -> tuple[Model, Model, Optimizer]:
    """(plain, megacompiled with an optimizer, that)."""
    plain = mixed()[0]
    streamed = copy.deepcopy(plain)
    optimizer = AdamW(groups(streamed, lr=1e-3))
    megacompile(streamed, device="cpu", lowering="eager", optimizer=optimizer)
    return plain, streamed, optimizer


USES: dict[str, Callable[[Model], Any]] = {
    "norm": lambda m: m.head.weight.grad.norm(p=1),
    "clip_grad_value_": lambda m: nn.utils.clip_grad_value_(m.parameters(), 1.0),
    "clipping": lambda m: nn.utils.clip_grad_norm_(m.parameters(), 1e-3),
    "a second backward": lambda m: m(**batch(1)).backward(),
}


def test_what_comes_too_late_says_so() -> None:
    """And the step behind it is as if it had not been asked for."""
    _, streamed, optimizer = pair()
    for k, (use, function) in enumerate(USES.items(), 1):
        streamed(**batch(0)).backward()
        with pytest.raises(OptimizerError):
            function(streamed)
        assert streamed.head.weight.grad.shape == (WIDTH, WIDTH), use
        with torch.no_grad():
            streamed(**batch(2))  # it is captured, and asks each parameter for its gradient
        optimizer.step()
        assert streamed.head.weight.grad is None, use
        assert optimizer.state[streamed.head.weight]["step"] == k, use
    streamed(**batch(0)).backward()
    rate = optimizer.param_groups[0]["lr"]
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(OptimizerError, match="lr"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = rate
    optimizer.zero_grad(set_to_none=False)  # the update has been made all the same
    assert streamed.head.weight.grad.shape == (WIDTH, WIDTH)
    optimizer.step()
    assert optimizer.state[streamed.head.weight]["step"] == k + 1


def test_a_scaled_loss_is_refused_in_time() -> None:
    """Nothing is updated. A scaler that is not enabled, or of another loss, is no matter."""
    plain, streamed, optimizer = pair()
    mine = AdamW(groups(plain, lr=1e-3))
    scaler, off = torch.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu", enabled=False)
    weight = torch.ones(2, requires_grad=True)
    for model, its in ((plain, mine), (streamed, optimizer)):
        for i in range(3):
            if model is streamed:
                loss = model(**batch(i))
                scaled: Any = scaler.scale([loss])[0] if i % 2 else scaler.scale(loss)
                with pytest.raises(OptimizerError):
                    scaled.backward()
                model.zero_grad()
            other: Any = scaler.scale(weight.sum())
            other.backward()
            loss = off.scale(model(**batch(i)))
            loss.backward()
            off.step(its)
            off.update()
            its.zero_grad()
    zoo.assert_close(plain, streamed)
    (streamed(**batch(0)) * scaler.get_scale()).backward()
    with pytest.raises(OptimizerError):
        scaler.unscale_(optimizer)


NORMS: dict[str, Callable[[nn.Module], Tensor]] = {
    "clip_grad_norm_": lambda m: nn.utils.clip_grad_norm_(m.parameters(), torch.inf),
    "not foreach": lambda m: nn.utils.clip_grad_norm_(m.parameters(), torch.inf, foreach=False),
    "of one": lambda m: torch.linalg.vector_norm(m.get_parameter("head.weight").grad),
    "a limit above it": lambda m: nn.utils.clip_grad_norm_(m.parameters(), 1e6),
}


@pytest.mark.parametrize("resident", [0, "all"])
def test_the_norm_is_that_of_the_plain_loop(resident: Any) -> None:
    """Of a backward and of micro-batches, alone or with gradients of others."""
    plain = mixed()[0]
    streamed = copy.deepcopy(plain)
    mine, theirs = (SGD(groups(each), lr=0.1) for each in (plain, streamed))
    options: dict[str, Any] = {"optimizer": theirs, "resident": resident}
    megacompile(streamed, device="cpu", lowering="eager", **options)
    other = nn.Linear(3, 3)
    for i, norm in enumerate([*NORMS.values(), *NORMS.values()]):
        found = []
        for model, optimizer in ((plain, mine), (streamed, theirs)):
            if i >= len(NORMS):
                with accumulate(streamed) if model is streamed else nullcontext():
                    model(**batch(20 + i)).backward()
            model(**batch(i)).backward()
            found.append(norm(model))
            if i == 0:
                other.zero_grad()
                other(torch.ones(3)).sum().backward()
                params = [*model.parameters(), *other.parameters()]
                both = nn.utils.clip_grad_norm_(params, torch.inf)
                torch.testing.assert_close(both, (found[-1].square() + 4 * 3).sqrt())
            optimizer.step()
            optimizer.zero_grad()
        assert found[1].shape == () and found[1].dtype == found[0].dtype
        torch.testing.assert_close(*found, rtol=1e-5, atol=0)
    zoo.assert_close(plain, streamed)


def test_gradients_that_are_there() -> None:
    """Within `accumulate`, and those that `autograd.grad` gives, which updates nothing."""
    plain, streamed, optimizer = pair()
    before = streamed.head.weight.detach().clone()
    found = [
        torch.autograd.grad(model(**batch(0)), [model.head.weight, model.layers[1].up.weight])
        for model in (plain, streamed)
    ]
    assert all(map(zoo.equal, *found)) and streamed.head.weight.grad is None
    inputs = [{**batch(1), "x": batch(1)["x"].requires_grad_()} for _ in range(2)]
    plain(**inputs[0]).backward()
    with accumulate(streamed):
        streamed(**inputs[1]).backward()
    zoo.assert_same(plain, streamed)
    assert zoo.equal(inputs[0]["x"].grad, inputs[1]["x"].grad)
    want = nn.utils.clip_grad_norm_(plain.parameters(), 1e-2)
    assert zoo.equal(want, nn.utils.clip_grad_norm_(streamed.parameters(), 1e-2))
    zoo.assert_same(plain, streamed)
    assert torch.equal(streamed.head.weight, before)


def test_decoupled_decay_of_lion_is_its_own_step() -> None:
    """Divided by an lr that no group has: said once, and every bit is the plain one's."""
    plain, model = zoo.twins(mixed()[0])
    for each in (plain, model):
        optimizer = Lion(groups(each), lr=1e-3, weight_decay=0.1, decoupled_weight_decay=True)
        with said("Lion") as texts:
            for i in range(3):
                zoo.step(each, batch(i))
                optimizer.step()
                optimizer.zero_grad()
        assert len(texts) == (each is model)
    zoo.assert_same(plain, model)


def test_blocks_of_micro_batches_nest() -> None:
    model = nn.Linear(4, 4)
    optimizer = SGD(model.parameters(), lr=0.1)
    megacompile(model, device="cpu", lowering="eager", optimizer=optimizer, progress=False)
    before = model.weight.detach().clone()
    with accumulate(model):
        with accumulate(model):
            model(torch.ones(2, 4)).sum().backward()
        model(torch.ones(2, 4)).sum().backward()
    assert torch.equal(model.weight, before)
    model(torch.ones(2, 4)).sum().backward()
    assert torch.allclose(model.weight, before - 0.1 * 6)


SHAPES = [(4, 3), (5,), (), (2, 2, 2)]
Params = list[nn.Parameter]


class Weighted(nn.Module):
    """The gradients of its parameters are what it is called with."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(shape, dtype=dtype) for shape in SHAPES)

    def forward(self, *factors: Tensor) -> Tensor:
        products = [(p * factor).sum() for p, factor in zip(self.weights, factors, strict=True)]
        return torch.stack(products).sum()


def streamed(model: nn.Module) -> nn.Module:
    return megacompile(model, device="cpu", lowering="inductor", progress=False)


Both = Callable[..., tuple[Params, Params]]


@pytest.fixture(scope="module")
def both() -> Iterator[Both]:
    """The parameters of a plain and a streamed model, behind a backward with the same gradients."""
    made: dict[torch.dtype, tuple[nn.Module, nn.Module]] = {}

    def backward(dtype: torch.dtype = torch.float32) -> tuple[Params, Params]:
        if dtype not in made:
            made[dtype] = Weighted(dtype), streamed(Weighted(dtype))
        torch.manual_seed(0)
        gradients = [torch.randn(shape).to(dtype) for shape in SHAPES]
        for model in made[dtype]:
            model.zero_grad()
            model(*gradients).backward()
        wants, params = (list(model.parameters()) for model in made[dtype])
        assert not any(is_plain(params))
        return wants, params

    with pytest.MonkeyPatch.context() as patched:  # stages run as they are, compiled by nobody
        patched.setattr(torch._inductor, "compile", uncompiled)
        yield backward


def grad(param: nn.Parameter) -> Tensor:
    assert param.grad is not None
    return param.grad


def is_plain(params: Params) -> list[bool]:
    """Which gradients are plain tensors: those that answer for nothing any more?"""
    return [type(grad(param)) is Tensor for param in params]


def assert_gradients(params: Params, wants: Params, *, bits: bool = False) -> None:
    for param, want in zip(params, wants, strict=True):
        if bits:
            assert equal(grad(param) + 0, grad(want) + 0)
        else:
            torch.testing.assert_close(grad(param) + 0, grad(want) + 0, rtol=1e-6, atol=0)


def test_clipping_reads_and_writes_nothing(both: Both) -> None:
    """Until somebody looks: the factor is noted."""
    for norm_type, foreach in itertools.product((2, math.inf), (None, True, False)):
        wants, params = both()
        for largest in (0.5, 0.1, 10.0):
            want = nn.utils.clip_grad_norm_(wants, largest, norm_type, foreach=foreach)
            got = nn.utils.clip_grad_norm_(params, largest, norm_type, foreach=foreach)
            torch.testing.assert_close(got, want, rtol=1e-5, atol=0)
            assert type(got) is Tensor and not any(is_plain(params)), (norm_type, foreach)
        gradient = grad(params[0])
        looks = gradient.shape, gradient.dtype, gradient.is_sparse
        assert looks == ((4, 3), torch.float32, False)
        assert not any(is_plain(params)), "looks that need no values"
        for each in (wants, params):
            grad(each[0]).mul_(-3)
        torch.testing.assert_close(grad(params[0]).norm(), grad(wants[0]).norm())
        assert_gradients(params, wants)
        assert all(is_plain(params))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_norms_are_of_the_gradients_dtype(both: Both, dtype: torch.dtype) -> None:
    """As torch's are; so is the factor that gradients which are not served are multiplied by."""
    wants, params = both(dtype)
    for norm_type in (2, math.inf):
        want = nn.utils.get_total_norm(map(grad, wants), norm_type)
        got = nn.utils.get_total_norm([*map(grad, params[:2]), *map(grad, wants[2:])], norm_type)
        assert got.dtype is want.dtype is dtype
        torch.testing.assert_close(got, want)


def test_other_norms_are_computed_and_those_that_are_not_finite_refused(both: Both) -> None:
    wants, params = both()
    want = nn.utils.clip_grad_norm_(wants, 0.5, 3)
    assert equal(want, nn.utils.clip_grad_norm_(params, 0.5, 3))
    assert_gradients(params, wants, bits=True)
    wants, params = both()
    nn.utils.clip_grad_norm_(params, math.nan)
    with pytest.raises(RuntimeError, match="non-finite"):
        nn.utils.clip_grad_norm_(params, 0.5, error_if_nonfinite=True)


EDITS: list[Callable[[Params], Any]] = [
    lambda params: grad(params[0]).add_(1),
    # autograd does that in C++, and asks nobody: the version tells
    lambda params: (params[1] * 3).sum().backward(),
    lambda params: setattr(params[2], "grad", grad(params[2]) + 0),
]


def test_an_edit_gives_the_norm_of_what_it_is_then(both: Both) -> None:
    for edit in EDITS:
        wants, params = both()
        for each in (wants, params):
            edit(each)
        want, got = (nn.utils.clip_grad_norm_(each, 0.5) for each in (wants, params))
        torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
        assert_gradients(params, wants)


USES_OF_GRADIENTS: dict[str, Callable[[Tensor], Any]] = {
    "add": lambda g: g + 1,
    "item": lambda g: g[0, 0].item(),
    "numpy": lambda g: g.numpy().copy(),
    "deepcopy": copy.deepcopy,
    "mul by a tensor": lambda g: g.mul_(torch.ones(4, 3)),
    "zero_": lambda g: g.zero_(),
    "norm with dim": lambda g: torch.linalg.vector_norm(g, dim=0),
    "norm with out": lambda g: torch.linalg.vector_norm(g, out=torch.empty(())),
    "repr": repr,
}


def test_any_other_use_multiplies_first(both: Both) -> None:
    for name, use in USES_OF_GRADIENTS.items():
        wants, params = both()
        want, got = grad(wants[0]), grad(params[0])
        for gradient in (want, got):
            gradient.mul_(torch.tensor(0.5))
        assert type(got) is not Tensor
        mine, theirs = use(want), use(got)
        if isinstance(mine, Tensor):
            assert equal(mine, theirs), name
        else:
            assert (mine == theirs) if isinstance(mine, (str, float)) else (mine == theirs).all()
        assert type(got) is Tensor and equal(want, got), name
        assert type(grad(params[1])) is not Tensor, "the others wait"


def test_accumulation_behind_clipping_is_refused(both: Both) -> None:
    """Half of the gradient would be scaled."""
    _, params = both()
    nn.utils.clip_grad_norm_(params, 0.5)
    (params[1] * 3).sum().backward()
    with pytest.raises(BackwardError, match="weights.1"):
        grad(params[1]).sum()


def test_scaling_waits_for_an_update_that_runs(both: Both) -> None:
    """Which takes the factor that there was."""
    model = streamed(Weighted(torch.float32))
    model(*(torch.ones(shape) for shape in SHAPES)).backward()
    params, workers = list(model.parameters()), late(model)
    grad(params[0]).mul_(0.5)
    SGD(params, lr=1.0).step()
    assert not workers.ran
    grad(params[0]).mul_(0.0)
    assert workers.ran
    assert [set(param.detach().flatten().tolist()) for param in params] == [{-0.5}, *[{-1.0}] * 3]
