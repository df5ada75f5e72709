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
from megacompile.runtime.device.buffers import HostBuffer
from megacompile.runtime.step import hooks
from tests import inside
from tests.device_bytes import device_bytes
from tests.zoo import assert_same, batch, equal, stack, step, twins

STEPS = 2


def train(model: nn.Module, optimizer: Optimizer, seeds: range) -> list[Tensor]:
    losses = []
    for seed in seeds:
        losses.append(step(model, batch(seed), seed=seed))
        optimizer.step()
        optimizer.zero_grad()
    return losses


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


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("options", [{}, {"resident": "all"}], ids=["streamed", "resident"])
@pytest.mark.filterwarnings("ignore:megacompile. RMSprop")
def test_training_goes_on_as_if_nothing_had_been(name: str, options: dict[str, Any]) -> None:
    """Plain steps, megacompiled ones, plain ones and megacompiled ones: all bits as plain."""
    plain, model = twins(stack()[0], **options)
    theirs, ours = OPTIMIZERS[name](plain), OPTIMIZERS[name](model)
    params = list(model.parameters())
    train(plain, theirs, range(STEPS))
    train(model, ours, range(STEPS))
    assert unmegacompile(model) is model
    assert [id(p) for p in model.parameters()] == [id(p) for p in params]
    assert {type(p) for p in model.parameters()} == {nn.Parameter}
    assert_same(plain, model)
    train(plain, theirs, range(STEPS, 2 * STEPS))
    train(model, ours, range(STEPS, 2 * STEPS))
    assert_same(plain, model)
    megacompile(model, device="cpu", lowering="eager")
    train(plain, theirs, range(2 * STEPS, 3 * STEPS))
    train(model, ours, range(2 * STEPS, 3 * STEPS))
    assert mc.schedules(model)
    assert_same(plain, model)
    assert all(map(equal, states(theirs), states(ours)))


def test_nothing_of_it_is_left() -> None:
    model = stack()[0]
    before = set(vars(model))
    others = {id(o) for o in gc.get_objects() if type(o) is HostBuffer}  # of other tests
    megacompile(model, device="cpu")
    optimizer = AdamW(model.parameters())
    train(model, optimizer, range(STEPS))
    streamed = weakref.ref(inside.streamed(model))
    every = [o for o in gc.get_objects() if type(o) is HostBuffer]
    buffers = [weakref.ref(o) for o in every if id(o) not in others]
    assert buffers
    del every
    unmegacompile(model)
    gc.collect()
    assert streamed() is None
    assert all(buffer() is None for buffer in buffers), "the buckets' memory"
    assert {n for n, v in vars(model).items() if v is not None} <= before
    assert model._compiled_call_impl is None
    assert optimizer not in hooks._ATTACHED
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
    assert not any(s.untyped_storage().nbytes() > s.nbytes for s in states(optimizer))
    model.to(torch.float64)
    assert next(model.parameters()).dtype == torch.float64


def test_gradients_are_kept() -> None:
    plain, model = twins(stack()[0])
    step(plain, batch())
    step(model, batch())
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e-3)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)  # lazy ones have only noted it
    unmegacompile(model)
    assert_same(plain, model)
    assert {type(p.grad) for p in model.parameters()} == {Tensor}
    step(plain, batch(2))
    step(model, batch(2))  # plain: adds to them
    assert_same(plain, model)


def test_frozen_parameters_and_buffers() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 1))
    model[0].requires_grad_(False)
    plain, model = twins(model)
    for each in (plain, model):
        each(batch()["x"]).sum().backward()
    unmegacompile(model)
    assert_same(plain, model)
    assert not model[0].weight.requires_grad


