"""Device memory that is lent to somebody else, and parameters that are handed to an engine."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from megacompile import compat, full_parameters, megacompile, released, schedules, unmegacompile
from megacompile.errors import DeviceMemoryError, HostMemoryError, ModelError
from tests import inside
from tests.device_bytes import device_bytes
from tests.draws import drawn
from tests.interrupts import traced
from tests.stateful.late import AtCall
from tests.zoo import Stack, assert_same, batch, equal, stack, step, twins

OPTIONS: dict[str, dict[str, Any]] = {
    "streamed": {"resident": 0},
    "some resident, 8 bits": {"resident": "4KiB", "state_dtype": "int8"},
    "resident, by rule": {"resident": "all", "lowering": "inductor", "state_dtype": "int8"},
    "updates in the backward": {},
}
OFTEN = ["some resident, 8 bits", "updates in the backward"]


def train(model: nn.Module, optimizer: Optimizer, seeds: range) -> None:
    for seed in seeds:
        step(model, batch(seed), seed=seed)
        optimizer.step()
        optimizer.zero_grad()


def memory(model: nn.Module) -> list[weakref.ref[Tensor]]:
    """What a model has on the device."""
    machine = inside.machine(model)
    found = [*machine.slots.buffers]
    for bucket in (b for b in machine.buckets.values() if b.resident is not None):
        found += [*bucket.values, *bucket.grads.values()]
        for owner in bucket.states.owners():
            for states in bucket.states.of(owner).values():
                for state in states.values():
                    found += state if isinstance(state, tuple) else [state]
    return [weakref.ref(tensor) for tensor in found]


def states_in_buckets(model: nn.Module, optimizer: Optimizer) -> int:
    """How many states lie in the memory of the buckets that there are now; all must be shown."""
    found = 0
    for bucket in inside.machine(model).buckets.values():
        for name, states in bucket.states.of(optimizer).items():
            for i, state in states.items():
                shown = optimizer.state[bucket.params[i]][name]
                if isinstance(state, tuple):
                    assert shown.codes is state[0] and shown.absmax is state[1]
                else:
                    assert shown.data_ptr() == state.data_ptr()
                found += 1
    return found


@pytest.mark.parametrize("name", drawn(OFTEN, [name for name in OPTIONS if name not in OFTEN]))
def test_training_goes_on_as_if_nothing_had_been(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With blocks between steps, and between a backward and its step: the bits as without."""
    options = {"device": "cpu", "lowering": "eager"} | OPTIONS[name]
    models = []
    for lends in (False, True):
        model = stack()[0]
        optimizer = AdamW(model.parameters(), lr=1e-2)
        extra: dict[str, Any] = (
            {"optimizer": optimizer} if name == "updates in the backward" else {}
        )
        megacompile(model, **options, **extra)
        train(model, optimizer, range(2))
        placed = inside.residents(model)
        executors = {id(e) for e in inside.executors(model)}
        if lends:
            there = memory(model)
            states = states_in_buckets(model, optimizer)
            assert states > 0
            with released(model):
                gc.collect()
                assert states_in_buckets(model, optimizer) == states
                assert not [t for t in there if t() is not None], "not even for the allocator"
                assert not inside.residents(model)
                assert not inside.machine(model).slots.buffers
            assert inside.residents(model) == placed
            assert states_in_buckets(model, optimizer) == states
        step(model, batch(7))
        if lends:
            with released(model):
                pass
        optimizer.step()
        train(model, optimizer, range(2))
        assert {id(e) for e in inside.executors(model)} >= executors, "planned anew"
        models.append((model, optimizer))
    (plain, theirs), (model, ours) = models
    assert_same(plain, model)
    for a, b in zip(theirs.state.values(), ours.state.values(), strict=True):
        assert a.keys() == b.keys()
        assert all(equal(torch.as_tensor(a[k]) + 0, torch.as_tensor(b[k]) + 0) for k in a)


