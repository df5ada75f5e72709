"""Other dtypes against loops by hand: masters, gradients, states, stochastic rounding, checkpoints;
float16 with a GradScaler, for cards without bfloat16.
And packed parameters, which train in the plain model's bits, and are what they were to who looks.

That each is the same wherever its buckets, states and saved tensors are: test_table.py.
"""

from __future__ import annotations

import copy
import functools
import io
import re
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from megacompile import ModelError, megacompile, schedules, unmegacompile
from tests import inside, quantized, zoo
from tests.equality.nets import Applies
from tests.quantized import OWN, Int8, Packed, PackedLinear
from tests.training import move
from tests.zoo import Inputs, equal, uncompiled

BF16 = torch.bfloat16
STEPS = 6
Model = Any


def net(dtype: torch.dtype = torch.float32) -> Model:
    return zoo.mixed()[0].to(dtype)


def data(seed: int, dtype: torch.dtype = torch.float32) -> Inputs:
    return {name: value.to(dtype) for name, value in zoo.batch(seed).items()}


def streamed(model: nn.Module, **options: Any) -> Model:
    return megacompile(copy.deepcopy(model), device="cpu", lowering="eager", **options)


def adamw(model: nn.Module, **options: Any) -> Optimizer:
    return AdamW(model.parameters(), **{"lr": 1e-2, "weight_decay": 0.1, **options})


def train(model: Model, optimizer: Optimizer, steps: int = STEPS, *, start: int = 0) -> None:
    dtype = next(model.parameters()).dtype
    for i in range(start, start + steps):  # without a seed: stochastic rounding has its own
        optimizer.zero_grad()
        model(**data(i, dtype)).backward()
        optimizer.step()


def test_norms_of_doubles_are_doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    """With Inductor a backward may take norms along, which are of float32."""
    monkeypatch.setattr(torch._inductor, "compile", uncompiled)
    plain = net(torch.float64)
    ours = megacompile(copy.deepcopy(plain), device="cpu", lowering="inductor", progress=False)
    norms = []
    for model in (plain, ours):
        model(**data(0, torch.float64)).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
    assert norms[1] == pytest.approx(norms[0], rel=1e-12)


class ByHand:
    """float32 masters, a bfloat16 copy that computes, AdamW on the masters."""

    def __init__(self, model: Model) -> None:
        self.masters = copy.deepcopy(model)
        self.copy = copy.deepcopy(model).to(BF16)
        self.optimizer = adamw(self.masters)

    def backward(self, inputs: Inputs) -> Tensor:
        with torch.no_grad():
            pairs = zip(self.masters.parameters(), self.copy.parameters(), strict=True)
            for master, copied in pairs:
                copied.copy_(master)
        self.copy.zero_grad()
        with torch.autocast("cpu", BF16):  # the loss in float32, all else in bfloat16
            loss: Tensor = self.copy(**{k: v.to(BF16) for k, v in inputs.items()})
        loss.backward()
        for master, copied in zip(self.masters.parameters(), self.copy.parameters(), strict=True):
            master.grad = None if copied.grad is None else copied.grad.float()
        return loss.detach()


def load(model: Model, alias: Tensor, **how: Any) -> None:
    states = {k: v.clone() for k, v in model.state_dict().items()}
    states["head.weight"] *= 0.5
    model.load_state_dict(states, **how)


def replace_data(model: Model, alias: Tensor) -> None:
    model.head.weight.data = model.head.weight.detach() * 0.5


EDITS: dict[str, Callable[[Model, Tensor], object]] = {
    "in place": lambda model, _: model.head.weight.detach().mul_(2),
    "through an alias": lambda _, alias: alias.mul_(2),
    "through data": lambda model, _: model.head.weight.data.mul_(2),
    "other data": replace_data,
    "load": load,
    "assign": functools.partial(load, assign=True),
}


