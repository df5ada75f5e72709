"""Gradients that captured graphs share with others: autograd adds and calls hooks, in its order.

Each case is run by the plain model and by the megacompiled one, bit by bit.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.optim
from torch import Tensor, distributed, nn
from torch.nn import functional

from megacompile import compat, megacompile
from megacompile.errors import BackwardError
from tests import inside
from tests.draws import pairwise
from tests.zoo import equal


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        hidden: Tensor = self.head(self.norm(x))
        return hidden


class Broken(Net):
    """With a graph break between the layers, so that there are two captured graphs."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.layers[0](x))
        x = torch.relu(self.layers[1](x))
        torch._dynamo.graph_break()
        bias = self.layers[0].get_parameter("bias")  # which both graphs use
        x = torch.relu(self.layers[2](x)) + bias
        hidden: Tensor = self.head(self.norm(x))
        return hidden


class Eager(Net):
    """A part of it is never captured."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        x = uncaptured(self.norm(x), self.head.weight, self.layers[1].bias)
        hidden: Tensor = self.head(x)
        return hidden


@torch.compiler.disable  # type: ignore[untyped-decorator]
def uncaptured(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x + functional.linear(x, weight).mean() * bias


def inputs(seed: int = 0) -> Tensor:
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(seed))


def pair(kind: type[Net] = Net, device: str = "cpu") -> tuple[Net, Net]:
    torch.manual_seed(0)
    plain = kind().to(device)
    return plain, megacompile(copy.deepcopy(plain), device=device, lowering="eager", resident=0)


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {
        name: None if param.grad is None else param.grad.clone()
        for name, param in model.named_parameters()
    }


def assert_same(plain: nn.Module, ours: nn.Module) -> None:
    expected, got = gradients(plain), gradients(ours)
    assert expected.keys() == got.keys()
    for name, gradient in expected.items():
        if gradient is None:
            assert got[name] is None, name
        else:
            found = got[name]
            assert found is not None, name
            if gradient.device == found.device:
                assert equal(gradient, found), name
            else:  # penalties and updates are the host's
                assert torch.allclose(gradient.cpu(), found, rtol=1e-4, atol=1e-6), name


# --- a parameter that the loss uses outside of the model


def l2(model: Any, x: Tensor) -> Tensor:
    penalty: Any = sum(0.01 * p.square().sum() for p in model.parameters())
    loss: Tensor = model(x).square().mean() + penalty.to(x.device)
    return loss


def l2_first(model: Any, x: Tensor) -> Tensor:
    penalty: Any = sum(0.01 * p.square().sum() for p in model.parameters())
    loss: Tensor = penalty.to(x.device) + model(x).square().mean()
    return loss


def head_outside(model: Any, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean() + model.head(x).sum()
    return loss


def tied_outside(model: Any, x: Tensor) -> Tensor:
    loss: Tensor = functional.linear(model(x), model.head.weight.t()).square().mean()
    return loss


def alias(model: Any, x: Tensor) -> Tensor:
    """An elastic penalty over a view that nobody registered."""
    flat = model.layers[1].weight.view(-1)[:20]
    loss: Tensor = model(x).mean() + (flat - 1).abs().sum().to(x.device)
    return loss


def twice(model: Any, x: Tensor) -> Tensor:
    loss: Tensor = model(x).mean() - 2 * model(x + 1).square().mean()
    return loss


def twice_and_l2(model: Any, x: Tensor) -> Tensor:
    return twice(model, x) + l2(model, x)


LOSSES = [l2, l2_first, head_outside, tied_outside, alias, twice, twice_and_l2]


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [Net, Broken, Eager])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_parameter_that_is_used_outside_of_the_model_too(
    loss: Callable[[Any, Tensor], Tensor], kind: type[Net], device: str
) -> None:
    """Alone, accumulated, behind zero_grad() of both kinds, and stepped."""
    if device == "cuda" and (loss in (head_outside, tied_outside) or not torch.cuda.is_available()):
        pytest.skip("a head called on its own computes on the host")
    plain, ours = pair(kind, device)
    both = (plain, ours)
    steps = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in both]
    for k, keep in enumerate([None, True, True, False, None]):
        for model, optimizer in zip(both, steps, strict=True):
            if keep is not True:
                optimizer.zero_grad(set_to_none=keep is None)
            loss(model, inputs(k).to(device)).backward()
            if k % 2:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
        assert_same(plain, ours)


def test_the_sum_lies_in_the_bucket() -> None:
    """So that the update finds it beside its neighbours."""
    _, ours = pair()
    l2(ours, inputs()).backward()
    machine: Any = inside.machine(ours)
    for bucket in machine.buckets.values():
        for i, param in enumerate(bucket.params):
            assert param.grad.data_ptr() == bucket.grads[i].data_ptr()


def test_no_copy_where_nobody_else_is() -> None:
    _, ours = pair()
    ours(inputs()).mean().backward()
    machine: Any = inside.machine(ours)
    buckets = machine.buckets.values()
    first = [gradient.data_ptr() for bucket in buckets for gradient in bucket.grads.values()]
    assert first == [p.grad.data_ptr() for bucket in buckets for p in bucket.params]
    held = [p.grad for p in ours.parameters()]
    ours(inputs(1)).mean().backward()
    assert all(p.grad is before for p, before in zip(ours.parameters(), held, strict=True))


# --- hooks


def register_on_tensor(param: nn.Parameter, hook: Callable[..., None]) -> Any:
    return param.register_hook(lambda gradient: hook())


def register_behind(param: nn.Parameter, hook: Callable[..., None]) -> Any:
    return param.register_post_accumulate_grad_hook(lambda _: hook())


def register_on_node(param: nn.Parameter, hook: Callable[..., None]) -> Any:
    node: Any = compat.accumulator_of(param)
    node.register_hook(lambda *_: hook())
    return node


def register_before_node(param: nn.Parameter, hook: Callable[..., None]) -> Any:
    node: Any = compat.accumulator_of(param)
    node.register_prehook(lambda gradients: hook())
    return node


REGISTER = [register_on_tensor, register_behind, register_on_node, register_before_node]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("register", "kind", "loss"), pairwise(REGISTER, [Net, Broken, Eager], [twice, l2])
)
def test_hooks_see_what_they_see_in_the_plain_model(
    register: Callable[[nn.Parameter, Callable[..., None]], Any],
    kind: type[Net],
    loss: Callable[[Any, Tensor], Tensor],
    device: str,
) -> None:
    """Every `p.grad` at every call of a hook, in three backwards without zero_grad()."""
    seen: list[dict[str, list[Tensor | None]]] = []
    for model in pair(kind, device):
        calls: dict[str, list[Tensor | None]] = {}
        keep = []
        for name, param in model.named_parameters():
            found = calls.setdefault(name, [])

            def hook(param: nn.Parameter = param, found: Any = found) -> None:
                found.append(None if param.grad is None else param.grad.clone())

            keep.append(register(param, hook))
        for k in range(3):
            loss(model, inputs(k).to(device)).backward()
        seen.append(calls)
    plain, ours = seen
    for name, expected in plain.items():
        assert len(expected) == len(ours[name]), name
        for a, b in zip(expected, ours[name], strict=True):
            assert (a is None) == (b is None), name
            if a is not None and b is not None:
                same = (
                    equal(a, b) if a.device == b.device else torch.allclose(a.cpu(), b, 1e-4, 1e-6)
                )
                assert same, name


@pytest.mark.parametrize("register", [register_behind, register_on_node])
def test_hooks_run_layer_by_layer_from_the_last_one(
    register: Callable[[nn.Parameter, Callable[..., None]], Any],
) -> None:
    """And see the gradients of what ran before them, and of nothing else."""
    seen: list[list[Any]] = []
    for model in pair():
        named = dict(model.layers.named_parameters()) | dict(model.head.named_parameters())
        calls: list[Any] = []
        keep = []
        for name, param in named.items():

            def hook(name: str = name, named: Any = named, calls: Any = calls) -> None:
                calls.append((name, [n for n, p in named.items() if p.grad is not None]))

            keep.append(register(param, hook))
        model(inputs()).mean().backward()
        seen.append(calls)
    assert len(seen[0]) == 8
    assert seen[0] == seen[1]


def test_a_main_gradient_that_a_hook_accumulates() -> None:
    """As Megatron and Apex do: the hook adds `p.grad` to a buffer of its own and drops it."""
    seen = []
    for model in pair():
        main = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        keep = []
        for name, param in model.named_parameters():

            def hook(param: Any = param, main: Tensor = main[name]) -> None:
                main.add_(param.grad.data)
                param.grad = None

            keep.append(register_on_node(param, hook))
        for k in range(3):
            twice(model, inputs(k)).backward()
        assert all(p.grad is None for p in model.parameters())
        seen.append(main)
    assert all(equal(seen[0][name], seen[1][name]) for name in seen[0])


def test_optimizers_that_step_in_hooks() -> None:
    both = pair()
    for model in both:
        in_backward: Any = distributed.optim._apply_optimizer_in_backward  # type: ignore[attr-defined]
        in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
        for k in range(3):
            twice(model, inputs(k)).backward()
            assert all(p.grad is None for p in model.parameters())
    for p, q in zip(both[0].parameters(), both[1].parameters(), strict=True):
        assert equal(p.detach(), q.detach())


# --- autograd in the forward


class Inner(Net):
    """Its forward takes gradients of its own parameters."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = super().forward(x)
        result: Tensor = hidden * norm_of_inner(hidden, self.head.weight)
        return result


