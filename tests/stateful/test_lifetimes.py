"""Who has parameters and memory, and for how long: models that share parameters or are gone, memory
that is lent, parameters for an engine, and models that become plain again.

That training goes on behind `released()` and `unmegacompile()`, and behind Ctrl-C anywhere in them,
is drawn in `test_training.py` too.
"""

from __future__ import annotations

import copy
import gc
import weakref
from types import FrameType
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.utils.checkpoint import checkpoint

from megacompile import full_parameters, megacompile, released, unmegacompile
from megacompile.errors import BackwardError, DeviceMemoryError, HostMemoryError, ModelError
from tests import inside
from tests.device_bytes import device_bytes
from tests.equality.nets import Applies, from_config, streamed
from tests.interrupts import is_ours, profiled, traced
from tests.stateful.late import AtCall, late
from tests.training import losses_of, take_steps
from tests.zoo import Stack, assert_same, batch, equal, stack, step, tied, tokens, twins


def two(encoder: nn.Module | None = None) -> Any:
    layers = {"encoder": encoder or nn.Linear(8, 8), "head": nn.Linear(8, 8)}
    return Applies(lambda model, x: model.head(model.encoder(x)), **layers)


def test_two_models_with_a_parameter_in_common() -> None:
    encoder = nn.Linear(8, 8)
    one, other, tied = streamed(two(encoder)), two(encoder), two()
    tied.encoder.weight = encoder.weight
    for second in (other, tied, one.encoder):
        with pytest.raises(ModelError):
            streamed(second)
        assert second is one.encoder or not inside.is_streamed(second), "it is as it was"
    x = torch.rand(2, 8)
    assert equal(one(x), one.head(encoder(x)))
    assert equal(other(x), other.head(encoder(x))), "a plain model may use it"
    assert streamed(one) is one
    assert equal(one(x), streamed(copy.deepcopy(one))(x))


def test_a_parameter_that_was_given_away() -> None:
    """Its owner has another one in its place, and was not called since."""
    one, other = streamed(two()), two()
    moved = one.encoder.weight
    one.encoder.weight = nn.Parameter(torch.rand(8, 8))
    other.encoder.weight = moved
    plain = copy.deepcopy(nn.ModuleList([one, other]))
    streamed(other)
    for pair in ((one, other), plain):
        optimizer = AdamW([p for model in pair for p in model.parameters()], lr=1e-2)
        for i in range(6):
            x = torch.rand(2, 8, generator=torch.Generator().manual_seed(i))
            for model in pair if i > 2 else (pair[1],):
                model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    for model, want in zip((one, other), plain, strict=True):
        for got, wanted in zip(model.parameters(), want.parameters(), strict=True):
            assert equal(got.detach(), wanted.detach())


def test_parameters_of_a_dead_model() -> None:
    encoder = nn.Linear(8, 8)
    one: Any = streamed(two(encoder))
    x = torch.rand(2, 8)
    one(x).sum().backward()
    del one  # nobody collects it: a model and what is behind its calls refer to each other
    gc.disable()
    try:
        other = streamed(two(encoder))
    finally:
        gc.enable()
    assert equal(other(x), other.head(encoder(x)))