@pytest.mark.parametrize("dtype", ["int8", torch.bfloat16, torch.float32])
def test_states_of_another_dtype_are_those_that_torch_optim_has(dtype: Any) -> None:
    model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128))
    megacompile(model, device="cpu", lowering="eager", state_dtype=dtype)
    optimizer = AdamW(model.parameters())
    model(torch.ones(2, 128)).sum().backward()
    optimizer.step()
    want = copy.deepcopy(optimizer.state_dict())
    unmegacompile(model)
    found = optimizer.state[next(model.parameters())]["exp_avg"]
    assert type(found) is Tensor and found.dtype == torch.float32
    assert equal(found, want["state"][0]["exp_avg"].float())
    model(torch.ones(2, 128)).sum().backward()
    optimizer.step()  # torch.optim's own


def test_gradients_of_another_dtype() -> None:
    model = megacompile(stack()[0], device="cpu", grad_dtype=torch.bfloat16)
    step(model, batch())
    assert next(model.parameters()).grad_dtype == torch.bfloat16
    unmegacompile(model)
    for param in model.parameters():
        assert param.grad is not None
        assert param.grad.dtype == param.grad_dtype == torch.float32
    step(model, batch())


def test_updates_in_the_background_are_waited_for() -> None:
    plain, model = twins(stack()[0], lowering="inductor", device_update=0)
    theirs, ours = AdamW(plain.parameters()), AdamW(model.parameters())
    for each, optimizer in ((plain, theirs), (model, ours)):
        for param in each.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
    unmegacompile(model)
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)
        assert type(b) is nn.Parameter


def test_after_an_update_in_the_backward() -> None:
    model = stack()[0]
    optimizer = AdamW(model.parameters())
    megacompile(model, device="cpu", lowering="eager", optimizer=optimizer)
    step(model, batch())
    with pytest.raises(ModelError, match=r"call optimizer.step\(\) first"):
        unmegacompile(model)
    optimizer.step()
    unmegacompile(model)
    assert all(p.grad is None for p in model.parameters())
    train(model, optimizer, range(2))


def test_an_old_loss_cannot_be_differentiated() -> None:
    model = megacompile(stack()[0], device="cpu")
    loss = model(**batch())
    unmegacompile(model)
    with pytest.raises(BackwardError, match="parameters were replaced"):
        loss.backward()
    again = megacompile(model, device="cpu")
    step(again, batch())


def test_in_use() -> None:
    class Inside(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            unmegacompile(self)
            return super().forward(x)

    model = megacompile(Inside(4, 4), device="cpu")
    with pytest.raises(ModelError, match="in the middle of a call"):
        model(torch.ones(1, 4))


def test_what_is_refused() -> None:
    model = stack()[0]
    with pytest.raises(ModelError, match="is not megacompiled"):
        unmegacompile(model)
    megacompile(model, device="cpu")
    with pytest.raises(OptionError, match="would lose the parameters"):
        unmegacompile(model, device="meta")
    with pytest.raises(OptionError, match="got device='nowhere'"):
        unmegacompile(model, device="nowhere")
    step(model, batch())  # still megacompiled
    assert mc.schedules(model)


def test_replaced_memory_stays() -> None:
    model = megacompile(stack()[0], device="cpu")
    step(model, batch())
    param = next(model.parameters())
    mine = torch.zeros_like(param)
    param.data = mine
    unmegacompile(model)
    assert param.data_ptr() == mine.data_ptr()


def test_interrupted_it_is_megacompiled_still(monkeypatch: pytest.MonkeyPatch) -> None:
    from megacompile.runtime.model import restore

    plain, model = twins(stack()[0])
    theirs, ours = AdamW(plain.parameters()), AdamW(model.parameters())
    train(plain, theirs, range(1))
    train(model, ours, range(1))
    stock, calls = restore._empty, []

    def empty(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        stock(*args)

    monkeypatch.setattr(restore, "_empty", empty)
    with pytest.raises(KeyboardInterrupt):
        unmegacompile(model)
    train(plain, theirs, range(1, 3))
    train(model, ours, range(1, 3))
    assert_same(plain, model)
    monkeypatch.undo()
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