@torch.compiler.disable  # type: ignore[untyped-decorator]
def norm_of_inner(hidden: Tensor, weight: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(hidden.square().mean(), [weight], retain_graph=True)
    norm: Tensor = gradient.norm()
    return norm


def test_gradients_of_parameters_inside_of_the_forward() -> None:
    plain, ours = pair(Inner)
    for k in range(3):
        for model in (plain, ours):
            model(inputs(k)).square().mean().backward()
        assert_same(plain, ours)


class Looks(Net):
    """Its forward reads `p.grad`, and freezes a layer in the third call."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        hidden = super().forward(x)
        self.calls += 1
        result: Tensor = hidden * self.look()
        return result

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def look(self) -> Tensor:
        if self.calls == 3:
            self.layers[1].weight.requires_grad_(False)
        gradient = self.head.weight.grad
        return torch.ones(()) if gradient is None else gradient.norm()


class LooksCaptured(Looks):
    """The same where Dynamo captures it."""

    def look(self) -> Tensor:
        gradient = self.head.weight.grad
        return torch.ones(()) if gradient is None else gradient.norm()


def test_a_captured_forward_sees_gradients() -> None:
    plain, ours = pair(LooksCaptured)
    for k in range(5):
        for model in (plain, ours):
            model(inputs(k)).square().mean().backward()
            if k == 3:
                model.zero_grad()
        assert_same(plain, ours)


def test_what_the_forward_sees_and_sets_of_a_parameter() -> None:
    plain, ours = pair(Looks)
    for k in range(5):
        for model in (plain, ours):
            model(inputs(k)).square().mean().backward()
        assert_same(plain, ours)
    assert not ours.get_parameter("layers.1.weight").requires_grad


# --- threads


def test_backwards_of_several_threads() -> None:
    plain, ours = pair()
    count = 8
    for model in (plain, ours):
        model(inputs()).mean().backward()  # capture in one thread
        model.zero_grad()
    for model in (plain, ours):
        losses = [model(inputs(k)).square().sum() for k in range(count)]
        if model is plain:
            for loss in losses:
                loss.backward()
            continue
        threads = [threading.Thread(target=loss.backward) for loss in losses]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for (name, p), q in zip(plain.named_parameters(), ours.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        assert torch.allclose(p.grad, q.grad, rtol=1e-4, atol=1e-6), name  # in any order


# --- the update in the backward


@pytest.mark.parametrize("loss", [l2, l2_first, head_outside, tied_outside, alias])
def test_an_update_in_the_backward_refuses_what_others_use(
    loss: Callable[[Any, Tensor], Tensor],
) -> None:
    """Before anything is updated, with the parameter's name; and goes on afterwards."""
    torch.manual_seed(0)
    plain = Net()
    ours = copy.deepcopy(plain)
    optimizer = torch.optim.AdamW(ours.parameters(), lr=0.01)
    megacompile(ours, optimizer=optimizer, device="cpu")
    why = "is used outside of the model too" if loss is not head_outside else "in several parts"
    with pytest.raises(BackwardError, match=rf"{why} .* optimizer="):
        loss(ours, inputs()).backward()
    for p, q in zip(plain.parameters(), ours.parameters(), strict=True):
        assert equal(p.detach(), q.detach())
    ours.zero_grad()
    ours(inputs()).square().mean().backward()
    optimizer.step()
    reference = torch.optim.AdamW(plain.parameters(), lr=0.01)
    plain(inputs()).square().mean().backward()
    reference.step()
    for p, q in zip(plain.parameters(), ours.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-5, atol=1e-7)


def test_frozen_weights_that_others_use_are_no_hindrance() -> None:
    torch.manual_seed(0)
    ours = Net()
    ours.head.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in ours.parameters() if p.requires_grad], lr=0.01)
    megacompile(ours, optimizer=optimizer, device="cpu")
    head_outside(ours, inputs()).backward()
    optimizer.step()
