"""A megacompiled model that becomes a plain one again."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Adam, AdamW, Muon, Optimizer, RMSprop

import megacompile as mc
from megacompile import megacompile, unmegacompile
from megacompile.errors import BackwardError, ModelError, OptionError
from tests import inside
from tests.device_bytes import device_bytes
from tests.interrupts import Places, traced
from tests.stateful.late import late
from tests.zoo import assert_same, batch, equal, stack, step, twins

STEPS = 2


def train(model: nn.Module, optimizer: Optimizer, seeds: range) -> None:
    for seed in seeds:
        step(model, batch(seed), seed=seed)
        optimizer.step()
        optimizer.zero_grad()


def states(optimizer: Optimizer) -> list[Tensor]:
    return [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "AdamW": lambda m: AdamW(m.parameters(), lr=1e-2),
    "Adam, amsgrad": lambda m: Adam(m.parameters(), lr=1e-2, amsgrad=True),
    "SGD": lambda m: SGD(m.parameters(), lr=1e-2, momentum=0.9),
    "Adafactor": lambda m: Adafactor(m.parameters()),
    "Muon": lambda m: Muon([p for p in m.parameters() if p.dim() == 2]),
    "RMSprop": lambda m: RMSprop(m.parameters(), lr=1e-3, momentum=0.9),
}


@pytest.mark.parametrize("options", [{}, {"resident": "all"}], ids=["streamed", "resident"])
@pytest.mark.filterwarnings("ignore:megacompile. RMSprop")
def test_training_goes_on_as_if_nothing_had_been(options: dict[str, Any]) -> None:
    """Megacompiled steps of all optimizers, plain ones and megacompiled ones: all bits as plain."""
    plain, model = twins(stack()[0], **options)
    params = list(model.parameters())
    pairs = [(make(plain), make(model)) for make in OPTIMIZERS.values()]
    rounds = range(3)
    for k in rounds:
        for theirs, ours in pairs:
            train(plain, theirs, range(k, k + STEPS))
            train(model, ours, range(k, k + STEPS))
        for each in (plain, model):
            step(each, batch(k + 50))
            nn.utils.clip_grad_norm_(each.parameters(), 1e-3)
        if k == 0:
            assert unmegacompile(model) is model
            assert [id(p) for p in model.parameters()] == [id(p) for p in params]
            assert {type(p) for p in params} == {nn.Parameter}
            assert {type(p.grad) for p in params} == {Tensor}
        assert_same(plain, model)
        for each in (plain, model):
            each.zero_grad()
        if k == 1:
            megacompile(model, device="cpu", lowering="eager")
    assert mc.schedules(model)
    for theirs, ours in pairs:
        assert all(map(equal, states(theirs), states(ours)))


def test_nothing_of_it_is_left() -> None:
    """An update in flight is waited for; memory that the user has put there stays."""
    plain, model = twins(stack()[0])
    before = set(vars(plain))
    theirs, optimizer = AdamW(plain.parameters()), AdamW(model.parameters())
    for each, of_it in ((plain, theirs), (model, optimizer)):
        train(each, of_it, range(STEPS))
    assert optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    workers = late(model)
    for each, of_it in ((plain, theirs), (model, optimizer)):
        train(each, of_it, range(5, 6))
    assert workers.names
    streamed = weakref.ref(inside.streamed(model))
    buckets = [weakref.ref(bucket) for bucket in inside.buckets(model).values()]
    mine = torch.zeros_like(model.head.bias)
    model.head.bias.data = mine
    plain.head.bias.data = mine.clone()
    del workers, each, of_it
    unmegacompile(model)
    gc.collect()
    assert streamed() is None
    assert all(bucket() is None for bucket in buckets)
    assert {n for n, v in vars(model).items() if v is not None} <= before
    assert not inside.is_streamed(model)
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
    assert not any(s.untyped_storage().nbytes() > s.nbytes for s in states(optimizer))
    assert model.head.bias.data_ptr() == mine.data_ptr()
    assert_same(plain, model)
    model.to(torch.float64)
    assert next(model.parameters()).dtype == torch.float64


@pytest.mark.parametrize("dtype", ["int8", torch.bfloat16])
def test_states_and_gradients_of_another_dtype_are_those_that_torch_has(dtype: Any) -> None:
    model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128))
    grads = torch.bfloat16 if dtype == "int8" else None
    megacompile(model, device="cpu", lowering="eager", state_dtype=dtype, grad_dtype=grads)
    optimizer = AdamW(model.parameters())
    model(torch.ones(2, 128)).sum().backward()
    optimizer.step()
    want = copy.deepcopy(optimizer.state_dict())
    unmegacompile(model)
    found = optimizer.state[next(model.parameters())]["exp_avg"]
    assert type(found) is Tensor and found.dtype == torch.float32
    assert equal(found, want["state"][0]["exp_avg"].float())
    for param in model.parameters():
        assert param.grad is not None
        assert param.grad.dtype == param.grad_dtype == torch.float32
    model(torch.ones(2, 128)).sum().backward()
    optimizer.step()  # torch.optim's own


class Inside(nn.Linear):
    """Its forward ends what it runs in."""

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        unmegacompile(self)
        return super().forward(x)


def test_what_is_refused() -> None:
    model = stack()[0]
    megacompile(model, device="cpu", lowering="eager")
    for device in ("meta", "nowhere"):
        with pytest.raises(OptionError):
            unmegacompile(model, device=device)
    loss = model(**batch())
    assert mc.schedules(model), "it still is"
    unmegacompile(model)
    with pytest.raises(BackwardError):
        loss.backward()
    model = megacompile(Inside(4, 4), device="cpu", lowering="eager")
    with pytest.raises(ModelError, match="call"):
        model(torch.ones(1, 4))


def test_after_an_update_in_the_backward() -> None:
    model = stack()[0]
    optimizer = AdamW(model.parameters())
    megacompile(model, device="cpu", lowering="eager", optimizer=optimizer)
    step(model, batch())
    with pytest.raises(ModelError, match=r"optimizer.step\(\)"):
        unmegacompile(model)
    optimizer.step()
    unmegacompile(model)
    assert all(p.grad is None for p in model.parameters())
    train(model, optimizer, range(2))


def test_interrupted_it_is_megacompiled_still() -> None:
    """Or it is plain: interrupted anywhere, training goes on."""
    plain, model = twins(stack()[0])
    theirs, ours = AdamW(plain.parameters()), AdamW(model.parameters())
    stopped = 0
    for at in range(90, 3600, 500):
        if not inside.is_streamed(model):
            megacompile(model, device="cpu", lowering="eager")
        places = Places(at)
        try:
            with traced(places):
                unmegacompile(model)
        except KeyboardInterrupt:
            stopped += 1
        train(plain, theirs, range(at, at + 1))
        train(model, ours, range(at, at + 1))
        assert_same(plain, model)
    assert stopped > 1
    if inside.is_streamed(model):
        unmegacompile(model)
    assert_same(plain, model)


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_on_the_gpu(device: str) -> None:
    others = device_bytes()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
    megacompile(model, lowering="eager", resident="3MiB")
    optimizer = AdamW(model.parameters())
    x = torch.randn(4, 512, device="cuda")
    for _ in range(2):
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    model(x).square().sum().backward()
    want = model(x)
    unmegacompile(model, device=device)
    gc.collect()
    tensors = [t for p in model.parameters() for t in (p, p.grad) if t is not None]
    tensors += [t for s in optimizer.state.values() for k, t in s.items() if k != "step"]
    kinds = {t.device.type for t in tensors}
    assert kinds == {device}
    if device == "cpu":
        del want
        assert device_bytes() - others < 2**20
    else:
        assert torch.allclose(model(x), want)
    optimizer.step()
