"""`p.grad`: whose memory it is, who adds to it when, and which hooks see it.

Each case is run by the plain model and by the megacompiled one, bit by bit. What loops do to
gradients between backwards is drawn in `test_training.py`.
"""

from __future__ import annotations

import copy
import functools
import weakref
from typing import Any

import pytest
import torch
import torch.distributed.optim
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from megacompile import megacompile
from tests import inside
from tests.interrupts import traced
from tests.loops import in_threads
from tests.stateful.late import AtCall, failing, may_fail
from tests.zoo import assert_same, equal, twins


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
        x = may_fail(torch.relu(self.layers[1](x)))
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


def pair(kind: type[Net] = Net, device: str = "cpu", **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    plain = kind().to(device)
    options = {"resident": 0, **options}
    return plain, megacompile(copy.deepcopy(plain), device=device, lowering="eager", **options)


def assert_gradients(plain: Any, ours: Any) -> None:
    """The same; but for rounding where penalties and updates are the host's."""
    for (name, p), q in zip(plain.named_parameters(), ours.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None and p.grad.device != q.grad.device:
            assert torch.allclose(p.grad.cpu(), q.grad, rtol=1e-4, atol=1e-6), name
        else:
            assert equal(p.grad, q.grad), name


# --- losses


def l2(model: Any, x: Tensor) -> Tensor:
    penalty: Any = sum(0.01 * p.square().sum() for p in model.parameters())
    loss: Tensor = model(x).square().mean() + penalty.to(x.device)
    return loss


def twice(model: Any, x: Tensor) -> Tensor:
    loss: Tensor = model(x).mean() - 2 * model(x + 1).square().mean()
    return loss


def reentrant(model: Any, x: Tensor) -> Tensor:
    """A backward inside of a backward."""
    x = x.requires_grad_()
    out: Any = checkpoint(model, x, use_reentrant=True)
    loss: Tensor = out.square().mean() + model(x).mean()
    return loss


@pytest.mark.parametrize(
    ("kind", "device"),
    [(Net, "cpu"), (Eager, "cpu"), pytest.param(Net, "cuda", marks=pytest.mark.gpu)],
)
def test_a_parameter_that_is_used_outside_of_the_model_too(kind: type[Net], device: str) -> None:
    """Alone, accumulated, behind zero_grad() of both kinds, and stepped; in the order of layers."""
    both = pair(kind, device)
    order: list[list[str]] = [[], []]
    for model, seen in zip(both, order, strict=True):
        for name, param in model.named_parameters():
            note = functools.partial(lambda seen, name, _: seen.append(name), seen, name)
            param.register_post_accumulate_grad_hook(note)
    steps = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in both]
    for loss in (twice, l2):
        for k, keep in enumerate([None, True, False, None]):
            for model, optimizer in zip(both, steps, strict=True):
                if keep is not True:
                    optimizer.zero_grad(set_to_none=keep is None)
                loss(model, inputs(k).to(device)).backward()
                if k % 2:
                    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                    optimizer.step()
            assert_gradients(*both)
    assert sorted(order[0]) == sorted(order[1])
    layers = [[name for name in seen if "layers" in name][:6] for seen in order]
    if kind is Net and device == "cpu":  # with a GPU two threads run nodes of the backward
        assert layers[0] == layers[1], "layer by layer, from the last one"


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


class LooksCaptured(Net):
    """The same where Dynamo captures it."""

    def forward(self, x: Tensor) -> Tensor:
        gradient = self.head.weight.grad
        factor = torch.ones(()) if gradient is None else gradient.norm()
        return super().forward(x) * factor


@pytest.mark.parametrize("kind", [Inner, Looks, LooksCaptured])
@pytest.mark.filterwarnings("ignore:megacompile")
def test_a_forward_that_sees_gradients(kind: type[Net]) -> None:
    plain, ours = pair(kind)
    for k in range(5):
        for model in (plain, ours):
            model(inputs(k)).square().mean().backward()
            if k == 3:
                model.zero_grad()
        assert_gradients(plain, ours)


# --- memory


def buffers(model: Any) -> list[Tensor]:
    return [g for bucket in inside.buckets(model).values() for g in bucket.grads.values()]


def test_gradients_lie_in_the_buckets() -> None:
    """The sum of all uses too; the next backward adds there, and memory is used again."""
    _, ours = pair()
    twice(ours, inputs()).backward()
    places = {g.data_ptr() for g in buffers(ours)}
    assert places == {p.grad.data_ptr() for p in ours.parameters()}
    held = [p.grad for p in ours.parameters()]
    l2(ours, inputs(1)).backward()
    assert all(p.grad is before for p, before in zip(ours.parameters(), held, strict=True))
    before = [g.clone() for g in held]
    ours.zero_grad()
    l2(ours, inputs(2)).backward()
    assert all(map(equal, held, before)), "what somebody holds is not overwritten"
    assert places.isdisjoint(p.grad.data_ptr() for p in ours.parameters())
    del held
    places = {g.data_ptr() for g in buffers(ours)}
    for _ in range(2):
        ours.zero_grad()
        l2(ours, inputs(2)).backward()
        assert {g.data_ptr() for g in buffers(ours)} == places


def test_tensors_of_the_user_are_added_to() -> None:
    """Some have other strides; a neighbour without a gradient gets one in the bucket."""
    plain, ours = pair(Broken)
    for model in (plain, ours):
        given = torch.arange(64.0).reshape(8, 8).t()
        model.layers[1].weight.grad = given
        for k in range(2):
            model(inputs(k)).square().mean().backward()
            assert model.layers[1].weight.grad is given
        kept = model.layers[1].bias.grad
        model.layers[0].weight.grad = None
        # parameters are taken over again: what there is counts as the user's own
        model.head.weight = nn.Parameter(model.head.weight.detach() * 2)
        model(inputs(4)).square().mean().backward()
        assert model.layers[1].bias.grad is kept
    assert_gradients(plain, ours)


def test_a_backward_that_fails_leaves_what_was_accumulated() -> None:
    """Of the graph that has run; and what it took over is given back."""
    both = pair(Broken)
    for k, loss in enumerate([twice, reentrant]):
        for to_none in (True, False):
            for model in both:
                model.zero_grad(set_to_none=to_none)
                held = model.layers[1].weight.grad
                total = loss(model, inputs(k))
                with failing():
                    total.backward()
                assert model.layers[1].weight.grad is held
            assert_gradients(*both)
            for model in both:
                loss(model, inputs(k)).backward()
            assert_gradients(*both)


def test_backwards_of_several_threads() -> None:
    plain, ours = pair(Broken)
    for model in (plain, ours):
        losses = [model(inputs(k)).square().sum() for k in range(6)]
        if model is plain:
            for loss in losses:
                loss.backward()
        else:
            in_threads([loss.backward for loss in losses])
    for (name, p), q in zip(plain.named_parameters(), ours.named_parameters(), strict=True):
        assert torch.allclose(p.grad, q[1].grad, rtol=1e-4, atol=1e-6), name  # in any order


# --- gradients of residents


class Wide(nn.Module):
    """Matrices alone: nobody else has the memory of their gradients."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).relu()
        return x.square().mean()


X = torch.ones(4, 16)


def test_gradients_of_residents_are_what_the_backward_has_made() -> None:
    """Nothing is copied; they are there from the backward to the next forward."""
    _, model = twins(Wide(), resident="all")
    loss = model(X)
    assert not buffers(model)
    loss.backward()
    assert len(buffers(model)) == 3
    for param, gradient in zip(model.parameters(), buffers(model), strict=True):
        assert param.grad.data_ptr() == gradient.data_ptr()
    del param, gradient
    there = [weakref.ref(g.untyped_storage()) for g in buffers(model)]
    model.zero_grad()
    model(X)
    assert not buffers(model) and not any(storage() for storage in there)


class Twice(nn.Module):
    """Two parameters whose gradients are one tensor, which is the gradient of an input too."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.ones(4, 16)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.a + self.b


def test_a_gradient_is_the_memory_of_one_parameter_alone() -> None:
    plain, model = twins(Twice(), resident="all")
    tangent = torch.full((4, 16), 3.0)
    found = []
    for each in (plain, model):
        x = torch.ones(4, 16, requires_grad=True)
        each(x).backward(tangent)
        each.a.grad.mul_(2.0)
        found += [each.a.grad, each.b.grad, x.grad]
    assert all(map(equal, found[:3], found[3:]))
    assert torch.equal(tangent, torch.full((4, 16), 3.0))
    assert len({g.data_ptr() for g in found[3:]}) == 3


def test_a_backward_that_runs_out_of_memory_leaves_none_behind() -> None:
    """They would be there while the step is made again, by a plan that needs less."""
    plain, model = twins(Wide(4), gpu_memory=2**20)
    for each in (plain, model):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for k in range(2):
            loss = each(X)
            if each is model and k:
                ends = AtCall("backward", 7, torch.OutOfMemoryError("planted: out of memory"))
                with pytest.warns(UserWarning, match="ran out"), traced(ends):
                    loss.backward()
                assert ends.left == 0
            else:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same(plain, model)