@pytest.mark.filterwarnings("ignore:megacompile. .* shares ")
def test_a_bf16_copy_of_fp32_masters() -> None:
    """Also where the master is edited, between steps and twice between two forwards."""
    by_hand, model = ByHand(net()), streamed(net(), compute_dtype=BF16)
    optimizer = adamw(model)
    for i in range(STEPS):
        by_hand.backward(data(i))
        by_hand.optimizer.step()
    train(model, optimizer)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.head.weight.grad.dtype == torch.float32 and model(data(1)["x"]).dtype == BF16
    zoo.assert_same(by_hand.masters, model)
    for want, got in zip(by_hand.masters.parameters(), model.parameters(), strict=True):
        for name, value in by_hand.optimizer.state[want].items():
            assert equal(value, optimizer.state[got][name])
    for name, edit in EDITS.items():
        for twice in (False, True):
            for made in (by_hand.masters, model):
                alias = made.head.weight.detach()
                alias = alias if name == "through an alias" else torch.empty(0)
                edit(made, alias)
                if twice:
                    made(**data(5))
                    edit(made, alias)
            model.zero_grad()
            want_loss = by_hand.backward(data(7))
            loss = model(**data(7))
            loss.backward()
            assert equal(want_loss, loss.detach()), name
            assert equal(by_hand.masters.head.weight.grad, model.head.weight.grad), name


@pytest.mark.parametrize("compute_dtype", [None, BF16])
def test_gradients_are_rounded_once(compute_dtype: torch.dtype | None) -> None:
    model = streamed(net(), grad_dtype=BF16, compute_dtype=compute_dtype)
    by_hand, plain = ByHand(net()), net()
    model(**data(0)).backward()
    by_hand.backward(data(0))
    plain(**data(0)).backward()
    of = plain if compute_dtype is None else by_hand.copy
    for want, param in zip(of.parameters(), model.parameters(), strict=True):
        assert equal(None if want.grad is None else want.grad.to(BF16), param.grad)
    adamw(model).step()
    assert model.head.weight.dtype == torch.float32 and model.head.weight.grad.dtype == BF16


def test_fp32_states_of_a_bf16_model() -> None:
    """Nothing else is rounded than the parameter, once a step; loaded, they stay what they are."""
    start = net(BF16)
    model, other = (streamed(start, state_dtype=torch.float32) for _ in range(2))
    optimizer, its = adamw(model), adamw(other)
    twin, wide = copy.deepcopy(start), net()
    exact = adamw(wide)
    for i in range(STEPS):
        twin.zero_grad()
        twin(**data(i, BF16)).backward()
        with torch.no_grad():
            for param, of in zip(twin.parameters(), wide.parameters(), strict=True):
                of.copy_(param)
                of.grad = None if param.grad is None else param.grad.float()
            exact.step()
            for param, of in zip(twin.parameters(), wide.parameters(), strict=True):
                param.copy_(of)
    train(model, optimizer, 3)
    move((model, optimizer), (other, its))
    for each, adam in ((model, optimizer), (other, its)):
        train(each, adam, STEPS - 3, start=3)
        for want, got in zip(twin.parameters(), each.parameters(), strict=True):
            assert int((want != got).sum()) <= 1, "the rule's last bits may be other ones"
        for state in exact.state, adam.state:
            assert {v.dtype for s in state.values() for v in s.values()} == {torch.float32}
        wanted, states = exact.state_dict()["state"], adam.state_dict()["state"]
        torch.testing.assert_close(states, wanted, rtol=1e-5, atol=1e-8)
    zoo.assert_same(model, other)


def rounded(seed: int, **options: Any) -> list[Tensor]:
    """The parameters of a model after each of three small steps."""
    model = streamed(net(BF16), **options)
    optimizer = adamw(model, lr=1e-5, weight_decay=0.0)
    torch.manual_seed(seed)
    found = []
    for i in range(3):
        train(model, optimizer, 1, start=i)
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    return found


def test_stochastic_rounding_is_by_the_seed_and_keeps_small_updates() -> None:
    first, again, other = (rounded(seed, stochastic_rounding=True) for seed in (7, 7, 8))
    assert all(map(torch.equal, first, again)) and not torch.equal(first[-1], other[-1])
    start = torch.cat([p.detach().flatten() for p in net(BF16).parameters()])
    assert (first[-1] != start).sum() > (rounded(7)[-1] != start).sum()


def test_parameters_of_a_bucket_are_rounded_apart() -> None:
    """Two that have equal values and gradients."""
    same = {name: nn.Parameter(torch.ones(1024, dtype=BF16)) for name in "ab"}
    model = Applies(lambda m, x: (x * m.a + x * m.b).sum(), **same)
    model = streamed(model, stochastic_rounding=True)
    model(torch.ones(1024, dtype=BF16)).backward()
    SGD(model.parameters(), lr=1e-3).step()
    assert not torch.equal(model.a, model.b)