def test_what_may_be_done_inside() -> None:
    """All is there to be read and written; nothing runs. What fails inside passes through."""
    plain, model = twins(stack()[0], resident="all")
    optimizers = [SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (plain, model)]
    for each, optimizer in zip((plain, model), optimizers, strict=True):
        train(each, optimizer, range(2))
        step(each, batch(5))
    placed = inside.residents(model)
    with pytest.raises(KeyError, match="mine"), released(model):
        assert_same(plain, model)  # gradients too
        for a, b in zip(*(o.state.values() for o in optimizers), strict=True):
            assert equal(a["momentum_buffer"], b["momentum_buffer"])
        saved = {k: v.clone() for k, v in model.state_dict().items()}
        with torch.no_grad():
            next(model.parameters()).add_(1)
        with released(model):
            pass
        uses: list[Callable[[], object]] = [
            lambda: model(**batch()),
            optimizers[1].step,
            lambda: unmegacompile(model),
        ]
        for use in uses:
            with pytest.raises(ModelError, match="used inside of|after the block"):
                use()
        found = dict(full_parameters(model))
        assert set(found) == {name for name, _ in model.named_parameters()}
        raise KeyError("mine")
    with torch.no_grad():
        next(plain.parameters()).add_(1)
    assert inside.residents(model) == placed
    assert_same(plain, model)
    model.load_state_dict(saved)
    plain.load_state_dict(saved)
    for each, optimizer in zip((plain, model), optimizers, strict=True):
        optimizer.step()
        train(each, optimizer, range(1))
    assert_same(plain, model)


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = megacompile(stack()[0], device="cpu", lowering="eager", resident="all")
    loss = model(**batch())
    with pytest.raises(ModelError, match="del loss"), released(model):
        pass
    del loss
    with released(model):
        pass
    with monkeypatch.context() as patched:
        small = psutil.virtual_memory()._replace(available=0)
        patched.setattr(psutil, "virtual_memory", lambda: small)
        with pytest.raises(HostMemoryError), released(model):
            pass
    # hooks on nodes hold parameters where they are
    node: Any = compat.accumulator_of(model.head.weight)
    node.register_hook(lambda *_: None)
    placed = inside.residents(model)
    with pytest.warns(UserWarning, match="a hook is registered"), released(model):
        assert inside.residents(model) == placed
    step(model, batch())


@pytest.mark.parametrize("fails", [False, True])
def test_the_memory_is_not_there_any_more(fails: bool) -> None:
    plain, model = twins(stack()[0], resident="all")
    theirs, ours = AdamW(plain.parameters()), AdamW(model.parameters())
    train(plain, theirs, range(2))
    train(model, ours, range(2))
    placed = inside.residents(model)
    full = torch.OutOfMemoryError("out of memory\nmore")
    with pytest.raises(KeyError if fails else DeviceMemoryError):
        with traced(AtCall("move_bucket", len(placed) + 3, full)), released(model):
            if fails:
                raise KeyError("mine")
    assert 0 < len(inside.residents(model)) < len(placed)
    assert_same(plain, model)
    with pytest.raises(DeviceMemoryError), traced(AtCall("move_bucket", 1, full)):
        model(**batch())
    train(plain, theirs, range(2, 4))
    train(model, ours, range(2, 4))
    assert inside.residents(model) == placed
    assert_same(plain, model)


# --- full parameters


class Wrapper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Stack(layers=4)
        self.inner.head.weight = self.inner.embed.weight  # tied

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        result: Tensor = self.inner(x, y)
        return result


