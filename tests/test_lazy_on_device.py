"""`p.grad` on the device that notes the factor of `clip_grad_norm_` for the update to multiply."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from megacompile import megacompile, updates
from megacompile.errors import BackwardError
from megacompile.runtime.params import backward_pass
from megacompile.runtime.params.backward_pass import BackwardPass
from megacompile.runtime.params.guards import guard_of
from megacompile.runtime.params.lazy_on_device import DeviceGradient
from tests.inside import residents
from tests.training import data, net
from tests.zoo import equal

SHAPES = [(4, 3), (5,), (), (2, 2, 2)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.fixture(autouse=True)
def _small_gradients_note_one_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backward_pass, "LEAST_FOLDED", 0)


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """With gradients that are plain tensors."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]
    for param in params:
        param.grad = torch.randn(param.shape).to(dtype)
    return params


def grad(param: nn.Parameter) -> Tensor:
    assert param.grad is not None
    return param.grad


def guarded(dtype: torch.dtype = torch.float32) -> tuple[list[nn.Parameter], list[Tensor]]:
    """The same gradients, which note a factor; and their memory, under other names."""
    params = parameters(dtype)
    memory = [grad(p).detach() for p in params]
    for i, param in enumerate(params):
        DeviceGradient(grad(param), lambda: None, f"p{i}")
    return params, memory


def noted(params: list[nn.Parameter]) -> list[bool]:
    found = [guard_of(grad(param)) for param in params]
    return [isinstance(who, DeviceGradient) and who.factor is not None for who in found]