def test_sgd_without_states_rounds_otherwise_in_every_step() -> None:
    """And the parameter's version, which anybody may raise, has no part in it."""
    rounds = []
    for edited in (False, True):
        model = streamed(net(BF16), stochastic_rounding=True)
        start = copy.deepcopy(model.state_dict())
        optimizer = SGD(model.parameters(), lr=1e-3)
        torch.manual_seed(7)
        for _ in range(2):
            train(model, optimizer, 1, start=1)
            rounds.append(model.head.weight.detach().clone())
            model.load_state_dict(start)
            if edited:
                with torch.no_grad():
                    model.head.weight.mul_(1)
    assert not torch.equal(rounds[0], rounds[1])
    assert torch.equal(rounds[0], rounds[2]) and torch.equal(rounds[1], rounds[3])


IDS = torch.arange(16).view(2, 8)
BASE = "layers.0.first.base.weight"


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def quantized_model(kind: str, **options: Any) -> Any:
    return megacompile(quantized.model(OWN[kind], **options), device="cpu", lowering="eager")


@pytest.mark.parametrize("kind", OWN)
def test_training(kind: str) -> None:
    """The numbers, where the parts lie, what is copied, and what is left behind."""
    plain, model = quantized.model(OWN[kind]), quantized.model(OWN[kind])
    for made in (plain, model):
        made.layers[0].requires_grad_(False)  # comes and never goes
    weights = dict(model.named_parameters())
    megacompile(model, device="cpu", lowering="eager")
    assert same(quantized.trained(model), quantized.trained(plain))
    (schedule,) = schedules(model)
    assert [len(stage.buckets) for stage in schedule.stages] == [1] * 5
    assert set(re.findall(r"\b1[A-Z_]+", schedule.table())) == {"1PREFETCH", "1F"}
    assert set(re.findall(r"\b2[A-Z_]+", schedule.table())) >= {"2OFFLOAD_GRAD", "2UPDATE"}
    for stage in schedule.stages[2:4]:  # no weight in full is saved
        assert all(128 * 256 > torch.Size(meta.shape).numel() for meta in stage.traced.saved)
    buckets = list(inside.buckets(model).values())
    for bucket in buckets:
        for i, (place, param) in enumerate(zip(bucket.layout.params, bucket.params, strict=True)):
            assert bucket.holds(param) and bucket.values[i].data_ptr() == param.data_ptr()
            assert not place.packed or (not param.requires_grad and i not in bucket.grads)
    assert {place.packed for place in buckets[2].layout.params} == {True, False}
    assert len(buckets[2].grads) == 4
    weight, expected = model.get_parameter(BASE), plain.get_parameter(BASE)
    assert weight is weights[BASE] and type(weight) is type(expected)
    assert weight.device.type == "cpu" and vars(weight).keys() == vars(expected).keys()
    assert list(model.state_dict()) == list(plain.state_dict())
    with torch.no_grad():
        assert torch.equal(copy.deepcopy(model)(IDS), model(IDS))
    for made in (plain, model):  # another weight is taken over
        torch.manual_seed(3)
        base = made.get_submodule("layers.1.first.base")
        base.weight = OWN[kind](nn.Linear(128, 256, bias=False)).weight
    assert same(quantized.trained(model), quantized.trained(plain))
    unmegacompile(model)
    for param in model.parameters():
        assert not any(bucket.holds(param) for bucket in buckets)
    assert same(quantized.trained(model, steps=1), quantized.trained(plain, steps=1))


@pytest.mark.parametrize("kind", OWN)
def test_in_eager_code_tied_and_in_checkpoints(kind: str) -> None:
    if kind == "state":
        expected = quantized.trained(quantized.model(OWN[kind]), steps=2)
        assert same(quantized.trained(quantized_model(kind, breaks=True), steps=2), expected)

    class Checkpointed(quantized.Model):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            for layer in self.layers:
                x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
            return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())

    plain, model = quantized.model(OWN[kind]), quantized.model(OWN[kind])
    for made in (plain, model):
        base = made.get_submodule("layers.0.first.base")
        made.get_submodule("layers.2.first").base = base
        made.__class__ = Checkpointed
    megacompile(model, device="cpu", lowering="eager")
    assert same(quantized.trained(model, steps=2), quantized.trained(plain, steps=2))
    assert len(schedules(model)[0].stages) == 5, "checkpoints are looked into"


class Asks(PackedLinear):
    """Notes whether its weight is of its own class, in a call too."""

    def forward(self, x: Tensor) -> Tensor:
        SEEN.append(isinstance(self.weight, Packed) and isinstance(self.weight, nn.Parameter))
        return super().forward(x)


SEEN: list[bool] = []