@pytest.mark.parametrize("options", [{}, {"state_dtype": torch.bfloat16, "resident": "all"}])
def test_states_go_with_their_optimizer(options: dict[str, Any]) -> None:
    """Their memory is free when it is gone, but for what somebody holds."""
    model = streamed(two(), **options)

    def train(optimizer: AdamW) -> None:
        for _ in range(2):
            model(torch.rand(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    optimizer = AdamW(model.parameters(), lr=1e-2)
    train(optimizer)
    buffers = [
        weakref.ref(buffer)
        for bucket in inside.buckets(model).values()
        for by_param in bucket.states.of(optimizer).values()
        for buffer in by_param.values()
    ]
    assert len(buffers) == 8
    held = optimizer.state[model.head.weight]["exp_avg"].detach()
    before = held.clone()
    del optimizer
    model(torch.rand(4, 8)).sum().backward()
    inside.wait_for_updates(model)
    assert not any(buffer() is not None for buffer in buffers)
    train(AdamW(model.parameters(), lr=1e-2))
    assert equal(held, before)


def test_what_cannot_be_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    model = streamed(stack()[0], resident="all")
    with monkeypatch.context() as patched:
        small = psutil.virtual_memory()._replace(available=0)
        patched.setattr(psutil, "virtual_memory", lambda: small)
        with pytest.raises(HostMemoryError), released(model):
            pass
    # hooks on nodes hold parameters where they are
    node: Any = torch.autograd.graph.get_gradient_edge(model.head.weight).node
    node.register_hook(lambda *_: None)
    placed = inside.residents(model)
    with pytest.warns(UserWarning), released(model):
        assert inside.residents(model) == placed
    step(model, batch())


def test_a_backward_that_failed_within_another_one_waits_for_nothing() -> None:
    """Torch's queue keeps the graph of the other one until the next backward."""
    model = streamed(stack()[0], resident="all")

    def fails(gradient: Tensor) -> Tensor:
        raise ZeroDivisionError

    x, y = batch().values()
    loss = model(x, y) + checkpoint(model, x.requires_grad_(), y, use_reentrant=True)
    handle = model.head.weight.register_hook(fails)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    handle.remove()
    del loss
    with torch.inference_mode(), released(model):
        assert not inside.residents(model)


def test_states_in_8_bits_are_moved_as_they_are() -> None:
    """To quantize them again takes seconds for a billion values, and more memory than they have."""
    model = streamed(nn.Linear(64, 64), resident="all", state_dtype="int8")
    optimizer = AdamW(model.parameters())
    x = torch.randn(3, 64)
    model(x).sum().backward()
    optimizer.step()
    before = {k: v.clone() for k, v in optimizer.state[model.weight].items()}
    called: set[str] = set()

    def look(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and is_ours(frame):
            called.add(frame.f_code.co_name)

    with profiled(look), released(model):
        assert not inside.residents(model)
    assert "move_states" in called and not called & {"quantize", "dequantize"}
    assert all(equal(optimizer.state[model.weight][k].clone(), v) for k, v in before.items())


@pytest.mark.parametrize("fails", [False, True])
def test_the_memory_is_not_there_any_more(fails: bool) -> None:
    plain, model = twins(stack()[0], resident="all")
    theirs, ours = AdamW(plain.parameters()), AdamW(model.parameters())
    take_steps(plain, theirs, 2)
    take_steps(model, ours, 2)
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
    take_steps(plain, theirs, 2, start=2)
    take_steps(model, ours, 2, start=2)
    assert inside.residents(model) == placed
    assert_same(plain, model)


def test_full_parameters() -> None:
    """Each once, bucket by bucket, a copy that nobody writes to; also of a module in the model."""
    wrapper = Applies(lambda model, x, y: model.inner(x, y), inner=tied()[0])
    model: Any = streamed(wrapper)
    take_steps(model, AdamW(model.parameters(), lr=0.1), 2)  # the last update is in flight
    found = dict(full_parameters(model))
    assert "inner.head.weight" not in found and "inner.embed.weight" in found
    for name, param in model.named_parameters():
        assert type(found[name]) is Tensor and not found[name].requires_grad
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
    next(full_parameters(model))  # a caller that stops
    step(model, batch())


def test_the_copy_that_the_model_computes_in() -> None:
    model = megacompile(Stack(), device="cpu", lowering="eager", compute_dtype=torch.bfloat16)
    with torch.no_grad():
        model.head.weight.fill_(0.5)  # what is streamed is not up to date yet
    found = dict(full_parameters(model))
    assert {t.dtype for t in found.values()} == {torch.bfloat16}
    assert equal(found["head.weight"], model.head.weight.detach().bfloat16())
    model.head.weight.data = torch.full_like(model.head.weight, 0.25)  # not in its bucket yet
    found = dict(full_parameters(model))
    assert equal(found["head.weight"], model.head.weight.detach().bfloat16())


def test_names_behind_peft() -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    base = from_config("qwen2", _attn_implementation="eager")
    engine = copy.deepcopy(base)
    names = {name for name, _ in base.named_parameters()}
    config = peft.LoraConfig(
        r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM"
    )
    model = megacompile(peft.get_peft_model(base, config), device="cpu", lowering="eager")
    inputs = tokens()
    optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    losses_of(model, optimizer, [inputs] * 2)
    with pytest.raises(ModelError):
        full_parameters(model)
    want = model(**inputs).logits.detach()
    model.merge_adapter()
    found = dict(full_parameters(model))
    model.unmerge_adapter()
    assert names <= set(found) | {"lm_head.weight", "model.embed_tokens.weight"}
    engine.load_state_dict(found, strict=False)
    assert torch.allclose(engine(**inputs).logits, want, atol=1e-5)


def test_nothing_of_it_is_left() -> None:
    """An update in flight is waited for; memory that the user has put there stays."""
    plain, model = twins(stack()[0])
    before = set(vars(plain))
    theirs, optimizer = AdamW(plain.parameters()), AdamW(model.parameters())
    for each, of_it in ((plain, theirs), (model, optimizer)):
        take_steps(each, of_it, 2)
    assert optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    workers = late(model)
    for each, of_it in ((plain, theirs), (model, optimizer)):
        take_steps(each, of_it, 1, start=5)
    assert workers.names
    held = weakref.ref(inside.streamed(model))
    buckets = [weakref.ref(bucket) for bucket in inside.buckets(model).values()]
    mine = torch.zeros_like(model.head.bias)
    model.head.bias.data = mine
    plain.head.bias.data = mine.clone()
    del workers, each, of_it
    unmegacompile(model)
    gc.collect()
    assert held() is None
    assert all(bucket() is None for bucket in buckets)
    assert {n for n, v in vars(model).items() if v is not None} <= before
    assert not inside.is_streamed(model)
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
    states = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
    assert not any(s.untyped_storage().nbytes() > s.nbytes for s in states)
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


def test_a_forward_from_before_has_no_backward() -> None:
    model = stack()[0]
    megacompile(model, device="cpu", lowering="eager")
    loss = model(**batch())
    unmegacompile(model)
    with pytest.raises(BackwardError):
        loss.backward()


def test_after_an_update_in_the_backward() -> None:
    model = stack()[0]
    optimizer = AdamW(model.parameters())
    megacompile(model, device="cpu", lowering="eager", optimizer=optimizer)
    step(model, batch())
    with pytest.raises(ModelError):
        unmegacompile(model)
    optimizer.step()
    unmegacompile(model)
    assert all(p.grad is None for p in model.parameters())
    take_steps(model, optimizer, 2)


def test_full_parameters_of_an_adapter_that_is_not_merged() -> None:
    """As PEFT's layers say it: active, and not merged."""
    said = {"active_adapters": ["default"], "merged": False}
    adapter = Applies(lambda m, x: 2 * m.base_layer(x), base_layer=nn.Linear(4, 4), **said)
    model = streamed(nn.Sequential(adapter))
    with pytest.raises(ModelError, match="not merged"):
        full_parameters(model)
    model[0].merged = True
    assert len(dict(full_parameters(model))) == 2


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


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_plain_again_on_the_gpu(device: str) -> None:
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