def assert_equal(params: list[nn.Parameter], wants: list[nn.Parameter]) -> None:
    for param, want in zip(params, wants, strict=True):
        assert equal(grad(param) + 0, grad(want) + 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("norm_type", [2, math.inf, 1, 3])
def test_clip_grad_norm(norm_type: float, foreach: bool | None, dtype: torch.dtype) -> None:
    """Norms are torch's, nothing is written, and who looks sees what torch would have written."""
    wants, (params, memory) = parameters(dtype), guarded(dtype)
    want = nn.utils.clip_grad_norm_(wants, 0.5, norm_type, foreach=foreach)
    got = nn.utils.clip_grad_norm_(params, 0.5, norm_type, foreach=foreach)
    assert equal(got, want) and type(got) is Tensor
    assert all(noted(params))
    for values, before in zip(memory, parameters(dtype), strict=True):
        assert equal(values, grad(before))
    assert_equal(params, wants)
    assert not any(noted(params))


def test_lists_go_through_the_functions_for_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `foreach=` too: torch asks for the classes of the gradients."""
    params, _ = guarded()
    monkeypatch.setattr(torch.Tensor, "mul_", None)
    monkeypatch.setattr(torch.linalg, "vector_norm", _stacked_alone(torch.linalg.vector_norm))
    nn.utils.clip_grad_norm_(params, 0.5)
    assert all(noted(params))


def _stacked_alone(stock: Any) -> Any:
    def norm(tensor: Tensor, *args: Any) -> Any:
        assert guard_of(tensor) is None
        return stock(tensor, *args)

    return norm


def test_clipped_twice() -> None:
    wants, (params, _) = parameters(torch.bfloat16), guarded(torch.bfloat16)
    for largest in (0.5, 0.1, 10.0):
        want = nn.utils.clip_grad_norm_(wants, largest)
        assert equal(nn.utils.clip_grad_norm_(params, largest), want)
    assert_equal(params, wants)


def test_two_factors() -> None:
    """Each product is rounded."""
    wants, (params, _) = parameters(torch.bfloat16), guarded(torch.bfloat16)
    factors = torch.tensor([0.3, 0.7], dtype=torch.bfloat16)
    for each in (wants, params):
        for factor in factors:
            torch._foreach_mul_([grad(p) for p in each], factor)
    assert_equal(params, wants)


def test_the_factor_is_that_of_the_call() -> None:
    wants, (params, _) = parameters(), guarded()
    for each in (wants, params):
        factor = torch.tensor(0.3)
        for param in each:
            grad(param).mul_(factor)
        factor.fill_(100.0)
    assert all(noted(params))
    assert_equal(params, wants)


FACTORS: dict[str, Callable[[], Any]] = {
    "a number": lambda: 0.3,
    "another dtype": lambda: torch.tensor(0.3),
    "one dimension": lambda: torch.tensor([0.3], dtype=torch.bfloat16),
    "with a gradient": lambda: torch.tensor(0.3, dtype=torch.bfloat16, requires_grad=True),
}


@pytest.mark.parametrize("factor", FACTORS)
def test_other_factors_multiply_at_once(factor: str) -> None:
    wants, (params, _) = parameters(torch.bfloat16), guarded(torch.bfloat16)
    with torch.no_grad():
        for each in (wants, params):
            for param in each[:2]:
                grad(param).mul_(FACTORS[factor]())
    assert not any(noted(params))
    assert_equal(params, wants)


def test_together_with_plain_gradients() -> None:
    """As those that a hook has seen."""
    wants, (params, memory) = parameters(), guarded()
    params[1].grad = memory[1]
    want = nn.utils.clip_grad_norm_(wants, 0.5)
    assert equal(nn.utils.clip_grad_norm_(params, 0.5), want)
    assert noted(params) == [True, False, True, True]
    assert equal(memory[1], grad(wants[1]))
    assert_equal(params, wants)


USES: dict[str, Callable[[Tensor], Any]] = {
    "add": lambda g: g + 1,
    "item": lambda g: g[0, 0].item(),
    "deepcopy": copy.deepcopy,
    "zero_": lambda g: g.zero_(),
    "detach": lambda g: g.detach().clone(),
    "norm": lambda g: torch.linalg.vector_norm(g),
    "norm with out": lambda g: torch.linalg.vector_norm(g, out=torch.empty(())),
    "repr": repr,
}


@pytest.mark.parametrize("use", USES)
def test_any_use_multiplies_first(use: str) -> None:
    want, (params, _) = grad(parameters()[0]), guarded()
    got = grad(params[0])
    for gradient in (want, got):
        gradient.mul_(torch.tensor(0.3))
    assert noted(params)[0]
    mine, theirs = USES[use](want), USES[use](got)
    assert equal(mine, theirs) if isinstance(mine, Tensor) else mine == theirs
    assert type(got) is Tensor and equal(want, got)


def test_accumulation_behind_clipping_is_refused() -> None:
    params, _ = guarded()
    nn.utils.clip_grad_norm_(params, 0.5)
    (params[1] * 3).sum().backward()
    with pytest.raises(BackwardError, match="'p1' was scaled .*call that backward before you clip"):
        grad(params[1]).sum()


def test_accumulation_before_clipping() -> None:
    """Autograd adds in C++, and asks nobody."""
    wants, (params, _) = parameters(), guarded()
    for each in (wants, params):
        (each[1] * 3).sum().backward()
        nn.utils.clip_grad_norm_(each, 0.5)
    assert all(noted(params))
    assert_equal(params, wants)


# --- whole loops, against the same ones whose gradients are plain when `backward()` returns


def trained(
    loop: Callable[[Any, Optimizer, int], None],
    make: Callable[[list[nn.Parameter]], Optimizer],
    dtype: torch.dtype,
    **options: Any,
) -> tuple[Any, dict[str, Tensor]]:
    """A model after four steps; its parameters, gradients and states."""
    torch.manual_seed(0)
    model = net().to(dtype)
    megacompile(model, device="cpu", lowering="inductor", resident="all", progress=False, **options)
    optimizer = make([p for p in model.parameters() if p.requires_grad])
    for i in range(4):
        loop(model, optimizer, i)
    found = {}
    for name, param in model.named_parameters():
        found[name] = param.detach().clone()
        if param.grad is not None:
            found[f"{name}.grad"] = param.grad.detach().clone()
        for key, state in optimizer.state.get(param, {}).items():
            found[f"{name}.{key}"] = torch.as_tensor(state).clone()
    return model, found


def backward(model: Any, seed: int) -> Tensor:
    inputs = {
        name: x.to(model.embed.weight.dtype) if x.is_floating_point() else x
        for name, x in data(seed).items()
    }
    loss: Tensor = model(**inputs)
    loss.backward()
    return loss


def clipped(model: Any, optimizer: Optimizer, i: int) -> None:
    optimizer.zero_grad()
    backward(model, i)
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()


def clipped_and_kept(model: Any, optimizer: Optimizer, i: int) -> None:
    """The next backward adds to scaled gradients."""
    backward(model, i)
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()


def everything(model: Any, optimizer: Optimizer, i: int) -> None:
    """Two backwards, a penalty outside of the model, a hook, and two clippings of a part."""
    optimizer.zero_grad()
    weight = model.layers[1].up.weight
    handle = model.layers[0].up.weight.register_hook(lambda gradient: gradient * 2)
    backward(model, 2 * i)
    penalty: Tensor = weight.square().sum() * 0.01
    penalty.backward()
    backward(model, 2 * i + 1)
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    nn.utils.clip_grad_norm_(model.layers[1].parameters(), 0.01)
    optimizer.step()
    handle.remove()


LOOPS = {f.__name__: f for f in (clipped, clipped_and_kept, everything)}
MAKES: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "adamw": lambda params: AdamW(params, lr=1e-2, weight_decay=0.1),
    "adam, maximize": lambda params: Adam(params, lr=1e-3, maximize=True),
    "sgd": lambda params: SGD(params, lr=0.1, momentum=0.9),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=1e-3),  # torch.optim's own step
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("loop", LOOPS)
def test_loops(loop: str, make: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters, gradients and states are the same in every bit."""
    model, got = trained(LOOPS[loop], MAKES[make], dtype)
    if make != "rmsprop":
        assert set(updates(model).values()) == {"on the device, resident"}
    monkeypatch.setattr(BackwardPass, "_note_factors", lambda _: None)
    _, wants = trained(LOOPS[loop], MAKES[make], dtype)
    assert got.keys() == wants.keys()
    assert [name for name in wants if not equal(got[name], wants[name])] == []


@pytest.mark.parametrize(
    "options",
    [
        {"compute_dtype": torch.bfloat16},
        {"compute_dtype": torch.bfloat16, "grad_dtype": torch.bfloat16},
        {"state_dtype": torch.bfloat16},
        {"grad_dtype": torch.bfloat16},
    ],
    ids=str,
)
def test_dtypes(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    _, got = trained(everything, MAKES["adamw"], torch.float32, **options)
    monkeypatch.setattr(BackwardPass, "_note_factors", lambda _: None)
    _, wants = trained(everything, MAKES["adamw"], torch.float32, **options)
    assert [name for name in wants if not equal(got[name], wants[name])] == []


def test_the_step_writes_no_gradient() -> None:
    """They are multiplied when somebody looks, before the step or behind it."""
    model = net()
    megacompile(model, device="cpu", lowering="inductor", resident="all", progress=False)
    optimizer = MAKES["adamw"](list(model.parameters()))
    backward(model, 0)
    params = [p for p in model.parameters() if p.grad is not None]
    nn.utils.clip_grad_norm_(params, 0.05)
    assert all(noted(params))
    optimizer.step()
    assert all(noted(params))
    total = nn.utils.get_total_norm([grad(p) for p in params])
    assert float(total) == pytest.approx(0.05, rel=1e-4)
    assert not any(noted(params))


def test_who_holds_another_name_sees_what_is_written() -> None:
    """Such gradients are multiplied at once, as those that a hook has seen."""
    model = net()
    megacompile(model, device="cpu", lowering="inductor", resident="all", progress=False)
    hooked, held = model.layers[1].up.weight, model.layers[0].up.weight
    seen: list[Tensor] = []
    hooked.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.detach()))
    backward(model, 0)
    names = [seen[0], held.grad.detach()]
    backward(model, 1)
    before = [name.clone() for name in names]
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    for param, name, values in zip((hooked, held), names, before, strict=True):
        assert not equal(name, values)
        assert equal(name, param.grad)


def test_the_gradient_of_a_parameter_on_the_device_for_one_on_the_host() -> None:
    """Whose update has no factor of this kind."""
    found = []
    for looked_at in (False, True):
        model = net()
        megacompile(model, device="cpu", lowering="inductor", resident=30_000, progress=False)
        optimizer = SGD(model.parameters(), lr=0.1)
        backward(model, 0)
        there = residents(model)
        (one, *_), (other, *_) = (
            [
                layer.up.weight
                for i, layer in enumerate(model.layers)
                if (f"layers.{i}" in there) is x
            ]
            for x in (True, False)
        )
        grad(one).mul_(torch.tensor(0.3))
        assert noted([one]) == [True]
        if looked_at:
            grad(one).sum()
        other.grad, one.grad = one.grad, None
        optimizer.step()
        found.append(other.detach().clone())
    assert equal(*found)