def test_parts_that_change() -> None:
    """They are taken over; state dicts are saved and loaded."""
    model = quantized.model(quantized.stateful)
    model.get_submodule("layers.0.first.base").__class__ = Asks
    megacompile(model, device="cpu", lowering="eager")
    before = model(IDS).item()
    assert SEEN and all(SEEN)
    state: Any = model.get_parameter(BASE).state  # type: ignore[attr-defined]
    state.scale = state.scale * 2
    assert model(IDS).item() != before
    assert any(bucket.holds(state.scale) for bucket in inside.buckets(model).values())
    state.scale = state.scale / 2
    assert model(IDS).item() == before
    model = quantized_model("wrapper")
    before = model(IDS).item()
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    with torch.no_grad():
        model.get_parameter(BASE).data8.zero_()
    assert model(IDS).item() != before
    file.seek(0)
    model.load_state_dict(torch.load(file, weights_only=False))
    assert model(IDS).item() == before


@pytest.mark.parametrize("kind", OWN)
def test_with_compute_dtype_packed_parts_keep_theirs(kind: str) -> None:
    model = quantized.model(lambda layer: OWN[kind](layer.bfloat16()))
    megacompile(model, device="cpu", lowering="eager", compute_dtype=torch.bfloat16)
    quantized.trained(model, steps=1)
    stages = schedules(model)[0].stages
    assert stages[2].template is stages[3].template, "equal layers share their code"
    for bucket in inside.buckets(model).values():
        for i, place in enumerate(bucket.layout.params):
            if place.packed:
                assert place.dtype == bucket.params[i].dtype
                assert bucket.streamed[i] is bucket.values[i]


@pytest.mark.parametrize("is_held", [False, True])
def test_a_wrapper_moves_with_its_parts(is_held: bool) -> None:
    """On meta it is told where they are; what somebody holds cannot be told."""
    model: Any = nn.Sequential(quantized.wrapped(nn.Linear(4, 4, bias=False)), nn.Linear(4, 4))
    weight = model[0].weight
    assert isinstance(weight, Int8)
    held = weakref.ref(weight) if is_held else None
    megacompile(model, device="cpu", lowering="eager")
    try:
        unmegacompile(model)
    except ModelError:
        assert held is not None, "it need not move"
    assert model[0].weight is weight and weight.device.type == "cpu"


class Ran(NamedTuple):
    """What a loop leaves."""

    losses: list[float]
    scales: list[float]  # after each step; a smaller one than before: the step was skipped
    params: list[Tensor]


def train_scaled(model: nn.Module, device: str) -> Ran:
    """Steps in float16 of two micro-batches each, whose lengths change; the first ones overflow."""
    optimizer = AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**24, growth_interval=4)
    losses, scales = [], []
    for k in range(10):
        for micro in range(2):
            generator = torch.Generator().manual_seed(2 * k + micro)
            x = torch.randn(2, 3 + (k + micro) % 4, zoo.WIDTH, generator=generator).to(device)
            with torch.autocast(device, torch.float16):
                loss = model(x).float().square().mean()
            scaler.scale(loss / 2).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
        scales.append(scaler.get_scale())
    return Ran(losses, scales, [p.detach().cpu().clone() for p in model.parameters()])


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "options",
    [{}, {"resident": 0}, {"resident": 0, "state_dtype": "int8"}],
    ids=["planned", "streamed", "8-bit states"],
)
def test_the_plain_loop_with_a_grad_scaler(options: dict[str, Any], device: str) -> None:
    """Inductor's code overflows at other scales: it keeps values that eager code rounds."""
    torch.manual_seed(0)
    options = options | {"lowering": "eager"}
    plain = zoo.Stack(layers=4)
    model = megacompile(copy.deepcopy(plain), device=device, **options)
    wanted, found = train_scaled(plain.to(device), device), train_scaled(model, device)
    assert found.scales == wanted.scales
    skipped = [b < a for a, b in zip([2.0**24, *wanted.scales], wanted.scales, strict=False)]
    assert any(skipped) and not all(skipped)
    assert all(torch.isfinite(p).all() for p in found.params)
    exact = device == "cpu" and "state_dtype" not in options
    rtol, atol = (0.0, 0.0) if exact else (0.05, 0.02)
    losses = torch.tensor(found.losses), torch.tensor(wanted.losses)
    for mine, theirs in (losses, *zip(found.params, wanted.params, strict=True)):
        torch.testing.assert_close(mine, theirs, rtol=rtol, atol=atol)