def test_full_parameters() -> None:
    """Each once, bucket by bucket, a copy that nobody writes to; also of a module in the model."""
    model: Any = megacompile(Wrapper(), device="cpu", lowering="eager")
    train(model, AdamW(model.parameters(), lr=0.1), range(2))  # the last update is in flight
    found = dict(full_parameters(model))
    assert set(found) == {name for name, _ in model.named_parameters()}
    assert "inner.head.weight" not in found and "inner.embed.weight" in found
    for name, param in model.named_parameters():
        assert type(found[name]) is Tensor and not found[name].requires_grad
        assert equal(found[name], param.detach()), name
        assert found[name].data_ptr() != param.data_ptr()
    key_of = {id(p): key for key, b in inside.machine(model).buckets.items() for p in b.params}
    order = [key_of[id(model.get_parameter(name))] for name in found]
    assert order == sorted(order, key=order.index) and len(set(order)) > 1
    assert {f"inner.{name}" for name in dict(full_parameters(model.inner))} == set(found)
    del found
    made: list[weakref.ref[Tensor]] = []
    for _, tensor in full_parameters(model):
        made.append(weakref.ref(tensor))
        del tensor
        assert sum(t() is not None for t in made) <= 1, "what the caller drops is free at once"
    iterator = full_parameters(model)
    assert isinstance(iterator, Iterator)
    next(iterator)
    del iterator  # a caller that stops
    step(model, batch())
    assert schedules(model)
    model.extra = nn.Linear(2, 2)
    with pytest.raises(ModelError, match=r"'extra.weight'"):  # never left out
        full_parameters(model)


def test_the_copy_that_the_model_computes_in() -> None:
    model = megacompile(Stack(), device="cpu", lowering="eager", compute_dtype=torch.bfloat16)
    with torch.no_grad():
        model.head.weight.fill_(0.5)  # what is streamed is not up to date yet
    found = dict(full_parameters(model))
    assert {t.dtype for t in found.values()} == {torch.bfloat16}
    assert equal(found["head.weight"], model.head.weight.detach().bfloat16())


def test_names_behind_peft() -> None:
    peft = pytest.importorskip("peft")
    from tests.zoo import hf_qwen2, tokens

    base = hf_qwen2(vocab_size=64)
    names = {name for name, _ in base.named_parameters()}
    config = peft.LoraConfig(
        r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM"
    )
    model = megacompile(peft.get_peft_model(base, config), device="cpu", lowering="eager")
    inputs = tokens()
    optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    for _ in range(2):
        model(**inputs).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with pytest.raises(ModelError, match=r"q_proj' is not merged"):
        full_parameters(model)
    want = model(**inputs).logits.detach()
    model.merge_adapter()
    found = dict(full_parameters(model))
    model.unmerge_adapter()
    assert names <= set(found) | {"lm_head.weight", "model.embed_tokens.weight"}
    engine = hf_qwen2(vocab_size=64)
    engine.load_state_dict(found, strict=False)
    assert torch.allclose(engine(**inputs).logits, want, atol=1e-5)


def test_no_call_of_before_holds_what_was_on_the_device() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    megacompile(model, device="cpu", lowering="eager", resident="all", progress=False)
    for _ in range(4):
        model(torch.ones(2, 4)).sum().backward()
    held = [weakref.ref(proxy) for _, proxy in inside.streamed(model).buckets.proxies.pairs()]
    with released(model):
        gc.collect()
        assert held and not any(proxy() is not None for proxy in held)


@pytest.mark.gpu
@pytest.mark.parametrize("resident", [0, "24MiB", "all"])
def test_the_memory_is_really_given_back(resident: Any) -> None:
    """`nvidia-smi` would see it: what torch has reserved goes back to the driver."""
    others = device_bytes()
    reserved = torch.cuda.memory_reserved()  # segments that others' tensors lie in, whole
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(16)))
    twin = copy.deepcopy(model).cuda()
    megacompile(model, resident=resident)
    optimizer, plain = AdamW(model.parameters()), AdamW(twin.parameters())
    x = torch.randn(64, 1024, device="cuda")

    def run(model: nn.Module = model, optimizer: AdamW = optimizer) -> float:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    for _ in range(3):
        run()
    wanted = [run(twin, plain) for _ in range(4)][-1]
    del twin, plain
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_reserved()
    with released(model):
        assert torch.cuda.memory_allocated() - others < 2 * 2**20
        assert torch.cuda.memory_reserved() - reserved <= 24 * 2**20 < before - reserved
        values = dict(full_parameters(model))
        assert {t.device.type for t in values.values()} == {"cuda"}
        for name, param in model.named_parameters():
            assert torch.equal(values[name].cpu(), param.detach().cpu()), name
        del values
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() - reserved <= 24 * 2**20
    assert run() == pytest.approx(wanted, rel=0.2)
