"""Device memory that is lent to somebody else, and parameters that are handed to an engine."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from megacompile import compat, full_parameters, megacompile, released, schedules, unmegacompile
from megacompile.errors import DeviceMemoryError, HostMemoryError, ModelError
from megacompile.runtime.model import released as code
from tests import inside
from tests.device_bytes import device_bytes
from tests.draws import drawn
from tests.zoo import Stack, assert_same, batch, equal, stack, step, twins

OPTIONS: dict[str, dict[str, Any]] = {
    "streamed": {"resident": 0},
    "some resident": {"resident": "4KiB"},
    "resident": {"resident": "all"},
    "resident, by rule": {"resident": "all", "lowering": "inductor"},
    "resident, 8 bits": {"resident": "all", "lowering": "inductor", "state_dtype": "int8"},
    "updates in the backward": {},
}
OFTEN = ["some resident", "resident, 8 bits", "updates in the backward"]


def train(model: nn.Module, optimizer: Optimizer, seeds: range) -> None:
    for seed in seeds:
        step(model, batch(seed), seed=seed)
        optimizer.step()
        optimizer.zero_grad()


def memory(model: nn.Module) -> list[weakref.ref[Tensor]]:
    """What a model has on the device."""
    machine = inside.machine(model)
    residents = [b for b in machine.buckets.values() if b.resident is not None]
    found = [*machine.slots.buffers]
    for bucket in residents:
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
def test_training_goes_on_as_if_nothing_had_been(name: str) -> None:
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
            assert (states > 0) is (name not in ("resident",))
            with released(model):
                gc.collect()
                assert states_in_buckets(model, optimizer) == states
                assert not [t for t in there if t() is not None]
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


def test_parameters_are_there_inside() -> None:
    plain, model = twins(stack()[0], resident="all")
    optimizers = [SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (plain, model)]
    for each, optimizer in zip((plain, model), optimizers, strict=True):
        train(each, optimizer, range(2))
        step(each, batch(5))
    with released(model):
        assert_same(plain, model)  # gradients too
        assert all(
            equal(a["momentum_buffer"], b["momentum_buffer"])
            for a, b in zip(*(o.state.values() for o in optimizers), strict=True)
        )
        saved = {k: v.clone() for k, v in model.state_dict().items()}
        with torch.no_grad():
            next(model.parameters()).add_(1)
    with torch.no_grad():
        next(plain.parameters()).add_(1)
    assert_same(plain, model)
    model.load_state_dict(saved)


def test_what_is_an_error_inside() -> None:
    model = megacompile(stack()[0], device="cpu", resident="all")
    optimizer = AdamW(model.parameters())
    train(model, optimizer, range(1))
    step(model, batch())
    with released(model):
        with pytest.raises(ModelError, match=r"Stack: used inside of .* after the block"):
            model(**batch())
        with pytest.raises(ModelError, match=r"optimizer.step\(\), after the block"):
            optimizer.step()
        with pytest.raises(ModelError, match="used inside of"):
            unmegacompile(model)
        with released(model):
            pass
        with pytest.raises(ModelError, match="used inside of"):
            model(**batch())
    optimizer.step()
    train(model, optimizer, range(1))


def test_an_exception_passes() -> None:
    model = megacompile(stack()[0], device="cpu", resident="all")
    train(model, AdamW(model.parameters()), range(1))
    placed = inside.residents(model)
    with pytest.raises(KeyError, match="mine"), released(model):
        raise KeyError("mine")
    assert inside.residents(model) == placed
    step(model, batch())


def test_a_forward_that_waits_for_its_backward() -> None:
    model = megacompile(stack()[0], device="cpu", resident="all")
    loss = model(**batch())
    with pytest.raises(ModelError, match=r"delete its outputs \(del loss\)"), released(model):
        pass
    loss.backward()
    with released(model):
        pass
    loss = model(**batch())
    del loss
    with released(model):
        pass


def out_of_memory(after: int) -> Callable[..., Any]:
    """Moves buckets until the device is full."""
    from megacompile.runtime.model.buckets import ModelBuckets

    stock, moved = ModelBuckets.move_bucket, []

    def move(self: Any, key: int, resident: bool, undos: Any, **where: bool) -> None:
        moved.append(key)
        if resident and len(moved) > after:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\nmore")
        stock(self, key, resident, undos, **where)

    return move


@pytest.mark.parametrize("fails", [False, True])
def test_the_memory_is_not_there_any_more(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    from megacompile.runtime.model.buckets import ModelBuckets

    plain, model = twins(stack()[0], resident="all")
    theirs, ours = AdamW(plain.parameters()), AdamW(model.parameters())
    train(plain, theirs, range(2))
    train(model, ours, range(2))
    placed = inside.residents(model)
    error = KeyError if fails else DeviceMemoryError
    monkeypatch.setattr(ModelBuckets, "move_bucket", out_of_memory(len(placed) + 2))
    with pytest.raises(error, match="mine" if fails else "could not be taken there again"):
        with released(model):
            if fails:
                raise KeyError("mine")
    assert 0 < len(inside.residents(model)) < len(placed)
    assert_same(plain, model)
    with pytest.raises(DeviceMemoryError, match="could not be taken there again"):
        model(**batch())
    monkeypatch.undo()
    train(plain, theirs, range(2, 4))
    train(model, ours, range(2, 4))
    assert inside.residents(model) == placed
    assert_same(plain, model)


def test_the_host_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    model = megacompile(stack()[0], device="cpu", resident="all")
    step(model, batch())
    monkeypatch.setattr(code, "free_bytes", lambda: 0)
    with pytest.raises(HostMemoryError, match="live on the device, and 0 B of host"):
        with released(model):
            pass
    step(model, batch())


def test_it_is_said_what_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    model = megacompile(stack()[0], device="cpu", resident="all")
    step(model, batch())
    placed = inside.residents(model)
    parallel = inside.streamed(model).buckets.data_parallel
    monkeypatch.setattr(parallel, "holds", lambda moving: "a hook is registered" if moving else "")
    with pytest.warns(UserWarning, match="leaves .* on the device, .* a hook is registered"):
        with released(model):
            assert inside.residents(model) == placed
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with released(model):
            pass


def test_not_megacompiled() -> None:
    with pytest.raises(ModelError, match=r"released\(\): Stack is not megacompiled"):
        with released(Stack()):
            pass


# --- full parameters


def test_each_parameter_comes_once_bucket_by_bucket() -> None:
    model = stack()[0]
    model.head.weight = model.embed.weight  # tied
    megacompile(model, device="cpu")
    train(model, AdamW(model.parameters(), lr=0.1), range(2))  # the last update is in flight
    found = dict(full_parameters(model))
    assert set(found) == {name for name, _ in model.named_parameters()}
    assert "head.weight" not in found and "embed.weight" in found
    for name, param in model.named_parameters():
        assert type(found[name]) is Tensor and not found[name].requires_grad
        assert equal(found[name], param.detach()), name
        assert found[name].data_ptr() != param.data_ptr(), "a copy, that nobody writes to"
    order = [
        b.layout.key for n in found for b in inside.machine(model).buckets.values()
        if any(p is model.get_parameter(n) for p in b.params)
    ]  # fmt: skip
    assert order == sorted(order, key=order.index) and len(set(order)) > 1
    assert [k for i, k in enumerate(order) if i == 0 or order[i - 1] != k] == list(
        dict.fromkeys(order)
    )


def test_two_buckets_at_a_time() -> None:
    model = megacompile(Stack(layers=6), device="cpu")
    made: list[weakref.ref[Tensor]] = []
    largest = 0
    for _, tensor in full_parameters(model):
        made.append(weakref.ref(tensor))
        del tensor
        largest = max(largest, sum(t() is not None for t in made))
    assert largest <= 1  # what the caller drops is free at once
    kept = list(full_parameters(model))
    for name, tensor in kept:
        assert equal(tensor, model.get_parameter(name).detach())  # nobody wrote to it


def test_the_copy_that_the_model_computes_in() -> None:
    model = megacompile(Stack(), device="cpu", compute_dtype=torch.bfloat16)
    with torch.no_grad():
        model.head.weight.fill_(0.5)  # what is streamed is not up to date yet
    found = dict(full_parameters(model))
    assert {t.dtype for t in found.values()} == {torch.bfloat16}
    assert equal(found["head.weight"], model.head.weight.detach().bfloat16())


def test_inside_of_released_and_for_a_module_in_the_model() -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Stack()

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            result: Tensor = self.inner(x, y)
            return result

    model = megacompile(Wrapper(), device="cpu", resident="all")
    step(model, batch())
    with released(model):
        found = dict(full_parameters(model.inner))
    assert set(found) == {name for name, _ in model.inner.named_parameters()}
    with pytest.raises(ModelError, match="is not megacompiled"):
        full_parameters(Stack())


def test_a_parameter_that_lies_in_no_bucket_is_never_left_out() -> None:
    """A quantized one, or one that came since."""
    model = megacompile(Stack(), device="cpu")
    model.extra = nn.Linear(2, 2)
    with pytest.raises(ModelError, match=r"'extra.weight' came since"):
        full_parameters(model)


def test_a_caller_that_stops() -> None:
    model = megacompile(Stack(), device="cpu")
    iterator = full_parameters(model)
    assert isinstance(iterator, Iterator)
    next(iterator)
    del iterator
    step(model, batch())
    assert schedules(model)


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


# --- on a GPU


@pytest.mark.parametrize("name", ["some resident", "resident"])
def test_nothing_is_held_when_the_cache_is_given_back(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even one bucket: a tensor of 4 MiB keeps the 20 MiB that the allocator took for five."""
    _, streamed = twins(stack()[0], **OPTIONS[name])
    train(streamed, AdamW(streamed.parameters()), range(2))
    there = memory(streamed)
    held: list[int] = []
    monkeypatch.setattr(
        compat, "give_cache_back", lambda _: held.append(sum(r() is not None for r in there))
    )
    with released(streamed):
        assert held == [0]


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
