"""What a backward needs in memory that others have too: refused once it is changed.

Each case trains the plain model and the streamed one, and changes a tensor between forward and
backward. Where autograd refuses, so must we; where it does not, gradients are equal.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megacompile import BackwardError, megacompile
from tests.zoo import assert_same

WIDE = torch.randn(8, 8)  # a tensor that the models read without having it


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def table() -> Tensor:
    """A constant of the captured graph."""
    return WIDE


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.second(torch.tanh(self.first(x)))
        return result


Use = Callable[["Net", Tensor, Tensor], Any]


class Net(nn.Module):
    """Two blocks, and a loss in which another tensor is used."""

    scale: Tensor

    def __init__(self, use: Use) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.register_buffer("scale", torch.randn(8, 8))
        self.attribute = torch.randn(8, 8)
        self.use = use

    def two_layers(self, x: Tensor) -> Tensor:
        block: Any = self.blocks[0]
        result: Tensor = block.second(block.first(x).exp())
        return result

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor, other: Tensor) -> Any:
        return self.use(self, x, other)


@dataclasses.dataclass
class Case:
    use: Use
    change: Callable[[Any, Any, Any, Any], object]
    other: Callable[[], Tensor] = lambda: torch.randn(8, 8)


def refill(net: Net, x: Tensor, other: Tensor, out: Any) -> None:
    with torch.no_grad():
        other.copy_(other.flip(0))


def classes() -> Tensor:
    return torch.randint(0, 8, (2, 4))


def outer_parameter() -> Tensor:
    return torch.randn(8, 8, requires_grad=True)


CASES = {  # of the net, the batch, another tensor and, behind the forward, its output
    "a view of the batch": Case(
        lambda n, x, o: n.body(x.view(-1, 8)).square().sum(), lambda n, x, o, y: x.mul_(2)
    ),
    "the buffer that the batch is a row of": Case(
        lambda n, x, o: n.body(x.view(-1, 8)).square().sum(), lambda n, x, o, y: x._base.mul_(2)
    ),
    "indices": Case(lambda n, x, o: n.body(x)[o.view(-1)].sum(), refill, classes),
    "the matrix of a product": Case(lambda n, x, o: (n.body(x) @ o).sum(), refill),
    "chunks": Case(lambda n, x, o: (n.body(x)[:, :4] * o.chunk(2, -1)[1]).sum(), refill),
    "a parameter outside": Case(
        lambda n, x, o: (n.body(x) @ o.t()).square().sum(), refill, outer_parameter
    ),
    "a view of a buffer": Case(
        lambda n, x, o: (n.body(x) @ n.scale.t()).sum(), lambda n, x, o, y: n.scale.mul_(2)
    ),
    "an attribute": Case(
        lambda n, x, o: (n.body(x) @ n.attribute).sum(), lambda n, x, o, y: n.attribute.mul_(2)
    ),
    "a global": Case(lambda n, x, o: (n.body(x) @ WIDE.t()).sum(), lambda n, x, o, y: WIDE.neg_()),
    "a constant": Case(
        lambda n, x, o: (n.body(x) @ table().t()).sum(), lambda n, x, o, y: WIDE.neg_()
    ),
    "an output": Case(
        lambda n, x, o: [n.body(x).exp()] * 2, lambda n, x, o, y: y[1].detach().mul_(2)
    ),
    "a view of an output": Case(
        lambda n, x, o: (lambda z: (z.sum(), z.detach().t()))(n.body(x).exp()),
        lambda n, x, o, y: y[1].mul_(2),
    ),
    "an output that is a view of an input": Case(
        lambda n, x, o: ((n.body(x) @ o.t()).sum(), o.view(-1)), lambda n, x, o, y: y[1].mul_(2)
    ),
}

ACCEPTED = {
    "what is only added": Case(lambda n, x, o: (n.body(x) + o.view(8, 8)).sum(), refill),
    "a logit": Case(
        lambda n, x, o: (lambda z: (z.sum(), z))(n.body(x)),
        lambda n, x, o, y: y[1].detach().mul_(2),
    ),
    "through .data": Case(
        lambda n, x, o: (n.body(x) @ o.t()).sum(), lambda n, x, o, y: o.data.mul_(2)
    ),
    "what a copy is made of": Case(
        lambda n, x, o: (n.body(x) * o.t().flatten().view(8, 8)).sum(), refill
    ),
    "what a nonlinear layer is behind": Case(
        lambda n, x, o: torch.tanh(n.body(x) + o).sum(), refill
    ),
    "the first weight": Case(
        lambda n, x, o: n.two_layers(x).sum(),
        lambda n, x, o, y: n.blocks[0].first.weight.detach().mul_(2),
    ),
    "another tensor": Case(
        lambda n, x, o: (n.body(x) @ o.t()).sum(), lambda n, x, o, y: (n.scale.mul_(2), WIDE.neg_())
    ),
}


def run(net: nn.Module, case: Case) -> type[Exception] | None:
    """Train twice, with a change before each backward; gives the class of the first error."""
    torch.manual_seed(1)
    for _ in range(2):
        x, other = torch.randn(2, 8, 8)[0], case.other()
        out = net(x, other)
        with torch.no_grad():
            case.change(net, x, other, out)
        loss = out[0].sum() if isinstance(out, (tuple, list)) else out
        try:
            loss.backward()
        except RuntimeError as error:
            assert isinstance(error, BackwardError) or "inplace operation" in str(error)
            return type(error)
    return None


def pair(case: Case, **options: Any) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = Net(case.use)
    options = {"lowering": "eager", "activations": "keep"} | options
    return plain, megacompile(copy.deepcopy(plain), device="cpu", progress=False, **options)


def both(names: Iterable[str]) -> list[tuple[str, str]]:
    """Each with saved tensors that are kept, every third one with what is computed again, too."""
    kept = [(name, "keep") for name in names]
    return [*kept, *((name, "recompute") for name, _ in kept[::3])]


@pytest.mark.parametrize(("name", "activations"), both(CASES))
def test_what_autograd_refuses(name: str, activations: str) -> None:
    plain, streamed = pair(CASES[name], activations=activations)
    assert run(plain, CASES[name])
    assert run(streamed, CASES[name]) is BackwardError


@pytest.mark.parametrize(("name", "activations"), both(ACCEPTED))
def test_what_autograd_accepts(name: str, activations: str) -> None:
    plain, streamed = pair(ACCEPTED[name], activations=activations)
    assert not run(plain, ACCEPTED[name]) and not run(streamed, ACCEPTED[name])
    assert_same(plain, streamed)


def test_what_is_large_is_not_copied_for_a_backward() -> None:
    """Autograd accepts the change; a copy of the tensor would be in no plan."""
    case = Case(
        lambda net, x, other: (net.body(x).sum() * other.double().float()).sum(),
        refill,
        lambda: torch.randn(1024, 1024),
    )
    plain, streamed = pair(case)
    assert run(plain, case) is None and run(streamed, case) is BackwardError


def test_a_parameter_that_code_in_eager_mode_has_saved() -> None:
    """A product, a view and a function of autograd save it, a sum does not."""

    class Times(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(weight)
            return x * weight

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            (weight,) = ctx.saved_tensors
            return gradients[0] * weight, None

    uses: dict[str, Callable[[Tensor, Tensor], Any]] = {
        "product": lambda x, weight: x * weight,
        "view": lambda x, weight: x * weight[1:2],
        "function": Times.apply,
        "sum": lambda x, weight: x + weight,
    }
    eagerly = torch.compiler.disable(lambda name, x, weight: uses[name](x, weight))
    for name in uses:

        def use(net: Any, x: Tensor, other: Tensor, name: str = name) -> Any:
            return eagerly(name, net.body(x), net.gain).sum()

        case = Case(use, lambda net, x, other, out: net.gain.detach().mul_(2))
        torch.manual_seed(0)
        plain = Net(case.use)
        plain.gain = nn.Parameter(torch.randn(8))
        streamed = copy.deepcopy(plain)
        megacompile(streamed, device="cpu", progress=False, lowering="eager")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "megacompile")
            assert [bool(run(net, case)) for net in (plain, streamed)] == [name != "sum"] * 2
        if name == "sum":
            assert_same(plain, streamed)


@pytest.mark.thorough
def test_compiled_views_count_versions_of_their_own() -> None:
    def use(net: Net, x: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        hidden = net.blocks[0].first(x.view(-1, 8)).exp()  # type: ignore[operator]
        return hidden.square().sum(), hidden.detach().t()

    for change in (lambda net, x, other, out: out[1].mul_(2), lambda net, x, other, out: x.mul_(2)):
        case = Case(use, change)
        _, streamed = pair(case, lowering="inductor")
        assert run(streamed, case) is BackwardError


def test_the_same_backward_twice() -> None:
    case = CASES["the matrix of a product"]
    for net, error in zip(pair(case), (RuntimeError, BackwardError), strict=True):
        other = torch.randn(8, 8)
        loss = net(torch.randn(8, 8), other)
        loss.backward(retain_graph=True)
        other.mul_(2)
        with pytest.raises(error, match="in.?place"):
            loss.backward()


def test_what_was_copied_is_right() -> None:
    """The forward changes a buffer, and works with the new value. A second one changes it again;
    the first one's backward has the value that it had (where autograd refuses)."""

    def use(net: Net, x: Tensor, other: Tensor) -> Tensor:
        net.scale.copy_(other)  # a cache
        result: Tensor = (net.body(x) @ net.scale.t()).sum()
        return result

    plain, streamed = pair(Case(use, refill))
    batches = [(torch.randn(8, 8), torch.randn(8, 8)) for _ in range(3)]
    for batch in batches:
        plain(*batch).backward()
    for loss in [streamed(*batch) for batch in batches]:
        loss.backward()
    assert_same(plain, streamed)


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_a_later_layer_changes_a_buffer(activations: str) -> None:
    """What the backward needs of it is copied ahead of that, or refused as autograd refuses it."""

    def use(net: Net, x: Tensor, other: Tensor) -> Tensor:
        scale = net.scale.clone() if len(other) > 1 else net.scale
        x = net.blocks[1](net.blocks[0](net.blocks[0](x) @ scale.t()))
        with torch.no_grad():
            net.scale.mul_(0.5)
        return x.sum()

    plain, streamed = pair(Case(use, refill), activations=activations)
    x = torch.randn(8, 8)
    plain(x, torch.ones(2)).backward()
    try:
        streamed(x, torch.ones(1)).backward()
    except BackwardError:
        assert activations == "keep"
    else:
        assert_same(plain, streamed)


def test_statistics_change_in_every_forward() -> None:
    case = Case(lambda net, x, other: net.get_submodule("norm")(net.body(x)).square().sum(), refill)
    plain = Net(case.use)
    plain.norm = nn.BatchNorm1d(8)
    streamed = megacompile(copy.deepcopy(plain), device="cpu", lowering="eager", progress=False)
    x = torch.randn(3, 8, 8)
    for net in (plain, streamed):
        losses = [net(each, each) for each in x]
        for loss in losses:
            loss.backward()
    assert_same(plain, streamed)


def test_nothing_holds_an_output() -> None:
    """Its node would: the saved values are in its memory, and the node has them."""
    _, streamed = pair(CASES["an output"])
    gc.disable()
    try:
        out = streamed(torch.randn(8, 8), torch.randn(8, 8))
        gone = weakref.ref(out[0].grad_fn)
        del out
        assert gone() is None
    finally:
        gc.enable()
