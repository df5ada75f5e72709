"""`p.grad`: whose memory it is, who adds to it when, and which hooks see it.

Each case is run by the plain model and by the megacompiled one, bit by bit. What loops do to
gradients between backwards is drawn in `test_training.py`.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megacompile import explain
from tests import inside
from tests.equality.nets import Applies
from tests.zoo import Tower, assert_same, equal, twins


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(self.norm(x))


class Broken(Net):
    """With a graph break between the layers, so that there are two captured graphs."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.layers[0](x))
        x = torch.relu(self.layers[1](x))
        torch._dynamo.graph_break()
        bias = self.layers[0].get_parameter("bias")  # which both graphs use
        x = torch.relu(self.layers[2](x)) + bias
        return self.head(self.norm(x))


def inputs(seed: int = 0) -> Tensor:
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(seed))


def pair(kind: type[Net] = Net) -> tuple[Any, Any]:
    torch.manual_seed(0)
    return twins(kind(), resident=0)


def l2(model: Any, x: Tensor) -> Tensor:
    penalty: Any = sum(0.01 * p.square().sum() for p in model.parameters())
    return model(x).square().mean() + penalty


def twice(model: Any, x: Tensor) -> Tensor:
    return model(x).mean() - 2 * model(x + 1).square().mean()


def test_hooks_run_layer_by_layer_from_the_last_one() -> None:
    """Of parameters that are used outside of the model, or twice, too."""
    both = pair()
    order: list[list[str]] = [[], []]
    for model, seen in zip(both, order, strict=True):
        for name, param in model.named_parameters():
            note = functools.partial(lambda seen, name, _: seen.append(name), seen, name)
            param.register_post_accumulate_grad_hook(note)
        for loss in (twice, l2):
            loss(model, inputs()).backward()
    assert_same(*both)
    assert sorted(order[0]) == sorted(order[1])
    plain, ours = ([name for name in seen if "layers" in name][:6] for seen in order)
    assert plain == ours


def test_a_sparse_gradient_is_for_the_optimizers_own_step() -> None:
    torch.manual_seed(0)
    both = twins(Net(), lowering="inductor")
    for model in both:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.head.weight.grad = torch.eye(4, 8).to_sparse()
        optimizer.step()
        optimizer.zero_grad()
    assert_same(*both)


class Inner(Net):
    """Its forward takes gradients of its own parameters."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = super().forward(x)
        return hidden * norm_of_inner(hidden, self.head.weight)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def norm_of_inner(hidden: Tensor, weight: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(hidden.square().mean(), [weight], retain_graph=True)
    return gradient.norm()


class Looks(Net):
    """Its forward reads `p.grad`, and freezes a layer in the third call."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        hidden = super().forward(x)
        self.calls += 1
        return hidden * self.look()

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
        assert_same(plain, ours)


def buffers(model: Any) -> list[Tensor]:
    return [g for bucket in inside.buckets(model).values() for g in bucket.grads.values()]


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
    assert_same(plain, ours)


class Given(Net):
    def forward(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        hidden = super().forward(x)
        return hidden if weight is None else hidden @ weight


@pytest.mark.parametrize("both_are_given", [False, True])
def test_a_parameter_that_a_call_is_given_too(both_are_given: bool) -> None:
    """In the backward of two calls; one reads it, and the other one as well."""
    plain, ours = pair(Given)
    for model in (plain, ours):
        weight = model.head.weight
        first = model(inputs(), weight) if both_are_given else model(inputs())
        (first.sum() + model(inputs(1), weight).square().sum()).backward()
    for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_what_was_accumulated_moves_along_where_the_user_keeps_another_gradient() -> None:
    """New memory for a bucket's gradients: that of one of them is the user's now."""
    both, kept = pair(), []
    for model in both:
        model(inputs()).sum().backward()
        kept.append(model.head.bias.grad)
        model.head.bias.grad = None
        model(inputs(1)).square().sum().backward()
    assert equal(*kept)
    for a, b in zip(*(model.parameters() for model in both), strict=True):
        assert equal(a.grad, b.grad)


def wide(layers: int = 3, width: int = 16) -> Tower:
    """Matrices alone: nobody else has the memory of their gradients."""
    made = (nn.Linear(width, width, bias=False) for _ in range(layers))
    return Tower(made, lambda layer, x: x + layer(x).relu())


X = torch.ones(4, 16)


def test_gradients_of_residents_are_what_the_backward_has_made() -> None:
    """Nothing is copied; they are there from the backward to the next forward."""
    _, model = twins(wide(), resident="all")
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


def test_a_forward_that_finds_gradients_has_a_plan_that_counts_them() -> None:
    """Fewer buckets live on the device then, where it takes the memory."""
    x = torch.ones(64, 64)
    _, probe = twins(wide(6, 64), resident="all", activations="keep")
    needed = []
    for _ in range(2):  # the second one adds
        probe(x).backward()
        needed.append(explain(probe).device.needed_bytes)
    least, most = needed
    assert least + sum(g.nbytes for g in buffers(probe)) <= most
    budget = (3 * least + most) // 4
    plain, model = twins(wide(6, 64), gpu_memory=budget)
    plain(x).backward()
    plain(x).backward()
    model(x).backward()
    before = inside.residents(model)
    assert len(before) == 6
    model.zero_grad()
    model(x).backward()
    with torch.no_grad():
        model(x)
    model.zero_grad()
    model(x).backward()
    assert inside.residents(model) == before, "a loop without micro-batches stays as it is"
    model(x).backward()
    assert inside.residents(model) < before
    assert explain(model).device.needed_bytes <= budget
    assert_same(plain, model)


def test_a_gradient_is_the_memory_of_one_parameter_alone() -> None:
    """Of two, and of an input, whose gradients are one tensor."""
    params = {name: nn.Parameter(torch.ones(4, 16)) for name in ("a", "b")}
    plain, model = twins(Applies(lambda m, x: x + m.a + m.b, **params), resident="all")
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
